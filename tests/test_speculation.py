"""The promise: no draft changes a bit. Drafters of all kinds under random schedules, with a negative control."""

import collections
import dataclasses
import functools
import itertools
import random

import pytest

from samebits import LLM, SamplingParams
from samebits.engine.core import EngineCore
from samebits.engine.sampling_params import RequestOutputKind
from samebits.trainer import exact_model

from helpers import faults
from helpers.adapters import adapted_model, lora
from helpers.drafters import DRAFTERS, VOCAB, Prophet, speculative_config
from helpers.oracle import oracle
from helpers.schedules import check_results, random_requests, run_schedule, tight_pool, two_versions
from helpers.serving import served_checkpoint

CASES = [1, pytest.param(12, marks=pytest.mark.slow)]
OFTEN = {("right, then wrong", "float32", 2), *((drafter, "float32", 1) for drafter in DRAFTERS)}  # by `make test`


pytestmark = pytest.mark.usefixtures("rows_cost_nothing")


def with_banned_tokens(rng, prompt, params):
    """The request, now and then with `min_tokens` in the midst of its answer: EOS may be drafted there, never drawn."""
    return prompt, dataclasses.replace(params, min_tokens=min(rng.choice((0, 1, 10)), params.max_tokens))


@pytest.mark.parametrize("cases", CASES)
@pytest.mark.parametrize(
    ("drafter", "dtype", "stages"),
    [
        pytest.param(drafter, dtype, stages, marks=[] if (drafter, dtype, stages) in OFTEN else pytest.mark.slow)
        for dtype, stages in (("float32", 1), ("float32", 2), ("bfloat16", 2), ("float16", 1))
        for drafter in DRAFTERS
    ],
)
def test_no_draft_changes_a_bit(checkpoint, drafter, dtype, stages, cases):
    """In so many schedules, and more until there were preemptions, prefix hits and samples of two versions."""
    path, models = two_versions(checkpoint, "qwen3", dtype, vocab_size=VOCAB)
    drafted = accepted = preemptions = hits = mixed = 0
    for case in range(24):
        if case >= cases and preemptions and hits and mixed:
            break
        rng = random.Random(f"{drafter}-{dtype}-{stages}-{case}")
        requests = [with_banned_tokens(rng, *request) for request in random_requests(rng, VOCAB, 5, 30)]
        settings = {"speculative_config": speculative_config(drafter, path, models, requests, rng)}
        if stages > 1:
            settings |= {"pipeline_parallel_size": 2, "backend": "inproc", "batches_in_flight": rng.randint(1, 3)}
        results, llm = run_schedule(path, dtype, rng, requests, models, **settings)
        mixed += check_results(models, requests, results)
        drafted += llm.stats().draft_tokens
        accepted += llm.stats().accepted_tokens
        preemptions += llm.stats().preemptions
        hits += llm.stats().prefix_hit_tokens
    assert drafted and preemptions and hits and mixed, "the schedules exercised nothing"
    assert accepted or not drafter.startswith("right")


@pytest.mark.parametrize("kind", ["adapter", pytest.param("experts", marks=pytest.mark.slow)])
@pytest.mark.parametrize("drafter", ["suffix", pytest.param("noise", marks=pytest.mark.slow)])
def test_no_draft_changes_a_bit_of_an_adapter_or_of_experts(checkpoint, drafter, kind):
    if kind == "adapter":
        path = checkpoint("qwen2", vocab_size=VOCAB)
        settings = {"adapter": lora()}
        models = [exact_model(path, adapter=lora()), adapted_model(path, seed=1)]
    else:
        path, models = two_versions(checkpoint, "qwen3_moe", "float32", vocab_size=VOCAB)
        settings = {}
    rng = random.Random(f"{kind}-{drafter}")
    requests = random_requests(rng, VOCAB, 5, 30)
    config = speculative_config(drafter, path, models, requests, rng)
    results, llm = run_schedule(path, "float32", rng, requests, models, speculative_config=config, **settings)
    check_results(models, requests, results)
    assert llm.stats().draft_tokens


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["suffix", "callable"])
@pytest.mark.parametrize("stages", [1, 2])
def test_no_draft_of_replicas_changes_a_bit(checkpoint, stages, drafter, ray_cluster):
    path, models = two_versions(checkpoint, "qwen3", "float32", vocab_size=VOCAB)
    rng = random.Random(f"{drafter}-{stages}")
    requests = random_requests(rng, VOCAB, 8, 30)
    layout = {"replicas": 2} | ({"pipeline_parallel_size": 2} if stages == 2 else {})
    config = {"method": "suffix", "prompt_lookup_min": 1} if drafter == "suffix" else {"method": lambda ids: ids[-2:]}
    results, _ = run_schedule(path, "float32", rng, requests, models, speculative_config=config, **layout)
    check_results(models, requests, results)
    with LLM(path, speculative_config=config, **layout) as llm:  # its counters, while its processes live
        params = SamplingParams(n=4, max_tokens=60, seed=1, ignore_eos=True)
        expected = completions(LLM(path), [([5, 7, 9], params)])
        for _ in range(2):
            assert completions(llm, [([5, 7, 9], params)]) == expected
        assert llm.stats().accepted_tokens > 0


def completions(llm, requests):
    """What the engine returns, without the requests' names."""
    prompts, params = zip(*requests, strict=True)
    return [out.completions for out in llm.generate(list(prompts), list(params), use_tqdm=False)]


def test_right_drafts_save_steps(checkpoint):
    path, (model, _) = two_versions(checkpoint, "qwen3", "float32", vocab_size=VOCAB)
    params = SamplingParams(n=3, max_tokens=60, seed=1, ignore_eos=True)
    requests = [([5, 7, 9], params), ([5, 7, 9, 11], dataclasses.replace(params, seed=4))]
    plain = LLM(path)
    expected = completions(plain, requests)
    llm = LLM(path, speculative_config={"method": Prophet(path, [model], requests), "num_speculative_tokens": 8})
    for _ in range(2):
        assert completions(llm, requests) == expected
    stats = llm.stats()
    assert stats.steps < 2 * plain.stats().steps / 4
    assert stats.accepted_tokens <= stats.draft_tokens


def test_a_drafted_token_that_ends_an_answer_counts_as_accepted(checkpoint):
    path = checkpoint("qwen3")
    free = SamplingParams(max_tokens=40, seed=3, ignore_eos=True)
    ids = LLM(path).generate([[5, 7, 9]], free, use_tqdm=False)[0].completions[0].token_ids
    end = next(n for n in range(10, 40) if ids[n] not in ids[:n])
    llm = LLM(path, speculative_config={"method": lambda tokens: ids[len(tokens) - 3 : end + 1]})
    params = dataclasses.replace(free, stop_token_ids=[ids[end]])
    found = llm.generate([[5, 7, 9]], params, use_tqdm=False)[0].completions[0]
    assert (found.token_ids, found.finish_reason) == (ids[: end + 1], "stop")
    stats = llm.stats()
    assert 0 < stats.accepted_tokens == stats.draft_tokens


def test_repeated_rollouts_of_equal_seeds_are_drafted_from_the_first(checkpoint):
    """Common random numbers: what was drawn before is drawn again."""
    llm = LLM(checkpoint("qwen3"), speculative_config={"method": "suffix"})
    params = SamplingParams(n=2, max_tokens=80, seed=3, ignore_eos=True)
    first = completions(llm, [([5, 7, 9], params)])
    steps = llm.stats().steps
    assert completions(llm, [([5, 7, 9], params)]) == first
    assert llm.stats().steps - steps < 80 / 4


def test_rollouts_are_drafted_from_those_of_the_same_settings(checkpoint):
    """Two validations with the same seeds, one greedy and one not, take nothing from each other."""
    llm = LLM(checkpoint("qwen3"), speculative_config={"method": "suffix"})
    settings = [
        SamplingParams(max_tokens=80, seed=3, ignore_eos=True, temperature=temperature, top_k=top_k)
        for temperature, top_k in ((1.0, 0), (0.0, 0), (0.7, 0), (1.0, 3))
    ]
    first = [completions(llm, [([5, 7, 9], params)]) for params in settings]
    assert len({tuple(found[0][0].token_ids) for found in first}) == len(settings), "texts that differ"
    for params, expected in zip(settings, first, strict=True):
        steps = llm.stats().steps
        assert completions(llm, [([5, 7, 9], params)]) == expected
        assert llm.stats().steps - steps < 80 / 4


def test_an_update_that_keeps_old_kv_gives_the_bits_without_drafts(checkpoint):
    path, models = two_versions(checkpoint, "qwen3", "float32", vocab_size=VOCAB)
    prompt, params = [5, 7, 9], SamplingParams(max_tokens=60, seed=3, ignore_eos=True)

    def run(llm, tokens):
        """An update once so many tokens are known. Returns how many were, and the completion."""
        llm.add_request(prompt, params)
        known = 0
        while known < tokens:
            known = sum(len(c.token_ids) for out in llm.step() for c in out.completions)
        llm.update_weights(models[1], recompute_running=False)
        while llm.has_unfinished_requests():
            (last,) = llm.step()
        return known, last.completions[0]

    drafts = {"method": Prophet(path, models, [(prompt, params)], wrong_after=2), "num_speculative_tokens": 3}
    drafting = LLM(path, async_scheduling=False, speculative_config=drafts)
    known, found = run(drafting, 20)
    assert drafting.stats().accepted_tokens > 0
    assert run(LLM(path, async_scheduling=False), known) == (known, found)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("float16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("drafter", [d if d != "noise" else pytest.param(d, marks=pytest.mark.slow) for d in DRAFTERS])
def test_streams_stop_strings_and_all_that_an_answer_says_are_the_same_with_drafts(
    tmp_path, checkpoint, drafter, dtype
):
    """In random schedules, until there were preemptions, accepted drafts, stop strings and scores of prompts; each
    request beside the oracle, and beside an engine without drafts that computes nothing else.
    """
    path = served_checkpoint(checkpoint("qwen3"), tmp_path / "model")
    model, alone = exact_model(path, dtype), LLM(path, dtype=dtype)
    preemptions = drafted = accepted = stopped = scored = 0
    for case in range(12):
        if preemptions and accepted and stopped and scored:
            break
        rng = random.Random(f"{drafter}-{dtype}-{case}")
        requests = [with_stop_string(rng, alone, *request) for request in random_requests(rng, 1000, 4, 40)]
        expected = [outputs(alone, [request])[0] for request in requests]
        stopped += sum(isinstance(c.stop_reason, str) for out in expected for c in out.completions)
        scored += sum(out.prompt_logprobs is not None for out in expected)
        check_by_oracle(model, requests, expected)
        endless = [(prompt, dataclasses.replace(params, stop=())) for prompt, params in requests]  # right drafts, too
        llm = LLM(
            path,
            dtype=dtype,
            max_num_seqs=rng.choice((2, 5, 64)),
            max_num_batched_tokens=rng.choice((7, 33, 2048)),
            kv_cache_memory_bytes=tight_pool(model, requests, rng.choice((0, 1, 4))),
            async_scheduling=rng.random() < 0.6,
            speculative_config=speculative_config(drafter, path, [model], endless, rng),
        )
        for _ in range(2):  # the second time, earlier answers are drafted
            assert streamed(llm, requests, rng) == expected
        preemptions += llm.stats().preemptions
        drafted += llm.stats().draft_tokens
        accepted += llm.stats().accepted_tokens
    assert preemptions and drafted and stopped and scored, "the schedules exercised nothing"
    assert accepted or drafter == "noise"


def with_stop_string(rng, llm, prompt, params):
    """The request, with much to say of each token, and in most cases a stop string from the midst of an answer."""
    params = dataclasses.replace(
        params,
        logprobs=rng.choice((None, 0, 4)),
        prompt_logprobs=rng.choice((None, 0, 2)),
        raw_logprobs=rng.random() < 0.5,
        min_tokens=min(rng.choice((0, 4)), params.max_tokens),
    )
    text = outputs(llm, [(prompt, params)])[0].completions[-1].text
    first, length = rng.randrange(len(text) // 2 + 1), rng.randint(1, 4)
    stop = [text[first : first + length]] if rng.random() < 0.8 and text[first:] else []
    return prompt, dataclasses.replace(params, stop=stop, include_stop_str_in_output=rng.random() < 0.3)


def check_by_oracle(model, requests, found):
    """Tokens and log-probs are the oracle's, up to where a stop string ends them."""
    for (prompt, params), out in zip(requests, found, strict=True):
        for c, (ids, logprobs) in zip(out.completions, oracle(model, prompt, params, eos=(2,)), strict=True):
            count = len(c.token_ids) if isinstance(c.stop_reason, str) else len(ids)
            assert (c.token_ids, c.logprobs) == (ids[:count], logprobs[:count])


def streamed(llm, requests, rng):
    """What requests return that come at random steps, put together from what each step adds."""
    queue, names, outs, parts = list(requests), [], collections.defaultdict(list), collections.defaultdict(list)
    while queue or llm.has_unfinished_requests():
        while queue and (rng.random() < 0.5 or not llm.has_unfinished_requests()):
            prompt, params = queue.pop(0)
            names.append(llm.add_request(prompt, dataclasses.replace(params, output_kind=RequestOutputKind.DELTA)))
        for out in llm.step():
            outs[out.request_id].append(out)
            for c in out.completions:
                parts[out.request_id, c.index].append(c)
    found = []
    for name, (_, params) in zip(names, requests, strict=True):
        completions = [functools.reduce(together, parts[name, index]) for index in range(params.n)]
        first = next((out for out in outs[name] if out.prompt_ranks is not None), outs[name][0])  # says it once
        found.append(
            dataclasses.replace(first, request_id="", completions=completions, finished=outs[name][-1].finished)
        )
    return found


def together(before, new):
    """Two parts of a completion that follow each other, of one weight version."""
    (first,), (last,) = before.weight_versions, new.weight_versions
    lists = ("token_ids", "logprobs", "text", "top_logprobs", "raw_logprobs", "ranks")
    both = {name: (getattr(before, name), getattr(new, name)) for name in lists}
    joined = {name: None if b is None else a + b for name, (a, b) in both.items()}
    return dataclasses.replace(new, weight_versions=[dataclasses.replace(last, start=first.start)], **joined)


def outputs(llm, requests):
    """What the engine returns but for the requests' names."""
    prompts, params = zip(*requests, strict=True)
    found = llm.generate(list(prompts), list(params), use_tqdm=False)
    return [dataclasses.replace(out, request_id="") for out in found]


def test_streams_show_drafted_tokens_as_any_others(checkpoint):
    path = checkpoint("qwen3")
    params = SamplingParams(max_tokens=30, seed=3, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    plain, drafting = LLM(path), LLM(path, speculative_config={"method": "suffix"})
    for _ in range(2):  # the second time with drafts
        streams = []
        for llm in (plain, drafting):
            llm.add_request([5, 7, 9], params)
            parts = []
            while llm.has_unfinished_requests():
                parts += [(c.token_ids, c.logprobs) for out in llm.step() for c in out.completions]
            streams.append(parts)
        joined = [[[*itertools.chain.from_iterable(part[i] for part in parts)] for i in (0, 1)] for parts in streams]
        assert joined[0] == joined[1]
    assert len(streams[1]) < len(streams[0])


def test_negative_control_a_wrong_draft_that_is_accepted_is_noticed(checkpoint, monkeypatch):
    path, models = two_versions(checkpoint, "qwen3", "float32", vocab_size=VOCAB)
    rng = random.Random(0)
    requests = random_requests(rng, VOCAB, 5, 30)
    accepted = []

    def receive(self, row, token, plain=EngineCore._receive):
        sample = row.sample
        expected = row.draft is not None and row.position == len(sample.token_ids) and sample.finish_reason is None
        if expected and row.draft != sample.token_ids[-1] and not accepted:
            accepted.append(row.draft)
            row.draft = sample.token_ids[-1]
        plain(self, row, token)

    monkeypatch.setattr(EngineCore, "_receive", receive)
    config = speculative_config("right, then wrong", path, models, requests, rng)
    results, _ = run_schedule(path, "float32", rng, requests, models, speculative_config=config)
    assert len(accepted) == 1
    with pytest.raises(AssertionError):
        check_results(models, requests, results)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_a_draft_of_a_token_without_finite_values_harms_no_request(checkpoint, dtype):
    """Its sequence never has it, and may not be failed for it."""
    path = checkpoint("qwen3")
    params = SamplingParams(n=3, max_tokens=40, seed=3, logprobs=2, ignore_eos=True)
    requests = [([5, 7, 9], params), ([*range(100, 160)], params)]
    expected = outputs(LLM(path, dtype=dtype), requests)
    assert not any(77 in c.token_ids for out in expected for c in out.completions)
    llm = LLM(path, dtype=dtype, speculative_config={"method": lambda ids: [77, 5]})
    faults.embed_nan(llm, 77)
    found = outputs(llm, requests)
    assert llm.stats().draft_tokens > 20
    assert [out.completions for out in found] == [out.completions for out in expected]


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"method": "eagle"}, "choose suffix, ngram, or give a callable"),
        ({"num_speculative_tokens": 4}, "speculative method ''; choose suffix, ngram, or give a callable"),
        ("suffix", "speculative_config is no dict"),
        ({"method": "ngram", "suffix_decoding_max_cached_requests": 8}, "_requests means nothing to the speculative"),
        ({"method": lambda ids: ids, "prompt_lookup_min": 3}, "prompt_lookup_min means nothing to the speculative"),
        ({"method": "suffix", "num_speculative_tokens": 0}, "must be a positive integer"),
        ({"method": "ngram", "prompt_lookup_min": True}, "must be a positive integer"),
        ({"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 3}, "must be from prompt_lookup_min to 64"),
        ({"method": "suffix", "prompt_lookup_max": 10**9}, "must be from prompt_lookup_min to 64"),
        ({"method": "suffix", "prompt_lookup_min": 65}, "must be from prompt_lookup_min to 64"),
        ({"method": "suffix", "num_tokens": 3}, r"no \['num_tokens'\]; it has method, num_speculative_tokens"),
    ],
)
def test_settings_are_checked(checkpoint, config, problem):
    with pytest.raises((ValueError, TypeError), match=problem):
        LLM(checkpoint("qwen3"), speculative_config=config)
