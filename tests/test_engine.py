"""What `LLM` promises its caller: results, order, streaming, errors, and that it survives all of them."""

import dataclasses
import functools
import itertools
import json
import os
import random
import shutil
import signal
import string
import threading
import time

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
)

from samebits import LLM, CheckpointError, NumericsError, SamplingParams, UnsupportedModelError, WeightUpdateError
from samebits.engine import VersionSpan
from samebits.engine.model_runner import ModelRunner
from samebits.engine.request import Request, Sample, SampledToken
from samebits.model import make_exact
from samebits.model.checkpoint import StoredWeights
from samebits.trainer import exact_model, token_logprobs

from models import AWKWARD, make_checkpoint

VOCAB, BLOCK = AWKWARD["vocab_size"], 32
PROMPT = [17, 900, 3, 44]


pytestmark = pytest.mark.usefixtures("one_thread")


def prompt_of(length, seed=0):
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(length)]


@functools.cache
def block_bytes(dtype):
    """Of one KV block of the tiny checkpoints: their shapes are all the same."""
    return ModelRunner.block_bytes(
        AutoModelForCausalLM.from_config(LlamaConfig(**AWKWARD), dtype=getattr(torch, dtype))
    )


def engine(path, tokens=4096, **settings):
    """An engine whose KV cache holds `tokens` tokens."""
    pool = tokens // BLOCK * block_bytes(settings.get("dtype", "float32"))
    llm = LLM(path, kv_cache_memory_bytes=pool, **settings)
    assert llm.stats().kv_blocks_total == tokens // BLOCK
    return llm


@pytest.fixture
def llm(checkpoint):
    return engine(checkpoint("llama"))


@pytest.fixture(scope="module")
def trainer(checkpoint):
    return exact_model(checkpoint("llama"))


def generate(llm, prompts, params):
    return llm.generate(prompts, params, use_tqdm=False)


def one(llm, prompt, params):
    """The completion of one prompt."""
    return generate(llm, [prompt], params)[0].completions[0]


def pairs(output):
    return [(c.token_ids, c.logprobs) for c in output.completions]


def run_all(llm):
    """Steps until nothing is left -> {request id: last snapshot}."""
    last = {}
    for _ in range(5000):
        if not llm.has_unfinished_requests():
            break
        last |= {out.request_id: out for out in llm.step()}
        llm.engine.scheduler.check()
    assert not llm.has_unfinished_requests(), "livelock"
    return last


def assert_idle(llm):
    llm.engine.scheduler.check()
    stats = llm.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_blocks_used) == (0, 0, 0)
    assert not llm.has_unfinished_requests()


def trainer_logprobs(model, sequences, params=None, **kwargs):
    with torch.no_grad():
        return [lp.tolist() for lp in token_logprobs(model, sequences, params, **kwargs)]


def copy_of(checkpoint, folder, generation_config=None, **config):
    """A copy of a checkpoint with other entries in its config files."""
    path = folder / "copy"
    shutil.copytree(checkpoint, path)
    if generation_config is not None:
        (path / "generation_config.json").write_text(json.dumps(generation_config))
    if config:
        old = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**old, **config}))
    return path


class Once:
    """Wraps a function: call number `at` runs `what` first."""

    def __init__(self, function, at, what):
        self.function, self.left, self.what = function, at, what

    def __call__(self, *args):
        self.left -= 1
        if self.left == 0:
            self.what()
        return self.function(*args)


def fail(error):
    def what():
        raise error

    return what


def ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)
    sum(range(10_000))  # the handler runs between two bytecodes


# --- generate ---------------------------------------------------------------------------------------------------------


def test_outputs_come_in_the_order_of_the_prompts_whoever_finishes_first(checkpoint):
    path = checkpoint("llama")
    prompts = [prompt_of(n, n) for n in (40, 1, 9, 70, 3)]
    params = [SamplingParams(max_tokens=m, seed=m, ignore_eos=True) for m in (3, 30, 1, 12, 20)]
    outputs = generate(engine(path, max_num_seqs=3, max_num_batched_tokens=16), prompts, params)
    assert [o.prompt_token_ids for o in outputs] == prompts
    assert [len(o.completions[0].token_ids) for o in outputs] == [3, 30, 1, 12, 20]
    assert all(o.finished and o.completions[0].finish_reason == "length" for o in outputs)
    for prompt, setting, output in zip(prompts, params, outputs, strict=True):
        assert pairs(output) == pairs(generate(engine(path), [prompt], setting)[0])


def test_one_sampling_params_serves_all_prompts(llm):
    prompts, params = [prompt_of(5, 1), prompt_of(6, 2)], SamplingParams(max_tokens=6, seed=1)
    together = generate(llm, prompts, params)
    assert list(map(pairs, together)) == list(map(pairs, generate(llm, prompts, [params, params])))


def test_a_prompt_may_be_a_list_a_dict_or_a_tensor(llm):
    params = SamplingParams(max_tokens=6, seed=1)
    forms = [PROMPT, [PROMPT], {"prompt_token_ids": PROMPT}, [torch.tensor(PROMPT)], [tuple(PROMPT)]]
    outputs = [generate(llm, form, params) for form in forms]
    assert all(len(o) == 1 and pairs(o[0]) == pairs(outputs[0][0]) for o in outputs)
    assert generate(llm, [], params) == []


def test_without_sampling_params_the_defaults_apply(llm):
    assert len(one(llm, PROMPT, SamplingParams(ignore_eos=True)).token_ids) == 16
    assert len(llm.generate(PROMPT, use_tqdm=False)[0].completions[0].token_ids) <= 16


def test_samples_of_a_group_share_the_prompt(llm):
    prompt = prompt_of(75)
    output = generate(llm, [prompt], SamplingParams(n=6, max_tokens=5, seed=3, ignore_eos=True))[0]
    stats = llm.stats()
    assert stats.prompt_tokens_computed == 75, "the prompt was computed more than once"
    assert stats.generation_tokens == 30
    for i, completion in enumerate(output.completions):
        assert completion.index == i
        assert len(completion.token_ids) == len(completion.logprobs) == 5
    assert_idle(llm)


@pytest.mark.parametrize(
    "settings", [{"max_num_seqs": 1}, {"max_num_seqs": 2, "tokens": 96}, {"max_num_batched_tokens": 7}]
)
def test_a_group_is_the_same_whether_its_samples_run_together_or_one_by_one(checkpoint, settings):
    path, prompt, params = checkpoint("llama"), prompt_of(50), SamplingParams(n=5, max_tokens=20, seed=3)
    together = generate(engine(path), [prompt], params)[0]
    assert pairs(generate(engine(path, **settings), [prompt], params)[0]) == pairs(together)


def test_logprobs_are_the_trainers_bit_for_bit_at_any_temperature_in_bf16(checkpoint):
    """Exactness only at T = 1, because the trainer divides logits in bf16 (VeXact)."""
    path = checkpoint("qwen2")
    llm, model = engine(path, dtype="bfloat16"), exact_model(path, "bfloat16")
    for temperature in (0.3, 0.7, 1.0, 1.9):
        params = SamplingParams(n=2, temperature=temperature, max_tokens=20, seed=1)
        for c in generate(llm, [PROMPT], params)[0].completions:
            assert c.logprobs == trainer_logprobs(model, [PROMPT + c.token_ids], params)[0][len(PROMPT) :]


# --- streaming --------------------------------------------------------------------------------------------------------


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


def test_requests_submitted_at_any_time_are_not_disturbed_by_others(checkpoint):
    path, params = checkpoint("llama"), SamplingParams(max_tokens=12, seed=4)
    llm = engine(path, max_num_batched_tokens=9)
    prompts = {f"r{i}": prompt_of(3 * i + 1, i) for i in range(6)}
    last = {}
    for request_id, prompt in prompts.items():
        assert llm.add_request(prompt, params, request_id) == request_id
        for _ in range(2):
            last |= {out.request_id: out for out in llm.step()}
    last |= run_all(llm)
    for request_id, prompt in prompts.items():
        assert pairs(last[request_id]) == pairs(generate(engine(path), [prompt], params)[0])


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


def test_a_result_is_delivered_even_if_ctrl_c_came_during_its_last_step(llm, monkeypatch):
    params = SamplingParams(max_tokens=1, seed=2)
    request = llm.add_request(PROMPT, params)
    monkeypatch.setattr(
        llm.engine.executor.workers[0].runner, "run", Once(llm.engine.executor.workers[0].runner.run, 1, ctrl_c)
    )
    with pytest.raises(KeyboardInterrupt):
        llm.step()
    last = run_all(llm)
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


# --- prefix cache -----------------------------------------------------------------------------------------------------


def test_the_prefix_cache_saves_work_until_it_is_reset_or_off(checkpoint):
    llm, prompt, params = engine(checkpoint("llama")), prompt_of(100), SamplingParams(max_tokens=9, seed=1)
    cold = generate(llm, [prompt], params)[0]
    for expected in (96, 96 * 2):
        assert pairs(generate(llm, [prompt], params)[0]) == pairs(cold)
        assert llm.stats().prefix_hit_tokens == expected
    llm.reset_prefix_cache()
    assert pairs(generate(llm, [prompt], params)[0]) == pairs(cold)
    assert llm.stats().prefix_hit_tokens == 96 * 2
    off = engine(checkpoint("llama"), enable_prefix_caching=False)
    for _ in range(2):
        assert pairs(generate(off, [prompt], params)[0]) == pairs(cold)
    assert off.stats().prefix_hit_tokens == 0


def test_a_reset_of_the_prefix_cache_leaves_running_requests_alone(checkpoint):
    llm, params = engine(checkpoint("llama")), SamplingParams(n=2, max_tokens=40, seed=1, ignore_eos=True)
    expected = generate(llm, [prompt_of(50)], params)[0]
    request = llm.add_request(prompt_of(50), params)
    llm.step()
    llm.reset_prefix_cache()
    llm.engine.scheduler.check()
    assert pairs(run_all(llm)[request]) == pairs(expected)


# --- abort ------------------------------------------------------------------------------------------------------------


def test_abort_frees_the_blocks_and_harms_nobody(llm):
    params = SamplingParams(n=2, max_tokens=20, seed=1, ignore_eos=True)
    expected = generate(llm, [prompt_of(9, 1)], params)[0]
    gone, kept = llm.add_request(prompt_of(70, 2), params), llm.add_request(prompt_of(9, 1), params)
    for _ in range(3):
        llm.step()
    used = llm.stats().kv_blocks_used
    assert llm.abort(gone)
    llm.engine.scheduler.check()
    assert llm.stats().kv_blocks_used < used
    assert not llm.abort(gone), "it isn't there any more"
    last = run_all(llm)
    assert [len(c.token_ids) for c in last[gone].completions] == [3, 3], "what it had is not lost"
    assert {c.finish_reason for c in last[gone].completions} == {"abort"}
    assert pairs(last[kept]) == pairs(expected)
    assert_idle(llm)


def test_abort_before_the_siblings_of_a_group_started(checkpoint):
    llm = engine(checkpoint("llama"), max_num_batched_tokens=16)
    gone = llm.add_request(prompt_of(70), SamplingParams(n=4, max_tokens=20))
    kept = llm.add_request(PROMPT, SamplingParams(n=2, max_tokens=5, seed=1))
    llm.step()
    assert llm.stats().num_running == 1, "the siblings have started: this test proves nothing"
    assert llm.abort(gone)
    llm.engine.scheduler.check()
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


def test_abort_right_after_the_siblings_started_leaves_no_copy_that_hurts(checkpoint):
    """The new samples' copies of the partial block are still pending when their request goes."""
    llm = engine(checkpoint("llama"), tokens=256)
    params = SamplingParams(n=2, max_tokens=30, seed=1, ignore_eos=True)
    expected = generate(llm, [prompt_of(50, 1)], params)[0]
    kept = llm.add_request(prompt_of(50, 1), params)
    gone = llm.add_request(prompt_of(40, 2), SamplingParams(n=3, max_tokens=20))
    llm.step()
    assert llm.engine.scheduler.block_copies
    assert llm.abort(gone)
    late = llm.add_request(prompt_of(60, 3), params)
    last = run_all(llm)
    assert pairs(last[kept]) == pairs(expected)
    assert pairs(last[late]) == pairs(generate(llm, [prompt_of(60, 3)], params)[0])


def test_abort_of_a_request_that_waits_or_never_was(checkpoint):
    llm = engine(checkpoint("llama"), max_num_seqs=1)
    first, second = (llm.add_request(PROMPT, SamplingParams(max_tokens=5)) for _ in range(2))
    llm.step()
    assert llm.abort(second)
    assert not llm.abort("nobody")
    last = run_all(llm)
    assert {r: last[r].completions[0].finish_reason for r in last} == {first: "length", second: "abort"}
    assert_idle(llm)


# --- when a sample stops ----------------------------------------------------------------------------------------------


FREE = SamplingParams(max_tokens=12, seed=6, ignore_eos=True)


@pytest.fixture
def free(llm):
    """12 distinct tokens that nothing stopped."""
    tokens = one(llm, PROMPT, FREE).token_ids
    assert len(tokens) == len(set(tokens)) == 12
    assert 2 not in tokens
    return tokens


@pytest.mark.parametrize("where", ["generation_config", "config"])
def test_each_eos_of_a_list_ends_a_sample(checkpoint, tmp_path, free, where):
    """EOS list never matches (VeXact)."""
    ends = [next(t for t in range(VOCAB) if t not in free), free[7], free[4]]
    if where == "generation_config":
        path = copy_of(checkpoint("llama"), tmp_path, generation_config={"eos_token_id": ends})
    else:
        path = copy_of(checkpoint("llama"), tmp_path, eos_token_id=ends)
        (path / "generation_config.json").unlink()
    llm = engine(path)
    assert llm.eos_token_ids == tuple(ends)
    completion = one(llm, PROMPT, dataclasses.replace(FREE, ignore_eos=False))
    assert completion.token_ids == free[:5], "the terminal EOS is part of the result"
    assert completion.finish_reason == "stop"
    assert len(completion.logprobs) == 5
    assert one(llm, PROMPT, FREE).token_ids == free


def test_an_eos_of_id_0_counts(checkpoint, tmp_path):
    path = copy_of(checkpoint("llama"), tmp_path, generation_config={"eos_token_id": 0})
    assert engine(path).eos_token_ids == (0,)


def test_an_eos_outside_the_vocabulary_is_dropped(checkpoint, tmp_path):
    """min_tokens would ban it: a write outside the row of logits."""
    path = copy_of(checkpoint("llama"), tmp_path, generation_config={"eos_token_id": [2, VOCAB + 4000]})
    assert engine(path).eos_token_ids == (2,)


@pytest.mark.parametrize(
    "generation_config", [None, {"eos_token_id": [2, 9]}, {"temperature": 0.5}, {"eos_token_id": 0}]
)
def test_engine_and_trainer_ban_the_same_eos(checkpoint, tmp_path, generation_config):
    path = copy_of(checkpoint("llama"), tmp_path, generation_config=generation_config)
    if generation_config is None:
        (path / "generation_config.json").unlink()
    params = SamplingParams(n=2, max_tokens=10, min_tokens=10, seed=1)
    model = exact_model(path)
    for c in generate(engine(path), [PROMPT], params)[0].completions:
        expected = trainer_logprobs(model, [PROMPT + c.token_ids], params, prompt_lens=[len(PROMPT)])[0]
        assert c.logprobs == expected[len(PROMPT) :]


def test_a_stop_token_ends_a_sample_and_is_reported(llm, free):
    params = dataclasses.replace(FREE, stop_token_ids=[free[8], free[3]])
    completion = one(llm, PROMPT, params)
    assert completion.token_ids == free[:4]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", free[3])


def test_min_tokens_holds_eos_and_stop_tokens_off(checkpoint, tmp_path, free):
    llm = engine(copy_of(checkpoint("llama"), tmp_path, generation_config={"eos_token_id": [free[0]]}))
    params = dataclasses.replace(FREE, ignore_eos=False, stop_token_ids=[free[1]], n=20)
    assert one(llm, PROMPT, dataclasses.replace(params, n=1)).token_ids == free[:1]
    output = generate(llm, [PROMPT], dataclasses.replace(params, min_tokens=8))[0]
    assert all(len(c.token_ids) > 8 for c in output.completions)
    assert not any({free[0], free[1]} & set(c.token_ids[:8]) for c in output.completions)


def test_ignore_eos_goes_on_to_max_tokens(checkpoint, tmp_path, free):
    llm = engine(copy_of(checkpoint("llama"), tmp_path, generation_config={"eos_token_id": free}))
    completion = one(llm, PROMPT, FREE)
    assert (completion.token_ids, completion.finish_reason) == (free, "length")


def test_max_tokens_none_goes_on_to_max_model_len(checkpoint):
    llm = engine(checkpoint("llama"), max_model_len=45)
    completion = one(llm, PROMPT, SamplingParams(max_tokens=None, ignore_eos=True))
    assert (len(PROMPT) + len(completion.token_ids), completion.finish_reason) == (45, "length")
    completion = one(llm, PROMPT, SamplingParams(max_tokens=500, ignore_eos=True))
    assert len(PROMPT) + len(completion.token_ids) == 45


def test_a_request_may_fill_the_pool_to_its_last_slot(checkpoint):
    """A request that outgrows the pool preempts itself forever (VeXact): here it just doesn't outgrow it."""
    path, prompt = checkpoint("llama"), prompt_of(40)
    params = SamplingParams(max_tokens=57, seed=1, ignore_eos=True)  # 96 tokens of KV: the last needs none
    completion = one(engine(path, tokens=96), prompt, params)
    assert len(completion.token_ids) == 57
    assert completion == one(engine(path), prompt, params)


# --- what is reported -------------------------------------------------------------------------------------------------


SETTINGS = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.6},
    {"temperature": 1.4, "top_k": 6},
    {"top_p": 0.7},
    {"min_p": 0.1},
]


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
def test_prompt_logprobs_are_the_trainers_bit_for_bit_in_any_chunks(checkpoint, trainer, chunk, setting):
    llm = engine(checkpoint("llama"), max_num_batched_tokens=chunk)
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


def test_prompt_logprobs_survive_preemption(checkpoint, trainer):
    llm = engine(checkpoint("llama"), tokens=128, max_num_batched_tokens=20)
    params = SamplingParams(max_tokens=40, prompt_logprobs=True, ignore_eos=True, seed=1)
    prompts = [prompt_of(50, i) for i in range(4)]
    outputs = generate(llm, prompts, params)
    assert llm.stats().preemptions > 0
    assert [o.prompt_logprobs for o in outputs] == trainer_logprobs(trainer, prompts)


def test_scores_that_an_abort_cut_short_are_none(checkpoint):
    llm = engine(checkpoint("llama"), max_num_batched_tokens=20)
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


# --- weight updates ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """other(family) -> a checkpoint of the same shape as checkpoint(family), with other weights."""

    @functools.cache
    def get(family):
        return make_checkpoint(tmp_path_factory.mktemp("other") / "model", family, seed=1)

    return get


@pytest.fixture(scope="module")
def updated(other):
    return other("llama")


@pytest.mark.parametrize("source", ["module", "pairs", "directory"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])  # tied, untied
def test_after_an_update_the_engine_is_one_of_the_new_checkpoint(checkpoint, other, family, source):
    path = other(family)
    model = exact_model(path)
    llm, params = engine(checkpoint(family)), SamplingParams(n=2, max_tokens=9, seed=1)
    before = generate(llm, [PROMPT], params)[0]
    given = {"module": model, "pairs": model.state_dict().items(), "directory": path}[source]
    assert llm.update_weights(given) == llm.weight_version == llm.stats().weight_version == 1
    after = generate(llm, [PROMPT], params)[0]
    assert pairs(after) == pairs(generate(engine(path), [PROMPT], params)[0]) != pairs(before)
    assert all(c.weight_version == 1 for c in after.completions)


def test_an_update_during_generation_gives_version_spans_and_each_token_is_its_versions(checkpoint, updated, trainer):
    llm, new = engine(checkpoint("llama")), exact_model(updated)
    params = SamplingParams(n=2, max_tokens=12, seed=1, ignore_eos=True)
    request = llm.add_request(PROMPT, params)
    waiting = llm.add_request(prompt_of(9), SamplingParams(max_tokens=20, ignore_eos=True))
    for _ in range(5):
        llm.step()
    assert llm.update_weights(new, version=7) == 7
    llm.engine.scheduler.check()
    last = run_all(llm)
    for c in last[request].completions:
        assert c.weight_versions == [VersionSpan(0, 0, 5), VersionSpan(7, 5, 12)]
        assert c.weight_version == 7
        sequence, start = [PROMPT + c.token_ids], len(PROMPT)
        assert c.logprobs[:5] == trainer_logprobs(trainer, sequence)[0][start : start + 5]
        assert c.logprobs[5:] == trainer_logprobs(new, sequence)[0][start + 5 :]
    assert last[waiting].completions[0].weight_versions == [VersionSpan(0, 0, 5), VersionSpan(7, 5, 20)]


def test_an_update_before_the_siblings_of_a_group_started(checkpoint, updated):
    llm, params = engine(checkpoint("llama"), max_num_batched_tokens=16), SamplingParams(n=3, max_tokens=6, seed=1)
    request = llm.add_request(prompt_of(40), params)
    llm.step()
    llm.update_weights(exact_model(updated))
    output = run_all(llm)[request]
    assert pairs(output) == pairs(generate(engine(updated), [prompt_of(40)], params)[0])
    assert all(c.weight_versions == [VersionSpan(1, 0, len(c.token_ids))] for c in output.completions)


def test_kv_of_the_old_weights_is_never_hit_after_an_update(checkpoint, updated):
    """Old KV hit after a weight update (nano-vLLM users, NeMo-RL #4018)."""
    llm, prompt, params = engine(checkpoint("llama")), prompt_of(100), SamplingParams(max_tokens=9, seed=1)
    generate(llm, [prompt], params)
    generate(llm, [prompt], params)
    hits = llm.stats().prefix_hit_tokens
    assert hits == 96, "the prefix cache is off: this test proves nothing"
    llm.update_weights(exact_model(updated))
    output = generate(llm, [prompt], params)[0]
    assert llm.stats().prefix_hit_tokens == hits
    assert pairs(output) == pairs(generate(engine(updated), [prompt], params)[0])
    generate(llm, [prompt], params)
    assert llm.stats().prefix_hit_tokens == hits + 96, "new prefixes are found again"


def test_prompt_logprobs_belong_to_one_weight_version(checkpoint, updated, trainer):
    llm, new, prompt = engine(checkpoint("llama"), max_num_batched_tokens=16), exact_model(updated), prompt_of(60)
    request = llm.add_request(prompt, SamplingParams(max_tokens=2, prompt_logprobs=True))
    llm.step()
    llm.update_weights(new)
    scores = run_all(llm)[request].prompt_logprobs
    assert scores in (trainer_logprobs(trainer, [prompt])[0], trainer_logprobs(new, [prompt])[0])


def test_weights_in_fp32_are_rounded_to_a_bf16_engine(checkpoint, updated):
    llm, params = engine(checkpoint("llama"), dtype="bfloat16"), SamplingParams(max_tokens=9, seed=1)
    llm.update_weights(exact_model(updated, "float32"))
    expected = generate(engine(updated, dtype="bfloat16"), [PROMPT], params)[0]
    assert pairs(generate(llm, [PROMPT], params)[0]) == pairs(expected)


@pytest.mark.parametrize("family", ["llama", "llama3-bias", "qwen2", "qwen3", "mistral"])
def test_the_trainer_may_change_its_weights_in_place_after_an_update(checkpoint, other, family):
    llm, model, params = engine(checkpoint(family)), exact_model(other(family)), SamplingParams(max_tokens=9, seed=1)
    llm.update_weights(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    assert pairs(generate(llm, [PROMPT], params)[0]) == pairs(generate(engine(other(family)), [PROMPT], params)[0])


def test_ctrl_c_during_an_update_leaves_one_whole_version(checkpoint, updated):
    def source():
        for i, pair in enumerate(exact_model(updated).state_dict().items()):
            if i == 9:
                ctrl_c()
            yield pair

    llm, params = engine(checkpoint("llama")), SamplingParams(max_tokens=9, seed=1)
    with pytest.raises(KeyboardInterrupt):
        llm.update_weights(source())
    path = [checkpoint("llama"), updated][llm.weight_version]
    assert pairs(generate(llm, [PROMPT], params)[0]) == pairs(generate(engine(path), [PROMPT], params)[0])


def test_a_slow_update_can_be_interrupted(checkpoint, updated):
    def source():
        for i, pair in enumerate(exact_model(updated).state_dict().items()):
            if i == 3:
                ctrl_c()
                time.sleep(0.01)
            assert i <= 4, "the interrupt was held back until the source ended"
            yield pair

    llm = engine(checkpoint("llama"))
    with pytest.raises(KeyboardInterrupt):
        llm.update_weights(source())
    assert llm.weight_version == 0


def test_a_trainer_with_other_numerics_is_refused(checkpoint, updated):
    llm = engine(checkpoint("llama"))
    with pytest.raises(NumericsError, match="linear: 'bias, then fp32 fma over ascending K' here, 'torch' there"):
        llm.update_weights(exact_model(updated, exact=False))
    with pytest.raises(NumericsError, match=r"LlamaForCausalLM is not from .*exact_model.*state_dict"):
        llm.update_weights(AutoModelForCausalLM.from_pretrained(updated))
    with pytest.raises(NumericsError, match="dtype: 'float32' here, 'bfloat16' there"):
        llm.update_weights(exact_model(updated, "bfloat16"))
    assert llm.weight_version == 0
    assert llm.update_weights(AutoModelForCausalLM.from_pretrained(updated).state_dict().items()) == 1


def test_an_engine_takes_an_update_from_its_own_checkpoint_in_another_dtype(checkpoint, tmp_path):
    AutoModelForCausalLM.from_pretrained(checkpoint("llama"), dtype=torch.bfloat16).save_pretrained(tmp_path)
    path = tmp_path
    llm, params = engine(path), SamplingParams(max_tokens=9, seed=1)
    before = pairs(generate(llm, [PROMPT], params)[0])
    assert llm.update_weights(path) == 1
    assert pairs(generate(llm, [PROMPT], params)[0]) == before


DOWN, UP, NORM = (f"model.{part}.weight" for part in ("layers.1.mlp.down_proj", "layers.1.mlp.up_proj", "norm"))


def with_value(tensor, index, value):
    tensor = tensor.clone()
    tensor[index] = value
    return tensor


DAMAGE = {  # what becomes of a good state dict, and what the error says
    "shape": (lambda s: {**s, NORM: s[NORM][:-1]}, r"model\.norm\.weight.*shape \[99\], expected \[100\]"),
    "transposed": (lambda s: {**s, UP: s[UP].t()}, r"up_proj\.weight.*shape \[100, 172\], expected \[172, 100\]"),
    "dtype": (lambda s: {**s, NORM: s[NORM].double()}, r"model\.norm\.weight.*float64, expected one of"),
    "unknown": (lambda s: {**s, "model.extra.weight": s[NORM]}, r"unknown tensor 'model\.extra\.weight'"),
    "missing": (lambda s: {k: v for k, v in s.items() if k != DOWN}, r"missing.*layers\.1\.mlp\.down_proj\.weight"),
    "nan": (lambda s: {**s, DOWN: with_value(s[DOWN], (3, 5), float("nan"))}, r"down_proj\.weight.*NaN"),
    "infinite": (lambda s: {**s, NORM: with_value(s[NORM], 0, float("inf"))}, r"model\.norm\.weight.*infinity"),
    "no tensor": (lambda s: {**s, NORM: [1.0] * 100}, r"model\.norm\.weight.*list"),
    "empty": (lambda s: {}, r"missing"),
}


def assert_refused(llm, source, message):
    """The update is refused, and the old weights serve on under the old version."""
    params = SamplingParams(n=2, max_tokens=9, seed=1)
    before = generate(llm, [PROMPT], params)[0]
    running = llm.add_request(PROMPT, params)
    llm.step()
    with pytest.raises(WeightUpdateError, match=message):
        llm.update_weights(source)
    assert llm.weight_version == 0
    assert pairs(run_all(llm)[running]) == pairs(before)
    assert pairs(generate(llm, [PROMPT], params)[0]) == pairs(before)
    assert_idle(llm)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_update_is_refused_and_the_old_weights_serve_on(checkpoint, other, family, kind):
    damage, message = DAMAGE[kind]
    state = exact_model(other(family)).state_dict()
    assert_refused(engine(checkpoint(family)), damage(state).items(), message)


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.mlp.up_proj.weight"])
def test_a_tensor_given_twice_is_refused(checkpoint, updated, name):
    state = exact_model(updated).state_dict()
    assert_refused(engine(checkpoint("llama")), [*state.items(), (name, state[name])], f"{name}' was given twice")


def test_tied_tensors_that_differ_are_refused(checkpoint, updated):
    state = exact_model(updated).state_dict()
    state["lm_head.weight"] = state["lm_head.weight"] + 1
    assert_refused(engine(checkpoint("llama")), state.items(), "lm_head.weight")


@pytest.mark.parametrize("name", ["lm_head.weight", "model.embed_tokens.weight"])
def test_one_name_of_a_tied_pair_is_enough(checkpoint, updated, name):
    state = exact_model(updated).state_dict()
    del state[name]
    llm, params = engine(checkpoint("llama")), SamplingParams(max_tokens=9, seed=1)
    llm.update_weights(state.items())
    assert pairs(generate(llm, [PROMPT], params)[0]) == pairs(generate(engine(updated), [PROMPT], params)[0])


def test_a_source_that_fails_midway_changes_nothing(checkpoint, updated):
    def source():
        for i, pair in enumerate(exact_model(updated).state_dict().items()):
            if i == 9:
                raise ConnectionError("the sender went away")
            yield pair

    llm, params = engine(checkpoint("llama")), SamplingParams(max_tokens=9, seed=1)
    before = generate(llm, [PROMPT], params)[0]
    with pytest.raises(ConnectionError, match="went away"):
        llm.update_weights(source())
    assert llm.weight_version == 0
    assert pairs(generate(llm, [PROMPT], params)[0]) == pairs(before)


def test_a_module_of_another_architecture_is_refused(checkpoint):
    assert_refused(engine(checkpoint("llama")), exact_model(checkpoint("qwen3")), "unknown tensor")


def test_a_directory_with_a_truncated_file_is_refused(checkpoint, updated, tmp_path):
    path = copy_of(updated, tmp_path)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    llm, params = engine(checkpoint("llama")), SamplingParams(max_tokens=9, seed=1)
    before = generate(llm, [PROMPT], params)[0]
    with pytest.raises((WeightUpdateError, CheckpointError), match="truncated"):
        llm.update_weights(path)
    assert llm.weight_version == 0
    assert pairs(generate(llm, [PROMPT], params)[0]) == pairs(before)


@pytest.mark.parametrize("version", [0, -1, True, 1.5, "2"])
def test_a_version_that_does_not_ascend_is_refused(llm, trainer, version):
    with pytest.raises(ValueError, match="version must be an integer above 0"):
        llm.update_weights(trainer, version=version)
    assert llm.weight_version == 0


def test_a_version_too_large_to_handle_is_refused_before_anything_changes(checkpoint, updated):
    llm, params = engine(checkpoint("llama")), SamplingParams(max_tokens=9, seed=1)
    before = generate(llm, [PROMPT], params)[0]
    with pytest.raises(ValueError, match=r"below 2\^63"):
        llm.update_weights(exact_model(updated), version=2**200)
    assert llm.weight_version == 0
    assert pairs(generate(llm, [PROMPT], params)[0]) == pairs(before)


# --- interrupts and failures ------------------------------------------------------------------------------------------


LOOP_FAILURES = {
    "KeyboardInterrupt in the model": (fail(KeyboardInterrupt()), KeyboardInterrupt),
    "Ctrl-C during a step": (ctrl_c, KeyboardInterrupt),
    "error in the model": (fail(RuntimeError("out of luck")), RuntimeError),
    "out of memory": (fail(MemoryError()), MemoryError),
}


@pytest.mark.parametrize("name", LOOP_FAILURES)
@pytest.mark.parametrize("at", [1, 2, 6])
def test_a_failure_reaches_the_caller_of_generate_and_the_engine_stays_usable(checkpoint, monkeypatch, name, at):
    what, error = LOOP_FAILURES[name]
    llm = engine(checkpoint("llama"), max_num_batched_tokens=40)
    prompts = [prompt_of(60, 1), prompt_of(60, 1), prompt_of(5, 2)]
    params = SamplingParams(n=3, max_tokens=15, seed=1, ignore_eos=True)
    expected = generate(engine(checkpoint("llama")), prompts, params)
    long = SamplingParams(n=2, max_tokens=200, seed=1, ignore_eos=True)  # outlives the calls of generate
    queued = llm.add_request(prompt_of(9), long)
    llm.step()
    handler = signal.getsignal(signal.SIGINT)
    assert handler is signal.default_int_handler, "pytest has a handler of its own: Ctrl-C is not tested"
    monkeypatch.setattr(
        llm.engine.executor.workers[0].runner, "run", Once(llm.engine.executor.workers[0].runner.run, at, what)
    )
    with pytest.raises(error):
        generate(llm, prompts, params)
    assert signal.getsignal(signal.SIGINT) is handler
    llm.engine.scheduler.check()
    assert set(llm.engine.requests) == {queued}, "the call's own requests are gone, the others stay"
    assert llm.stats().num_running + llm.stats().num_waiting == 2
    again = generate(llm, prompts, params)
    assert list(map(pairs, again)) == list(map(pairs, expected))
    assert pairs(run_all(llm)[queued]) == pairs(generate(engine(checkpoint("llama")), [prompt_of(9)], long)[0])
    assert_idle(llm)


def test_ctrl_c_while_requests_are_submitted_leaves_none_behind(llm, monkeypatch):
    add = llm.engine.scheduler.add
    monkeypatch.setattr(llm.engine.scheduler, "add", lambda seq: (add(seq), seq.seq_id == 1 and ctrl_c()))
    with pytest.raises(KeyboardInterrupt):
        generate(llm, [PROMPT, PROMPT, PROMPT], SamplingParams(max_tokens=3))
    assert_idle(llm)


def test_a_failure_in_step_reaches_the_caller_and_the_requests_go_on(llm, monkeypatch):
    params = SamplingParams(n=2, max_tokens=9, seed=1, ignore_eos=True)
    expected = generate(llm, [PROMPT], params)[0]
    request = llm.add_request(PROMPT, params)
    llm.step()
    monkeypatch.setattr(
        llm.engine.executor.workers[0].runner,
        "run",
        Once(llm.engine.executor.workers[0].runner.run, 1, fail(RuntimeError("out of luck"))),
    )
    with pytest.raises(RuntimeError, match="out of luck"):
        llm.step()
    assert pairs(run_all(llm)[request]) == pairs(expected)


def test_a_failure_while_one_request_takes_its_token_harms_no_other(llm, monkeypatch):
    params = SamplingParams(max_tokens=9, seed=1, ignore_eos=True)
    expected = generate(llm, [PROMPT], params)[0]
    failing, other = llm.add_request(prompt_of(9), params), llm.add_request(PROMPT, params)
    llm.step()
    real = Request.check_stop

    def check_stop(self, sample, tokenizer):
        if self.request_id == failing:
            raise ValueError("the tokenizer can't decode this")
        real(self, sample, tokenizer)

    monkeypatch.setattr(Request, "check_stop", check_stop)
    last = run_all(llm)
    failed = last[failing].completions[0]
    assert (failed.finish_reason, failed.stop_reason) == ("error", "ValueError: the tokenizer can't decode this")
    assert pairs(last[other]) == pairs(expected)
    assert_idle(llm)


def with_nan(source, folder, name, row):
    """A copy of a checkpoint with NaN in one row of a tensor."""
    path = copy_of(source, folder)
    state = load_file(path / "model.safetensors")
    state[name][row] = float("nan")
    save_file(state, path / "model.safetensors", metadata={"format": "pt"})
    return path


def test_nan_ends_its_request_with_an_error_and_the_others_go_on(checkpoint, caplog):
    llm = engine(checkpoint("qwen3"))
    llm.engine.executor.workers[0].runner.model.get_input_embeddings().weight.data[77] = float("nan")
    params = SamplingParams(max_tokens=6, seed=1)
    expected = generate(engine(checkpoint("qwen3")), [PROMPT], params)[0]
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
    llm.engine.executor.workers[0].runner.head.bias = torch.nn.Parameter(torch.zeros(VOCAB))
    llm.engine.executor.workers[0].runner.head.bias.data[500] = float("nan")
    assert generate(llm, [PROMPT], SamplingParams(max_tokens=3))[0].completions[0].finish_reason == "error"
    assert_idle(llm)


def test_a_checkpoint_with_nan_is_not_blamed_on_the_cpu(checkpoint, tmp_path):
    path = with_nan(checkpoint("qwen3"), tmp_path, "lm_head.weight", 5)
    with pytest.raises(CheckpointError, match=r"'lm_head\.weight' holds NaN"):
        engine(path)


def test_a_handler_of_the_callers_own_runs_after_the_step(llm, monkeypatch):
    """An exception from it in the middle of a step would leave half a step behind."""
    calls = []
    before = signal.signal(signal.SIGINT, lambda *_: calls.append(llm.stats().generation_tokens))
    try:
        real = Sample.append
        monkeypatch.setattr(Sample, "append", lambda *a: (ctrl_c(), real(*a)))
        llm.add_request(PROMPT, SamplingParams(n=3, max_tokens=4, ignore_eos=True))
        llm.step()
    finally:
        signal.signal(signal.SIGINT, before)
    assert calls == [3], "not held back until all three samples had their token"


def test_an_error_while_reporting_loses_no_result(llm, monkeypatch):
    request = llm.add_request(PROMPT, SamplingParams(max_tokens=1))
    with monkeypatch.context() as patch:
        patch.setattr(Request, "take_output", lambda *_: ctrl_c())
        with pytest.raises(KeyboardInterrupt):
            llm.step()
    assert llm.has_unfinished_requests()
    assert [o.request_id for o in llm.step()] == [request]


def test_a_failed_step_counts_nothing(llm, monkeypatch):
    llm.add_request(prompt_of(20), SamplingParams(max_tokens=1))
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.executor.workers[0].runner, "run", lambda *args: 1 / 0)
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                llm.step()
    run_all(llm)
    assert (llm.stats().steps, llm.stats().prompt_tokens_computed) == (1, 20)


def test_a_broken_tokenizer_is_refused_at_once_and_can_be_done_without(checkpoint, tmp_path):
    path = copy_of(checkpoint("llama"), tmp_path)
    (path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer in .* does not load.*skip_tokenizer_init=True"):
        engine(path)
    assert one(engine(path, skip_tokenizer_init=True), PROMPT, SamplingParams(max_tokens=2)).text is None


# --- bad input --------------------------------------------------------------------------------------------------------


BAD_PROMPTS = [
    (prompt_of(512), ValueError, r"512 tokens leaves no room in max_model_len 512"),
    (prompt_of(600), ValueError, r"600 tokens leaves no room in max_model_len 512"),
    (
        prompt_of(300),
        ValueError,
        r"can't fit the KV cache of 256 tokens; lower max_tokens or raise kv_cache_memory_bytes",
    ),
    (prompt_of(250), ValueError, r"prompt of 250 tokens \+ max_tokens 16 can't fit"),
    ([], ValueError, r"empty prompt: at least one token"),
    ({"prompt_token_ids": []}, ValueError, r"empty prompt"),
    ([5, -1], ValueError, r"token id -1 is out of range; the vocabulary has 1001"),
    ([5, VOCAB], ValueError, r"token id 1001 is out of range"),
    ([5, 2**70], ValueError, r"out of range"),
    ([5, 1.0], TypeError, r"must be integers, got 1\.0"),
    ([5, True], TypeError, r"must be integers, got True"),
    ([5, None], TypeError, r"must be integers, got None"),
    ([5, "6"], TypeError, r"must be integers, got '6'"),
    (torch.tensor([0.5]), TypeError, r"must be integers, got 0\.5"),
    ({"text": "hello"}, ValueError, r"'prompt' or 'prompt_token_ids', .*got \['text'\]"),
    ({"prompt": "hello"}, ValueError, r"string prompts need a tokenizer.*give token ids"),
    ("hello", ValueError, r"string prompts need a tokenizer.*give token ids"),
]


@pytest.mark.parametrize(("prompt", "error", "message"), BAD_PROMPTS, ids=[f"{m}"[:40] for *_, m in BAD_PROMPTS])
def test_a_bad_prompt_is_refused_before_anything_starts(checkpoint, prompt, error, message):
    """Among them: a prompt larger than the pool livelocks (VeXact)."""
    llm, params = engine(checkpoint("llama"), tokens=256), SamplingParams(seed=1)
    expected = pairs(generate(llm, [PROMPT], params)[0])
    with pytest.raises(error, match=message):
        generate(llm, [PROMPT, prompt], params)
    with pytest.raises(error, match=message):
        llm.add_request(prompt, params)
    assert not llm.has_unfinished_requests(), "a neighbour of the bad prompt was started"
    queued = llm.add_request(PROMPT, params)
    llm.step()
    with pytest.raises(error, match=message):
        generate(llm, [PROMPT, prompt, PROMPT], params)
    assert set(llm.engine.requests) == {queued}
    assert pairs(run_all(llm)[queued]) == expected
    assert_idle(llm)


def test_a_tensor_is_a_prompt_like_its_list(llm):
    params = SamplingParams(max_tokens=3, seed=1)
    expected = list(map(pairs, generate(llm, PROMPT, params)))
    for prompt in (torch.tensor(PROMPT), [torch.tensor(PROMPT)], {"prompt_token_ids": torch.tensor(PROMPT)}):
        assert list(map(pairs, generate(llm, prompt, params))) == expected


BAD_PARAMS = [
    ({"max_tokens": 0}, ValueError, "max_tokens must be at least 1"),
    ({"max_tokens": -3}, ValueError, "max_tokens must be at least 1"),
    ({"max_tokens": 2.0}, TypeError, "max_tokens must be an integer"),
    ({"n": 0}, ValueError, "n must be at least 1 and at most 4096"),
    ({"n": 5000}, ValueError, "n must be at least 1 and at most 4096, got 5000"),
    ({"n": True}, TypeError, "n must be an integer"),
    ({"temperature": float("nan")}, ValueError, "temperature must be in"),
    ({"temperature": float("inf")}, ValueError, "temperature must be in"),
    ({"temperature": -0.1}, ValueError, "temperature must be in"),
    ({"temperature": "1"}, TypeError, "temperature must be a number"),
    ({"temperature": None}, TypeError, "temperature must be a number"),
    ({"top_p": 0}, ValueError, r"top_p must be in \(0"),
    ({"top_p": 1.5}, ValueError, "top_p must be in"),
    ({"top_p": float("nan")}, ValueError, "top_p must be in"),
    ({"top_k": -2}, ValueError, "top_k must be at least -1"),
    ({"top_k": 1.5}, TypeError, "top_k must be an integer"),
    ({"min_p": 2}, ValueError, "min_p must be in"),
    ({"min_p": -0.1}, ValueError, "min_p must be in"),
    ({"min_tokens": -1}, ValueError, "min_tokens must be at least 0"),
    ({"min_tokens": 17}, ValueError, "min_tokens must be at least 0 and at most 16"),
    ({"logprobs": -1}, ValueError, "logprobs must be at least 0"),
    ({"logprobs": 5000}, ValueError, "at most 1000"),
    ({"seed": "7"}, TypeError, "seed must be an integer"),
    ({"seed": 2**64}, ValueError, "seed must be at least"),
    ({"stop": [""]}, ValueError, "stop must be non-empty strings"),
    ({"stop": [5]}, ValueError, "stop must be non-empty strings"),
    ({"stop_token_ids": [-1]}, ValueError, "stop_token_ids must be at least 0"),
    ({"stop_token_ids": ["a"]}, TypeError, "stop_token_ids must be an integer"),
    ({"ignore_eos": 1}, TypeError, "ignore_eos must be a bool"),
    ({"prompt_logprobs": -1}, ValueError, "prompt_logprobs must be at least 0"),
    ({"detokenize": 0}, TypeError, "detokenize must be a bool"),
    ({"detokenize": False, "stop": "x"}, ValueError, "need detokenize=True"),
    ({"output_kind": "delta"}, TypeError, "output_kind must be a RequestOutputKind"),
    ({"raw_logprobs": "yes"}, TypeError, "raw_logprobs must be a bool"),
    ({"temprature": 1.0}, TypeError, "temprature"),
    ({"use_beam_search": True}, TypeError, "use_beam_search"),
]


@pytest.mark.parametrize(("setting", "error", "message"), BAD_PARAMS, ids=[str(s) for s, *_ in BAD_PARAMS])
def test_a_bad_sampling_parameter_is_refused_by_name(setting, error, message):
    with pytest.raises(error, match=message):
        SamplingParams(**setting)


def test_sampling_params_are_frozen_all_through():
    ids = [5]
    params = SamplingParams(stop_token_ids=ids, stop="x")
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 2.0
    ids.append(10**9)
    assert (params.stop_token_ids, params.stop) == ((5,), ("x",))
    assert hash(params) == hash(SamplingParams(stop_token_ids=[5], stop=["x"]))


@pytest.mark.parametrize("temperature", [1e-40, 1e-46, 5e-324])
def test_a_temperature_too_small_for_fp32_is_refused(temperature):
    with pytest.raises(ValueError, match=r"temperature must be 0 \(greedy\) or at least 1e-06"):
        SamplingParams(temperature=temperature)


def test_what_only_the_engine_can_check_of_the_sampling_params_is_refused(llm):
    with pytest.raises(ValueError, match=r"stop_token_ids \[1001\] are out of range; the vocabulary has 1001"):
        generate(llm, [PROMPT], SamplingParams(stop_token_ids=[5, VOCAB]))
    with pytest.raises(ValueError, match=r"stop strings need a tokenizer"):
        generate(llm, [PROMPT], SamplingParams(stop="\n"))
    with pytest.raises(ValueError, match=r"2 prompts but 1 sampling_params; give one, or one per prompt"):
        generate(llm, [PROMPT, PROMPT], [SamplingParams()])
    with pytest.raises(TypeError, match=r"sampling_params must be SamplingParams, got dict"):
        llm.add_request(PROMPT, {"max_tokens": 5})
    llm.add_request(PROMPT, SamplingParams(), "mine")
    with pytest.raises(ValueError, match="'mine' is in use"):
        llm.add_request(PROMPT, SamplingParams(), "mine")
    assert set(llm.engine.requests) == {"mine"}


BAD_SETTINGS = [
    ({"tensor_parallel_size": 2}, TypeError, "tensor_parallel_size"),
    ({"max_num_seq": 5}, TypeError, "max_num_seq"),
    ({"dtype": "float64"}, ValueError, r"float64 is not supported on cpu; supported: float32, bfloat16, float16"),
    ({"dtype": "int8"}, ValueError, "supported: float32, bfloat16, float16"),
    ({"dtype": "nonsense"}, ValueError, "supported: float32, bfloat16, float16"),
    ({"device": "meta"}, NotImplementedError, "no kernels for device 'meta'; supported: cpu"),
    ({"max_num_seqs": 0}, ValueError, "max_num_seqs must be positive"),
    ({"max_num_batched_tokens": -5}, ValueError, "max_num_batched_tokens must be positive"),
    ({"max_model_len": 1000}, ValueError, "max_model_len 1000 exceeds the model's 512 positions"),
    ({"max_model_len": 0}, ValueError, "max_model_len must be positive"),
    ({"max_num_seqs": "8"}, TypeError, "max_num_seqs must be an integer"),
    ({"kv_cache_memory_bytes": 100}, ValueError, r"kv_cache_memory_bytes is less than one block of \d+ bytes"),
    ({"linear_route": "cublas"}, ValueError, "linear_route 'cublas'; choose one of fma, mkl"),
    ({"enable_prefix_caching": "no"}, TypeError, "enable_prefix_caching must be a bool"),
    ({"exact": "false"}, TypeError, "exact must be a bool"),
]


@pytest.mark.parametrize(("setting", "error", "message"), BAD_SETTINGS, ids=[str(s) for s, *_ in BAD_SETTINGS])
def test_a_bad_engine_setting_is_refused_by_name(checkpoint, setting, error, message):
    with pytest.raises(error, match=message):
        LLM(checkpoint("llama"), **setting)


# --- models that can't be served --------------------------------------------------------------------------------------


TINY = {k: v for k, v in AWKWARD.items() if k != "head_dim"}
UNSUPPORTED = [
    (GPT2Config(n_embd=20, n_layer=1, n_head=2), r"'gpt2'; supported: llama, mistral, qwen2, qwen3"),
    (MixtralConfig(**TINY), r"'mixtral'; supported"),
    (Qwen3MoeConfig(**TINY), r"'qwen3_moe'; supported"),
]


@pytest.mark.parametrize(("config", "message"), UNSUPPORTED, ids=["gpt2", "mixtral", "qwen3_moe"])
def test_a_family_without_exact_ops_is_refused_by_name(tmp_path, config, message):
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=message):
        LLM(tmp_path)


CONFIG_FAULTS = [
    ({"model_type": "unheard_of"}, "unheard_of"),
    (
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        "rope type 'dynamic' changes with",
    ),
    ({"hidden_act": "relu"}, "activation 'relu'; supported: "),
    ({"attention_dropout": 0.1}, "attention_dropout > 0"),
    ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}, "quantised weights"),
]


@pytest.mark.parametrize(("config", "message"), CONFIG_FAULTS, ids=[str(c)[:30] for c, _ in CONFIG_FAULTS])
def test_a_config_that_asks_for_an_inexact_op_is_refused(checkpoint, tmp_path, config, message):
    with pytest.raises(UnsupportedModelError, match=message):
        LLM(copy_of(checkpoint("llama"), tmp_path, **config))


def test_an_unknown_module_is_refused_by_name_and_nothing_is_changed(checkpoint):
    class Router(torch.nn.Module):
        pass

    model = AutoModelForCausalLM.from_pretrained(checkpoint("llama"))
    model.model.layers[1].mlp.gate = Router()
    kinds = [type(m) for m in model.modules()]
    with pytest.raises(UnsupportedModelError, match=r"'model\.layers\.1\.mlp\.gate' is a Router"):
        make_exact(model)
    assert [type(m) for m in model.modules()] == kinds


def break_missing(state):
    del state["model.layers.1.mlp.up_proj.weight"]


def break_extra(state):
    state["model.layers.7.mlp.up_proj.weight"] = torch.zeros(3, 3)


def break_shape(state):
    state["model.layers.1.mlp.up_proj.weight"] = torch.zeros(172, 99)


BROKEN = [
    (break_missing, r"missing.*layers\.1\.mlp\.up_proj\.weight"),
    (break_extra, r"unexpected.*layers\.7\.mlp\.up_proj\.weight"),
    (break_shape, r"layers\.1\.mlp\.up_proj\.weight"),
]


@pytest.mark.parametrize(("fault", "message"), BROKEN, ids=["missing", "extra", "shape"])
def test_a_checkpoint_that_does_not_fit_its_config_is_refused_by_tensor(checkpoint, tmp_path, fault, message):
    path = copy_of(checkpoint("llama"), tmp_path)
    state = load_file(path / "model.safetensors")
    fault(state)
    save_file(state, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=message):
        LLM(path)


@pytest.mark.parametrize("keep", [0, 4, 100, -100])
def test_a_truncated_file_is_refused_by_name(checkpoint, tmp_path, keep):
    path = copy_of(checkpoint("llama"), tmp_path)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated"):
        LLM(path)


@pytest.fixture(scope="module")
def shards(checkpoint, tmp_path_factory):
    path = tmp_path_factory.mktemp("sharded") / "model"
    AutoModelForCausalLM.from_pretrained(checkpoint("llama")).save_pretrained(path, max_shard_size="200KB")
    assert len(list(path.glob("*.safetensors"))) > 2
    return path


def test_a_sharded_checkpoint_is_the_same_model(llm, shards):
    params = SamplingParams(max_tokens=9, seed=1)
    assert pairs(generate(engine(shards), [PROMPT], params)[0]) == pairs(generate(llm, [PROMPT], params)[0])


def test_a_shard_that_is_not_there_is_refused_by_name(shards, tmp_path):
    path = copy_of(shards, tmp_path)
    gone = sorted(path.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(CheckpointError, match=rf"{gone.name} is named in .* but does not exist"):
        LLM(path)


def test_a_path_without_a_checkpoint_is_refused_with_what_was_expected(checkpoint, tmp_path):
    with pytest.raises(CheckpointError, match="no such directory"):
        LLM(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"has no config\.json; expected a HuggingFace checkpoint"):
        LLM(tmp_path)
    path = copy_of(checkpoint("llama"), tmp_path)
    (path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="has no safetensors files"):
        LLM(path)


# --- text -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def spelling(checkpoint, tmp_path_factory):
    """A checkpoint with a tokenizer: token i is spelled with three letters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    path = tmp_path_factory.mktemp("spelling") / "model"
    shutil.copytree(checkpoint("llama"), path)
    letters = string.ascii_lowercase
    words = [letters[i // 26 % 26] + letters[i % 26] + letters[25 - i // 676] for i in range(VOCAB)]
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token=words[0]))
    core.pre_tokenizer = pre_tokenizers.Split("---", "removed")
    core.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=core).save_pretrained(path)
    return path, words


class Pieces:
    """A tokenizer by its pieces."""

    def __init__(self, *pieces):
        self.pieces = [p.encode() if isinstance(p, str) else p for p in pieces]

    def decode(self, ids, skip_special_tokens):
        return b"".join(self.pieces[i] for i in ids).decode(errors="replace")


def run_stops(pieces, stop, min_tokens=0):
    """Feeds the pieces one token at a time: (finish text or None, what was shown after each token)."""
    params = SamplingParams(stop=stop, min_tokens=min_tokens, max_tokens=100)
    request = Request("r", None, [0], params, 0, ())
    sample = Sample(request, 0, 100, False)
    request.samples.append(sample)
    tokenizer, shown = Pieces(*pieces), []
    for token in range(len(pieces)):
        sample.append(SampledToken(token, 0.0), 0)
        request.check_stop(sample, tokenizer)
        shown.append(request.take_output(tokenizer).completions[0].text)
        if sample.finish_reason:
            return sample.text, sample.stop_reason, shown
    return None, None, shown


def test_a_stop_string_may_end_behind_tokens_without_text():
    assert run_stops(["xa", "", "", "", "", "b"], "ab")[:2] == ("x", "ab")


def test_a_stop_string_within_min_tokens_does_not_count_later():
    assert run_stops(["A", "x", "y", "B", "z"], ["A", "B"], min_tokens=3)[:2] == ("Axy", "B")


def test_the_earliest_stop_string_of_a_step_counts():
    assert run_stops(["a", "bXcY"], ["Y", "X"])[:2] == ("ab", "X")


def test_streamed_text_only_grows_and_never_shows_part_of_a_stop_string_or_character():
    text, _, shown = run_stops(["one E", "N", "x EN", "\u00e9"[:0], b"\xc3", b"\xa9", "E", "ND"], "END")
    assert text == "one ENx EN\u00e9"
    assert all(b.startswith(a) for a, b in itertools.pairwise(shown))
    assert shown == ["one ", "one ", "one ENx ", "one ENx ", "one ENx ", "one ENx EN\u00e9", "one ENx EN\u00e9", text]


def test_without_a_tokenizer_token_ids_work_and_strings_are_refused_with_advice(llm):
    assert one(llm, PROMPT, SamplingParams(max_tokens=3)).text is None
    for call in (
        lambda: generate(llm, ["hello"], SamplingParams()),
        lambda: generate(llm, "hello", SamplingParams()),
        lambda: llm.chat([{"role": "user", "content": "hello"}], SamplingParams()),
        lambda: generate(llm, [PROMPT], SamplingParams(stop=["x"])),
    ):
        with pytest.raises(ValueError, match=r"a tokenizer, and .* has none; give token ids"):
            call()
    assert not llm.has_unfinished_requests()


def test_a_stop_string_is_cut_from_the_text_and_its_tokens_stay(spelling, free):
    path, words = spelling
    llm = engine(path)
    whole = one(llm, PROMPT, FREE)
    assert (whole.token_ids, whole.text) == (free, "".join(words[t] for t in free))
    stop = words[free[4]][1:] + words[free[5]] + words[free[6]][:1]  # from within a token to within a token
    completion = one(llm, PROMPT, dataclasses.replace(FREE, stop=["no such", stop]))
    assert completion.token_ids == free[:7]
    assert completion.text == whole.text[: whole.text.index(stop)]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert completion.logprobs == whole.logprobs[:7]


def test_skip_tokenizer_init_reads_no_tokenizer(spelling):
    llm = engine(spelling[0], skip_tokenizer_init=True)
    assert one(llm, PROMPT, SamplingParams(max_tokens=3)).text is None
    with pytest.raises(ValueError, match="string prompts need a tokenizer"):
        generate(llm, "hello", SamplingParams())


# --- bugs that other engines had --------------------------------------------------------------------------------------


def test_a_neighbours_prefix_hit_changes_nothing(checkpoint):
    """Prefix hit of a neighbour switches the kernel for all (nano-vLLM)."""
    llm, params = engine(checkpoint("llama")), SamplingParams(max_tokens=12, seed=1, prompt_logprobs=True)
    cold = generate(llm, [prompt_of(45, 1)], params)[0]
    warm = prompt_of(90, 2)
    generate(llm, [warm], SamplingParams(max_tokens=1))
    hits = llm.stats().prefix_hit_tokens
    beside = generate(llm, [warm, prompt_of(45, 1)], [SamplingParams(max_tokens=12), params])[1]
    assert llm.stats().prefix_hit_tokens == hits + 64
    assert (pairs(beside), beside.prompt_logprobs) == (pairs(cold), cold.prompt_logprobs)


def test_a_prefill_of_one_token_after_a_full_hit_changes_nothing(checkpoint):
    """One-token prefill after a full prefix hit not invariant (vLLM #57016)."""
    llm, prompt, params = (
        engine(checkpoint("llama")),
        prompt_of(2 * BLOCK + 1),
        SamplingParams(n=2, max_tokens=20, seed=1),
    )
    cold = generate(llm, [prompt], params)[0]
    computed = llm.stats().prompt_tokens_computed
    hot = generate(llm, [prompt], params)[0]
    assert llm.stats().prompt_tokens_computed == computed + 1, "not a prefill of one token"
    assert pairs(hot) == pairs(cold)


def test_equal_prompts_in_one_prefill_batch_keep_their_pages(checkpoint):
    """Pages freed while in use when two equal prompts share a prefill batch (mini-sglang)."""
    llm = engine(checkpoint("llama"), tokens=320)
    prompt = prompt_of(70)
    params = [SamplingParams(max_tokens=m, seed=m, ignore_eos=True) for m in (2, 20, 20)]
    ids = [llm.add_request(prompt, p) for p in params]
    first = llm.step()
    assert len(first) == 3, "not one prefill batch"
    late = llm.add_request(prompt_of(70, 1), params[1])  # takes the pages that get free
    last = run_all(llm)
    for request_id, p in zip(ids, params, strict=True):
        assert pairs(last[request_id]) == pairs(generate(engine(checkpoint("llama")), [prompt], p)[0])
    assert pairs(last[late]) == pairs(generate(engine(checkpoint("llama")), [prompt_of(70, 1)], params[1])[0])


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


def test_neighbours_with_all_kinds_of_parameters_run_in_one_batch(checkpoint):
    """Neighbours with different sampling parameters crash the loop (VeXact)."""
    llm = engine(checkpoint("llama"))
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
        alone = generate(engine(checkpoint("llama")), [PROMPT], p)[0]
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
        submit = llm.engine.executor.submit

        def check(plan):
            if too_much(plan.token_ids):
                raise torch.OutOfMemoryError("CUDA out of memory")
            return submit(plan)

        monkeypatch.setattr(llm.engine.executor, "submit", check)
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
        answers = iter([True, True, False])  # another checkpoint comes while this one is read
        patch.setattr(StoredWeights, "unchanged", property(lambda _: next(answers)))
        with pytest.raises(WeightUpdateError, match="have changed since weight version 1"):
            llm.wake_up()
    assert not llm.has_weights
    llm.wake_up()
    assert llm.has_weights
    assert llm.weight_checksums() != before
    assert llm.generate([[5, 6]], SamplingParams(max_tokens=2), use_tqdm=False)[0].completions[0].token_ids


@pytest.mark.parametrize("n", [1, 3])
def test_async_scheduling_starts_a_step_before_the_last_ones_tokens_are_known(checkpoint, n):
    """The same results; what comes after a stop goes nowhere."""
    path = checkpoint("llama")
    params = SamplingParams(n=n, max_tokens=30, min_tokens=5, logprobs=2, raw_logprobs=True, seed=3)
    stop = engine(path).generate(PROMPT, params, use_tqdm=False)[0].completions[0].token_ids[7]
    params = dataclasses.replace(params, stop_token_ids=[stop])
    runs = []
    for overlap in (False, True):
        llm, finished, under_way = engine(path, async_scheduling=overlap, max_num_batched_tokens=24), {}, set()
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
    with pytest.raises(WeightUpdateError, match="missing"):  # a handle is good for one commit
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
