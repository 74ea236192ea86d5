"""Do the GPU kernels keep the promise here? Every schedule against every other, then the engine against the trainer."""

from __future__ import annotations

import hashlib
import itertools
import os
import pathlib
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from typing import Any

import gpu_experts
import numpy as np
import torch

from samebits import LLM, SamplingParams
from samebits.kernels import ops
from samebits.kernels.triton.schedules import Tile
from samebits.trainer import exact_model, token_logprobs

from isolate import note

linear = import_module("samebits.kernels.triton.linear")
paged = import_module("samebits.kernels.triton.attention")
elementwise = import_module("samebits.kernels.triton.elementwise")
gradients = import_module("samebits.kernels.triton.attention_backward")
sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))

QWEN3 = {  # hidden, intermediate, layers, heads, kv heads, head_dim, vocabulary
    "0.6B": (1024, 3072, 28, 16, 8, 128, 151_936),
    "1.7B": (2048, 6144, 28, 16, 8, 128, 151_936),
    "tiny": (64, 96, 2, 4, 2, 16, 257),
}
PAIRED = Tile(16, 64, 2, 4, True), Tile(16, 32, 3, 4, True, deep=True), Tile(64, 64, 2, 4, False)  # of several products
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def checkpoint(size: str, folder: str, device) -> pathlib.Path:
    """A Qwen3 of random weights, of a published shape."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    path = pathlib.Path(folder) / size
    if not path.exists():
        scratch = path.with_name(f"{size}.{os.getpid()}")
        hidden, intermediate, depth, heads, kv_heads, dim, vocab = QWEN3[size]
        config = Qwen3Config(
            hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=depth,
            num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=dim, vocab_size=vocab,
            tie_word_embeddings=True, max_position_embeddings=40_960, bos_token_id=1, eos_token_id=2,
        )  # fmt: skip
        torch.manual_seed(0)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(scratch)
        scratch.rename(path)  # whole, or not there: a process may die before
    return path


def shapes(size: str) -> dict[str, tuple[int, int]]:
    """features and depth of a model's linears."""
    hidden, intermediate, _, heads, kv_heads, dim, vocab = QWEN3[size]
    return {
        "qkv": ((heads + 2 * kv_heads) * dim, hidden), "o": (hidden, heads * dim),
        "gate_up": (2 * intermediate, hidden), "down": (hidden, intermediate), "lm_head": (vocab, hidden),
    }  # fmt: skip


def joined(part: str, features: int) -> list[int]:
    """Return the features of the products that are launched together, as a model's layer launches them."""
    return [features // 2, features // 4, features // 4] if part == "qkv" else [features]


def wide_exponents(*shape: int, device, dtype: torch.dtype) -> torch.Tensor:
    """Sums of such numbers differ at once when they are added in another order."""
    numbers = torch.randn(*shape, device=device) * torch.exp2(torch.randint(-6, 6, shape, device=device))
    return numbers.to(dtype)


def digest(tensors: Iterable[torch.Tensor]) -> str:
    found = hashlib.blake2b(digest_size=8)
    for t in tensors:
        found.update(t.contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def all_tiles(dtype: torch.dtype) -> Iterator[Tile]:
    """Every kind of tile in bfloat16, a sample in the others: each is a compilation of a second."""
    half = dtype != torch.float32
    many = dtype == torch.bfloat16
    heights, widths = (16, 32, 64, 128) if half else (16, 32, 64), (16, 64, 128) if many else (64,)
    stages, warps = ((2, 4), (4, 8)) if many else ((3,), (4,))
    for m, n, stage, warp, split in itertools.product(heights, widths, stages, warps, (True, False)):
        yield Tile(m, n, stage, warp, split)
    if half:
        yield from (
            Tile(m, n, 3, 4, split, deep=True) for m, n, split in ((16, 32, True), (16, 16, False), (32, 32, True))
        )
    if half and linear.has_copy_engine(torch.device("cuda")):
        yield from (Tile(m, n, 3, 8, False, tma=True) for m, n in ((64, 128), (128, 128), (128, 256)))


def gate_linear(device, size: str, rows: Iterable[int], thorough: bool) -> dict[str, Any]:
    """Every tile and every number of rows; for information, other BLOCK_K and cuBLAS."""
    report: dict[str, Any] = {"compared": 0, "differ": [], "unsupported": [], "hashes": {}, "information": {}}
    dtypes = DTYPES if thorough else {"bfloat16": torch.bfloat16}
    for (name, dtype), (part, (features, depth)) in itertools.product(dtypes.items(), shapes(size).items()):
        if part == "lm_head":
            features = min(features, 4096)
        torch.manual_seed(0)
        most = max(rows)
        x = wide_exponents(most, depth, device="cpu", dtype=dtype).to(device)
        w = wide_exponents(features, depth, device="cpu", dtype=dtype).to(device)
        whole = linear.products(x, [w], [None], torch.float32)[0]
        report["hashes"][f"{name} {part}"] = digest([whole])
        for count in rows:
            note(f"{name} {part}: {count} rows")
            report["compared"] += 1
            if not torch.equal(linear.products(x[:count], [w], [None], torch.float32)[0], whole[:count]):
                report["differ"].append(f"{name} {part}: {count} rows")
        few = 130 if part in ("qkv", "down") else 40
        for tile in all_tiles(dtype) if thorough else [Tile(16, 64, 2, 4, True), Tile(64, 64, 2, 4, False)]:
            count = min(most, 1100) if tile.tma else few  # several tiles a program
            note(f"{name} {part}: {count} rows, {tile}")
            try:
                kinds = {torch.float32, dtype} if tile.tma else {torch.float32}
                outs = [linear.products(x[:count], [w], [None], kind, tile)[0] for kind in kinds]
            except Exception as error:  # what doesn't fit this GPU's shared memory
                if "OutOfResources" not in type(error).__name__ and "PassManager" not in str(error):
                    raise
                report["unsupported"].append(f"{name} {tile}")
                continue
            report["compared"] += 1
            if not all(torch.equal(out, whole[:count].to(out.dtype)) for out in outs):
                report["differ"].append(f"{name} {part}: {tile}")
        if part == "gate_up":  # as the engine launches them, and in steps
            pair, none = list(w.split(features // 2)), [None, None]
            steps = elementwise.gated_activation(*linear.products(x[:few], pair, none, dtype), "silu")
            for tile in (None, *PAIRED, Tile(128, 128, 3, 8, False)):
                report["compared"] += 1
                if not torch.equal(linear.gated_products(x[:few], pair, none, "silu", dtype, tile), steps):
                    report["differ"].append(f"{name} gate_up with its activation: {tile}")
        if part == "qkv":  # as the engine launches them
            parts = w.split([features // 2, features // 4, features // 4])
            biases = [wide_exponents(len(parts[0]), device=device, dtype=dtype), None, parts[2][:, 0].contiguous()]
            apart = [linear.products(x[:few], [p], [b], torch.float32)[0] for p, b in zip(parts, biases, strict=True)]
            for tile in (None, *PAIRED):
                for _ in range(2):  # a split leaves its counters as they were
                    report["compared"] += 1
                    together = linear.products(x[:few], [*parts], biases, torch.float32, tile)
                    if not all(map(torch.equal, together, apart)):
                        report["differ"].append(f"{name} q, k and v in one launch: {tile}")
        if part == "o":
            before = dict(linear.BLOCK_K)
            for block in (32, 64, 128):
                linear.BLOCK_K[dtype] = block
                other = linear.products(x[:few], [w], [None], torch.float32, Tile(16, 64, 2, 4, True))[0]
                same = torch.equal(other, whole[:few])
                report["information"][f"{name} BLOCK_K {block}"] = same
            linear.BLOCK_K.update(before)
            alone = [torch.equal((x[:n] @ w.t())[0], (x @ w.t())[0]) for n in (1, 16, 128)]
            report["information"][f"{name} cuBLAS row alone, in 16, in 128 == in {most}"] = alone
    return report


def gate_attention(device, lengths: list[int], heads=16, kv_heads=8, dim=128) -> dict[str, Any]:
    """Rows of a packed prefill against the same rows decoded alone, with every number of splits; the gradients of all
    that may compute them against fp64, and again and again."""
    report: dict[str, Any] = {"compared": 0, "differ": [], "hashes": {}, "information": {}}
    total = sum(lengths)
    steps = 20 if total > 100 else 3
    kinds = itertools.product(DTYPES.items(), (0, 700)) if total > 100 else [(("bfloat16", torch.bfloat16), 0)]
    for (name, dtype), window in kinds:
        torch.manual_seed(0)
        q, k, v = (torch.randn(total, h, dim).to(device, dtype) for h in (heads, kv_heads, kv_heads))
        layout = ops.packed_layout(lengths, heads // kv_heads, device)
        cache = paged.new_kv_cache(layout.num_blocks, kv_heads, dim, dtype, device)
        for tensor in cache:
            tensor.fill_(float("nan"))
        out, lse = ops.paged_attention(q, k, v, cache, layout, dim**-0.5, window)
        report["hashes"][f"{name} window {window}"] = digest([out, lse])
        at, sequence = layout.on(device), np.repeat(np.arange(len(lengths)), lengths)
        one = torch.tensor([[0, 1, 0, 0, 0]], dtype=torch.int32, device=device)
        for token, splits in itertools.product([*range(0, total, total // steps), total - 1], (1, 2, 3, 7)):
            note(f"{name} window {window}: token {token} of {lengths} in {splits} splits")
            found = paged.attention(
                q[token : token + 1], *cache, one, at.positions[token : token + 1], at.block_tables,
                at.block_table_starts[sequence[token]][None], dim**-0.5, window, [1], max(lengths), splits=splits,
            )  # fmt: skip
            report["compared"] += 1
            if not (torch.equal(found[0][0], out[token]) and torch.equal(found[1][0], lse[token])):
                report["differ"].append(f"{name} window {window}: token {token} in {splits} splits")
        given = q, k, v, out, lse, q.flip(0), lengths, dim**-0.5, window
        served = gradients.serving_backward(q, kv_heads, lengths, window)
        report["information"][f"{name} window {window}: backward"] = served.__name__
        note(f"{name} window {window}: gradients")
        exact = gradients.exact_gradients(q, k, v, q.flip(0), *given[6:])
        for backward in {gradients._triton_backward, served}:
            errors = [gradients.gradient_error(a, b) for a, b in zip(backward(*given), exact, strict=True)]
            report["compared"] += 1
            report["information"][f"{name} window {window}: errors of {backward.__name__}"] = errors
            if not max(errors) < gradients.BUDGETS[dtype]:
                report["differ"].append(f"{name} window {window}: {backward.__name__} and fp64, by {errors}")
        first = gradients.attention_backward(*given)
        for _ in range(steps):
            report["compared"] += 1
            if not all(map(torch.equal, gradients.attention_backward(*given), first)):
                report["differ"].append(f"{name} window {window}: gradients of two runs")
    return report


def gate_rows(device, widths: Iterable[int], vocab: int, tiny: bool = False) -> dict[str, Any]:
    """Norms, activations and distributions of a row alone and in a batch; fused rotary against the model's code."""
    from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

    kernels = ops.backend(device)
    rows, tokens, heads = (20, 6, 4) if tiny else (300, 50, 16)
    report: dict[str, Any] = {"compared": 0, "differ": [], "hashes": {}}

    def expect(what: str, a: torch.Tensor, b: torch.Tensor) -> None:
        report["compared"] += 1
        ours, theirs = (t.clone(memory_format=torch.contiguous_format).view(torch.uint8) for t in (a, b))
        if not torch.equal(ours, theirs):
            report["differ"].append(what)

    torch.manual_seed(0)
    for name, dtype in DTYPES.items():
        for width in widths:
            note(f"{name} width {width}")
            x, weight = torch.randn(rows, width).to(device, dtype), torch.randn(width).to(device, dtype)
            norm, gated = kernels.rms_norm(x, weight, 1e-6)[0], kernels.gated_activation(x, x, "silu")
            report["hashes"][f"{name} {width}"] = digest([norm, gated])
            both = kernels.add_rms_norm(x, x.flip(0), weight, 1e-6)
            expect(f"{name} sum and norm {width}", both[0], x + x.flip(0))
            expect(f"{name} norm of a sum {width}", both[1], kernels.rms_norm(both[0], weight, 1e-6)[0])
            for row in (0, 1, 17, rows - 1):
                expect(f"{name} norm {width}", kernels.rms_norm(x[row : row + 1], weight, 1e-6)[0], norm[row : row + 1])
                expect(
                    f"{name} gate {width}",
                    kernels.gated_activation(*[x[row : row + 1]] * 2, "silu"),
                    gated[row : row + 1],
                )
        q, k = (torch.randn(tokens, n, 128).to(device, dtype) for n in (heads, heads // 2))
        tables = kernels.rotary_tables(torch.arange(tokens, device=device) * 700, torch.rand(64, device=device), 1.0)
        cos, sin = (t.to(dtype) for t in tables)
        theirs = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos[None], sin[None])
        q_turned, k_turned = (t[0].transpose(0, 1).contiguous() for t in theirs)
        layout = ops.packed_layout([tokens], 2, device)
        caches = [kernels.new_kv_cache(1, heads // 2, 128, dtype, device) for _ in range(2)]
        kernels.write_kv(k_turned, k, layout, *caches[0])
        expect(f"{name} rotary", kernels.place_heads(q, k, k, None, (cos, sin), layout, caches[1]), q_turned)
        for ours, other in zip(*caches, strict=True):
            expect(f"{name} cache", ours[:, :, :tokens], other[:, :, :tokens])
        norms = [(q[i, 0].contiguous(), eps) for i, eps in enumerate((1e-6, 1e-5))]
        normed = [kernels.rms_norm(t.view(-1, 128), *n)[0].view(t.shape) for t, n in zip((q, k), norms, strict=True)]
        apart = kernels.place_heads(*normed, k, None, (cos, sin), layout, caches[0])
        expect(f"{name} heads", kernels.place_heads(q, k, k, tuple(norms), (cos, sin), layout, caches[1]), apart)
        for ours, other in zip(*caches, strict=True):
            expect(f"{name} cache of normed heads", ours[:, :, :tokens], other[:, :, :tokens])
    logits = torch.randn(24, vocab).to(device) * 3
    params = ops.RowParams.repeat(24)
    params.top_k[4:8], params.top_p[6:12], params.min_p[10:14], params.temperature[3:20] = 50, 0.9, 0.05, 0.7
    counters = np.arange(24, dtype=np.uint64), np.arange(24), np.arange(24)
    drawn = ops.sample(logits, params, torch.full((24,), -1, device=device), *counters)
    report["hashes"]["sample"] = digest([torch.stack(drawn.scores, 1), drawn.tokens])
    for row in range(24):
        part = slice(row, row + 1)
        target = torch.full((1,), -1, device=device)
        alone = ops.sample(logits[part], params[part], target, *(c[part] for c in counters))
        for ours, theirs in zip((alone.tokens, *alone.scores), (drawn.tokens, *drawn.scores), strict=True):
            expect(f"sample row {row}", ours.contiguous(), theirs[part].contiguous())
    return report


def properties(device, folder: str, sizes: Iterable[str], cases: int) -> dict[str, Any]:
    """The engine under random schedules against the trainer: small families, named shapes, graphs and eager, after
    optimizer steps."""
    from helpers.models import CONFIGS, make_checkpoint
    from helpers.schedules import check_results, random_requests, run_schedule

    report: dict[str, Any] = {"schedules": 0, "tokens": 0, "differ": []}

    def schedule(name, path, dtype, model, vocab, requests, longest, seed, **settings):
        rng = random.Random(seed)
        note(f"{name} {dtype} {settings}, seed {seed}")
        asked = random_requests(rng, vocab, requests, longest)
        try:
            results, _ = run_schedule(path, dtype, rng, asked, [model], device=str(device), **settings)
            check_results([model], asked, results)
            report["tokens"] += sum(len(c.token_ids) for out in results for c in out.completions)
        except AssertionError as error:
            report["differ"].append(f"{name} {dtype} {settings}: {str(error)[:200]}")
        report["schedules"] += 1

    families = "qwen3_moe", "glm4_moe", *CONFIGS
    pairs = [*((family, "bfloat16") for family in families), ("qwen3", "float16"), ("llama", "float32")]
    for family, dtype in pairs if cases else ():
        path = make_checkpoint(pathlib.Path(folder) / f"{family}-{dtype}", family)
        model = exact_model(path, dtype, device)
        for case in range(cases):
            eager = {"enforce_eager": case % 2 == 1}
            schedule(family, path, dtype, model, 1001, 6, 45, f"{family}{dtype}{case}", **eager)
    for size in sizes:
        path = checkpoint(size, folder, device)
        model = exact_model(path, "bfloat16", device)
        llm = LLM(path, dtype="bfloat16", device=str(device), kv_cache_memory_bytes=2**30, skip_tokenizer_init=True)
        rng, vocab = random.Random(0), model.config.vocab_size
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        for step in range(3 if vocab > 1000 else 2):
            note(f"{size} after {step} optimizer steps")
            longest, count, tokens = (600, 16, 40) if vocab > 1000 else (20, 2, 2)
            prompts = [[rng.randrange(vocab) for _ in range(rng.randint(1, longest))] for _ in range(count)]
            params = SamplingParams(
                n=2, max_tokens=tokens, seed=step, ignore_eos=True, temperature=(1.0, 0.7, 1.3)[step]
            )
            outputs = llm.generate(prompts, params, use_tqdm=False)
            sequences = [o.prompt_token_ids + c.token_ids for o in outputs for c in o.completions]
            logprobs = token_logprobs(model, sequences, params)
            rollout = [torch.tensor(c.logprobs) for o in outputs for c in o.completions]
            trainer = [lp[-tokens:].detach().cpu() for lp in logprobs]
            wrong = sum(not torch.equal(a, b) for a, b in zip(rollout, trainer, strict=True))
            report["tokens"] += tokens * len(rollout)
            if wrong:
                report["differ"].append(f"{size} after {step} steps: {wrong} of {len(rollout)} sequences")
            torch.cat(logprobs).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            llm.update_weights(model)
        report["differ"] += [f"{size}: {wait}" for wait in waits(llm)]
        llm.close()
        del model, llm, optimizer
        if torch.device(device).type == "cuda":
            torch.cuda.empty_cache()
    return report


def waits(llm: LLM) -> list[str]:
    """Return the places where the host waits for the GPU while it starts a step: none, or steps could not overlap."""
    llm.add_request([1, 2, 3], SamplingParams(n=2, max_tokens=8, ignore_eos=True))
    for _ in range(4):
        llm.step()
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode("error")
    try:
        llm.engine._submit()
    except RuntimeError as error:
        return [f"a step that waits: {error}"]
    finally:
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("default")
    while llm.has_unfinished_requests():
        llm.step()
    return []


def two_gpus(device, folder: str) -> dict[str, Any]:
    """An engine in two stages on two GPUs, over NCCL, against one on one GPU."""
    if torch.cuda.device_count() < 2:
        return {"skipped": f"{torch.cuda.device_count()} GPU here, two are needed"}
    path, found = checkpoint("0.6B", folder, device), []
    rng = random.Random(0)
    prompts = [[rng.randrange(1000) for _ in range(rng.randint(1, 300))] for _ in range(8)]
    params = SamplingParams(n=2, max_tokens=40, seed=0, ignore_eos=True)
    for stages in (1, 2):
        note(f"{stages} stages")
        llm = LLM(path, dtype="bfloat16", device=str(device), pipeline_parallel_size=stages,
                  kv_cache_memory_bytes=2**30, skip_tokenizer_init=True)  # fmt: skip
        outputs = llm.generate(prompts, params, use_tqdm=False)
        found.append([(c.token_ids, c.logprobs) for out in outputs for c in out.completions])
        llm.close()
    differ = [f"completion {i}" for i, (a, b) in enumerate(zip(*found, strict=True)) if a != b]
    return {"compared": len(found[0]), "differ": differ}


def gates(device, folder: str, tiny: bool) -> list[tuple[str, Callable[[], dict[str, Any]]]]:
    """(name, gate), the most telling first. folder: for checkpoints."""
    if tiny:
        return [
            ("linear", lambda: gate_linear(device, "tiny", (1, 2, 3, 8, 17), False)),
            ("attention", lambda: gate_attention(device, [70, 9], 4, 2, 16)),
            ("rows", lambda: gate_rows(device, (64,), 600, tiny)),
            ("experts", lambda: gpu_experts.gate(device, tiny, digest)),
            ("engine", lambda: properties(device, folder, ["tiny"], 0)),
        ]
    rows = 1, 2, 7, 16, 17, 31, 64, 100, 128, 200, 256, 500, 1024, 4096
    return [
        ("linear", lambda: gate_linear(device, "1.7B", rows, True)),
        ("attention", lambda: gate_attention(device, [2000, 600, 33])),
        ("rows", lambda: gate_rows(device, (128, 1024, 2048), 151_936)),
        ("experts", lambda: gpu_experts.gate(device, tiny, digest)),
        ("engine", lambda: properties(device, folder, ["0.6B", "1.7B"], 0)),
        ("schedules", lambda: properties(device, folder, [], 3)),
        ("two gpus", lambda: two_gpus(device, folder)),
    ]
