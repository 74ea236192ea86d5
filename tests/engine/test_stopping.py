"""What ends a sample, and with which tokens."""

import dataclasses

import pytest

from samebits import LLM, SamplingParams
from samebits.trainer import exact_model

from helpers.engines import FREE, PROMPT, VOCAB, copy_of, engine, generate, one, prompt_of, trainer_logprobs

pytestmark = pytest.mark.usefixtures("one_thread")


STAGES = pytest.mark.parametrize("stages", [1, 2])


def staged(path, stages):
    return LLM(path, pipeline_parallel_size=stages, backend="inproc", kv_cache_memory_bytes=2**20)


@STAGES
@pytest.mark.parametrize("where", ["generation_config", "config"])
def test_each_eos_of_a_list_ends_a_sample(checkpoint, tmp_path, free, where, stages):
    """EOS list never matches (VeXact)."""
    ends = [next(t for t in range(VOCAB) if t not in free), free[7], free[4]]
    if where == "generation_config":
        path = copy_of(checkpoint("llama"), tmp_path, generation_config={"eos_token_id": ends})
    else:
        path = copy_of(checkpoint("llama"), tmp_path, eos_token_id=ends)
        (path / "generation_config.json").unlink()
    llm = staged(path, stages)
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


@STAGES
@pytest.mark.parametrize(
    "generation_config", [None, {"eos_token_id": [2, 9]}, {"temperature": 0.5}, {"eos_token_id": 0}]
)
def test_engine_and_trainer_ban_the_same_eos(checkpoint, tmp_path, generation_config, stages):
    path = copy_of(checkpoint("llama"), tmp_path, generation_config=generation_config)
    if generation_config is None:
        (path / "generation_config.json").unlink()
    params = SamplingParams(n=2, max_tokens=10, min_tokens=10, seed=1)
    model = exact_model(path)
    llm = staged(path, stages)
    for c in generate(llm, [PROMPT], params)[0].completions:
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


def test_max_tokens_none_goes_on_to_max_model_len(shared, checkpoint):
    llm = shared(checkpoint("llama"), max_model_len=45)
    completion = one(llm, PROMPT, SamplingParams(max_tokens=None, ignore_eos=True))
    assert (len(PROMPT) + len(completion.token_ids), completion.finish_reason) == (45, "length")
    completion = one(llm, PROMPT, SamplingParams(max_tokens=500, ignore_eos=True))
    assert len(PROMPT) + len(completion.token_ids) == 45


def test_a_request_may_fill_the_pool_to_its_last_slot(shared, checkpoint):
    """A request that outgrows the pool preempts itself forever (VeXact): here it just doesn't outgrow it."""
    path, prompt = checkpoint("llama"), prompt_of(40)
    params = SamplingParams(max_tokens=57, seed=1, ignore_eos=True)  # 96 tokens of KV: the last needs none
    completion = one(shared(path, tokens=96), prompt, params)
    assert len(completion.token_ids) == 57
    assert completion == one(shared(path), prompt, params)
