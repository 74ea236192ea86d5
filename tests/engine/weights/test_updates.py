"""Weight updates of one engine: all or nothing, and each token is its version's."""

import functools
import json
import time

import pytest
import torch
from transformers import AutoModelForCausalLM

from samebits import LLM, CheckpointError, NumericsError, SamplingParams, WeightUpdateError
from samebits.engine import VersionSpan
from samebits.kernels import ops
from samebits.trainer import exact_model

from helpers.engines import (
    PROMPT,
    assert_idle,
    check,
    copy_of,
    engine,
    generate,
    pairs,
    prompt_of,
    run_all,
    trainer_logprobs,
)
from helpers.faults import ctrl_c
from helpers.models import make_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")


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


@pytest.mark.parametrize("stages", [{}, {"pipeline_parallel_size": 2, "backend": "inproc"}])
@pytest.mark.parametrize("family", ["llama", "qwen3"])  # tied, untied
def test_the_weights_in_force_are_read_each_once(checkpoint, family, stages):
    llm = LLM(checkpoint(family), kv_cache_memory_bytes=1 << 20, **stages)
    names = [name for name, _ in llm.worker_engine.workers.weights()]
    state = exact_model(checkpoint(family)).state_dict()
    tied = {"lm_head.weight"} if family == "llama" else set()
    assert sorted(names) == sorted(state.keys() - tied)
    for _ in range(2):  # they are copies
        for name, tensor in llm.worker_engine.workers.weights():
            assert torch.equal(tensor, state[name])
            tensor.zero_()


@pytest.mark.parametrize("source", ["module", "pairs", "directory"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])  # tied, untied
def test_after_an_update_the_engine_is_one_of_the_new_checkpoint(shared, checkpoint, other, family, source):
    path = other(family)
    model = exact_model(path)
    llm, params = engine(checkpoint(family)), SamplingParams(n=2, max_tokens=9, seed=1)
    before = generate(llm, [PROMPT], params)[0]
    given = {"module": model, "pairs": model.state_dict().items(), "directory": path}[source]
    assert llm.update_weights(given) == llm.weight_version == llm.stats().weight_version == 1
    after = generate(llm, [PROMPT], params)[0]
    assert pairs(after) == pairs(generate(shared(path), [PROMPT], params)[0]) != pairs(before)
    assert all(c.weight_version == 1 for c in after.completions)


def test_an_update_during_generation_gives_version_spans_and_each_token_is_its_versions(checkpoint, updated, trainer):
    llm, new = engine(checkpoint("llama")), exact_model(updated)
    params = SamplingParams(n=2, max_tokens=12, seed=1, ignore_eos=True)
    request = llm.add_request(PROMPT, params)
    waiting = llm.add_request(prompt_of(9), SamplingParams(max_tokens=20, ignore_eos=True))
    for _ in range(5):
        llm.step()
    assert llm.update_weights(new, version=7) == 7
    check(llm)
    last = run_all(llm)
    for c in last[request].completions:
        assert c.weight_versions == [VersionSpan(0, 0, 5), VersionSpan(7, 5, 12)]
        assert c.weight_version == 7
        sequence, start = [PROMPT + c.token_ids], len(PROMPT)
        assert c.logprobs[:5] == trainer_logprobs(trainer, sequence)[0][start : start + 5]
        assert c.logprobs[5:] == trainer_logprobs(new, sequence)[0][start + 5 :]
    assert last[waiting].completions[0].weight_versions == [VersionSpan(0, 0, 5), VersionSpan(7, 5, 20)]


def test_an_update_before_the_siblings_of_a_group_started(shared, checkpoint, updated):
    llm, params = engine(checkpoint("llama"), max_num_batched_tokens=16), SamplingParams(n=3, max_tokens=6, seed=1)
    request = llm.add_request(prompt_of(40), params)
    llm.step()
    llm.update_weights(exact_model(updated))
    output = run_all(llm)[request]
    assert pairs(output) == pairs(generate(shared(updated), [prompt_of(40)], params)[0])
    assert all(c.weight_versions == [VersionSpan(1, 0, len(c.token_ids))] for c in output.completions)


def test_kv_of_the_old_weights_is_never_hit_after_an_update(shared, checkpoint, updated):
    """Old KV hit after a weight update (nano-vLLM users, NeMo-RL #4018)."""
    llm, prompt, params = engine(checkpoint("llama")), prompt_of(100), SamplingParams(max_tokens=9, seed=1)
    generate(llm, [prompt], params)
    generate(llm, [prompt], params)
    hits = llm.stats().prefix_hit_tokens
    assert hits == 96, "the prefix cache is off: this test proves nothing"
    llm.update_weights(exact_model(updated))
    output = generate(llm, [prompt], params)[0]
    assert llm.stats().prefix_hit_tokens == hits
    assert pairs(output) == pairs(generate(shared(updated), [prompt], params)[0])
    generate(llm, [prompt], params)
    assert llm.stats().prefix_hit_tokens == hits + 96, "new prefixes are found again"


def test_prompt_logprobs_belong_to_one_weight_version(checkpoint, updated, trainer):
    llm, new, prompt = engine(checkpoint("llama"), max_num_batched_tokens=16), exact_model(updated), prompt_of(60)
    request = llm.add_request(prompt, SamplingParams(max_tokens=2, prompt_logprobs=True))
    llm.step()
    llm.update_weights(new)
    scores = run_all(llm)[request].prompt_logprobs
    assert scores in (trainer_logprobs(trainer, [prompt])[0], trainer_logprobs(new, [prompt])[0])


def test_weights_in_fp32_are_rounded_to_a_bf16_engine(shared, checkpoint, updated):
    llm, params = engine(checkpoint("llama"), dtype="bfloat16"), SamplingParams(max_tokens=9, seed=1)
    llm.update_weights(exact_model(updated, "float32"))
    expected = generate(shared(updated, dtype="bfloat16"), [PROMPT], params)[0]
    assert pairs(generate(llm, [PROMPT], params)[0]) == pairs(expected)


@pytest.mark.parametrize("family", ["llama", "llama3-bias", "qwen2", "qwen3", "mistral"])
def test_the_trainer_may_change_its_weights_in_place_after_an_update(shared, checkpoint, other, family):
    llm, model, params = engine(checkpoint(family)), exact_model(other(family)), SamplingParams(max_tokens=9, seed=1)
    llm.update_weights(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    assert pairs(generate(llm, [PROMPT], params)[0]) == pairs(generate(shared(other(family)), [PROMPT], params)[0])


def test_ctrl_c_during_an_update_leaves_one_whole_version(shared, checkpoint, updated):
    def source():
        for i, pair in enumerate(exact_model(updated).state_dict().items()):
            if i == 9:
                ctrl_c()
            yield pair

    llm, params = engine(checkpoint("llama")), SamplingParams(max_tokens=9, seed=1)
    with pytest.raises(KeyboardInterrupt):
        llm.update_weights(source())
    path = [checkpoint("llama"), updated][llm.weight_version]
    assert pairs(generate(llm, [PROMPT], params)[0]) == pairs(generate(shared(path), [PROMPT], params)[0])


def test_a_slow_update_can_be_interrupted(llm, updated):
    def source():
        for i, pair in enumerate(exact_model(updated).state_dict().items()):
            if i == 3:
                ctrl_c()
                time.sleep(0.01)
            assert i <= 4, "the interrupt was held back until the source ended"
            yield pair

    with pytest.raises(KeyboardInterrupt):
        llm.update_weights(source())
    assert llm.weight_version == 0


def test_a_trainer_with_other_numerics_is_refused(checkpoint, updated):
    llm = engine(checkpoint("llama"))
    with pytest.raises(NumericsError, match=r"linear: 'bias, then blocks of .*' here, 'torch' there"):
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
    "meta": (lambda s: {**s, NORM: s[NORM].to("meta")}, r"model\.norm\.weight.*no values"),
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
def test_a_damaged_update_is_refused_and_the_old_weights_serve_on(shared, checkpoint, other, family, kind):
    damage, message = DAMAGE[kind]
    state = exact_model(other(family)).state_dict()
    assert_refused(shared(checkpoint(family)), damage(state).items(), message)


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.mlp.up_proj.weight"])
def test_a_tensor_given_twice_is_refused(llm, updated, name):
    state = exact_model(updated).state_dict()
    assert_refused(llm, [*state.items(), (name, state[name])], f"{name}' was given twice")


def test_tied_tensors_that_differ_are_refused(llm, updated):
    state = exact_model(updated).state_dict()
    state["lm_head.weight"] = state["lm_head.weight"] + 1
    assert_refused(llm, state.items(), "lm_head.weight")


@pytest.mark.parametrize("name", ["lm_head.weight", "model.embed_tokens.weight"])
def test_one_name_of_a_tied_pair_is_enough(shared, checkpoint, updated, name):
    state = exact_model(updated).state_dict()
    del state[name]
    llm, params = engine(checkpoint("llama")), SamplingParams(max_tokens=9, seed=1)
    llm.update_weights(state.items())
    assert pairs(generate(llm, [PROMPT], params)[0]) == pairs(generate(shared(updated), [PROMPT], params)[0])


def test_a_source_that_fails_midway_changes_nothing(llm, updated):
    def source():
        for i, pair in enumerate(exact_model(updated).state_dict().items()):
            if i == 9:
                raise ConnectionError("the sender went away")
            yield pair

    params = SamplingParams(max_tokens=9, seed=1)
    before = generate(llm, [PROMPT], params)[0]
    with pytest.raises(ConnectionError, match="went away"):
        llm.update_weights(source())
    assert llm.weight_version == 0
    assert pairs(generate(llm, [PROMPT], params)[0]) == pairs(before)


def test_a_module_of_another_architecture_is_refused(llm, checkpoint):
    assert_refused(llm, exact_model(checkpoint("qwen3")), "unknown tensor")


def test_a_directory_with_a_truncated_file_is_refused(llm, updated, tmp_path):
    path = copy_of(updated, tmp_path)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    params = SamplingParams(max_tokens=9, seed=1)
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


def test_a_version_too_large_to_handle_is_refused_before_anything_changes(llm, updated):
    params = SamplingParams(max_tokens=9, seed=1)
    before = generate(llm, [PROMPT], params)[0]
    with pytest.raises(ValueError, match=r"below 2\^63"):
        llm.update_weights(exact_model(updated), version=2**200)
    assert llm.weight_version == 0
    assert pairs(generate(llm, [PROMPT], params)[0]) == pairs(before)


@pytest.mark.parametrize(
    ("field", "value"),
    [("rope_theta", 123.0), ("rms_norm_eps", 0.5), ("hidden_act", "gelu"), ("num_attention_heads", 10),
     ("rope_scaling", {"rope_type": "linear", "factor": 2.0}), ("quantization_config", {"quant_method": "fp8"})],
)  # fmt: skip
def test_a_directory_whose_config_asks_for_other_numerics_is_refused(checkpoint, updated, tmp_path, field, value):
    llm = engine(checkpoint("llama"))
    path = copy_of(updated, tmp_path)
    config = json.loads((path / "config.json").read_text())
    rope = field.startswith("rope") and config.pop("rope_parameters", {})
    changed = config | ({"rope_theta": rope["rope_theta"]} if rope else {}) | {field: value}
    (path / "config.json").write_text(json.dumps(changed))
    before = generate(llm, [PROMPT], SamplingParams(max_tokens=5, seed=1))[0]
    with pytest.raises(NumericsError, match="rope_parameters" if rope else field):
        llm.update_weights(path)
    assert llm.weight_version == 0
    assert pairs(generate(llm, [PROMPT], SamplingParams(max_tokens=5, seed=1))[0]) == pairs(before)


def test_a_directory_may_say_otherwise_what_decides_no_bit(checkpoint, updated, tmp_path):
    llm = engine(checkpoint("llama"))
    path = copy_of(updated, tmp_path)
    config = json.loads((path / "config.json").read_text())
    more = {"transformers_version": "4.0.0", "use_cache": False, "eos_token_id": 7, "dtype": "bfloat16", "of_others": 1}
    (path / "config.json").write_text(json.dumps(config | more))
    assert llm.update_weights(path) == 1
    (path / "config.json").unlink()
    assert llm.update_weights(path) == 2


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])  # the second sends experts in pieces
def test_an_update_without_memory_says_what_to_do_and_the_next_one_goes_through(checkpoint, family, monkeypatch):
    """On a GPU, whose KV pool may have been given all."""
    llm = LLM(checkpoint(family), kv_cache_memory_bytes=1 << 20)
    before, model = llm.weight_checksums(), exact_model(checkpoint(family))
    with torch.no_grad():
        next(model.parameters()).mul_(2)

    def full(*_):
        raise torch.OutOfMemoryError("of 80 GiB")

    with monkeypatch.context() as patch:
        patch.setattr(ops.PackedWeight, "pack", full)
        with pytest.raises(WeightUpdateError, match=r"lower kv_cache_memory_bytes, or update while .*: of 80 GiB"):
            llm.update_weights(model)
    assert llm.weight_checksums() == before and llm.weight_version == 0
    assert llm.update_weights(model) == 1 and llm.weight_checksums() != before


def test_a_state_dict_is_a_source_and_dropped_weights_have_no_checksums(checkpoint, updated):
    llm, new = engine(checkpoint("llama")), exact_model(updated)
    assert llm.update_weights(new.state_dict()) == 1
    assert llm.weight_checksums() == engine(updated).weight_checksums()
    llm.sleep(2)
    with pytest.raises(ValueError, match="weights are dropped"):
        llm.weight_checksums()
