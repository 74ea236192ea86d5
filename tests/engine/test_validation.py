"""Bad input gets an error that says what to do."""

import dataclasses
from types import SimpleNamespace

import psutil
import pytest
import torch

from samebits import LLM, SamplingParams
from samebits.engine import EngineConfig
from samebits.engine.model_runner import ModelRunner
from samebits.engine.worker import Worker

from helpers.adapters import adapted_model
from helpers.engines import (
    PROMPT,
    VOCAB,
    assert_idle,
    generate,
    pairs,
    prompt_of,
    run_all,
)
from helpers.faults import fail

pytestmark = pytest.mark.usefixtures("one_thread")


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
def test_a_bad_prompt_is_refused_before_anything_starts(shared, checkpoint, prompt, error, message):
    """Among them: a prompt larger than the pool livelocks (VeXact)."""
    llm, params = shared(checkpoint("llama"), tokens=256), SamplingParams(seed=1)
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
    assert llm.unfinished_request_ids == [queued]
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
    ({"top_k": 2**63}, ValueError, "top_k must be at least -1 and at most 9223372036854775807"),
    ({"stop": 5}, TypeError, "stop must be a string or several"),
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
    assert llm.unfinished_request_ids == ["mine"]
    assert set(run_all(llm)) == {"mine"}


BAD_SETTINGS = [
    ({"tensor_parallel_size": 2}, TypeError, "tensor_parallel_size"),
    ({"max_num_seq": 5}, TypeError, "max_num_seq"),
    ({"dtype": "float64"}, ValueError, r"float64 is not supported on cpu; supported: float32, bfloat16, float16"),
    ({"dtype": "int8"}, ValueError, "supported: float32, bfloat16, float16"),
    ({"dtype": "nonsense"}, ValueError, "supported: float32, bfloat16, float16"),
    ({"device": "meta"}, NotImplementedError, "no kernels for device 'meta'; supported: cpu"),
    ({"device": "gpu:0"}, NotImplementedError, "no kernels for device 'gpu'; supported: cpu, cuda"),
    ({"max_num_seqs": 0}, ValueError, "max_num_seqs must be positive"),
    ({"max_num_batched_tokens": -5}, ValueError, "max_num_batched_tokens must be positive"),
    ({"max_model_len": 1000}, ValueError, "max_model_len 1000 exceeds the model's 512 positions"),
    ({"max_model_len": 0}, ValueError, "max_model_len must be positive"),
    ({"max_num_seqs": "8"}, TypeError, "max_num_seqs must be an integer"),
    ({"kv_cache_memory_bytes": 100}, ValueError, r"kv_cache_memory_bytes is less than one block of \d+ bytes"),
    ({"enable_prefix_caching": "no"}, TypeError, "enable_prefix_caching must be a bool"),
    ({"exact": "false"}, TypeError, "exact must be a bool"),
]


@pytest.mark.parametrize(("setting", "error", "message"), BAD_SETTINGS, ids=[str(s) for s, *_ in BAD_SETTINGS])
def test_a_bad_engine_setting_is_refused_by_name(checkpoint, setting, error, message):
    with pytest.raises(error, match=message):
        LLM(checkpoint("llama"), **setting)


@pytest.mark.parametrize(
    ("share", "held", "sharers", "expected"),
    [
        (0.9, 0, 1, 90 - 10 - 5 - 10),  # weights, a step, and an update's weights
        (0.5, 0, 1, 50 - 10 - 5 - 10),
        (0.5, 30, 1, 30 - 5 - 10),  # half of the 60 that a trainer beside it leaves free
        (0.9, 10, 2, (72 - 5) // 2 - 10),  # a GPU for two workers
        (0.3, 0, 1, 30 - 10 - 5),  # too little for an update, too
    ],
)
def test_a_gpus_memory_is_shared_out_as_set(monkeypatch, share, held, sharers, expected):
    """A GPU of 100 bytes, for a model of 10."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (90 - held, 100))
    monkeypatch.setattr(ModelRunner, "peak_bytes", lambda *_: 5)
    worker = Worker.__new__(Worker)
    worker.config = EngineConfig(device="cuda", gpu_memory_utilization=share, enforce_eager=True)
    worker.model = SimpleNamespace(device=torch.device("cuda"))
    worker.path, worker.weight_bytes, worker.sharers = None, 10, sharers
    monkeypatch.setattr("samebits.engine.worker.max_model_len", lambda *_: 2**20)
    assert worker._max_blocks(1) == expected
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (0, 100))
    with pytest.raises(MemoryError, match="raise gpu_memory_utilization"):
        worker._max_blocks(1)


def test_stages_in_one_process_share_its_memory(checkpoint, monkeypatch):
    """A quarter of what is free, together."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 22))
    for stages in ({}, {"pipeline_parallel_size": 2, "backend": "inproc"}):
        llm = LLM(checkpoint("llama"), max_num_seqs=256, **stages)
        assert 2**20 * 0.9 < llm.engine.executor.info.kv_cache_bytes <= 2**20


def test_a_step_of_a_gpu_may_have_more_tokens():
    assert [EngineConfig(device=d).max_num_batched_tokens for d in ("cpu", "cuda")] == [2048, 8192]


def test_torchs_own_objects_name_device_and_dtype(checkpoint):
    llm = LLM(checkpoint("llama"), device=torch.device("cpu"), dtype=torch.bfloat16, kv_cache_memory_bytes=1 << 20)
    assert (llm.config.device, llm.config.dtype) == ("cpu", "bfloat16")


def test_a_request_that_has_ended_is_not_taken_again(shared, checkpoint):
    llm = shared(checkpoint("llama"))
    request = llm.process(PROMPT, SamplingParams(max_tokens=1), "once")
    llm.add_request(request)
    run_all(llm)
    with pytest.raises(ValueError, match="has ended: process its prompt again"):
        llm.add_request(request)
    assert_idle(llm)


def test_an_adapter_that_can_not_be_loaded_leaves_no_engine_behind(checkpoint, tmp_path, monkeypatch):
    closed = []
    monkeypatch.setattr(LLM, "update_weights", fail(RuntimeError("a damaged file")))
    monkeypatch.setattr(LLM, "close", lambda llm: closed.append(llm))
    with pytest.raises(RuntimeError, match="a damaged file"):
        LLM(checkpoint("llama"), adapter=adapted_model(checkpoint("llama"), seed=1), kv_cache_memory_bytes=1 << 20)
    assert len(closed) == 1
