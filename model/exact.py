"""HF checkpoint -> HF module whose ops are samebits'. Same classes of parameters, same names: FSDP2, optimizers and
checkpoints work as they do on the original."""

from __future__ import annotations

import functools
import logging
import os
import pathlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel

from ..kernels import ops
from ..kernels.contract import Contract, NumericsError, probe, probe_attention
from . import attention
from .adapter import active_layers, adapt, cover, describe, is_adapted, placements
from .casts import computed_dtypes, engine_dtypes, is_sharded
from .checkpoint import CheckpointError, check_json_size, manifest, resolve
from .coverage import cover_rest
from .experts import is_experts, use_exact_experts
from .families import TESTED
from .layers import other_part
from .linear import ExactLinear, UnsupportedModelError
from .packing import packing
from .paged import group_size, head_dim, plain_call, random_input, takes_tokens
from .roles import role_of
from .routing import connect_routers, load_balancing_loss
from .selfcheck import SelfCheck

if TYPE_CHECKING:
    from .adapter import Adapter

logger = logging.getLogger(__name__)
NO_NUMERICS = frozenset({  # fields of all configs that decide no bit of a log-prob
    "_name_or_path", "architectures", "bos_token_id", "chunk_size_feed_forward", "dtype", "eos_token_id", "id2label",
    "initializer_range", "label2id", "output_attentions", "output_hidden_states", "pad_token_id", "pretraining_tp",
    "output_router_logits", "problem_type", "return_dict", "router_aux_loss_coef", "transformers_version", "use_cache",
})  # fmt: skip
ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # static ones: a table entry depends on its position alone


@dataclass
class LogprobRequest:
    """A request for log-probs of `targets` int64 [R] after rows `index` int64 [R] of a packed batch, not for logits.

    router_loss: and then for the routers' load-balancing loss, too.
    """

    index: Tensor
    targets: Tensor
    params: ops.RowParams
    chunk: int
    router_loss: bool = False


class LMHead(ExactLinear):
    """lm_head: fp32 logits, or the log-probs of given tokens without the logits.

    scale: what the model's own code does to its result, which log-probs and an engine must do, too.
    """

    scale: ops.LogitScale | None = None

    def forward(  # type: ignore[override]
        self, x: Tensor, wanted: LogprobRequest | None = None
    ) -> Tensor | ops.TokenLogprobs:
        """Return fp32 logits, or what is wanted of rows [R, hidden]; see `ops.token_logprobs`."""
        if wanted is None:
            return ops.linear(x, self.packed or self.weight, self.bias, torch.float32, self.exact)
        scores = wanted.targets, wanted.params, wanted.chunk
        return ops.token_logprobs(x, self.weight, self.bias, *scores, self.exact, self.scale)

    def logits(self, x: Tensor) -> Tensor:
        """Return the model's logits, fp32, of rows [R, hidden]: as a plain call of the model does."""
        found = self(x)
        return found if self.scale is None else self.scale(found)


def scoring(kind: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Return a causal LM's class whose forward takes `logprobs`, a `LogprobRequest`, and then returns what it asks for.

    It is an argument of the whole model's forward so that hooks on the model (FSDP2's, DDP's) meet it as any call. The
    class has the name of HF's, which `save_pretrained` writes into config.json.
    """

    @functools.wraps(kind.forward)
    def forward(self, *args, logprobs: LogprobRequest | None = None, **kwargs):
        if is_adapted(self):
            cover(self)
        if logprobs is None:
            return kind.forward(self, *args, **kwargs)
        if not logprobs.router_loss:
            hidden = self.base_model(*args, **kwargs).last_hidden_state[0]
            return self.get_output_embeddings()(hidden[logprobs.index], logprobs)
        out = self.base_model(*args, **kwargs, output_router_logits=True)
        found = self.get_output_embeddings()(out.last_hidden_state[0, logprobs.index], logprobs)
        logits = getattr(out, "router_logits", ())  # a model without such a loss may give none
        return found, load_balancing_loss(self, logits)

    eager = torch.compiler.disable(forward, reason="a compiler may fuse what has to be rounded")
    return type(kind.__name__, (kind,), {"forward": eager, "__module__": kind.__module__})


def parse_dtype(
    dtype: str | torch.dtype | None, device: str | torch.device, config: PretrainedConfig | None = None
) -> torch.dtype:
    """The torch dtype; ValueError where the device's kernels don't support it.

    None is float32 on a CPU, and on a GPU what the checkpoint's config says, whose products are many times faster.
    """
    device = ops.parse_device(device)
    if dtype is None:
        kept = getattr(config, "dtype", None)
        dtype = kept if device.type == "cuda" and kept in ops.DTYPES else torch.float32
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    ops.backend(device)
    if found not in ops.DTYPES:
        names = ", ".join(str(d).removeprefix("torch.") for d in ops.DTYPES)
        raise ValueError(f"dtype {dtype} is not supported on {device.type}; supported: {names}")
    return found


def check_config(config) -> None:
    """Raise UnsupportedModelError for a setting that no run of the model would show."""
    for name in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "max_position_embeddings"):
        if getattr(config, name, None) is None:
            raise UnsupportedModelError(f"model type {config.model_type!r} has no {name}; decoders of text are covered")
    quantised = config.to_dict().get("quantization_config")
    if quantised is not None:
        kind = f"weights quantised by {quantised.get('quant_method')}, QLoRA's base included"
        raise UnsupportedModelError(f"{kind}; load a checkpoint in float32, bfloat16 or float16")
    for rope in _rope_types(getattr(config, "rope_parameters", None) or {}):
        if rope not in ROPE_TYPES:
            raise UnsupportedModelError(
                f"rope type {rope!r} is not covered, or changes with the batch; supported: {', '.join(ROPE_TYPES)}"
            )
    if not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", False):
        raise UnsupportedModelError("is_causal=False: only causal attention is covered")
    if getattr(config, "attention_dropout", 0.0):
        raise UnsupportedModelError("attention_dropout > 0: the rollout has no dropout; set it to 0 in config.json")


def _rope_types(parameters: dict[str, Any]) -> set[str]:
    """Return the rope types of a config, one for all layers or one for each kind of layer."""
    kinds = [each for each in parameters.values() if isinstance(each, dict)] or [parameters]
    return {each.get("rope_type", "default") for each in kinds}


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
    """Make the ops of a HF causal LM exact, in place, by swapping its modules' classes, and return it.

    exact=False keeps torch's own ops, attention too: a control, whose bits depend on the batch. Raises
    UnsupportedModelError, naming module and op, or NumericsError where this machine can't keep the promise, and leaves
    the model as it was.
    """
    check_config(model.config)
    check_structure(model)
    restore = _restorer(model)
    try:
        head = model.get_output_embeddings()  # None in all stages but the last
        if head is not None:
            if type(head) is not nn.Linear:
                raise UnsupportedModelError(f"lm_head is a {type(head).__name__}; nn.Linear is covered")
            head.__class__ = LMHead
            head.exact = exact  # type: ignore[assignment]
        model.__class__ = scoring(type(model))
        model.config.use_cache = False
        if exact:
            _make_modules_exact(model)
            probe([m.weight for m in model.modules() if isinstance(m, ExactLinear)])
            if model.device.type == "cuda":
                probe_attention(model.device, model.dtype, group_size(model.config), head_dim(model.config))
        if head is not None:
            head.scale = logit_scale(model)  # type: ignore[assignment]
        if exact:
            _check(model)
            connect_routers(model)
    except BaseException:
        restore()
        raise
    return model


def _restorer(model: PreTrainedModel) -> Callable[[], None]:
    """Return a function that makes a model's modules compute as they do now."""
    classes = {module: type(module) for module in model.modules()}
    config: Any = model.config
    attended = config._attn_implementation
    experts = config._experts_implementation
    cached = config.use_cache

    def restore() -> None:
        for module, kind in classes.items():
            module.__class__ = kind
        model.set_attn_implementation(attended)
        if config._experts_implementation != experts:
            model.set_experts_implementation(experts)
        config.use_cache = cached

    return restore


def check_structure(model: PreTrainedModel) -> None:
    """Raise UnsupportedModelError unless the model is a list of decoder layers."""
    layers = getattr(model.base_model, "layers", None)
    if not isinstance(layers, nn.ModuleList) or len(layers) != model.config.num_hidden_layers:
        kind = type(model.base_model).__name__
        raise UnsupportedModelError(f"{kind} has no list `layers` of {model.config.num_hidden_layers} decoder layers")


def _make_modules_exact(model: PreTrainedModel) -> None:
    """Give all modules their roles; what else computes runs under `ExactMode`, or is refused."""
    for module in model.modules():
        role = role_of(module)
        if role is not None:
            module.__class__, attributes = role
            vars(module).update(attributes)
    use_exact_experts(model)
    model.set_attn_implementation(attention.PACKED)
    base: Any = model.base_model
    base.__class__ = packing(type(base))
    cover_rest(model)


def _check(model: PreTrainedModel) -> None:
    """Raise UnsupportedModelError if a schedule changes a bit; see `selfcheck`."""
    check = SelfCheck(model)
    check.batches()
    if check.head is not None:
        check.plain()
        if takes_tokens(model) and other_part(model) is None:
            try:
                check.stages()
            except UnsupportedModelError:
                raise
            except (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
                logger.warning("%s runs in one stage only: a layer alone raises %r", type(model).__name__, error)


@torch.no_grad()
def logit_scale(model: PreTrainedModel) -> ops.LogitScale | None:
    """Return what the model's code does to logits after lm_head: times or divided by a number of its config, or None.

    Where it is neither, None, which `SelfCheck.plain` then refuses.
    """
    raw: list[Tensor] = []
    handle = model.get_output_embeddings().register_forward_hook(lambda module, args, out: raw.append(out))
    try:
        found = plain_call(model, random_input(model, 8)).logits
    finally:
        handle.remove()
    if torch.equal(found, raw[0]):
        return None
    numbers = {float(v) for v in model.config.to_dict().values() if isinstance(v, int | float)}
    for scale in (ops.LogitScale(number, divides) for number in numbers for divides in (False, True)):
        if scale.number and torch.equal(scale(raw[0]), found):
            return scale
    return None


def is_exact(model: nn.Module) -> bool:
    """True for a model, or a stage, with samebits' ops; False for a control."""
    return any(isinstance(module, ExactLinear) and module.exact for module in model.modules())


def contract_of(model: PreTrainedModel, param_dtype: torch.dtype | None = None) -> Contract:
    """The numerics contract in which a model from `exact_model` computes, or a slice of one.

    A parameter's dtype is that to which FSDP2 casts it (`param_dtype`: for a model that it doesn't wrap yet), its own
    otherwise. NumericsError where an engine of that dtype has a tensor in another one. All ranks have to call it: it
    reshards what FSDP2 left whole.
    """
    linear = next(m for m in model.modules() if isinstance(m, ExactLinear))
    dtypes = computed_dtypes(model, param_dtype)
    dtype = next(iter(dtypes.values()))
    contract = Contract.of(dtype, compute_device(model))
    if is_adapted(model):
        name, _, key = next(active_layers(model), (None, None, None))
        if name is None:
            raise NumericsError("the model has adapters, none of them active: call set_adapter")
        kept = str(dtypes[f"{name}.lora_A.{key}.weight"]).removeprefix("torch.")
        contract = replace(contract, adapter=describe(placements(model)), adapter_dtype=kept)
    if not linear.exact:
        return replace(contract, linear="torch")
    loaded = engine_dtypes(model.config, dtype) if param_dtype or is_sharded(model) else {}
    for name, theirs in loaded.items():
        own = dtypes.get(name)  # None: something wraps its module that is not known
        if own != theirs:
            raise NumericsError(
                f"{name} is {own} as FSDP2 has it, and {theirs} in an engine of {dtype}: give both float32, or wrap "
                "the model with samebits.trainer.shard"
            )
    return contract


def compute_device(model: nn.Module) -> torch.device:
    """Return the device that a model computes on: under FSDP2 its mesh's, even while parameters are on the CPU."""
    parameter = next(model.parameters())
    return torch.device(parameter.device_mesh.device_type) if isinstance(parameter, DTensor) else parameter.device


def eos_token_ids(config: PretrainedConfig, generation_config: GenerationConfig | None) -> tuple[int, ...]:
    """Return a model's EOS, one or several, from its generation config or its config, without ids that it hasn't."""
    eos = getattr(generation_config, "eos_token_id", None)
    if eos is None:
        eos = config.eos_token_id
    ids = eos if isinstance(eos, list | tuple) else [] if eos is None else [eos]
    return tuple(token for token in ids if 0 <= token < config.vocab_size)


def load_generation_config(path: os.PathLike) -> GenerationConfig | None:
    """Return what a checkpoint says of generation in a file of its own; None where it has none."""
    stored = pathlib.Path(path, "generation_config.json").is_file()
    return GenerationConfig.from_pretrained(path) if stored else None


def load_config(path: os.PathLike) -> PretrainedConfig:
    """Return the checkpoint's HuggingFace config. UnsupportedModelError where transformers has none or refuses it."""
    check_json_size(pathlib.Path(path, "config.json"))
    try:
        return AutoConfig.from_pretrained(path)
    except Exception as error:  # the library's checks of a config raise all kinds
        raise UnsupportedModelError(f"{path}: {error}") from error


def exact_model(
    name: str | os.PathLike,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device = "cpu",
    exact: bool = True,
    adapter: Adapter | None = None,
) -> PreTrainedModel:
    """Return a HF causal LM whose log-probs are the engine's, as bits; wrap it with `fully_shard` and train it.

    name: local directory, hub id or "smollm2". dtype: "float32", "bfloat16" or "float16"; None is float32 on a CPU and
    the checkpoint's on a GPU. exact=False: torch's own ops, for comparison. adapter: a `peft.LoraConfig`, a PEFT model
    whose adapter is copied, or a folder with PEFT's files; the result is then PEFT's model, whose adapter alone is
    trained. `peft.get_peft_model` on an exact model gives the same.

    Raises CheckpointError for missing, extra, misshapen or truncated tensors, UnsupportedModelError for models that
    samebits does not cover, NumericsError where this machine can't keep the promise.
    """
    path = resolve(name)
    config = load_config(path)
    dtype = parse_dtype(dtype, device, config)
    check_config(config)
    manifest(path)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        path,
        config=config,
        dtype=dtype,
        attn_implementation="eager" if exact else "sdpa",  # some have no sdpa; exact ops take its place
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
    if any(is_experts(module) for module in model.modules()):
        leave_files(model)
    model = prepare(model.to(device).eval(), path, exact)
    if exact and config.model_type not in TESTED:
        logger.warning(
            "%s: model type %r isn't one that the tests cover; it passed all checks", path, config.model_type
        )
    if adapter is not None and not exact:
        raise ValueError("an adapter needs exact=True; for comparison use peft on a model with exact=False")
    return model if adapter is None else adapt(model, adapter)  # type: ignore[return-value]


def leave_files(model: nn.Module) -> None:
    """Give all tensors but experts memory of their own: those that were read lie in a mapping of the whole file.

    While one of them does, the file's copy of the experts, whose stack has memory of its own, stays resident.
    """
    modules = [module for module in model.modules() if not is_experts(module)]
    for tensor in {id(t): t for m in modules for t in (*m._parameters.values(), *m._buffers.values())}.values():
        if tensor is not None:
            tensor.data = tensor.data.clone()


def all_finite(tensor: Tensor) -> bool:
    """True if no value is NaN or infinite: one pass, no copies, since extremes are NaN where anything is."""
    return all(abs(extreme.item()) < torch.inf for extreme in torch.aminmax(tensor.detach()))


def prepare(model: PreTrainedModel, path: os.PathLike, exact: bool) -> PreTrainedModel:
    """Finish loading: check the values, and make the ops exact. Return the model."""
    for key, parameter in (*model.named_parameters(), *model.named_buffers()):
        if not all_finite(parameter):
            raise CheckpointError(f"{path}: tensor {key!r} holds NaN or infinity")
    ops.backend(model.device).warm_up(model.dtype, model.device, any(map(is_experts, model.modules())))
    return make_exact(model, exact)
