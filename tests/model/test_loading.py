"""What can't be kept exact is refused at load: by the trainer's model, a stage's, and the engine."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from samebits import LLM, CheckpointError, UnsupportedModelError
from samebits.model import exact_model
from samebits.model.exact import parse_dtype
from samebits.model.stage import stage_model

from helpers.adapters import lora
from helpers.engines import copy_of

pytestmark = pytest.mark.usefixtures("one_thread")


def one_stage(path):
    return stage_model(path, "float32", "cpu", (0, 2))


@pytest.fixture(params=[exact_model, one_stage, LLM], ids=["trainer", "stage", "engine"])
def load(request):
    return request.param


def test_a_model_without_decoder_layers_is_refused_before_its_weights_are_read(load, tmp_path):
    GPT2Config(n_embd=20, n_layer=1, n_head=2).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"'gpt2' has no num_key_value_heads"):
        load(tmp_path)


CONFIG_FAULTS = [
    ({"model_type": "unheard_of"}, "unheard_of"),
    (
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        "rope type 'dynamic' is not covered, or changes with",
    ),
    ({"attention_dropout": 0.1}, "attention_dropout > 0"),
    (
        {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}},
        "weights quantised by bitsandbytes.* float32, bfloat16 or float16",
    ),
    ({"quantization_config": {"quant_method": "fp8"}}, "weights quantised by fp8"),
]


@pytest.mark.parametrize(("config", "message"), CONFIG_FAULTS, ids=[str(c)[:30] for c, _ in CONFIG_FAULTS])
def test_a_config_that_asks_for_an_inexact_op_is_refused(load, checkpoint, tmp_path, config, message):
    with pytest.raises(UnsupportedModelError, match=message):
        load(copy_of(checkpoint("llama"), tmp_path, **config))


@pytest.mark.parametrize("load", [exact_model, LLM], ids=["trainer", "engine"])
def test_the_base_of_qlora_is_refused_by_name(load, checkpoint, tmp_path):
    quantised = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    path = copy_of(checkpoint("llama"), tmp_path, quantization_config=quantised)
    with pytest.raises(UnsupportedModelError, match="quantised by bitsandbytes, QLoRA's base included"):
        load(path, adapter=lora())


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
def test_a_checkpoint_that_does_not_fit_its_config_is_refused_by_tensor(load, checkpoint, tmp_path, fault, message):
    path = copy_of(checkpoint("llama"), tmp_path)
    state = load_file(path / "model.safetensors")
    fault(state)
    save_file(state, path / "model.safetensors", metadata={"format": "pt"})
    if fault is break_extra and load is one_stage:
        load(path)  # which reads its own tensors alone
        return
    with pytest.raises(CheckpointError, match=message):
        load(path)


@pytest.mark.parametrize("keep", [0, 4, 100, -100])
def test_a_truncated_file_is_refused_by_name(load, checkpoint, tmp_path, keep):
    path = copy_of(checkpoint("llama"), tmp_path)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated"):
        load(path)


@pytest.fixture(scope="module")
def shards(checkpoint, tmp_path_factory):
    path = tmp_path_factory.mktemp("sharded") / "model"
    AutoModelForCausalLM.from_pretrained(checkpoint("llama")).save_pretrained(path, max_shard_size="200KB")
    assert len(list(path.glob("*.safetensors"))) > 2
    return path


def test_a_sharded_checkpoint_is_the_same_model(checkpoint, shards):
    for load in (exact_model, one_stage):
        ours, theirs = (load(path).state_dict() for path in (shards, checkpoint("llama")))
        assert list(ours) == list(theirs) and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert LLM(shards).weight_checksums() == LLM(checkpoint("llama")).weight_checksums()


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_checkpoint_that_is_not_finite_is_refused_by_tensor(load, checkpoint, tmp_path, value):
    path = copy_of(checkpoint("qwen3"), tmp_path)
    state = load_file(path / "model.safetensors")
    state["lm_head.weight"][5] = float(value)
    save_file(state, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"'lm_head\.weight' holds NaN or infinity"):
        load(path)


def test_a_shard_that_is_not_there_is_refused_by_name(load, shards, tmp_path):
    path = copy_of(shards, tmp_path)
    gone = sorted(path.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(
        CheckpointError, match=rf"{gone.name} is named in model.safetensors.index.json but does not exist"
    ):
        load(path)


def test_a_path_without_a_checkpoint_is_refused_with_what_was_expected(load, checkpoint, tmp_path):
    with pytest.raises(CheckpointError, match="no such directory"):
        load(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"has no config\.json; expected a HuggingFace checkpoint"):
        load(tmp_path)
    path = copy_of(checkpoint("llama"), tmp_path)
    (path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="has no safetensors files"):
        load(path)


def test_a_gpus_default_dtype_is_the_checkpoints():
    """In float32 its matrix unit does nothing."""
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    for kept, expected in [("bfloat16", torch.bfloat16), ("float64", torch.float32), (None, torch.float32)]:
        config = LlamaConfig(dtype=kept)
        assert parse_dtype(None, gpu, config) == expected
        assert parse_dtype(None, cpu, config) == torch.float32
        assert parse_dtype("float16", gpu, config) == torch.float16
