"""How kernels are launched, and what cuBLAS computes in their place: on the interpreter, cuBLAS's part being played."""

from __future__ import annotations

import ast
import inspect
import sys
from dataclasses import asdict
from functools import cache

import pytest
import torch

pytest.importorskip("triton")

from samebits.kernels import triton as kernels
from samebits.kernels.triton import launch as launching
from samebits.kernels.triton import library_products, schedules
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


def test_a_gate_and_its_up_are_read_from_aligned_addresses(monkeypatch):
    """As the kernel tells the compiler, wherever the weights are."""
    given, launch = [], linear.launch
    monkeypatch.setattr(
        linear, "launch", lambda kernel, grid, *args, **o: (given.extend(args[1:3]), launch(kernel, grid, *args, **o))
    )
    x, pair = torch.randn(9, 64).half(), torch.randn(2, 40, 64).half()
    odd = torch.empty(2 * 2560 + 1, dtype=torch.float16)[1:].view(2, 40, 64).copy_(pair)
    assert odd.data_ptr() % 16
    found = [gated_products(x, list(weights), [None, None], "silu", torch.float16, PLAIN) for weights in (pair, odd)]
    assert torch.equal(*found) and not any(weight.data_ptr() % 16 for weight in given)


@pytest.mark.parametrize("early", [True, False])
def test_launches_overlap_where_a_gpu_can(early, monkeypatch):
    """What `kernel[grid](...)` gets on a GPU, from compute capability 9.0 on and before."""
    given, here = {}, torch.empty(2, device="meta")
    monkeypatch.setattr(launching, "INTERPRETED", False)
    monkeypatch.setattr(launching, "has_copy_engine", lambda device: early)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: here.device.index)
    launching.launch({(3, 1): lambda *args, **options: given.update(options)}, (3, 1), here, num_warps=4)
    assert given == {"launch_pdl": early, "enable_fp_fusion": False, "num_warps": 4}


def test_a_gpu_that_was_not_tuned_takes_the_tiles_of_its_like(monkeypatch):
    """One of the same compute capability; each dtype by itself."""
    named = {n: [[16, 16, asdict(Tile(16, n, 2, 4, True))]] for n in (16, 32, 64)}
    tables = {
        "default": {"16-bit": named[16], "float32": named[16]},
        "NVIDIA H100": {"capability": "9.0", "16-bit": named[32]},
        "NVIDIA H200": {"capability": "9.0", "float32": named[64]},
    }
    monkeypatch.setattr(schedules, "tables", lambda: tables)
    expected = {
        ("NVIDIA H100", "9.0", "16-bit"): 32,
        ("NVIDIA H200", "9.0", "16-bit"): 32,
        ("NVIDIA H200", "9.0", "float32"): 64,
        ("NVIDIA A100", "8.0", "16-bit"): 16,
        ("default", "none", "float32"): 16,
    }
    for (gpu, capability, dtype), width in expected.items():
        ((rows, features, tile),) = schedules.tuned_rows(gpu, capability, dtype)
        assert (rows, features, tile) == (16, 16, Tile(16, width, 2, 4, True))


def test_a_table_that_was_tuned_is_found_again(tmp_path, monkeypatch):
    monkeypatch.setattr(schedules, "TABLES", tmp_path / "tables.json")
    schedules.TABLES.write_text('{"default": {"16-bit": []}}')
    monkeypatch.setattr(schedules, "tables", cache(schedules.tables.__wrapped__))
    schedules.add_table("NVIDIA L4", "8.9", "16-bit", [(16, 1 << 40, PLAIN)])
    schedules.tables.cache_clear()
    assert schedules.tuned_rows("NVIDIA L40", "8.9", "16-bit") == [(16, 1 << 40, PLAIN)]


def test_sums_of_a_gradient_stay_fp32_to_their_end(monkeypatch):
    """cuBLAS may add the parts of a split product in the dtype of its result."""
    asked = []
    monkeypatch.setattr(torch, "mm", lambda a, b, out_dtype: asked.append(out_dtype) or a.float() @ b.float())
    x, w = torch.empty(3, 8, device="meta"), torch.empty(5, 8, device="meta", dtype=torch.bfloat16)
    assert kernels.gradient_product(x, w, torch.bfloat16).dtype == torch.bfloat16 and asked == [torch.float32]
