"""Blocked causal attention over a paged KV cache: one tree for decode, chunk, prefill and trainer.

The tree, for one query row: key blocks of BLOCK keys at absolute positions 0, BLOCK, 2 BLOCK ..., ascending, joined by
the online softmax (Milakov & Gimelshein, 2018) within segments of SEGMENT keys; segments are merged ascending. So few
rows with long contexts can give their segments to many programs, and long prompts walk them in one: the same bits.
Sums over keys are products of the matrix unit, a row's own sum of weights too (with a column of ones), since their
order does not depend on the tile; a maximum has no order. A masked key has weight 0 and leaves its row as it was, so
rows of any positions may share a tile: rows of several sequences, too, over segments of KV blocks that they share.

A block of the KV cache holds one such block: k_cache, v_cache [num_blocks, kv_heads, BLOCK, head_dim]. Where a value is
infinite or NaN, the token's value in it is 0 and its key NaN: rows that see it still have no finite result, and rows
before it, whose weight 0 the matrix unit multiplies all the same, keep theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from .launch import await_inputs, has_copy_engine, launch, multiprocessors
from .linear import scratch
from .work import LARGE_ROWS, SMALL_ROWS

BLOCK = 64
SEGMENT = 512
MAX_HEAD_DIM = 128  # of what is compiled and compared in the tests
_MOST_BYTES = 1 << 28  # of partial softmaxes
_LOG2E, _LN2 = 1.4426950408889634, 0.6931471805599453
# parts of one buffer, aligned by chance
_INDEX = ["items", "positions", "slot_mapping", "block_tables", "block_table_starts"]
_MASKED = tl.constexpr(-3.0e38)  # finite: two of them differ by 0


@triton.jit
def _merge(m, l, o, m_new, l_new, o_new):
    """Join two partial softmaxes. m: maximum, base 2; l: sum of weights; o: weighted values, all [rows, ...]."""
    most = tl.maximum(m, m_new)
    a, b = tl.exp2(m - most), tl.exp2(m_new - most)
    return most, l * a + l_new * b, o * a[:, None] + o_new * b[:, None]


@triton.jit
def _join(
    m, l, o, q, k_cache, v_cache, number, position, head, kv_heads, here, last, scale, window,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, WINDOWED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Join a block of keys, at positions `position`, to a partial softmax; without MASKED every row sees all of it."""
    d, keys = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK)
    inside = d < DIM
    ones = tl.full((BLOCK, 16), 1.0, tl.float32).to(v_cache.dtype.element_ty)
    place = ((number * kv_heads + head) * BLOCK + keys)[:, None] * DIM + d[None, :]
    k = tl.load(k_cache + place, mask=inside[None, :], other=0.0)
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if MASKED:
        seen = position[None, :] <= here[:, None]
        if WINDOWED:
            seen = seen & (position[None, :] > here[:, None] - window)
        s = tl.where(seen, s, _MASKED)
    most = tl.maximum(m, tl.max(s, 1))
    weights = tl.exp2(s - most[:, None])
    if MASKED:
        weights = tl.where(seen, weights, 0.0)
        v = tl.load(v_cache + place, mask=inside[None, :] & (position <= last)[:, None], other=0.0)
    else:
        v = tl.load(v_cache + place, mask=inside[None, :], other=0.0)
    weights = weights.to(v_cache.dtype.element_ty)
    factor = tl.exp2(m - most)
    l = tl.dot(weights, ones, l * factor[:, None], input_precision="ieee")
    o = tl.dot(weights, v, o * factor[:, None], input_precision="ieee")
    return most, l, o


@triton.jit
def _segment(
    q, k_cache, v_cache, block_table, head, kv_heads, here, earliest, last, begin, end, scale, window,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    WINDOWED: tl.constexpr, LARGE: tl.constexpr,
):  # fmt: skip
    """Return the partial softmax of rows at positions `here` over key blocks [begin, end). l has 16 equal columns.

    LARGE: blocks before all of the rows are walked first, without masks.
    """
    keys = tl.arange(0, BLOCK)
    m = tl.full((BLOCK_M,), _MASKED, tl.float32)
    l = tl.zeros((BLOCK_M, 16), tl.float32)
    o = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    masked = begin
    if LARGE and not WINDOWED:
        masked = tl.minimum(tl.maximum((earliest + 1) // BLOCK, begin), end)
        for block in tl.range(begin, masked, num_stages=STAGES):
            number = tl.load(block_table + block).to(tl.int64)
            m, l, o = _join(
                m, l, o, q, k_cache, v_cache, number, block * BLOCK + keys, head, kv_heads, here, last, scale, window,
                DIM, BLOCK_D, BLOCK, WINDOWED, False,
            )  # fmt: skip
    for block in tl.range(masked, end, num_stages=STAGES):
        number = tl.load(block_table + block).to(tl.int64)
        m, l, o = _join(
            m, l, o, q, k_cache, v_cache, number, block * BLOCK + keys, head, kv_heads, here, last, scale, window,
            DIM, BLOCK_D, BLOCK, WINDOWED, True,
        )  # fmt: skip
    return m, tl.max(l, 1), o


@triton.jit
def _store(out, lse, token, h, row_mask, m, l, o, heads, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    d = tl.arange(0, BLOCK_D)
    place = token.to(tl.int64) * heads + h
    o = o / l[:, None] + 0.0  # + 0: a masked key may have turned -0 into +0
    tl.store(
        out + place[:, None] * DIM + d[None, :], o.to(out.dtype.element_ty), mask=row_mask[:, None] & (d < DIM)[None, :]
    )
    tl.store(lse + place, (m + tl.log2(l)) * 0.6931471805599453, mask=row_mask)


@triton.jit(do_not_specialize=["segments", "window"], do_not_specialize_on_alignment=_INDEX)
def _attention(
    q, k_cache, v_cache, items, positions, block_tables, block_table_starts, out, lse, parts,
    stride_t, stride_h, heads, kv_heads, segments, scale, window,
    SPLIT: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr,
    PER_SEGMENT: tl.constexpr, STAGES: tl.constexpr, WINDOWED: tl.constexpr, LARGE: tl.constexpr,
):  # fmt: skip
    """Attend with an item's rows; SPLIT: write each segment's partial softmax to parts [rows, segments, BLOCK_D + 2].

    An item is (first token, tokens, sequence, shared, place): see `work_items`. Without SPLIT a program walks all
    segments, and others take the item's rows from BLOCK_M on.
    """
    await_inputs()
    head, item = tl.program_id(1), items + 5 * tl.program_id(0)
    first, count, shared = tl.load(item), tl.load(item + 1), tl.load(item + 3)
    block_table = block_tables + tl.load(block_table_starts + tl.load(item + 2))
    group = heads // kv_heads
    r, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    if not SPLIT:
        r += tl.program_id(2) * BLOCK_M
    row_mask = r < count * group
    token, h = first + r // group, head * group + r % group
    here = tl.load(positions + token, mask=row_mask, other=0)
    earliest = tl.min(tl.where(row_mask, here, 0x7FFFFFFF), 0)
    last = tl.max(tl.where(row_mask, here, -1), 0)
    address = q + token.to(tl.int64)[:, None] * stride_t + h[:, None] * stride_h + d[None, :]
    queries = tl.load(address, mask=row_mask[:, None] & (d < DIM)[None, :], other=0.0)
    begin, end = 0, tl.cdiv(last + 1, BLOCK)  # nothing for padding
    if WINDOWED:
        begin = tl.maximum(earliest - window + 1, 0) // BLOCK
    if SPLIT:
        lowest, highest = tl.maximum(shared, begin // PER_SEGMENT), tl.cdiv(end, PER_SEGMENT)
        if shared < 0:
            lowest, highest = begin // PER_SEGMENT, tl.minimum(highest, -shared)
        row = ((tl.load(item + 4) + r // group).to(tl.int64) * heads + h) * segments
        for segment in range(lowest + tl.program_id(2), highest, tl.num_programs(2)):
            low, high = tl.maximum(begin, segment * PER_SEGMENT), tl.minimum(end, (segment + 1) * PER_SEGMENT)
            m, l, o = _segment(
                queries, k_cache, v_cache, block_table, head, kv_heads, here, earliest, last, low, high, scale, window,
                DIM, BLOCK_D, BLOCK_M, BLOCK, STAGES, WINDOWED, LARGE,
            )  # fmt: skip
            place = parts + (row + segment) * (BLOCK_D + 2)
            tl.store(place[:, None] + d[None, :], o, mask=row_mask[:, None])
            tl.store(place + BLOCK_D, m, mask=row_mask)
            tl.store(place + BLOCK_D + 1, l, mask=row_mask)
    else:
        m = tl.full((BLOCK_M,), _MASKED, tl.float32)
        l = tl.zeros((BLOCK_M,), tl.float32)
        o = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        for segment in range(begin // PER_SEGMENT, tl.cdiv(end, PER_SEGMENT)):
            low, high = tl.maximum(begin, segment * PER_SEGMENT), tl.minimum(end, (segment + 1) * PER_SEGMENT)
            m_new, l_new, o_new = _segment(
                queries, k_cache, v_cache, block_table, head, kv_heads, here, earliest, last, low, high, scale, window,
                DIM, BLOCK_D, BLOCK_M, BLOCK, STAGES, WINDOWED, LARGE,
            )  # fmt: skip
            m, l, o = _merge(m, l, o, m_new, l_new, o_new)
        _store(out, lse, token, h, row_mask, m, l, o, heads, DIM, BLOCK_D)


@triton.jit(do_not_specialize=["rows", "segments", "window"], do_not_specialize_on_alignment=_INDEX)
def _merge_segments(
    items, positions, out, lse, parts, heads, kv_heads, rows, segments, window,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, PER_SEGMENT: tl.constexpr, STAGES: tl.constexpr,
    WINDOWED: tl.constexpr,
):  # fmt: skip
    """Merge one row's segments, ascending. rows: of an item, for each KV head."""
    await_inputs()
    item, head, row = items + 5 * tl.program_id(0), tl.program_id(1) // rows, tl.program_id(1) % rows
    first, count, place = tl.load(item), tl.load(item + 1), tl.load(item + 4)
    group = heads // kv_heads
    r, d = row + tl.arange(0, 1), tl.arange(0, BLOCK_D)
    row_mask = r < count * group
    token, h = first + r // group, head * group + r % group
    position = tl.max(tl.load(positions + token, mask=row_mask, other=-1), 0)
    begin, end = 0, tl.cdiv(position + 1, BLOCK)
    if WINDOWED:
        begin = tl.maximum(position - window + 1, 0) // BLOCK
    m = tl.full((1,), _MASKED, tl.float32)
    l = tl.zeros((1,), tl.float32)
    o = tl.zeros((1, BLOCK_D), tl.float32)
    base = ((place + r // group).to(tl.int64) * heads + h) * segments
    for segment in tl.range(begin // PER_SEGMENT, tl.cdiv(end, PER_SEGMENT), num_stages=STAGES):
        part = parts + (base + segment) * (BLOCK_D + 2)
        o_new = tl.load(part[:, None] + d[None, :], mask=row_mask[:, None], other=0.0)
        m_new = tl.load(part + BLOCK_D, mask=row_mask, other=0.0)
        l_new = tl.load(part + BLOCK_D + 1, mask=row_mask, other=1.0)
        m, l, o = _merge(m, l, o, m_new, l_new, o_new)
    _store(out, lse, token, h, row_mask, m, l, o, heads, DIM, BLOCK_D)


@triton.jit
def cache_row(slot, head, kv_heads, BLOCK: tl.constexpr):
    """Return the row of the cache, seen as [rows, head_dim], that is a slot's for a KV head."""
    return (slot // BLOCK * kv_heads + head) * BLOCK + slot % BLOCK


@triton.jit
def is_strange(x):
    """1 where x is infinite or NaN, int32."""
    return tl.where(tl.abs(x.to(tl.float32)) < float("inf"), 0, 1)


@triton.jit
def instead(where, number, x):
    """Return x, and a number where that is said."""
    return tl.where(where, number, x.to(tl.float32)).to(x.dtype)


@triton.jit(do_not_specialize_on_alignment=_INDEX)
def _write_kv(
    k, v, slot_mapping, k_cache, v_cache, stride_k, stride_v, kv_heads,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    await_inputs()
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    mask = d < tl.where(slot >= 0, DIM, 0)  # padding has no slot
    place = cache_row(slot, head, kv_heads, BLOCK) * DIM + d
    key = tl.load(k + token * stride_k + head * DIM + d, mask=mask, other=0.0)
    value = tl.load(v + token * stride_v + head * DIM + d, mask=mask, other=0.0)
    strange = tl.max(is_strange(value), 0) > 0
    tl.store(k_cache + place, instead(strange, float("nan"), key), mask=mask)
    tl.store(v_cache + place, instead(strange, 0.0, value), mask=mask)


def padded_width(dim: int) -> int:
    """Return the width of a tile that holds a head: a power of two, at least 16."""
    return max(16, triton.next_power_of_2(dim))


def new_kv_cache(
    num_blocks: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return empty blocks: nothing is read before it was written, but for masked keys.

    Raises NotImplementedError for a head_dim above MAX_HEAD_DIM.
    """
    if head_dim > MAX_HEAD_DIM:
        raise NotImplementedError(f"head_dim {head_dim}: GPU kernels go up to {MAX_HEAD_DIM}; use device='cpu'")
    shape = num_blocks, kv_heads, BLOCK, head_dim
    return torch.empty(shape, dtype=dtype, device=device), torch.empty(shape, dtype=dtype, device=device)


def rows_dense(t: torch.Tensor) -> torch.Tensor:
    """Return [T, heads, D] whose heads lie side by side; the stride from token to token is free."""
    return t if t.stride(2) == 1 and t.stride(1) == t.shape[2] else t.contiguous()


def write_kv(k, v, slot_mapping: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
    """Write k and v [T, kv_heads, head_dim], in the cache's dtype, to the cache.

    slot_mapping: block * BLOCK + offset, int32 [T]; where it is -1, nothing is written.
    """
    k, v = rows_dense(k), rows_dense(v)
    tokens, kv_heads, dim = k.shape
    launch(
        _write_kv, (tokens, kv_heads), k, v, slot_mapping, k_cache, v_cache, k.stride(0), v.stride(0), kv_heads,
        DIM=dim, BLOCK_D=padded_width(dim), BLOCK=BLOCK, num_warps=1,
    )  # fmt: skip


def num_splits(items: int, kv_heads: int, segments: int, device: torch.device) -> int:
    """Return the number of programs that share a small item's segments: a schedule."""
    return max(1, min(segments, -(-2 * multiprocessors(device) // (items * kv_heads))))


def attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
    items: torch.Tensor, positions: torch.Tensor, block_tables: torch.Tensor, block_table_starts: torch.Tensor,
    scale: float, window: int, small: Sequence[int], longest: int, shared: int = 0, splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return causal attention over the cache, of q's shape [T, heads, D] and dtype, and log-sum-exp fp32 [T, heads].

    items from `work_items`: first `shared` that read for several sequences, then small ones, of `small` tokens each, at
    most; positions int32 [T]; block j of sequence i is block_tables[block_table_starts[i] + j]; window: keys a row
    sees, itself included; 0 is all. longest: positions are below it. splits: the schedule of small items; None chooses.
    """
    q = q if q.stride(2) == 1 else q.contiguous()
    tokens, heads, dim = q.shape
    kv_heads = k_cache.shape[1]
    group, width = heads // kv_heads, padded_width(dim)
    out, lse = q.new_empty(q.shape), q.new_empty((tokens, heads), dtype=torch.float32)
    segments, few = -(-longest // SEGMENT), shared + len(small)
    shape: dict = dict(WINDOWED=window > 0, DIM=dim, BLOCK_D=width, BLOCK=BLOCK, PER_SEGMENT=SEGMENT // BLOCK)

    def tiles(items, split, splits, parts, **options):
        launch(
            _attention, (items.shape[0], kv_heads, splits),
            q, k_cache, v_cache, items, positions, block_tables, block_table_starts, out, lse, parts,
            q.stride(0), q.stride(1), heads, kv_heads, segments, scale * _LOG2E, window,
            SPLIT=split, **shape, **options,
        )  # fmt: skip

    if small:
        size = sum(small) * heads * segments * (width + 2)
        room = 4 * size <= _MOST_BYTES
        # where sequences share, a step may have room for many items: those that read a whole prompt are the fewest
        readers = -(-sum(small) * group // SMALL_ROWS) if shared else few
        splits = splits or num_splits(readers, kv_heads, segments, q.device)
        split = room and (splits > 1 or shared > 0)
        parts = scratch(q.device, torch.float32, size if split else 1)
        tiles(items[:few] if split else items[shared:few], split, splits if split else 1, parts, **_small(q, width))
        if split:
            rows = max(small) * group
            launch(
                _merge_segments, (len(small), kv_heads * rows),
                items[shared:], positions, out, lse, parts, heads, kv_heads, rows, segments, window,
                **shape, STAGES=4, num_warps=1,
            )  # fmt: skip
    if few < items.shape[0]:
        options = _large(q, width, group)
        tiles(items[few:], False, -(-max(LARGE_ROWS, group) // options["BLOCK_M"]), lse, **options)
    return out, lse


def _small(q: torch.Tensor, width: int) -> dict[str, Any]:
    """Return the schedule of small tiles. From 5 stages on there are two buffers of keys and values; fewer have one."""
    if q.element_size() == 4:
        return dict(BLOCK_M=SMALL_ROWS, STAGES=2, LARGE=False, num_warps=8 if width > 64 else 4)
    return dict(BLOCK_M=SMALL_ROWS, STAGES=5, LARGE=False, num_warps=4)


def _large(q: torch.Tensor, width: int, group: int) -> dict[str, Any]:
    """Return the schedule of large tiles: with wgmma each of two warp groups has its own rows; others would spill."""
    rows = triton.next_power_of_2(group)
    if q.element_size() == 4:
        return dict(BLOCK_M=max(64, rows), STAGES=1, LARGE=True, num_warps=16 if width > 64 else 8)
    if has_copy_engine(q.device):
        return dict(BLOCK_M=max(LARGE_ROWS, rows), STAGES=5, LARGE=True, num_warps=8)
    return dict(BLOCK_M=max(64, rows), STAGES=2, LARGE=True, num_warps=8 if width > 64 or rows > 64 else 4)
