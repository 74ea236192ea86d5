"""Each op: row-stable as bits under every schedule, and close to fp64 within a stated budget."""

import ctypes
import hashlib
import itertools
import json
import math
import mmap
import os
import pathlib
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from samebits.kernels import contract, cpu, functions, ops
from samebits.kernels.cpu import pages, simd
from samebits.kernels.cpu.elementwise import TORCH_ACTIVATIONS
from samebits.kernels.cpu.simd import CHAIN

from helpers.models import DTYPES

SHAPES = [(576, 576), (172, 100), (100, 172), (49, 20), (1001, 100), (20, 100), (49, 1100)]
EPS = 2.0**-24  # half an ulp of 1.0
DIRECTED = (0x400, 0x800, 0xC00)  # x86's FE_DOWNWARD, FE_UPWARD, FE_TOWARDZERO


def wide(*shape, seed=0):
    """Normal numbers whose rows span 2^-8 .. 2^8: cancellation and large sums."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g) * torch.exp2(
        torch.randint(-8, 9, (shape[0], *[1] * (len(shape) - 1)), generator=g)
    )


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def flags_of_memory(address):
    """What Linux notes about the mapping that an address lies in: "hg" for huge pages on request."""
    inside = False
    for line in pathlib.Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(match[1], 16) <= address < int(match[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise LookupError(hex(address))


@pytest.mark.skipif(not pathlib.Path("/sys/kernel/mm/transparent_hugepage").is_dir(), reason="no huge pages here")
@pytest.mark.parametrize("pack", [ops.PackedWeight.pack, lambda w: ops.PackedWeight.pack(w.view(8, 512, 1024))])
def test_large_packed_weights_are_in_huge_pages_where_asking_helps(pack):
    fresh = mmap.mmap(-1, 4096 * 1024 * 4)  # what malloc gives may have been asked for before
    weight = torch.frombuffer(fresh, dtype=torch.float32).view(4096, 1024).normal_()
    panels = pack(weight).panels
    assert "hg" in flags_of_memory(panels.data_ptr() + panels.nbytes // 2)
    assert "hg" not in flags_of_memory(weight.data_ptr() + weight.nbytes // 2)


def linux_collapses_pages():
    memory = torch.ones(2**21)
    first = -(-memory.data_ptr() // 2**21) * 2**21
    return ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(2**21), pages._COLLAPSE) == 0


@pytest.mark.skipif(not pathlib.Path("/proc/self/smaps").exists(), reason="not Linux")
def test_packed_weights_lie_in_huge_pages_up_to_their_ends():
    if not linux_collapses_pages():
        pytest.skip("this Linux has no huge pages to give, or doesn't move to them what is written")
    weight = torch.randn(1536, 576)  # of 3.4 MB
    packed = [ops.PackedWeight.pack(weight).panels for _ in range(16)]  # side by side
    touched = {p for t in packed for p in range(t.data_ptr() // 2**21, -(-(t.data_ptr() + t.nbytes) // 2**21))}
    smaps = pathlib.Path("/proc/self/smaps").read_text()
    mappings = re.findall(r"^([0-9a-f]+)-([0-9a-f]+) .*?^AnonHugePages: +(\d+) kB", smaps, re.M | re.S)
    total = 0
    for begin, end, huge in mappings:
        whole = {p for p in touched if int(begin, 16) <= p * 2**21 and (p + 1) * 2**21 <= int(end, 16)}
        assert int(huge) >= 2048 * len(whole)
        total += len(whole)
    assert total


def test_machine_code_of_different_tiles_has_different_names():
    """numba tells cached functions of one name and signature, compiled in different processes, apart by chance only."""
    kinds = list(itertools.product((1, 2, 3), ("float32", "bfloat16", "float16"), (False, True), (1, 2)))
    assert len({simd._row_tiles(*kind).__qualname__ for kind in kinds}) == len(kinds)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("features", "depth"), SHAPES)
def test_linear_row_is_the_same_bits_in_every_batch_and_layout(features, depth, dtype, threads):
    x, weight, bias = wide(75, depth), wide(features, depth, seed=1).to(dtype), torch.randn(features).to(dtype)
    packed = ops.PackedWeight.pack(weight)
    torch.set_num_threads(2)
    whole = ops.linear(x, packed, bias)
    torch.set_num_threads(threads)
    for rows in [slice(0, m) for m in (*range(1, 37), 64, 65)] + [slice(5, 6), slice(30, 37)]:  # some, many passes
        assert torch.equal(ops.linear(x[rows], packed, bias), whole[rows])
        assert torch.equal(ops.linear(x[rows], weight, bias), whole[rows])
    transposed = weight.t().contiguous().t()
    assert torch.equal(ops.linear(x, transposed, bias), whole)
    assert torch.equal(packed.rows(torch.tensor([0, features - 1])), weight[[0, -1]])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("features", "depth"), SHAPES)
def test_panels_are_the_weights_bits_and_zeros_beside(features, depth, dtype):
    weight, other = wide(features, depth).to(dtype), wide(features, depth, seed=1).to(dtype)
    reused = ops.PackedWeight.pack(other)
    columns = ops.PackedWeight.pack(weight, reused).panels.transpose(1, 2).reshape(-1, depth)
    assert torch.equal(columns[:features], weight)
    assert not columns[features:].any()
    strided = torch.stack([weight, other], 2)[..., 0]
    assert not strided.is_contiguous()
    assert torch.equal(ops.PackedWeight.pack(strided).panels, reused.panels)


@pytest.mark.parametrize(("features", "depth"), SHAPES)
def test_linear_error_budget(features, depth):
    x, weight = wide(16, depth), torch.randn(features, depth)
    exact = x.double() @ weight.double().t()
    steps = min(depth, CHAIN) + depth // CHAIN  # of a chain, and of the sum of chains: Higham, 2002, (3.5)
    bound = (steps + 1) * EPS * (x.double().abs() @ weight.double().abs().t())
    assert ((ops.linear(x, weight).double() - exact).abs() <= bound).all()
    typical = (ops.linear(x, weight) - exact).abs().max() / (x.abs().double() @ weight.abs().double().t()).max()
    assert typical < 4 * math.sqrt(depth) * EPS


@pytest.mark.parametrize("rows", [1, 9, 70])
@pytest.mark.parametrize("depth", [1, 127, 128, 129, 1024, 1100])
def test_blocks_of_k_are_added_one_after_the_other(depth, rows):
    x, weight, bias = wide(rows, depth), wide(50, depth, seed=1), torch.randn(50)
    out = bias.expand(rows, -1).clone()
    for k in range(0, depth, CHAIN):
        out += ops.linear(x[:, k : k + CHAIN], weight[:, k : k + CHAIN])
    assert torch.equal(ops.linear(x, weight, bias), out)


def test_cut_anywhere_along_k_a_resumed_chain_is_the_same():
    x, weight = wide(9, 300), wide(50, 300, seed=1)
    whole, parts = torch.zeros(9, 50), torch.zeros(9, 50)
    cpu.linear_resume(x, weight, whole)
    for low, high in ((0, 1), (1, 7), (7, 200), (200, 300)):
        cpu.linear_resume(x[:, low:high].contiguous(), weight[:, low:high], parts)
    assert torch.equal(whole, parts)
    short = torch.zeros(9, 50)
    cpu.linear_resume(x[:, :CHAIN].contiguous(), weight[:, :CHAIN], short)
    assert torch.equal(short, ops.linear(x[:, :CHAIN], weight[:, :CHAIN]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", [1, 7, 16, 33])
def test_a_low_rank_update_in_one_launch_has_the_bits_of_its_steps(dtype, rank):
    """Products in fp32, times the scale, added to the rounded product, rounded: what PEFT's module computes."""
    torch.manual_seed(rank)
    features = 100, 20, 172
    weights = [torch.randn(n, 100).to(dtype) for n in features]
    biases = [None, torch.randn(20).to(dtype), None]
    updates: list = [ops.LowRank(torch.randn(rank, 100), torch.randn(n, rank), 1.7) for n in features]
    updates[rank % 3] = None
    packed = [ops.PackedWeight.pack(w) for w in weights]
    for rows in (1, 8, 17, 300):
        for update in filter(None, updates):  # others in the same memory, once not contiguous
            update.down, update.up = torch.randn(rank, 100), torch.randn(rank, len(update.up)).T
            update.pack()
        x = wide(rows, 100).to(dtype)
        outs = ops.linears(x, packed, biases, updates)
        for out, weight, bias, update in zip(outs, weights, biases, updates, strict=True):
            expected = ops.linear(x, weight, bias)
            if update is not None:
                inner = ops.linear(x.float(), update.down)
                expected = (expected + ops.linear(inner, update.up) * update.scale).to(dtype)
            assert torch.equal(out, expected)


@pytest.mark.parametrize("width", [7, 20, 100, 172, 576])
def test_row_ops_are_row_stable_at_every_offset(width):
    x, up, weight = wide(33, width), torch.randn(33, width), torch.randn(width)
    whole = ops.rms_norm(x, weight, 1e-5)
    gated = {name: ops.gated_activation(x, up, name) for name in cpu.ACTIVATIONS}
    for start, count in [(i, 1) for i in range(33)] + [(1, 7), (20, 13)]:
        rows = slice(start, start + count)
        assert torch.equal(ops.rms_norm(x[rows], weight, 1e-5), whole[rows])
        for name, expected in gated.items():
            assert torch.equal(ops.gated_activation(x[rows], up[rows], name), expected[rows])


@pytest.mark.parametrize("width", [7, 100, 576])
def test_row_ops_error_budget(width):
    x, up, weight = wide(33, width), torch.randn(33, width), torch.randn(width)
    exact = F.rms_norm(x.double(), (width,), weight.double(), 1e-5)
    assert ((ops.rms_norm(x, weight, 1e-5) - exact).abs() <= 8 * EPS * exact.abs() + 1e-30).all()
    for name, activation in TORCH_ACTIVATIONS.items():
        exact = activation(x.double()) * up.double()
        error = (ops.gated_activation(x, up, name) - exact).abs()
        assert (error <= 16 * EPS * (x * up).abs() + 1e-30).all(), name


def test_activations_at_the_edges_of_fp32():
    x = torch.tensor([[-3e38, -100.0, -88.0, -87.0, -0.0, 0.0, 1e-30, 87.0, 100.0, 3e38, math.inf, math.nan]])
    for name in cpu.ACTIVATIONS:
        out = ops.gated_activation(x, torch.ones_like(x), name)[0]
        assert torch.isnan(out[-1])
        assert torch.isfinite(out[:-2]).all()
        assert torch.allclose(out[:-2], TORCH_ACTIVATIONS[name](x.double())[0, :-2].float(), rtol=1e-5, atol=1e-30)


def any_values(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Random bits, and so all magnitudes, subnormal ones and infinities among them; no NaN."""
    bits = torch.randint(-(2**31), 2**31, shape).to(torch.int32).view(torch.float32).to(dtype)
    return torch.where(bits.isnan(), torch.ones_like(bits), bits)


@pytest.mark.parametrize("dtype", DTYPES)
def test_row_wise_kernels_round_once_to_the_storage_dtype(dtype):
    """As torch does it, and with the bits of fp32 storage before that."""
    torch.manual_seed(0)
    x, up, weight = torch.randn(300, 100).to(dtype), torch.randn(300, 100).to(dtype), torch.randn(100).to(dtype)
    wide = x.float(), up.float(), weight.float()
    out, rstd = cpu.rms_norm(x, weight, 1e-5)
    expected, expected_rstd = cpu.rms_norm(wide[0], wide[2], 1e-5)
    assert torch.equal(out, expected.to(dtype)) and torch.equal(rstd, expected_rstd)
    total, after = cpu.add_rms_norm(x, up, weight, 1e-5)
    assert torch.equal(total, x + up) and torch.equal(after, cpu.rms_norm(x + up, weight, 1e-5)[0])
    for name in cpu.ACTIVATIONS:
        assert torch.equal(cpu.gated_activation(x, up, name), cpu.gated_activation(wide[0], wide[1], name).to(dtype))
    a, b = any_values(300, 100, dtype=dtype), any_values(300, 100, dtype=dtype)
    total, _ = cpu.add_rms_norm(a, b, weight, 1e-5)
    assert torch.equal(total.nan_to_num(7.0), (a + b).nan_to_num(7.0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("values", [torch.randn, any_values])
@pytest.mark.parametrize("normed", [False, True])
def test_heads_are_placed_as_the_models_code_does_it(dtype, values, normed):
    """Norms, transformers' rotary embedding, keys and values in the cache."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    torch.manual_seed(0)
    q, k, v = values(200, 4, 20, dtype=dtype), values(200, 2, 20, dtype=dtype), values(200, 2, 20, dtype=dtype)
    cos, sin = (t.to(dtype) for t in cpu.rotary_tables(torch.arange(200) * 1000, torch.rand(10), 1.1))
    norms = ((torch.randn(20).to(dtype), 1e-5), (torch.randn(20).to(dtype), 1e-2)) if normed else None
    layout = ops.packed_layout([120, 80], 2, q.device)
    caches = [cpu.new_kv_cache(layout.num_blocks, 2, 20, dtype, q.device) for _ in range(2)]
    for cache in (*caches[0], *caches[1]):
        cache.zero_()
    ours = cpu.place_heads(q, k, v, norms, (cos, sin), layout, caches[0])
    if normed:
        q, k = (ops.rms_norm(x, *norm) for x, norm in zip((q, k), norms, strict=True))
    theirs = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos[None], sin[None])
    expected_q, expected_k = (t[0].transpose(0, 1) for t in theirs)
    cpu.write_kv(expected_k, v, layout, *caches[1])
    for found, expected in ((ours, expected_q), *zip(*caches, strict=True)):
        assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))


def test_rotary_tables_are_close_to_fp64_and_independent_of_the_batch():
    inv_freq = 1.0 / (1e5 ** (torch.arange(0, 20, 2, dtype=torch.float) / 20))
    positions = torch.arange(0, 8000, 7)
    cos, sin = ops.rotary_tables(positions, inv_freq, 1.0)
    angle = (positions[:, None].float() * inv_freq).double()
    assert (cos[:, :10] - angle.cos()).abs().max() <= EPS
    assert (sin[:, 10:] - angle.sin()).abs().max() <= EPS
    one = ops.rotary_tables(positions[5:6], inv_freq, 1.0)
    assert torch.equal(one[0][0], cos[5])


def dense_attention(q, k, v, scale, window):
    length, group = q.shape[0], q.shape[1] // k.shape[1]
    k, v = (t.double().repeat_interleave(group, 1) for t in (k, v))
    row = torch.arange(length)
    seen = row[:, None] >= row
    if window:
        seen &= row[:, None] - row < window
    scores = torch.einsum("thd,shd->hts", q.double(), k) * scale
    return torch.einsum("hts,shd->thd", scores.masked_fill(~seen, -math.inf).softmax(-1), v)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "window"),
    [(9, 3, 64, 0), (5, 1, 20, 0), (4, 2, 80, 50), (4, 4, 16, 7), (30, 1, 16, 0)],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_in_any_chunks_and_blocks_is_the_same_bits(heads, kv_heads, dim, window, dtype, threads):
    length, scale = 150, dim**-0.5
    q, k, v = torch.randn(length, heads, dim), torch.randn(length, kv_heads, dim), torch.randn(length, kv_heads, dim)
    q, k, v = (t.to(dtype) for t in (q, k, v))
    whole = ops.attention(q, k, v, ops.packed_layout([length], heads // kv_heads, q.device), scale, window)
    budget = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
    exact = dense_attention(q.float(), k.float(), v.float(), scale, window)
    assert ((whole.double() - exact).abs() <= budget * (1 + exact.abs()) * 4).all()
    rng = np.random.default_rng(0)
    block_table = rng.permutation(9)[:5].astype(np.int32)
    cache = cpu.new_kv_cache(9, kv_heads, dim, dtype, q.device)
    for tensor in cache:
        tensor.fill_(math.nan)  # nothing unwritten is read
    start = 0
    while start < length:
        count = min(length - start, int(rng.choice([1, 1, 2, 5, 31, 40])))
        positions = np.arange(start, start + count, dtype=np.int32)
        slot_mapping = block_table[positions // 32] * np.int32(32) + positions % 32
        items = cpu.work_items([count], heads // kv_heads)
        layout = ops.PagedLayout([count], positions, slot_mapping, block_table, np.zeros(1, np.int32), items)
        part = slice(start, start + count)
        out, _ = ops.paged_attention(q[part], k[part], v[part], cache, layout, scale, window)
        assert torch.equal(out.to(dtype).view(torch.int8), whole[part].contiguous().view(torch.int8))
        start += count


def test_packed_sequences_do_not_see_each_other():
    q, k, v = torch.randn(100, 4, 16), torch.randn(100, 2, 16), torch.randn(100, 2, 16)
    both = ops.attention(q, k, v, ops.packed_layout([37, 63], 2, q.device), 0.25)
    alone = ops.attention(q[37:], k[37:], v[37:], ops.packed_layout([63], 2, q.device), 0.25)
    assert torch.equal(both[37:], alone)


def gradients(function, tensors, upstream):
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    return torch.autograd.grad(function(*leaves), leaves, upstream.to(leaves[0].dtype))


def cases():
    layout = ops.packed_layout([70, 1, 300], 3, torch.device("cpu"))

    def dense(window):
        def run(q, k, v):
            parts = zip(*(t.split([70, 1, 300]) for t in (q, k, v)), strict=True)
            return torch.cat([dense_attention(*part, 0.3, window) for part in parts])

        return run

    yield "linear", ops.linear, F.linear, [(40, 20), (33, 20), (33,)]
    yield "norm", lambda x, w: ops.rms_norm(x, w, 1e-5), lambda x, w: F.rms_norm(x, (20,), w, 1e-5), [(40, 20), (20,)]
    for name, activation in TORCH_ACTIVATIONS.items():
        ours = lambda a, b, n=name: ops.gated_activation(a, b, n)  # noqa: E731
        yield name, ours, lambda a, b, f=activation: f(a) * b, [(40, 20), (40, 20)]
    for window in (0, 40):
        ours = lambda q, k, v, w=window: ops.attention(q, k, v, layout, 0.3, w)  # noqa: E731
        yield f"attention-{window}", ours, dense(window), [(371, 6, 20), (371, 2, 20), (371, 2, 20)]


@pytest.mark.parametrize(("name", "ours", "reference", "shapes"), [pytest.param(*c, id=c[0]) for c in cases()])
def test_backward_repeats_as_bits_and_is_close_to_fp64(name, ours, reference, shapes):
    torch.manual_seed(0)
    tensors = [torch.randn(s) for s in shapes]
    upstream = torch.randn_like(ours(*tensors))
    first, second = gradients(ours, tensors, upstream), gradients(ours, tensors, upstream)
    exact = gradients(reference, [t.double() for t in tensors], upstream)
    for a, b, e in zip(first, second, exact, strict=True):
        assert torch.equal(a, b)
        assert (a - e).abs().max() <= 3e-6 * e.abs().max()


@pytest.mark.parametrize(
    "setting", [{}, {"temperature": 0.7}, {"top_k": 50}, {"top_p": 0.9, "temperature": 1.3}, {"min_p": 0.1}]
)
def test_token_logprobs_forward_and_backward_in_any_chunks(setting):
    torch.manual_seed(0)
    hidden, weight = torch.randn(50, 20), torch.randn(1001, 20)
    params = ops.RowParams.repeat(50, **setting)
    with torch.no_grad():
        targets, scores, edges = ops.sample(ops.linear(hidden, weight), params, np.full(50, -1))

    def ours(h, w, chunk=16):
        return torch.stack(ops.token_logprobs(h, w, None, targets, params, chunk)[:2])

    def reference(h, w):
        z = h @ w.t() / setting.get("temperature", 1.0)
        logp = torch.where(z >= edges[:, None] - 1e-5, z, -math.inf).log_softmax(-1)
        entropy = -(logp.exp() * logp.masked_fill(logp == -math.inf, 0.0)).sum(-1)
        return torch.stack([logp[range(50), targets], entropy])

    out = ours(hidden, weight)
    assert torch.equal(out[0], scores.logprob.float())
    assert torch.equal(out, ours(hidden, weight, 7))
    assert (out - reference(hidden.double(), weight.double())).abs().max() < 1e-5
    upstream = torch.randn(2, 50)
    grads, again = (
        gradients(ours, (hidden, weight), upstream),
        gradients(lambda h, w: ours(h, w, 50), (hidden, weight), upstream),
    )
    exact = gradients(reference, (hidden.double(), weight.double()), upstream)
    for a, b, e in zip(grads, again, exact, strict=True):
        assert torch.equal(a, b)
        assert (a - e).abs().max() <= 1e-5 * e.abs().max()


_DIGEST = """
import hashlib, json, sys, torch
from samebits.kernels import functions, ops
from samebits.kernels.backend import UNARY
from samebits.kernels.cpu.simd import LANES
g = torch.Generator().manual_seed(3)
x, w, n = (torch.randn(*s, generator=g) for s in ((21, 100), (172, 100), (100,)))
q, k, v = (torch.randn(45, h, 20, generator=g) for h in (6, 2, 2))
layout = ops.packed_layout([45], 3, q.device)
tables = ops.rotary_tables(torch.arange(99), n.abs(), 1.0)
p = ops.RowParams.repeat(21, 0.7, top_k=40, top_p=0.9)
weights = functions.softmax(x[:, :5], torch.float32)
outs = [ops.linear(x, w), ops.rms_norm(x, n, 1e-5), ops.gated_activation(x, x, "silu"), *tables, weights]
if sys.argv[1:] != ["some"]:
    outs += [*(ops.linear(x, w.to(dtype)) for dtype in ops.DTYPES), ops.attention(q, k, v, layout, 0.2),
             *ops.token_logprobs(x, w, None, torch.arange(21), p)]
    gate_up, down = torch.randn(5, 72, 100, generator=g), torch.randn(5, 100, 36, generator=g)
    ids = functions.top_k(weights, 3).indices
    outs += [ops.experts(x, gate_up, down, ids, weights[:, :3], "silu"), *(functions.unary(x, f) for f in UNARY)]
    outs += [ops.experts(x, *map(ops.PackedWeight.pack, (gate_up, down)), ids, weights[:, :3], "silu")]
digest = hashlib.sha256(b"".join(t.contiguous().numpy().tobytes() for t in outs)).hexdigest()
print(json.dumps([LANES, digest]))
"""


def digest(*args, **env):
    """Return the lanes of a process's vectors and the hash of what its kernels give."""
    run = subprocess.run(
        [sys.executable, "-c", _DIGEST, *args], env={**os.environ, **env}, capture_output=True, text=True, check=True
    )
    return json.loads(run.stdout)


@pytest.mark.skipif(sys.platform != "linux" or os.uname().machine != "x86_64", reason="narrower x86 vectors")
@pytest.mark.parametrize(
    ("cpu", "features", "width", "kernels"),
    [
        ("haswell", "+sse,+sse2,+sse4.2,+avx,+avx2,+fma", 8, ["some"]),
        pytest.param("haswell", "+sse,+sse2,+sse4.2,+avx,+avx2,+fma", 8, [], marks=pytest.mark.slow),
        pytest.param("nehalem", "+sse,+sse2,+sse4.2", 4, [], marks=pytest.mark.slow),
    ],
)
def test_bits_do_not_depend_on_the_vector_width(cpu, features, width, kernels):
    with ThreadPoolExecutor() as pool:  # each compiles for a while
        here = pool.submit(digest, *kernels)
        lanes, bits = digest(*kernels, NUMBA_CPU_NAME=cpu, NUMBA_CPU_FEATURES=features)
    assert lanes == width <= here.result()[0]
    assert bits == here.result()[1]


def test_probe_accepts_our_product():
    contract.probe([torch.randn(576, 576), torch.randn(172, 100)])


def test_probe_finds_a_batch_dependent_product(monkeypatch):
    def drifting(x, weight):
        return F.linear(x, weight) + 1e-3 * x.shape[0]

    monkeypatch.setattr(ops, "linear", drifting)
    with pytest.raises(contract.NumericsError, match="different batches"):
        contract.probe([torch.randn(33, 20)])


def test_probe_of_attention_compares_decoding_and_repeated_runs(monkeypatch):
    monkeypatch.setattr(contract, "_REPEATS", 1)
    kernels = ops.backend(torch.device("cpu"))
    attention = kernels.attention
    where = torch.device("cpu"), torch.float32, 2, 16
    probe = contract.probe_attention.__wrapped__
    probe(*where)
    calls = itertools.count(1)
    for wrong in (lambda layout: len(layout.positions) == 1, lambda layout: next(calls) == 8):

        def drifting(q, k_cache, v_cache, layout, *rest, wrong=wrong):
            out, lse = attention(q, k_cache, v_cache, layout, *rest)
            return out, lse + 1e-3 * wrong(layout)

        monkeypatch.setattr(kernels, "attention", drifting)
        with pytest.raises(contract.NumericsError, match="other bits alone than in a prompt, or in another run"):
            probe(*where)


def test_contract_hash_names_what_differs():
    one = contract.Contract.of(torch.float32, torch.device("cpu"))
    other = contract.Contract.of(torch.bfloat16, torch.device("cpu"))
    one.check(contract.Contract.of(torch.float32, torch.device("cpu")))
    one.check(one.hash)
    assert one.hash != other.hash
    with pytest.raises(contract.NumericsError, match="dtype"):
        one.check(other)
    with pytest.raises(contract.NumericsError, match=other.hash):
        one.check(other.hash)


def test_same_bits_from_two_processes():
    run = [subprocess.run([sys.executable, "-c", _DIGEST], capture_output=True, check=True).stdout for _ in range(2)]
    assert hashlib.sha256(run[0]).digest() == hashlib.sha256(run[1]).digest()


def test_a_default_dtype_of_the_callers_changes_nothing():
    x, w = torch.randn(5, 100), torch.randn(70, 100)
    params, ids = ops.RowParams.repeat(5), torch.tensor([[0], [1], [1], [0], [1]])

    def everything():
        layout = ops.packed_layout([5], 1, x.device)
        q = x[:, :20].reshape(5, 1, 20)
        hidden, weight = x.clone().requires_grad_(), w.clone().requires_grad_()
        logprob, entropy, _ = ops.token_logprobs(hidden, weight, None, torch.arange(5), params)
        (logprob.sum() + entropy.sum()).backward()
        tables = ops.rotary_tables(torch.arange(5), x[0].abs(), 1.0)
        norm = ops.rms_norm(x, x[0], 1e-5)
        attended = ops.attention(q, q, q, layout, 0.2)
        scores = functions.softmax(x, torch.float32)
        down = w.t()[None, :, :35].repeat(2, 1, 1)
        mixed = ops.experts(x, torch.stack([w, w.flip(0)]), down, ids, scores[:, :1], "silu")
        mixture = scores, functions.row_sums(x, 3, torch.float32), mixed
        return [ops.linear(x, w), norm, attended, *tables, logprob, entropy, hidden.grad, weight.grad, *mixture]

    expected = everything()
    torch.set_default_dtype(torch.float64)
    try:
        found = everything()
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(map(torch.equal, found, expected))


def test_top_k_beyond_the_tokens_that_are_not_banned_keeps_all_of_them():
    logits = torch.randn(1, 1001)
    params = ops.RowParams.repeat(1, top_k=1000)
    params.masks, params.mask_rows = ops.stack_masks([ops.mask_without([3, 4], 1001)])
    scores = ops.sample(logits, params, np.array([7])).scores
    kept = torch.ones(1001, dtype=torch.bool)
    kept[[3, 4]] = False
    exact = logits.double()[0].masked_fill(~kept, -torch.inf).log_softmax(-1)
    assert abs(scores.logprob[0] - exact[7]) < 1e-6
    assert torch.stack(scores).isfinite().all()


def test_a_second_derivative_is_refused_and_not_wrong():
    x = torch.randn(3, 16, requires_grad=True)
    (grad,) = torch.autograd.grad(ops.rms_norm(x, torch.ones(16), 1e-5).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_flushed_denormals_and_other_rounding_are_refused():
    libm = ctypes.CDLL("libm.so.6")
    frequencies = torch.ones(4)
    for change, restore, message in [
        (lambda: torch.set_flush_denormal(True), lambda: torch.set_flush_denormal(False), "set_flush_denormal"),
        *((lambda mode=mode: libm.fesetround(mode), lambda: libm.fesetround(0), "fesetround") for mode in DIRECTED),
    ]:
        change()
        try:
            with pytest.raises(contract.NumericsError, match=message):
                ops.rotary_tables(torch.arange(3), frequencies, 1.0)
        finally:
            restore()
    ops.rotary_tables(torch.arange(3), frequencies, 1.0)
