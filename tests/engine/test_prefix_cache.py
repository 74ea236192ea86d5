"""Prefixes are computed once."""

import pytest

from samebits import SamplingParams

from helpers.engines import check, generate, pairs, prompt_of, run_all

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_prefix_cache_saves_work_until_it_is_reset_or_off(llm, shared, checkpoint):
    prompt, params, before = prompt_of(100), SamplingParams(max_tokens=9, seed=1), llm.stats().prefix_hit_tokens
    cold = generate(llm, [prompt], params)[0]
    for expected in (96, 96 * 2):
        assert pairs(generate(llm, [prompt], params)[0]) == pairs(cold)
        assert llm.stats().prefix_hit_tokens == before + expected
    llm.reset_prefix_cache()
    assert pairs(generate(llm, [prompt], params)[0]) == pairs(cold)
    assert llm.stats().prefix_hit_tokens == before + 96 * 2
    off = shared(checkpoint("llama"), enable_prefix_caching=False)
    for _ in range(2):
        assert pairs(generate(off, [prompt], params)[0]) == pairs(cold)
    assert off.stats().prefix_hit_tokens == 0


def test_a_reset_of_the_prefix_cache_leaves_running_requests_alone(llm):
    params = SamplingParams(n=2, max_tokens=40, seed=1, ignore_eos=True)
    expected = generate(llm, [prompt_of(50)], params)[0]
    request = llm.add_request(prompt_of(50), params)
    llm.step()
    llm.reset_prefix_cache()
    check(llm)
    assert pairs(run_all(llm)[request]) == pairs(expected)
