"""Blocked causal attention over a paged KV cache: one kernel for decode, chunk, prefill and trainer.

The tree, for one query row: key blocks of BLOCK keys at absolute positions 0, BLOCK, 2 BLOCK ..., ascending; in a block
each score is one chain over head_dim, the block's sum a pairwise tree, and the output a chain over keys; blocks are
joined by the online softmax (Milakov & Gimelshein, 2018). A block of the KV cache holds one such block of keys:

    k_cache [num_blocks, kv_heads, head_dim, BLOCK]     transposed: scores run over keys
    v_cache [num_blocks, kv_heads, BLOCK, padded_dim]   outputs run over head_dim

A masked key has weight 0 and leaves its row as it was, so rows of any positions may share a tile.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from numba import carray, float32, prange

from ..backend import HeadNorms
from ..layout import PagedLayout
from ..sharing import shared_blocks, sharing_runs
from .elementwise import exp, norm_row, turn
from .jit import composed, elementwise, inline, own_storage, parallel, region, storage
from .pages import new_memory
from .simd import CACHE_LINE, LANES, fma, matmul, pairwise, pointer, prefetch, widen

BLOCK = 32
QUERY_ROWS = 24  # rows (token, head of the group) that share a pass over the keys: a schedule
_MASKED = float32(-3.0e38)  # finite: two of them differ by 0
_ZERO, _ONE = float32(0.0), float32(1.0)
block_max, block_sum = pairwise(BLOCK, "max"), pairwise(BLOCK, "sum")
_SCORE_COLUMNS = LANES * min(4, BLOCK // LANES)  # of a product
_add_scores = matmul(_SCORE_COLUMNS // LANES, fetch_part=2)  # half: the other keys are fetched during the softmax
_add_four, _add_two, _add_one = matmul(4), matmul(2), matmul(1)


def padded_dim(head_dim: int) -> int:
    """Return the width of a value row in the cache: whole vectors on every CPU."""
    return -(-head_dim // 16) * 16


@inline
def _add_values(a, stride_a, b, like, size, columns, depth, c, rows, ahead):
    """Add a[:rows, :depth] @ b[:depth, :columns] to c[:rows], all by their addresses.

    like, size: an element of b, and its bytes. ahead: the address of what is read next, to fetch it meanwhile.
    """
    j = 0
    while columns - j >= 4 * LANES:
        _add_four(a, stride_a, b + size * j, like, columns, depth, c + 4 * j, columns, rows, ahead)
        j, ahead = j + 4 * LANES, ahead + 4 * LANES * depth * size
    while columns - j >= 2 * LANES:
        _add_two(a, stride_a, b + size * j, like, columns, depth, c + 4 * j, columns, rows, ahead)
        j, ahead = j + 2 * LANES, ahead + 2 * LANES * depth * size
    while columns - j >= LANES:
        _add_one(a, stride_a, b + size * j, like, columns, depth, c + 4 * j, columns, rows, ahead)
        j, ahead = j + LANES, ahead + LANES * depth * size


@inline
def _keys_seen(position, base, window):
    """Return the first key of the block at `base` that a query sees, and the end of those: two places in the block."""
    first = position - window + 1 - base if window > 0 else 0
    return min(max(first, 0), BLOCK), min(max(position - base + 1, 0), BLOCK)


@inline
def _mask(s, r, low, high, value):
    """Give the keys that a row doesn't see a value."""
    for j in range(low):
        s[r, j] = value
    for j in range(high, BLOCK):
        s[r, j] = value


@inline
def _are_finite(values, like, size, count):
    """True if none of `count` numbers at an address is infinite or NaN."""
    numbers, strange = carray(pointer(values, like), (count,)), False
    for j in range(count):
        number = widen(numbers[j])
        strange |= number - number != _ZERO
    return not strange


@inline
def _attend_blocks(
    first, end, rows, group, position, window, table, at_k, at_v, strides, like, size, dim, width, scale, tile, then
):
    """Go on with some rows of a tile over the key blocks from `first` on, before `end`.

    rows: the first and the number; they are of tokens at `position` and after it, `group` rows each. table: the blocks
    of their sequence. tile: queries, scores, outputs, and of each row the largest score and the sum so far. then: the
    addresses of the keys and values to fetch meanwhile, those of the block that is read after these.
    """
    qs, s, o, m, l, largest, factors = tile
    start, count = rows
    at_q, at_s, at_o = (
        qs.ctypes.data + 4 * dim * start, s.ctypes.data + 4 * BLOCK * start, o.ctypes.data + 4 * width * start
    )  # fmt: skip
    scores = s[start : start + count].reshape(count * BLOCK)
    last = position + count // group - 1
    key_bytes = size * dim * BLOCK
    row_bytes = -(-key_bytes // (2 * count * CACHE_LINE)) * CACHE_LINE  # of the next keys, with a row's exponentials
    for block in range(first, end):
        base = block * BLOCK
        keys, values = at_k + strides[0] * table[block], at_v + strides[1] * table[block]
        next_keys, next_values = then
        if block + 1 < end:
            next_keys, next_values = at_k + strides[0] * table[block + 1], at_v + strides[1] * table[block + 1]
        for j in range(count * BLOCK):
            scores[j] = _ZERO
        for j in range(0, BLOCK, _SCORE_COLUMNS):
            fetched = next_keys + size * dim * j // 2
            _add_scores(at_q, dim, keys + size * j, like, BLOCK, dim, at_s + 4 * j, BLOCK, count, fetched)
        masked = base + BLOCK > position + 1 or (window > 0 and last - window + 1 > base)
        for j in range(count * BLOCK):  # by stages, so that rows overlap
            scores[j] *= float32(scale)
        for r in range(start, start + count):
            if masked:
                low, high = _keys_seen(position + (r - start) // group, base, window)
                _mask(s, r, low, high, _MASKED)
            largest[r] = max(m[r], block_max(s.ctypes.data + 4 * BLOCK * r))
        fetched = key_bytes // 2
        for r in range(start, start + count):
            for line in range(fetched, min(fetched + row_bytes, key_bytes), CACHE_LINE):
                prefetch(next_keys + line)
            fetched += row_bytes
            top = largest[r]
            for j in range(BLOCK):
                s[r, j] = exp(s[r, j] - top)
        for r in range(start, start + count):
            factors[r] = exp(m[r] - largest[r])  # for what came before
        if masked:
            for r in range(start, start + count):
                low, high = _keys_seen(position + (r - start) // group, base, window)
                _mask(s, r, low, high, _ZERO)
        for r in range(start, start + count):
            factor = factors[r]
            m[r], l[r] = largest[r], fma(l[r], factor, block_sum(s.ctypes.data + 4 * BLOCK * r))
            if factor != _ONE:
                for j in range(width):
                    o[r, j] *= factor
        step = count
        if masked:  # 0 x inf is NaN: keys that only later tokens see may not be multiplied, unless they are finite
            seen, all_seen = min(max(position - base + 1, 0), BLOCK), min(BLOCK, last - base + 1)
            if not _are_finite(values + size * width * seen, like, size, width * (all_seen - seen)):
                step = group
        for r in range(0, count, step):
            depth = min(BLOCK, position + (r + step) // group - base)
            if depth > 0:
                _add_values(
                    at_s + 4 * BLOCK * r, BLOCK, values, like, size, width, depth, at_o + 4 * width * r, step,
                    next_values,
                )  # fmt: skip
        for line in range(size * width * min(BLOCK, last + 1 - base), size * width * BLOCK, CACHE_LINE):
            prefetch(next_values + line)  # which the product didn't, over fewer keys


@inline
def _cost(items, positions, window, at):
    """Return about how many keys the tokens of an item, and of those that it has taken in, see."""
    cost = 0
    for i in range(at, at + items[at, 3]):
        first, count = items[i, 0], items[i, 1]
        before = min(positions[first], window) if window > 0 else positions[first]
        cost += count * (before + count)
    return cost


@inline
def _first_block(position, window):
    """Return the number of the first block of keys that a query sees."""
    return max(0, position - window + 1) // BLOCK if window > 0 else 0


@inline
def _attend_share(
    program, programs, q, k_cache, v_cache, items, positions, block_tables, block_table_starts, scale, window, out, lse
):
    """Attend for one of `programs` shares of the work, pairs of items and KV heads.

    Neighbours' shares follow each other, and cost about the same.
    """
    heads, dim = q.shape[1], q.shape[2]
    kv_heads = k_cache.shape[1]
    width = v_cache.shape[3]
    group = heads // kv_heads
    most = max(QUERY_ROWS, group)
    qs = np.empty((most, dim), np.float32)
    s = np.empty((most, BLOCK), np.float32)
    o = np.empty((most, width), np.float32)
    m, l = np.empty(most, np.float32), np.empty(most, np.float32)
    largest, factors = np.empty(most, np.float32), np.empty(most, np.float32)
    tile = qs, s, o, m, l, largest, factors
    like, size = k_cache[0, 0, 0, 0], k_cache.itemsize
    strides = k_cache.strides[0], v_cache.strides[0]
    total, last_work = 0, items.shape[0] * kv_heads - 1
    for at in range(items.shape[0]):
        total += kv_heads * _cost(items, positions, window, at)
    done = 0
    for work in range(items.shape[0] * kv_heads):
        at, head = work // kv_heads, work % kv_heads
        sharers = items[at, 3]
        cost = _cost(items, positions, window, at)
        done += cost
        if sharers == 0 or (2 * done - cost) * programs // (2 * total) != program:  # by the middle of its cost
            continue
        at_k = k_cache.ctypes.data + head * k_cache.strides[1]
        at_v = v_cache.ctypes.data + head * v_cache.strides[1]
        first = items[at, 0]
        rows = (items[at + sharers - 1, 0] + items[at + sharers - 1, 1] - first) * group
        for r in range(rows):
            for j in range(dim):  # an assignment of arrays takes seconds longer to compile, for its error's text
                qs[r, j] = q[first + r // group, head * group + r % group, j]
            m[r] = _MASKED
            l[r] = _ZERO
        o[:rows] = _ZERO
        shared = items[at, 4] if window == 0 else 0
        for i in range(at, at + sharers):
            shared = min(shared, positions[items[i, 0]] // BLOCK)
        for i in range(at - 1 if shared else at, at + sharers):
            each = max(i, at)
            table = block_tables[block_table_starts[items[each, 2]] :]
            start, count, token_rows = (items[each, 0] - first) * group, items[each, 1] * group, group
            position = positions[items[each, 0]]
            begin = max(_first_block(position, window), shared)
            end = (position + items[each, 1] - 1) // BLOCK + 1
            if i < at:  # what all share, of which each row sees all keys
                begin, end, start, count, token_rows, position = 0, shared, 0, rows, rows, shared * BLOCK
            after, after_head, skipped = min(work + 1, last_work) // kv_heads, (work + 1) % kv_heads, 0
            if i + 1 < at + sharers:
                after, after_head, skipped = i + 1, head, shared
            following = max(_first_block(positions[items[after, 0]], window), skipped)
            block = block_tables[block_table_starts[items[after, 2]] + following]
            then = (
                k_cache.ctypes.data + strides[0] * block + k_cache.strides[1] * after_head,
                v_cache.ctypes.data + strides[1] * block + v_cache.strides[1] * after_head,
            )
            _attend_blocks(
                begin, end, (start, count), token_rows, position, window, table, at_k, at_v, strides, like, size, dim,
                width, scale, tile, then,
            )  # fmt: skip
        for r in range(rows):
            token, h = first + r // group, head * group + r % group
            for j in range(dim):
                out[token, h, j] = o[r, j] / l[r] + _ZERO  # + 0: a masked key may have turned -0 into +0
            lse[token, h] = float32(float(m[r]) + math.log(float(l[r])))


@region
def attend(q, k_cache, v_cache, items, positions, block_tables, block_table_starts, scale, window, out, lse, programs):
    """Attend with q fp32 [T, heads, D], shared among programs; write `out` of its shape, and `lse` [T, heads]."""
    for program in prange(programs):
        _attend_share(
            program, programs, q, k_cache, v_cache, items, positions, block_tables, block_table_starts, scale, window,
            out, lse,
        )  # fmt: skip


@composed
def _attention(
    q, k_cache, v_cache, items, positions, block_tables, block_table_starts, scale, window, out, lse, programs
):
    attend(q, k_cache, v_cache, items, positions, block_tables, block_table_starts, scale, window, out, lse, programs)


@inline
def write_token(k, v, slot, k_cache, v_cache):
    """Write one token's k and v [kv_heads, head_dim] to a slot of the cache."""
    block, offset = slot // BLOCK, slot % BLOCK
    for h in range(k.shape[0]):
        for j in range(k.shape[1]):
            k_cache[block, h, j, offset] = k[h, j]
            v_cache[block, h, offset, j] = v[h, j]


@inline
def place(x, weight, eps, cos, sin, out):
    """Norm each head of one token, unless the norm has no weight, and turn it."""
    if weight.size:
        normed = np.empty_like(x)
        for h in range(x.shape[0]):
            norm_row(x[h], weight, eps, normed[h])
        turn(normed, cos, sin, out)
    else:
        turn(x, cos, sin, out)


@elementwise
def _place_heads(q, k, v, q_norm, q_eps, k_norm, k_eps, cos, sin, slot_mapping, k_cache, v_cache, out):
    for t in prange(q.shape[0]):
        keys = np.empty_like(k[t])
        place(q[t], q_norm, q_eps, cos[t], sin[t], out[t])
        place(k[t], k_norm, k_eps, cos[t], sin[t], keys)
        write_token(keys, v[t], slot_mapping[t], k_cache, v_cache)


@parallel
def _write_kv(k, v, slot_mapping, k_cache, v_cache):
    for t in prange(slot_mapping.size):
        write_token(k[t], v[t], slot_mapping[t], k_cache, v_cache)


def new_kv_cache(
    num_blocks: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return empty blocks: nothing is read before it was written, so memory is touched only as it fills."""
    like = torch.empty(0, dtype=dtype, device=device)
    k_cache = new_memory(like, num_blocks, kv_heads, head_dim, BLOCK)
    return k_cache, new_memory(like, num_blocks, kv_heads, BLOCK, padded_dim(head_dim))


def write_kv(
    k: torch.Tensor, v: torch.Tensor, layout: PagedLayout, k_cache: torch.Tensor, v_cache: torch.Tensor
) -> None:
    """Write k and v [T, kv_heads, head_dim], in the cache's dtype, to the layout's slots in the cache."""
    keys, values, *caches = map(own_storage, (k.contiguous(), v.contiguous(), k_cache, v_cache))
    _write_kv(keys, values, layout.slot_mapping, *caches)


def place_heads(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    norms: HeadNorms | None,
    tables: tuple[torch.Tensor, torch.Tensor],
    layout: PagedLayout,
    cache: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Return q [T, heads, D], normed and turned; write k, treated alike, and v to the cache. See `Backend`."""
    given = [own_storage(t.contiguous()) for t in (q, k, v)]
    (q_norm, q_eps), (k_norm, k_eps) = norms or ((q.new_empty(0), 0.0),) * 2
    of_norms = storage(q_norm), q_eps, storage(k_norm), k_eps
    out = torch.empty(q.shape, dtype=q.dtype)
    turned = [own_storage(t.contiguous()) for t in tables]
    _place_heads(*given, *of_norms, *turned, layout.slot_mapping, *map(own_storage, cache), own_storage(out))
    return out


def tile_tokens(group: int) -> int:
    """Return the query tokens that share a pass over the keys."""
    return max(1, QUERY_ROWS // group)


def work_items(lengths: Sequence[int], group: int, item_tokens: int | None = None) -> np.ndarray:
    """Return rows (first token, tokens, sequence, 1, 0), int32 [n, 5]: query tokens that share a pass over the keys.

    item_tokens: the tokens of an item; None takes `tile_tokens`. For the other numbers see `share_reads`.
    """
    step = item_tokens or tile_tokens(group)
    rows, first = [], 0
    for sequence, length in enumerate(lengths):
        rows += [(first + i, min(step, length - i), sequence, 1, 0) for i in range(0, length, step)]
        first += length
    return np.array(rows, np.int32).reshape(-1, 5)


def share_reads(
    items: np.ndarray, lengths: Sequence[int], group: int, block_tables: np.ndarray, starts: np.ndarray
) -> np.ndarray:
    """Return the items with neighbours put together that share first blocks, for which they then share a pass.

    The fourth number of an item says how many there are from it on, 0 in those that another has taken in; the fifth,
    how many blocks they share.
    """
    sequences = items[:, 2]
    whole = np.bincount(sequences, minlength=len(starts))[sequences] == 1
    neighbours = whole[:-1] & whole[1:] & (np.diff(sequences) == 1)
    if not neighbours.any():
        return items
    common = np.where(neighbours, shared_blocks(block_tables, starts)[sequences[:-1]], 0)
    items = items.copy()
    for first, last, depth in sharing_runs(items[:, 1].tolist(), common.tolist(), tile_tokens(group)):
        items[first, 3:], items[first + 1 : last + 1, 3] = (last - first + 1, depth), 0
    return items


def attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, layout: PagedLayout, scale: float, window: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return causal attention over the cache, fp32 of q's shape [T, heads, D], and log-sum-exp fp32 [T, heads].

    window: keys a row sees, itself included; 0 is all.
    """
    q = q.float().contiguous()
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:2])
    caches = own_storage(k_cache), own_storage(v_cache)
    programs = torch.get_num_threads()
    where = layout.items, layout.positions, layout.block_tables, layout.block_table_starts
    _attention(q.numpy(), *caches, *where, scale, window, out.numpy(), lse.numpy(), programs)
    return out, lse
