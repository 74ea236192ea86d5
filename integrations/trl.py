"""TRL's online trainers on exact rollouts: `ExactGRPOTrainer` and `ExactRLOOTrainer`, for TRL 1.15 and later.

While TRL builds a trainer, three names of its module are ours: `create_model_from_path` gives exact models,
`add_fused_lm_head` gives them the engine's log-probs, and `VLLMGeneration` is the engine. All other code is TRL's.
"""

from __future__ import annotations

import copy
import functools
import itertools
import logging
import random
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import fields, replace
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import trl
from packaging.version import Version
from torch import Tensor, nn
from transformers import PreTrainedModel
from trl.trainer import utils

from ..engine import LLM, Engine, SamplingParams
from ..model.adapter import is_adapted, load_adapter_config
from ..model.checkpoint import resolve
from ..model.exact import contract_of, exact_model, load_config
from ..trainer.fsdp import together
from ..trainer.logprobs import check_same_bits, exact_head, token_logprobs
from .client import Client
from .remote_engine import RemoteEngine

OLDEST = "1.15.0"
TESTED = "1.16.0"
if Version(trl.__version__) < Version(OLDEST) or not hasattr(utils, "FusedCausalLMOutput"):
    raise ImportError(f"samebits.integrations.trl needs trl>={OLDEST}, as {TESTED} is; this is {trl.__version__}")

logger = logging.getLogger(__name__)

RolloutSource = dict | LLM | Engine | str | None
HOOKS = ("create_model_from_path", "add_fused_lm_head", "VLLMGeneration")  # names in the module of a trainer of TRL
OUTSIDE = -60.0  # the log-prob of a token outside the filters: TRL multiplies by masks, and -inf times 0 is NaN
REFUSED = {  # options that must keep their defaults, and what to do
    "quantization_config": "quantised weights have other bits than the rollouts'; leave it out",
    "use_liger_kernel": "it replaces exact ops; leave it out",
    "cast_lm_head_to_fp32": "logits are float32 without it; leave it out",
    "torch_compile": "it rewrites what stands between exact ops; leave it out",
    "neftune_noise_alpha": "embeddings with noise are not the rollouts'; leave it out",
    "vllm_structured_outputs_regex": "give token_logprobs the grammar in a loop of your own",
    "use_transformers_continuous_batching": "samebits generates; leave it out",
    "deepspeed": "shard with FSDP2",
    "parallelism_config": "each rank runs whole sequences through whole layers; shard with FSDP2",
    "repetition_penalty": "the engine has no penalties",
    "trust_remote_code": "models are those of transformers' own code; leave it out",
    "vllm_enable_sleep_mode": "the engine stays awake: give vllm_gpu_memory_utilization what fits beside the trainer",
    "vllm_tensor_parallel_size": "give engine={'pipeline_parallel_size': n}",
    "vllm_server_timeout": "start the server first: nothing waits for it",
    "vllm_group_port": "a port that is free is taken; leave it out",
    "vllm_model_impl": "models are those of samebits.trainer.exact_model",
}
# What generation_kwargs can't set.
OURS = ("n", "seed", "max_tokens", "raw_logprobs", "prompt_logprobs", "output_kind", "structured_outputs")


class ExactTrainer:
    """Put before an online trainer of TRL, `class MyTrainer(ExactTrainer, GRPOTrainer)`: its rollouts become exact.

    engine: keywords for `samebits.LLM`; or an `LLM`, an `Engine` or the URL of a `samebits serve` on the model's
    checkpoint. By default an `LLM` of the model's dtype and device, and of TRL's vllm_gpu_memory_utilization and
    vllm_max_model_length. check: compare each rollout with the trainer's log-probs, as bits, before the optimizer
    moves; a difference is a NumericsError, on every rank. All else is TRL's, `peft_config` too: an adapter is exact as
    it is, and the engine gets the adapter alone.
    Raises ImportError for a trainer of TRL without the hooks, ValueError or UnsupportedModelError for what would break
    the promise, NumericsError where engine and model differ.
    """

    accelerator: Any
    vllm_generation: ExactGeneration

    def __init__(
        self,
        model,
        reward_funcs=None,
        args=None,
        train_dataset=None,
        *,
        engine: RolloutSource = None,
        check=True,
        **kwargs,
    ):
        if args is None:
            raise TypeError(f"{type(self).__name__} needs args, a configuration of TRL")
        module = _hooked_module(type(self))
        _refuse(args, model, kwargs, check)
        if engine is None and args.use_vllm and args.vllm_mode == "server":
            engine = args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}"
        own = copy.copy(args)
        vars(own).update(use_vllm=True, vllm_mode="colocate")  # TRL then asks for rollouts and nothing else
        self.check = check
        if isinstance(engine := engine or {}, dict):
            engine = {"max_model_len": args.vllm_max_model_length} | engine
            engine = {"gpu_memory_utilization": args.vllm_gpu_memory_utilization} | engine
        with patch.multiple(module, **_exact_parts(self, own, engine)):
            super().__init__(model, reward_funcs, own, train_dataset=train_dataset, **kwargs)  # type: ignore[call-arg]

    def _generate_and_score_completions(self, inputs):
        self.vllm_generation.first_row = self.accelerator.process_index * len(inputs)
        found = super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        sampled = found.get("sampling_per_token_logps")
        if self.check and sampled is not None:
            mask = found["completion_mask"] * found.get("tool_mask", 1)
            self._compare(sampled, found["old_per_token_logps"], mask.bool())
        return found

    def _compare(self: Any, sampled: Tensor, scored: Tensor, mask: Tensor) -> None:
        """Raise NumericsError, on all ranks, unless log-probs fp32 [B, T] are equal as bits where `mask` is set."""

        def name(row: int, token: int) -> str:
            size = self.num_generations if self.model.training else self.num_generations_eval
            group, sample = divmod(self.vllm_generation.first_row + row, size)
            return f"token {token} of sample {sample} of group {group}"

        with together() if torch.distributed.is_initialized() else nullcontext():
            check_same_bits(sampled, scored, mask, name)


class ExactGRPOTrainer(ExactTrainer, trl.GRPOTrainer):
    """TRL's GRPOTrainer on exact rollouts; see `ExactTrainer`."""


class ExactRLOOTrainer(ExactTrainer, trl.RLOOTrainer):
    """TRL's RLOOTrainer on exact rollouts; see `ExactTrainer`.

    TRL drops the rollouts' log-probs here. They are compared all the same, and their ratio is logged as GRPO's is.
    """

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, *args, **kwargs):
        given = model, input_ids, attention_mask, logits_to_keep
        found = super()._get_per_token_logps_and_entropies(*given, *args, **kwargs)
        generation = self.vllm_generation
        if generation.logprobs is not None:  # this is the first scoring after a rollout, by the same weights
            sampled = torch.zeros_like(found[0])
            for row, logprobs in zip(sampled, generation.logprobs, strict=True):
                row[: len(logprobs)] = torch.tensor(logprobs)
            mask = attention_mask[:, -logits_to_keep:].bool()
            if self.check:
                self._compare(sampled, found[0], mask)
            generation.logprobs = None
            ratio = (found[0] - sampled)[mask].exp() if mask.any() else sampled.new_ones(1)
            metrics = self._metrics["train" if self.model.training else "eval"]
            for name, over in (("min", torch.min), ("mean", torch.mean), ("max", torch.max)):
                value = over(self.accelerator.gather(over(ratio))).item()
                metrics[f"sampling/importance_sampling_ratio/{name}"].append(value)
        return found


# --- what TRL gets in place of its own --------------------------------------------------------------------------------


def _hooked_module(kind: type) -> ModuleType:
    """Return the module of TRL's trainer under this class. ImportError where it has not the names that become ours."""
    for module in (sys.modules[base.__module__] for base in kind.__mro__):
        if vars(module).keys() >= {*HOOKS}:
            return module
    has = f"GRPOTrainer and RLOOTrainer of TRL {OLDEST} to {TESTED} have; this is TRL {trl.__version__}"
    raise ImportError(f"no trainer under {kind.__name__} has the hooks {', '.join(HOOKS)}: {has}")


def _refuse(config: Any, model: Any, given: dict, check: bool) -> None:
    """Raise ValueError or UnsupportedModelError, with the option's name, for what would break the promise."""
    defaults = {field.name: field.default for field in fields(config)}
    for name, advice in REFUSED.items():
        value = getattr(config, name, None) or given.get(name)
        if value and value != defaults.get(name):
            raise ValueError(f"{name}={value!r} is not exact: {advice}")
    if unknown := sorted((config.model_init_kwargs or {}).keys() - {"dtype"}):
        raise ValueError(f"model_init_kwargs {unknown}: an exact model takes dtype alone")
    if check and not getattr(config, "vllm_importance_sampling_correction", True):
        raise ValueError("vllm_importance_sampling_correction=False leaves nothing to compare; give check=False, too")
    params = _sampling_params(config)
    if params.min_tokens and (given.get("tools") or given.get("environment_factory")):
        raise ValueError("generation_kwargs min_tokens counts each turn's tokens anew; leave it out with tools")
    if not config.beta or not (params.top_p < 1 or params.top_k > 0 or params.min_p > 0):
        return
    if given.get("peft_config") is not None or (isinstance(model, nn.Module) and is_adapted(model)):
        raise ValueError("leave out top_p, top_k and min_p, or beta: an adapter has no reference model of its own")
    if config.gradient_accumulation_steps % (config.steps_per_generation * config.num_iterations):
        why = "after another one a token may be outside the filter, and its KL infinite"
        need = "set num_iterations=1 and leave out steps_per_generation"
        raise ValueError(f"top_p, top_k or min_p with beta > 0 needs one update per rollout, {why}: {need}")


def _sampling_params(config: Any) -> SamplingParams:
    more = config.generation_kwargs or {}
    if unknown := sorted(more.keys() - {f.name for f in fields(SamplingParams)} | more.keys() & set(OURS)):
        raise ValueError(f"generation_kwargs {unknown} can't be set for an exact trainer")
    given = {
        "temperature": config.temperature, "top_p": config.top_p, "top_k": config.top_k or 0,
        "min_p": config.min_p or 0.0, "max_tokens": config.max_completion_length, "detokenize": "stop" in more,
    }  # fmt: skip
    return SamplingParams(**given | more)


def _exact_parts(trainer: Any, config: Any, engine: RolloutSource) -> dict[str, Any]:
    """Return our parts by the names of TRL's, HOOKS."""
    given = _sampling_params(config)

    def params() -> SamplingParams:  # once TRL knows what ends a completion: a given tokenizer's EOS does, too
        ends = () if given.ignore_eos else trainer.eos_token_ids
        return replace(given, stop_token_ids=[*given.stop_token_ids, *ends])

    def create(name: str, dtype: Any = None, **_: Any) -> PreTrainedModel:
        chosen = load_config(resolve(name)).dtype if dtype == "auto" else dtype or "float32"
        return exact_model(name, chosen, config.device)

    def add_head(model: PreTrainedModel, **_: Any) -> None:
        policy = trainer.model.get_base_model() if is_adapted(trainer.model) else trainer.model
        add_exact_head(model, params() if model is policy else replace(params(), top_p=1.0, top_k=0, min_p=0.0))

    def generation(model: PreTrainedModel, accelerator: Any, **_: Any) -> ExactGeneration:
        return ExactGeneration(trainer, make_llm(model, accelerator, engine, given), params())

    return dict(zip(HOOKS, (create, add_head, generation), strict=True))


def make_llm(model: PreTrainedModel, accelerator: Any, engine: RolloutSource, params: SamplingParams) -> LLM:
    """Return the `LLM` that an exact trainer asks for rollouts, of the numerics that the model has when it is wrapped.

    Raises NumericsError for an engine of other numerics, ValueError for settings of accelerate that change bits.
    """
    path = model.config._name_or_path
    dtype = model.dtype
    cast = None
    if accelerator.state.dynamo_plugin.backend.value != "NO" or accelerator.mixed_precision == "fp8":
        raise ValueError("neither torch.compile (dynamo_backend) nor mixed_precision=fp8 is exact; leave them out")
    sharded = accelerator.distributed_type in ("FSDP", "DEEPSPEED", "MEGATRON_LM")
    if (sharded and not accelerator.is_fsdp2) or getattr(accelerator, "parallelism_config", None) is not None:
        raise ValueError("FSDP1, DeepSpeed, Megatron-LM and parallelism_config are not exact; use DDP, or FSDP2 alone")
    mixed = accelerator.mixed_precision != "no"
    if mixed and accelerator.is_fsdp2:
        plugin = accelerator.state.fsdp_plugin
        policy = plugin.mixed_precision_policy
        dtype = cast = policy.param_dtype
        # A layer's inputs and output are in their dtypes as they are; log-probs must stay float32.
        plugin.mixed_precision_policy = replace(policy, output_dtype=None, cast_forward_inputs=False)
    elif mixed and dtype == torch.float32:
        said = f"this model computes in float32: {accelerator.mixed_precision} autocast reaches no exact op"
        logger.warning("%s. Give model_init_kwargs={'dtype': 'bfloat16'}, or shard with FSDP2, for 16 bits", said)
    if isinstance(engine, str):
        engine = RemoteEngine(Client(engine), path)
    contract = contract_of(model, cast)
    if isinstance(engine, dict):
        own = {"model": path, "dtype": str(dtype).removeprefix("torch."), "device": str(accelerator.device)}
        if is_adapted(model):
            own |= {"adapter": load_adapter_config(model), "adapter_dtype": contract.adapter_dtype}
        engine = LLM(**own | {"skip_tokenizer_init": not params.stop} | engine)
    llm = engine if isinstance(engine, LLM) else LLM(path, engine=engine)
    if llm.contract is not None:
        llm.contract.check(contract)
    return llm


def add_exact_head(model: PreTrainedModel, params: SamplingParams) -> None:
    """Let `model(..., labels=labels, fused_lm_head=True)` return the engine's log-probs, as TRL calls it.

    model: from `samebits.trainer.exact_model`, before or after TRL's own head. The call takes input_ids, attention_mask
    and labels int64 [B, T], -100 where nothing is scored, and returns log-probs and entropies fp32 [B, T - 1] of the
    distribution that `params` name, 0 where the label is -100. A token outside its filters has -60 and no gradient.
    With output_router_logits=True the output has the load-balancing loss of a mixture of experts, too, as aux_loss.
    """
    exact_head(model)
    plain = model.forward

    def score(input_ids, labels, attention_mask=None, output_router_logits=False, **kwargs) -> Any:
        if more := [name for name, value in kwargs.items() if value is not None]:
            raise NotImplementedError(f"an exact model takes text alone, without {', '.join(more)}")
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        scored = (labels != -100) & mask.bool()
        before = (mask.bool() & (scored.cumsum(1) == 0)).sum(1).clamp(min=1)
        logprobs, entropy, *router_loss = token_logprobs(
            model, input_ids, params, attention_mask=mask, prompt_lens=before.tolist(), return_entropy=True,
            return_router_loss=output_router_logits, forward=plain,
        )  # fmt: skip
        logprobs = logprobs.masked_fill(logprobs == -torch.inf, OUTSIDE) * scored
        given = {"log_probs": logprobs[:, 1:], "entropy": (entropy * scored)[:, 1:]}
        # TRL's own output type: DistributedDataParallel looks for tensors in it.
        return utils.FusedCausalLMOutput(**given, aux_loss=next(iter(router_loss), None))

    @functools.wraps(plain)
    def forward(*args, fused_lm_head: bool = False, **kwargs):
        return score(**kwargs) if fused_lm_head else plain(*args, **kwargs)

    model.forward = forward


class ExactGeneration:
    """The part of `VLLMGeneration` that TRL's trainers use, by an `LLM`: `sync_weights` and `generate`.

    Random numbers depend on TRL's seed, the step and the sample's number among all ranks': a run repeats, also when it
    is resumed, and with another number of ranks as long as no group is split and no tool is called, as TRL asks for
    an answer after a tool's result without the sample's number.
    """

    def __init__(self, trainer: Any, llm: LLM, params: SamplingParams):
        self.trainer = trainer
        self.engine = llm
        self.params = params
        self.first_row = 0  # of this rank in a batch, among all ranks' rows
        self.logprobs: list[list[float]] | None = None  # of the last rollout
        self._calls: Counter[tuple] = Counter()  # by mode and step
        self.llm = SimpleNamespace(llm_engine=SimpleNamespace(model_config=llm))  # TRL asks for its max_model_len

    def sync_weights(self) -> None:
        """Give the engine the trainer's weights. Under FSDP2 all ranks gather them."""
        self.engine.update_weights(self.trainer.accelerator.unwrap_model(self.trainer.model))

    def generate(self, prompts, images, num_generations, profiler=None):
        """Return (prompts, completions, log-probs, None) as TRL has them, for prompts as lists of token ids.

        Each prompt is there once per sample, as neighbours, which are one request. Raises RuntimeError where the engine
        gave a rollout up.
        """
        if images is not None:
            raise NotImplementedError("an exact model takes text alone, no images")
        place = ("train" if self.trainer.model.training else "eval", self.trainer.state.global_step)
        requests = []
        params = []
        row = self.first_row
        for prompt, same in itertools.groupby(prompts):
            count = len(list(same))
            seed = random.Random(f"{self.trainer.args.seed}/{place}/{self._calls[place]}/{row}").getrandbits(64)
            requests.append(list(prompt))
            params.append(replace(self.params, n=count, seed=seed))
            row += count
        self._calls[place] += 1
        with profiler or nullcontext():
            outputs = self.engine.generate(requests, params, use_tqdm=False)
        samples = [completion for output in outputs for completion in output.completions]
        if failed := [s for s in samples if s.finish_reason not in ("stop", "length")]:
            raise RuntimeError(f"{len(failed)} rollouts failed: {failed[0].finish_reason}, {failed[0].stop_reason}")
        self.logprobs = [s.logprobs for s in samples]
        return prompts, [s.token_ids for s in samples], [[[value] for value in s.logprobs] for s in samples], None


class WeightTransfer:
    """The `weight_transfer` of TRL's AsyncGRPOTrainer, over a process group to the `samebits serve` at `url`.

    key: the server's admin key, if it has one. The server goes on during an update: KV of the old weights is
    recomputed, so that each token is exact for the version that sampled it, and nothing has to pause.
    """

    def __init__(self, url: str, key: str | None = None):
        self.client = Client(url, key=key)

    def pause(self) -> None:
        """Do nothing: the first update makes the group, and the server switches between two of its steps."""

    init_weight_transfer = resume = pause

    def send_weights(self, iterator: Iterator[tuple[str, Tensor]]) -> None:
        """Send all tensors, named as in the model's state dict, and put them in force. Raises ServerError."""
        self.client.update_weights(dict(iterator))

    def destroy(self) -> None:
        """Leave the group and close the connection."""
        self.client.close()
