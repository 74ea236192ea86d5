"""The cost of exactness on this GPU: ratios in one run, against the same engine on cuBLAS, bandwidth, and HF."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.util
import itertools
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import time
import unittest.mock
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from typing import Any

import gpu_experts
import torch
from torch.utils.checkpoint import checkpoint as checkpoint_function

from samebits import LLM, SamplingParams
from samebits.engine.model_runner import ModelRunner
from samebits.kernels import ops
from samebits.trainer import exact_model, token_logprobs

import gpu_attention
from gpu_bits import checkpoint, joined, shapes
from isolate import note
from stage_times import decode_seconds

linear = import_module("samebits.kernels.triton.linear")


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def seconds(device: torch.device, call: Callable[[], Any], repeats: int = 5) -> float:
    """Median, after one call to warm up."""
    times = []
    for _ in range(repeats + 1):
        synchronize(device)
        begin = time.perf_counter()
        call()
        synchronize(device)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def rates(device: torch.device, tiny: bool) -> dict[str, float]:
    """Bytes a second of a large copy, read and written; floating-point operations a second of a large product."""
    size, n = (1 << 20, 128) if tiny else (1 << 32, 8192)
    source, target = torch.empty(2, size, dtype=torch.uint8, device=device)
    a, b = torch.randn(2, n, n, device=device).bfloat16()
    return {
        "copy_bytes_s": 2 * size / seconds(device, lambda: target.copy_(source)),
        "cublas_bf16_flop_s": 2 * n**3 / seconds(device, lambda: a @ b),
    }


def linears(device: torch.device, size: str, rows: tuple[int, ...]) -> list[dict[str, Any]]:
    """Each shape against cuBLAS, microseconds."""
    return [
        {"linear": part, "rows": count} | one_linear(device, part, *shape, count)
        for part, shape in shapes(size).items()
        for count in rows
    ]


def one_linear(device: torch.device, part: str, features: int, depth: int, rows: int) -> dict[str, float]:
    """Time replays of a captured graph of several calls on different weights, more than the L2 cache holds.

    Ours compute q, k and v as a layer launches them; cuBLAS has them side by side.
    """
    copies = max(1, min(16, (256 << 20) // (2 * features * depth)))
    x = torch.randn(rows, depth, device=device).bfloat16()
    weights = [torch.randn(features, depth, device=device).bfloat16() for _ in range(copies)]
    dtype = torch.float32 if part == "lm_head" else torch.bfloat16
    launched = [list(w.split(joined(part, features))) for w in weights]
    ours = graph_seconds(device, lambda: [linear.products(x, w, [None] * len(w), dtype) for w in launched]) / copies
    cublas = graph_seconds(device, lambda: [x @ w.t() for w in weights]) / copies
    return {"us": ours * 1e6, "cublas_us": cublas * 1e6, "ratio": cublas / ours}


def graph_seconds(device: torch.device, call: Callable[[], Any], replays: int = 20) -> float:
    """Median time of a recorded call, by CUDA events around `replays` replays: no launch of the host's is in it."""
    if device.type != "cuda":
        return seconds(device, call, 1)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    times = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / replays / 1e3)
    return statistics.median(times)


def both_runners(device: torch.device, path, limits: tuple[int, int, int] | None) -> dict[str, ModelRunner]:
    """Runners of the same engine, the second to be run in `by_cublas`."""
    return {kind: ModelRunner(exact_model(path, "bfloat16", device), 1, limits) for kind in ("exact", "plain")}


@contextlib.contextmanager
def by_cublas(kind: str) -> Iterator[None]:
    """Let cuBLAS compute all products meanwhile, as engines do: q, k and v in one, a gate and its up in one."""
    if kind != "plain":
        yield
        return
    merged: dict[tuple[int, ...], torch.Tensor] = {}

    def multiply(x, weights, dtype):
        key = tuple(w.data_ptr() for w in weights)
        if key not in merged:
            merged[key] = weights[0] if len(weights) == 1 else torch.cat(list(weights))
        w = merged[key].t()
        return torch.mm(x, w) if dtype == x.dtype or x.device.type == "cpu" else torch.mm(x, w, out_dtype=dtype)

    def products(x, weights, biases, dtype, tile=None):
        outs = multiply(x, weights, dtype).split([len(w) for w in weights], 1)
        return [out.to(dtype) if b is None else (out + b).to(dtype) for out, b in zip(outs, biases, strict=True)]

    def gated_products(x, weights, biases, activation, dtype, tile=None):
        return backend.gated_halves(multiply(x, weights, dtype), activation)

    backend, heads = (import_module(f"samebits.kernels.triton{name}") for name in ("", ".heads"))
    with (
        unittest.mock.patch.multiple(linear, products=products, gated_products=gated_products),
        unittest.mock.patch.object(backend, "products", products),
        unittest.mock.patch.object(heads, "aligned", lambda t: t),
    ):
        yield


def weights_of(config: Any) -> tuple[int, int]:
    """Return how many numbers a Qwen3's layers' matrices have, and with lm_head's: a runner has packed them."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    layer = config.hidden_size * (config.head_dim * 2 * (heads + kv_heads) + 3 * config.intermediate_size)
    layers = config.num_hidden_layers * layer
    return layers, layers + config.vocab_size * config.hidden_size


def timed_step(runner: ModelRunner, seqs: int, context: int, tokens: int = 1) -> float:
    """Seconds of a step of `tokens` tokens for each of `seqs` sequences after `context` tokens, sampling included."""
    block = ops.backend(runner.model.device).BLOCK
    runner.num_blocks = seqs * ((context + tokens - 1) // block + 1)
    runner.take_kv_cache()
    try:
        for tensor in itertools.chain(*runner.kv_caches):
            tensor.zero_()  # or NaN may cut sampling short
        return decode_seconds(runner, seqs, context, tokens=tokens)
    finally:
        runner.free_kv_cache()


def decode(device: torch.device, path, batches, contexts, copy_rate: float, kv_bytes: int) -> list[dict[str, Any]]:
    """A whole decode step against the same by cuBLAS, and against the bound by bandwidth: weights and KV read once."""
    limits = (max(batches), max(batches), max(contexts) + 1) if ops.backend(device).GRAPHS else None
    runners = both_runners(device, path, limits)
    model = runners["exact"].model
    config, size = model.config, 2 * weights_of(model.config)[1]
    token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * model.dtype.itemsize
    found = []
    for context, batch in itertools.product(contexts, batches):
        if batch * (context + 64) * token > kv_bytes:
            continue
        note(f"batch {batch}, context {context}")
        row: dict[str, Any] = {"batch": batch, "context": context}
        for kind, runner in runners.items():
            with by_cublas(kind):
                row[f"{kind}_ms"] = timed_step(runner, batch, context) * 1e3
        row["bound_ms"] = (size + batch * context * token) / copy_rate * 1e3
        row["of_plain"] = row["plain_ms"] / row["exact_ms"]
        row["of_bound"] = row["bound_ms"] / row["exact_ms"]
        found.append(row)
    return found


def prefill(device: torch.device, path, tokens: tuple[int, ...], matrix_rate: float) -> list[dict[str, Any]]:
    """A step that computes a whole prompt, against the same by cuBLAS; its share of the measured matrix rate.

    Up to 4,096 tokens are in graphs. Counted are products with weights (lm_head has one row) and attention's two
    products, half of them masked.
    """
    limits = (1, max(tokens), max(tokens)) if ops.backend(device).GRAPHS else None
    runners = both_runners(device, path, limits)
    model = runners["exact"].model
    config = model.config
    weights, _ = weights_of(config)
    found = []
    for count in tokens:
        note(f"prompt of {count} tokens")
        row: dict[str, Any] = {"tokens": count}
        for kind, runner in runners.items():
            with by_cublas(kind):
                row[f"{kind}_ms"] = timed_step(runner, 1, 0, count) * 1e3
        attention = 2 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * count**2
        row["of_plain"] = row["plain_ms"] / row["exact_ms"]
        row["of_matrix_rate"] = (2 * weights * count + attention) / matrix_rate / (row["exact_ms"] / 1e3)
        found.append(row)
    return found


def shared_prompt(device: torch.device, path, samples: int, prompt: int, output: int) -> dict[str, Any]:
    """Decoding of a group on one prompt, against as many sequences on prompts of their own, as long."""
    rng = random.Random(0)
    llm = LLM(path, dtype="bfloat16", device=str(device), max_num_seqs=samples, max_model_len=prompt + output + 64,
              skip_tokenizer_init=True, kv_cache_memory_bytes=2**24 if prompt < 100 else None)  # fmt: skip
    vocab = llm.model_config.vocab_size
    prompts = [[rng.randrange(vocab) for _ in range(prompt)] for _ in range(samples)]
    rates = {}
    for kind, given, n in (("shared", prompts[:1], samples), ("apart", prompts, 1)):
        times = []
        for tokens in (2, 2, 2, output) * 2:  # the first half compiles and records: prompts at their third use
            llm.reset_prefix_cache()
            params = SamplingParams(n=n, max_tokens=tokens, ignore_eos=True, seed=0)
            begin = time.perf_counter()
            llm.generate(given, params, use_tqdm=False)
            times.append(time.perf_counter() - begin)
        rates[kind] = samples * (output - 2) / (times[-1] - statistics.median(times[4:7]))
    llm.close()
    return {
        "samples": samples, "prompt": prompt, "shared_decode_tok_s": rates["shared"],
        "apart_decode_tok_s": rates["apart"], "gain": rates["shared"] / rates["apart"],
    }  # fmt: skip


def profile(device: torch.device, path, steps: Iterable[tuple[int, int, int]]) -> list[dict[str, Any]]:
    """The kernels of steps without a graph, by the GPU's time: where a step's time goes.

    steps: sequences, context, tokens of each.
    """
    runner, found = ModelRunner(exact_model(path, "bfloat16", device), 1, None), []
    for seqs, context, tokens in steps:
        note(f"{seqs} sequences, context {context}, {tokens} tokens")
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            step = timed_step(runner, seqs, context, tokens)
        kernels = sorted(seen.key_averages(), key=lambda each: -each.self_device_time_total)
        total = sum(each.self_device_time_total for each in kernels)
        found += [
            {"step": f"{seqs} x {tokens} after {context}", "step_ms": step * 1e3, "kernel": each.key[:60],
             "calls": each.count, "us_a_call": each.self_device_time_total / each.count,
             "share": each.self_device_time_total / total}
            for each in kernels[:15]
        ]  # fmt: skip
    return found


def training(device: torch.device, path, count: int, length: int) -> dict[str, Any]:
    """Forward, and forward + backward, of packed sequences: log-probs of each token; HF does the same in a batch."""
    from transformers import AutoModelForCausalLM

    rng = random.Random(0)
    sequences = [[rng.randrange(256) for _ in range(length)] for _ in range(count)]
    model: Any = exact_model(path, "bfloat16", device)
    times = [seconds(device, functools.partial(exact_step, model, sequences, b), 3) for b in (False, True)]
    model = None
    free(device)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, attn_implementation="sdpa").to(device)
    ids = torch.tensor(sequences, device=device)
    theirs = [seconds(device, functools.partial(hf_step, model, ids, b), 3) for b in (False, True)]
    model = None
    free(device)
    return {
        "sequences": count, "tokens": length, "forward_s": times[0], "step_s": times[1], "hf_forward_s": theirs[0],
        "hf_step_s": theirs[1], "forward_over_hf": times[0] / theirs[0], "step_over_hf": times[1] / theirs[1],
    }  # fmt: skip


def exact_step(model, sequences: list[list[int]], backward: bool) -> None:
    with torch.set_grad_enabled(backward):
        logprobs = torch.cat(token_logprobs(model, sequences))
    if backward:
        logprobs.mean().backward()
        model.zero_grad()


def hf_step(hf, ids: torch.Tensor, backward: bool) -> None:
    """Log-probs of a batch [B, T], with the logits of one sequence at a time in memory."""

    def score(hidden, targets):
        return hf.lm_head(hidden).float().log_softmax(-1).gather(-1, targets[..., None]).mean()

    with torch.set_grad_enabled(backward):
        hidden = hf.model(input_ids=ids).last_hidden_state[:, :-1]
        pairs = zip(hidden.split(1), ids[:, 1:].split(1), strict=True)
        total = sum(checkpoint_function(score, *pair, use_reentrant=False) for pair in pairs)
    if backward:
        total.backward()
        hf.zero_grad()


def community(tiny: bool) -> tuple[list[list[int]], list[int]]:
    """nano-vLLM's benchmark: 256 sequences, prompts and outputs of U[100, 1024] tokens, seed 0."""
    random.seed(0)
    count, most, vocab = (4, 110, 200) if tiny else (256, 1024, 10_000)
    prompts = [[random.randint(0, vocab) for _ in range(random.randint(100, most))] for _ in range(count)]
    return prompts, [random.randint(100, most) // (10 if tiny else 1) for _ in range(count)]


def workload(device: torch.device, path, tiny: bool, exact: bool = True) -> dict[str, Any]:
    prompts, lengths = community(tiny)
    llm = LLM(path, dtype="bfloat16", device=str(device), max_num_seqs=256, max_model_len=2048, exact=exact,
              kv_cache_memory_bytes=2**24 if tiny else None, skip_tokenizer_init=True)  # fmt: skip
    params = [SamplingParams(max_tokens=n, temperature=0.6, ignore_eos=True, seed=0) for n in lengths]
    short = [SamplingParams(max_tokens=1 + i // 4, ignore_eos=True) for i in range(len(prompts))]
    llm.generate(prompts, short, use_tqdm=False)  # compiles, and records the graphs: ever fewer sequences run
    llm.reset_prefix_cache()
    begin = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    took = time.perf_counter() - begin
    report: dict[str, Any] = {
        "input_tokens": sum(map(len, prompts)), "output_tokens": sum(lengths), "seconds": took,
        "output_tok_s": sum(lengths) / took, "kv_cache_bytes": llm.stats().kv_cache_bytes,
    }  # fmt: skip
    report["sleep_freed_bytes"] = llm.sleep(2)
    llm.close()
    del llm
    free(device)
    return report


def hf_continuous(device: torch.device, path, requests: int, length: int) -> dict[str, Any]:
    """HF's continuous batching and samebits on the first of the workload's prompts, one output length for all.

    HF's time runs from its first request to its last token. Its SDPA needs no flash-attn; without cuDNN, which plans
    each new shape anew. Not under inference_mode: HF's thread isn't, and may not write to tensors that were made so.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    prompts = community(False)[0][:requests]
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, attn_implementation="paged|sdpa")
    model.to(device).eval()
    blocks = sum((len(p) + length) // 256 + 2 for p in prompts)
    batching = ContinuousBatchingConfig(num_blocks=blocks, max_batch_tokens=4096)
    outputs: list[Any] = []
    for most in (8, length):  # the first warms up
        note(f"HF, {requests} requests, {most} tokens")
        config = GenerationConfig(max_new_tokens=most, do_sample=True, eos_token_id=-1, pad_token_id=2)
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            outputs = list(model.generate_batch(prompts, config, batching).values())
        made = [len(o.generated_tokens) for o in outputs]
        if made != [most] * requests:
            errors = {o.error for o in outputs if o.error} or "no error given"
            raise RuntimeError(f"HF made {sum(made)} tokens in {len(made)} requests of {requests} x {most}: {errors}")
    took = max(o.lifespan[1] for o in outputs) - min(o.created_time for o in outputs)
    del model
    free(device)
    ours = our_rate(device, path, prompts, length)
    rate = requests * length / took
    return {"requests": requests, "hf_output_tok_s": rate, "output_tok_s": ours, "over_hf": ours / rate}


def our_rate(device: torch.device, path, prompts: list[list[int]], length: int) -> float:
    """Output tokens a second, each prompt's output of one length; compiled and recorded before."""
    llm = LLM(
        path, dtype="bfloat16", device=str(device), max_num_seqs=256, max_model_len=2048, skip_tokenizer_init=True
    )
    params = SamplingParams(max_tokens=length, ignore_eos=True, seed=0)
    llm.generate(prompts, params, use_tqdm=False)
    llm.reset_prefix_cache()
    begin = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    took = time.perf_counter() - begin
    llm.close()
    return len(prompts) * length / took


def vllm(device: torch.device, path, requests: int, length: int) -> dict[str, Any]:
    """vLLM on the same requests, where its Python is named by VLLM_PYTHON or this one has it."""
    python = os.environ.get("VLLM_PYTHON") or (sys.executable if importlib.util.find_spec("vllm") else None)
    if python is None:
        return {"skipped": "no vLLM here, and VLLM_PYTHON names no Python that has it"}
    prompts = community(False)[0][:requests]
    job = {"model": str(path), "dtype": "bfloat16", "prompts": prompts, "output_lens": [length] * requests, "n": 1}
    file = path.with_name("vllm_job.json")
    file.write_text(json.dumps(job))
    script = pathlib.Path(__file__).with_name("run_vllm.py")
    done = subprocess.run([python, script, file], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"vLLM failed: {done.stderr[-1500:]}")
    rate = json.loads([line for line in done.stdout.splitlines() if line.startswith("{")][-1])["output_tok_s"][0]
    ours = our_rate(device, path, prompts, length)
    return {"requests": requests, "vllm_output_tok_s": rate, "output_tok_s": ours, "over_vllm": ours / rate}


def large_batch(device: torch.device, path, count: int, prompt: int, output: int) -> dict[str, Any]:
    """Output tokens a second of `count` requests at once."""
    rng = random.Random(0)
    llm = LLM(path, dtype="bfloat16", device=str(device), max_num_seqs=count, max_model_len=2 * (prompt + output),
              max_num_batched_tokens=8192, skip_tokenizer_init=True,
              kv_cache_memory_bytes=None if count > 4 else 2**24)  # fmt: skip
    vocab = llm.model_config.vocab_size
    prompts = [[rng.randrange(vocab) for _ in range(prompt)] for _ in range(count)]
    times = []
    for tokens in (2, output, 2, output):
        llm.reset_prefix_cache()
        begin = time.perf_counter()
        llm.generate(prompts, SamplingParams(max_tokens=tokens, ignore_eos=True, seed=0), use_tqdm=False)
        times.append(time.perf_counter() - begin)
    llm.close()
    del llm
    free(device)
    whole, start = min(times[1::2]), min(times[::2])
    return {
        "requests": count, "prompt": prompt, "output": output, "output_tok_s": count * output / whole,
        "decode_tok_s": count * (output - 2) / (whole - start),
    }  # fmt: skip


def parts(device: torch.device, folder: str, tiny: bool) -> list[tuple[str, Callable[[dict], Any]]]:
    """(name, measurement), each given what was measured before it."""
    sizes = ("tiny", "tiny") if tiny else ("0.6B", "1.7B")
    small, large = (functools.partial(checkpoint, size, folder, device) for size in sizes)
    batches, contexts = ((1, 3), (64,)) if tiny else ((1, 8, 32, 128, 256), (1024, 8192))
    packed, many, group = ((2, 20), (3, 8, 6), (2, 70, 6)) if tiny else ((8, 1024), (512, 128, 256), (8, 4096, 64))
    rows = (1, 8, 16, 32, 64, 128, 256, 1024, 4096)

    def rate(known: dict, kind: str) -> float:
        return (known.get("rates") or rates(device, tiny))[kind]

    return [
        ("rates", lambda _: rates(device, tiny)),
        ("decode", lambda known: decode(device, large(), batches, contexts, rate(known, "copy_bytes_s"), 60 << 30)),
        ("prefill", lambda known: prefill(
            device, large(), (70,) if tiny else (512, 1024, 2048, 4096, 8192), rate(known, "cublas_bf16_flop_s"))),
        ("large batch", lambda _: large_batch(device, large(), *many)),
        ("training", lambda _: training(device, large(), *packed)),
        ("attention layer", lambda _: gpu_attention.times(device, tiny, (seconds, graph_seconds))),
        ("shared prompt", lambda _: shared_prompt(device, large(), *group)),
        ("experts layer", lambda known: gpu_experts.times(
            device, tiny, rate(known, "copy_bytes_s"), (seconds, graph_seconds))),
        ("linears", lambda _: linears(device, "1.7B", rows)),
        ("profile", lambda _: profile(device, large(), ((32, 1024, 1), (256, 1024, 1), (1, 0, 8192)))),
        ("hf continuous batching", lambda _: hf_continuous(device, small(), 64, 128)),
        ("workload", lambda _: workload(device, small(), tiny)),
        ("vllm", lambda _: vllm(device, small(), 64, 128)),
    ]  # fmt: skip
