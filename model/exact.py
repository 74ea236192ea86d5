"""HF checkpoint -> HF module whose ops are samebits'. Same classes of parameters, same names: FSDP2, optimizers and
checkpoints work as they do on the original."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel

from ..kernels import ops
from ..kernels.contract import Contract, NumericsError, probe
from . import attention
from .adapter import adapt, cover, describe, is_adapted, placements
from .checkpoint import CheckpointError, manifest, resolve
from .linear import ExactLinear, UnsupportedModelError, products
from .packing import packing

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
NO_NUMERICS = frozenset({  # fields of all configs that decide no bit of a log-prob
    "_name_or_path", "architectures", "bos_token_id", "chunk_size_feed_forward", "dtype", "eos_token_id", "id2label",
    "initializer_range", "label2id", "output_attentions", "output_hidden_states", "pad_token_id", "pretraining_tp",
    "problem_type", "return_dict", "transformers_version", "use_cache",
})  # fmt: skip
ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # static ones: a table entry depends on its position alone


@dataclass
class LogprobRequest:
    """Asks for log-probs of `targets` int64 [R] after the rows `index` int64 [R] of a packed batch, not for logits."""

    index: Tensor
    targets: Tensor
    params: ops.RowParams
    chunk: int


class LMHead(ExactLinear):
    """lm_head: fp32 logits, or the log-probs of given tokens without the logits."""

    def forward(  # type: ignore[override]
        self, x: Tensor, wanted: LogprobRequest | None = None
    ) -> Tensor | ops.TokenLogprobs:
        """Return fp32 logits, or what is wanted of rows [R, hidden]; see `ops.token_logprobs`."""
        if wanted is None:
            return ops.linear(x, self.packed or self.weight, self.bias, torch.float32, self.exact)
        return ops.token_logprobs(x, self.weight, self.bias, wanted.targets, wanted.params, wanted.chunk, self.exact)


def scoring(kind: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Return a causal LM's class whose forward takes `logprobs`, a `LogprobRequest`, and then returns `TokenLogprobs`.

    It is an argument of the whole model's forward so that hooks on the model (FSDP2's, DDP's) meet it as any call. The
    class has the name of HF's, which `save_pretrained` writes into config.json.
    """

    @functools.wraps(kind.forward)
    def forward(self, *args, logprobs: LogprobRequest | None = None, **kwargs):
        if is_adapted(self):
            cover(self)
        if logprobs is None:
            return kind.forward(self, *args, **kwargs)
        hidden = self.base_model(*args, **kwargs).last_hidden_state[0]
        return self.get_output_embeddings()(hidden[logprobs.index], logprobs)

    eager = torch.compiler.disable(forward, reason="a compiler may fuse what has to be rounded")
    return type(kind.__name__, (kind,), {"forward": eager, "__module__": kind.__module__})


class ExactRMSNorm(nn.Module):
    """RMSNorm by the exact op; see `ops.rms_norm`."""

    weight: nn.Parameter
    variance_epsilon: float

    def forward(self, x: Tensor) -> Tensor:
        """Return the normed rows in x's dtype."""
        return ops.rms_norm(x, self.weight, self.variance_epsilon)


class ExactMLP(nn.Module):
    """A gated MLP whose activation is the exact op; see `ops.gated_activation`."""

    activation: str
    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        """Return down(activation(gate(x)) * up(x))."""
        gate, up = products(x, self.gate_proj, self.up_proj)
        return self.down_proj(ops.gated_activation(gate, up, self.activation))


class ExactRotary(nn.Module):
    """Rotary tables by the exact op; see `ops.rotary_tables`."""

    inv_freq: Tensor
    attention_scaling: float

    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin in x's dtype. Raises TypeError if `inv_freq` is no longer fp32."""
        if self.inv_freq.dtype != torch.float32:
            raise TypeError(f"inv_freq was cast to {self.inv_freq.dtype}; load with dtype=... instead of model.to(...)")
        cos, sin = ops.rotary_tables(position_ids, self.inv_freq, float(self.attention_scaling))
        return cos.to(x.dtype), sin.to(x.dtype)


def parse_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """The torch dtype; ValueError where the device's kernels don't support it."""
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    ops.backend(device)
    supported = ops.DTYPES[device.type]
    if found not in supported:
        names = ", ".join(str(d).removeprefix("torch.") for d in supported)
        raise ValueError(f"dtype {dtype} is not supported on {device.type}; supported: {names}")
    return found


def check_config(config) -> None:
    """Raise UnsupportedModelError unless samebits covers every op that the config asks for."""
    if config.model_type not in FAMILIES:
        raise UnsupportedModelError(f"model type {config.model_type!r}; supported: {', '.join(FAMILIES)}")
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedModelError("quantised weights; load a checkpoint in float32, bfloat16 or float16")
    rope = config.rope_parameters.get("rope_type", "default")
    if rope not in ROPE_TYPES:
        raise UnsupportedModelError(f"rope type {rope!r} changes with the batch; supported: {', '.join(ROPE_TYPES)}")
    activations = ops.backend(torch.device("cpu")).ACTIVATIONS
    if config.hidden_act not in activations:
        raise UnsupportedModelError(f"activation {config.hidden_act!r}; supported: {', '.join(activations)}")
    if not getattr(config, "is_causal", True):
        raise UnsupportedModelError("is_causal=False: only causal attention is covered")
    if getattr(config, "attention_dropout", 0.0):
        raise UnsupportedModelError("attention_dropout > 0: the rollout has no dropout")


def check_same_numerics(mine: PretrainedConfig, theirs: PretrainedConfig) -> None:
    """Raise NumericsError, naming the fields, where two configs differ in what may decide a bit.

    Compares the fields that the class of configs declares: model code reads no others.
    """
    fields = (type(mine)().to_dict().keys() - NO_NUMERICS) | {"model_type", "quantization_config"}
    here = mine.to_dict()
    there = theirs.to_dict()
    other = [field for field in sorted(fields) if here.get(field) != there.get(field)]
    if other:
        texts = [f"{field} is {there.get(field)!r}, not {here.get(field)!r}" for field in other]
        raise NumericsError("its config.json asks for other numerics: " + "; ".join(texts))


def make_exact(model: PreTrainedModel, exact: bool = True) -> PreTrainedModel:
    """Replace the ops of a HF causal LM in place by swapping its modules' classes; parameters stay as they are.

    exact=False keeps torch's own ops, attention too: a control, whose bits depend on the batch. Raises
    UnsupportedModelError, naming the module, before anything is changed.
    """
    check_config(model.config)
    head = model.get_output_embeddings()  # None in all stages but the last
    stem = type(model).__name__.removesuffix("ForCausalLM")
    structure = {f"{stem}{part}" for part in ("ForCausalLM", "Model", "DecoderLayer", "Attention")}
    structure |= {"ModuleList", "Embedding", "Identity"}  # the last: no norm, in all stages but the last
    swaps: dict[str, type[nn.Module]] = {
        "Linear": ExactLinear,
        f"{stem}RMSNorm": ExactRMSNorm,
        f"{stem}MLP": ExactMLP,
        f"{stem}RotaryEmbedding": ExactRotary,
    }
    modules: dict[str, Any] = dict(model.named_modules())
    activations = {id(m.act_fn) for m in modules.values() if hasattr(m, "act_fn")}
    for name, module in modules.items():
        kind = type(module).__name__
        if kind not in structure and kind not in swaps and id(module) not in activations:
            raise UnsupportedModelError(f"module {name!r} is a {kind}, which samebits has no exact op for")
    for module in modules.values():
        is_head = module is head and head is not None
        new = LMHead if is_head else swaps.get(type(module).__name__)
        if new is None or not (exact or is_head):
            continue
        if new is ExactMLP:
            module.activation = model.config.hidden_act
        module.__class__ = new
        if is_head and not exact:
            module.exact = False
    model.__class__ = scoring(type(model))
    model.config.use_cache = False
    if exact:
        model.set_attn_implementation(attention.PACKED)
        base: Any = model.base_model
        base.__class__ = packing(type(base))
    return model


def contract_of(model: PreTrainedModel) -> Contract:
    """The numerics contract of a model from `exact_model` (also when wrapped by FSDP2), or of a slice of one."""
    linear = next(m for m in model.modules() if isinstance(m, ExactLinear))
    norm = next(p for n, p in model.named_parameters() if n.endswith("norm.weight"))
    contract = Contract.of(norm.dtype, norm.device)
    if is_adapted(model):
        contract = replace(contract, adapter=describe(placements(model)))
    return contract if linear.exact else replace(contract, linear="torch")


def eos_token_ids(config: PretrainedConfig, generation_config: GenerationConfig | None) -> tuple[int, ...]:
    """Return a model's EOS, one or several, from its generation config or its config, without ids that it hasn't."""
    eos = getattr(generation_config, "eos_token_id", None)
    if eos is None:
        eos = config.eos_token_id
    ids = eos if isinstance(eos, list | tuple) else [] if eos is None else [eos]
    return tuple(token for token in ids if 0 <= token < config.vocab_size)


def load_config(path: os.PathLike) -> PretrainedConfig:
    """Return the checkpoint's HuggingFace config. Raises UnsupportedModelError where transformers has none for it."""
    try:
        return AutoConfig.from_pretrained(path)
    except (ValueError, KeyError, OSError) as error:
        raise UnsupportedModelError(f"{path}: {error}") from error


def exact_model(
    name: str | os.PathLike,
    dtype: str | torch.dtype = "float32",
    device: str | torch.device = "cpu",
    exact: bool = True,
    adapter: Any = None,
) -> PreTrainedModel:
    """Return a HF causal LM whose log-probs are the engine's, as bits; wrap it with `fully_shard` and train it.

    name: local directory, hub id or "smollm2". dtype: "float32", "bfloat16" or "float16". exact=False: torch's own
    ops, for comparison. adapter: a `peft.LoraConfig`, a PEFT model whose adapter is copied, or a folder with PEFT's
    files; the result is then PEFT's model, whose adapter alone is trained. `peft.get_peft_model` on an exact model
    gives the same.

    Raises CheckpointError for missing, extra, misshapen or truncated tensors, UnsupportedModelError for models that
    samebits does not cover, NumericsError where this machine can't keep the promise.
    """
    device = torch.device(device)
    dtype = parse_dtype(dtype, device)
    path = resolve(name)
    config = load_config(path)
    check_config(config)
    manifest(path)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        path,
        config=config,
        dtype=dtype,
        attn_implementation="sdpa",
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    model, info = loaded
    problems = [
        f"{kind.replace('_keys', '')}: {', '.join(sorted(map(str, info[kind])))}"
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
        if info.get(kind)
    ]
    if problems:
        raise CheckpointError(f"{path} does not fit its config; " + "; ".join(problems))
    model = prepare(model.to(device).eval(), path, exact)
    if adapter is not None and not exact:
        raise ValueError("an adapter needs exact=True; for comparison use peft on a model with exact=False")
    return model if adapter is None else adapt(model, adapter)  # type: ignore[return-value]


def all_finite(tensor: Tensor) -> bool:
    """True if no value is NaN or infinite: one pass, no copies, since extremes are NaN where anything is."""
    return all(bool(torch.isfinite(extreme)) for extreme in torch.aminmax(tensor.detach()))


def prepare(model: PreTrainedModel, path: os.PathLike, exact: bool) -> PreTrainedModel:
    """Finish loading: check the values, swap the ops, probe that this machine keeps the promise. Return the model."""
    for key, parameter in model.named_parameters():
        if not all_finite(parameter):
            raise CheckpointError(f"{path}: tensor {key!r} holds NaN or infinity")
    ops.backend(model.device).warm_up(model.dtype, model.device)
    model = make_exact(model, exact)
    if exact:
        probe([m.weight for m in model.modules() if isinstance(m, ExactLinear)])
    return model
