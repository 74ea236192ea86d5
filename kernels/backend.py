"""The border between the ops and the kernels of one kind of device: what `ops.backend` gives.

A backend is a package that has the names of `Backend`: `kernels/cpu`, `kernels/triton`. What all of them promise:

- Tensors are on the backend's device, arrays are numpy's, on the host.
- The storage dtype is fp32, bf16 or fp16. A forward function computes in fp32 and rounds each result once, to nearest
  even, to the dtype that its docstring gives.
- The bits of a row of a forward function's result depend on that row's arguments (for attention: its sequence's keys
  and values, too) and on weights alone. Its tree is a function of the model's shape, dtype and device; `trees` names
  it, and the numerics contract holds the name.
- A backward function gives the same bits from run to run, but they may depend on the batch.
- No function writes into an argument unless its docstring says so, and none records anything for autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .layout import PagedLayout


class NumericsError(RuntimeError):
    """The promise can't be kept on this machine, or two sides made different promises."""


class Scores(NamedTuple):
    """A token's log-prob and its distribution's statistics, f64 [R] each, in nats. argmax: the most likely token's id.

    argmax is -1 where the backend did not look for it: on CPUs, for a token drawn by chance. All are NaN where a row's
    logits aren't finite.
    """

    logprob: Tensor
    entropy: Tensor
    logsumexp: Tensor
    argmax: Tensor


class Sampled(NamedTuple):
    """Tokens int64 [R], their scores, and thresholds fp32 [R]: a lower tempered logit is outside the distribution."""

    tokens: Tensor
    scores: Scores
    thresholds: Tensor


UNARY: dict[str, Callable[[Tensor], Tensor]] = {  # what `Backend.unary` computes; no form here cancels digits
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "gelu": lambda x: 0.5 * x * torch.erfc(-0.7071067811865476 * x),
    "gelu_pytorch_tanh": lambda x: x * torch.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x)),
    "tanh": torch.tanh,
    "exp": torch.exp,
    "log": torch.log,
    "softplus": F.softplus,
    "cos": torch.cos,
    "sin": torch.sin,
}


class ExpertPlan(NamedTuple):
    """The order in which (token, slot) pairs meet their experts: rows sorted by expert, a tie by the pair's number.

    pairs [P]: the pair, token * k + slot, of each row; places [T, k]: each token's rows, ascending, and so their
    experts; ends [E]: where each expert's rows end. Integers of the backend's choice, on its device.
    """

    pairs: Tensor
    places: Tensor
    ends: Tensor

    @property
    def tokens(self) -> Tensor:
        """The token of each row."""
        return self.pairs // self.places.shape[1]


HeadNorms = tuple[tuple[Tensor, float], tuple[Tensor, float]]  # weight [D] and eps, for q and for k


class ExpertParts(NamedTuple):
    """The weights of a layer's experts, and the router that chooses k of them; see `route` and `packed_experts`."""

    router: Any  # its weight [E, hidden]
    k: int
    normalises: bool
    gate_up: Any
    down: Any
    inner: int


class LayerParts(NamedTuple):
    """The weights and settings of a gated decoder layer of the usual kind; in the storage dtype, as `storage` gives it.

    linears: q, k, v, o, gate, up, down; of each a `pack`ed weight, its features, a bias or None, and what
    `pack_low_rank` gave or None. norms: weight and eps, or None: of the sum after attention, of that after the layer,
    of queries' and of keys' heads. scale, window: see `attention`. experts: in the place of gate, up and down. With
    neither, the layer is computed up to the norm before its MLP.
    """

    linears: list[tuple[Any, int, Any, Any]]
    norms: list[tuple[Any, float] | None]
    activation: str
    scale: float
    window: int
    experts: ExpertParts | None = None

    @property
    def is_half(self) -> bool:
        """True if the MLP is left to its module."""
        return len(self.linears) == 4 and self.experts is None


class DecoderLayers(Protocol):
    """Decoder layers that follow each other, without their modules' calls: the bits of the kernels they stand for."""

    def __init__(self, layers: Sequence[LayerParts]):
        """Note where all is that the layers compute with: the caller keeps it there, and alive."""

    def __call__(
        self,
        x: Tensor,
        normed: Tensor,
        tables: tuple[Tensor, Tensor],
        caches: Sequence[tuple[Tensor, Tensor]],
        layout: PagedLayout,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the last layer's output and its following norm's, if there is one, [rows, hidden] in x's dtype.

        The third is the experts chosen, int64 [rows, layers, k], ascending, if there are experts; 0 in other layers.
        x, normed [rows, hidden]: the residual stream and its norm, in the storage dtype; tables: cos and sin [rows, D];
        caches: keys and values of each layer, where the rows' own go to the layout's slots.
        """


class Backend(Protocol):
    """The kernels for one kind of device; see the module's docstring for what holds for all of them."""

    BLOCK: int
    """The keys of a KV block, which is also attention's block of keys."""
    GRAPHS: bool
    """True if a step's launches can be recorded and replayed."""
    LOGIT_ROWS: int
    """The rows of logits in memory at a time, where a trainer doesn't say."""
    ACTIVATIONS: tuple[str, ...]
    """The activations that `gated_activation` knows, by HF's names (`hidden_act`)."""

    def check_device(self, device: torch.device) -> None:
        """Raise a RuntimeError that says what is missing, unless the kernels can run on the device."""

    def trees(self, device: torch.device) -> dict[str, str]:
        """Return the fields of the numerics contract that these kernels decide."""

    def warm_up(self, dtype: torch.dtype, device: torch.device, experts: bool = False) -> None:
        """Compile what is compiled once per machine for a storage dtype; experts: what mixtures of them need, too."""

    # --- linear

    def pack(self, weight: Tensor, out: Tensor | None = None) -> Tensor:
        """Return a weight [features, depth] in the layout that `linear_packed` reads fastest, in the weight's dtype.

        out: the result of an earlier call for the same shape and dtype; it is overwritten and returned.
        """

    def packed_rows(self, packed: Tensor, rows: Tensor) -> Tensor:
        """Return the rows [*rows.shape, depth] of the weight that `pack` was given; rows int64."""

    def storage(self, tensor: Tensor) -> Any:
        """Return a tensor as `linear_packed` takes it: the same memory, made once per weight."""

    def pack_low_rank(self, down: Tensor, up: Tensor, scale: float, out: Any = None) -> Any:
        """Return scale * up(down(x)), down fp32 [rank, depth] and up fp32 [features, rank], for `linear_packed`.

        out: the result of an earlier call for the same shapes and scale, whose memory may be overwritten.
        """

    def linear_packed(
        self,
        x: Tensor,
        weights: list[tuple[Any, int, Tensor | None]],
        dtype: torch.dtype = torch.float32,
        low_ranks: Sequence[Any] = (),
    ) -> list[Tensor]:
        """Return x @ weight.T + bias, [rows, features] in `dtype`, for each of up to three weights, in one launch.

        x [rows, depth]; weights: (`storage` of a `pack`ed weight, features, bias [features] or None). low_ranks: for
        each weight None, or what `pack_low_rank` gave: both products in fp32, times scale, are added to the rounded
        result, and the sum is rounded.
        """

    def gated_packed(
        self,
        x: Tensor,
        gate: tuple[Any, int, Tensor | None],
        up: tuple[Any, int, Tensor | None],
        name: str,
        dtype: torch.dtype,
    ) -> Tensor:
        """Return `gated_activation` of `linear_packed` of a gate and its up, as it takes them: the same bits.

        Both are rounded to `dtype`, which is the result's, too; `name` is one of ACTIVATIONS.
        """

    def linear_unpacked(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Return x @ weight.T + bias, [rows, features] in `dtype`: the bits of `linear_packed`.

        x [rows, depth]; weight [features, depth] of any strides; bias [features] or None.
        """

    def gradient_product(self, x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return x @ weight.T, [rows, features] in `dtype`, for a backward pass; operands in the weight's dtype."""

    def linear_resume(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        """Add x @ weight.T to `out` fp32 [rows, features], in place, for a backward pass."""

    # --- row-wise ops

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return weight * (x * rstd) in x's dtype, and rstd = 1 / sqrt(mean(x^2) + eps) fp32 [rows]; x [rows, width].

        Source: Zhang & Sennrich, 2019.
        """

    def rms_norm_backward(self, grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of x [rows, width] and weight [width], in their dtypes, from the result's."""

    def add_rms_norm(self, x: Tensor, update: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return x + update and its `rms_norm`, [rows, width] in x's dtype, in one launch: the same bits as in two.

        The sum is rounded before it is normed.
        """

    def gated_activation(self, gate: Tensor, up: Tensor, name: str) -> Tensor:
        """Return activation(gate) * up in gate's dtype, all [rows, width]; `name` is one of ACTIVATIONS."""

    def gated_halves(self, both: Tensor, name: str) -> Tensor:
        """Return `gated_activation` of the halves, gate and up, of each row of both [rows, 2 width]: [rows, width]."""

    def gated_activation_backward(self, grad: Tensor, gate: Tensor, up: Tensor, name: str) -> tuple[Tensor, Tensor]:
        """Return the gradients of gate and up [rows, width], in their dtypes, from the result's."""

    def rotary_tables(self, positions: Tensor, inv_freq: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
        """Return cos and sin, fp32 [T, 2 F], of the fp32 products positions int64 [T] * inv_freq fp32 [F], by fp64."""

    # --- functions that a model's own code calls

    def unary(self, x: Tensor, name: str) -> Tensor:
        """Return a function of each element of x, in x's shape and dtype; `name` is one of UNARY."""

    def softmax(self, x: Tensor) -> Tensor:
        """Return the softmax of each row of x, fp32 [rows, width]; the sum is one in fp64."""

    def row_sums(self, x: Tensor, divisor: int) -> Tensor:
        """Return the sum, in fp64, of each row of x [rows, width] over `divisor`, fp32 [rows]."""

    def top_k(self, x: Tensor, k: int) -> Tensor:
        """Return the columns of the k largest of each row of x, int64 [rows, k], largest first; ties: the lower one."""

    def route(self, logits: Tensor, k: int, normalises: bool) -> tuple[Tensor, Tensor]:
        """Return the experts of each row of logits fp32 [T, E], int64 [T, k], ascending, and their weights fp32 [T, k].

        They are the `top_k` of the `softmax`, and its values, over their `row_sums` if `normalises`.
        """

    # --- experts

    def pack_experts(self, weight: Tensor, out: Tensor | None = None) -> Tensor:
        """Return weights [E, features, depth] in the layout that `packed_experts` reads fastest; see `pack`."""

    def packed_experts(
        self, x: Tensor, gate_up: Any, down: Any, inner: int, ids: Tensor, weights: Tensor, activation: str
    ) -> Tensor:
        """Return `combine` of `grouped`, `gated_halves` and `grouped` again: each token's experts, [T, H] in x's dtype.

        x [T, H]; gate_up, down: `storage` of what `pack_experts` gave, for 2 inner and H features; ids int64 [T, k];
        weights fp32 [T, k]; activation: one of ACTIVATIONS.
        """

    def plan_experts(self, ids: Tensor, experts: int) -> ExpertPlan:
        """Return the order of the pairs of ids int64 [T, k]. Nothing waits for a GPU; a CPU refuses a wrong id."""

    def grouped(self, x: Tensor, weight: Tensor, plan: ExpertPlan, gather: bool, dtype: torch.dtype) -> Tensor:
        """Return row by row x @ weight[its expert].T, [P, features] in `dtype`, rows as the plan sorts them.

        x [P, depth], or with `gather` [T, depth], from which the plan's tokens are taken; weight [E, features, depth],
        of any strides.
        """

    def grouped_outer(self, x: Tensor, y: Tensor, plan: ExpertPlan, dtype: torch.dtype) -> Tensor:
        """Return for each expert the sum of its rows' outer products, [E, N, K] in `dtype`, for a backward pass.

        x [P, N] and y [P, K], rows as the plan sorts them.
        """

    def combine(self, y: Tensor, weights: Tensor, plan: ExpertPlan, dtype: torch.dtype) -> Tensor:
        """Return for each token the sum of its rows of y [P, width], each times its weight: [T, width] in `dtype`.

        weights fp32 [T, k], by the slots of the plan's ids; the sum is one in fp32 and ascends in expert.
        """

    def combine_backward(self, grad: Tensor, y: Tensor, weights: Tensor, plan: ExpertPlan) -> tuple[Tensor, Tensor]:
        """Return the gradients of y [P, width], in its dtype, and weights fp32 [T, k] from the sum's [T, width]."""

    # --- attention

    def new_kv_cache(
        self, num_blocks: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values of a layer, each [num_blocks, ...] in the backend's own layout, not initialised.

        Raises NotImplementedError for a head_dim that the kernels don't take.
        """

    def tile_tokens(self, group: int) -> int:
        """Return the query tokens that fit the smallest tile; group: query heads per KV head."""

    def work_items(self, lengths: Sequence[int], group: int, item_tokens: int | None = None) -> np.ndarray:
        """Return rows that begin (first token, tokens, sequence), int32 [n, ...]: query tokens that share a tile.

        A schedule: it decides no bit. lengths: query tokens of each sequence; group: query heads per KV head;
        item_tokens: the tokens of an item, None fits them to the tiles.
        """

    def share_reads(
        self, items: np.ndarray, lengths: Sequence[int], group: int, block_tables: np.ndarray, starts: np.ndarray
    ) -> np.ndarray:
        """Return `work_items`' items such that neighbours in the batch read once what they share.

        A schedule: it decides no bit. block_tables, starts: of a `PagedLayout`.
        """

    def write_kv(self, k: Tensor, v: Tensor, layout: PagedLayout, k_cache: Tensor, v_cache: Tensor) -> None:
        """Write k and v [T, kv_heads, D], in the cache's dtype, to the layout's slots in the cache, in place."""

    def place_heads(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        norms: HeadNorms | None,
        tables: tuple[Tensor, Tensor],
        layout: PagedLayout,
        cache: tuple[Tensor, Tensor],
    ) -> Tensor:
        """Return q [T, heads, D], normed and turned by tables; write k, treated alike, and v to the cache, in place.

        k, v [T, kv_heads, D]; norms: `rms_norm` of each head of q and of k, or None; tables: cos and sin [T, D]. All
        are of the storage dtype. Each norm, product and sum is rounded: the bits of `rms_norm`, transformers'
        `apply_rotary_pos_emb` and `write_kv`.
        """

    def attention(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, layout: PagedLayout, scale: float, window: int
    ) -> tuple[Tensor, Tensor]:
        """Return causal attention of q [T, heads, D] over the cache, and the log-sum-exp of its scores fp32 [T, heads].

        The first has q's shape, in fp32 (CPU) or q's dtype (Triton): the caller rounds to q's. window: the keys that a
        query sees, itself included; 0 is all.
        """

    def attention_backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        grad: Tensor,
        lengths: Sequence[int],
        scale: float,
        window: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q [T, heads, D], k and v [T, kv_heads, D], in their dtypes, for packed sequences.

        out, lse: what `attention` gave; grad: of the output, [T, heads, D]; lengths: tokens of each sequence, whose sum
        is T.
        """

    @property
    def decoder_layers(self) -> type[DecoderLayers]:
        """The class that computes several layers without their modules' calls."""

    # --- from logits to tokens

    def sample(
        self,
        logits: Tensor,
        temperature: np.ndarray,
        top_k: np.ndarray,
        top_p: np.ndarray,
        min_p: np.ndarray,
        masks: np.ndarray,
        mask_rows: np.ndarray,
        targets: Tensor | np.ndarray,
        seeds: np.ndarray,
        samples: np.ndarray,
        positions: np.ndarray,
    ) -> Sampled:
        """Return a token of each row of fp32 logits [R, V], drawn or given, and its scores.

        The distribution is tempered, filtered (top-k, top-p, min-p, in this order; ties at an edge stay in) and
        renormalised. [R] each: temperature f64 (0: greedy, reported at 1), top_k i64 (0: off), top_p and min_p f64,
        mask_rows i64 (the row's place among `masks` u32 [M, ceil(V / 32)], or -1 for none: bit j % 32 of word j // 32
        allows token j), targets int64, on the host or beside the logits (the token to score, or -1 to draw one), and
        the draw's counters: seeds u64, samples i64, positions i64.
        """
