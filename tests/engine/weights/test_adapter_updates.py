"""Updates of an adapter alone: its trainer's bits afterwards, or the old adapter's."""

import pytest
import torch

from samebits import LLM, NumericsError, SamplingParams, WeightUpdateError
from samebits.model.adapter import adapter_state
from samebits.trainer import exact_model

from helpers.adapters import adapted_model, lora
from helpers.engines import PROMPT, engine, generate, pairs, prompt_of, trainer_logprobs
from helpers.models import make_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")

PARAMS = SamplingParams(n=2, max_tokens=9, seed=1, ignore_eos=True)


def assert_bits(llm, model) -> None:
    """The engine's log-probs are the model's."""
    out = generate(llm, [PROMPT], PARAMS)[0]
    expected = trainer_logprobs(model, [PROMPT + c.token_ids for c in out.completions], PARAMS)
    assert [c.logprobs for c in out.completions] == [lp[len(PROMPT) :] for lp in expected]


CONFIGS = [
    lora(),
    lora(target_modules=["q_proj", "v_proj"], r=16),
    lora(target_modules=r".*\.(k_proj|up_proj|down_proj)", use_rslora=True),
    lora(rank_pattern={"q_proj": 33, "layers.1.mlp.up_proj": 2}, alpha_pattern={"o_proj": 1}),
    lora(target_modules=["q_proj", "down_proj"], layers_to_transform=[1]),
]


@pytest.mark.parametrize("stages", [{}, {"pipeline_parallel_size": 2, "backend": "inproc"}], ids=["whole", "stages"])
@pytest.mark.parametrize("config", CONFIGS, ids=range(len(CONFIGS)))
def test_ranks_scales_and_targets_are_what_peft_makes_of_them(checkpoint, config, stages):
    path = checkpoint("llama")
    model = adapted_model(path, config=config)
    llm = LLM(path, adapter=config, kv_cache_memory_bytes=2**21, **stages)
    assert_bits(llm, exact_model(path))
    assert llm.update_weights(model) == 1
    assert_bits(llm, model)


@pytest.mark.parametrize("source", ["model", "folder", "pairs"])
def test_an_adapter_comes_from_a_model_pefts_files_or_pairs(checkpoint, tmp_path, source):
    path = checkpoint("qwen2")
    first, second = (adapted_model(path, "bfloat16", seed) for seed in (1, 2))
    first.save_pretrained(tmp_path / "first")
    second.save_pretrained(tmp_path / "second")
    start = {"model": first, "folder": tmp_path / "first", "pairs": first}[source]
    llm = engine(path, dtype="bfloat16", adapter=start)
    assert llm.weight_version == 1
    assert_bits(llm, first)
    given = {"model": second, "folder": tmp_path / "second", "pairs": adapter_state(second).items()}[source]
    assert llm.update_weights(given, version=7) == 7
    assert_bits(llm, second)
    base = {name: each for name, each in llm.weight_checksums().items() if ".lora_" not in name}
    assert base == engine(path, dtype="bfloat16").weight_checksums(), "the base has moved"


def test_bad_updates_leave_the_old_adapter_serving(checkpoint, tmp_path):
    path = checkpoint("llama")
    model = adapted_model(path)
    llm = engine(path, adapter=model)
    checksums, before = llm.weight_checksums(), pairs(generate(llm, [PROMPT], PARAMS)[0])
    state = {name: tensor.detach().clone() for name, tensor in adapter_state(model).items()}
    name = next(iter(state))
    other = adapted_model(path, config=lora(lora_alpha=9))
    other.save_pretrained(tmp_path / "other")
    bad = [
        ({**state, name: state[name] * torch.nan}.items(), WeightUpdateError, "NaN or infinity"),
        ([*state.items()][1:], WeightUpdateError, f"1 tensors are missing, first '{name}'"),
        ({**state, name: state[name][:-1]}.items(), WeightUpdateError, "has shape"),
        ({**state, "base_model.model.lm_head.lora_A.weight": state[name]}.items(), WeightUpdateError, "unknown tensor"),
        ([*state.items(), (name, state[name])], WeightUpdateError, "given twice"),
        (other, NumericsError, "scale 1.8"),
        (exact_model(path), NumericsError, "adapter: 'LoRA"),
        (tmp_path / "other", WeightUpdateError, "scale 1.8"),
    ]
    for source, error, message in bad:
        with pytest.raises(error, match=message):
            llm.update_weights(source)
        assert llm.weight_version == 1 and llm.weight_checksums() == checksums
    assert pairs(generate(llm, [PROMPT], PARAMS)[0]) == before


def test_an_engine_without_an_adapter_refuses_one(checkpoint, tmp_path):
    model = adapted_model(checkpoint("llama"))
    llm = engine(checkpoint("llama"))
    with pytest.raises(NumericsError, match="adapter: 'none' here"):
        llm.update_weights(model)
    with pytest.raises(WeightUpdateError, match=r"unknown tensor 'base_model.*lora_A"):
        llm.update_weights(adapter_state(model).items())
    with pytest.raises(ValueError, match="exact=False"):
        LLM(checkpoint("llama"), adapter=lora(), exact=False)
    with pytest.raises(ValueError, match="adapter_dtype 'int8'"):
        LLM(checkpoint("llama"), adapter=lora(), adapter_dtype="int8")


def test_the_base_may_change_under_the_adapter(checkpoint, tmp_path):
    new = make_checkpoint(tmp_path / "new", "llama", seed=1)
    model = adapted_model(checkpoint("llama"), seed=3)
    llm = engine(checkpoint("llama"), adapter=model)
    for source in (new, exact_model(new).state_dict().items()):
        llm.update_weights(source)
        assert_bits(llm, adapted_model(new, seed=3))
    both = [*exact_model(checkpoint("llama")).state_dict().items(), *adapter_state(adapted_model(new, seed=4)).items()]
    llm.update_weights(both)
    assert_bits(llm, adapted_model(checkpoint("llama"), seed=4))


def test_an_update_in_mid_flight_finds_no_old_prefix_and_each_token_is_its_versions(checkpoint):
    old, new = (adapted_model(checkpoint("qwen3"), seed=seed) for seed in (1, 2))
    llm = engine(checkpoint("qwen3"), adapter=old)
    prompt, params = prompt_of(70), SamplingParams(max_tokens=12, seed=1, ignore_eos=True)
    request = llm.add_request(prompt, params)
    for _ in range(5):
        llm.step()
    llm.update_weights(new)
    while llm.has_unfinished_requests():
        outputs = llm.step()
    (out,) = [each for each in outputs if each.request_id == request]
    (completion,) = out.completions
    assert [s.version for s in completion.weight_versions] == [1, 2]
    split = completion.weight_versions[0].end
    sequence = [prompt + completion.token_ids]
    assert completion.logprobs[:split] == trainer_logprobs(old, sequence)[0][70 : 70 + split]
    assert completion.logprobs[split:] == trainer_logprobs(new, sequence)[0][70 + split :]
    hits = llm.stats().prefix_hit_tokens
    again = generate(llm, [prompt], params)[0].completions[0]
    assert again.logprobs == trainer_logprobs(new, [prompt + again.token_ids])[0][70:]
    assert llm.stats().prefix_hit_tokens > hits, "the new version's prefix was not found"


def test_sleep_drops_the_base_and_keeps_the_adapter(checkpoint):
    path = checkpoint("llama")
    first, second = adapted_model(path, seed=1), adapted_model(path, seed=2)
    llm = engine(path, adapter=first)
    llm.sleep(2)
    with pytest.raises(WeightUpdateError, match="20 tensors are missing"):
        llm.update_weights(second)
    llm.wake_up()
    assert_bits(llm, first)
    llm.update_weights(second)
    llm.sleep(2)
    llm.update_weights(path)
    llm.wake_up()
    assert_bits(llm, second)


def test_a_trainer_that_casts_its_parameters_has_an_engine_that_rounds_them(checkpoint):
    path = checkpoint("llama")
    model = adapted_model(path, "bfloat16")
    plain = engine(path, dtype="bfloat16", adapter=model)
    rounding = engine(path, dtype="bfloat16", adapter=lora(), adapter_dtype="bfloat16")
    rounding.update_weights(adapter_state(model).items())
    assert_bits(plain, model)
    with pytest.raises(NumericsError, match="adapter_dtype: 'bfloat16' here, 'float32' there"):
        rounding.update_weights(model)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data = parameter.data.bfloat16()
    assert_bits(rounding, model)
    with pytest.raises(AssertionError):
        assert_bits(plain, model)
    with pytest.raises(NumericsError, match="adapter_dtype"):
        plain.update_weights(model)
    assert rounding.update_weights(model) == 2
