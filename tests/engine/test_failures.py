"""Ctrl-C and errors lose nothing and harm no other request."""

import dataclasses
import functools
import signal

import pytest

from samebits import CheckpointError, SamplingParams

from helpers import faults
from helpers.engines import PROMPT, assert_idle, check, copy_of, engine, generate, one, pairs, prompt_of, run_all
from helpers.faults import ctrl_c, fail

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_step_that_fails_after_its_writes_changes_no_bit_of_the_next(checkpoint, monkeypatch):
    """A sample that ends by its first token leaves a block that its sibling's copy still needs."""
    llm = engine(checkpoint("llama"), async_scheduling=False)
    params = SamplingParams(n=2, max_tokens=12, seed=1, ignore_eos=True)
    first = generate(llm, [prompt_of(20, 1)], params)[0].completions[0].token_ids[0]
    params = dataclasses.replace(params, stop_token_ids=[first])
    expected = generate(llm, [prompt_of(20, 1)], params)[0]
    assert len(expected.completions[0].token_ids) == 1 < len(expected.completions[1].token_ids)
    llm = engine(checkpoint("llama"), async_scheduling=False)
    kept = llm.add_request(prompt_of(20, 1), params)
    llm.step()
    assert llm.engine.scheduler.blocks.copies
    other = llm.add_request(prompt_of(20, 2), params)
    faults.after_step(monkeypatch, llm, fail(RuntimeError("out of luck")), at=1)
    with pytest.raises(RuntimeError):
        llm.step()
    last = run_all(llm)
    assert pairs(last[kept]) == pairs(expected)
    assert pairs(last[other]) == pairs(generate(llm, [prompt_of(20, 2)], params)[0])


LOOP_FAILURES = {
    "KeyboardInterrupt in the model": (fail(KeyboardInterrupt()), KeyboardInterrupt),
    "Ctrl-C during a step": (ctrl_c, KeyboardInterrupt),
    "error in the model": (fail(RuntimeError("out of luck")), RuntimeError),
    "out of memory": (fail(MemoryError()), MemoryError),
}


LOOP_PROMPTS = [prompt_of(60, 1), prompt_of(60, 1), prompt_of(5, 2)]
LOOP_PARAMS = SamplingParams(n=3, max_tokens=15, seed=1, ignore_eos=True)
LONG = SamplingParams(n=2, max_tokens=200, seed=1, ignore_eos=True)  # outlives the calls of generate


@pytest.fixture(scope="module")
def undisturbed(checkpoint):
    """undisturbed() -> what the loop's prompts and the long request give where nothing fails."""

    @functools.cache
    def get():
        llm = engine(checkpoint("llama"))
        return generate(llm, LOOP_PROMPTS, LOOP_PARAMS), generate(llm, [prompt_of(9)], LONG)[0]

    return get


@pytest.mark.parametrize("name", LOOP_FAILURES)
@pytest.mark.parametrize("at", [1, 2, 6])
def test_a_failure_reaches_the_caller_of_generate_and_the_engine_stays_usable(
    undisturbed, checkpoint, monkeypatch, name, at
):
    what, error = LOOP_FAILURES[name]
    llm = engine(checkpoint("llama"), max_num_batched_tokens=40)
    expected, long = undisturbed()
    queued = llm.add_request(prompt_of(9), LONG)
    llm.step()
    handler = signal.getsignal(signal.SIGINT)
    assert handler is signal.default_int_handler, "pytest has a handler of its own: Ctrl-C is not tested"
    faults.before_step(monkeypatch, llm, what, at)
    with pytest.raises(error):
        generate(llm, LOOP_PROMPTS, LOOP_PARAMS)
    assert signal.getsignal(signal.SIGINT) is handler
    check(llm)
    assert llm.unfinished_request_ids == [queued], "the call's own requests are gone, the others stay"
    assert llm.stats().num_running + llm.stats().num_waiting == 2
    again = generate(llm, LOOP_PROMPTS, LOOP_PARAMS)
    assert list(map(pairs, again)) == list(map(pairs, expected))
    assert pairs(run_all(llm)[queued]) == pairs(long)
    assert_idle(llm)


def test_ctrl_c_while_requests_are_submitted_leaves_none_behind(own, monkeypatch):
    faults.after_queueing(monkeypatch, own, ctrl_c, at=2)
    with pytest.raises(KeyboardInterrupt):
        generate(own, [PROMPT, PROMPT, PROMPT], SamplingParams(max_tokens=3))
    assert_idle(own)


def test_a_failure_in_step_reaches_the_caller_and_the_requests_go_on(own, monkeypatch):
    params = SamplingParams(n=2, max_tokens=9, seed=1, ignore_eos=True)
    expected = generate(own, [PROMPT], params)[0]
    request = own.add_request(PROMPT, params)
    own.step()
    faults.before_step(monkeypatch, own, fail(RuntimeError("out of luck")), at=1)
    with pytest.raises(RuntimeError, match="out of luck"):
        own.step()
    assert pairs(run_all(own)[request]) == pairs(expected)


def test_a_failure_while_one_request_takes_its_token_harms_no_other(own, monkeypatch):
    params = SamplingParams(max_tokens=9, seed=1, ignore_eos=True)
    expected = generate(own, [PROMPT], params)[0]
    failing, other = own.add_request(prompt_of(9), params), own.add_request(PROMPT, params)
    own.step()
    faults.before_stop_check(monkeypatch, failing, fail(ValueError("the tokenizer can't decode this")))
    last = run_all(own)
    failed = last[failing].completions[0]
    assert (failed.finish_reason, failed.stop_reason) == ("error", "ValueError: the tokenizer can't decode this")
    assert pairs(last[other]) == pairs(expected)
    assert_idle(own)


@pytest.mark.parametrize("overlap", [False, True])
def test_nan_ends_its_request_with_an_error_and_the_others_go_on(shared, checkpoint, caplog, overlap):
    """Also where a step that takes the token is under way already."""
    llm = engine(checkpoint("qwen3"), async_scheduling=overlap)
    faults.embed_nan(llm, 77)
    params = SamplingParams(max_tokens=6, seed=1)
    expected = generate(shared(checkpoint("qwen3")), [PROMPT], params)[0]
    assert 77 not in [*PROMPT, *expected.completions[0].token_ids]
    good, bad = llm.add_request(PROMPT, params, "good"), llm.add_request([5, 77, 6], params, "bad")
    last = run_all(llm)
    assert [(c.finish_reason, c.token_ids) for c in last[bad].completions] == [("error", [])]
    assert "request bad ends with an error: non-finite logits; check the weights" in caplog.text
    assert pairs(last[good]) == pairs(expected)
    for scored in ({"prompt_logprobs": True}, {"logprobs": 2}):
        failed = generate(llm, [[5, 77, 6]], SamplingParams(n=3, max_tokens=6, **scored))[0]
        assert [c.stop_reason for c in failed.completions] == ["non-finite logits; check the weights"] * 3
    assert_idle(llm)
    assert pairs(generate(llm, [PROMPT], params)[0]) == pairs(expected)


def test_nan_in_a_single_logit_is_an_error_too(checkpoint):
    llm = engine(checkpoint("llama3-bias"))
    faults.logit_nan(llm, 500)
    assert generate(llm, [PROMPT], SamplingParams(max_tokens=3))[0].completions[0].finish_reason == "error"
    assert_idle(llm)


def test_a_handler_of_the_callers_own_runs_after_the_step(own, monkeypatch):
    """An exception from it in the middle of a step would leave half a step behind."""
    calls = []
    before = signal.signal(signal.SIGINT, lambda *_: calls.append(own.stats().generation_tokens))
    try:
        faults.before_token(monkeypatch, ctrl_c)
        own.add_request(PROMPT, SamplingParams(n=3, max_tokens=4, ignore_eos=True))
        own.step()
    finally:
        signal.signal(signal.SIGINT, before)
    assert calls == [3], "not held back until all three samples had their token"


def test_an_error_while_reporting_loses_no_result(own, monkeypatch):
    request = own.add_request(PROMPT, SamplingParams(max_tokens=1))
    with monkeypatch.context() as patch:
        faults.before_output(patch, ctrl_c)
        with pytest.raises(KeyboardInterrupt):
            own.step()
    assert own.has_unfinished_requests()
    assert [o.request_id for o in own.step()] == [request]


def test_a_failed_step_counts_nothing(own, monkeypatch):
    own.add_request(prompt_of(20), SamplingParams(max_tokens=1))
    with monkeypatch.context() as patch:
        faults.before_step(patch, own, fail(ZeroDivisionError()))
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                own.step()
    run_all(own)
    assert (own.stats().steps, own.stats().prompt_tokens_computed) == (1, 20)


def test_a_broken_tokenizer_is_refused_at_once_and_can_be_done_without(checkpoint, tmp_path):
    path = copy_of(checkpoint("llama"), tmp_path)
    (path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer in .* does not load.*skip_tokenizer_init=True"):
        engine(path)
    assert one(engine(path, skip_tokenizer_init=True), PROMPT, SamplingParams(max_tokens=2)).text is None
