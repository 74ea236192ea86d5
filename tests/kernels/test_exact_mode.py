"""ExactMode: a model's own code is exact under it, or the function that is not is named."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from samebits.kernels import ops
from samebits.kernels.exact_mode import ExactMode, Routing, UnsupportedOpError

from helpers.experts import EPS, FREE, ROWS, UNARY
from helpers.models import DTYPES

WIDTHS = (1, 7, 16, 100, 128)


def exact(function, *args):
    with ExactMode():
        return function(*args)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [*UNARY, *ROWS, *FREE])
def test_a_row_is_the_same_bits_at_every_place_of_every_batch(name, dtype):
    function = (UNARY | ROWS | FREE)[name]
    for width in WIDTHS:
        x = (torch.randn(37, width) * 4).to(dtype)
        whole = exact(function, x)
        for first, count in [(i, 1) for i in range(37)] + [(1, 7), (20, 16)]:
            rows = slice(first, first + count)
            assert torch.equal(exact(function, x[rows].clone()), whole[rows]), (width, first, count)


def test_torch_s_own_sigmoid_depends_on_the_place_in_a_vector():
    """What the mode is for: the body and the tail of a vectorised loop round differently."""
    x = torch.randn(4096)
    assert not torch.equal(torch.cat([torch.sigmoid(each) for each in x.split(7)]), torch.sigmoid(x))


@pytest.mark.parametrize("name", [*UNARY, *ROWS])
def test_values_and_gradients_are_within_their_budgets_of_fp64(name):
    function = (UNARY | ROWS)[name]
    x = (torch.randn(33, 100) * 4).requires_grad_()
    wide = x.detach().double().requires_grad_()
    out, reference = exact(function, x), function(wide)
    relative, absolute = (32, 0) if name == "softmax" else (8, 32)  # exp(x - max): an error of x counts |x| times
    assert ((out - reference).abs() <= EPS * (relative * reference.abs() + absolute)).all()
    upstream = torch.randn(out.shape)
    (grad,) = torch.autograd.grad(out, x, upstream)
    (expected,) = torch.autograd.grad(reference, wide, upstream.double())
    assert (grad - expected).abs().max() <= 64 * EPS * max(float(expected.abs().max()), 1.0)


def test_functions_at_the_edges_of_fp32():
    x = torch.tensor([-3e38, -100.0, -88.0, -0.0, 0.0, 1e-30, 100.0, 3e38])
    for name in ("sigmoid", "silu", "tanh", "softplus", "exp", "cos"):
        function = UNARY[name]
        assert torch.allclose(exact(function, x), function(x.double()).float(), rtol=1e-6, atol=1e-35), name
    nan = torch.tensor([math.nan])
    assert all(exact(function, nan).isnan() for function in UNARY.values())
    masked = torch.tensor([[0.0, -math.inf, 0.0]])
    assert torch.equal(exact(ROWS["softmax"], masked), torch.tensor([[0.5, 0.0, 0.5]]))


def test_equal_values_go_to_the_lower_column():
    x = torch.randint(-3, 4, (200, 64)).float()
    values, columns = exact(lambda: torch.topk(x, 8, dim=-1))
    expected = x.argsort(dim=-1, descending=True, stable=True)[:, :8]
    assert torch.equal(columns, expected)
    assert torch.equal(values, x.gather(-1, expected))


REFUSED = {
    "cumsum": lambda x: x.cumsum(0),
    "layer_norm": lambda x: F.layer_norm(x, (8,)),
    "erf": torch.erf,
    "matmul": lambda x: x @ x.t(),
    "einsum": lambda x: torch.einsum("ij,ij->i", x, x),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "softmax over dimension 0": lambda x: x.softmax(0),
    "mean over dimension 0": lambda x: x.mean(0),
    "sum over dimension None": torch.sum,
    "sum over dimension": lambda x: x[None].sum((1, 2)),
    "topk over dimension 0": lambda x: x.topk(2, 0),
    "topk of the smallest": lambda x: x.topk(2, largest=False),
    "pow with exponent 3": lambda x: x**3,
    "add with alpha": lambda x: torch.add(x, x, alpha=2),
    "sub with alpha": lambda x: torch.sub(x, 0.3, x),
    "rsub with alpha": lambda x: torch.rsub(x, 1.0, 0.3),
    "add_ with alpha": lambda x: x.add_(2, other=x),
    "div with rounding_mode": lambda x: torch.div(x, 0.3, rounding_mode="floor"),
    "silu in place": lambda x: F.silu(x, inplace=True),
    "linear of torch.float64": lambda x: F.linear(x.double(), x.double()),
    "sum of torch.float64": lambda x: x.sum(-1, dtype=torch.float64),
    "softmax of torch.float64": lambda x: torch.softmax(x, -1, torch.float64),
    "scatter with reduce": lambda x: x.scatter(0, torch.zeros(1, 8, dtype=torch.long), x, reduce="add"),
    "index_add": lambda x: x.index_add(0, torch.zeros(5, dtype=torch.long), x),
    "softplus with beta 2": lambda x: F.softplus(x, beta=2),
    "dropout in training": lambda x: F.dropout(x),
    "arange of fractions": lambda x: torch.arange(0, 1, 0.1),
    "rsqrt of torch.float64": lambda x: x.double().rsqrt(),
    "topk of torch.float64": lambda x: x.double().topk(2),
    "sigmoid of torch.float64": lambda x: x.double().sigmoid(),
    "aten.cumsum": lambda x: torch.ops.aten.cumsum(x, 0),
    "embedding with max_norm": lambda x: F.embedding(torch.tensor([0]), x, max_norm=1.0),
}


@pytest.mark.parametrize("name", REFUSED)
def test_functions_without_an_exact_form_are_refused_by_name(name):
    with pytest.raises(UnsupportedOpError, match=name):
        exact(REFUSED[name], torch.randn(5, 8))


def test_what_moves_data_or_counts_is_free():
    def run():
        ids = torch.arange(6).view(2, 3)
        rows = F.embedding(ids, torch.ones(6, 8)) * 3.0
        assert rows.shape == (2, 3, 8) and len(rows) == 2 and not rows.requires_grad and rows.dtype == torch.float32
        counts = F.one_hot(ids.flatten(), 8).sum(0)
        assert counts.tolist() == [1] * 6 + [0] * 2
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            mask = torch.zeros(2, 8).scatter_(1, ids, 1).bool()
        angles = torch.ones(4, 1) @ torch.ones(1, 3)
        assert bool((angles == 1).all())
        return rows.sum(-1).masked_fill(~mask[:, :3], float("-inf")), F.dropout(rows, 0.5, training=False)

    exact(run)


def test_arguments_may_be_named_as_torch_names_them():
    x = torch.randn(5, 8)
    for named, expected in (
        (lambda: F.softmax(input=x, dim=1, dtype=torch.bfloat16), lambda: torch.softmax(x, 1, torch.bfloat16)),
        (lambda: torch.sum(input=x, dim=[-1], keepdim=True), lambda: x.sum(-1, True)),
        (lambda: torch.topk(input=x, k=2, dim=1)[1], lambda: x.topk(2)[1]),
        (lambda: F.linear(input=x, weight=x), lambda: F.linear(x, x)),
    ):
        assert torch.equal(exact(named), exact(expected))


def test_our_own_ops_leave_the_mode():
    x, weight = torch.randn(5, 16), torch.randn(12, 16)
    expected = ops.linear(x, weight), ops.rms_norm(x, weight[0], 1e-5), ops.gated_activation(x, x, "silu")
    found = exact(lambda: (ops.linear(x, weight), ops.rms_norm(x, weight[0], 1e-5), ops.gated_activation(x, x, "silu")))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    ids = torch.tensor([[0, 2]] * 5)
    arguments = x, torch.randn(3, 16, 16), torch.randn(3, 16, 8), ids, torch.rand(5, 2), "silu"
    assert torch.equal(exact(ops.experts, *arguments), ops.experts(*arguments))
    packed = ops.PackedWeight.pack(weight)
    assert torch.equal(exact(packed.rows, torch.tensor([3])), weight[[3]])


class Router(nn.Module):
    """As transformers writes them (Qwen3-MoE)."""

    def __init__(self, experts=8, k=3, width=24):
        super().__init__()
        self.k = k
        self.weight = nn.Parameter(torch.randn(experts, width))
        self.choose = None

    def forward(self, x):
        with ExactMode(Routing(self.weight.shape[0], self.k, self.choose)):
            logits = F.linear(x, self.weight)
            values, ids = torch.topk(F.softmax(logits, dim=-1, dtype=torch.float), self.k, dim=-1)
            values /= values.sum(dim=-1, keepdim=True)
            return logits, values.to(logits.dtype), ids


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_router_s_logits_are_not_rounded_and_its_ids_ascend(dtype):
    router, x = Router().to(dtype), torch.randn(50, 24).to(dtype)
    logits, weights, ids = router(x)
    assert torch.equal(logits, ops.linear(x, router.weight, dtype=torch.float32))
    assert logits.dtype == weights.dtype == torch.float32
    assert torch.equal(ids, logits.topk(3).indices.sort(-1).values)
    assert torch.allclose(
        weights, logits.softmax(-1).gather(-1, ids) / logits.softmax(-1).gather(-1, ids).sum(-1, True)
    )


@pytest.mark.parametrize("normalises", [False, True])
def test_a_choice_in_one_launch_has_the_bits_of_its_functions(normalises):
    logits = (torch.randn(300, 33) * 3).round(decimals=1)  # with ties
    with ExactMode(Routing(33, 5)):
        weights, ids = torch.topk(F.softmax(logits, dim=-1), 5, dim=-1)
        if normalises:
            weights /= weights.sum(-1, keepdim=True)
    found_ids, found = ops.route(logits, 5, normalises)
    assert torch.equal(found_ids, ids) and torch.equal(found, weights)


def test_the_choice_of_a_router_is_seen_and_replaced():
    router, x = Router(), torch.randn(50, 24)
    own, seen = router(x), []
    router.choose = lambda ids: seen.append(ids) or ids.flip(-1)  # another order of the same
    same = router(x)
    assert all(torch.equal(a, b) for a, b in zip(own, same, strict=True))
    assert len(seen) == 1 and torch.equal(seen[0], own[2])

    given = torch.rand(50, 8).argsort(-1)[:, :3]
    router.choose = lambda ids: given
    logits, weights, ids = router(x)
    assert torch.equal(ids, given.sort(-1).values)
    scores = logits.double().softmax(-1).gather(-1, ids)
    assert torch.allclose(weights.double(), scores / scores.sum(-1, keepdim=True), atol=1e-6)
    weights[:, 0].sum().backward()
    assert router.weight.grad.abs().sum(-1).gt(0).all()


def test_the_groups_of_a_router_are_not_its_choice():
    seen = []

    def run(scores):
        groups = scores.view(-1, 4, 3).topk(2, dim=-1)[0].sum(dim=-1).topk(3, dim=-1, sorted=False)[1]
        assert groups.shape == (5, 3)
        return scores.topk(3, dim=-1, sorted=False)

    scores = torch.rand(5, 12)
    with ExactMode(Routing(12, 3, lambda ids: seen.append(ids) or ids)):
        run(scores)
    assert [tuple(ids.shape) for ids in seen] == [(5, 3)]


def test_hooks_and_checkpointing_run_outside_of_the_mode():
    """A hook may call what it likes, and recomputation gives the same bits and gradients."""
    router, x = Router(), torch.randn(20, 24, requires_grad=True)
    sums = []
    router.register_forward_hook(lambda module, args, out: sums.append(out[0].cumsum(0)))
    router(x)[1].square().sum().backward()
    expected = router.weight.grad.clone(), x.grad.clone()
    router.zero_grad()
    x.grad = None
    checkpoint(router, x, use_reentrant=False)[1].square().sum().backward()
    assert torch.equal(router.weight.grad, expected[0]) and torch.equal(x.grad, expected[1])
    assert len(sums) == 2 and torch.equal(sums[0], sums[1])


def test_modes_nest():
    """A router in a block that runs under the mode, too, has its own routing."""
    router, x = Router(), torch.randn(5, 24)
    own = router(x)
    nested = exact(router, x)
    assert all(torch.equal(a, b) for a, b in zip(own, nested, strict=True))
