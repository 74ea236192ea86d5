"""Experts and a model's own functions on GPUs, interpreted: bits under every schedule, values and gradients by fp64."""

import dataclasses
import itertools
import random
import sys

import pytest
import torch

pytest.importorskip("triton")

from samebits.kernels import ops
from samebits.kernels import triton as kernels
from samebits.kernels.exact_mode import ExactMode
from samebits.kernels.triton.schedules import Tile
from samebits.trainer import exact_model

from helpers.experts import EPS, FREE, ROWS, UNARY, check_by_fp64_twice, layer, packed
from helpers.interpreter import interpreted
from helpers.moe import save_tiny_moe
from helpers.schedules import check_results, random_requests, run_schedule

# numpy's, about NaN in lanes that a mask drops
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
experts = sys.modules["samebits.kernels.triton.experts"]
TILES = [*itertools.product((16, 32, 64), (16, 64, 128))]
SIZES = [
    (1, 40, 24, 7, 3),
    (37, 64, 72, 5, 5),
    (60, 50, 33, 13, 2),
]  # T, H, I, E, k; K below 128: `linear` has one chunk


@pytest.fixture(autouse=True)
def interpreter(one_thread):
    with interpreted():
        yield


def by_linear(x, gate_up, down, ids, weights):
    """The specification: `ops.linear` for each expert on all tokens, then products and sums in ascending experts."""
    total = torch.zeros(x.shape)
    for expert in range(gate_up.shape[0]):
        gate, up = ops.linear(x, gate_up[expert]).chunk(2, -1)
        y = ops.linear(ops.gated_activation(gate.contiguous(), up.contiguous(), "silu"), down[expert]).float()
        chosen = (ids == expert).any(-1)
        weight = (weights * (ids == expert)).sum(-1)
        total[chosen] = total[chosen] + weight[chosen, None] * y[chosen]
    return total.to(x.dtype)


@pytest.mark.parametrize("dtype", ops.DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_experts_have_the_bits_of_linear_per_expert(size, dtype):
    x, gate_up, down, ids, weights = layer(*size, dtype)
    expected = by_linear(x, gate_up, down, ids, weights)
    assert torch.equal(ops.experts(x, gate_up, down, ids, weights, "silu"), expected)
    assert torch.equal(ops.experts(x, *packed(gate_up, down), ids, weights, "silu"), expected)
    order = torch.rand(ids.shape).argsort(-1)
    again = ops.experts(x, gate_up, down, ids.gather(1, order), weights.gather(1, order), "silu")
    assert torch.equal(again, expected)


@pytest.mark.slow  # the gate of `make gpu`, on tiny shapes in test_gpu_script.py, is much the same
def test_no_tile_changes_a_bit_and_neither_does_the_batch(monkeypatch):
    x, gate_up, down, ids, weights = layer(45, 200, 140, 11, 3)
    ids[:20, 0] = ids[:20].min(-1).values  # some experts with many rows
    ids = torch.stack([torch.tensor(random.Random(t).sample(range(0 if t > 20 else 8, 11), 3)) for t in range(45)])
    whole = ops.experts(x, gate_up, down, ids, weights, "silu")
    for m, n in TILES:
        monkeypatch.setattr(experts, "experts_tile", lambda *_, m=m, n=n: Tile(m, n, 2, 4, False))
        assert torch.equal(ops.experts(x, gate_up, down, ids, weights, "silu"), whole), (m, n)
    for first, count in ((0, 1), (19, 3), (30, 15), (44, 0)):
        rows = slice(first, first + count)
        assert torch.equal(ops.experts(x[rows], gate_up, down, ids[rows], weights[rows], "silu"), whole[rows])


@pytest.mark.parametrize("rows", [0, 1, 300])
def test_experts_with_no_one_or_all_tokens(rows):
    x, gate_up, down, ids, weights = layer(300, 20, 12, 5, 1)
    ids[:], ids[:rows] = 4, 2
    assert torch.equal(ops.experts(x, gate_up, down, ids, weights, "silu"), by_linear(x, gate_up, down, ids, weights))


@pytest.mark.parametrize("size", SIZES)
def test_values_and_gradients_are_those_of_fp64_and_repeat(size):
    check_by_fp64_twice(size)


@pytest.mark.parametrize("dtype", ops.DTYPES)
@pytest.mark.parametrize("name", [*UNARY, *ROWS, *FREE])
def test_functions_of_a_row_are_the_same_bits_in_every_batch(name, dtype):
    function = (UNARY | ROWS | FREE)[name]
    for width in (1, 7, 100):
        x = (torch.randn(9, width) * 4).to(dtype)
        with ExactMode():
            whole = function(x)
            assert all(torch.equal(function(x[[i]]), whole[[i]]) for i in range(9))


@pytest.mark.parametrize("name", [*UNARY, *ROWS])
def test_functions_are_within_their_budgets_of_fp64(name):
    function = (UNARY | ROWS)[name]
    x = torch.randn(9, 100) * 4
    with ExactMode():
        out = function(x)
    reference = function(x.double())
    relative, absolute = (32, 0) if name == "softmax" else (8, 32)  # exp(x - max): an error of x counts |x| times
    assert ((out - reference).abs() <= EPS * (relative * reference.abs() + absolute)).all()


def test_equal_values_go_to_the_lower_column_and_nan_takes_no_slot():
    x = torch.randint(-3, 4, (50, 30)).float()
    assert torch.equal(kernels.top_k(x, 8), x.argsort(dim=-1, descending=True, stable=True)[:, :8])
    x[:, ::2] = torch.nan
    assert (kernels.top_k(x, 30).sort(-1).values == torch.arange(30)).all()


def test_the_halves_of_a_row_have_the_bits_of_gated_activation():
    both = torch.randn(33, 70)
    gate, up = both.chunk(2, -1)
    for name in kernels.ACTIVATIONS:
        assert torch.equal(kernels.gated_halves(both, name), kernels.gated_activation(gate, up, name))


@pytest.mark.slow
@pytest.mark.parametrize(("family", "dtype"), [("qwen3_moe", "float32"), ("glm4_moe", "bfloat16")])
def test_no_schedule_changes_a_bit_of_a_mixture(tmp_path, family, dtype):
    """The engine's property test, each product and expert with a random tile: routers by softmax and by sigmoid with a
    bias, groups and a shared expert."""
    extra = {"first_k_dense_replace": 0} if family == "glm4_moe" else {}
    path = save_tiny_moe(tmp_path / family, family, vocab_size=257, num_hidden_layers=1, eos_token_id=2, **extra)
    model, rng = exact_model(path, dtype), random.Random(family)
    requests = [
        (prompt, dataclasses.replace(params, max_tokens=min(params.max_tokens, 4)))
        for prompt, params in random_requests(rng, 257, 3, 40)
    ]
    results, _ = run_schedule(path, dtype, rng, requests, [model])
    check_results([model], requests, results)
