"""verl on exact rollouts: its registries, the engines' halves without Ray, and runs of the real main_ppo (slow)."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import time
import types
import warnings

import numpy as np
import pytest
import torch

os.environ["VERL_PLATFORM"] = "cpu"  # before verl asks
pytest.importorskip("verl")

from tensordict import NonTensorData, TensorDict
from verl.plugin.platform import get_platform
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPEngineConfig, HFModelConfig, RolloutConfig
from verl.workers.engine import EngineRegistry
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.replica import RolloutMode, RolloutReplicaRegistry

from samebits import LLM, SamplingParams, WeightUpdateError
from samebits.engine.weights.spec import TensorSpec
from samebits.integrations import verl as plugin
from samebits.integrations.verl import limits, rollout
from samebits.integrations.verl import trainer as trainer_side
from samebits.kernels.contract import NumericsError
from samebits.model.adapter import adapter_state
from samebits.trainer import exact_model, token_logprobs

from helpers import verl_runs
from helpers.adapters import adapted_model, lora
from helpers.models import make_checkpoint

# --- registries ---------------------------------------------------------------------------------------------------


def test_verl_finds_everything_by_its_own_registries():
    assert RolloutReplicaRegistry.get("samebits") is rollout.Replica
    assert get_rollout_class("samebits", "async") is rollout.ServerAdapter
    assert EngineRegistry.get_engine_cls("language_model", "fsdp2") is trainer_side.ExactFSDPEngine
    assert get_trainer_cls("samebits") is trainer_side.RepeatableTrainer
    assert get_platform().device_name == "cpu"


def test_another_vendor_gets_verls_own_engine(monkeypatch):
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "plain")
    assert not issubclass(EngineRegistry.get_engine_cls("language_model", "fsdp2"), trainer_side.ExactFSDPEngine)


def test_an_installed_samebits_is_a_plug_in_of_verls():
    try:
        distribution = importlib.metadata.distribution("samebits")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("samebits is not installed here")
    entries = {e.group: e.value for e in distribution.entry_points}
    assert entries["verl.plugins"] == plugin.__name__


@pytest.mark.parametrize("first", ["verl", "samebits.integrations.verl"])
def test_a_module_that_verl_imports_may_take_ours_apart(first):
    """Whichever of both a process imports first: Ray's may begin with a class of ours."""
    modules = {"VERL_USE_EXTERNAL_MODULES": f"{plugin.__name__},helpers.verl_bent"}
    path = os.pathsep.join([verl_runs.TESTS, *sys.path])
    script = f"import {first}; from samebits.integrations.verl import rollout; print(rollout.Server.__name__)"
    done = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | modules | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout.split()[-1] == "Bent", done.stderr


LATER = ("workers.rollout.replica", "TokenOutput"), ("utils.fs", "copy_to_local")


@pytest.mark.parametrize(("module", "name"), [("workers.rollout.base", "_ROLLOUT_REGISTRY"), *LATER])
def test_a_verl_without_a_hook_is_told_by_its_version(monkeypatch, module, name):
    """Of those that are only called later, too."""
    monkeypatch.delattr(importlib.import_module(f"verl.{module}"), name)
    with pytest.raises(ImportError, match=rf"this verl is 0\.9\.\S+, .* needs verl>=0\.9\.1,<0\.10: .*{name}"):
        plugin.register()


@pytest.mark.parametrize(("missing", "told"), [("transfer_queue", True), ("verl.trainer.ppo.v1", False)])
def test_a_package_that_is_not_there_is_no_fault_of_verls(monkeypatch, missing, told):
    def fail(*_):
        raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

    monkeypatch.setattr(RolloutReplicaRegistry, "register", fail)
    with pytest.raises(ImportError) as error:
        plugin.register()
    assert ("pip install 'samebits[verl]'" in str(error.value)) == told == ("this verl is" not in str(error.value))
    assert missing in str(error.value)


# --- limits -------------------------------------------------------------------------------------------------------


def nested(setting: str, value) -> object:
    """A configuration with one setting."""
    for name in reversed(setting.split(".")):
        value = {name: value}
    return value


LIMITS = [
    (table, setting, allowed[0])
    for table in (limits.ROLLOUT, limits.MODEL, limits.ENGINE)
    for settings in table.values()
    for setting, allowed in settings.items()
]


@pytest.mark.parametrize(("table", "setting", "usual"), LIMITS, ids=[setting for _, setting, _ in LIMITS])
def test_a_setting_that_breaks_the_promise_is_refused_by_name(table, setting, usual):
    limits.check(nested(setting, usual), table, "section")
    bad = not usual if isinstance(usual, bool) else "other"
    with pytest.raises(ValueError, match=rf"section\.{setting}={bad!r}: must be {usual!r}; \w+"):
        limits.check(nested(setting, bad), table, "section")


def test_the_configuration_that_verl_reads_must_be_the_models_own(model_path, tmp_path):
    """verl names it itself where nobody has."""
    own = HFModelConfig(path=str(model_path), load_tokenizer=False)
    assert own.hf_config_path == own.path
    limits.check(own, limits.MODEL, "model")
    other = shutil.copytree(model_path, tmp_path / "other")
    with pytest.raises(ValueError, match=r"model\.hf_config_path='.*other'"):
        limits.check(
            HFModelConfig(str(model_path), hf_config_path=str(other), load_tokenizer=False), limits.MODEL, "model"
        )


def test_verls_defaults_need_no_more_than_documented():
    config = RolloutConfig(name="samebits", tensor_model_parallel_size=1)
    limits.check(config, limits.ROLLOUT, "rollout")
    limits.check(FSDPEngineConfig(strategy="fsdp2"), limits.ENGINE, "fsdp_config")
    with pytest.raises(ValueError, match=r"rollout\.top_p=0\.5") as refusal:
        limits.check(RolloutConfig(name="samebits", top_p=0.5), limits.ROLLOUT, "rollout")
    assert "rollout.tensor_model_parallel_size=2" in str(refusal.value)


# --- the trainer's half -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("verl") / "model", "qwen2", vocab_size=211)


@pytest.fixture
def trainer(model_path):
    """verl's engine as far as `forward_step` needs it: no process group, no FSDP."""
    made = trainer_side.ExactFSDPEngine.__new__(trainer_side.ExactFSDPEngine)
    made.module = exact_model(model_path)
    made.engine_config = types.SimpleNamespace(forward_only=False)
    made.get_data_parallel_group = lambda: None
    made.get_data_parallel_size = lambda: 1
    before = rollout.ServerAdapter.trained_steps
    rollout.ServerAdapter.trained_steps = 7
    yield made
    rollout.ServerAdapter.trained_steps = before


def micro_batch(model, steps=((7, 7), (7, 7), (7, 7)), temperature=0.7) -> TensorDict:
    """Three rollouts as verl has them, with the log-probs that the trainer computes; the second has a masked token."""
    prompts = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
    responses = [[20, 21, 22, 23], [30, 31, 32], [40]]
    masks = [[1, 1, 1, 1], [1, 0, 1], [1]]
    sequences = [p + r for p, r in zip(prompts, responses, strict=True)]
    with torch.no_grad():
        values = token_logprobs(model, sequences, SamplingParams(temperature=temperature))
    scored = [v[len(p) :] * torch.tensor(m) for v, p, m in zip(values, prompts, masks, strict=True)]

    def jagged(rows, dtype=torch.long):
        return torch.nested.as_nested_tensor([torch.as_tensor(r, dtype=dtype) for r in rows], layout=torch.jagged)

    batch = TensorDict(
        {
            "input_ids": jagged(sequences),
            "prompts": jagged(prompts),
            "responses": jagged(responses),
            "response_mask": jagged(masks),
            "rollout_log_probs": jagged(scored, torch.float32),
            "temperature": NonTensorData(temperature),
            "calculate_entropy": NonTensorData(True),
        },
        batch_size=[3],
    )
    fields = [{"min_global_steps": low, "max_global_steps": high} for low, high in steps]
    tu.assign_non_tensor_stack(batch, "extra_fields", fields)
    tu.assign_non_tensor_stack(batch, "uid", ["g1", "g2", "g3"])
    return batch


def test_a_forward_gives_the_bits_of_token_logprobs(trainer):
    batch = micro_batch(trainer.module)
    loss, found = trainer.forward_step(batch, None, True)
    sequences = [row.tolist() for row in batch["input_ids"].unbind()]
    expected = token_logprobs(trainer.module, sequences, SamplingParams(temperature=0.7), return_entropy=True)
    for name, values in zip(("log_probs", "entropy"), expected, strict=True):
        for row, value, prompt in zip(
            found["model_output"][name].unbind(), values, batch["prompts"].unbind(), strict=True
        ):
            start = len(prompt) - 1
            assert torch.equal(row[start:-1], value[start + 1 :].detach())  # token t's value is at place t - 1
            assert not row[:start].any() and row[-1] == 0
    assert loss == 1.0


def test_the_loss_gets_a_gradient_and_says_how_many_tokens_were_compared(trainer):
    def loss_function(model_output, data, dp_group):
        return -model_output["log_probs"].values().sum(), {}

    loss, found = trainer.forward_step(micro_batch(trainer.module), loss_function, False)
    loss.backward()
    assert all(p.grad is not None and p.grad.any() for p in trainer.module.parameters())
    assert found["metrics"]["compared_tokens"].aggregate() == 7


def test_a_rollout_that_differs_by_a_bit_stops_the_step(trainer):
    batch = micro_batch(trainer.module)
    values = batch["rollout_log_probs"].values()
    wrong = torch.nextafter(values[6], torch.tensor(0.0))
    trainer_value = values[6].item()
    values[6] = wrong
    values_said = f"{wrong.item():.9g} in the rollout, {trainer_value:.9g} in the trainer"
    message = rf"1 of 2 tokens .* token 2, id 32, of a rollout of group g2 at step 7: {values_said}"
    with pytest.raises(NumericsError, match=message):
        trainer.forward_step(batch, None, True)
    values[6] = trainer_value
    values[5] = -1.0  # a masked token is the environment's
    trainer.forward_step(batch, None, True)


@pytest.mark.parametrize("steps", [((6, 6), (6, 7), (7, 8)), ((None, None),) * 3])
def test_rollouts_of_other_weights_are_not_compared(trainer, steps):
    batch = micro_batch(trainer.module, steps)
    batch["rollout_log_probs"].values().fill_(-1.0)
    trainer.forward_step(batch, None, True)
    rollout.ServerAdapter.trained_steps = 8
    batch = micro_batch(trainer.module)
    batch["rollout_log_probs"].values().fill_(-1.0)
    trainer.forward_step(batch, None, True)


@pytest.mark.parametrize("missing", ["rollout_log_probs", "extra_fields"])
def test_a_batch_that_cannot_be_compared_is_told_of(trainer, missing):
    batch = micro_batch(trainer.module)
    del batch[missing]
    with pytest.warns(UserWarning, match=f"not compared: the batch has no {missing}"):
        trainer.forward_step(batch, None, True)
    rollout.ServerAdapter.trained_steps = None  # the weights have moved on: there is nothing to compare
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        trainer.forward_step(batch, None, True)


def test_the_base_below_an_adapter_is_no_policy_to_compare(trainer, model_path):
    """verl scores its reference, the model without its adapter, by the actor's own engine."""
    trainer.module = adapted_model(model_path)
    batch = micro_batch(trainer.module)
    _, policy = trainer.forward_step(batch, None, True)
    with trainer.disable_adapter():
        _, reference = trainer.forward_step(batch, None, True)
    plain = exact_model(model_path)
    expected = token_logprobs(
        plain, [row.tolist() for row in batch["input_ids"].unbind()], SamplingParams(temperature=0.7)
    )
    found = reference["model_output"]["log_probs"].unbind()
    assert all(torch.equal(f[-2], e[-1].detach()) for f, e in zip(found, expected, strict=True))
    assert not torch.equal(
        policy["model_output"]["log_probs"].values(), reference["model_output"]["log_probs"].values()
    )
    with pytest.raises(ZeroDivisionError), trainer.disable_adapter():
        raise ZeroDivisionError
    batch["rollout_log_probs"].values()[0] = -1.0
    with pytest.raises(NumericsError, match="1 of 4 tokens"):  # compared again
        trainer.forward_step(batch, None, True)


def test_outputs_that_are_not_offered_and_several_temperatures_are_refused(trainer):
    batch = micro_batch(trainer.module)
    tu.assign_non_tensor_data(batch, "distillation_use_topk", True)
    with pytest.raises(ValueError, match="distillation_use_topk"):
        trainer.forward_step(batch, None, True)
    with pytest.raises(ValueError, match=r"temperatures \[0\.5, 1\.0\]"):
        trainer_side._temperature(torch.tensor([0.5, 1.0, 0.5]))


# --- the rollouts' half -------------------------------------------------------------------------------------------


class FakeRay:
    """What the server asks of Ray, for one that runs in this process. fellow: an actor that holds the same weights."""

    exceptions = types.SimpleNamespace(RayError=RuntimeError)

    def __init__(self, died: bool = False, fellow: rollout.Server | None = None):
        context = types.SimpleNamespace(
            was_current_actor_reconstructed=died, get_actor_name=lambda: "samebits_rollout_0"
        )
        names = ["samebits_rollout_0", "other_actor"] + ["samebits_rollout_1"] * (fellow is not None)
        self.util = types.SimpleNamespace(list_named_actors=lambda: names)
        self.get_runtime_context = lambda: context
        self.fellow = fellow

    def get_actor(self, name):
        assert name == "samebits_rollout_1"
        return types.SimpleNamespace(weights=types.SimpleNamespace(remote=self.fellow.weights))


def make_server(model_path, mode=RolloutMode.HYBRID, adapter=None, **settings) -> rollout.Server:
    own = {"kv_cache_memory_bytes": 2**21, **settings}
    config = RolloutConfig(name="samebits", tensor_model_parallel_size=1, prompt_length=16, response_length=100,
                           dtype="float32", max_num_seqs=8, engine_kwargs={"samebits": own})  # fmt: skip
    return rollout.Server(config, str(model_path), mode, "cpu", adapter)


async def send(target: rollout.Server, weights, steps: int | None, contract=None, **others) -> None:
    """Send a model's weights, or pairs, by verl's calls of a trainer's rank, a tensor at a time."""
    adapter = rollout.ServerAdapter.__new__(rollout.ServerAdapter)
    adapter.config = types.SimpleNamespace(checkpoint_engine=types.SimpleNamespace(update_weights_bucket_megabytes=0))
    adapter._call = lambda method, *args: getattr(target, method)(*args)
    pairs = list(weights.state_dict().items() if isinstance(weights, torch.nn.Module) else weights)
    pairs = [pair for pair in pairs if pair[0] != "lm_head.weight"]  # tied
    before = rollout.ServerAdapter.trained_steps
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rollout.ServerAdapter, "contract", contract)
        await adapter.update_weights(iter(pairs), global_steps=steps, **others)
    assert rollout.ServerAdapter.trained_steps == steps
    rollout.ServerAdapter.trained_steps = before


def run(monkeypatch, ray, coroutine):
    monkeypatch.setattr(rollout, "ray", ray)
    return asyncio.run(coroutine)


PARAMS = {"temperature": 0.9, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}


def test_a_server_generates_the_trainers_log_probs_under_the_weights_that_were_sent(monkeypatch, model_path, tmp_path):
    other = exact_model(make_checkpoint(tmp_path / "other", "qwen2", seed=5, vocab_size=211))

    async def scenario():
        made = make_server(model_path)
        await send(made, other, 3, made.llm.contract)
        return await asyncio.gather(*(made.generate([5, 6, 7 + i], PARAMS, f"r{i}") for i in range(3)))

    for i, output in enumerate(run(monkeypatch, FakeRay(), scenario())):
        sequence = [5, 6, 7 + i, *output.token_ids]
        (values,) = token_logprobs(other, [sequence], SamplingParams(temperature=0.9))
        assert torch.equal(torch.tensor(output.log_probs), values[3:].detach())
        assert (output.extra_fields["min_global_steps"], output.extra_fields["max_global_steps"]) == (3, 3)
        assert output.stop_reason == "completed"


def test_a_request_that_is_sent_again_draws_the_same_tokens_also_from_a_server_that_died(
    monkeypatch, model_path, tmp_path
):
    other = exact_model(make_checkpoint(tmp_path / "other", "qwen2", seed=5, vocab_size=211))

    async def scenario():
        fellow = make_server(model_path)
        await send(fellow, other, 3)
        first = await fellow.generate([5, 6, 7], PARAMS, "r")
        again = await fellow.generate([5, 6, 7], PARAMS, "r")  # a group's next sample under verl's full_determinism
        monkeypatch.setattr(rollout, "ray", FakeRay(died=True, fellow=fellow))
        born_again = make_server(model_path)
        return first, again, await born_again.generate([5, 6, 7], PARAMS, "r")

    first, again, recovered = run(monkeypatch, FakeRay(), scenario())
    assert recovered == first
    assert again.token_ids != first.token_ids


def test_a_server_that_died_alone_serves_nothing_until_the_next_update(monkeypatch, model_path):
    async def scenario():
        made = make_server(model_path)
        with pytest.raises(Exception, match="no weights; wake it up, or update its weights"):
            await made.generate([5, 6, 7], PARAMS, "r")
        with pytest.raises(WeightUpdateError, match="died in the midst"):
            await made.load_weights([], [])
        await send(made, exact_model(model_path), 4)
        return await made.generate([5, 6, 7], PARAMS, "r")

    assert run(monkeypatch, FakeRay(died=True), scenario()).extra_fields["global_steps"] == 4


def test_an_update_is_all_or_nothing_and_of_the_same_numerics(monkeypatch, model_path):
    bf16 = LLM(model_path, dtype="bfloat16", kv_cache_memory_bytes=2**20).contract

    async def scenario():
        made = make_server(model_path)
        await send(made, exact_model(model_path), 1)
        with pytest.raises(NumericsError, match="dtype: 'float32' here, 'bfloat16' there"):
            await made.begin_weights(bf16)
        await made.begin_weights(made.llm.contract)
        updates = [made.update]
        with pytest.raises(WeightUpdateError, match="missing"):
            await made.commit_weights(2)
        for _ in range(2):  # the second time one is open
            await made.begin_weights(made.llm.contract)
            updates.append(made.update)
        with pytest.raises(WeightUpdateError, match="unknown tensor 'nobody'"):
            await made.load_weights([np.zeros(4, np.uint8)], [TensorSpec("nobody", (1,), torch.float32)])
        with pytest.raises(WeightUpdateError, match="no update is open"):
            await made.commit_weights(2)
        assert not any(update.open for update in updates)
        inexact = make_server(model_path, exact=False)
        with pytest.raises(NumericsError, match="the engine is not"):
            await inexact.begin_weights(made.llm.contract)
        return made.global_steps

    assert run(monkeypatch, FakeRay(), scenario()) == 1


def test_a_sleeping_server_holds_no_memory_and_wakes_up_with_the_trainers_weights(monkeypatch, model_path):
    async def scenario():
        made = make_server(model_path)
        model = exact_model(model_path)
        await send(made, model, 1)
        await made.generate([5, 6, 7], PARAMS, "r")
        await made.sleep()
        assert not made.llm.has_kv_cache and not made.llm.has_weights
        late = asyncio.create_task(made.generate([5, 6, 7], PARAMS, "r"))
        await made.wake_up(["weights"])
        await send(made, model, 1)
        await asyncio.sleep(0.1)
        assert not late.done()
        await made.wake_up(["kv_cache"])
        return await late

    output = run(monkeypatch, FakeRay(), scenario())
    (values,) = token_logprobs(exact_model(model_path), [[5, 6, 7, *output.token_ids]], SamplingParams(temperature=0.9))
    assert torch.equal(torch.tensor(output.log_probs), values[3:].detach())


def test_a_partial_rollout_says_which_weights_each_token_is_of(monkeypatch, model_path, tmp_path):
    old = exact_model(model_path)
    new = exact_model(make_checkpoint(tmp_path / "new", "qwen2", seed=9, vocab_size=211))

    async def scenario():
        made = make_server(model_path)
        await send(made, old, 1)
        first = asyncio.create_task(made.generate([5, 6, 7], {**PARAMS, "max_tokens": 90}, "r"))
        while not made.llm.engine.stats().generation_tokens:
            await asyncio.sleep(0.001)
        aborted = await made.abort_all_requests()
        part = await first
        rest = asyncio.create_task(made.generate([5, 6, 7, *part.token_ids], {**PARAMS, "max_tokens": 9}, "r"))
        await send(made, new, 2)
        assert not rest.done()
        await made.resume_generation()
        return aborted, part, await rest

    aborted, part, rest = run(monkeypatch, FakeRay(), scenario())
    assert aborted == {"aborted_count": 1, "request_ids": ["r"]}
    assert (part.stop_reason, rest.stop_reason) == ("aborted", "completed")
    assert part.extra_fields["weight_versions"] == [(1, 0, len(part.token_ids))]
    assert rest.extra_fields["weight_versions"] == [(2, 0, len(rest.token_ids))]
    sequence = [5, 6, 7, *part.token_ids, *rest.token_ids]
    middle = 3 + len(part.token_ids)
    for model, span, values in ((old, slice(3, middle), part.log_probs), (new, slice(middle, None), rest.log_probs)):
        (found,) = token_logprobs(model, [sequence], SamplingParams(temperature=0.9))
        assert torch.equal(torch.tensor(values), found[span].detach())


def as_verl_sends_a_base(model) -> list[tuple[str, torch.Tensor]]:
    """With vLLM's names for what is below an adapter."""
    pairs = model.state_dict().items()
    return [(re.sub(r"_proj\.(\w+)$", r"_proj.base_layer.\1", name), tensor) for name, tensor in pairs]


def test_a_server_with_an_adapter_gets_its_base_once_and_the_adapter_each_time(monkeypatch, model_path, tmp_path):
    base = make_checkpoint(tmp_path / "base", "qwen2", seed=5, vocab_size=211)
    first, second = (adapted_model(base, seed=seed) for seed in (1, 2))

    async def scenario():
        fellow = make_server(model_path, adapter=lora())
        await send(fellow, as_verl_sends_a_base(exact_model(base)), 3)
        outputs = []
        for steps, model in ((3, first), (4, second)):
            await fellow.sleep()
            assert fellow.llm.has_weights and not fellow.llm.has_kv_cache
            await fellow.wake_up(["weights"])
            await send(fellow, adapter_state(model).items(), steps, fellow.llm.contract)
            await fellow.wake_up(["kv_cache"])
            outputs.append(await fellow.generate([5, 6, 7], PARAMS, "r"))
        monkeypatch.setattr(rollout, "ray", FakeRay(died=True, fellow=fellow))
        outputs.append(await make_server(model_path, adapter=lora()).generate([5, 6, 7], PARAMS, "r"))
        with pytest.raises(NumericsError, match="adapter"):
            await fellow.begin_weights(make_server(model_path).llm.contract)
        return outputs

    *outputs, recovered = run(monkeypatch, FakeRay(), scenario())
    assert recovered == outputs[1]
    for output, model, step in zip(outputs, (first, second), (3, 4), strict=True):
        (values,) = token_logprobs(model, [[5, 6, 7, *output.token_ids]], SamplingParams(temperature=0.9))
        assert torch.equal(torch.tensor(output.log_probs), values[3:].detach())
        assert output.extra_fields["min_global_steps"] == output.extra_fields["max_global_steps"] == step


def test_the_rollouts_adapter_is_the_one_of_verls_settings(model_path, tmp_path):
    settings = {"path": str(model_path), "load_tokenizer": False, "override_config": {"attn_implementation": "sdpa"}}
    assert rollout.adapter_of(HFModelConfig(**settings)) is None
    config = HFModelConfig(**settings, lora_rank=4, lora_alpha=9, target_modules=["q_proj", "up_proj"])
    found = rollout.adapter_of(config)
    assert (found.r, found.lora_alpha, found.target_modules) == (4, 9, {"q_proj", "up_proj"})
    adapted_model(model_path).save_pretrained(tmp_path / "adapter")
    folder = {"lora_adapter_path": str(tmp_path / "adapter")}
    assert rollout.adapter_of(HFModelConfig(**settings, **folder, lora_rank=5)) == str(tmp_path / "adapter")
    with pytest.raises(ValueError, match=r"needs model\.lora_rank"):
        rollout.adapter_of(HFModelConfig(**settings, **folder))


@pytest.mark.parametrize(
    ("arguments", "params", "message"),
    [
        ({"image_data": ["picture"]}, {}, "image_data: samebits generates from token ids alone"),
        ({}, {"repetition_penalty": 1.1}, "repetition_penalty must be 1.0"),
        ({"prompt_ids": list(range(3, 119))}, {}, "prompt of 116 tokens leaves no room in max_model_len 116"),
    ],
)
def test_a_request_that_cannot_be_exact_is_refused(monkeypatch, model_path, arguments, params, message):
    async def scenario():
        made = make_server(model_path)
        await made.generate(**{"prompt_ids": [5], "sampling_params": PARAMS | params, "request_id": "r", **arguments})

    with pytest.raises(ValueError, match=message):
        run(monkeypatch, FakeRay(), scenario())


# --- the real thing -----------------------------------------------------------------------------------------------

CURVES = ("critic/score/mean", "actor/grad_norm", "actor/pg_loss", "actor/entropy", "response_length/mean")
CORRECTION = "algorithm.rollout_correction"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("runs")
    verl_runs.prepare(made, vocab_size=512)
    return made


def finish(process, folder, log) -> list[dict]:
    """Wait for a run and return its steps."""
    try:
        code = process.wait(timeout=1500)
    finally:
        process.kill()
    assert code == 0, (folder / f"{log}.txt").read_text()[-3000:]
    return verl_runs.metrics(folder, log)


def train(folder, log, model=None, **settings) -> list[dict]:
    return finish(verl_runs.start(folder, model or folder / "model", log, **settings), folder, log)


def assert_exact(steps, count) -> None:
    assert len(steps) == count
    for step in steps:
        assert {name: step[name] for name in verl_runs.EXACT} == verl_runs.EXACT
        assert step["actor/compared_tokens"] > 0


def curves(steps, names=CURVES) -> list[list[float]]:
    return [[step[name] for name in names] for step in steps]


def generations(folder, name) -> list:
    """What a run's rollouts said, in order."""
    files = sorted((folder / name).glob("*.jsonl"), key=lambda file: int(file.stem))
    rows = [json.loads(line) for file in files for line in file.read_text().split("\n") if line]
    return [(row["step"], row["input"], row["output"], row["score"]) for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_ten_steps_are_exact_and_repeat_as_bits(folder, ranks):
    """With a reference, validation and checkpoints."""
    settings = {
        "ranks": ranks,
        "actor_rollout_ref.actor.use_kl_loss": True,
        "trainer.val_before_train": True,
        "trainer.test_freq": 5,
        "trainer.save_freq": 5,
    }
    runs = []
    for name in (f"first_{ranks}", f"second_{ranks}"):
        runs.append(train(folder, name, steps=10, **settings, **{"trainer.default_local_dir": folder / name}))
        assert (folder / name / "global_step_10/actor").is_dir()
    first, second = runs
    assert_exact(first, 10)
    assert first[0]["actor/kl_loss"] == 0.0 < first[-1]["actor/kl_loss"]
    assert any(name.startswith("val-core/") for name in first[4])
    assert curves(first) == curves(second)


@pytest.fixture(scope="module")
def uncorrected(folder):
    """The steps of a run without a correction."""
    return train(folder, "uncorrected")


@pytest.mark.slow
@pytest.mark.parametrize(("level", "rejection"), [("token", "token_k1"), ("sequence", "seq_sum_k1")])
def test_a_correction_weighs_all_by_one_rejects_nothing_and_changes_no_bit(folder, uncorrected, level, rejection):
    """Thresholds of 1.0: it would reject what differs by a bit."""
    steps = train(
        folder,
        level,
        **{
            f"{CORRECTION}.rollout_is": level,
            f"{CORRECTION}.rollout_is_threshold": 1.0,
            f"{CORRECTION}.rollout_rs": rejection,
            f"{CORRECTION}.rollout_rs_threshold": "1.0_1.0",
        },
    )
    assert_exact(steps, 3)
    assert curves(steps) == curves(uncorrected)
    for step in steps:
        weights = {name: value for name, value in step.items() if name.startswith("rollout_corr/rollout_is_")}
        assert "rollout_corr/rollout_is_mean" in weights
        assert weights == {name: float(name.endswith(("mean", "max", "min", "size"))) for name in weights}
        rejected = {name: value for name, value in step.items() if name.startswith("rollout_corr/rollout_rs_")}
        assert f"rollout_corr/rollout_rs_{rejection}_masked_fraction" in rejected
        assert not any(rejected.values())


@pytest.mark.slow
def test_bypass_mode_changes_no_bit(folder, uncorrected):
    """verl then logs neither the differences nor the entropy."""
    profiled = {"global_profiler.steps": "[2]"}  # which changes no bit, either
    steps = train(folder, "bypass", **{f"{CORRECTION}.bypass_mode": True}, **profiled)
    assert not any(step.keys() & verl_runs.EXACT.keys() for step in steps)
    logged = [*(name for name in CURVES if name != "actor/entropy"), "actor/compared_tokens"]
    assert curves(steps, logged) == curves(uncorrected, logged)
    assert all(step["actor/ppo_kl"] == 0.0 < step["actor/compared_tokens"] for step in steps)


@pytest.mark.slow
def test_a_run_that_resumes_goes_on_with_the_same_bits(folder):
    """Saved at step 2; the data's order, the optimizer and the rollouts' seeds go on, too."""
    whole = train(folder, "whole", steps=4, **{"trainer.save_freq": 2, "trainer.default_local_dir": folder / "whole"})
    resume = {
        "trainer.resume_mode": "resume_path",
        "trainer.resume_from_path": folder / "whole/global_step_2",
        "trainer.default_local_dir": folder / "resumed",
    }
    resumed = train(folder, "resumed", steps=4, **resume)
    assert [step["training/global_step"] for step in resumed] == [3, 4]
    assert_exact(whole, 4)
    assert_exact(resumed, 2)
    assert curves(resumed) == curves(whole[2:])
    assert curves(whole[:2]) != curves(whole[2:])  # or a run that began anew could pass


@pytest.mark.slow
def test_a_replica_dies_and_the_tokens_are_the_same(folder):
    """Two ranks, two replicas."""
    long = {"ranks": 2, "data.max_response_length": 200}
    expected = train(folder, "alive", **long, **{"trainer.rollout_data_dir": folder / "alive"})
    assert_exact(expected, 3)
    process = verl_runs.start(
        folder, folder / "model", "killed", **long, **{"trainer.rollout_data_dir": folder / "killed"}
    )
    while not verl_runs.metrics(folder, "killed"):
        assert process.poll() is None
        time.sleep(0.05)
    victims = verl_runs.replicas(folder, "killed")
    assert len(victims) == 2
    idle = sum(victims[0].cpu_times()[:2])
    while sum(victims[0].cpu_times()[:2]) < idle + 0.1:  # seconds, into the second step's rollouts
        assert process.poll() is None
        time.sleep(0.01)
    victims[0].kill()
    found = finish(process, folder, "killed")
    assert_exact(found, 3)
    assert "was started again, with the weights of step 1" in (folder / "killed.txt").read_text()
    assert generations(folder, "killed") == generations(folder, "alive")
    assert curves(found) == curves(expected)


ADAPTER = {
    "actor_rollout_ref.model.lora_rank": 4,
    "actor_rollout_ref.model.lora_alpha": 8,
    "actor_rollout_ref.model.target_modules": "all-linear",
}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_ten_steps_of_an_adapter_are_exact_and_repeat_as_bits(folder, ranks):
    """Its reference is the base. That is sent once, or read from the checkpoint; shards may be offloaded."""
    kl = {"ranks": ranks, "actor_rollout_ref.actor.use_kl_loss": True}
    first = train(folder, f"adapter_{ranks}", steps=10, **ADAPTER, **kl)
    read = {"actor_rollout_ref.rollout.load_format": "safetensors"}
    read["actor_rollout_ref.actor.fsdp_config.param_offload"] = True
    second = train(folder, f"adapter_again_{ranks}", steps=10, **ADAPTER, **kl, **read)
    assert_exact(first, 10)
    assert first[0]["actor/kl_loss"] == 0.0 < first[-1]["actor/kl_loss"]
    assert curves(first) == curves(second)


@pytest.mark.slow
def test_an_adapter_goes_on_where_its_files_end_and_a_run_with_one_resumes(folder):
    adapted_model(folder / "model", config=lora(task_type="CAUSAL_LM")).save_pretrained(folder / "lora")
    start = ADAPTER | {
        "actor_rollout_ref.model.lora_rank": 5,
        "actor_rollout_ref.model.lora_adapter_path": folder / "lora",
    }
    saved = {"trainer.save_freq": 2, "trainer.default_local_dir": folder / "adapted"}
    whole = train(folder, "adapted", steps=4, **start, **saved)
    resume = {
        "trainer.resume_mode": "resume_path",
        "trainer.resume_from_path": folder / "adapted/global_step_2",
        "trainer.default_local_dir": folder / "adapted_again",
    }
    resumed = train(folder, "adapted_again", steps=4, **start, **resume)
    assert_exact(whole, 4)
    assert_exact(resumed, 2)
    assert curves(resumed) == curves(whole[2:])
    assert whole[0]["critic/score/mean"] != train(folder, "base", steps=1)[0]["critic/score/mean"]


@pytest.mark.slow
def test_a_rollout_that_differs_by_a_bit_ends_the_run(folder):
    bent = {"VERL_USE_EXTERNAL_MODULES": "samebits.integrations.verl,helpers.verl_bent"}
    process = verl_runs.start(folder, folder / "model", "bent", environment=bent)
    assert process.wait(timeout=1500) != 0
    said = (folder / "bent.txt").read_text()
    assert "compute_log_prob" in said  # before an update
    assert re.search(r"NumericsError: .*token 2, id \d+, of a rollout of group 00000001-00000\d at step 0", said)
    assert not verl_runs.metrics(folder, "bent")


TOOLS = '''
from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.tools.function_tool import function_tool


@function_tool
def look_up(word: str) -> str:
    """Look a word up.

    Args:
        word: What to look up.
    """
    return f"{word}: {sum(map(ord, word)) % 1000}"


@ToolParser.register("all")
class All(ToolParser):
    """Each answer is a call: what a model without training writes."""

    stop_token_ids = list(range(300, 360))

    async def extract_tool_calls(self, responses_ids, tools=None):
        call = FunctionCall(name="look_up", arguments='{"word": "%d"}' % len(responses_ids))
        return self.tokenizer.decode(responses_ids), [call]
'''


@pytest.mark.slow
def test_verls_own_loop_of_tools_is_exact(folder):
    (folder / "tools.py").write_text(TOOLS)
    turns = "actor_rollout_ref.rollout.multi_turn"
    settings = {
        f"{turns}.enable": True,
        f"{turns}.function_tool_path": folder / "tools.py",
        f"{turns}.format": "all",
        f"{turns}.max_assistant_turns": 3,
        "actor_rollout_ref.rollout.agent.default_agent_loop": "tool_agent",
        "data.max_response_length": 128,
    }
    steps = train(folder, "tools", steps=3, **settings)
    assert_exact(steps, 3)
    assert all(step["num_turns/max"] == 6 for step in steps)  # the prompt, three answers, two results
    compared = [step["actor/compared_tokens"] for step in steps]
    assert all(c < s["response_length/mean"] * 16 for c, s in zip(compared, steps, strict=True))  # not the tools' words


def three_turns(folder) -> dict[str, object]:
    """The settings of an agent loop of three turns."""
    (folder / "turns.yaml").write_text("- name: three_turns\n  _target_: helpers.verl_turns.ThreeTurns\n")
    rollout = "actor_rollout_ref.rollout"
    return {
        f"{rollout}.agent.agent_loop_config_path": folder / "turns.yaml",
        f"{rollout}.agent.default_agent_loop": "three_turns",
        "data.max_response_length": 96,
    }


@pytest.mark.slow
def test_three_turns_of_an_agent_are_exact_and_find_their_prefix(folder):
    steps = train(folder, "turns", steps=2, **three_turns(folder))
    assert_exact(steps, 2)
    cached = [line.split("turns:")[1] for line in (folder / "turns.txt").read_text().splitlines() if "turns:" in line]
    assert cached
    assert all(first <= second < third for first, second, third in map(json.loads, cached))


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [{}, ADAPTER], ids=["whole", "adapter"])
def test_partial_rollouts_are_exact_where_they_are_of_the_trainers_weights(folder, adapter):
    mode = {"trainer.v1.trainer_mode": "colocate_async", "data.max_response_length": 100}
    steps = train(folder, f"async_{len(adapter)}", steps=4, **mode, **adapter)
    stale = [s["training/off_policy/trajectory_staleness_worst/max"] for s in steps]
    differs = [s["training/rollout_probs_diff_max"] != 0.0 for s in steps]
    assert len(steps) == 4
    assert differs == [bool(s) for s in stale]
    assert not all(differs)
    assert any(differs)  # or nothing was partial here


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_two_steps_of_smollm2_are_exact(folder, smollm2, ranks):
    shape = {
        "ranks": ranks,
        "data.max_prompt_length": 64,
        "data.max_response_length": 16,
        "data.train_batch_size": 2,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 2,
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 4,
    }
    memory = {"+actor_rollout_ref.rollout.engine_kwargs.samebits.kv_cache_memory_bytes": 2**26}
    slower = {"actor_rollout_ref.actor.optim.lr": 1e-5, "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 2}
    assert_exact(train(folder, f"smollm2_{ranks}", model=smollm2, steps=2, **shape, **memory, **slower), 2)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "ranks"), [("olmoe", 2), ("mixtral", 1)])
def test_a_mixture_of_experts_is_exact(folder, family, ranks):
    """Mixtral's experts have other names on a hub than those that verl would send."""
    model = verl_runs.prepare_model(folder / family, family, vocab_size=512)
    assert_exact(train(folder, f"{family}-{ranks}", model=model, ranks=ranks), 3)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "name"), [("float32", "fp32"), ("float16", "fp16")])
def test_other_dtypes_are_exact_where_both_sides_have_them(folder, dtype, name):
    precision = f"{{param_dtype: {name}, reduce_dtype: fp32, buffer_dtype: fp32}}"
    both = {"+actor_rollout_ref.actor.fsdp_config.mixed_precision": precision, "actor_rollout_ref.rollout.dtype": dtype}
    assert_exact(train(folder, dtype, steps=2, **both), 2)


@pytest.mark.slow
def test_an_engine_of_another_dtype_is_an_error(folder):
    process = verl_runs.start(folder, folder / "model", "dtype", **{"actor_rollout_ref.rollout.dtype": "float32"})
    assert process.wait(timeout=1500) != 0
    assert "numerics contracts differ" in (folder / "dtype.txt").read_text()
    assert not verl_runs.metrics(folder, "dtype")


@pytest.mark.slow
def test_the_control_verls_own_engine_differs(folder):
    attention = {"+actor_rollout_ref.model.override_config.attn_implementation": "sdpa"}
    weights = {f"{CORRECTION}.rollout_is": "token"}
    steps = train(folder, "plain", steps=2, environment={"VERL_ENGINE_VENDOR": "plain"}, **attention, **weights)
    assert all(step["training/rollout_probs_diff_max"] > 0 for step in steps)
    assert all(step["rollout_corr/rollout_is_min"] < 1.0 < step["rollout_corr/rollout_is_max"] for step in steps)
    assert all("actor/compared_tokens" not in step for step in steps)
