"""The bits that a GPU's kernels have to give, computed on a CPU: a model of the matrix unit, and the kernels' trees.

`python benchmarks/predicted_bits.py` writes their hashes to results/predicted_bits.json, by compute capability; `gate`
compares a GPU with them. Predicted are products of 16-bit numbers, and one attention in bf16, whose numbers are chosen
such that it can be: `exp2` and `/` are approximate on a GPU, within bounds that PTX's manual gives. The largest score
of a row is that of the first key of each segment, so that no sum is ever scaled by another factor than exp2(0) = 1;
and what is rounded to bf16, weights and outputs, is the same anywhere within the bounds, which is checked. Not
predicted: log-sum-exp, sums that are scaled, fp32 storage, other ops.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
import sys
from importlib import import_module
from typing import Any

import numpy as np
import torch

from samebits.kernels import ops
from samebits.kernels.triton.schedules import Tile

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))
from helpers.tensor_core import UNITS, Unit, dot

linear = import_module("samebits.kernels.triton.linear")
paged = import_module("samebits.kernels.triton.attention")

KEPT = pathlib.Path(__file__).with_name("results") / "predicted_bits.json"
PRODUCTS = {  # dtype, rows, features, depth: two chunks, a depth that fills no block, three chunks
    "in two chunks": (torch.bfloat16, 17, 24, 2048),
    "of a ragged depth": (torch.bfloat16, 19, 33, 100),
    "in three chunks": (torch.bfloat16, 5, 24, 3072),
    "in float16": (torch.float16, 5, 24, 1000),
}
LENGTHS, HEADS, DIM, SCALE = [530, 9], 1, 32, 0.2
ROWS = [0, 1, 63, 64, 511, 512, 529, 530, 538]
_BOUND = 2.0**-21  # of the relative error of exp2 and of a division: more than the two units in the last place stated


def whole_numbers(seed: int, *shape: int) -> np.ndarray:
    """Return numbers in [0, 2**32), the same wherever they are made (the mixer of splitmix64, Steele et al., 2014)."""
    z = np.arange(1, np.prod(shape) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed << 40)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z >> np.uint64(32)).astype(np.int64).reshape(shape)


def wide_exponents(seed: int, *shape: int) -> torch.Tensor:
    """Return fp32 numbers of 8 bits, which bf16 and fp16 hold, with exponents from -6 to 6."""
    z = whole_numbers(seed, *shape)
    sign, fraction, power = z & 1, z >> 1 & 127, (z >> 8) % 13 - 6
    return torch.from_numpy(np.ldexp((1 + fraction / 128) * (1 - 2 * sign), power)).float()


def product_inputs(name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return x [rows, depth], a weight [features, depth] and a bias [features]."""
    dtype, rows, features, depth = PRODUCTS[name]
    shapes = (rows, depth), (features, depth), (features,)
    x, w, bias = (wide_exponents(seed, *shape).to(dtype) for seed, shape in enumerate(shapes, 1))
    return x, w, bias


def predicted_product(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor, unit: Unit) -> torch.Tensor:
    """Return x @ w.T + bias, fp32, by the tree of `kernels/triton/linear.py`."""
    depth, count = x.shape[1], linear.chunks(x.shape[1], len(w))
    block = linear.BLOCK_K[x.dtype]
    span = -(-depth // count // block) * block if count > 1 else depth
    total = dot(x[:, :span], w[:, :span], unit=unit)
    for start in range(span, count * span, span):
        total = total + dot(x[:, start : start + span], w[:, start : start + span], unit=unit)
    return torch.from_numpy(total + bias.float().numpy())


def attention_inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q [T, HEADS, DIM], k and v [T, 1, DIM] in bf16, such that the first key of a segment has the top score."""
    tokens = sum(LENGTHS)
    q = torch.from_numpy((whole_numbers(4, tokens, HEADS, DIM) % 5 - 2) / 4)
    k = torch.from_numpy((whole_numbers(5, tokens, 1, DIM) % 5 - 2) / 4)
    q[..., 0], k[..., 0] = 1.0, 0.0
    for first, length in zip(np.cumsum([0, *LENGTHS]), LENGTHS, strict=False):
        tops = slice(first, first + length, paged.SEGMENT)
        k[tops] = 0.0
        k[tops, :, 0] = 8.0  # the others reach 31 / 4
    return q.bfloat16(), k.bfloat16(), wide_exponents(6, tokens, 1, DIM).bfloat16()


def rounded(x: np.ndarray, what: str) -> torch.Tensor:
    """Return fp64 values in bf16. ValueError if one of them might be rounded otherwise on a GPU."""
    low, found, high = (torch.from_numpy(x * factor).float().bfloat16() for factor in (1 - _BOUND, 1.0, 1 + _BOUND))
    if not (torch.equal(low, found) and torch.equal(high, found)):
        raise ValueError(f"{what} too near to a tie to be predicted: choose other inputs")
    return found


def predicted_attention(unit: Unit) -> torch.Tensor:
    """Return attention's outputs [ROWS, HEADS, DIM] in bf16, by the tree of `kernels/triton/attention.py`."""
    q, k, v = (t.transpose(0, 1) for t in attention_inputs())
    scale = np.float32(SCALE * paged._LOG2E)
    outs = []
    for row in ROWS:
        begin = 0 if row < LENGTHS[0] else LENGTHS[0]
        l: Any = np.zeros((HEADS, 1), np.float32)
        o: Any = np.zeros((HEADS, DIM), np.float32)
        for start in range(begin, row + 1, paged.SEGMENT):
            keys = slice(start, min(start + paged.SEGMENT, row + 1))
            scores = dot(q[:, row], k[0, keys], unit=unit) * scale
            if scores.argmax(1).any():
                raise ValueError("a segment's first key has not the top score: choose other inputs")
            weights = rounded(np.exp2((scores - scores[:, :1]).astype(np.float64)), "a weight is")
            l = l + dot(weights, torch.ones(1, weights.shape[1]).bfloat16(), unit=unit)
            o = o + dot(weights, v[0, keys].t(), unit=unit)
        outs.append(rounded(o.astype(np.float64) / l, "an output is"))
    return torch.stack(outs)


def digest(tensor: torch.Tensor) -> str:
    """Return a hash of the bytes."""
    return hashlib.blake2b(tensor.contiguous().cpu().view(torch.uint8).numpy().tobytes(), digest_size=8).hexdigest()


def predicted(capability: int) -> dict[str, str]:
    """Return case -> hash for GPUs of compute capability `capability`.x."""
    unit, found = UNITS[capability], {}
    for name, (dtype, *_) in PRODUCTS.items():
        out = predicted_product(*product_inputs(name), unit)
        found[f"linear {name}"] = digest(out)
        found[f"linear {name}, rounded"] = digest(out.to(dtype))
    found["attention"] = digest(predicted_attention(unit))
    return found


def computed(device: torch.device, tile: Tile | None = None) -> dict[str, str]:
    """Return case -> hash as the kernels on a device have it. tile: of products; None takes this device's."""
    found = {}
    for name, (dtype, *_) in PRODUCTS.items():
        x, w, bias = (t.to(device) for t in product_inputs(name))
        for kind, text in ((torch.float32, ""), (dtype, ", rounded")):
            found[f"linear {name}{text}"] = digest(linear.products(x, [w], [bias], kind, tile)[0])
    q, k, v = (t.to(device) for t in attention_inputs())
    layout = ops.packed_layout(LENGTHS, HEADS, device)
    cache = paged.new_kv_cache(layout.num_blocks, 1, DIM, torch.bfloat16, device)
    out, _ = ops.paged_attention(q, k, v, cache, layout, SCALE, 0)
    found["attention"] = digest(out[torch.tensor(ROWS, device=device)])
    return found


def gate(device: torch.device) -> dict[str, Any]:
    """Compare a GPU's bits with those predicted for it, products by small tiles and by large ones."""
    report: dict[str, Any] = {"compared": 0, "differ": [], "information": {}}
    kept = json.loads(KEPT.read_text())
    expected = kept.get(str(torch.cuda.get_device_capability(device)[0])) if device.type == "cuda" else None
    if expected is None:
        report["information"]["predicted"] = f"for GPUs of compute capability {', '.join(kept)} alone"
        return report
    for tile in (None, Tile(16, 32, 4, 4, True), Tile(64, 64, 4, 4, False), Tile(128, 128, 3, 8, False)):
        for case, found in computed(device, tile).items():
            report["compared"] += 1
            if found != expected[case]:
                report["differ"].append(f"{case}, {tile}: {found}, predicted {expected[case]}")
    return report


def main() -> None:
    """Write the file."""
    found = {str(capability): predicted(capability) for capability in UNITS}
    KEPT.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
