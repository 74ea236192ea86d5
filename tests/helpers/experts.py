"""A random layer of experts, the same in plain torch, and functions as a model's own code calls them."""

import torch
import torch.nn.functional as F

from samebits.kernels import ops

EPS = 2.0**-24  # half an ulp of 1.0
BUDGETS = {torch.float32: 64 * EPS, torch.bfloat16: 4 * 2.0**-8, torch.float16: 4 * 2.0**-11}  # of the largest value
UNARY = {
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu of tanh": lambda x: F.gelu(x, approximate="tanh"),
    "tanh": torch.tanh,
    "exp": torch.exp,
    "log": lambda x: (x.abs() + 1).log(),
    "softplus": F.softplus,
    "cos": torch.cos,
    "sin": torch.sin,
    "rsqrt": lambda x: (x.abs() + 1).rsqrt(),
    "square": lambda x: x**2,
    "inverse root": lambda x: (x.abs() + 1).pow(-0.5),
}


def layer_norm(x):
    """As transformers' Cohere writes it."""
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-5)


ROWS = {
    "softmax": lambda x: F.softmax(x, dim=-1),
    "sum": lambda x: x.sum(-1, keepdim=True),
    "mean": lambda x: x.mean(-1, keepdim=True),
    "LayerNorm": layer_norm,
    "the 3 largest": lambda x: torch.topk(x, min(3, x.shape[-1]))[0],
}
FREE = {
    "sums and products": lambda x: (1 - x) * 0.3 / 7 + x / (x.abs() + 0.1) - 2 * x,
    "roots": lambda x: x.abs().sqrt() + (x.abs() + 1).reciprocal(),
    "choices": lambda x: torch.where(x > 0, x.clamp(max=0.5), torch.maximum(x, -x / 3)).relu(),
    "casts": lambda x: x.double().to(torch.bfloat16).float() - x.half(),
}


def layer(tokens, hidden, inner, experts, k, dtype=torch.float32, seed=0):
    """Return x, gate_up, down, ids and weights of a layer; row magnitudes span 2^-4 .. 2^4."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, hidden, generator=g) * torch.exp2(torch.randint(-4, 5, (tokens, 1), generator=g))
    gate_up = torch.randn(experts, 2 * inner, hidden, generator=g) / hidden**0.5
    down = torch.randn(experts, hidden, inner, generator=g) / inner**0.5
    ids = torch.rand(tokens, experts, generator=g).topk(k).indices
    return x.to(dtype), gate_up.to(dtype), down.to(dtype), ids, torch.rand(tokens, k, generator=g)


def packed(*weights):
    return [ops.PackedWeight.pack(w) for w in weights]


def dense(x, gate_up, down, ids, weights):
    """The same by plain torch operations, differentiable, in the dtype of the arguments."""
    total = torch.zeros_like(x)
    for expert in range(gate_up.shape[0]):
        gate, up = (x @ gate_up[expert].t()).chunk(2, -1)
        weight = (weights * (ids == expert)).sum(-1, keepdim=True)
        total = total + weight * ((F.silu(gate) * up) @ down[expert].t())
    return total


def check_by_fp64_twice(size, dtype=torch.float32):
    """Hold values and gradients of `ops.experts` against fp64, and against a second run as bytes. size: of `layer`."""
    x, gate_up, down, ids, weights = layer(*size, dtype)
    upstream = torch.randn(x.shape).to(dtype)
    budget = BUDGETS[dtype]
    inputs = [t.requires_grad_() for t in (x, gate_up, down, weights)]
    wide = [t.detach().double().requires_grad_() for t in inputs]
    exact = dense(*wide[:3], ids, wide[3])
    expected = torch.autograd.grad(exact, wide, upstream.double())

    def run():
        out = ops.experts(x, gate_up, down, ids, weights, "silu")
        return out, torch.autograd.grad(out, inputs, upstream)

    out, grads = run()
    assert (out - exact).abs().max() <= budget * exact.abs().max()
    for grad, reference in zip(grads, expected, strict=True):
        assert (grad - reference).abs().max() <= budget * reference.abs().max()
    assert all(torch.equal(a, b) for a, b in zip(run()[1], grads, strict=True))
