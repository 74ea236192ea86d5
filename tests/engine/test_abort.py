"""Requests that are aborted leave nothing behind."""

import pytest

from samebits import SamplingParams

from helpers.engines import PROMPT, assert_idle, check, generate, pairs, prompt_of, run_all

pytestmark = pytest.mark.usefixtures("one_thread")


def test_abort_frees_the_blocks_and_harms_nobody(llm):
    params = SamplingParams(n=2, max_tokens=20, seed=1, ignore_eos=True)
    expected = generate(llm, [prompt_of(9, 1)], params)[0]
    gone, kept = llm.add_request(prompt_of(70, 2), params), llm.add_request(prompt_of(9, 1), params)
    for _ in range(3):
        llm.step()
    used = llm.stats().kv_blocks_used
    assert llm.abort(gone)
    check(llm)
    assert llm.stats().kv_blocks_used < used
    assert not llm.abort(gone), "it isn't there any more"
    last = run_all(llm)
    assert [len(c.token_ids) for c in last[gone].completions] == [3, 3], "what it had is not lost"
    assert {c.finish_reason for c in last[gone].completions} == {"abort"}
    assert pairs(last[kept]) == pairs(expected)
    assert_idle(llm)


def test_abort_before_the_siblings_of_a_group_started(shared, checkpoint):
    llm = shared(checkpoint("llama"), max_num_batched_tokens=16)
    gone = llm.add_request(prompt_of(70), SamplingParams(n=4, max_tokens=20))
    llm.step()
    kept = llm.add_request(PROMPT, SamplingParams(n=2, max_tokens=5, seed=1))
    assert llm.stats().num_running == 1, "the siblings have started: this test proves nothing"
    assert llm.abort(gone)
    check(llm)
    last = run_all(llm)
    assert [c.finish_reason for c in last[gone].completions] == ["abort"] * 4
    assert {c.finish_reason for c in last[kept].completions} == {"length"}
    assert_idle(llm)


def test_abort_of_a_finished_request_takes_nothing_from_its_reader(llm):
    """It finished during another caller's `generate`; its reader calls `step` later."""
    done = llm.add_request(PROMPT, SamplingParams(max_tokens=2, seed=1))
    generate(llm, [prompt_of(9)], SamplingParams(max_tokens=8, ignore_eos=True))
    assert not llm.abort(done)
    assert len(run_all(llm)[done].completions[0].token_ids) == 2


def test_abort_right_after_the_siblings_started_leaves_no_copy_that_hurts(shared, checkpoint):
    """The new samples' copies of the partial block are still pending when their request goes."""
    llm = shared(checkpoint("llama"), tokens=256)
    params = SamplingParams(n=2, max_tokens=30, seed=1, ignore_eos=True)
    expected = generate(llm, [prompt_of(50, 1)], params)[0]
    kept = llm.add_request(prompt_of(50, 1), params)
    gone = llm.add_request(prompt_of(40, 2), SamplingParams(n=3, max_tokens=20))
    llm.step()
    assert llm.engine.scheduler.blocks.copies
    assert llm.abort(gone)
    late = llm.add_request(prompt_of(60, 3), params)
    last = run_all(llm)
    assert pairs(last[kept]) == pairs(expected)
    assert pairs(last[late]) == pairs(generate(llm, [prompt_of(60, 3)], params)[0])


def test_abort_of_a_request_that_waits_or_never_was(shared, checkpoint):
    llm = shared(checkpoint("llama"), max_num_seqs=1)
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    first, second = (llm.add_request(PROMPT, params) for _ in range(2))
    llm.step()
    assert llm.abort(second)
    assert not llm.abort("nobody")
    last = run_all(llm)
    assert {r: last[r].completions[0].finish_reason for r in last} == {first: "length", second: "abort"}
    assert_idle(llm)
