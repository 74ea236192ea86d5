"""Random schedules of an engine, and the proof that they changed no bit."""

import dataclasses
import random

import numpy as np
import torch

from samebits import LLM, SamplingParams
from samebits.engine.core import EngineCore
from samebits.engine.model_runner import ModelRunner
from samebits.kernels import ops
from samebits.trainer import exact_model, token_logprobs

from helpers.invariants import check_scheduler
from helpers.oracle import oracle

FILTERS = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.3, "top_k": 20},
    {"top_p": 0.8},
    {"min_p": 0.05},
    {"temperature": 0.0},
]


def two_versions(checkpoint, family, dtype, **overrides):
    """A checkpoint, and the models of its weights and of others."""
    paths = [checkpoint(family, seed=seed, **overrides) for seed in (0, 1)]
    return paths[0], [exact_model(path, dtype) for path in paths]


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
            check_scheduler(llm.engine.scheduler)
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
        ends = {*params.stop_token_ids} | (set() if params.ignore_eos else {2})
        for c in out.completions:
            assert c.finish_reason == ("stop" if c.token_ids[-1] in ends else "length")
            for token, logprob, top in zip(c.token_ids, c.logprobs, c.top_logprobs or [], strict=bool(params.logprobs)):
                assert logprob == top[token] if token in top else logprob <= min(top.values())
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


@torch.no_grad()
def check_against_trainer(model, requests, results) -> None:
    """Compare log-probs, as bits, with those of the trainer's packed forward."""
    for (prompt, params), out in zip(requests, results, strict=True):
        sequences = [prompt + c.token_ids for c in out.completions]
        logprobs = token_logprobs(model, sequences, params, prompt_lens=[len(prompt)] * params.n)
        for c, expected in zip(out.completions, logprobs, strict=True):
            assert torch.equal(torch.tensor(c.logprobs), expected[len(prompt) :])


def trainers_experts(model, sequence):
    """[tokens - 1, layers, k], from the trainer's own routers."""
    with torch.no_grad():
        _, (experts,) = token_logprobs(model, [sequence], return_routed_experts=True)
    return experts[:-1].numpy()


def assert_trainers_experts(model, output, start=0) -> None:
    """All samples have finished with the trainer's experts."""
    for c in output.completions:
        expected = trainers_experts(model, output.prompt_token_ids + c.token_ids)[start:]
        assert c.routed_experts.dtype == np.uint8
        assert np.array_equal(c.routed_experts, expected)
