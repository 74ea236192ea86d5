"""The GPU kernels without a GPU: interpreted, against fp64 and themselves under every schedule, and compiled."""

import dataclasses
import functools
import gc
import itertools
import json
import math
import os
import pathlib
import random
import re
import subprocess
import sys
import weakref
from collections import Counter
from importlib import metadata
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from samebits import LLM, NumericsError, SamplingParams
from samebits.engine import cuda_graphs, sampler
from samebits.engine.model_runner import ModelRunner
from samebits.kernels import contract, cpu, ops
from samebits.kernels import triton as kernels
from samebits.kernels.cpu.elementwise import TORCH_ACTIVATIONS
from samebits.kernels.triton import work
from samebits.kernels.triton.launch import INTERPRETED
from samebits.kernels.triton.linear import chunks, products
from samebits.kernels.triton.schedules import Tile
from samebits.model.linear import UnsupportedModelError
from samebits.model.paged import group_size, hidden_states
from samebits.model.rollout import FusedLayer
from samebits.trainer import exact_model, token_logprobs

from helpers import faults
from helpers.drafters import DRAFTERS, VOCAB, speculative_config
from helpers.interpreter import interpreted  # first: it makes Triton interpret
from helpers.interpreter import interpreter as triton_interpreter
from helpers.moe import save_tiny_moe
from helpers.schedules import (
    assert_trainers_experts,
    check_against_trainer,
    check_results,
    random_requests,
    run_schedule,
    tight_pool,
)

# numpy's, about NaN in lanes that a mask drops
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
assert INTERPRETED
linear, paged, backward, library, sampling = (
    sys.modules[f"samebits.kernels.triton.{name}"]
    for name in ("linear", "attention", "attention_backward", "library_backward", "sampling")
)
DTYPES = ops.DTYPES
contract_batches, num_splits = contract._batches, paged.num_splits  # before they are patched
ROUNDING = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@pytest.fixture(autouse=True)
def interpreter(one_thread):
    with interpreted():
        yield


def wide_exponents(*shape: int) -> torch.Tensor:
    """Sums of such numbers differ at once when they are added in another order."""
    return torch.randn(*shape) * torch.exp2(torch.randint(-6, 6, shape))


def error(value: torch.Tensor, reference: torch.Tensor, scale: torch.Tensor | float) -> float:
    """Largest error in units of `scale`: what the sum's terms add up to in magnitude."""
    return float(((value.double() - reference).abs() / scale).max())


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_tile_changes_a_bit_of_a_product(dtype):
    torch.manual_seed(0)
    depth, features = 173, (70, 33, 128)
    x = wide_exponents(19, depth).to(dtype)
    weights = [wide_exponents(n, depth).to(dtype) for n in features]
    biases = [torch.randn(70).to(dtype), None, torch.randn(128).to(dtype)]
    assert [chunks(depth, n) for n in features] == [2, 2, 2]
    first = products(x, weights, biases, torch.float32, Tile(16, 16, 2, 4, True))
    for w, b, out in zip(weights, biases, first, strict=True):
        exact = x.double() @ w.double().t() + (0 if b is None else b.double())
        assert error(out, exact, x.double().abs() @ w.double().abs().t() + 1) < 1e-6
    for m, n, split in itertools.product((16, 32, 64), (16, 64), (True, False)):
        tile = Tile(m, n, 2, 4, split)
        for out, same in zip(products(x, weights, biases, torch.float32, tile), first, strict=True):
            assert torch.equal(out, same), tile
    for rows, (w, b, out) in itertools.product(
        (slice(0, 1), slice(5, 8), slice(2, 19)), zip(weights, biases, first, strict=True)
    ):
        alone = products(x[rows], [w], [b], dtype)[0]
        assert torch.equal(alone, out[rows].to(dtype)), rows


@pytest.mark.parametrize("dtype", DTYPES)
def test_steps_of_twice_the_depth_change_no_bit(dtype, monkeypatch):
    """In a chunk, in two by one program and by two; where a chunk is no whole number of them, steps are single."""
    steps, launch = [], linear.launch
    monkeypatch.setattr(
        linear, "launch", lambda *a, **o: (steps.append(o["BLOCK_K"] // linear.BLOCK_K[dtype]), launch(*a, **o))
    )
    for depth, features, count, wanted in ((512, 300, 1, 2), (512, 128, 2, 2), (448, 128, 2, 1)):
        x, w = wide_exponents(5, depth).to(dtype), wide_exponents(features, depth).to(dtype)
        assert chunks(depth, features) == count
        expected = products(x, [w], [None], torch.float32, Tile(16, 64, 2, 4, True))[0]
        for split in (True, False):
            steps.clear()
            found = products(x, [w], [None], torch.float32, Tile(16, 64, 2, 4, split, deep=True))[0]
            assert torch.equal(found, expected) and steps == [wanted]


@pytest.mark.parametrize(
    ("dtype", "name", "features"),
    [
        *((dtype, "silu", 70) for dtype in DTYPES),
        (torch.bfloat16, "silu", 130),
        (torch.float16, "gelu", 33),
        (torch.float32, "gelu_pytorch_tanh", 70),
    ],
)
def test_an_activation_within_a_product_has_the_bits_of_its_steps(dtype, name, features):
    """In one chunk and two, by one program and several; persistent tiles take their steps apart."""
    torch.manual_seed(0)
    x = wide_exponents(19, 173).to(dtype)
    pair = [wide_exponents(features, 173).to(dtype) / 8 for _ in range(2)]
    assert chunks(173, features) == (2 if features < 100 else 1)
    tiles = [Tile(16, 32, 2, 4, True), Tile(32, 128, 2, 4, True), Tile(16, 64, 2, 4, False)]
    for biases in ([None, None], [torch.randn(features).to(dtype), None]):
        expected = kernels.gated_activation(*products(x, pair, biases, dtype, tiles[1]), name)
        for tile in (*tiles, Tile(32, 128, 2, 4, False, tma=True)):
            assert torch.equal(linear.gated_products(x, pair, biases, name, dtype, tile), expected), tile
        given = [(w, features, b) for w, b in zip(pair, biases, strict=True)]
        assert torch.equal(kernels.gated_packed(x[2:3], *given, name, dtype), expected[2:3])
        unrounded = kernels.gated_activation(*products(x, pair, biases, torch.float32, tiles[1]), name).to(dtype)
        assert torch.equal(unrounded, expected) == (dtype == torch.float32), "a control: gate and up are rounded"


def test_an_engine_s_gate_and_up_are_one_launch(checkpoint, monkeypatch):
    """Not where an adapter or a hook wants to see them."""
    path = checkpoint("llama", vocab_size=257, num_hidden_layers=1)
    trained = exact_model(path, "float32").model.layers[0].mlp
    x = torch.randn(5, trained.gate_proj.in_features)
    expected = trained(x)
    llm = LLM(path, dtype="float32", kv_cache_memory_bytes=2**22, skip_tokenizer_init=True)
    mlp = llm.engine.executor.workers[0].runner.model.model.layers[0].mlp
    calls = []
    monkeypatch.setattr(linear, "linear_tile", lambda *_: Tile(16, 64, 2, 4, True))
    launch = linear.launch

    def record(kernel, grid, *args, **options):
        calls.append(options["ACTIVATION"])
        launch(kernel, grid, *args, **options)

    monkeypatch.setattr(linear, "launch", record)
    assert torch.equal(mlp(x), expected) and calls == [0, -1]
    calls.clear()
    seen: list[torch.Tensor] = []
    mlp.up_proj.register_forward_hook(lambda module, given, out: seen.append(out))
    assert torch.equal(mlp(x), expected) and calls == [-1, -1, -1] and len(seen) == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_low_rank_update_has_the_bits_of_its_steps(dtype):
    torch.manual_seed(0)
    features = 100, 20, 172
    weights = [wide_exponents(n, 100).to(dtype) for n in features]
    updates = [ops.LowRank(torch.randn(5, 100), torch.randn(n, 5), 1.7) for n in (100, 172)]
    updates.insert(1, None)
    for rows in (1, 9):
        x = torch.randn(rows, 100).to(dtype)
        outs = ops.linears(x, [ops.PackedWeight.pack(w) for w in weights], [None] * 3, updates)
        for out, weight, update in zip(outs, weights, updates, strict=True):
            expected = ops.linear(x, weight)
            if update is not None:
                inner = ops.linear(x.float(), update.down)
                expected = (expected + ops.linear(inner, update.up) * update.scale).to(dtype)
            assert torch.equal(out, expected)


def test_arrival_counters_are_left_at_zero():
    x, w = torch.randn(40, 256), torch.randn(50, 256)
    before = products(x, [w], [None], torch.float32, Tile(16, 16, 2, 4, True))[0]
    assert torch.equal(products(x, [w], [None], torch.float32, Tile(32, 32, 2, 4, True))[0], before)
    assert not any(buffer.any() for buffer in linear._scratch[x.device, torch.int32, 0])


def test_streams_share_no_scratch(monkeypatch):
    """Launches of two streams overlap: one would count the other's arrivals."""
    x, w, tile = torch.randn(40, 256), torch.randn(50, 256), Tile(16, 16, 2, 4, True)
    used = []
    for stream in (1, 2, 1):
        monkeypatch.setattr(linear, "current_stream", lambda device, stream=stream: stream)
        monkeypatch.setattr(linear, "launch", lambda kernel, grid, *args, **_: used.append(args[10:12]))
        products(x, [w], [None], torch.float32, tile)
    first, second, again = ([t.data_ptr() for t in buffers] for buffers in used)
    assert first == again and not set(first) & set(second)


def test_compilers_known_to_be_wrong_are_refused():
    for capability, version, problem in [
        ((7, 5), "3.7.1", "8.0"), ((10, 0), "3.6.0", "triton>=3.7"), ((10, 3), "3.8.0", "10.3"),
    ]:  # fmt: skip
        assert problem in kernels.compiler_problem(capability, version)
    for capability, version in [((8, 0), "3.2.0"), ((9, 0), "3.6.0"), ((10, 0), "3.7.0"), ((10, 0), "3.10.1")]:
        assert kernels.compiler_problem(capability, version) is None


def packed(dtype, lengths, heads, kv_heads, dim):
    """q, k, v of packed sequences, and their keys and values in scattered blocks of a cache full of NaN."""
    torch.manual_seed(0)
    total = sum(lengths)
    q, k, v = (torch.randn(total, h, dim).to(dtype) for h in (heads, kv_heads, kv_heads))
    layout = ops.packed_layout(lengths, heads // kv_heads, torch.device("cpu"))
    shuffle = np.random.default_rng(0).permutation(layout.num_blocks).astype(np.int32)
    layout.block_tables = shuffle[layout.block_tables]
    layout.slot_mapping = shuffle[layout.slot_mapping // paged.BLOCK] * paged.BLOCK + layout.slot_mapping % paged.BLOCK
    cache = kernels.new_kv_cache(layout.num_blocks, kv_heads, dim, dtype, torch.device("cpu"))
    for part in cache:
        part.fill_(math.nan)
    return q, k, v, cache, layout


def test_a_head_too_wide_is_refused():
    with pytest.raises(NotImplementedError, match="head_dim 160: GPU kernels go up to 128"):
        kernels.new_kv_cache(1, 1, 160, torch.float32, torch.device("cpu"))


def reference_attention(q, k, v, lengths, scale, window):
    outs, first, group = [], 0, q.shape[1] // k.shape[1]
    for n in lengths:
        a, b, c = (t[first : first + n].transpose(0, 1) for t in (q, k, v))
        scores = a @ b.repeat_interleave(group, 0).transpose(1, 2) * scale
        row, column = torch.arange(n)[:, None], torch.arange(n)[None]
        hidden = (column > row) | ((column <= row - window) if window else torch.zeros(n, n, dtype=torch.bool))
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        outs.append((weights @ c.repeat_interleave(group, 0)).transpose(0, 1))
        first += n
    return torch.cat(outs)


WINDOWS = [
    pytest.param(dtype, window, marks=[] if (dtype, window) == (torch.bfloat16, 70) else pytest.mark.slow)
    for dtype in DTYPES
    for window in (0, 70)
]


@pytest.mark.parametrize(("dtype", "window"), WINDOWS)
def test_decode_prefill_and_split_attention_agree_as_bits(dtype, window):
    lengths, scale = [300, 5, 1, 130], 24**-0.5
    q, k, v, cache, layout = packed(dtype, lengths, 4, 2, 24)
    out, lse = ops.paged_attention(q, k, v, cache, layout, scale, window)
    exact = reference_attention(q.double(), k.double(), v.double(), lengths, scale, window)
    assert error(out, exact, exact.abs().max()) < 1e-6 + 2 * ROUNDING[dtype]
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    tables = torch.from_numpy(layout.block_tables)
    for token, splits in itertools.product((0, 63, 64, 150, 299, 300, 304, 305, 306, 370, 435), (1, 2, 3)):
        one, position = torch.tensor([[0, 1, 0, 0, 0]]).int(), torch.from_numpy(layout.positions[token : token + 1])
        start = torch.from_numpy(layout.block_table_starts[sequence[token]][None])
        alone = paged.attention(
            q[token : token + 1], *cache, one, position, tables, start, scale, window, [1], 300, splits=splits
        )
        assert torch.equal(alone[0][0], out[token]), (token, splits)
        assert torch.equal(alone[1][0], lse[token]), (token, splits)


@pytest.mark.parametrize(("dtype", "window"), WINDOWS)
def test_a_value_that_is_not_finite_reaches_only_rows_that_see_it(dtype, window):
    """As that of a wrong draft may be, of a token that the sequence never has: in large tiles and in small ones."""
    q, k, v, cache, layout = packed(dtype, [130, 8], 4, 2, 24)
    expected = ops.paged_attention(q, k, v, cache, layout, 24**-0.5, window)
    for late, place, strange in ((100, 0, math.inf), (129, 23, math.nan), (64, 7, -math.inf), (134, 7, math.inf)):
        other = v.clone()
        other[late, :, place] = strange
        found = ops.paged_attention(q, k, other, cache, layout, 24**-0.5, window)
        seen = slice(late, 130 if late < 130 else 138)
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a[: seen.start], b[: seen.start]) and torch.equal(a[seen.stop :], b[seen.stop :])
        reached = found[0][seen][:window] if window else found[0][seen]
        assert not reached.isfinite().any()


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_that_are_not_finite_are_kept_as_a_key_that_is_none(dtype, normed):
    case = Heads.random(dtype, 20)
    case.v[1, 0, 13], case.v[6, 1, 2] = math.inf, math.nan
    _, keys, values = case.place(normed)
    slots = [divmod(int(case.layout.slot_mapping[token]), paged.BLOCK) for token in (1, 6)]
    assert values.isfinite().all() and keys.isnan().sum() == 2 * 20
    for (block, at), head in zip(slots, (0, 1), strict=True):
        assert keys[block, head, at].isnan().all() and not values[block, head, at].any()


def test_a_gpus_probe_has_rows_for_each_kind_of_tile(monkeypatch):
    monkeypatch.setattr(contract, "_batches", lambda device, features: (70, [1, 17, 33, 65, 70]))
    weights = [wide_exponents(24, 200).bfloat16()]
    contract.probe(weights)
    with monkeypatch.context() as patch:
        patch.setattr(linear, "chunks", lambda depth, features: random.choice((1, 2, 3)))
        with pytest.raises(NumericsError, match="different bits in different batches"):
            contract.probe(weights)
    rows, counts = contract_batches(torch.device("cuda"), 4096)
    assert {count for count in counts if count < rows} >= {1, 17, 33, 65, 129, 257} and counts.count(rows) > 10


class Decoding(NamedTuple):
    """A step that decodes: each sequence has `lengths` keys, of which the first blocks may be another's, too."""

    q: torch.Tensor
    cache: tuple[torch.Tensor, torch.Tensor]
    positions: torch.Tensor
    tables: np.ndarray
    starts: np.ndarray
    counts: list[int]

    def attend(self, items: np.ndarray, shared: int, window: int, splits: int | None):
        where = (torch.from_numpy(a) for a in (items, self.positions, self.tables, self.starts))
        longest = int(self.positions.max()) + 1
        return paged.attention(self.q, *self.cache, *where, 0.2, window, self.counts, longest, shared, splits)


def decoding(dtype, group: int, families: list[tuple[int, list[int]]], counts=None) -> Decoding:
    """families: (blocks that are shared, lengths of those that share them); counts: query tokens of each sequence."""
    torch.manual_seed(0)
    tables, starts, lengths, new = [], [], [], itertools.count()
    for common, members in families:
        first = [next(new) for _ in range(common)]
        for length in members:
            starts.append(len(tables))
            tables += first + [next(new) for _ in range(-(-length // paged.BLOCK) - common)]
            lengths.append(length)
    counts = counts or [1] * len(lengths)
    total, blocks = sum(counts), next(new)
    order = np.random.default_rng(0).permutation(blocks).astype(np.int32)
    cache = [torch.randn(blocks, 2, paged.BLOCK, 24).to(dtype) for _ in range(2)]
    for start, length in zip(starts, lengths, strict=True):  # what no key fills is NaN
        last = order[tables[start + (length - 1) // paged.BLOCK]]
        for part in cache:
            part[last, :, (length - 1) % paged.BLOCK + 1 :] = math.nan
    positions = np.concatenate([np.arange(n - c, n, dtype=np.int32) for n, c in zip(lengths, counts, strict=True)])
    q = torch.randn(total, 2 * group, 24).to(dtype)
    return Decoding(q, tuple(cache), positions, order[tables], np.array(starts, np.int32), counts)


FAMILIES = [(3, [200, 210, 330]), (0, [70]), (2, [129, 150, 129])]


@pytest.mark.parametrize(("dtype", "window", "group", "counts"), [
    (torch.float32, 0, 2, None),
    (torch.bfloat16, 200, 2, [1, 3, 1, 1, 2, 1, 1]),
    pytest.param(torch.float16, 0, 4, None, marks=pytest.mark.slow),
    pytest.param(torch.float16, 140, 4, None, marks=pytest.mark.slow),
])  # fmt: skip
def test_reading_a_shared_prompt_once_changes_no_bit(dtype, window, group, counts):
    """Under every grouping of neighbours: each sequence alone, pairs, all that fit; sequences of drafts, too."""
    step = decoding(dtype, group, FAMILIES, counts)
    own = kernels.work_items(step.counts, group)
    expected = step.attend(own, 0, window, 1)
    for most, splits in itertools.product((1, 2, 3), (1, 5)):  # 5: more than there are segments
        items, shared = own.copy(), []
        for first in (0, 4) if most > 1 else ():
            count = int(own[first : first + most, 1].sum())
            shared.append((own[first, 0], count, own[first, 2], -1, own[first, 4]))
            items[first : first + most, 3] = 1
        both = np.concatenate((np.array(shared, np.int32).reshape(-1, 5), items))
        assert all(map(torch.equal, step.attend(both, len(shared), window, splits), expected)), (most, splits)
    planned = kernels.share_reads(own, step.counts, group, step.tables, step.starts)
    gained = len(planned) - len(own)
    assert gained and all(map(torch.equal, step.attend(planned, gained, window, 1), expected))


def test_negative_control_a_block_that_is_not_shared_changes_bits():
    step = decoding(torch.float32, 2, [(2, [200, 210])])
    own = kernels.work_items(step.counts, 2)
    wrong = np.concatenate((np.array([(0, 2, 0, -1, 0)], np.int32), own))
    wrong[1:, 3] = 1
    expected = step.attend(own, 0, 0, 1)
    assert all(map(torch.equal, step.attend(wrong, 1, 0, 1), expected))
    step.tables[step.starts[1]] = step.tables[-1]
    assert not torch.equal(step.attend(own, 0, 0, 1)[0], step.attend(wrong, 1, 0, 1)[0])
    assert len(kernels.share_reads(own, step.counts, 2, step.tables, step.starts)) == len(own), "planned though unequal"


@pytest.mark.parametrize(("group", "times"), [(2, 8), (4, 4), pytest.param(8, 2, marks=pytest.mark.slow)])
def test_a_groups_samples_read_their_prompt_once(group, times, monkeypatch):
    """Blocks that programs visit, counted: 16 samples of a prompt of 2 segments, with tails of 2 blocks."""
    visits, dot = [], triton_interpreter.InterpreterBuilder.create_dot
    monkeypatch.setattr(triton_interpreter.InterpreterBuilder, "create_dot", lambda *a: (visits.append(1), dot(*a))[1])
    per_block, prompt = 3, 2 * paged.SEGMENT // paged.BLOCK
    step = decoding(torch.float16, group, [(prompt, [2 * paged.SEGMENT + 100] * 16)])
    own = kernels.work_items(step.counts, group)
    expected = step.attend(own, 0, 0, 1)
    apart = len(visits) // per_block // 2  # KV heads
    visits.clear()
    planned = kernels.share_reads(own, step.counts, group, step.tables, step.starts)
    assert all(map(torch.equal, step.attend(planned, len(planned) - len(own), 0, 2), expected))
    together = len(visits) // per_block // 2
    assert apart == 16 * (prompt + 2)
    assert together == 16 * prompt // times + 16 * 2


@pytest.mark.parametrize(("samples", "room", "splits"), [(8, 8, 9), (8, 1, 9), (64, 64, 9), (256, 256, 3)])
def test_enough_programs_read_a_shared_prompt(samples, room, splits, monkeypatch):
    """8 segments and a tail, for 2 KV heads: as many programs as fill an H100, whatever a graph has room for."""
    grids = []
    monkeypatch.setattr(paged, "launch", lambda kernel, grid, *_, **__: grids.append(grid))
    monkeypatch.setattr(paged, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(paged, "num_splits", num_splits)
    q, cache = torch.empty(samples, 8, 16).half(), kernels.new_kv_cache(1, 2, 16, torch.float16, torch.device("cpu"))
    shared, longest = max(1, room // 2), 8 * paged.SEGMENT + 100
    items = torch.zeros(shared + samples, 5, dtype=torch.int32)
    paged.attention(q, *cache, items, *[items[0]] * 3, 0.2, 0, [1] * samples, longest, shared)
    assert grids[0][1:] == (2, splits)


def test_few_shared_segments_are_read_apart():
    """A merge costs more than a segment of two samples among long contexts of their own saves."""
    segment = paged.SEGMENT // paged.BLOCK
    for common, gains in ((1, False), (8, True)):
        step = decoding(torch.float16, 2, [(common * segment, [10 * paged.SEGMENT, 10 * paged.SEGMENT])])
        own = kernels.work_items(step.counts, 2)
        planned = kernels.share_reads(own, step.counts, 2, step.tables, step.starts)
        assert (len(planned) > len(own)) == gains


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"enforce_eager": True, "blocks": 3}], ids=str)
def test_an_engine_shares_reads_to_the_same_bits(checkpoint, settings, monkeypatch):
    """In graphs and without; a prompt of a group, found in the prefix cache by another; a small pool preempts."""
    monkeypatch.setattr(paged, "SEGMENT", 64)
    planned, share = [], work.share_reads
    monkeypatch.setattr(work, "share_reads", lambda items, *a: (planned.append(share(items, *a)), planned[-1])[1])
    path = checkpoint("mistral", vocab_size=257, num_hidden_layers=1)
    model, prompt = exact_model(path), [(7 * i) % 257 for i in range(70)]
    requests = [(prompt, SamplingParams(n=n, max_tokens=5, seed=n, ignore_eos=True)) for n in (3, 2)]
    settings = {"kv_cache_memory_bytes": tight_pool(model, requests, settings.get("blocks", 20)), **settings}
    settings.pop("blocks", None)
    llm = LLM(path, dtype="float32", skip_tokenizer_init=True, **settings)
    requests.append(([*range(10)], SamplingParams(max_tokens=2, ignore_eos=True)))
    check_against_trainer(model, requests, serve_in_turn(llm, requests, [0, 0, 3]))
    assert any((items[:, 3] < 0).any() for items in planned), "nothing was shared"
    if not settings.get("enforce_eager"):
        graphs = llm.engine.executor.workers[0].runner.graphs._graphs
        assert {kind.large > 0 for kind in graphs if kind.shared} == {False, True}, "decoding alone, and with a prompt"


def serve_in_turn(llm: LLM, requests: list, steps: list[int]) -> list:
    """Return the outputs of requests that come before the step of that number."""
    ids, done = [], {}
    for number in itertools.count():
        ids += [llm.add_request(*request) for request, step in zip(requests, steps, strict=True) if step == number]
        done |= {output.request_id: output for output in llm.step()}
        if len(ids) == len(requests) and not llm.has_unfinished_requests():
            return [done[i] for i in ids]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "adapted"),
    [("qwen3", ()), pytest.param("qwen2", ("q_proj", "gate_proj", "down_proj"), marks=pytest.mark.slow)],
)
def test_layers_without_their_modules_calls_have_the_same_bits(checkpoint, family, adapted, monkeypatch):
    """Norms of heads, or biases and adapters; two sequences."""
    model = exact_model(checkpoint(family), "float16")
    runner, calls, found = ModelRunner(model, 2), [], []
    for name, module in model.named_modules():
        if name.endswith(adapted):
            up, down = torch.randn(module.out_features, 3) / 10, torch.randn(3, module.in_features) / 10
            module.low_rank = ops.LowRank(down, up, 0.5)
    layout = ops.packed_layout([3, 20], group_size(model.config), model.device)
    run = kernels.DecoderLayers.__call__
    monkeypatch.setattr(kernels.DecoderLayers, "__call__", lambda self, *args: calls.append(0) or run(self, *args))
    for launched in (True, False):
        if not launched:
            monkeypatch.setattr(FusedLayer, "_launch", lambda layer, total: None)
        calls.clear()
        with torch.inference_mode():
            found.append(hidden_states(model, torch.arange(23), layout, runner.kv_caches))
        assert bool(calls) == launched
    assert torch.equal(*found)
    weights = [weakref.ref(m.packed.panels) for m in model.modules() if getattr(m, "packed", None) is not None]
    for module in model.modules():
        vars(module).pop("packed", None)
    gc.collect()
    assert weights and not any(weight() is not None for weight in weights), "a launch keeps weights alive"


def test_sequences_without_a_completion_are_scored(checkpoint):
    """No row of logits: there is nothing to launch."""
    model = exact_model(checkpoint("qwen3"))
    alone = token_logprobs(model, [[5, 7, 9]], prompt_lens=[2])[0]
    assert token_logprobs(model, [[5, 7]], prompt_lens=[2])[0].tolist() == [0.0, 0.0]
    assert token_logprobs(model, [[5]])[0].tolist() == [0.0]
    nothing, found = token_logprobs(model, [[5, 7], [5, 7, 9]], prompt_lens=[2, 2])
    assert nothing.tolist() == [0.0, 0.0]
    assert torch.equal(found, alone)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("depth", [64, 160, 200])
def test_persistent_programs_compute_the_same(dtype, depth, monkeypatch):
    """More tiles than programs; whole and ragged blocks of K, in one chunk and in several; a bias."""
    launched, launch = [], linear.launch
    monkeypatch.setattr(linear, "launch", lambda kernel, *a, **o: (launched.append(kernel), launch(kernel, *a, **o)))
    x, weights = wide_exponents(70, depth).to(dtype), [wide_exponents(n, depth).to(dtype) for n in (100, 33)]
    biases = [None, torch.randn(33).to(dtype)]
    expected = products(x, weights, biases, torch.float32, Tile(16, 64, 2, 4, False))
    for m, n in ((16, 32), (32, 16), (64, 64)):
        launched.clear()
        outs = products(x, weights, biases, torch.float32, Tile(m, n, 3, 4, False, tma=True))
        assert all(map(torch.equal, outs, expected)), (m, n)
        assert launched == [linear._linear_persistent] * 2
    odd = torch.cat((x, x), 1)[:, 1 : depth + 1]  # addresses of rows that the copy engine can't take
    products(odd, weights, biases, torch.float32, Tile(16, 32, 3, 4, False, tma=True))
    assert launched[-1] is linear._linear


def test_large_tiles_of_wide_results_are_persistent(monkeypatch):
    """ptxas waits for each product of others; the copy engine may be missing, or the result be narrow."""
    launched, launch = [], linear.launch
    monkeypatch.setattr(linear, "launch", lambda kernel, *a, **o: (launched.append(kernel), launch(kernel, *a, **o)))
    monkeypatch.setattr(linear, "linear_tile", lambda *_: Tile(128, 128, 3, 8, False))
    x, w = wide_exponents(65, 128).bfloat16(), wide_exponents(300, 128).bfloat16()
    found = [products(x, [w], [None], dtype)[0] for dtype in (torch.float32, torch.bfloat16)]
    monkeypatch.setattr(linear, "has_copy_engine", lambda device: False)
    found.append(products(x, [w], [None], torch.float32)[0])
    assert launched == [linear._linear_persistent, linear._linear, linear._linear]
    assert torch.equal(found[0], found[2]) and torch.equal(found[0].bfloat16(), found[1])


def test_products_in_one_chunk_are_launched_apart(monkeypatch):
    """Each program of a launch that has chunks to add up holds a second sum."""
    launched, launch = [], linear.launch
    monkeypatch.setattr(linear, "launch", lambda kernel, *a, **o: (launched.append(o), launch(kernel, *a, **o)))
    x, weights = wide_exponents(9, 128), [wide_exponents(n, 128) for n in (200, 40, 70)]
    expected = products(x, weights, [None] * 3, torch.float32, Tile(16, 16, 2, 4, True))
    outs = products(x, weights, [None] * 3, torch.float32, Tile(32, 32, 2, 4, False))
    assert all(map(torch.equal, outs, expected))
    assert [o["CHUNKED"] for o in launched] == [False, False, True]
    assert [o["SPLIT"] for o in launched] == [True, False, False]


@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_attention_backward(dtype, window):
    lengths, scale = [100, 1, 71], 0.3
    q, k, v, _, layout = packed(dtype, lengths, 4, 2, 20)
    upstream = torch.randn_like(q)
    given = [t.clone().requires_grad_() for t in (q, k, v)]
    grads = torch.autograd.grad(ops.attention(*given, layout, scale, window), given, upstream)
    wide = [t.double().requires_grad_() for t in (q, k, v)]
    exact = torch.autograd.grad(reference_attention(*wide, lengths, scale, window), wide, upstream.double())
    for grad, reference in zip(grads, exact, strict=True):
        assert error(grad, reference, reference.abs().max()) < 2e-6 + 2 * ROUNDING[dtype]


def dense_backward(q, k, v, out, lse, grad, lengths, scale, window):
    """In the place of FlashAttention, from what it is given: only a right log-sum-exp makes it right."""
    group, first, parts = q.shape[1] // k.shape[1], 0, []
    for n in lengths:
        a, b, c, d, o = (t[first : first + n].double().transpose(0, 1) for t in (q, k, v, grad, out))
        b, c = b.repeat_interleave(group, 0), c.repeat_interleave(group, 0)
        row, column = torch.arange(n)[:, None], torch.arange(n)
        seen = (column <= row) & (column > row - (window or n))
        p = torch.where(seen, (a @ b.mT * scale - lse[first : first + n].double().t()[..., None]).exp(), 0.0)
        ds = p * (d @ c.mT - (d * o).sum(-1, keepdim=True)) * scale
        shared = [t.unflatten(0, (-1, group)).sum(1) for t in (ds.mT @ a, p.mT @ d)]
        parts.append([t.transpose(0, 1).to(q.dtype) for t in (ds @ b, *shared)])
        first += n
    return tuple(torch.cat(t) for t in zip(*parts, strict=True))


def without_a_block(q, k, v, out, lse, grad, *rest):
    """The last queries of the first sequence give nothing to its first keys."""
    found = dense_backward(q, k, v, out, lse, grad, *rest)
    first_queries = torch.arange(len(q))[:, None, None] < 640
    found[2][:64] = dense_backward(q, k, v, out, lse, grad * first_queries, *rest)[2][:64]
    return found


@pytest.mark.parametrize("window", [0, 40])
def test_a_librarys_backward_has_to_prove_itself(window, monkeypatch):
    """torch's has no kernel for a CPU: it must be refused, and so must one that is wrong or never the same."""
    lengths, scale = [100, 1, 71], 0.3
    q, k, v, cache, layout = packed(torch.float16, lengths, 4, 2, 16)
    out, lse = ops.paged_attention(q, k, v, cache, layout, scale, window)
    given = q, k, v, out, lse, torch.randn_like(q), lengths, scale, window
    ours = backward._triton_backward(*given)

    def served(function):
        monkeypatch.setattr(backward, "candidate", lambda *_: function)
        found, chosen = kernels.attention_backward(*given), backward.serving_backward(q, 2, lengths, window)
        assert chosen in (function, backward._triton_backward)
        assert all(map(torch.equal, found, ours)) == (chosen is backward._triton_backward)
        return chosen is function

    assert not served(library.flash_backward)
    assert not served(library.efficient_backward)
    assert not served(None)
    assert served(dense_backward)
    assert not served(lambda *a: dense_backward(*a[:4], a[4] + 0.05, *a[5:]))
    assert not served(lambda *a: tuple(t + torch.rand(()) / 4096 for t in dense_backward(*a)))
    assert served(without_a_block) == (window > 0), "within a window they have nothing to give"


def test_each_type_has_a_candidate_of_bounded_memory(monkeypatch):
    monkeypatch.setattr(library, "multiprocessors", lambda device: 132)
    few, many = torch.empty(8, 16, 128), torch.empty(1, 1, 1).expand(1 << 16, 16, 128)
    assert library.candidate(few, [8]) is library.efficient_backward
    assert library.candidate(few.half(), [8]) is library.candidate(few.bfloat16(), [8]) is library.flash_backward
    assert library.candidate(many, [1 << 16]) is library.candidate(many.to("meta").half(), [1 << 16]) is None


def test_the_padded_log_sum_exp_is_what_torchs_operator_documents(monkeypatch):
    """Its inputs are recorded: keys for every head, sums padded by infinity, one split, a causal mask, the window."""
    lengths, (q, k, v, out, grad) = [33, 2], (torch.randn(35, heads, 8) for heads in (4, 2, 2, 4, 4))
    lse, calls = torch.randn(35, 4), []

    def record(*given, **options):
        calls.append((given, options))
        return torch.ones(1, 35, 4, 8), torch.ones(1, 35, 4, 8), torch.full((1, 35, 4, 8), 2.0), None

    monkeypatch.setattr(torch.ops.aten, "_efficient_attention_backward", record)
    dq, dk, dv = library.efficient_backward(q, k, v, out, lse, grad, lengths, 0.3, 7)
    (given, options) = calls[0]
    assert torch.equal(given[2][0], k[:, [0, 0, 1, 1]]) and torch.equal(given[3][0], v[:, [0, 0, 1, 1]])
    assert given[6].tolist() == given[7].tolist() == [0, 33, 35] and given[8:10] == (33, 33)
    padded = given[10]
    assert padded.shape == (2, 4, 64)
    assert torch.equal(padded[0, :, :33], lse[:33].t()) and torch.equal(padded[1, :, :2], lse[33:].t())
    assert padded[0, :, 33:].isposinf().all() and padded[1, :, 2:].isposinf().all()
    assert given[14] == 1 and options == {"scale": 0.3, "num_splits_key": 1, "window_size": 7}
    assert dq.shape == q.shape and torch.equal(dk, torch.full_like(k, 2.0)) and torch.equal(dv, torch.full_like(v, 4.0))


def test_the_reference_of_gradients_is_the_tests_own():
    """It judges the kernels on a GPU, and here it is judged by code that shares nothing with it."""
    lengths = [70, 1, 33]
    q, k, v, upstream = (torch.randn(sum(lengths), heads, 20) for heads in (4, 2, 2, 4))
    for window in (0, 40):
        wide = [t.double().requires_grad_() for t in (q, k, v)]
        expected = torch.autograd.grad(reference_attention(*wide, lengths, 0.3, window), wide, upstream.double())
        found = backward.exact_gradients(q, k, v, upstream, lengths, 0.3, window)
        for a, b in zip(found, expected, strict=True):
            assert error(a, b, 1.0) < 1e-13


@pytest.mark.parametrize("dtype", DTYPES)
def test_row_wise_ops(dtype):
    torch.manual_seed(0)
    x, up, weight = torch.randn(7, 100).to(dtype), torch.randn(7, 100).to(dtype), torch.randn(100).to(dtype)
    wide = x.double()
    out, rstd = kernels.rms_norm(x, weight, 1e-5)
    exact = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * weight.double()
    assert error(out, exact, exact.abs() + 1e-3) < 3e-7 + ROUNDING[dtype]
    assert rstd.dtype == torch.float32
    total, after = kernels.add_rms_norm(x, up, weight, 1e-5)
    assert torch.equal(total, x + up)
    assert torch.equal(after, kernels.rms_norm(total, weight, 1e-5)[0])
    for row in range(7):  # from an address that no vector load could take
        odd = torch.cat((x.new_zeros(1), x[row]))[1:]
        assert torch.equal(kernels.rms_norm(odd[None], weight, 1e-5)[0][0], out[row])
    gates = {"silu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu}
    gates["gelu_pytorch_tanh"] = lambda t: torch.nn.functional.gelu(t, approximate="tanh")
    for name, gate in gates.items():
        exact = gate(wide) * up.double()
        assert error(kernels.gated_activation(x, up, name), exact, exact.abs() + 1) < 1e-6 + ROUNDING[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_row_wise_backward(dtype):
    """More rows than one program has, a width that fills no block."""
    torch.manual_seed(0)
    x, up, upstream, weight = *(torch.randn(70, 100).to(dtype) for _ in range(3)), torch.randn(100).to(dtype)
    cases = [((x, weight), lambda a, w: ops.rms_norm(a, w, 1e-5), lambda a, w: F.rms_norm(a, (100,), w, 1e-5))]
    for name, activation in TORCH_ACTIVATIONS.items():
        ours = functools.partial(ops.gated_activation, name=name)
        cases.append(((3 * x, up), ours, lambda a, b, f=activation: f(a) * b))
    for given, ours, reference in cases:
        leaves = [t.clone().requires_grad_() for t in given]
        grads = torch.autograd.grad(ours(*leaves), leaves, upstream)
        wide = [t.double().requires_grad_() for t in given]
        exact = torch.autograd.grad(reference(*wide), wide, upstream.double())
        for grad, value in zip(grads, exact, strict=True):
            assert grad.dtype == dtype
            assert error(grad, value, value.abs().max()) < 2e-6 + ROUNDING[dtype]


class Heads(NamedTuple):
    """A layer's heads before attention: 4 of queries, 2 of keys and values, of 9 tokens, two of them without a slot."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    norms: tuple[tuple[torch.Tensor, float], tuple[torch.Tensor, float]]
    tables: tuple[torch.Tensor, torch.Tensor]
    layout: ops.PagedLayout

    @classmethod
    def random(cls, dtype: torch.dtype, dim: int) -> "Heads":
        torch.manual_seed(0)
        both = wide_exponents(9, 7 * dim).to(dtype)
        q, k, v = (t.unflatten(1, (-1, dim)) for t in both.split([4 * dim, dim, 2 * dim], 1))
        tables = kernels.rotary_tables(torch.arange(9) * 1000, torch.rand(dim // 2), 1.1)
        layout = ops.packed_layout([5, 4], 2, q.device)
        layout.slot_mapping[[3, 8]] = -1
        norms = (torch.randn(dim).to(dtype), 1e-5), (torch.randn(dim).to(dtype), 1e-2)
        return cls(q, torch.cat((k, k.flip(2)), 1), v, norms, tuple(t.to(dtype) for t in tables), layout)

    def place(self, normed: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return q, the keys and the values of the cache."""
        cache = [torch.zeros(2, 2, paged.BLOCK, self.q.shape[2], dtype=self.q.dtype) for _ in range(2)]
        norms = self.norms if normed else None
        return kernels.place_heads(self.q, self.k, self.v, norms, self.tables, self.layout, tuple(cache)), *cache


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [20, 32])
def test_heads_are_placed_to_the_bits_of_separate_kernels(dtype, dim):
    """Norms, transformers' rotary embedding, the cache; tokens without a slot; products whose rows have gaps."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    case = Heads.random(dtype, dim)
    cos, sin = case.tables
    for normed in (False, True):
        a, b = case.q, case.k
        if normed:
            pairs = zip((a, b), case.norms, strict=True)
            a, b = (kernels.rms_norm(x.reshape(-1, dim), *norm)[0].view(x.shape) for x, norm in pairs)
        turned = apply_rotary_pos_emb(*(x.transpose(0, 1)[None] for x in (a, b)), cos[None], sin[None])
        a, b = (t[0].transpose(0, 1) for t in turned)
        cache = [torch.zeros(2, 2, paged.BLOCK, dim, dtype=dtype) for _ in range(2)]
        kernels.write_kv(b, case.v, case.layout, *cache)
        assert all(map(torch.equal, case.place(normed), (a, *cache))) and cache[0].any()


def test_rotary_tables_are_the_cpus_in_shape():
    given = torch.arange(9) * 1000, torch.rand(10), 1.1
    for table, expected in zip(kernels.rotary_tables(*given), cpu.rotary_tables(*given), strict=True):
        assert table.shape == expected.shape and error(table, expected.double(), 1.0) < 1e-6


@pytest.mark.parametrize("normed", [False, True])
def test_negative_control_heads_placed_otherwise_differ(normed):
    """One rounding instead of one a step; another eps; a slot further."""
    case = Heads.random(torch.bfloat16, 32)
    q, keys, values = case.place(normed)
    norms = tuple((weight.float(), eps) for weight, eps in case.norms)
    wide = Heads(*(t.float() for t in case[:3]), norms, tuple(t.float() for t in case.tables), case.layout)
    once = [t.bfloat16() for t in wide.place(normed)]
    assert not torch.equal(once[0], q) and not torch.equal(once[1], keys) and torch.equal(once[2], values)
    other = case._replace(norms=((case.norms[0][0], 1e-2), case.norms[1]))
    assert torch.equal(other.place(normed)[0], q) != normed and torch.equal(other.place(normed)[1], keys)
    case.layout.slot_mapping[0] += 20
    case.layout.uploaded = None
    moved = case.place(normed)
    assert torch.equal(moved[0], q) and not torch.equal(moved[1], keys) and not torch.equal(moved[2], values)


@pytest.mark.parametrize("part", [512, 4096])
def test_distributions_and_draws_are_the_cpus(part, monkeypatch):
    """Thresholds and tokens equal, log-probs and entropies to rounding: filters, ties, bans, NaN."""
    monkeypatch.setattr(sampling, "_PART", part)
    torch.manual_seed(0)
    rows, vocab = 12, 5000
    logits = torch.randn(rows, vocab) * 3
    logits[3, 17] = math.nan
    logits[4] = logits[4].round()
    banned = {5: [3, 4, 5], 6: [int(logits[6].argmax())], 9: [*range(31, 4990)], 11: [0, vocab - 1]}
    masks = ops.stack_masks([ops.mask_without(banned[i], vocab) if i in banned else None for i in range(rows)])
    params = ops.RowParams(
        np.array([1, 0.7, 0, 1, 1, 1.3, 1, 1, 1, 1, 1, 1.0]),
        np.array([0, 50, 0, 0, 20, 0, 0, 10**9, 5, 0, 0, 1]),
        np.array([1, 0.9, 1, 1, 1, 0.5, 1, 1, 0.7, 0.999, 1, 1.0]),
        np.array([0, 0, 0, 0, 0, 0, 0.05, 0, 0.1, 0, 0, 0.0]),
        *masks,
    )
    counters = np.arange(rows, dtype=np.uint64) * 7919 + 2**63, np.arange(rows), np.arange(rows) * 5
    targets = torch.full((rows,), -1)
    targets[10] = 77
    given = logits.clone(), targets.clone()
    settings = params.temperature, params.top_k, params.top_p, params.min_p, params.masks, params.mask_rows
    ours, theirs = (backend.sample(logits, *settings, targets, *counters) for backend in (kernels, cpu))
    assert torch.equal(logits.nan_to_num(7.0), given[0].nan_to_num(7.0)) and torch.equal(targets, given[1])
    sound = torch.arange(rows) != 3
    assert torch.equal(ours.tokens[sound], theirs.tokens[sound])
    assert ours.tokens[10] == theirs.tokens[10] == 77
    assert torch.equal(ours.thresholds[sound], theirs.thresholds[sound])
    for values, expected in zip(ours.scores, theirs.scores, strict=True):
        assert values[3].isnan() and expected[3].isnan()
    for values, expected in zip(ours.scores[:3], theirs.scores[:3], strict=True):
        assert error(values[sound], expected[sound], 1.0) < 1e-6
    decided = sound & (theirs.scores.argmax >= 0)
    assert torch.equal(ours.scores.argmax[decided], theirs.scores.argmax[decided])


_FREE = {
    "view", "slice", "select", "unbind", "empty", "new_empty", "detach", "alias", "as_strided", "_unsafe_view", "t",
}  # fmt: skip


class Launches(TorchDispatchMode):
    """Counts what a GPU would be given: kernels of ours, kernels of torch's, uploads."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        out = func(*args, **(kwargs or {}))
        same = name in ("reshape", "to") and out.data_ptr() == args[0].data_ptr()
        if name not in _FREE and not same:
            self.found[f"torch: {name}"] += 1
        return out


@pytest.fixture
def launches(monkeypatch):
    """Counted while the mode is on."""
    mode = Launches()

    def counted(name, function):
        def call(first, *args, **options):
            mode.found[name or first.fn.__name__] += 1
            with torch._C._DisableTorchDispatch():
                return function(first, *args, **options)

        return call

    for module in (linear, sampling):
        monkeypatch.setattr(module, "launch", counted(None, module.launch))
    for module in (ops, sampling):
        monkeypatch.setattr(module, "to_device", counted("upload", module.to_device))
    return mode


@pytest.mark.slow
def test_what_a_decode_step_launches_beside_its_graph(checkpoint, launches, monkeypatch):
    """From hidden states to tokens: one upload, three kernels and none of torch's; a filter costs one kernel."""
    monkeypatch.setattr(linear, "linear_tile", lambda *_: Tile(16, 64, 2, 4, True))
    path = checkpoint("qwen3", vocab_size=257, num_hidden_layers=1)
    llm = LLM(path, dtype="float32", kv_cache_memory_bytes=2**22, skip_tokenizer_init=True)
    runner = llm.engine.executor.workers[0].runner
    hidden = torch.randn(5, runner.model.config.hidden_size)

    def metadata(tokens, top_k=0):
        rows = len(tokens)
        zeros, params = np.zeros(rows, np.int64), ops.RowParams.repeat(rows, top_k=top_k)
        given = zeros - 1, zeros.astype(np.uint64), zeros, zeros, params, [-1] * rows, False
        return sampler.SamplingMetadata(np.array(tokens), *given)

    def count(*given):
        launches.found.clear()
        with launches:
            output = sampler.sample(runner.head, hidden, metadata(*given))
        return output.token_ids, dict(launches.found)

    plain = {"_linear": 1, "upload": 1, "_peaks": 1, "_scores": 1}
    with torch.inference_mode():
        every, found = count([0, 1, 2, 3, 4])
        assert found == plain
        assert count([0, 1, 2], 5)[1] == plain | {"_thresholds": 1}
        some, found = count([0, 3, 4])
        assert torch.equal(some, every[[0, 3, 4]]) and found == plain | {"upload": 2, "torch: index": 1}
        runner._last_token_ids = every
        launches.found.clear()
        with launches:
            same = runner._token_ids(np.arange(-1, -6, -1))
            assert same is not None and not launches.found
            mixed = runner._token_ids(np.array([7, -4, 9, -1]))
        assert torch.equal(same, every) and mixed.tolist() == [7, int(every[3]), 9, int(every[0])]
        assert dict(launches.found) == {"upload": 1, "torch: cat": 1, "torch: index": 1}


def row_of(kind: str, vocab: int) -> torch.Tensor:
    torch.manual_seed(0)
    row = torch.randn(vocab)
    if kind == "peaked":  # hardly a bit of the range of values holds all of the mass
        row = row * 3 - 100
        row[:3] = torch.tensor([20.0, 19.0, -30.0])
    elif kind == "ties":
        row = (row * 4).round() / 4
    elif kind == "zeros":
        row = row.sign() * (row.abs() > 0.5)
    elif kind == "tiny":
        row = row * 1e-41
    elif kind == "huge":
        row = row * 1e37
    return row


SLOW_KINDS = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("zeros", "tiny")]


@pytest.mark.parametrize("kind", ["flat", "peaked", "ties", "huge", *SLOW_KINDS])
@pytest.mark.parametrize("part", [64, 1024])
def test_thresholds_are_those_of_a_sort(kind, part, monkeypatch):
    """Rows that fit the candidates at once, and rows that have to be narrowed down first, to a tie if need be."""
    monkeypatch.setattr(sampling, "_PART", part)
    row = row_of(kind, 700)
    order = row.sort(descending=True).values
    weights = (order.double() - order[0].double()).exp()
    for k in (1, 3, 50, 699):
        assert edge_of(row, top_k=k) == order[k - 1], k
    for p in (1e-9, 0.3, 0.9, 0.9999):
        assert edge_of(row, top_p=p) == order[int((weights.cumsum(0) < p * weights.sum()).sum())], p
    few = weights[: int((row >= order[49]).sum())]
    assert edge_of(row, top_k=50, top_p=0.5) == order[int((few.cumsum(0) < 0.5 * few.sum()).sum())]


def edge_of(row, top_k=0, top_p=1.0) -> float:
    now = [np.array([x]) for x in (1.0, top_k, top_p, 0.0)]
    counters = np.zeros(1, np.uint64), np.zeros(1, np.int64), np.zeros(1, np.int64)
    return float(kernels.sample(row[None], *now, *ops.stack_masks([None]), torch.tensor([0]), *counters).thresholds)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        pytest.param("llama3-bias", "float16", marks=pytest.mark.slow),
        ("mistral", "float32"),
        pytest.param("qwen3", "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_no_schedule_changes_a_bit(checkpoint, family, dtype):
    """The engine's property test, on these kernels, each product with a random tile: biases; norms of q and k; a
    window; more heads a KV head than fit a small tile twice. Steps go through graphs, in one case in two stages."""
    shape = {"num_attention_heads": 10, "num_key_value_heads": 1} if family == "llama3-bias" else {}
    path = checkpoint(family, vocab_size=257, num_hidden_layers=2 if family == "qwen3" else 1, **shape)
    model = exact_model(path, dtype)
    rng = random.Random(family)
    requests = [
        (prompt, dataclasses.replace(params, max_tokens=min(params.max_tokens, 4)))
        for prompt, params in random_requests(rng, 257, 2, 40)
    ]
    stages = {"pipeline_parallel_size": 2, "backend": "inproc"} if family == "qwen3" else {}
    results, llm = run_schedule(path, dtype, rng, requests, [model], **stages)
    check_results([model], requests, results)
    prompts = {kind.most > 1 or kind.large > 0 for kind in llm.engine.executor.workers[0].runner.graphs._graphs}
    assert prompts == {False, True} or shape, "decoding, and prompts too; a small tile of `shape` has one token"


@pytest.mark.slow
def test_graphs_of_many_prompt_tokens_have_the_trainers_bits(checkpoint, monkeypatch):
    """A prompt's step, with and without samples that decode beside it; more prompts than a graph has room for."""
    path = checkpoint("llama", vocab_size=257, num_hidden_layers=1)
    model = exact_model(path)
    llm = LLM(path, dtype="float32", kv_cache_memory_bytes=2**22, skip_tokenizer_init=True, max_num_batched_tokens=16)
    requests = [([3 + i, *range(5, 16)], SamplingParams(n=2, max_tokens=6, seed=i, ignore_eos=True)) for i in range(2)]
    check_against_trainer(model, requests, serve_in_turn(llm, requests, [0, 3]))
    graphs = llm.engine.executor.workers[0].runner.graphs
    rooms = {(kind.small > 0, kind.large > 0) for kind in graphs._graphs}
    assert rooms == {(True, False), (False, True), (True, True)}
    monkeypatch.setattr(graphs, "_tiles", lambda size: 0)
    prompt = ops.packed_layout([12], graphs._group, torch.device("cpu"))
    assert graphs.run(prompt, torch.zeros(12, dtype=torch.long)) is None, "more tiles than there is room for"


@pytest.mark.slow
def test_negative_control_a_graph_without_a_prompts_tile_is_noticed(checkpoint, monkeypatch):
    path = checkpoint("llama", vocab_size=257, num_hidden_layers=1)
    model = exact_model(path)
    llm = LLM(path, dtype="float32", kv_cache_memory_bytes=2**22, skip_tokenizer_init=True, max_num_batched_tokens=16)
    fill = cuda_graphs.StepGraphs._fill

    def without_large(self, kind, items, *more):
        fill(self, kind, [*items[:2], items[2][:0]], *more)

    monkeypatch.setattr(cuda_graphs.StepGraphs, "_fill", without_large)
    requests = [([*range(5, 17)], SamplingParams(max_tokens=3, ignore_eos=True))]
    results = serve_in_turn(llm, requests, [0])
    if results[0].completions[0].finish_reason != "error":  # memory that nobody wrote may hold a NaN
        with pytest.raises(AssertionError):
            check_against_trainer(model, requests, results)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_no_draft_changes_a_bit_in_graphs(checkpoint, drafter, rows_cost_nothing):
    """Drafts of all kinds under random schedules, whose steps go through the graphs of a few tokens a sequence."""
    path = checkpoint("qwen3", vocab_size=VOCAB, num_hidden_layers=1)
    models, rng = [exact_model(path)], random.Random(drafter)
    requests = [
        (2 * prompt, dataclasses.replace(params, max_tokens=min(params.max_tokens, 8)))
        for prompt, params in random_requests(rng, VOCAB, 3, 6)
    ]
    config = speculative_config(drafter, path, models, requests, rng)
    results, llm = run_schedule(path, "float32", rng, requests, models, speculative_config=config)
    check_results(models, requests, results)
    assert llm.stats().draft_tokens and (llm.stats().accepted_tokens or not drafter.startswith("right"))
    assert any(kind.most > 1 for kind in llm.engine.executor.workers[0].runner.graphs._graphs)


@pytest.mark.slow
def test_a_draft_of_a_token_without_finite_values_harms_no_request(checkpoint, rows_cost_nothing):
    """Its sequence never has it, and may not be failed for it."""
    path = checkpoint("qwen3", vocab_size=257, num_hidden_layers=1)
    requests = [([5, 7, 9], SamplingParams(n=2, max_tokens=4, seed=3, ignore_eos=True))]
    expected = serve_in_turn(LLM(path, kv_cache_memory_bytes=2**22), requests, [0])
    assert not any(77 in c.token_ids for c in expected[0].completions)
    llm = LLM(path, kv_cache_memory_bytes=2**22, speculative_config={"method": lambda ids: [77, 5]})
    faults.embed_nan(llm, 77)
    found = serve_in_turn(llm, requests, [0])
    assert llm.stats().draft_tokens and found[0].completions == expected[0].completions


@pytest.mark.slow
def test_experts_noted_in_graphs_are_the_trainers(tmp_path):
    """Of a prompt's step and of those that decode, in graphs that have room for a token more."""
    path = save_tiny_moe(tmp_path / "model", "qwen3_moe", num_hidden_layers=1)
    model = exact_model(path)
    settings = {"dtype": "float32", "kv_cache_memory_bytes": 2**20, "skip_tokenizer_init": True}
    llm = LLM(path, max_num_batched_tokens=16, **settings)
    requests = [([*range(5, 17)], SamplingParams(n=3, max_tokens=3, seed=1, ignore_eos=True, routed_experts=True))]
    results = serve_in_turn(llm, requests, [0])
    check_against_trainer(model, requests, results)
    assert_trainers_experts(model, results[0])
    assert {kind.large > 0 for kind in llm.engine.executor.workers[0].runner.graphs._graphs} == {False, True}


@pytest.mark.slow
def test_steps_whose_graph_finds_no_memory_run_without(checkpoint, monkeypatch):
    settings = {"dtype": "float32", "kv_cache_memory_bytes": 2**22, "skip_tokenizer_init": True}
    path = checkpoint("llama", vocab_size=257, num_hidden_layers=1)
    params = [SamplingParams(max_tokens=2 + i, seed=i, ignore_eos=True) for i in range(3)]
    expected = LLM(path, **settings).generate([[5, 6, 7]] * 3, params, use_tqdm=False)
    capture = cuda_graphs.capture

    def small(run, *where):
        if len(calls) == 1:
            calls.append("failed")
            raise torch.OutOfMemoryError("no memory")
        calls.append("made")
        return capture(run, *where)

    calls: list[str] = []
    monkeypatch.setattr(cuda_graphs, "capture", small)
    llm = LLM(path, **settings)
    found = llm.generate([[5, 6, 7]] * 3, params, use_tqdm=False)
    assert [o.completions[0].logprobs for o in found] == [o.completions[0].logprobs for o in expected]
    assert calls[:2] == ["made", "failed"] and "made" in calls[2:], "smaller ones are still made"


def test_large_graphs_are_recorded_when_they_pay_and_the_largest_first(monkeypatch):
    monkeypatch.setattr(cuda_graphs, "_WORTH_IT", 3)
    monkeypatch.setattr(cuda_graphs, "_BUCKETS", (8, 12, 16))
    graphs = cuda_graphs.StepGraphs(lambda given, layout: given[:, None] + 0.5, torch.device("cpu"), 2, 4, 64, 100)
    layout, given = ops.packed_layout([10], 2, torch.device("cpu")), torch.arange(10)
    assert [graphs.run(layout, given) is None for _ in range(3)] == [True, True, False]
    assert [kind.size for kind in graphs._graphs] == [16, 12]
    assert torch.equal(graphs.run(layout, given + 7), (given + 7)[:, None] + 0.5)
    graphs.clear()
    assert graphs.run(layout, given) is None


@pytest.mark.slow
def test_negative_control_a_tree_that_varies_is_noticed(checkpoint, monkeypatch):
    """The load refuses it; without the probe and the comparison that do so, the property test finds it."""
    path, rng = checkpoint("llama", vocab_size=257, num_hidden_layers=1), random.Random(0)
    with monkeypatch.context() as patch:
        patch.setattr(linear, "chunks", lambda depth, features: rng.choice((1, 2)))
        with pytest.raises(NumericsError, match="different bits in different batches"):
            exact_model(path)
        patch.setattr("samebits.model.exact.probe", lambda *_: None)
        with pytest.raises(UnsupportedModelError, match="depends on the one beside it"):
            exact_model(path)
        patch.setattr("samebits.model.selfcheck._same_bytes", lambda *_: True)
        requests = [(list(range(3, 30)), SamplingParams(max_tokens=4, seed=1, ignore_eos=True))]
        results, _ = run_schedule(path, "float32", rng, requests, models := [exact_model(path)])
        with pytest.raises(AssertionError):
            check_results(models, requests, results)


@pytest.mark.slow
def test_gradients_are_the_cpus(checkpoint):
    """Forward by other trees and backward by other code, so equal to rounding only."""
    path = checkpoint("qwen3", vocab_size=257, num_hidden_layers=1)
    sequences = [list(range(3, 40)), list(range(5, 12))]
    grads = []
    for backend in ("triton", "cpu"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(ops.BACKENDS, "cpu", backend)
            ops.backend.cache_clear()
            model = exact_model(path, "float32")
            torch.cat(token_logprobs(model, sequences)).sum().backward()
            grads.append({name: p.grad for name, p in model.named_parameters()})
        ops.backend.cache_clear()
    for name, grad in grads[0].items():
        assert error(grad, grads[1][name].double(), grads[1][name].abs().max()) < 1e-4, name


TRITON = tuple(map(int, metadata.version("triton").split(".")[:2]))
TALL = 80 if TRITON >= (3, 8) else 40  # bytes that prefill's attention, which fills all registers, keeps aside
HOT = [  # on sm_90: kernel, what sets it apart, most registers, fewest programs of a multiprocessor, bytes of stack
    ("_linear", {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 64, "SPLIT": True}, 48, 4, 0),
    ("_linear", {"BLOCK_M": 16, "BLOCK_N": 64, "SPLIT": True}, 64, 5, 0),
    ("_linear", {"BLOCK_M": 16, "BLOCK_K": 128}, 64, 2, 0),
    ("_linear", {"BLOCK_M": 64, "BLOCK_N": 64, "SPLIT": True}, 128, 2, 0),
    ("_linear", {"BLOCK_M": 128, "SPLIT": False, "CHUNKED": False}, 128, 2, 0),
    ("_linear", {"BLOCK_M": 16, "BLOCK_N": 64, "SPLIT": False, "ACTIVATION": 0}, 64, 5, 0),
    ("_linear", {"BLOCK_M": 64, "BLOCK_N": 64, "SPLIT": True, "ACTIVATION": 0}, 128, 2, 0),
    ("_linear", {"BLOCK_M": 128, "SPLIT": False, "CHUNKED": False, "ACTIVATION": 0}, 128, 2, 0),
    ("_linear_persistent", {"BLOCK_M": 128, "BLOCK_N": 128, "CHUNKED": False}, 128, 1, 0),
    ("_linear_persistent", {"BLOCK_M": 128, "BLOCK_N": 256}, 208, 1, 0),
    ("_attention", {"DIM": 128, "BLOCK_M": 16}, 208, 2, 8),
    ("_attention", {"DIM": 128, "BLOCK_M": 128}, 255, 1, TALL),
    ("_grad_q", {"DIM": 128}, 168, 1, 0),
    ("_grad_kv", {"DIM": 128}, 255, 1, 40),
    ("_merge_segments", {"DIM": 128}, 64, 32, 0),
    ("_rms_norm", {}, 64, 8, 0),
    ("_place_heads", {}, 64, 16, 0),
]


def along_a_row(operand: str) -> list[str]:
    """Return how a row of a sum's operand lies in threads: its width, elements of a thread, threads and warps of it."""
    width = re.search(r"(\d+)xf32", operand)
    return [width[1], *(re.search(rf"{part} = \[(?:\d+, )?(\d+)\]", operand)[1] for part in LAYOUT)]


LAYOUT = "sizePerThread", "threadsPerWarp", "warpsPerCTA"


def check_hot_kernels(compiled: list[dict]) -> None:
    """Compare registers, stack and programs with the table: each of its rows has a kernel."""
    narrow = [c for c in compiled if "*bf16" in c["dtypes"]]
    for kernel, apart, registers, programs, stack in HOT:
        found = [c for c in narrow if c["kernel"] == kernel and apart.items() <= c["constants"].items()]
        assert found, (kernel, apart)
        for c in found:
            roomy = c["programs"] >= programs or c["shared"] > 100_000  # a deep pipeline takes others' room
            assert c["registers"] <= registers and roomy and c["stack"] <= stack, c


def check_compiled(c: dict, capability: int) -> None:
    """Check one configuration: nothing waits, spills, loads apart or fuses that should not."""
    assert c["heard"] and not c["warnings"], f"ptxas says that matrix instructions wait for each other: {c}"
    assert c["shared"] <= {80: 166_912, 90: 232_448, 100: 232_448}[capability], c
    if "*bf16" in c["dtypes"] and c["kernel"] in ("_linear", "_linear_persistent", "_attention", "_grouped"):
        # Triton 3.6 keeps two words of decode's attention aside on sm_90, from before its loops until after them
        tall = c["kernel"] == "_attention" and c["constants"]["BLOCK_M"] > 64
        early = c["kernel"] == "_attention" and TRITON == (3, 6)
        aside = TALL if tall else 8 if early else 0
        assert c["stack"] <= (aside if capability == 90 else 40), f"spills: {c}"
        if capability == 90:
            assert c["wgmma"] == (c["constants"]["BLOCK_M"] >= 64), c
    biases = c["constants"].get("HAS_BIAS") and c["constants"].get("ACTIVATION", -1) >= 0  # of gate and up, in turn
    if c["kernel"] in ("_linear", "_grouped") and c["constants"]["EVEN_K"] and not biases:
        assert not c["scalar_loads"], f"loads of one element: {c}"
    assert c["tma"] == (c["kernel"] == "_linear_persistent"), c
    exact = "_linear", "_linear_persistent", "_rms_norm", "_place_heads", "_grouped", "_combine"
    if c["kernel"] in exact and "*bf16" in c["dtypes"] and c["constants"].get("ACTIVATION") != 1:  # gelu's erf
        assert not c["contracted"], f"a * b + c was fused: {c}"


def compiled_kernels(folder: pathlib.Path, capability: int, dtype: str, *options: str) -> list[dict]:
    """Return what became of each kernel, compiled anew."""
    script = pathlib.Path(__file__).parents[1] / "helpers" / "compile_kernels.py"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder)
    command = [sys.executable, script, str(capability), dtype, *options]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    compiled = [json.loads(line) for line in run.stdout.splitlines()]
    assert {c["kernel"] for c in compiled} >= {
        "_linear", "_attention", "_merge_segments", "_write_kv", "_grad_q", "_grad_kv", "_rms_norm", "_gated",
        "_rms_norm_backward", "_gated_backward", "_place_heads", "_peaks", "_thresholds", "_scores",
        "_grouped", "_grouped_outer", "_gated_halves", "_combine", "_softmax", "_row_sums", "_top_k",
    }  # fmt: skip
    return compiled


def test_a_configuration_of_each_kernel_compiles(tmp_path):
    for c in compiled_kernels(tmp_path, 90, "bfloat16", "--few"):
        check_compiled(c, 90)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "dtype"), [(90, "bfloat16"), (90, "float32"), (80, "bfloat16"), (100, "bfloat16")]
)
def test_kernels_compile(capability, dtype, tmp_path):
    """For Ampere, Hopper and Blackwell, without one of them; float16 is as bfloat16."""
    if problem := kernels.compiler_problem(divmod(capability, 10), metadata.version("triton")):
        pytest.skip(problem)
    compiled = compiled_kernels(tmp_path, capability, dtype)
    if (capability, dtype) == (90, "bfloat16"):
        check_hot_kernels(compiled)
    norms = {(*c["dtypes"], c["constants"]["BLOCK"], c["sum"]) for c in compiled if c["kernel"] == "_rms_norm"}
    assert len({(*kind,) for *kind, _ in norms}) == len(norms), f"trees differ: {norms}"
    trees = {
        ("*bf16" in c["dtypes"], c["constants"]["BLOCK"]): c["sum"] for c in compiled if c["kernel"] == "_rms_norm"
    }
    heads = [c for c in compiled if c["kernel"] == "_place_heads" and c["constants"]["NORM"]]
    for c in heads:
        norm = trees["*bf16" in c["dtypes"], c["constants"]["BLOCK"]]
        assert along_a_row(c["sum"]) == along_a_row(norm), f"another tree than a norm's: {c}"
    sums = Counter((c["kernel"], *c["dtypes"], *c["constants"].items()) for c in compiled)
    for c in compiled:
        check_compiled(c, capability)
        if c["kernel"] in ("_rms_norm", "_peaks", "_scores", "_softmax", "_row_sums"):
            assert sums[c["kernel"], *c["dtypes"], *c["constants"].items()] == 1, f"one binary is one tree: {c}"
