"""Experts: in every schedule the bits of `ops.linear` per expert and an ascending sum; gradients against fp64."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from samebits.kernels import cpu, ops

from helpers.experts import EPS, check_by_fp64_twice, layer, packed
from helpers.models import DTYPES

SIZES = [(1, 40, 24, 7, 3), (37, 64, 72, 5, 5), (130, 50, 33, 13, 2), (512, 49, 20, 31, 8)]  # T, H, I, E, k


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def fma(a, b, c):
    """a * b + c, rounded once: fp32 products are exact in fp64, and the sum is rounded to odd before it is to fp32."""
    product = a.double() * b.double()
    total = product + c.double()
    high = total - product  # Knuth's two-sum: what the rounding of `total` lost
    lost = (product - (total - high)) + (c.double() - high)
    bits = total.view(torch.int64)
    away = (lost != 0) & (bits % 2 == 0)
    toward = ((lost > 0) == (total > 0)).long() * 2 - 1
    return torch.where(away, bits + toward, bits).view(torch.float64).float()


def by_linear(x, gate_up, down, ids, weights, activation="silu", linear=ops.linear):
    """The specification: `ops.linear` for each expert on all tokens, then a chain over a token's ascending experts."""
    total = torch.zeros(x.shape)
    for expert in range(gate_up.shape[0]):
        gate, up = linear(x, gate_up[expert]).chunk(2, -1)
        y = linear(ops.gated_activation(gate.contiguous(), up.contiguous(), activation), down[expert]).float()
        chosen = (ids == expert).any(-1)
        weight = (weights * (ids == expert)).sum(-1)
        total[chosen] = fma(weight[chosen, None], y[chosen], total[chosen])
    return total.to(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_packed_and_plain_experts_have_the_bits_of_linear_per_expert(size, dtype, threads):
    x, gate_up, down, ids, weights = layer(*size, dtype)
    expected = by_linear(x, gate_up, down, ids, weights)
    assert torch.equal(ops.experts(x, gate_up, down, ids, weights, "silu"), expected)
    assert torch.equal(ops.experts(x, *packed(gate_up, down), ids, weights, "silu"), expected)


@pytest.mark.parametrize("activation", cpu.ACTIVATIONS)
def test_each_activation_is_gated_activation_s(activation):
    x, gate_up, down, ids, weights = layer(9, 40, 24, 7, 3)
    expected = by_linear(x, gate_up, down, ids, weights, activation)
    assert torch.equal(ops.experts(x, gate_up, down, ids, weights, activation), expected)


@pytest.mark.parametrize("kind", ["one expert has all tokens", "one has a single token"])
def test_skewed_choices_have_the_bits_of_linear_per_expert(kind, threads):
    x, gate_up, down, ids, weights = layer(300, 64, 72, 11, 1)
    ids[:] = 7
    if kind == "one has a single token":
        ids[150] = 2
    expected = by_linear(x, gate_up, down, ids, weights)
    assert torch.equal(ops.experts(x, gate_up, down, ids, weights, "silu"), expected)
    assert torch.equal(ops.experts(x, *packed(gate_up, down), ids, weights, "silu"), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_bits_in_every_batch(dtype, threads):
    x, gate_up, down, ids, weights = layer(70, 64, 72, 11, 3, dtype)
    weight = packed(gate_up, down)
    whole = ops.experts(x, *weight, ids, weights, "silu")
    for first, count in [(i, 1) for i in range(0, 70, 9)] + [(0, 2), (3, 8), (50, 20), (69, 0)]:
        rows = slice(first, first + count)
        assert torch.equal(ops.experts(x[rows], *weight, ids[rows], weights[rows], "silu"), whole[rows])


def test_the_order_of_slots_decides_no_bit_and_another_order_of_the_sum_would():
    x, gate_up, down, ids, weights = layer(64, 64, 72, 11, 5)
    expected = ops.experts(x, gate_up, down, ids, weights, "silu")
    order = torch.rand(64, 5).argsort(-1)
    ids, weights = ids.gather(1, order), weights.gather(1, order)
    assert torch.equal(ops.experts(x, gate_up, down, ids, weights, "silu"), expected)
    assert torch.equal(ops.experts(x, *packed(gate_up, down), ids, weights, "silu"), expected)
    by_slot = torch.zeros(x.shape)
    for slot in range(5):
        alone = ops.experts(x, gate_up, down, ids[:, [slot]], torch.ones(64, 1), "silu")
        by_slot = fma(weights[:, [slot]], alone, by_slot)
    assert not torch.equal(by_slot, expected)


def test_packed_weights_can_take_the_memory_of_others():
    weight, other = torch.randn(5, 70, 20), torch.randn(5, 70, 20)
    first = ops.PackedWeight.pack(weight)
    second = ops.PackedWeight.pack(other, reuse=first)
    assert second.panels.data_ptr() == first.panels.data_ptr()
    assert torch.equal(second.panels, ops.PackedWeight.pack(other).panels)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_values_and_gradients_are_those_of_fp64_and_repeat(size, dtype, threads):
    check_by_fp64_twice(size, dtype)


@pytest.mark.parametrize("wanted", list(itertools.product([False, True], repeat=4))[1:])
def test_only_the_gradients_that_are_asked_for(wanted):
    x, gate_up, down, ids, weights = layer(9, 20, 12, 5, 2)
    inputs = [t.requires_grad_() for t in (x, gate_up, down, weights)]
    whole = torch.autograd.grad(ops.experts(x, gate_up, down, ids, weights, "silu").sum(), inputs)
    for tensor, needed in zip(inputs, wanted, strict=True):
        tensor.requires_grad_(needed)
    ops.experts(x, gate_up, down, ids, weights, "silu").sum().backward()
    for tensor, grad, needed in zip(inputs, whole, wanted, strict=True):
        assert torch.equal(tensor.grad, grad) if needed else tensor.grad is None


def test_arguments_of_any_strides_have_the_same_bits_and_gradients():
    given, outs = layer(9, 20, 12, 5, 2), []
    transposed = [t.mT.contiguous().mT for t in given]
    gaps = [t.repeat_interleave(2, -1)[..., ::2] for t in given]
    for x, gate_up, down, ids, weights in (given, transposed, gaps):
        inputs = [t.requires_grad_() for t in (x, gate_up, down, weights)]
        out = ops.experts(x, gate_up, down, ids, weights, "silu")
        outs.append([out, *torch.autograd.grad(out, inputs, torch.ones(20, 9).t())])
    for plain, *others in zip(*outs, strict=True):
        assert all(torch.equal(plain, other) for other in others)


def test_by_torch_s_products_the_values_agree_and_the_bits_do_not():
    x, gate_up, down, ids, weights = layer(64, 512, 256, 5, 2)
    exact = ops.experts(x, gate_up, down, ids, weights, "silu")
    control = by_linear(x, gate_up, down, ids, weights, linear=F.linear)
    assert (control - exact).abs().max() <= 256 * EPS * exact.abs().max()
    assert not torch.equal(control, exact)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": torch.full((9, 2), 5)}, r"ids must be in 0\.\.4, not 5\.\.5"),
        ({"ids": torch.full((9, 2), -1)}, r"ids must be in 0\.\.4, not -1\.\.-1"),
        ({"weights": torch.rand(9, 3)}, r"ids and weights must be \[9, k\]"),
        ({"gate_up": torch.randn(5, 24, 21)}, r"must be \[T, H\], \[E, 2 I, H\], \[E, H, I\]"),
        ({"down": torch.randn(5, 20, 13)}, r"must be \[T, H\], \[E, 2 I, H\], \[E, H, I\]"),
        ({"activation": "relu"}, "activation 'relu'; supported: silu, gelu, gelu_pytorch_tanh"),
        ({"down": ops.PackedWeight.pack(torch.randn(5, 20, 12))}, "pack both gate_up and down, or neither"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change, message):
    arguments = dict(zip(("x", "gate_up", "down", "ids", "weights"), layer(9, 20, 12, 5, 2), strict=True))
    with pytest.raises(ValueError, match=message):
        ops.experts(**(arguments | {"activation": "silu"} | change))
