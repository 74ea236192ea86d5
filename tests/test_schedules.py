"""The promise: no schedule changes a bit. Random schedules against the oracle, with a negative control."""

import dataclasses
import random

import pytest
import torch

from samebits import LLM, SamplingParams
from samebits.engine.core import EngineCore
from samebits.engine.model_runner import ModelRunner
from samebits.kernels import ops
from samebits.trainer import exact_model, token_logprobs

from models import CONFIGS
from oracle import oracle

CASES = [3, pytest.param(24, marks=pytest.mark.slow)]  # and more, if these preempt no sequence or share no prefix
FILTERS = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.3, "top_k": 20},
    {"top_p": 0.8},
    {"min_p": 0.05},
    {"temperature": 0.0},
]


def random_requests(rng: random.Random, vocab: int, count: int, longest: int):
    """Prompts that share prefixes or are equal, with parameters of their own."""
    shared = [rng.randrange(vocab) for _ in range(rng.randint(1, longest))]
    requests = []
    for _ in range(count):
        kind = rng.random()
        tail = [rng.randrange(vocab) for _ in range(rng.randint(1, longest))]
        prompt = tail if kind < 0.4 else shared + tail if kind < 0.8 else shared
        params = SamplingParams(
            n=rng.choice((1, 1, 2, 3)),
            max_tokens=rng.randint(1, 40),
            min_tokens=rng.choice((0, 0, 1)),
            seed=rng.randrange(2**64),
            stop_token_ids=[rng.randrange(vocab) for _ in range(rng.choice((0, 3)))],
            logprobs=rng.choice((None, None, 2)),
            prompt_logprobs=rng.random() < 0.2,
            raw_logprobs=rng.random() < 0.2,
            **rng.choice(FILTERS),
        )
        requests.append((prompt, params))
    return requests


def tight_pool(model, requests, blocks: int) -> int:
    """Bytes of a pool that holds the largest request and little more, so that sequences are preempted."""
    most = max(len(p) + s.max_tokens for p, s in requests)
    return ModelRunner.block_bytes(model) * (-(-most // ops.backend(model.device).BLOCK) + blocks)


def two_versions(checkpoint, family, dtype, **overrides):
    """A checkpoint, and the models of its weights and of others."""
    paths = [checkpoint(family, seed=seed, **overrides) for seed in (0, 1)]
    return paths[0], [exact_model(path, dtype) for path in paths]


def run_schedule(path, dtype, rng: random.Random, requests, models, **settings):
    """Submits requests at random steps of a random engine; returns results in order, and the engine.

    Among them, requests that are aborted later, and updates with each of `models` in turn; the engine has the first.
    """
    threads = torch.get_num_threads()
    split = settings.get("stage_layers", (1,) * settings.get("pipeline_parallel_size", 1))
    if "pipeline_parallel_size" not in settings:
        settings["async_scheduling"] = rng.random() < 0.6
    llm = LLM(
        path,
        dtype=dtype,
        max_num_seqs=rng.choice((1, 2, 5, 64)),
        max_num_batched_tokens=rng.choice((3, 7, 33, 100, 2048)),
        kv_cache_memory_bytes=tight_pool(models[0], requests, rng.choice((0, 1, 4, 200))) * max(split) // sum(split),
        enable_prefix_caching=rng.random() < 0.8,
        **settings,
    )
    here = isinstance(llm.engine, EngineCore)  # or in a worker behind a router, whose steps may do nothing but wait
    results, ids, queue, doomed, moves = {}, [], list(requests), None, True
    while queue or llm.has_unfinished_requests():
        while queue and ((moves and rng.random() < 0.5) or not llm.has_unfinished_requests()):
            ids.append(llm.add_request(*queue.pop(0)))
        if moves and queue and rng.random() < 0.2:
            doomed = llm.add_request(requests[0][0], SamplingParams(n=2, max_tokens=requests[0][1].max_tokens))
        if doomed and rng.random() < 0.3:
            llm.abort(doomed)
        never = not (here or queue or llm.weight_version)  # by chance, as a router's draws follow the clock
        if moves and (rng.random() < 0.03 or never):
            llm.update_weights(models[(llm.weight_version + 1) % len(models)])
        torch.set_num_threads(rng.choice((1, 2)))
        outputs = llm.step()
        moves = here or bool(outputs)
        for out in outputs:
            if out.finished:
                results[out.request_id] = out
        if here:
            llm.engine.scheduler.check()
    torch.set_num_threads(threads)
    llm.close()
    assert not here or llm.stats().kv_blocks_used == 0
    return [results[i] for i in ids], llm


def check_results(models, requests, results) -> int:
    """Against the oracle, as bits, each token under the weights of its version. Returns how many samples have two."""
    mixed = 0
    for (prompt, params), out in zip(requests, results, strict=True):
        spans = [c.weight_versions for c in out.completions]
        mixed += sum(len(s) > 1 for s in spans)

        def model_of(sample, number, spans=spans):
            span = next((s for s in spans[sample] if number < s.end), spans[sample][-1])
            return models[span.version % len(models)]

        expected = oracle(model_of, prompt, params, eos=(2,))
        assert [(c.token_ids, c.logprobs) for c in out.completions] == expected
        for c in out.completions:
            for token, logprob, top in zip(c.token_ids, c.logprobs, c.top_logprobs or [], strict=bool(params.logprobs)):
                assert top.get(token, logprob) == logprob
        if params.prompt_logprobs and len(prompt) > 1:
            plain = dataclasses.replace(params, min_tokens=0)
            known = models[: min(s[0].version for s in spans) + 1]  # when the first token came
            assert out.prompt_logprobs in [token_logprobs(m, [prompt], plain)[0].tolist() for m in known]
        if params.raw_logprobs:
            for c in out.completions:
                raw = [token_logprobs(m, [prompt + c.token_ids])[0][len(prompt) :].tolist() for m in models]
                for span in c.weight_versions:
                    part = slice(span.start, span.end)
                    assert c.raw_logprobs[part] == raw[span.version % len(models)][part]
    return mixed


def check_schedules(path, dtype, models, name, cases, first=0, settings=lambda rng: {}) -> None:
    """So many random schedules, and more until there were preemptions, prefix hits and samples of two versions.

    Where processes are at work, their speed has a say in it. settings: of the engine, drawn anew for each.
    """
    preemptions = hits = mixed = 0
    for case in range(first, first + 24):
        if case >= first + cases and preemptions and hits and mixed:
            break
        rng = random.Random(f"{name}-{case}")
        requests = random_requests(rng, 1001, 8, 45)
        results, llm = run_schedule(path, dtype, rng, requests, models, **settings(rng))
        mixed += check_results(models, requests, results)
        preemptions += llm.stats().preemptions
        hits += llm.stats().prefix_hit_tokens
    assert preemptions and hits and mixed, "the schedules exercised nothing"


@pytest.mark.parametrize("cases", CASES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("family", CONFIGS)
def test_no_schedule_changes_a_bit(checkpoint, family, dtype, cases):
    path, models = two_versions(checkpoint, family, dtype)
    check_schedules(path, dtype, models, f"{family}-{dtype}", cases)


@pytest.mark.parametrize("cases", CASES)
@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("family", CONFIGS)
def test_no_pipeline_changes_a_bit(checkpoint, family, stages, cases):
    """Stages of one process, several batches under way: the schedules of a pipeline without its processes."""
    dtype = {2: "bfloat16", 3: "float32"}[stages]
    path, models = two_versions(checkpoint, family, dtype, num_hidden_layers=stages)

    def settings(rng):
        return {"pipeline_parallel_size": stages, "backend": "inproc", "batches_in_flight": rng.randint(1, 4)}

    check_schedules(path, dtype, models, f"{family}-{stages}", cases, settings=settings)


def test_negative_control_tokens_of_another_version_are_noticed(checkpoint):
    path, models = two_versions(checkpoint, "qwen3", "float32")
    rng = random.Random(0)
    requests = [([5, 7, 9], SamplingParams(max_tokens=20, seed=1, ignore_eos=True))] * 6
    results, _ = run_schedule(path, "float32", rng, requests, models)
    check_results(models, requests, results)
    for wrong in (models[::-1], models[:1], models[1:]):
        with pytest.raises(AssertionError):
            check_results(wrong, requests, results)


PROCESSES = [  # layouts of processes, and the seed of a schedule that mostly exercises all
    ({"replicas": 2}, "float32", 1),
    ({"pipeline_parallel_size": 2, "stage_layers": (1, 2), "batches_in_flight": 3}, "bfloat16", 2),
    ({"pipeline_parallel_size": 3, "stage_layers": (1, 1, 1), "batches_in_flight": 3}, "float16", 2),
]


@pytest.mark.parametrize("cases", [1, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("backend", ["mp", "ray"])
def test_no_process_changes_a_bit(checkpoint, backend, cases, ray_cluster):
    """1, 2 and 3 stages."""
    for layout, dtype, first in PROCESSES if backend == "ray" else PROCESSES[1:]:  # replicas are Ray's
        path, models = two_versions(checkpoint, "qwen3", dtype, num_hidden_layers=3)
        name = f"processes-{layout.get('pipeline_parallel_size', 1)}"
        check_schedules(
            path, dtype, models, name, cases, first, lambda rng, layout=layout: {"backend": backend, **layout}
        )


def test_smollm2_no_schedule_changes_a_bit(smollm2):
    model = exact_model(smollm2)
    rng = random.Random(1)
    requests = random_requests(rng, 49152, 5, 70)
    results, _ = run_schedule(smollm2, "float32", rng, requests, [model])
    for (prompt, params), out in zip(requests, results, strict=True):
        sequences = [prompt + c.token_ids for c in out.completions]
        logprobs = token_logprobs(model, sequences, params, prompt_lens=[len(prompt)] * params.n)
        for c, expected in zip(out.completions, logprobs, strict=True):
            assert torch.equal(torch.tensor(c.logprobs), expected[len(prompt) :].detach())
    first = results[0]
    prompt, params = requests[0]
    assert [(c.token_ids, c.logprobs) for c in first.completions] == oracle(model, prompt, params, eos=(2,))


@pytest.mark.parametrize("pipeline", [{}, {"pipeline_parallel_size": 2, "backend": "inproc"}], ids=str)
@pytest.mark.parametrize("attention", ["samebits", "sdpa"])
def test_negative_control_without_exact_ops_bits_differ(checkpoint, attention, pipeline):
    """With torch's linears and norms alone, and with its attention in the trainer too; in one stage and in two."""
    path = checkpoint("llama", hidden_size=320, intermediate_size=768, num_attention_heads=16)
    model = exact_model(path, exact=False)
    model.set_attn_implementation(attention)
    rng = random.Random(0)
    prompts = [[rng.randrange(1001) for _ in range(rng.randint(20, 60))] for _ in range(6)]
    llm = LLM(path, exact=False, max_num_batched_tokens=37, **pipeline)
    outputs = llm.generate(prompts, SamplingParams(max_tokens=30, ignore_eos=True), use_tqdm=False)
    sequences = [o.prompt_token_ids + o.completions[0].token_ids for o in outputs]
    with torch.no_grad():
        logprobs = token_logprobs(model, sequences)
    differ = [
        not torch.equal(torch.tensor(o.completions[0].logprobs), lp[len(o.prompt_token_ids) :])
        for o, lp in zip(outputs, logprobs, strict=True)
    ]
    assert any(differ), "torch's own ops agreed as bits: this test proves nothing here"
