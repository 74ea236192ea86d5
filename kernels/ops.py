"""The ops that decide a bit, as differentiable functions on tensors of any supported dtype.

This file holds what is common to all backends: autograd, and the log-probs' backward pass, plain tensor code. A backend
(`kernels/cpu`, `kernels/triton`) supplies the kernels, behind the border that `kernels/backend.py` states. Callers
never see which one runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .backend import Sampled as Sampled
from .backend import Scores as Scores
from .dispatch import BACKENDS as BACKENDS
from .dispatch import DTYPES as DTYPES
from .dispatch import backend as backend
from .dispatch import parse_device as parse_device
from .experts import experts as experts
from .functions import route as route
from .layout import LayoutTensors as LayoutTensors
from .layout import PagedLayout as PagedLayout
from .layout import place_tokens as place_tokens
from .layout import to_device as to_device
from .modes import apply, outside_modes
from .packed import PackedWeight as PackedWeight

# --- linear ---------------------------------------------------------------------------------------------------------


def _product(
    x: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None, exact: bool, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return the product of x [rows, depth] and a weight, [rows, features], rounded once to `dtype`."""
    x = x.detach()
    bias = None if bias is None else bias.detach()
    if isinstance(weight, PackedWeight):
        return backend(x.device).linear_packed(x, [(weight.memory, weight.features, bias)], dtype)[0]
    weight = weight.detach()
    if exact:
        return backend(x.device).linear_unpacked(x, weight, bias, dtype)
    wide = torch.float32 if x.device.type == "cpu" else x.dtype
    return F.linear(x.to(wide), weight.to(wide), None if bias is None else bias.to(wide)).to(dtype)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, exact, dtype):
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return _product(x, weight, bias, exact, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight = (t.detach() for t in ctx.saved_tensors)
        grad_x = grad_weight = grad_bias = None
        kernels = backend(x.device)
        if ctx.needs_input_grad[0]:
            grad_x = kernels.gradient_product(grad, weight.t(), x.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = kernels.gradient_product(grad.t(), x.t(), weight.dtype)
        if ctx.has_bias and ctx.needs_input_grad[2]:
            grad_bias = grad.float().sum(0).to(weight.dtype)
        return grad_x, grad_weight, grad_bias, None, None


@outside_modes
def linear(
    x: Tensor,
    weight: Tensor | PackedWeight,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
    exact: bool = True,
) -> Tensor:
    """Return x [..., depth] @ weight[features, depth].T + bias in `dtype` (None: x's): fp32 sums, one rounding.

    exact=False: torch's product, whose bits depend on the batch, for comparisons.
    """
    rows = x.reshape(-1, x.shape[-1])
    if isinstance(weight, PackedWeight):
        out = _product(rows, weight, bias, exact, dtype or x.dtype)
    elif weight.shape[1] != x.shape[-1]:
        raise ValueError(f"linear: x {list(x.shape)} doesn't fit a weight {list(weight.shape)}")
    else:
        out = apply(_Linear, rows, weight, bias, exact, dtype or x.dtype)
    return out.view(*x.shape[:-1], out.shape[-1])


@dataclass
class LowRank:
    """A low-rank update of a linear, scale * up(down(x)) (LoRA; Hu et al., 2021), for rollout.

    down fp32 [rank, depth], up fp32 [features, rank]; call `pack` after a change of either.
    """

    down: Tensor
    up: Tensor
    scale: float
    memory: Any = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.pack()

    def pack(self) -> None:
        """Bring the factors into the layout that the backend's product reads fastest."""
        self.memory = backend(self.down.device).pack_low_rank(self.down, self.up, self.scale, self.memory)


@outside_modes
def linears(
    x: Tensor, weights: list[PackedWeight], biases: list[Tensor | None], low_ranks: Sequence[LowRank | None] = ()
) -> list[Tensor]:
    """Return `linear` of x and each of up to three packed weights, by one launch: the same bits. For rollout only.

    low_ranks: for each weight None, or an update that is added in fp32 to the rounded product; the sum is rounded.
    """
    rows = x.detach().reshape(-1, x.shape[-1])
    packed = [(w.memory, w.features, None if b is None else b.detach()) for w, b in zip(weights, biases, strict=True)]
    memory = [each and each.memory for each in low_ranks]
    outs = backend(x.device).linear_packed(rows, packed, x.dtype, memory)
    return [out.view(*x.shape[:-1], -1) for out in outs]


@outside_modes
def gated_linears(x: Tensor, weights: list[PackedWeight], biases: list[Tensor | None], name: str) -> Tensor:
    """Return `gated_activation` of `linears` of a gate and its up: the same bits. For rollout only.

    A GPU does it in one launch. `name` is HF's `hidden_act`, one of the backend's ACTIVATIONS.
    """
    rows = x.detach().reshape(-1, x.shape[-1])
    gate, up = ((w.memory, w.features, None if b is None else b.detach()) for w, b in zip(weights, biases, strict=True))
    return backend(x.device).gated_packed(rows, gate, up, name, x.dtype).view(*x.shape[:-1], -1)


# --- row-wise ops ---------------------------------------------------------------------------------------------------


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        out, rstd = backend(x.device).rms_norm(x.detach(), weight.detach(), eps)
        ctx.save_for_backward(x, weight, rstd)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight, rstd = (t.detach() for t in ctx.saved_tensors)
        return *backend(x.device).rms_norm_backward(grad, x, weight, rstd), None


@outside_modes
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return RMSNorm over the last dimension (Zhang & Sennrich, 2019); statistics in fp32, one rounding at the end."""
    return apply(_RMSNorm, x.reshape(-1, x.shape[-1]), weight, eps).view(x.shape)


class _GatedActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up, name):
        ctx.save_for_backward(gate, up)
        ctx.name = name
        return backend(gate.device).gated_activation(gate.detach(), up.detach(), name)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        gate, up = (t.detach() for t in ctx.saved_tensors)
        return *backend(gate.device).gated_activation_backward(grad, gate, up, ctx.name), None


@outside_modes
def gated_activation(gate: Tensor, up: Tensor, name: str) -> Tensor:
    """Return activation(gate) * up, e.g. SwiGLU (Shazeer, 2020); fp32 inside, one rounding.

    `name` is HF's `hidden_act`, one of the backend's ACTIVATIONS.
    """
    width = gate.shape[-1]
    return apply(_GatedActivation, gate.reshape(-1, width), up.reshape(-1, width), name).view(gate.shape)


@outside_modes
def rotary_tables(positions: Tensor, inv_freq: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """Return cos and sin, fp32 [*positions.shape, 2 F], for RoPE (Su et al., 2021) from inv_freq fp32 [F]."""
    tables = backend(positions.device).rotary_tables(positions.reshape(-1), inv_freq, scaling)
    return tuple(t.view(*positions.shape, -1) for t in tables)  # type: ignore[return-value]


# --- attention ------------------------------------------------------------------------------------------------------


def packed_layout(lengths: list[int], group: int, device: torch.device, shared: list[int] | None = None) -> PagedLayout:
    """Return the layout of whole sequences, each from position 0, in blocks of its own.

    group: query heads per KV head. shared: the number of first tokens of each sequence, whole blocks of them, that are
    those of the sequence before it. Their KV is there already: they are neither in lengths nor in the batch. There is
    no backward then.
    """
    kernels = backend(device)
    shared = shared or [0] * len(lengths)
    tables: list[list[int]] = []
    num_blocks = 0
    for length, cached in zip(lengths, shared, strict=True):
        assert cached % kernels.BLOCK == 0
        own = -(-length // kernels.BLOCK)
        above = tables[-1][: cached // kernels.BLOCK] if cached else []
        tables.append([*above, *range(num_blocks, num_blocks + own)])
        num_blocks += own
    where = place_tokens(lengths, shared, tables, kernels.BLOCK)
    return PagedLayout(list(lengths), *where, kernels.work_items(lengths, group), num_blocks)


@outside_modes
def paged_attention(q, k, v, cache: tuple[Tensor, Tensor], layout: PagedLayout, scale: float, window: int):
    """Write k, v [T, kv_heads, D] to the cache, and attend with q [T, heads, D]; see `Backend.attention`.

    Returns the output, in fp32 or q's dtype as the backend has it, and the log-sum-exp, fp32 [T, heads].
    """
    kernels = backend(q.device)
    kernels.write_kv(k.detach(), v.detach(), layout, *cache)
    return kernels.attention(q.detach(), *cache, layout, scale, window)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, layout, scale, window):
        kernels = backend(q.device)
        assert layout.num_blocks, "this layout is of a batch in an engine's cache"
        cache = kernels.new_kv_cache(layout.num_blocks, k.shape[1], k.shape[2], k.dtype, k.device)
        out, lse = paged_attention(q, k, v, cache, layout, scale, window)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.lengths, ctx.scale, ctx.window = layout.lengths, scale, window
        ctx.shared = len(layout.block_tables) != layout.num_blocks
        return out.to(q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        assert not ctx.shared, "blocks that sequences share have no backward"
        q, k, v, out, lse = ctx.saved_tensors  # once: checkpointing recomputes them at each access
        kernels = backend(grad.device)
        grads = kernels.attention_backward(q, k, v, out, lse, grad, ctx.lengths, ctx.scale, ctx.window)
        return *grads, None, None, None


@outside_modes
def attention(q: Tensor, k: Tensor, v: Tensor, layout: PagedLayout, scale: float, window: int = 0) -> Tensor:
    """Return causal attention of packed sequences, differentiable.

    q [T, heads, D], k and v [T, kv_heads, D], of one dtype. window: keys a query sees, itself included
    (Mistral's sliding window); 0 is all.
    """
    return apply(_Attention, q, k, v, layout, scale, window)


# --- from logits to tokens and log-probs ----------------------------------------------------------------------------


@dataclass
class RowParams:
    """Sampling parameters, one entry per row, and the tokens that masks leave a row. See `Backend.sample`."""

    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    masks: np.ndarray
    mask_rows: np.ndarray

    @classmethod
    def repeat(cls, rows: int, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> RowParams:
        """Return the parameters of `rows` rows that are all sampled alike."""
        return cls(
            np.full(rows, temperature, np.float64),
            np.full(rows, top_k, np.int64),
            np.full(rows, top_p, np.float64),
            np.full(rows, min_p, np.float64),
            *stack_masks([None] * rows),
        )

    def __getitem__(self, rows: slice) -> RowParams:
        return RowParams(
            self.temperature[rows],
            self.top_k[rows],
            self.top_p[rows],
            self.min_p[rows],
            self.masks,
            self.mask_rows[rows],
        )

    def outside(self, vocab: int, device: torch.device) -> Iterator[tuple[int, Tensor]]:
        """Yield each row that has a mask, with the tokens that the mask takes from it, bool [V]."""
        bits: dict[int, Tensor] = {}
        for row, mask in enumerate(self.mask_rows.tolist()):
            if mask >= 0:
                if mask not in bits:
                    allowed = np.unpackbits(self.masks[mask].view(np.uint8), count=vocab, bitorder="little")
                    bits[mask] = to_device(allowed == 0, device)
                yield row, bits[mask]


def mask_without(ids: Sequence[int], vocab: int) -> np.ndarray:
    """Return the mask, u32 [ceil(V / 32)], that allows all tokens but these."""
    allowed = np.ones(-(-vocab // 32) * 32, np.uint8)
    allowed[[*ids]] = 0
    return np.packbits(allowed, bitorder="little").view(np.uint32)


def stack_masks(rows: Sequence[np.ndarray | None]) -> tuple[np.ndarray, np.ndarray]:
    """Return the masks u32 [M, words] of all rows, equal ones once, and each row's place among them: -1 for None."""
    places: dict[bytes, int] = {}
    known: dict[int, int] = {id(None): -1}
    for mask in rows:
        if id(mask) not in known:
            known[id(mask)] = places.setdefault(mask.tobytes(), len(places))  # type: ignore[union-attr]
    index = [known[id(mask)] for mask in rows]
    masks = [np.frombuffer(mask, np.uint32) for mask in places]
    words = np.array(masks, np.uint32)  # a copy: for read-only arrays numba would compile anew
    return words.reshape(len(places), -1 if places else 0), np.array(index, np.int64)


def sample(
    logits: Tensor,
    params: RowParams,
    targets: Tensor | np.ndarray,
    seeds: np.ndarray | None = None,
    samples: np.ndarray | None = None,
    positions: np.ndarray | None = None,
) -> Sampled:
    """Sample or score a token of each row of fp32 logits [R, V].

    targets int64 [R], not changed: the token to score, or -1 to draw one from the counter-based generator at (seeds
    u64, samples i64, positions i64), [R] each.
    """
    rows = logits.shape[0]
    seeds = np.zeros(rows, np.uint64) if seeds is None else seeds
    samples = np.zeros(rows, np.int64) if samples is None else samples
    positions = np.zeros(rows, np.int64) if positions is None else positions
    settings = params.temperature, params.top_k, params.top_p, params.min_p, params.masks, params.mask_rows
    targets = targets if isinstance(targets, np.ndarray) else targets.contiguous()
    return backend(logits.device).sample(logits, *settings, targets, seeds, samples, positions)


class TokenLogprobs(NamedTuple):
    """Log-probs fp32 [R] of given tokens, and of their distributions entropies fp32 [R], in nats, and argmax int64 [R].

    argmax: the most likely token's id.
    """

    logprob: Tensor
    entropy: Tensor
    argmax: Tensor


def _grad_logits(
    logits: Tensor,
    params: RowParams,
    targets: Tensor,
    entropy: Tensor,
    logsumexp: Tensor,
    thresholds: Tensor,
    grad_logprob: Tensor,
    grad_entropy: Tensor,
) -> Tensor:
    """Return the gradient fp32 [R, V] by logits, which are overwritten, of R rows' log-probs and entropies."""
    temperature = torch.from_numpy(np.where(params.temperature == 0, 1.0, params.temperature)).float()[:, None]
    temperature = temperature.to(logits.device)
    z = logits.div_(temperature)  # in place: two such at a time
    for row, masked in params.outside(z.shape[1], z.device):
        z[row].masked_fill_(masked, -math.inf)
    outside = (z >= thresholds[:, None]).logical_not_()
    logp = z.sub_(logsumexp[:, None])
    outside |= logp == -math.inf
    p = logp.exp().masked_fill_(outside, 0.0)
    here = targets[:, None]
    up = torch.where(outside.gather(1, here), 0.0, grad_logprob[:, None])  # no gradient outside the distribution
    grad = logp.masked_fill_(outside, 0.0).add_(entropy[:, None]).mul_(grad_entropy[:, None]).add_(up).mul_(p).neg_()
    del p
    return grad.scatter_add_(1, here, up).div_(temperature)


class _LogitLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, params):
        found = sample(logits.detach(), params, targets)
        entropy, argmax = found.scores.entropy.float(), found.scores.argmax.long()
        ctx.save_for_backward(logits, targets, entropy, found.scores.logsumexp.float(), found.thresholds)
        ctx.params = params
        ctx.mark_non_differentiable(argmax)
        return found.scores.logprob.float(), entropy, argmax

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logprob, grad_entropy, _):
        logits, targets, entropy, logsumexp, thresholds = ctx.saved_tensors
        scores = targets, entropy, logsumexp, thresholds, grad_logprob, grad_entropy
        return _grad_logits(logits.detach().clone(), ctx.params, *scores), None, None


@outside_modes
def logit_logprobs(logits: Tensor, targets: Tensor, params: RowParams) -> TokenLogprobs:
    """Apply filters, log-softmax and gather to fp32 logits [R, V]; targets int64 [R]. Differentiable but for argmax."""
    return TokenLogprobs(*apply(_LogitLogprobs, logits.contiguous(), targets, params))


class LogitScale(NamedTuple):
    """A model's change of its lm_head's product: times a number, or divided by it. Its own gradient, too."""

    number: float
    divides: bool

    def __call__(self, logits: Tensor) -> Tensor:
        return logits / self.number if self.divides else logits * self.number


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, params, chunk, exact, scale):
        scaled = scale or (lambda logits: logits)
        parts = []
        for start in range(0, hidden.shape[0], chunk) or (0,):
            rows = slice(start, start + chunk)
            logits = scaled(_product(hidden[rows], weight, bias, exact))
            parts.append(sample(logits, params[rows], targets[rows]))
        logprob = torch.cat([p.scores.logprob for p in parts])
        entropy = torch.cat([p.scores.entropy for p in parts])
        logsumexp = torch.cat([p.scores.logsumexp for p in parts])
        argmax = torch.cat([p.scores.argmax for p in parts]).long()
        thresholds = torch.cat([p.thresholds for p in parts])
        ctx.save_for_backward(hidden, weight, bias, targets, entropy.float(), logsumexp.float(), thresholds)
        ctx.params, ctx.chunk, ctx.exact, ctx.scaled = params, chunk, exact, scaled
        ctx.mark_non_differentiable(argmax)
        return logprob.float(), entropy.float(), argmax

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logprob, grad_entropy, _):
        hidden, weight, bias, targets, entropies, logsumexps, thresholds = ctx.saved_tensors
        hidden, weight = hidden.detach(), weight.detach()
        kernels = backend(hidden.device)
        grad_hidden = torch.empty_like(hidden, dtype=torch.float32)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        for start in range(0, hidden.shape[0], ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            logits = ctx.scaled(_product(hidden[rows], weight, bias, ctx.exact))
            scores = [t[rows] for t in (targets, entropies, logsumexps, thresholds, grad_logprob, grad_entropy)]
            grad = ctx.scaled(_grad_logits(logits, ctx.params[rows], *scores))
            grad_hidden[rows] = kernels.gradient_product(grad, weight.t(), torch.float32)
            kernels.linear_resume(grad.t(), hidden[rows].t(), grad_weight)
            if grad_bias is not None:
                grad_bias += grad.sum(0)
        grads = grad_hidden.to(hidden.dtype), grad_weight.to(weight.dtype)
        return *grads, None if grad_bias is None else grad_bias.to(bias.dtype), None, None, None, None, None


@outside_modes
def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    params: RowParams,
    chunk: int = 256,
    exact: bool = True,
    scale: LogitScale | None = None,
) -> TokenLogprobs:
    """Apply lm_head, filters, log-softmax and gather, `chunk` rows at a time: never [tokens, vocab] in memory.

    hidden [R, depth], weight [V, depth], bias [V] or None, targets int64 [R]. scale: of the logits, before all else.
    Differentiable but for argmax.
    """
    return TokenLogprobs(*apply(_TokenLogprobs, hidden, weight, bias, targets, params, chunk, exact, scale))
