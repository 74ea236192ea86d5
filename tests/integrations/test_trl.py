"""TRL's own trainers on exact rollouts: each ratio that they log is 1, and a difference stops the run."""

from __future__ import annotations

import functools
import importlib
import json
import os
import pathlib
import re
import subprocess
import sys
from contextlib import closing, contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("trl")

import trl
from datasets import Dataset
from packaging.version import Version
from peft import LoraConfig, get_peft_model
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOTrainer
from trl.generation import vllm_client, vllm_generation
from trl.trainer import grpo_trainer
from trl.trainer.utils import add_fused_lm_head

import samebits.integrations.trl as ours
from samebits import LLM, NumericsError, SamplingParams
from samebits.engine import StructuredOutputsParams
from samebits.integrations import Client, RemoteEngine
from samebits.integrations.trl import ExactGeneration, ExactTrainer, WeightTransfer, add_exact_head
from samebits.trainer import exact_model

from helpers import trl_run
from helpers.engines import BLOCK
from helpers.moe import save_tiny_moe
from helpers.serving import Serving, add_tokenizer, free_port, served_checkpoint

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"),
]

BEFORE_1_16 = Version(trl.__version__) < Version("1.16")


@pytest.fixture(scope="module")
def path(checkpoint, tmp_path_factory):
    return served_checkpoint(checkpoint("llama"), tmp_path_factory.mktemp("trl") / "model")


# --- the ratio is 1 ---

DIGITS = StructuredOutputsParams(regex="[0-9]+")
FILTERS = {"temperature": 1.3, "top_k": 20, "top_p": 0.9}
HALF = {"model_init_kwargs": {"dtype": "bfloat16"}, "bf16": True}
TOKEN_RATIOS = {"vllm_importance_sampling_mode": "token_truncate"}  # TRL's default are those of whole sequences
ADAPTER = {"adapter": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}, "learning_rate": 0.05}
RUNS = {
    "float32": {},
    "bfloat16, recomputed activations": HALF | TOKEN_RATIOS | {"gradient_checkpointing": True},
    "autocast": {"bf16": True},
    "filters": FILTERS,
    "min_p": TOKEN_RATIOS | {"min_p": 0.05, "temperature": 0.8},
    "KL": {"beta": 0.1},
    "KL and filters": FILTERS | {"beta": 0.1},
    "two iterations": {"num_iterations": 2, "max_steps": 4, "epsilon": 0.0},
    "two iterations with filters": FILTERS | {"num_iterations": 2, "max_steps": 4, "learning_rate": 0.03},
    "accumulation": {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "per_device_train_batch_size": 4},
    "truncated completions masked": {"mask_truncated_completions": True},
    "GSPO": {"loss_type": "grpo", "importance_sampling_level": "sequence", "num_iterations": 2, "max_steps": 4},
    "CISPO": TOKEN_RATIOS | {"loss_type": "cispo", "epsilon_high": 5.0},
    "adapter": ADAPTER,
    "adapter in bfloat16, KL": HALF | ADAPTER | {"beta": 0.1},
    "sampling keywords": {"generation_kwargs": {"min_tokens": 3, "stop_token_ids": [7, 9]}},
}
RLOO = ("float32", "filters", "KL and filters", "two iterations", "accumulation", "truncated completions masked")


FAST = ("float32", "bfloat16, recomputed activations", "KL and filters", "two iterations", "adapter")


def cases(kind, names):
    """Parameters of one trainer's runs; all but a few are slow."""
    return [pytest.param(kind, name, marks=[] if name in FAST else pytest.mark.slow) for name in names]


@pytest.mark.parametrize(("kind", "name"), [*cases("grpo", RUNS), *cases("rloo", RLOO)], ids=str)
def test_every_ratio_that_trl_logs_is_one(path, tmp_path, kind, name):
    result = trl_run.run(kind, path, tmp_path, **RUNS[name])
    assert trl_run.ratios(result) == {1.0}
    assert len(result["logs"]) == RUNS[name].get("max_steps", 3)
    for entry in result["logs"]:
        if kind == "grpo" and "sampling/importance_sampling_ratio/min" in entry:  # a step that generated
            assert entry["sampling/sampling_logp_difference/max"] == 0.0
        assert torch.isfinite(torch.tensor([entry["loss"], entry["grad_norm"], entry["entropy"]])).all()
    if "KL" in name:
        kl = [entry["kl"] for entry in result["logs"]]
        assert all(torch.isfinite(torch.tensor(kl)))
        assert kl[0] == 0.0 or "filters" in name  # the reference is the policy's start, without filters
        assert kl[-1] != kl[0]
    if name == "two iterations":  # the policy's own ratio is 1, which epsilon=0 leaves, until the update between
        clipped = [entry["clip_ratio/region_mean"] for entry in result["logs"]]
        assert (clipped[0], clipped[2]) == (0.0, 0.0) and clipped[1] > 0


@pytest.mark.parametrize("kind", ["grpo", pytest.param("rloo", marks=pytest.mark.slow)])
def test_a_mixture_of_experts_is_exact_with_trls_auxiliary_loss(tmp_path, kind):
    path = save_tiny_moe(tmp_path / "model", "qwen3_moe", vocab_size=300)
    add_tokenizer(path, vocab_size=300)
    plain = trl_run.run(kind, path, tmp_path)
    assert trl_run.ratios(plain) == {1.0}
    assert all(entry["aux_loss"] > 1.9 for entry in plain["logs"])  # k at least, of evenly busy experts
    heavy = trl_run.run(kind, path, tmp_path, max_steps=1, router_aux_loss_coef=1.0)
    (found,), first = heavy["logs"], plain["logs"][0]
    assert found["aux_loss"] == first["aux_loss"]
    coefficient = 1.0 - 0.001  # less that of config.json
    assert found["loss"] - first["loss"] == pytest.approx(coefficient * first["aux_loss"], abs=1e-3)
    assert found["grad_norm"] != first["grad_norm"]


@contextmanager
def trls_own_model(dtype):
    """Exact rollouts, but the model and the log-probs that TRL has of itself."""

    def load(name, *_):
        return AutoModelForCausalLM.from_pretrained(name, dtype=getattr(torch, dtype))

    def head(model, params):
        add_fused_lm_head(model, params.temperature, outputs=("log_probs", "entropy"))

    def sync(self):
        self.engine.update_weights(self.trainer.model.state_dict().items())

    engine = {"exact_model": load, "add_exact_head": head, "make_llm": lambda model, *_: exact_llm(model, dtype)}
    with patch.multiple(ours, **engine), patch.object(ExactGeneration, "sync_weights", sync):
        yield


def exact_llm(model, dtype):
    return LLM(model.name_or_path, dtype=dtype, **trl_run.ENGINE)


@pytest.mark.skipif(BEFORE_1_16, reason="TRL 1.15's own head needs Triton")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_control_trls_own_log_probs_are_not_the_rollouts(path, tmp_path, dtype):
    options = {"model_init_kwargs": {"dtype": dtype}, "trainer": {"check": False}}
    with trls_own_model(dtype):
        found = trl_run.ratios(trl_run.run("grpo", path, tmp_path, **options))
    assert min(found) < 1.0 < max(found)
    assert trl_run.ratios(trl_run.run("grpo", path, tmp_path, **options)) == {1.0}


def test_a_reward_curve_and_the_weights_repeat_as_bits(path, tmp_path):
    runs = [trl_run.run("grpo", path, tmp_path, max_steps=5) for _ in range(2)]
    assert curve(runs[0]) == curve(runs[1])
    assert runs[0]["weights"] == runs[1]["weights"]
    other = trl_run.run("grpo", path, tmp_path, max_steps=5, seed=4)
    assert curve(other) != curve(runs[0])


def curve(result):
    return [(entry.get("reward"), entry["loss"], entry["entropy"]) for entry in result["logs"]]  # rewarded when sampled


@pytest.mark.parametrize("updates", [1, 2])  # per rollout: the checkpoint is after the last
@pytest.mark.parametrize("kind", ["grpo", pytest.param("rloo", marks=pytest.mark.slow)])
def test_a_run_that_is_resumed_goes_on_as_bits(path, tmp_path, kind, updates):
    options = {"max_steps": 4, "beta": 0.05, "save_strategy": "steps", "save_steps": 2, "num_iterations": updates}
    whole = trl_run.run(kind, path, tmp_path, **options)
    assert (tmp_path / "checkpoint-2").is_dir()
    resumed = trl_run.run(kind, path, tmp_path / "again", resume=str(tmp_path / "checkpoint-2"), **options)
    assert curve(resumed) == curve(whole)
    assert resumed["weights"] == whole["weights"]


def test_evaluation_is_exact_and_leaves_training_as_it_was(path, tmp_path):
    data = {"eval_dataset": trl_run.Dataset.from_dict({"prompt": ["one", "two"]})}
    options = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4}
    trainer = trl_run.make("grpo", path, tmp_path, trainer=data, **options)
    trainer.train()
    evaluated = [entry for entry in trainer.state.log_history if "eval_reward" in entry]
    name = "eval_sampling/importance_sampling_ratio/"
    assert {entry[name + part] for entry in evaluated for part in ("min", "max")} == {1.0}
    with_eval = [entry["reward"] for entry in trainer.state.log_history if "loss" in entry]
    assert with_eval == [reward for reward, _, _ in curve(trl_run.run("grpo", path, tmp_path))]


def test_a_saved_model_serves_the_trained_weights(path, tmp_path):
    trainer = trl_run.make("grpo", path, tmp_path)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    trainer.vllm_generation.sync_weights()
    saved = LLM(tmp_path / "saved", **trl_run.ENGINE)
    assert saved.weight_checksums() == trainer.vllm_generation.engine.weight_checksums()


# --- engines ---


@pytest.mark.slow
def test_every_kind_of_engine_gives_the_same_run(path, tmp_path, ray_cluster):
    expected = trl_run.run("grpo", path, tmp_path)
    with Serving(path) as server, closing(LLM(path, replicas=2, **trl_run.ENGINE)) as replicas:
        trls = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": server.url}
        kinds = [
            {"engine": LLM(path, **trl_run.ENGINE)},
            {"engine": replicas},
            {"engine": server.url},
            {"engine": RemoteEngine(Client(server.url), path)},
            {"engine": None, **trls},
        ]
        for options in kinds:
            found = trl_run.run("grpo", path, tmp_path, **options)
            assert (curve(found), found["weights"]) == (curve(expected), expected["weights"])
        assert server.llm.stats().generation_tokens > 0


def test_a_model_of_ones_own_is_trained(path, tmp_path):
    expected = trl_run.run("grpo", path, tmp_path)
    found = trl_run.run("grpo", path, tmp_path, trainer={"model": exact_model(path)})
    assert found["weights"] == expected["weights"]
    with pytest.raises(TypeError, match="exact_model"):
        trl_run.make("grpo", path, tmp_path, trainer={"model": AutoModelForCausalLM.from_pretrained(path)})


def test_a_peft_model_of_ones_own_is_its_own_reference(path, tmp_path):
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False)
    model = get_peft_model(exact_model(path), config)
    result = trl_run.run("grpo", path, tmp_path, trainer={"model": model}, beta=0.1, learning_rate=0.05)
    assert trl_run.ratios(result) == {1.0}
    first, *others = [entry["kl"] for entry in result["logs"]]
    assert first == 0.0 < min(others)


def test_a_given_tokenizers_eos_ends_a_completion(path, tmp_path):
    """TRL ends one at the tokenizer's EOS as well as at the checkpoint's."""

    def sample(**options):
        trainer = trl_run.make("grpo", path, tmp_path, **options)
        return trainer.vllm_generation.generate([[5, 6, 7]] * 4, None, 4)[1]

    whole = sample()
    end = whole[0][2]
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)
    expected = [ids[: ids.index(end) + 1] if end in ids else ids for ids in whole]
    assert sample(trainer={"processing_class": tokenizer}) == expected != whole
    ignored = {"trainer": {"processing_class": tokenizer}, "generation_kwargs": {"ignore_eos": True}}
    assert min(map(len, sample(**ignored))) == 12
    early = {"trainer": {"processing_class": tokenizer}, "generation_kwargs": {"min_tokens": 3}}
    assert end not in [token for ids in sample(**early) for token in ids[:3]]
    assert trl_run.ratios(trl_run.run("grpo", path, tmp_path, **early)) == {1.0}


def test_other_trainers_on_the_same_hooks_take_the_mixin(path, tmp_path):
    gmpo = importlib.import_module("trl.experimental.gmpo")
    kind = type("ExactGMPOTrainer", (ExactTrainer, gmpo.GMPOTrainer), {})
    with patch.dict(trl_run.TRAINERS, {"gmpo": (kind, gmpo.GMPOConfig)}):
        assert trl_run.ratios(trl_run.run("gmpo", path, tmp_path)) == {1.0}


@pytest.mark.parametrize(
    "name",
    [
        "experimental.sdpo.SDPO", "experimental.sdft.SDFT", "experimental.gold.GOLD", "experimental.iw_opd.IWOPD",
        "trainer.Distillation",
    ],
)  # fmt: skip
def test_trainers_of_trl_without_the_hooks_are_refused_by_name(path, name):
    module, _, method = f"trl.{name}".rpartition(".")
    trainer, config = (getattr(importlib.import_module(module), method + part) for part in ("Trainer", "Config"))
    kind = type("Mine", (ExactTrainer, trainer), {})
    with pytest.raises(ImportError, match=r"no trainer under Mine has .*add_fused_lm_head.*GRPOTrainer"):
        kind(str(path), args=config(use_cpu=True, bf16=False))


# --- a difference stops the run ---


@pytest.mark.parametrize("kind", ["grpo", "rloo"])
def test_an_engine_that_is_not_exact_stops_the_run_before_the_optimizer_moves(path, tmp_path, kind):
    engine = trl_run.ENGINE | {"exact": False}
    with pytest.raises(NumericsError):
        trl_run.run(kind, path, tmp_path, engine=engine)


def bend(row, token):
    """An engine whose first rollout has one log-prob with another last bit."""
    plain = ExactGeneration.generate

    def generate(self, prompts, *args, **kwargs):
        prompts, ids, logprobs, tokens = plain(self, prompts, *args, **kwargs)
        value = torch.tensor(logprobs[row][token][0])
        logprobs[row][token][0] = torch.nextafter(value, torch.tensor(0.0)).item()
        self.logprobs = [[value for (value,) in sample] for sample in logprobs]
        return prompts, ids, logprobs, tokens

    return patch.object(ExactGeneration, "generate", generate)


@pytest.mark.parametrize("kind", ["grpo", pytest.param("rloo", marks=pytest.mark.slow)])
def test_one_bit_of_one_token_is_found_and_named(path, tmp_path, kind):
    trainer = trl_run.make(kind, path, tmp_path)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    with bend(5, 3), pytest.raises(NumericsError) as error:
        trainer.train()
    message = (
        r"1 of \d+ tokens .* token 3 of sample 1 of group 1: (-[\d.e-]+) in the rollout, (-[\d.e-]+) in the trainer"
    )
    found = re.search(message, str(error.value))
    assert found is not None and float(found[1]) != float(found[2])
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))
    with bend(5, 3):
        result = trl_run.run(kind, path, tmp_path, trainer={"check": False})
    assert trl_run.ratios(result) != {1.0}


def test_an_engine_of_another_dtype_is_refused_at_once(path, tmp_path):
    with pytest.raises(NumericsError, match="bfloat16"):
        trl_run.make("grpo", path, tmp_path, engine=trl_run.ENGINE | {"dtype": "bfloat16"})
    with Serving(path, {"dtype": "bfloat16"}) as server, pytest.raises(NumericsError, match="bfloat16"):
        trl_run.make("grpo", path, tmp_path, engine=server.url)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_liger_kernel": True}, "use_liger_kernel"),
        ({"torch_compile": True}, "torch_compile"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha"),
        ({"cast_lm_head_to_fp32": True}, "cast_lm_head_to_fp32"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"use_transformers_continuous_batching": True}, "use_transformers_continuous_batching"),
        ({"vllm_structured_outputs_regex": "a+"}, "vllm_structured_outputs_regex"),
        ({"vllm_tensor_parallel_size": 2}, "vllm_tensor_parallel_size.*pipeline_parallel_size"),
        ({"vllm_enable_sleep_mode": True}, "vllm_enable_sleep_mode.*vllm_gpu_memory_utilization"),
        ({"trust_remote_code": True}, "trust_remote_code"),
        ({"vllm_server_timeout": 9.0}, "vllm_server_timeout.*start the server first"),
        ({"vllm_group_port": 9}, "vllm_group_port.*leave it out"),
        ({"vllm_importance_sampling_correction": False}, "vllm_importance_sampling_correction.*check=False"),
        ({"model_init_kwargs": {"use_kernels": True}}, r"model_init_kwargs \['use_kernels'\]"),
        ({"generation_kwargs": {"presence_penalty": 1.0}}, r"generation_kwargs \['presence_penalty'\]"),
        ({"generation_kwargs": {"seed": 1}}, r"generation_kwargs \['seed'\]"),
        ({"generation_kwargs": {"structured_outputs": DIGITS}}, r"generation_kwargs \['structured_outputs'\]"),
        (FILTERS | {"beta": 0.1, "num_iterations": 2}, "beta > 0"),
        ({"generation_kwargs": {"min_tokens": 3}, "trainer": {"tools": [print]}}, "min_tokens"),
        ({"trainer": {"peft_config": LoraConfig(lora_dropout=0.1)}}, "lora_dropout"),
        ({"trainer": {"peft_config": LoraConfig()}, "beta": 0.1, "top_k": 5}, "reference model of its own"),
        ({"trainer": {"quantization_config": "4 bits"}}, "quantization_config"),
        ({"engine": {"tensor_parallel_size": 2}}, "tensor_parallel_size"),
    ],
    ids=str,
)
def test_what_would_break_the_promise_is_refused_by_name(path, tmp_path, options, message):
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=message):
        trl_run.make("grpo", path, tmp_path, **options)


def test_trls_settings_of_its_engine_are_ours_unless_the_engine_has_its_own(path, tmp_path):
    settings = {"vllm_gpu_memory_utilization": 0.4, "vllm_max_model_length": 64}
    config = trl_run.make("grpo", path, tmp_path, **settings).vllm_generation.engine.config
    assert (config.gpu_memory_utilization, config.max_model_len) == (0.4, 64)
    engine = trl_run.ENGINE | {"gpu_memory_utilization": 0.5, "max_model_len": 48}
    config = trl_run.make("grpo", path, tmp_path, engine=engine, **settings).vllm_generation.engine.config
    assert (config.gpu_memory_utilization, config.max_model_len) == (0.5, 48)


def test_nothing_is_passed_by_position_beyond_the_dataset(path, tmp_path):
    kind, config = trl_run.configure("grpo", tmp_path)
    data = Dataset.from_dict({"prompt": trl_run.PROMPTS})
    assert kind(str(path), trl_run.sevens, config, data, engine=trl_run.ENGINE).train_dataset is data
    with pytest.raises(TypeError, match="positional"):
        kind(str(path), trl_run.sevens, config, data, data, engine=trl_run.ENGINE)


@pytest.mark.parametrize("name", ["deepspeed", "parallelism_config"])
def test_other_ways_to_shard_are_refused_by_name(path, tmp_path, name):
    kind, config = trl_run.configure("grpo", tmp_path)
    setattr(config, name, "given")  # afterwards: as an argument it would have to be a real one
    with pytest.raises(ValueError, match=f"{name}='given'.*FSDP2"):
        kind(str(path), trl_run.sevens, config)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"distributed_type": "FSDP"}, "FSDP1.*FSDP2 alone"),
        ({"distributed_type": "DEEPSPEED"}, "DeepSpeed"),
        ({"parallelism_config": "TP"}, "parallelism_config"),
        ({"mixed_precision": "fp8"}, "mixed_precision=fp8"),
        ({"backend": "INDUCTOR"}, "dynamo_backend"),
    ],
    ids=str,
)
def test_settings_of_accelerate_that_change_bits_are_refused(path, settings, message):
    usual = {"distributed_type": "NO", "parallelism_config": None, "mixed_precision": "no", "backend": "NO"}
    chosen = usual | settings
    state = SimpleNamespace(dynamo_plugin=SimpleNamespace(backend=SimpleNamespace(value=chosen.pop("backend"))))
    accelerator = SimpleNamespace(**chosen, state=state, is_fsdp2=False, device=torch.device("cpu"))
    with pytest.raises(ValueError, match=message):
        ours.make_llm(exact_model(path), accelerator, trl_run.ENGINE, SamplingParams())


def test_images_are_refused_on_both_sides(path):
    model = exact_model(path)
    with pytest.raises(NotImplementedError, match="images"):
        ExactGeneration(None, None, SamplingParams()).generate([[3]], [object()], 1)
    add_exact_head(model, SamplingParams())
    ids = torch.tensor([[3, 4]])
    with pytest.raises(NotImplementedError, match="pixel_values"):
        model(input_ids=ids, labels=ids, pixel_values=torch.ones(1, 3, 8, 8), fused_lm_head=True)


def test_autocast_that_reaches_no_op_is_said(path, tmp_path, caplog):
    trl_run.make("grpo", path, tmp_path, bf16=True)
    assert "computes in float32" in caplog.text and "model_init_kwargs" in caplog.text
    caplog.clear()
    trl_run.make("grpo", path, tmp_path, **HALF)
    assert "computes in" not in caplog.text


def test_a_version_of_trl_without_the_hooks_is_named(path, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(trl, "__version__", "1.14.2")
        with pytest.raises(ImportError, match=r"trl>=1\.15.*1\.14\.2"):
            importlib.reload(ours)
    with monkeypatch.context() as patched:
        patched.delattr(trl.trainer.utils, "FusedCausalLMOutput")
        with pytest.raises(ImportError, match=r"trl>=1\.15.*this is 1\."):
            importlib.reload(ours)
    monkeypatch.delattr(grpo_trainer, "add_fused_lm_head")
    with pytest.raises(ImportError, match=r"add_fused_lm_head.*TRL 1\.15"):
        trl_run.make("grpo", path, tmp_path)


# --- tools, rollout_func, other parts ---


@pytest.mark.parametrize("options", [{}, FILTERS | TOKEN_RATIOS, FILTERS | {"beta": 0.1}], ids=str)
def test_a_tool_loop_of_several_turns_is_exact(path, tmp_path, options):
    calls = []

    @functools.wraps(trl_run.double)
    def double(x):
        calls.append(x)
        return trl_run.double(x)

    with trl_run.parsing():
        parts = trl_run.tool_loop(path, double)
        trainer = trl_run.make("grpo", path, tmp_path, trainer=parts, **trl_run.TOOL_LOOP | options)
        turns = record_turns(trainer.vllm_generation.engine)
        trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(calls) > 20 and max(entry["reward"] for entry in logs) > 3
    assert trl_run.ratios({"logs": logs}) == {1.0}
    assert all(torch.isfinite(torch.tensor([entry["loss"], entry["grad_norm"]])).all() for entry in logs)
    assert len(turns) > 20 and sum(cached > 0 for _, cached in turns) > 10
    for held, cached in turns:
        assert cached >= (held - 1) // BLOCK * BLOCK  # the last token's KV is not there yet


def record_turns(llm):
    """A list that grows with the turns that go on from earlier ones: tokens of those, and tokens found in the cache."""
    turns, spoken = [], {}
    plain = llm.generate

    def generate(*args, **kwargs):
        outputs = plain(*args, **kwargs)
        known = spoken.setdefault(llm.weight_version, [])  # an update makes KV stale
        for output in outputs:
            prompt = output.prompt_token_ids
            held = max((len(ids) for ids in known if prompt[: len(ids)] == ids), default=0)
            if held:
                turns.append((held, output.num_cached_tokens))
        known += [output.prompt_token_ids + c.token_ids for output in outputs for c in output.completions]
        return outputs

    llm.generate = generate
    return turns


@pytest.mark.parametrize("kind", ["grpo", "plain grpo"])
def test_a_rollout_func_has_the_head_too(path, tmp_path, kind):
    """With our trainer TRL measures the ratio; with its own one the head alone gives the engine's bits."""
    llm = LLM(path, **trl_run.ENGINE)
    params = SamplingParams(max_tokens=12, temperature=0.8)
    sampled, scored = [], []

    def rollout(prompts, trainer):
        llm.update_weights(trainer.accelerator.unwrap_model(trainer.model))
        outputs = llm.generate(prompts, params, use_tqdm=False)
        samples = [output.completions[0] for output in outputs]
        sampled.append({tuple(s.token_ids): s.logprobs for s in samples})
        prompt_ids = [output.prompt_token_ids for output in outputs]
        completion_ids = [s.token_ids for s in samples]
        return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": [s.logprobs for s in samples]}

    score = GRPOTrainer._get_per_token_logps_and_entropies

    def record(self, model, ids, mask, keep, **kwargs):
        found = score(self, model, ids, mask, keep, **kwargs)
        for row, logprobs, there in zip(ids[:, -keep:], found[0].detach(), mask[:, -keep:].bool(), strict=True):
            scored.append((tuple(row[there].tolist()), logprobs[there].tolist()))
        return found

    parts = {"rollout_func": rollout} | ({"model": exact_model(path)} if kind.startswith("plain") else {})
    trainer = trl_run.make(kind, path, tmp_path, trainer=parts, temperature=0.8)
    if kind.startswith("plain"):
        add_exact_head(trainer.model, params)
    with patch.object(GRPOTrainer, "_get_per_token_logps_and_entropies", record):
        trainer.train()
    every = {ids: logprobs for step in sampled for ids, logprobs in step.items()}
    assert len(scored) >= 24 and len(every) > 20
    assert all(every[ids] == logprobs for ids, logprobs in scored)
    if not kind.startswith("plain"):
        assert trl_run.ratios({"logs": [e for e in trainer.state.log_history if "loss" in e]}) == {1.0}


@pytest.mark.skipif(BEFORE_1_16, reason="TRL 1.15's client doesn't ask")
def test_trls_own_client_learns_what_log_probs_mean(path, monkeypatch):
    pytest.importorskip("requests")
    monkeypatch.setattr(vllm_client, "is_vllm_available", lambda *_, **__: True)
    with Serving(path) as server:
        client = vllm_client.VLLMClient(base_url=server.url)
        assert client.get_server_info()["model_config"]["logprobs_mode"] == "processed_logprobs"
        assert client.get_world_size() == 1


@pytest.mark.skipif(BEFORE_1_16, reason="TRL 1.15's own head needs Triton")
def test_trls_own_server_mode_trains_on_a_server(path, tmp_path, monkeypatch):
    """TRL's client and model, as with vLLM; only the weights go our way, since theirs needs NCCL and GPUs."""
    pytest.importorskip("requests")
    monkeypatch.setattr(vllm_client, "is_vllm_available", lambda *_, **__: True)
    monkeypatch.setattr(vllm_generation, "is_vllm_available", lambda *_, **__: True)
    with Serving(path) as server, Client(server.url) as sender:
        monkeypatch.setattr(vllm_client.VLLMClient, "init_communicator", lambda *_, **__: None)
        monkeypatch.setattr(
            vllm_client.VLLMClient, "update_named_params", lambda _, __, tensors: sender.update_weights(dict(tensors))
        )
        trls = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": server.url}
        trainer = trl_run.make("plain grpo", path, tmp_path, **trls)
        trainer.train()
        logs = [entry for entry in trainer.state.log_history if "loss" in entry]
        found = trl_run.ratios({"logs": logs})
        assert len(logs) == 3 and all(entry["grad_norm"] > 0 for entry in logs)
        assert 1 - 1e-4 < min(found) < 1.0 < max(found) < 1 + 1e-4  # TRL's model and log-softmax round
        assert server.llm.weight_version == 3  # before each step
        before = server.llm.weight_checksums()
        trainer.vllm_generation.sync_weights()
        expected = LLM(path, **trl_run.ENGINE)
        expected.update_weights(trainer.model.state_dict().items())
        assert server.llm.weight_checksums() == expected.weight_checksums() != before


def test_weights_of_the_asynchronous_trainer_arrive(path, tmp_path, checkpoint):
    source = exact_model(checkpoint("llama", bos_token_id=3))
    with torch.no_grad():
        source.model.norm.weight += 1
    with Serving(path) as server:
        before = server.llm.weight_checksums()
        transfer = WeightTransfer(server.url)
        transfer.init_weight_transfer()
        for version in (1, 2):
            transfer.pause()
            transfer.send_weights((name, p.detach()) for name, p in source.named_parameters())
            transfer.resume()
            assert server.llm.weight_version == version
        transfer.destroy()
        expected = LLM(path, **trl_run.ENGINE)
        expected.update_weights(source)
        assert server.llm.weight_checksums() == expected.weight_checksums() != before


def varlen_attention(query, key, value, starts, path_starts, *_, softmax_scale, **__):
    """What TRL asks of FlashAttention 3, a kernel for GPUs: each segment's queries see its path, up to themselves."""
    segments = query.split(starts.diff().tolist())
    paths = path_starts.diff().tolist()
    parts = []
    for q, k, v in zip(segments, key.split(paths), value.split(paths), strict=True):
        seen = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
        heads = [x.transpose(0, 1) for x in (q, k, v)]
        found = scaled_dot_product_attention(*heads, attn_mask=seen, scale=softmax_scale, enable_gqa=True)
        parts.append(found.transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.slow
@pytest.mark.skipif(BEFORE_1_16, reason="TRL 1.15's asynchronous trainer has other parts")
def test_the_asynchronous_trainer_trains_on_a_server(path, tmp_path):
    """Sampling goes on in a process of TRL's own; what TRL has for GPUs alone is replaced."""
    pytest.importorskip("aiohttp")
    trainers = importlib.import_module("trl.experimental.async_grpo.async_grpo_trainer")
    packing = importlib.import_module("trl.experimental.async_grpo.packing")
    worker = importlib.import_module("trl.experimental.async_grpo.async_rollout_worker")
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.response_template = {"defaults": {"role": "assistant"}, "fields": {"content": {"content": "text"}}}
    data = trl_run.Dataset.from_dict({"prompt": [[{"role": "user", "content": p}] for p in trl_run.PROMPTS]})
    with Serving(path, name=str(path)) as server, pytest.MonkeyPatch.context() as patched:
        patched.setattr(worker, "is_vllm_available", lambda: True)
        patched.setattr(trainers, "get_peak_flops_per_device", lambda *_: None)
        patched.setattr(packing, "_flash_attn", lambda: SimpleNamespace(flash_attn_varlen_func=varlen_attention))
        before = server.llm.weight_checksums()
        config = trainers.AsyncGRPOConfig(
            output_dir=str(tmp_path), vllm_server_base_url=server.url, max_steps=3, per_device_train_batch_size=8,
            num_generations=4, max_completion_length=12, learning_rate=1e-3, gradient_checkpointing=False, bf16=False,
            use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True, seed=3, token_budget=512,
        )  # fmt: skip
        trainer = trainers.AsyncGRPOTrainer(
            str(path), trl_run.sevens, config, data, tokenizer, weight_transfer=WeightTransfer(server.url)
        )
        trainer.train()
        logs = [entry for entry in trainer.state.log_history if "loss" in entry]
        assert len(logs) == 3 and all(entry["grad_norm"] > 0 for entry in logs)
        assert logs[0]["ratio"] == pytest.approx(1, abs=1e-5)  # TRL's rounding; later rollouts may be of older weights
        assert server.llm.weight_version == 4  # the first update is before the first step
        expected = LLM(path, **trl_run.ENGINE)
        expected.update_weights(trainer.model.state_dict().items())
        assert server.llm.weight_checksums() == expected.weight_checksums() != before


# --- several processes, and a real model ---


def torchrun(world: int, tmp_path: pathlib.Path, accelerate: dict | None = None, **job) -> dict:
    """Run a job of trl_run in several processes; the settings of accelerate are its environment variables."""
    given, found = tmp_path / "job.json", tmp_path / "result.json"
    given.write_text(json.dumps(job))
    root = pathlib.Path(ours.__file__).parents[1]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(root.parent), str(root / "tests")]), "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true", **(accelerate or {}),
    }  # fmt: skip
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nproc-per-node={world}",
        f"--master-port={free_port()}",
    ]
    done = subprocess.run(
        [*command, str(root / "tests/helpers/trl_run.py"), str(given), str(found)],
        env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(found.read_text())


FSDP2 = {
    "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "LlamaDecoderLayer", "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
}  # fmt: skip
ALONE = "one process"
WORLDS = {"two ranks": {}, "FSDP2": FSDP2}
SHARED = {
    "float32": {},
    "bfloat16 from float32": {"bf16": True},
    "KL, filters, recomputed activations": FILTERS | {"beta": 0.1, "gradient_checkpointing": True},
    "adapter": ADAPTER,
    "adapter, bfloat16 from float32, KL": ADAPTER | {"bf16": True, "beta": 0.1},
    "adapter beside bfloat16": ADAPTER | {"model_init_kwargs": {"dtype": "bfloat16"}},
}


def run_in(world: str, tmp_path: pathlib.Path, kind: str, path, accelerate: dict | None = None, **options) -> dict:
    """Train in one process, or in one of WORLDS: each rank has whole groups, and they sample what one process does."""
    if world == ALONE:
        return trl_run.run(kind, path, tmp_path, **options)
    job = {"kind": kind, "path": str(path), "folder": str(tmp_path / "out"), "fsdp": world == "FSDP2"}
    return torchrun(2, tmp_path, WORLDS[world] | (accelerate or {}), **job, per_device_train_batch_size=4, **options)


@pytest.mark.slow
@pytest.mark.parametrize("options", SHARED.values(), ids=SHARED)
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("kind", ["grpo", "rloo"])
def test_two_ranks_are_exact_and_sample_what_one_does(path, tmp_path, kind, world, options):
    result = run_in(world, tmp_path, kind, path, **options)
    assert trl_run.ratios(result) == {1.0}
    if not options.get("bf16"):
        alone = trl_run.run(kind, path, tmp_path, **options)
        assert result["logs"][0]["reward"] == pytest.approx(alone["logs"][0]["reward"], abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_a_mixture_of_experts_on_two_ranks_is_exact_and_repeats(tmp_path, world):
    path = save_tiny_moe(tmp_path / "model", "qwen3_moe", vocab_size=300)
    add_tokenizer(path, vocab_size=300)
    wrapped = {"FSDP_TRANSFORMER_CLS_TO_WRAP": "Qwen3MoeDecoderLayer"}
    runs = [run_in(world, tmp_path, "grpo", path, wrapped, router_aux_loss_coef=0.1) for _ in range(2)]
    assert trl_run.ratios(runs[0]) == {1.0}
    assert all(entry["aux_loss"] > 1.9 for entry in runs[0]["logs"])
    assert curve(runs[0]) == curve(runs[1]) and runs[0]["weights"] == runs[1]["weights"]


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_a_tool_loop_on_two_ranks_is_exact_and_repeats(path, tmp_path, world):
    runs = [run_in(world, tmp_path, "grpo", path, tools=True) for _ in range(2)]
    assert trl_run.ratios(runs[0]) == {1.0}
    assert max(entry["reward"] for entry in runs[0]["logs"]) > 3
    assert curve(runs[0]) == curve(runs[1]) and runs[0]["weights"] == runs[1]["weights"]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, ADAPTER], ids=["whole", "adapter"])
@pytest.mark.parametrize("world", WORLDS)
def test_two_ranks_that_resume_go_on_as_bits(path, tmp_path, world, options):
    options = options | {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    whole = run_in(world, tmp_path, "grpo", path, **options)
    (tmp_path / "again").mkdir()
    resumed = run_in(world, tmp_path / "again", "grpo", path, resume=str(tmp_path / "out/checkpoint-2"), **options)
    assert trl_run.ratios(resumed) == {1.0}
    assert curve(resumed) == curve(whole)
    assert resumed["weights"] == whole["weights"]


@pytest.mark.slow
def test_one_rank_may_read_the_weights_for_both(path, tmp_path):
    result = run_in("FSDP2", tmp_path, "grpo", path, accelerate={"FSDP_CPU_RAM_EFFICIENT_LOADING": "true"})
    assert trl_run.ratios(result) == {1.0}
    alone = trl_run.run("grpo", path, tmp_path)
    assert result["logs"][0]["reward"] == pytest.approx(alone["logs"][0]["reward"], abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, ADAPTER], ids=["whole", "adapter"])
def test_activations_that_accelerate_recomputes_change_nothing(path, tmp_path, options):
    options = options | {"gradient_checkpointing": False}  # TRL's default; one of the two may do it
    recomputed = run_in("FSDP2", tmp_path, "grpo", path, {"FSDP_ACTIVATION_CHECKPOINTING": "true"}, **options)
    (tmp_path / "kept").mkdir()
    kept = run_in("FSDP2", tmp_path / "kept", "grpo", path, **options)
    assert trl_run.ratios(recomputed) == {1.0}
    assert curve(recomputed) == curve(kept)


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_two_ranks_share_a_server(path, tmp_path, world):
    with Serving(path) as server:
        assert trl_run.ratios(run_in(world, tmp_path, "grpo", path, engine=server.url)) == {1.0}
        assert server.llm.weight_version == 3


@pytest.mark.slow
def test_two_ranks_with_an_inexact_engine_both_stop(path, tmp_path):
    with pytest.raises(AssertionError, match="NumericsError"):
        run_in("two ranks", tmp_path, "grpo", path, engine=trl_run.ENGINE | {"exact": False})


@pytest.mark.slow
@pytest.mark.parametrize("world", [ALONE, *WORLDS])
@pytest.mark.parametrize("kind", ["grpo", "rloo"])
def test_ten_steps(path, tmp_path, kind, world):
    runs = [run_in(world, tmp_path, kind, path, max_steps=10, beta=0.04) for _ in range(2)]
    assert trl_run.ratios(runs[0]) == {1.0} and len(runs[0]["logs"]) == 10
    assert curve(runs[0]) == curve(runs[1]) and runs[0]["weights"] == runs[1]["weights"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("world", [ALONE, *WORLDS])
@pytest.mark.parametrize("kind", ["grpo", "rloo"])
def test_two_steps_of_a_real_model(smollm2, tmp_path, kind, world, dtype):
    engine = {"kv_cache_memory_bytes": 2**27}
    options = {"max_steps": 2, "model_init_kwargs": {"dtype": dtype}, "learning_rate": 1e-5}
    assert trl_run.ratios(run_in(world, tmp_path, kind, smollm2, engine=engine, **options)) == {1.0}
