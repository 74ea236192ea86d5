"""Log-probs, ranks and alternatives."""

import dataclasses

import pytest

from samebits import SamplingParams
from samebits.trainer import exact_model

from helpers.engines import FREE, PROMPT, SETTINGS, copy_of, engine, generate, one, pairs, prompt_of, trainer_logprobs

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("k", [1, 5, 1000])
def test_logprobs_k_are_the_most_probable_tokens_in_descending_order(llm, trainer, setting, k):
    params = SamplingParams(max_tokens=8, seed=3, logprobs=k, **setting)
    c = one(llm, PROMPT, params)
    assert (c.token_ids, c.logprobs) == pairs(generate(llm, [PROMPT], dataclasses.replace(params, logprobs=None))[0])[0]
    assert len(c.top_logprobs) == len(c.token_ids)
    for i, (token, logprob, top) in enumerate(zip(c.token_ids, c.logprobs, c.top_logprobs, strict=True)):
        values = list(top.values())
        assert len(top) == k
        assert values == sorted(values, reverse=True)
        if token in top:
            assert top[token] == logprob, "not the sampled token's log-prob, as bits"
        else:
            assert logprob <= values[-1]
        context = PROMPT + c.token_ids[:i]
        ids = list(top)[:: max(1, k // 6)]
        theirs = trainer_logprobs(trainer, [[*context, t] for t in ids], params)
        assert [top[t] for t in ids] == [lp[-1] for lp in theirs]


def test_logprobs_leave_out_what_min_tokens_bans(llm, free):
    params = dataclasses.replace(FREE, stop_token_ids=[free[0]], min_tokens=3, logprobs=1000)
    tops = one(llm, PROMPT, params).top_logprobs
    assert all(top.get(free[0], -float("inf")) == -float("inf") for top in tops[:3])


def test_logprobs_0_and_none_report_no_alternatives(llm):
    assert one(llm, PROMPT, SamplingParams(logprobs=None)).top_logprobs is None
    assert set(map(len, one(llm, PROMPT, SamplingParams(logprobs=0)).top_logprobs)) == {0}


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_raw_logprobs_are_those_of_temperature_1_without_filters(llm, trainer, setting):
    params = SamplingParams(n=2, max_tokens=8, seed=3, raw_logprobs=True, **setting)
    for c in generate(llm, [PROMPT], params)[0].completions:
        assert c.raw_logprobs == trainer_logprobs(trainer, [PROMPT + c.token_ids])[0][len(PROMPT) :]
    assert one(llm, PROMPT, SamplingParams(**setting)).raw_logprobs is None


@pytest.mark.parametrize("chunk", [1, 7, 33, 2048])
@pytest.mark.parametrize("setting", [{}, {"temperature": 0.7, "n": 3, "min_tokens": 4}, {"top_k": 30}], ids=str)
def test_prompt_logprobs_are_the_trainers_bit_for_bit_in_any_chunks(shared, checkpoint, trainer, chunk, setting):
    llm = shared(checkpoint("llama"), max_num_batched_tokens=chunk)
    prompts = [prompt_of(n, n) for n in (300, 64, 2, 1)]
    params = SamplingParams(max_tokens=4, seed=1, prompt_logprobs=True, **setting)
    generate(llm, prompts, SamplingParams(max_tokens=1))  # fills the prefix cache: a hit must not swallow scores
    expected = trainer_logprobs(trainer, prompts, dataclasses.replace(params, min_tokens=0))
    outputs = generate(llm, prompts, params)
    assert [o.prompt_logprobs for o in outputs] == expected
    assert outputs[0].prompt_logprobs[0] == 0.0
    plain = generate(llm, prompts, dataclasses.replace(params, prompt_logprobs=False))
    assert all(o.prompt_logprobs is None for o in plain)
    assert list(map(pairs, plain)) == list(map(pairs, outputs))


def test_prompt_logprobs_survive_preemption(shared, checkpoint, trainer):
    llm = shared(checkpoint("llama"), tokens=128, max_num_batched_tokens=20)
    params = SamplingParams(max_tokens=40, prompt_logprobs=True, ignore_eos=True, seed=1)
    prompts = [prompt_of(50, i) for i in range(4)]
    before = llm.stats().preemptions
    outputs = generate(llm, prompts, params)
    assert llm.stats().preemptions > before
    assert [o.prompt_logprobs for o in outputs] == trainer_logprobs(trainer, prompts)


def test_scores_that_an_abort_cut_short_are_none(shared, checkpoint):
    llm = shared(checkpoint("llama"), max_num_batched_tokens=20)
    params = SamplingParams(max_tokens=4, prompt_logprobs=True)
    for steps in (0, 1, 2):
        request = llm.add_request(prompt_of(100, 1), params)
        for _ in range(steps):
            assert not llm.step()
        llm.abort(request)
        (output,) = llm.step()
        assert output.completions[0].finish_reason == "abort" and output.prompt_logprobs is None


def test_a_window_that_the_models_code_ignores_is_ignored(checkpoint):
    """A Llama checkpoint that keeps another family's `sliding_window` in its config."""
    path = copy_of(checkpoint("llama"), checkpoint("llama").parent / "stray_window", sliding_window=16)
    sample = one(engine(path), prompt_of(60, 1), SamplingParams(max_tokens=20, seed=1, ignore_eos=True))
    scored = trainer_logprobs(exact_model(path), [prompt_of(60, 1) + sample.token_ids])[0]
    assert scored[60:] == sample.logprobs
