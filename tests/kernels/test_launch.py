"""How kernels are launched, and what cuBLAS computes in their place: on the interpreter, cuBLAS's part being played."""

from __future__ import annotations

import ast
import inspect
import sys

import pytest
import torch

pytest.importorskip("triton")

from samebits.kernels.triton import library_products
from samebits.kernels.triton.linear import gated_products, products
from samebits.kernels.triton.schedules import Tile

from helpers.interpreter import interpreted

linear = sys.modules["samebits.kernels.triton.linear"]
MODULES = [module for name, module in sys.modules.items() if name.startswith("samebits.kernels.triton.")]
PLAIN, LIBRARY = Tile(16, 32, 2, 4, True), Tile(16, 32, 2, 4, True, library=True)


@pytest.fixture(autouse=True)
def interpreter(one_thread):
    with interpreted():
        yield


def launched() -> dict[str, ast.FunctionDef]:
    """Return the source of each kernel that is launched, by name."""
    found = {}
    for module in MODULES:
        source = ast.parse(inspect.getsource(module))
        calls = [node for node in ast.walk(source) if isinstance(node, ast.Call) and ast.unparse(node.func) == "launch"]
        names = {call.args[0].id for call in calls}
        found |= {f.name: f for f in source.body if isinstance(f, ast.FunctionDef) and f.name in names}
    return found


def test_a_kernel_first_waits_for_the_launch_before_it():
    """Or it would read what that one has not written yet: launches overlap."""
    kernels = launched()
    assert {"_linear", "_attention", "_rms_norm", "_scores", "_grouped"} <= set(kernels)
    for name, source in kernels.items():
        body = source.body[1:] if ast.get_docstring(source) else source.body
        assert ast.unparse(body[0]) == "await_inputs()", name


@pytest.fixture
def cublas(monkeypatch):
    """Let cuBLAS be there, of the bits that `PLAIN` gives; return the rows of each of its products."""
    computed = []

    def multiply(x, weight, out):
        computed.append(len(x))
        out.copy_(products(x, [weight], [None], out.dtype, PLAIN)[0])

    monkeypatch.setattr(library_products, "_is_here", lambda device: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(library_products, "_proven", {})
    monkeypatch.setattr(library_products, "_ALIGNMENT", 1)
    monkeypatch.setattr(library_products, "BLOCKS", (32, 16, 8, 4))
    monkeypatch.setattr(library_products, "multiply", multiply)
    return computed


@pytest.mark.parametrize(
    ("rows", "blocks"),
    [(3, []), (4, [4]), (7, [4]), (16, [16]), (30, [16, 8, 4]), (32, [32]), (83, [32, 32, 16]), (70, [32, 32, 4])],
)
@pytest.mark.parametrize("out", [torch.float16, torch.float32])
def test_cublas_gets_blocks_of_rows(cublas, rows, blocks, out):
    x, w = torch.randn(rows, 64).half(), torch.randn(40, 64).half()
    expected = products(x, [w], [None], out, PLAIN)[0]
    products(x, [w], [None], out, LIBRARY)  # the first time, sizes are proven
    cublas.clear()
    assert torch.equal(products(x, [w], [None], out, LIBRARY)[0], expected)
    assert cublas == blocks


def test_cublas_gets_products_in_one_chunk_without_bias(cublas, monkeypatch):
    """A layer's q, k and v, of which k and v are in two chunks; a bias; fp32."""
    monkeypatch.setattr(linear, "FULL_WIDTH", 80)
    monkeypatch.setattr(linear, "MIN_CHUNK", 64)
    x, weights = torch.randn(8, 128).half(), [torch.randn(n, 128).half() for n in (80, 40, 40)]
    for biases, numbers, served in (([None] * 3, x, 1), ([weights[0][:, 0]] + [None] * 2, x, 0)):
        expected = products(numbers, weights, biases, torch.float16, PLAIN)
        products(numbers, weights, biases, torch.float16, LIBRARY)
        cublas.clear()
        assert all(map(torch.equal, products(numbers, weights, biases, torch.float16, LIBRARY), expected))
        assert len(cublas) == served
    cublas.clear()
    products(x.float(), [weights[0].float()], [None], torch.float32, LIBRARY)
    assert not cublas


def test_a_gate_and_its_up_by_cublas(cublas):
    x, pair = torch.randn(9, 64).half(), list(torch.randn(80, 64).half().split(40))
    given = x, pair, [None, None], "silu", torch.float16
    expected = gated_products(*given, PLAIN)
    assert torch.equal(gated_products(*given, LIBRARY), expected) and cublas
    cublas.clear()
    few = x[:3], *given[1:]
    assert torch.equal(gated_products(*few, LIBRARY), expected[:3]) and not cublas


def test_cublas_serves_only_in_sizes_that_are_proven(cublas, monkeypatch):
    """One bit in one size is enough; another setting of torch's is another proof; so is no memory to try it."""
    right, proofs = library_products.multiply, []

    def wrong(x, weight, out):
        right(x, weight, out)
        if len(x) == 16:
            out.view(torch.int16)[3, 5] ^= 1

    same = library_products._same
    monkeypatch.setattr(library_products, "_same", lambda rows, *a: proofs.append(rows) or same(rows, *a))
    monkeypatch.setattr(library_products, "multiply", wrong)
    x, w = torch.randn(16, 64).half(), torch.randn(40, 64).half()
    expected = products(x, [w], [None], torch.float16, PLAIN)[0]
    for _ in range(2):
        assert torch.equal(products(x, [w], [None], torch.float16, LIBRARY)[0], expected)
    assert proofs == [16, 8] and cublas[-2:] == [8, 8]
    monkeypatch.setattr(library_products, "_settings", lambda: ("another",))
    products(x, [w], [None], torch.float16, LIBRARY)
    assert proofs == [16, 8] * 2

    def full(*_):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(library_products, "_proven", {})
    monkeypatch.setattr(library_products, "multiply", full)
    assert torch.equal(products(x, [w], [None], torch.float16, LIBRARY)[0], expected)
    assert not any(library_products._proven.values())
