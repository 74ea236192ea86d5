"""The numerics contract: every choice that decides a bit of a log-prob, frozen and hashed.

Engine and trainer compare hashes and refuse to work together when they differ. Schedules (tiles, threads, packing,
vector width) are not in it: they decide no bit.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache

import torch

from . import ops
from .backend import NumericsError as NumericsError
from .layout import PagedLayout

_REPEATS = 50  # of what some compilers were seen to get wrong now and then


@dataclass(frozen=True)
class Contract:
    """One side's promise. Build it with `Contract.of`; compare with `check`."""

    dtype: str
    device: str
    linear: str
    attention: str
    norm: str
    activation: str
    rotary: str
    experts: str
    functions: str
    logprob: str
    filters: str
    rounding: str
    transformers: str
    libm: str
    adapter: str = "none"
    adapter_dtype: str = "none"
    version: int = 1

    @classmethod
    def of(cls, dtype: torch.dtype, device: torch.device) -> Contract:
        """Return the contract of this machine for a model of `dtype` on `device`."""
        import transformers

        return cls(
            dtype=str(dtype).removeprefix("torch."),
            device=device.type,
            rotary="fp32 angle, fp64 cos and sin rounded to fp32; applied by the model's code in the storage dtype",
            filters="top-k, top-p, min-p in this order as thresholds; ties kept",
            rounding="each op computes in fp32 and rounds once to the storage dtype; logits are not rounded",
            transformers=".".join(transformers.__version__.split(".")[:2]),
            version=cls.version,
            **ops.backend(device).trees(device),
        )

    @property
    def hash(self) -> str:
        """The first 16 hex digits of the fields' SHA-256."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def check(self, other: Contract | str) -> None:
        """Raise NumericsError, naming the fields that differ, unless `other` (or its hash) is the same contract."""
        if isinstance(other, str):
            if other != self.hash:
                raise NumericsError(f"numerics contracts differ: {self.hash} here, {other} there")
        elif other != self:
            mine, theirs = asdict(self), asdict(other)
            lines = [f"  {k}: {mine[k]!r} here, {theirs[k]!r} there" for k in mine if mine[k] != theirs[k]]
            raise NumericsError("numerics contracts differ:\n" + "\n".join(lines))


def _cpu_name() -> str:
    import llvmlite.binding

    return llvmlite.binding.get_host_cpu_name()


def _row_stable(run, x: torch.Tensor, counts: Sequence[int]) -> bool:
    """Return whether the rows of run(x) are the same bits in batches of `counts` rows and on one thread."""
    whole = run(x)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        single = run(x)
    finally:
        torch.set_num_threads(threads)
    parts = [(start, count) for count in counts for start in (0, x.shape[0] - count)]
    return _same_bytes(whole, single) and all(
        _same_bytes(run(x[a : a + n].contiguous()), whole[a : a + n]) for a, n in parts
    )


def _batches(device: torch.device, features: int) -> tuple[int, list[int]]:
    """Return the rows of a probe's batch, and those of the batches to compare it with."""
    if device.type == "cpu":
        return 19, [1, 2, 3, 4, 7, 16]
    rows = 600 if features <= 1 << 16 else 300  # logits take memory
    counts = [count for count in (1, 17, 33, 65, 129, 257, 513) if count < rows]
    return rows, [*counts, *[rows] * _REPEATS]


def _device_name(device: torch.device) -> str:
    return _cpu_name() if device.type == "cpu" else torch.cuda.get_device_name(device)


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors are the same bits; NaN, which sums of overflows are, equals itself."""
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def probe(weights: list[torch.Tensor]) -> None:
    """Check on this machine that a row's bits don't depend on its batch, for each shape of linear weight.

    Takes well under a second for a small model. On a GPU the batches are of all sizes that have tiles, and thus matrix
    instructions, of their own, and the largest is computed again and again. Raises NumericsError, with what to do.
    """
    generator = torch.Generator().manual_seed(0)
    device = weights[0].device
    where = _device_name(device)
    seen = set()
    for weight in weights:
        features, depth = weight.shape
        if (features, depth) in seen:
            continue
        seen.add((features, depth))
        rows, counts = _batches(device, features)
        powers = torch.randint(-6, 7, (rows, depth), generator=generator)
        x = (torch.randn(rows, depth, generator=generator) * torch.exp2(powers)).to(device)
        if not _row_stable(lambda rows, w=weight: ops.linear(rows, w), x, counts):
            raise NumericsError(
                f"linear [{features}, {depth}] on this device ({where}) gives a row "
                "different bits in different batches. Please report this device; there is no setting that mends it."
            )


@cache
def probe_attention(device: torch.device, dtype: torch.dtype, group: int, head_dim: int) -> None:
    """Check that a token has the same bits decoded alone as in a prefill, which repeats its own.

    group: query heads per KV head. Done once per process. Raises NumericsError.
    """
    generator, kernels, length = torch.Generator().manual_seed(0), ops.backend(device), 700
    q, k, v = (torch.randn(length, n, head_dim, generator=generator).to(device, dtype) for n in (2 * group, 2, 2))
    layout = ops.packed_layout([length], group, device)
    cache = kernels.new_kv_cache(layout.num_blocks, 2, head_dim, dtype, device)
    scale = head_dim**-0.5
    whole = ops.paged_attention(q, k, v, cache, layout, scale, 0)
    same = True
    for token in (0, 63, 64, 511, 512, length - 1):
        one, tables = slice(token, token + 1), (layout.block_tables, layout.block_table_starts)
        place = PagedLayout(
            [1], layout.positions[one], layout.slot_mapping[one], *tables, kernels.work_items([1], group)
        )
        alone = ops.paged_attention(q[one], k[one], v[one], cache, place, scale, 0)
        same = same and all(_same_bytes(a, b[one]) for a, b in zip(alone, whole, strict=True))
    for _ in range(_REPEATS):
        again = ops.paged_attention(q, k, v, cache, layout, scale, 0)
        same = same and all(map(_same_bytes, again, whole))
    if not same:
        raise NumericsError(
            f"attention of head_dim {head_dim} in {dtype} on this device ({_device_name(device)}) gives a token "
            "other bits alone than in a prompt, or in another run. Please report this device; no setting mends it."
        )
