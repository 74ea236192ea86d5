"""A decoder layer of few rows in one launch: the bits of its kernels one by one, and only where it stands for them."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from samebits import LLM, SamplingParams
from samebits.kernels import cpu

PROMPTS = [[5, 7, 11 + i] for i in range(3)]
PARAMS = SamplingParams(max_tokens=6, seed=3, ignore_eos=True)


def generate(llm: LLM, prompts=PROMPTS) -> list:
    return [(c.token_ids, c.logprobs) for out in llm.generate(prompts, PARAMS, use_tqdm=False) for c in out.completions]


def layers_of(llm: LLM):
    return llm.engine.executor.workers[0].model.base_model.layers


@pytest.fixture
def launches(monkeypatch):
    """The rows of each launch, as they come."""
    rows = []
    launch = cpu.decoder_layer

    def counted(x, *rest):
        rows.append(len(x))
        return launch(x, *rest)

    monkeypatch.setattr(cpu, "decoder_layer", counted)
    return rows


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_layer_in_one_launch_has_the_bits_of_its_kernels(checkpoint, family, dtype, launches, monkeypatch):
    llm = LLM(checkpoint(family), dtype=dtype, kv_cache_memory_bytes=2**24)
    for number, tokens in ((3, 3), (17, 3), (40, 9)):
        prompts = [[5, 7, *[11 + i] * (tokens - 2)] for i in range(number)]
        monkeypatch.setattr(cpu, "LAYER_ROWS", 256)
        launches.clear()
        found = generate(llm, prompts)
        assert number in launches and max(launches) <= cpu.LAYER_ROWS
        llm.reset_prefix_cache()
        launches.clear()
        monkeypatch.setattr(cpu, "LAYER_ROWS", 0)
        assert generate(llm, prompts) == found and not launches


def test_a_hook_sees_its_module_and_the_others_keep_their_launches(checkpoint, launches):
    llm = LLM(checkpoint("llama"), kv_cache_memory_bytes=2**22)
    expected = generate(llm)
    layers = layers_of(llm)
    seen = []
    handle = layers[0].mlp.up_proj.register_forward_hook(lambda *call: seen.append(call))
    llm.reset_prefix_cache()
    before = len(launches)
    assert generate(llm) == expected and seen
    assert len(launches) - before == len(seen) * (len(layers) - 1)
    handle.remove()
    assert layers[0]._read(torch.zeros(1, 2, 8)) is not None


def test_negative_control_a_launch_of_other_bits_is_not_used(checkpoint, monkeypatch):
    path = checkpoint("llama")
    expected = generate(LLM(path, kv_cache_memory_bytes=2**22))
    launch = cpu.decoder_layer
    calls = []

    def wrong(*args):
        calls.append(args)
        total, normed = launch(*args)
        return torch.nextafter(total, total + 1), normed

    monkeypatch.setattr(cpu, "decoder_layer", wrong)
    llm = LLM(path, kv_cache_memory_bytes=2**22)
    assert calls
    calls.clear()
    assert generate(llm) == expected and not calls


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("updates", [1, 2])  # the second takes the memory that the first one replaced
@pytest.mark.parametrize("part", ["bias", "layernorm.weight", "model.norm.weight", "proj.weight"])
def test_a_launch_follows_an_update_of_what_it_was_read_from(checkpoint, part, updates, dtype, launches, monkeypatch):
    path = checkpoint("qwen2")
    llm = LLM(path, dtype=dtype, kv_cache_memory_bytes=2**22)
    before = generate(llm)
    state = AutoModelForCausalLM.from_pretrained(path).state_dict()
    for _ in range(updates):
        llm.update_weights((name, tensor + 0.1 if name.endswith(part) else tensor) for name, tensor in state.items())
    launches.clear()
    found = generate(llm)
    assert launches and found != before
    llm.reset_prefix_cache()
    monkeypatch.setattr(cpu, "LAYER_ROWS", 0)
    assert generate(llm) == found


def test_a_launch_follows_a_module_that_takes_another_s_place(checkpoint, launches):
    llm = LLM(checkpoint("llama"), kv_cache_memory_bytes=2**22)
    expected = generate(llm)
    mlp = layers_of(llm)[0].mlp
    own = mlp.up_proj
    mlp.up_proj = torch.nn.Sequential(own)
    llm.reset_prefix_cache()
    launches.clear()
    assert generate(llm) == expected
    assert len(launches) % (len(layers_of(llm)) - 1) == 0 and launches
    mlp.up_proj = own
    assert layers_of(llm)[0]._read(torch.zeros(1, 2, 8)) is not None
