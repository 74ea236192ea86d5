"""Requests added, stepped and reported one by one."""

import dataclasses
import itertools
import threading

import pytest

from samebits import SamplingParams

from helpers import faults
from helpers.engines import PROMPT, generate, one, pairs, prompt_of, run_all

pytestmark = pytest.mark.usefixtures("one_thread")


def test_snapshots_grow_and_the_last_is_what_generate_returns(llm):
    prompts = [prompt_of(5, 1), prompt_of(40, 2)]
    params = [SamplingParams(n=3, max_tokens=9, seed=1, ignore_eos=True), SamplingParams(max_tokens=14, seed=2)]
    expected = generate(llm, prompts, params)
    ids = [llm.add_request(*pair) for pair in zip(prompts, params, strict=True)]
    assert llm.has_unfinished_requests()
    seen = {i: [] for i in ids}
    while llm.has_unfinished_requests():
        for out in llm.step():
            seen[out.request_id].append(out)
    for request_id, whole in zip(ids, expected, strict=True):
        snapshots = seen[request_id]
        assert [s.finished for s in snapshots] == [False] * (len(snapshots) - 1) + [True]
        assert dataclasses.replace(snapshots[-1], request_id=whole.request_id) == whole
        for before, after in itertools.pairwise(snapshots):
            for a, b in zip(before.completions, after.completions, strict=True):
                assert b.token_ids[: len(a.token_ids)] == a.token_ids
                assert b.logprobs[: len(a.logprobs)] == a.logprobs
                grown = len(b.token_ids) - len(a.token_ids)
                assert grown == (0 if a.finish_reason else 1)
    assert llm.step() == []


def test_a_snapshot_does_not_change_afterwards(llm):
    llm.add_request(PROMPT, SamplingParams(max_tokens=5, seed=1, ignore_eos=True))
    first = llm.step()[0]
    tokens = list(first.completions[0].token_ids)
    run_all(llm)
    assert first.completions[0].token_ids == tokens
    assert len(tokens) == 1


def test_requests_submitted_at_any_time_are_not_disturbed_by_others(shared, checkpoint):
    path, params = checkpoint("llama"), SamplingParams(max_tokens=12, seed=4)
    llm = shared(path, max_num_batched_tokens=9)
    prompts = {f"r{i}": prompt_of(3 * i + 1, i) for i in range(6)}
    last = {}
    for request_id, prompt in prompts.items():
        assert llm.add_request(prompt, params, request_id) == request_id
        for _ in range(2):
            last |= {out.request_id: out for out in llm.step()}
    last |= run_all(llm)
    for request_id, prompt in prompts.items():
        assert pairs(last[request_id]) == pairs(generate(shared(path), [prompt], params)[0])


def test_generate_leaves_queued_requests_to_go_on(llm):
    params = SamplingParams(max_tokens=15, seed=2, ignore_eos=True)
    alone = one(llm, PROMPT, params)
    queued = llm.add_request(PROMPT, params)
    llm.step()
    short = one(llm, prompt_of(9), SamplingParams(max_tokens=4, ignore_eos=True))
    assert len(short.token_ids) == 4
    assert llm.has_unfinished_requests()
    assert pairs(run_all(llm)[queued]) == [(alone.token_ids, alone.logprobs)]


def test_a_queued_request_that_ends_during_generate_is_still_delivered(llm):
    params = SamplingParams(max_tokens=4, seed=2, ignore_eos=True)
    alone = one(llm, PROMPT, params)
    queued = llm.add_request(PROMPT, params)
    generate(llm, [prompt_of(9)], SamplingParams(max_tokens=15, ignore_eos=True))
    assert pairs(run_all(llm)[queued]) == [(alone.token_ids, alone.logprobs)]


def test_a_result_is_delivered_even_if_ctrl_c_came_during_its_last_step(own, llm, monkeypatch):
    params = SamplingParams(max_tokens=1, seed=2)
    request = own.add_request(PROMPT, params)
    faults.before_step(monkeypatch, own, faults.ctrl_c, at=1)
    with pytest.raises(KeyboardInterrupt):
        own.step()
    last = run_all(own)
    assert pairs(last[request]) == pairs(generate(llm, [PROMPT], params)[0])


def test_an_automatic_request_id_is_never_one_in_use(llm):
    params = SamplingParams(max_tokens=3, seed=1)
    ids = [llm.add_request(PROMPT, params, name) for name in ("request-0", "request-1", None, None)]
    assert len(set(ids)) == 4
    assert set(run_all(llm)) == set(ids)


def test_generate_works_in_a_thread_that_is_not_the_main_one(llm):
    params, results = SamplingParams(max_tokens=5, seed=1), []
    worker = threading.Thread(target=lambda: results.append(generate(llm, [PROMPT], params)[0]))
    worker.start()
    worker.join()
    assert pairs(results[0]) == pairs(generate(llm, [PROMPT], params)[0])
