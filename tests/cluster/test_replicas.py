"""Replicas share the work, and change no bit of it."""

import copy
import signal
import threading
from dataclasses import replace

import pytest
import torch

from samebits import LLM, SamplingParams
from samebits.cluster import replica
from samebits.engine import EngineConfig, RequestOutputKind
from samebits.engine.executor import ModelInfo
from samebits.trainer import exact_model, token_logprobs

from helpers import faults
from helpers.cluster_runs import PARAMS, PROMPTS, SMALL, bits, generate
from helpers.serving import wait_for


def test_replicas_share_the_work_and_change_no_bit(pair, paths, expected):
    pair.update_weights(paths[0])
    before = [client.stats.generation_tokens for client in pair.engine.serving]
    outputs = generate(pair)
    assert bits(outputs) == expected[0]
    shares = [c.stats.generation_tokens - b for c, b in zip(pair.engine.serving, before, strict=True)]
    assert sum(shares) == len(PROMPTS) * 2 * 60 and min(shares) == max(shares), "not the least loaded got the request"
    model = exact_model(paths[0])
    for prompt, out in zip(PROMPTS, outputs, strict=True):
        for c in out.completions:
            scored = token_logprobs(model, [prompt + c.token_ids], PARAMS)[0][len(prompt) :].detach()
            assert torch.equal(torch.tensor(c.logprobs), scored)


def test_a_prompts_start_goes_where_it_is_known(pair):
    long = [3 + i % 900 for i in range(200)]
    short = SamplingParams(max_tokens=2, seed=0, ignore_eos=True)
    first = pair.generate([long], short, use_tqdm=False)[0]
    again = pair.generate([[*long[:150], 4]], short, use_tqdm=False)[0]
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 128)
    crowd = [[*long[:100], i] for i in range(40)]
    pair.generate(crowd, short, use_tqdm=False)
    assert all(client.stats.generation_tokens > 0 for client in pair.engine.serving), "affinity went before the load"


def test_streams_aborts_and_errors_behave_as_in_one_engine(pair, monkeypatch):
    with pytest.raises(ValueError, match="out of range"):
        pair.generate([[10**6]], PARAMS)
    with monkeypatch.context() as patch:
        patch.setattr(pair.engine, "replica_capacity", 100)
        with pytest.raises(ValueError, match="can't fit the KV cache of 100 tokens"):
            pair.generate([[5] * 50], SamplingParams(n=1, max_tokens=60))
    request = pair.add_request(PROMPTS[0], SamplingParams(max_tokens=10**4 // 50, seed=0, ignore_eos=True))
    seen = 0
    while seen < 5:
        for out in pair.step():
            count = len(out.completions[0].token_ids)
            assert count > seen, "a report without news"
            seen = count
    assert pair.abort(request) and not pair.abort("nobody")
    (last,) = pair.step()
    assert last.completions[0].finish_reason == "abort" and len(last.completions[0].token_ids) >= seen
    assert not pair.has_unfinished_requests()
    wait_for(lambda: faults.serve(pair) and pair.stats().kv_blocks_used == 0)


def test_prompt_scores_and_details_come_from_replicas_too(pair, paths):
    pair.update_weights(paths[0])
    params = SamplingParams(
        n=2, max_tokens=8, seed=3, prompt_logprobs=2, logprobs=2, raw_logprobs=True, temperature=0.7
    )
    (ours,) = pair.generate([PROMPTS[3]], params, use_tqdm=False)
    (theirs,) = LLM(paths[0], **SMALL).generate([PROMPTS[3]], params, use_tqdm=False)
    for name in ("prompt_logprobs", "prompt_top_logprobs", "prompt_ranks"):
        assert getattr(ours, name) == getattr(theirs, name)
    for a, b in zip(ours.completions, theirs.completions, strict=True):
        assert (a.token_ids, a.logprobs, a.raw_logprobs, a.top_logprobs, a.ranks) == (
            b.token_ids, b.logprobs, b.raw_logprobs, b.top_logprobs, b.ranks)  # fmt: skip


def test_sleep_and_wake_up_reach_all(pair, paths, expected):
    pair.update_weights(paths[0])
    assert pair.sleep(1) == pair.kv_cache_bytes and not pair.ready
    with pytest.raises(RuntimeError, match="sleeps"):
        pair.generate(PROMPTS[:1], PARAMS)
    pair.wake_up()
    assert pair.sleep(2) == pair.kv_cache_bytes + pair.weight_bytes
    pair.wake_up()
    assert bits(generate(pair)) == expected[0], "the checkpoint was read again"


def test_an_id_can_be_used_again_after_an_abort(pair, paths, expected):
    pair.update_weights(paths[0])
    for steps in (0, 3, 10):
        pair.add_request(PROMPTS[1], PARAMS, "again")
        for _ in range(steps):
            pair.step()
        pair.abort("again")
        pair.take_outputs()
        pair.add_request(PROMPTS[0], PARAMS, "again")
        reports = []
        while pair.has_unfinished_requests():
            reports += pair.step()
        assert bits(reports[-1:]) == expected[0][:2]


def test_a_message_that_cant_be_read_is_an_answer_not_a_death(pair):
    class Private(SamplingParams):
        pass

    Private.__qualname__, Private.__module__ = "Private", __name__
    globals()["Private"] = Private  # so that it can be sent, to where it is unknown
    before = [one.client for one in pair.engine.replicas]
    (out,) = pair.generate(PROMPTS[:1], Private(max_tokens=3), use_tqdm=False)
    assert out.completions[0].finish_reason == "error" and "No module" in out.completions[0].stop_reason
    assert [one.client for one in pair.engine.replicas] == before


def test_tokens_that_nobody_waits_for_are_reported_seldom(paths, expected, monkeypatch):
    """Of requests whose end alone is asked for: when more or fewer run, after REPORT_STEPS, and at a pause."""
    config = EngineConfig(**SMALL)
    with monkeypatch.context() as patch:
        patch.setattr(signal, "signal", lambda *_: None)  # a host ignores SIGTERM; this process goes on taking it
        far = replica.Host()
    info = ModelInfo.of([far.make_worker(paths[0], config, None, 0, 1)])
    far.call("initialize_cache", info.num_blocks)
    far.start(paths[0], config, info, [])
    llm = LLM(paths[0], **SMALL)
    reports = far.run()
    near = {}
    told = 0

    def start(steps: int, *kinds: RequestOutputKind) -> None:
        nonlocal told
        monkeypatch.setattr(replica, "REPORT_STEPS", steps)
        told = 0
        for serial, kind in enumerate(kinds):
            near[serial] = llm.process(PROMPTS[serial], replace(PARAMS, output_kind=kind), str(serial))
            near[serial].serial = serial
            far.post("add_request", copy.deepcopy(near[serial]))

    def take() -> None:
        nonlocal told
        report = next(reports)
        told += bool(report.progress)
        for progress in report.progress:
            progress.apply(near[progress.serial])

    def finish() -> int:
        while not all(request.finished for request in near.values()):
            take()
        assert bits([r.take_output(None) for r in near.values()]) == expected[0][: 2 * len(near)]
        return told

    late, delta, whole = RequestOutputKind.FINAL_ONLY, RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE
    for steps, most in ((10**6, 8), (10, 15)):
        start(steps, late, late, late)
        assert finish() <= most
    for steps, second in ((10**6, delta), (10**6, whole), (1, late)):
        start(steps, late, second, late)
        assert finish() >= 60
    start(10**6, late, late, late)
    take()
    known = [len(r.samples[0].sampled) for r in near.values()]
    threading.Timer(0.05, far.post, ("pause", True)).start()
    take()
    assert any(len(r.samples[0].sampled) > n for r, n in zip(near.values(), known, strict=True)), "lost at the pause"
    far.post("pause", False)
    finish()
