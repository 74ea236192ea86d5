"""Bugs that other engines had."""

import dataclasses
import random
import shutil

import pytest
import torch

from samebits import LLM, SamplingParams, WeightUpdateError
from samebits.engine.model_runner import ModelRunner
from samebits.model.checkpoint import StoredWeights
from samebits.trainer import exact_model

from helpers import faults
from helpers.engines import BLOCK, PROMPT, SETTINGS, engine, generate, pairs, prompt_of, run_all
from helpers.models import make_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_neighbours_prefix_hit_changes_nothing(llm):
    """Prefix hit of a neighbour switches the kernel for all (nano-vLLM)."""
    params = SamplingParams(max_tokens=12, seed=1, prompt_logprobs=True)
    cold = generate(llm, [prompt_of(45, 1)], params)[0]
    warm = prompt_of(90, 2)
    generate(llm, [warm], SamplingParams(max_tokens=1))
    hits = llm.stats().prefix_hit_tokens
    beside = generate(llm, [warm, prompt_of(45, 1)], [SamplingParams(max_tokens=12), params])[1]
    assert llm.stats().prefix_hit_tokens == hits + 64
    assert (pairs(beside), beside.prompt_logprobs) == (pairs(cold), cold.prompt_logprobs)


def test_a_prefill_of_one_token_after_a_full_hit_changes_nothing(llm):
    """One-token prefill after a full prefix hit not invariant (vLLM #57016)."""
    prompt, params = prompt_of(2 * BLOCK + 1), SamplingParams(n=2, max_tokens=20, seed=1)
    cold = generate(llm, [prompt], params)[0]
    computed = llm.stats().prompt_tokens_computed
    hot = generate(llm, [prompt], params)[0]
    assert llm.stats().prompt_tokens_computed == computed + 1, "not a prefill of one token"
    assert pairs(hot) == pairs(cold)


def test_equal_prompts_in_one_prefill_batch_keep_their_blocks(shared, checkpoint):
    """Blocks freed while in use when two equal prompts share a prefill batch (mini-sglang)."""
    llm = shared(checkpoint("llama"), tokens=320)
    prompt = prompt_of(70)
    params = [SamplingParams(max_tokens=m, seed=m, ignore_eos=True) for m in (2, 20, 20)]
    ids = [llm.add_request(prompt, p) for p in params]
    first = llm.step()
    assert len(first) == 3, "not one prefill batch"
    late = llm.add_request(prompt_of(70, 1), params[1])  # takes the blocks that get free
    last = run_all(llm)
    for request_id, p in zip(ids, params, strict=True):
        assert pairs(last[request_id]) == pairs(generate(shared(checkpoint("llama")), [prompt], p)[0])
    assert pairs(last[late]) == pairs(generate(shared(checkpoint("llama")), [prompt_of(70, 1)], params[1])[0])


def test_rows_of_a_batch_come_in_order_of_arrival(checkpoint, monkeypatch):
    """Decode row order from a hash set (mini-sglang)."""
    llm = engine(checkpoint("llama"), tokens=256)
    schedule, orders = llm.engine.scheduler.schedule, []

    def recorded():
        batch = schedule()
        orders.append([s.seq_id for s in batch.sequences])
        return batch

    monkeypatch.setattr(llm.engine.scheduler, "schedule", recorded)
    rng = random.Random(0)
    for i in range(8):
        llm.add_request(prompt_of(9, i), SamplingParams(n=2, max_tokens=30, ignore_eos=True), str(rng.random()))
    run_all(llm)
    assert llm.stats().preemptions > 0
    assert max(map(len, orders)) > 4
    assert all(order == sorted(order) for order in orders)


def test_neighbours_with_all_kinds_of_parameters_run_in_one_batch(shared, checkpoint):
    """Neighbours with different sampling parameters crash the loop (VeXact)."""
    llm = shared(checkpoint("llama"))
    params = [
        SamplingParams(max_tokens=6, seed=i, **s, **extra)
        for i, (s, extra) in enumerate(
            zip(
                SETTINGS,
                [{}, {"logprobs": 3}, {"raw_logprobs": True}, {"prompt_logprobs": True}, {"min_tokens": 4}, {"n": 3}],
                strict=True,
            )
        )
    ]
    for p, output in zip(params, generate(llm, [PROMPT] * len(params), params), strict=True):
        alone = generate(shared(checkpoint("llama")), [PROMPT], p)[0]
        assert output.completions == alone.completions
        assert output.prompt_logprobs == alone.prompt_logprobs


def test_the_default_pool_is_no_larger_than_can_be_used(checkpoint):
    llm = LLM(checkpoint("llama"), max_num_seqs=3, max_model_len=100)
    assert llm.stats().kv_blocks_total == 3 * 4
    assert llm.stats().kv_cache_bytes == 12 * ModelRunner.block_bytes(exact_model(checkpoint("llama")))


def test_running_out_of_memory_makes_steps_smaller_or_ends_one_request(checkpoint, monkeypatch):
    """Smaller chunks, then fewer sequences; a request that is too much alone ends, the others get their tokens."""
    path = checkpoint("llama")
    prompts = [list(range(10, 10 + n)) for n in (30, 7, 3)]
    params = SamplingParams(n=2, max_tokens=6, seed=1, ignore_eos=True)
    expected = LLM(path).generate(prompts, params, use_tqdm=False)

    def limited(llm, too_much):
        def check(plan):
            if too_much(plan.token_ids):
                raise torch.OutOfMemoryError("CUDA out of memory")

        faults.before_step(monkeypatch, llm, check)
        return llm.generate(prompts, params, use_tqdm=False)

    for most in (1, 3, 20):
        outs = limited(LLM(path), lambda ids, most=most: len(ids) > most)
        assert [[c.logprobs for c in o.completions] for o in outs] == [
            [c.logprobs for c in o.completions] for o in expected
        ]
    outs = limited(LLM(path, max_num_batched_tokens=1), lambda ids: 39 in ids)  # the first prompt's last token
    assert [c.finish_reason for c in outs[0].completions] == ["error", "error"]
    assert "memory" in outs[0].completions[0].stop_reason
    assert [c.logprobs for c in outs[1].completions] == [c.logprobs for c in expected[1].completions]


def test_weights_come_back_from_files_only_while_these_are_the_same(checkpoint, tmp_path, monkeypatch):
    """After sleep(2), another checkpoint in the place of the one that served would wake up under its version."""
    path = tmp_path / "model"
    shutil.copytree(checkpoint("llama"), path)
    llm = LLM(path)
    before = llm.weight_checksums()
    llm.sleep(2)
    llm.wake_up()
    assert llm.weight_checksums() == before
    llm.sleep(2)
    make_checkpoint(path, "llama", seed=1)
    with pytest.raises(WeightUpdateError, match="have changed since weight version 0"):
        llm.wake_up()
    assert not llm.has_weights
    llm.update_weights(path)
    llm.sleep(2)
    with monkeypatch.context() as patch:
        answers = iter([True, False])  # another checkpoint comes while this one is read
        patch.setattr(StoredWeights, "unchanged", property(lambda _: next(answers)))
        with pytest.raises(WeightUpdateError, match="changed while they were read"):
            llm.wake_up()
    assert not llm.has_weights
    llm.wake_up()
    assert llm.has_weights
    assert llm.weight_checksums() != before
    assert llm.generate([[5, 6]], SamplingParams(max_tokens=2), use_tqdm=False)[0].completions[0].token_ids


@pytest.mark.parametrize("n", [1, 3])
def test_async_scheduling_starts_a_step_before_the_last_ones_tokens_are_known(shared, checkpoint, n):
    """The same results; what comes after a stop goes nowhere."""
    path = checkpoint("llama")
    params = SamplingParams(n=n, max_tokens=30, min_tokens=5, logprobs=2, raw_logprobs=True, seed=3)
    stop = shared(path).generate(PROMPT, params, use_tqdm=False)[0].completions[0].token_ids[7]
    params = dataclasses.replace(params, stop_token_ids=[stop])
    runs = []
    for overlap in (False, True):
        llm, finished, under_way = shared(path, async_scheduling=overlap, max_num_batched_tokens=24), {}, set()
        for i in range(4):
            llm.add_request(PROMPT if i == 0 else prompt_of(20 * i), params)
        while llm.has_unfinished_requests():
            finished |= {o.request_id: o for o in llm.step() if o.finished}
            under_way.add(len(llm.engine._steps))
        runs.append([finished[i] for i in sorted(finished)])
        assert max(under_way) == overlap
        assert llm.stats().kv_blocks_used == 0
    assert [o.completions for o in runs[0]] == [o.completions for o in runs[1]]
    assert runs[0][0].completions[0].finish_reason == "stop"


@pytest.mark.parametrize("exact", [True, False], ids=["packed", "as they are"])
def test_an_update_takes_the_memory_of_the_weights_before_last_and_of_no_others(checkpoint, tmp_path, exact):
    """Two handles at once, an abandoned one, tied tensors: what serves stays as it is until the switch."""
    models = [exact_model(make_checkpoint(tmp_path / str(seed), "llama", seed=seed), exact=exact) for seed in range(4)]
    llm = engine(checkpoint("llama"), exact=exact)
    expected = []
    for model in models:
        llm.update_weights(model)
        expected.append(llm.weight_checksums())
    assert len({str(sums) for sums in expected}) == len(models)
    for i in (0, 2, 1):
        before, update, abandoned = llm.weight_checksums(), llm.begin_weight_update(), llm.begin_weight_update()
        abandoned.load(models[3])
        update.load(models[i])
        assert llm.weight_checksums() == before
        llm.commit_weight_update(update)
        assert llm.weight_checksums() == expected[i]
    with pytest.raises(WeightUpdateError, match="is over"):  # a handle is good for one commit
        llm.commit_weight_update(update)
    places = []
    for i in range(4):
        llm.update_weights(models[i])
        slots = llm.engine.executor.workers[0].store.places.values()
        tensors = [m.packed.panels if exact and hasattr(m, "packed") else getattr(m, leaf) for ((m, leaf), *_) in slots]
        places.append([t.data_ptr() for t in tensors])
    assert places[:2] == places[2:]
    llm.sleep(1)
    assert not llm.engine.executor.workers[0].store.recycled
    llm.sleep(2)
    llm.wake_up(["kv_cache"])
    llm.update_weights(models[0])  # where there were none
    llm.begin_weight_update().load(models[1])
    assert llm.weight_checksums() == expected[0]
