"""LoRA on an exact model: PEFT's modules and files, its own bits, and what is refused."""

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora import Linear as LoraLinear
from safetensors.torch import load_file
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from transformers import AutoModelForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

from samebits.model.adapter import adapter_state, attach, resolve_placements
from samebits.model.exact import UnsupportedModelError, contract_of
from samebits.trainer import exact_model, save_weights, token_logprobs
from samebits.trainer.verify import verify

from helpers.adapters import adapted_model, lora

pytestmark = pytest.mark.usefixtures("one_thread")

IDS = [[5, 6, 7, 8] * 5, [*range(50, 91)], [3, 900]]


def scores(model, ids=IDS):
    with torch.no_grad():
        return token_logprobs(model, ids)


def equal(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_with_a_b_of_zeros_the_bits_are_the_base_models(checkpoint, dtype):
    path = checkpoint("qwen2")
    assert equal(scores(exact_model(path, dtype, adapter=lora())), scores(exact_model(path, dtype)))
    assert not equal(scores(adapted_model(path, dtype)), scores(exact_model(path, dtype)))


def test_peft_around_an_exact_model_is_the_same_model(checkpoint):
    path, config = checkpoint("llama"), lora(init_lora_weights=False)
    torch.manual_seed(0)
    ours = exact_model(path, adapter=config)
    torch.manual_seed(0)
    theirs = get_peft_model(exact_model(path), lora(init_lora_weights=False, task_type="CAUSAL_LM"))
    assert type(ours) is type(theirs)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    assert equal(scores(ours), scores(theirs))
    assert contract_of(ours) == contract_of(theirs) != contract_of(exact_model(path))


def test_rows_do_not_depend_on_the_batch_padding_or_calls(checkpoint):
    model = adapted_model(checkpoint("qwen3"), "bfloat16")
    packed = scores(model)
    assert equal(packed, [scores(model, [ids])[0] for ids in IDS])
    width = max(map(len, IDS))
    for left in (False, True):
        ids, mask = torch.zeros(3, width, dtype=torch.long), torch.zeros(3, width)
        for i, row in enumerate(IDS):
            where = slice(width - len(row), width) if left else slice(0, len(row))
            ids[i, where], mask[i, where] = torch.tensor(row), 1
        with torch.no_grad():
            padded = token_logprobs(model, ids, attention_mask=mask)
        assert equal([row[m.bool()] for row, m in zip(padded, mask, strict=True)], packed)


def test_an_engines_model_runs_before_it_is_packed(checkpoint):
    """As it does to measure what memory a step takes."""
    path = checkpoint("llama")
    model = exact_model(path)
    attach(model, resolve_placements(model.config, lora()))
    assert equal(scores(model), scores(exact_model(path)))


def test_a_disabled_adapter_leaves_the_base_model(checkpoint):
    model = adapted_model(checkpoint("llama"))
    with model.disable_adapter():
        assert equal(scores(model), scores(exact_model(checkpoint("llama"))))
    assert not equal(scores(model), scores(exact_model(checkpoint("llama"))))


def test_gradients_reach_the_adapter_alone_and_survive_checkpointing(checkpoint):
    grads = []
    for recompute in (False, True):
        model = adapted_model(checkpoint("qwen2")).train()
        if recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        sum(lp.sum() for lp in token_logprobs(model, IDS)).backward()
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert found.keys() == {name for name, _ in model.named_parameters() if ".lora_" in name}
        grads.append(found.values())
    assert equal(*grads)


def test_torchs_activation_checkpointing_changes_no_name_and_no_bit(checkpoint, tmp_path):
    """accelerate's `fsdp_activation_checkpointing` puts modules between the model and its layers."""
    plain, wrapped = adapted_model(checkpoint("qwen2")), adapted_model(checkpoint("qwen2"))
    apply_activation_checkpointing(wrapped, check_fn=lambda module: type(module) is Qwen2DecoderLayer)
    assert any("_checkpoint_wrapped_module" in name for name, _ in wrapped.named_modules())
    assert equal(scores(wrapped), scores(plain))
    assert contract_of(wrapped) == contract_of(plain)
    save_weights(wrapped, tmp_path)
    stored, state = load_file(tmp_path / "adapter_model.safetensors"), adapter_state(plain)
    assert stored.keys() == state.keys() and equal(stored.values(), [state[name] for name in stored])


def in_fp64(path, model, config):
    """PEFT's own model in fp64, with the same adapter."""
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager")
    reference = get_peft_model(base, config, autocast_adapter_dtype=False).double()
    missing = reference.load_state_dict({k: v for k, v in model.state_dict().items() if ".lora_" in k}, strict=False)
    assert not missing.unexpected_keys
    return reference


@pytest.mark.parametrize("family", ["llama3-bias", "qwen3"])
def test_log_probs_and_gradients_are_within_their_budgets_of_fp64(checkpoint, family):
    config = lora(use_rslora=True)
    ours = adapted_model(checkpoint(family), config=config)
    reference = in_fp64(checkpoint(family), ours, config)
    found = token_logprobs(ours, IDS)
    sum(lp.sum() for lp in found).backward()
    for ids, logprobs in zip(IDS, found, strict=True):
        logits = reference(torch.tensor([ids]), use_cache=False).logits[0, :-1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        assert (logprobs[1:] - expected).abs().max() < 2e-4
        expected.sum().backward()
    parameters = dict(reference.named_parameters())
    for name, parameter in ours.named_parameters():
        if parameter.requires_grad:
            exact = parameters[name].grad
            assert (parameter.grad - exact).norm() / exact.norm() < 5e-4, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_adapted_product_and_its_gradients_are_within_their_budgets_of_fp64(checkpoint, dtype):
    """The base is rounded to its dtype, and so is the sum; all between them and the gradients of A and B are fp32's."""
    half, single = torch.finfo(dtype).eps / 2, torch.finfo(torch.float32).eps / 2
    model = adapted_model(checkpoint("llama3-bias"), str(dtype).removeprefix("torch."), config=lora(use_rslora=True))
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, LoraLinear)]
    assert len(layers) == 14
    for name, layer in layers:
        x = torch.randn(16, layer.in_features).to(dtype)
        weight, down, up = (
            part.weight.detach().double().requires_grad_()
            for part in (layer.base_layer, layer.lora_A["default"], layer.lora_B["default"])
        )
        bias = torch.zeros(1) if layer.base_layer.bias is None else layer.base_layer.bias.detach()
        scale = layer.scaling["default"]
        base = x.double() @ weight.T + bias.double()
        expected = base + scale * (x.double() @ down.T @ up.T)
        found = layer(x)
        assert found.dtype == dtype and layer.lora_A["default"].weight.dtype == torch.float32
        terms = x.double().abs() @ weight.abs().T + bias.double().abs()
        terms = terms + scale * (x.double().abs() @ down.abs().T @ up.abs().T)
        steps = layer.in_features + layer.r["default"] + 4  # additions of a term, at most
        bound = half * (base.abs() + expected.abs()) + (1 + 2 * half) * steps * single * terms + half**2 * terms
        assert ((found.double() - expected).abs() <= bound).all(), name
        gradient = torch.randn(found.shape).to(dtype)
        found.backward(gradient)
        expected.backward(gradient.double())
        for factor, exact in ((layer.lora_A, down.grad), (layer.lora_B, up.grad)):
            assert (factor["default"].weight.grad - exact).norm() / exact.norm() < 1e-6, name


def test_merged_weights_have_other_bits(checkpoint, tmp_path):
    """The negative control, and the way to export: PEFT's merge on a plain model."""
    path = checkpoint("llama")
    model = adapted_model(path)
    model.save_pretrained(tmp_path / "adapter")
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    PeftModel.from_pretrained(plain, tmp_path / "adapter").merge_and_unload().save_pretrained(tmp_path / "merged")
    merged, unmerged = scores(exact_model(tmp_path / "merged")), scores(model)
    assert not equal(merged, unmerged)
    assert all((a - b).abs().max() < 1e-3 for a, b in zip(merged, unmerged, strict=True))


@pytest.mark.parametrize("writer", ["peft", "save_weights"])
def test_pefts_files_go_round(checkpoint, tmp_path, writer):
    model = adapted_model(checkpoint("llama"))
    folder = tmp_path / "adapter"
    if writer == "peft":
        model.save_pretrained(folder)
    else:
        save_weights(model, folder)
    stored, state = load_file(folder / "adapter_model.safetensors"), adapter_state(model)
    assert stored.keys() == state.keys() == get_peft_model_state_dict(model).keys()
    assert all(torch.equal(stored[name], state[name]) for name in state)
    for again in (folder, model):
        copy = exact_model(checkpoint("llama"), adapter=again)
        assert equal(scores(copy), scores(model))
        assert all(p.requires_grad == (".lora_" in name) for name, p in copy.named_parameters())
    loaded = PeftModel.from_pretrained(exact_model(checkpoint("llama")), folder)
    assert equal(scores(loaded), scores(model))


REFUSED = [
    ({"lora_dropout": 0.1}, "lora_dropout=0.1"),
    ({"use_dora": True}, "use_dora=True"),
    ({"bias": "all"}, "bias='all'"),
    ({"lora_bias": True}, "lora_bias=True"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ({"trainable_token_indices": [1, 2]}, "trainable_token_indices"),
    ({"layer_replication": [(0, 2), (0, 2)]}, "layer_replication"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
    ({"target_modules": ["lm_head"]}, "'lm_head', a LMHead"),
    ({"target_modules": ["embed_tokens"]}, "Embedding"),
]


@pytest.mark.parametrize(("setting", "named"), REFUSED, ids=lambda x: x if isinstance(x, str) else "")
def test_what_is_not_covered_is_refused_by_name(checkpoint, setting, named):
    path = checkpoint("qwen3")
    with pytest.raises(UnsupportedModelError, match=named):
        exact_model(path, adapter=lora(**setting))


def test_other_adapters_and_sources_are_refused(checkpoint, tmp_path):
    with pytest.raises(UnsupportedModelError, match="adapter type IA3Config"):
        exact_model(checkpoint("llama"), adapter=IA3Config(target_modules=["k_proj"], feedforward_modules=[]))
    with pytest.raises(ValueError, match=r"a folder with adapter_config\.json"):
        exact_model(checkpoint("llama"), adapter=tmp_path)
    with pytest.raises(ValueError, match="needs exact=True"):
        exact_model(checkpoint("llama"), exact=False, adapter=lora())


@pytest.mark.parametrize("setting", [{"lora_dropout": 0.1}, {"use_dora": True}, {"target_modules": ["lm_head"]}])
def test_what_peft_puts_into_an_exact_model_is_refused_when_it_runs(checkpoint, setting):
    model = get_peft_model(exact_model(checkpoint("qwen3")), lora(**setting))
    with pytest.raises(UnsupportedModelError, match=r"adapter .* of 'model\.layers|on 'lm_head', a LMHead"):
        model(torch.tensor([[5, 6, 7]]))


def test_a_merged_adapter_is_refused(checkpoint):
    model = adapted_model(checkpoint("llama"))
    before = scores(model)
    model.merge_adapter()
    with pytest.raises(UnsupportedModelError, match=r"q_proj' is merged"):
        scores(model)
    model.unmerge_adapter()
    assert not torch.isnan(before[0]).any()


def test_the_contract_says_rank_scale_and_targets(checkpoint):
    path = checkpoint("llama")
    lines = [
        contract_of(exact_model(path, adapter=lora(**changes))).adapter
        for changes in ({}, {"r": 4}, {"lora_alpha": 8}, {"use_rslora": True}, {"target_modules": ["q_proj"]})
    ]
    assert len(set(lines)) == len(lines)
    assert "LoRA on 14 linears" in lines[0] and "rank 5 scale 1.4" in lines[0]
    assert contract_of(exact_model(path)).adapter == "none"
    assert contract_of(exact_model(path, adapter=LoraConfig(**lora().to_dict()))).adapter == lines[0]


@pytest.mark.slow
def test_verify_proves_an_adapter_and_names_the_module_that_differs(checkpoint):
    path = checkpoint("llama")
    model = adapted_model(path)
    assert verify(path, adapter=model, use_tqdm=False).ok
    module = "model.layers.1.mlp.up_proj"
    broken = verify(path, adapter=model, use_tqdm=False, plant_fault=module)
    assert not broken.ok and broken.fault == f"{module} (ExactLinear)"
