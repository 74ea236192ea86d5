"""Mixture of experts on CPUs: the products of `linear`, each row with its expert's weight, and their weighted sum.

Rows are sorted by expert. A work item is one panel of one expert's weight times that expert's rows; threads share the
items by their cost, so that an expert with many rows keeps no thread waiting. Which thread has which item decides no
bit: an element is one chain over ascending K, as in `linear`.
"""

import numpy as np
import torch
from numba import float32, prange

from ..backend import ExpertPlan
from .copies import copy_rows, pack_panel, transpose
from .elementwise import ACTIVATIONS, gated_products
from .jit import composed, elementwise, inline, own_storage, parallel, region, serial, storage
from .linear import pack, panel_product
from .pages import join_pages, new_memory
from .simd import PANEL, fma, matmul_panel, narrow, widen

_FIXED_COST = 6  # of an item, in rows: what it costs to read its panel
_PACKING_COST = 24  # where the panel has to be packed first
_ZERO = float32(0.0)
_OUTER_ROWS = 32  # of an outer product, that a thread computes at a time


@inline
def _sort_pairs(ids, pairs, places, ends):
    """Sort pairs by expert, stably; return False for an id that is no expert's."""
    tokens, slots = ids.shape
    ends[:] = 0
    for t in range(tokens):
        for slot in range(slots):
            if ids[t, slot] < 0 or ids[t, slot] >= ends.size:
                return False
            ends[ids[t, slot]] += 1
    next_row = np.empty_like(ends)
    total = 0
    for e in range(ends.size):
        next_row[e] = total
        total += ends[e]
        ends[e] = total
    for t in range(tokens):
        for slot in range(slots):
            row = next_row[ids[t, slot]]
            next_row[ids[t, slot]] += 1
            pairs[row] = t * slots + slot
    filled = np.zeros(tokens, np.int64)
    for row in range(pairs.size):  # ascending in expert, and so is each token's list
        t = pairs[row] // slots
        places[t, filled[t]] = row
        filled[t] += 1
    return True


@serial
def _plan(ids, pairs, places, ends):
    return _sort_pairs(ids, pairs, places, ends)


@inline
def _shares(ends, tiles, parts, fixed_cost):
    """Return the experts that have rows, and where each of `parts` shares of the items begins and the last one ends.

    Item i is tile i % tiles of active expert i // tiles: an expert's rows stay in cache for all of its tiles.
    """
    active = np.empty(ends.size, np.int64)
    costs = np.empty(ends.size + 1, np.int64)
    costs[0] = count = 0
    for e in range(ends.size):
        rows = ends[e] - (ends[e - 1] if e else 0)
        if rows:
            active[count] = e
            costs[count + 1] = costs[count] + fixed_cost + rows
            count += 1
    starts = np.empty(parts + 1, np.int64)
    starts[0] = i = 0
    for part in range(1, parts):
        cost = costs[count] * part // parts
        while costs[i + 1] <= cost and i + 1 < count:
            i += 1
        starts[part] = i * tiles + (cost - costs[i]) * tiles // max(costs[i + 1] - costs[i], 1)
    starts[parts] = tiles * count
    return active[:count], starts


@inline
def _packed_item(item, last_item, active, x, panels, out):
    """Compute the columns of `out` = x @ weight.T that are an item's.

    last_item: the last one of this thread, which fetches the following item's panel meanwhile.
    """
    tiles = panels.shape[1]
    after = min(item + 1, last_item)
    following = panels[active[after // tiles], after % tiles]
    panel_product(x, panels[active[item // tiles], item % tiles], item % tiles, x[0, :0], out, following)


@inline
def _sum_rows(t, y, weights, pairs, places, like, out):
    """Write the sum of token t's rows of y, rounded to the dtype of the element `like`, by their weights to `out`."""
    total = np.zeros(y.shape[1], np.float32)
    for j in range(places.shape[1]):
        row = places[t, j]
        weight = weights[pairs[row]]
        for column in range(y.shape[1]):
            total[column] = fma(weight, widen(narrow(widen(y[row, column]), like)), total[column])
    for column in range(y.shape[1]):
        out[column] = narrow(total[column], out[column])


@region
def gated_experts(x, like, gate_up, down, width, ids, weights, kind, parts, out):
    """Write each token's sum to fp32 `out`; return False for an id that is no expert's.

    x fp32 [T, H], as all that is stored of a dtype of halves, that of the array `like`.
    """
    (tokens, slots), hidden = ids.shape, x.shape[1]
    pairs, places = np.empty(tokens * slots, np.int64), np.empty((tokens, slots), np.int64)
    ends = np.empty(gate_up.shape[0], np.int64)
    if not _sort_pairs(ids, pairs, places, ends):
        return False
    both, y = np.empty((pairs.size, 2 * width), np.float32), np.empty((pairs.size, hidden), np.float32)
    tiles = gate_up.shape[1]
    active, starts = _shares(ends, tiles, parts, _FIXED_COST)
    for part in prange(parts):
        rows = np.empty((0, hidden), np.float32)
        for item in range(starts[part], starts[part + 1]):
            e = active[item // tiles]
            first, last = ends[e - 1] if e else 0, ends[e]
            if item % tiles == 0 or item == starts[part]:
                rows = np.empty((last - first, hidden), np.float32)
                for i in range(last - first):
                    for j in range(hidden):
                        rows[i, j] = x[pairs[first + i] // slots, j]
            _packed_item(item, starts[part + 1] - 1, active, rows, gate_up, both[first:last])
    down_tiles = down.shape[1]
    active, starts = _shares(ends, down_tiles, parts, _FIXED_COST)
    for part in prange(parts):
        stored = np.empty((3, width), like.dtype)
        rows = np.empty((0, width), np.float32)
        for item in range(starts[part], starts[part + 1]):
            e = active[item // down_tiles]
            first, last = ends[e - 1] if e else 0, ends[e]
            if item % down_tiles == 0 or item == starts[part]:
                rows = np.empty((last - first, width), np.float32)
                for i in range(last - first):
                    gated_products(both[first + i, :width], both[first + i, width:], kind, stored, rows[i])
            _packed_item(item, starts[part + 1] - 1, active, rows, down, y[first:last])
    for t in prange(tokens):
        _sum_rows(t, y, weights, pairs, places, like[t, 0], out[t])
    return True


@composed
def _packed_experts(x, like, gate_up, down, width, ids, weights, kind, parts, out):
    return gated_experts(x, like, gate_up, down, width, ids, weights, kind, parts, out)


@parallel
def _grouped(x, weight, ends, parts, out):
    features, depth = out.shape[1], x.shape[1]
    tiles = (features + PANEL - 1) // PANEL
    active, starts = _shares(ends, tiles, parts, _PACKING_COST)
    for part in prange(parts):
        panel = np.zeros((depth, PANEL), np.float32)
        for item in range(starts[part], starts[part + 1]):
            e, p = active[item // tiles], item % tiles
            pack_panel(weight[e, p * PANEL : (p + 1) * PANEL], panel)
            first, last = ends[e - 1] if e else 0, ends[e]
            panel_product(x[first:last], panel, p, x[0, :0], out[first:last], panel)


@parallel
def _grouped_outer(x, y, ends, parts, out):
    """An item is _OUTER_ROWS rows of an expert's result: they are written whole, one after the other."""
    features, width = x.shape[1], y.shape[1]
    tiles, blocks = (width + PANEL - 1) // PANEL, (features + _OUTER_ROWS - 1) // _OUTER_ROWS
    active, starts = _shares(ends, blocks, parts, _PACKING_COST)
    for e in prange(ends.size):
        if ends[e] == (ends[e - 1] if e else 0):
            out[e] = 0
    for part in prange(parts):
        panels = np.empty((0, 0, PANEL), np.float32)
        total = np.empty((_OUTER_ROWS, tiles * PANEL), np.float32)
        for item in range(starts[part], starts[part + 1]):
            e, start = active[item // blocks], item % blocks * _OUTER_ROWS
            first, last = ends[e - 1] if e else 0, ends[e]
            rows, count = last - first, min(_OUTER_ROWS, features - start)
            if start == 0 or item == starts[part]:
                panels = np.zeros((tiles, rows, PANEL), np.float32)
                for p in range(tiles):
                    copy_rows(y[first:last, p * PANEL : min((p + 1) * PANEL, width)], panels[p])
            left = np.empty((count, rows), np.float32)
            transpose(x[first:last, start : start + count], left)
            total[:] = float32(0.0)
            for p in range(tiles):
                panel, sums = panels[p].ctypes.data, total.ctypes.data + 4 * p * PANEL
                matmul_panel(left.ctypes.data, rows, panel, _ZERO, PANEL, rows, sums, tiles * PANEL, count, panel)
            copy_rows(total[:count, :width], out[e, start : start + count])


@elementwise
def _combine(y, weights, pairs, places, out):
    for t in prange(out.shape[0]):
        _sum_rows(t, y, weights, pairs, places, y[0, 0], out[t])


@elementwise
def _combine_backward(grad, y, weights, pairs, slots, grad_y, grad_weights):
    for row in prange(y.shape[0]):
        pair = pairs[row]
        token, weight, total = pair // slots, weights[pair], 0.0
        for j in range(y.shape[1]):
            grad_y[row, j] = narrow(weight * widen(grad[token, j]), grad_y[row, j])
        for j in range(y.shape[1]):
            total += float(widen(grad[token, j])) * float(widen(y[row, j]))
        grad_weights[pair] = float32(total)


def pack_experts(weight: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return weights [E, features, depth] as [E, panels, depth, PANEL], each as `pack` has it; in `out` if given."""
    experts, features, depth = weight.shape
    all_panels = new_memory(weight, experts, -(-features // PANEL), depth, PANEL) if out is None else out
    for each, panels in zip(weight, all_panels, strict=True):
        pack(each, panels)
    if out is None:
        join_pages(all_panels)
    return all_panels


def plan_experts(ids: torch.Tensor, experts: int) -> ExpertPlan:
    """Return the order of the pairs of ids int64 [T, k]. Raises ValueError for an id that is no expert's."""
    plan = ExpertPlan(ids.new_empty(ids.numel()), ids.new_empty(ids.shape), ids.new_empty(experts))
    if not _plan(ids.contiguous().numpy(), *(t.numpy() for t in plan)):
        raise _wrong_ids(ids, experts)
    return plan


def _wrong_ids(ids: torch.Tensor, experts: int) -> ValueError:
    return ValueError(f"expert ids must be in 0..{experts - 1}, not {ids.min().item()}..{ids.max().item()}")


def _rows(x: torch.Tensor, plan: ExpertPlan, gather: bool) -> np.ndarray:
    wide = x.float()
    return (wide.index_select(0, plan.tokens) if gather else wide.contiguous()).numpy()


def packed_experts(
    x: torch.Tensor,
    gate_up: np.ndarray,
    down: np.ndarray,
    inner: int,
    ids: torch.Tensor,
    weights: torch.Tensor,
    activation: str,
) -> torch.Tensor:
    """Return each token's sum of its experts' gated MLPs, [T, H] in x's dtype, in one launch; see `Backend`."""
    x = x.contiguous()
    out = torch.empty(x.shape, dtype=torch.float32)
    given = ids.contiguous().numpy(), weights.contiguous().view(-1).numpy(), ACTIVATIONS.index(activation)
    arrays = x.float().numpy(), own_storage(x), gate_up, down
    if not _packed_experts(*arrays, inner, *given, torch.get_num_threads(), out.numpy()):
        raise _wrong_ids(ids, len(gate_up))
    return out.to(x.dtype)


def grouped(x: torch.Tensor, weight: torch.Tensor, plan: ExpertPlan, gather: bool, dtype: torch.dtype) -> torch.Tensor:
    """Return each row of x times its expert's weight, [P, features] in `dtype`; weight [E, features, depth]."""
    rows = _rows(x, plan, gather)
    out = torch.empty(rows.shape[0], weight.shape[1], dtype=torch.float32)
    _grouped(rows, storage(weight), plan.ends.numpy(), torch.get_num_threads(), out.numpy())
    return out.to(dtype)


def grouped_outer(x: torch.Tensor, y: torch.Tensor, plan: ExpertPlan, dtype: torch.dtype) -> torch.Tensor:
    """Return for each expert the sum of its rows' outer products, [E, N, K] in `dtype`; x [P, N], y [P, K]."""
    out = torch.empty(plan.ends.numel(), x.shape[1], y.shape[1], dtype=dtype)
    left, right = x.float().contiguous(), y.float().contiguous()
    _grouped_outer(left.numpy(), right.numpy(), plan.ends.numpy(), torch.get_num_threads(), own_storage(out))
    return out


def combine(y: torch.Tensor, weights: torch.Tensor, plan: ExpertPlan, dtype: torch.dtype) -> torch.Tensor:
    """Return the sum of a token's rows of y [P, width] by weights fp32 [T, k], ascending in expert, [T, width]."""
    out = torch.empty(weights.shape[0], y.shape[1], dtype=dtype)
    flat = weights.contiguous().view(-1).numpy()
    _combine(own_storage(y.contiguous()), flat, plan.pairs.numpy(), plan.places.numpy(), own_storage(out))
    return out


def combine_backward(
    grad: torch.Tensor, y: torch.Tensor, weights: torch.Tensor, plan: ExpertPlan
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of y [P, width], in its dtype, and weights fp32 [T, k] from the sum's [T, width]."""
    flat = weights.contiguous().view(-1)
    grad_y, grad_weights = torch.empty_like(y), torch.empty_like(flat)
    given = own_storage(grad.contiguous()), own_storage(y), flat.numpy(), plan.pairs.numpy(), weights.shape[1]
    _combine_backward(*given, own_storage(grad_y), grad_weights.numpy())
    return grad_y, grad_weights.view(weights.shape)
