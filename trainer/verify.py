"""The proof on a user's own model and machine: random schedules through the engine, recomputed by the trainer."""

from __future__ import annotations

import os
import pathlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel

from ..engine import LLM, SamplingParams
from ..engine.config import EngineConfig
from ..engine.core import EngineCore
from ..engine.executor import LocalExecutor
from ..engine.model_runner import ModelRunner
from ..kernels import ops
from ..model import exact_model
from ..model.adapter import PREFIX, load_adapter_config
from ..model.checkpoint import resolve
from ..model.experts import is_experts
from .logprobs import token_logprobs

if TYPE_CHECKING:
    from ..model.adapter import Adapter

SAMPLING = {
    "T=1": {},
    "T=0.6": {"temperature": 0.6},
    "T=1.3, top-k 50": {"temperature": 1.3, "top_k": 50},
    "top-p 0.9": {"top_p": 0.9},
    "min-p 0.02": {"min_p": 0.02},
    "greedy": {"temperature": 0.0},
}


@dataclass(frozen=True)
class Round:
    """One random schedule: its settings, and how many of its tokens' log-probs differ as bits."""

    sampling: str
    max_num_seqs: int
    max_num_batched_tokens: int
    threads: int
    tokens: int
    preemptions: int
    prefix_hit_tokens: int
    differing: int
    max_difference: float


@dataclass(frozen=True)
class VerifyReport:
    """The rounds of a verification, and where the first difference arose."""

    contract_hash: str
    rounds: list[Round] = field(default_factory=list)
    fault: str | None = None  # the first module and op that differ

    @property
    def ok(self) -> bool:
        """True if no token of any round differs."""
        return all(r.differing == 0 for r in self.rounds)

    @property
    def tokens(self) -> int:
        """The number of tokens compared."""
        return sum(r.tokens for r in self.rounds)


def verify(
    name: str | os.PathLike,
    dtype: str | None = None,
    seed: int = 0,
    plant_fault: str | None = None,
    use_tqdm: bool = True,
    device: str = "cpu",
    adapter: Adapter | None = None,
) -> VerifyReport:
    """Return how many log-probs, of every setting of SAMPLING under random schedules, differ from the trainer's.

    The KV pool is kept small, so that sequences are preempted; prompts share prefixes; n > 1. plant_fault: a module of
    the engine whose output is falsified by some units in the last place, to see that the proof can fail. On a
    difference, both sides recompute the sequence and `fault` names the first module whose output differs. adapter: as
    `exact_model` takes it.
    """
    model = exact_model(name, dtype, device, adapter=adapter)
    rng = random.Random(seed)
    vocab = model.config.vocab_size
    room = min(model.config.max_position_embeddings, 512)
    longest = min(96, room // 2)
    blocks = -(-5 * 2 * longest // ops.backend(model.device).BLOCK)
    config = EngineConfig(
        dtype=str(model.dtype).removeprefix("torch."), device=device, max_model_len=room,
        kv_cache_memory_bytes=blocks * ModelRunner.block_bytes(model), skip_tokenizer_init=True,
        adapter=None if adapter is None else load_adapter_config(model),
    )  # fmt: skip

    def load(config: EngineConfig) -> _Engines:
        engines = _Engines(resolve(name), config)
        if adapter is not None:
            engines.make(config.max_num_seqs, config.max_num_batched_tokens).update_weights(model)
        if plant_fault is not None:
            falsify(engines.model, plant_fault)
        return engines

    engines = load(config)
    rounds = []
    first = None
    threads = torch.get_num_threads()
    try:
        for label, setting in tqdm(SAMPLING.items(), desc="Verifying", unit="round", disable=not use_tqdm):
            shared = [rng.randrange(vocab) for _ in range(longest // 2)]
            prompts = []
            for _ in range(6):
                tail = [rng.randrange(vocab) for _ in range(rng.randint(1, longest // 2))]
                prompts.append((shared if rng.random() < 0.5 else []) + tail)
            params = SamplingParams(
                n=rng.choice((1, 2, 3)), max_tokens=longest // 2, seed=rng.randrange(2**32), **setting
            )
            llm = engines.make(rng.choice((1, 3, 16)), rng.choice((5, 17, 64, 512)))
            torch.set_num_threads(rng.choice((1, threads)))
            this, found = _round(llm, model, prompts, params, label)
            rounds.append(this)
            first = first or found
    finally:
        torch.set_num_threads(threads)
    assert llm.contract is not None
    contract_hash = llm.contract.hash
    fault = None
    if first is not None:
        del llm, engines  # their memory is the next ones'
        fault = _locate(load(replace(config, enforce_eager=True)), model, first)
    return VerifyReport(contract_hash, rounds, fault)


class _Engines:
    """Engines with limits of their own, one after the other, of a model that is loaded once."""

    def __init__(self, path: pathlib.Path, config: EngineConfig):
        self.path = path
        self.config = config
        self.executor = LocalExecutor(path, config)
        self.model = self.executor.workers[0].model

    def make(self, max_num_seqs: int, max_num_batched_tokens: int) -> LLM:
        """Return an engine whose KV cache is empty."""
        config = replace(self.config, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
        return LLM(self.path, engine=EngineCore(self.path, config, self.executor))


def _round(llm: LLM, model, prompts, params: SamplingParams, label: str):
    outputs = llm.generate(prompts, params, use_tqdm=False)
    stats = llm.stats()
    pairs = []
    for output in outputs:
        pairs += [(output.prompt_token_ids, completion) for completion in output.completions]
    with torch.no_grad():
        expected = token_logprobs(model, [prompt + c.token_ids for prompt, c in pairs], params)
    differing = 0
    worst = 0.0
    first = None
    for (prompt, completion), logprobs in zip(pairs, expected, strict=True):
        ours = torch.tensor(completion.logprobs)
        theirs = logprobs[len(prompt) :].cpu()
        unequal = ours != theirs
        if unequal.any():
            differing += int(unequal.sum())
            worst = max(worst, float((ours - theirs).abs().max()))
            first = first or prompt + completion.token_ids[: int(unequal.nonzero()[0])]
    this = Round(
        label, llm.config.max_num_seqs, llm.config.max_num_batched_tokens, torch.get_num_threads(),
        sum(len(c.token_ids) for _, c in pairs), stats.preemptions, stats.prefix_hit_tokens, differing, worst,
    )  # fmt: skip
    return this, first


@contextmanager
def _recorded(model: nn.Module) -> Iterator[dict[str, tuple[list[Tensor], list[Tensor]]]]:
    """Inputs and outputs of every leaf module at every token, in order of completion; later forwards append.

    A linear with its adapter, a module of modules in the trainer, counts as a leaf, named as in the base model. So do
    experts, which call their activation by name.
    """
    seen: dict[str, tuple[list[Tensor], list[Tensor]]] = {}

    def record(name: str, module: nn.Module, args: tuple, output: Tensor | tuple) -> None:
        inputs, outputs = seen.setdefault(name, ([], []))
        inputs += _by_token(args)
        outputs += _by_token(output if isinstance(output, tuple) else (output,))

    modules = {name.removeprefix(PREFIX): module for name, module in model.named_modules()}
    adapted = {name for name, module in modules.items() if hasattr(module, "base_layer")}
    handles = []
    for name, module in modules.items():
        inside = any(name.startswith(f"{outer}.") for outer in adapted)
        if name in adapted or is_experts(module) or not (inside or list(module.children())):
            handles.append(module.register_forward_hook(partial(record, name)))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _by_token(values: tuple) -> list[Tensor]:
    """Return a call's floating-point tensors, [1, T, ...] or [R, ...], as [tokens, ...], copies."""
    tensors = [value for value in values if torch.is_tensor(value) and value.is_floating_point()]
    return [(tensor[0] if tensor.dim() > 2 else tensor).detach().clone() for tensor in tensors]


def _equal(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    """Two forwards' tensors against those of one: the same values token by token."""
    if len(ours) == len(theirs):
        return all(map(torch.equal, ours, theirs))
    count = len(theirs)
    return all(torch.equal(torch.cat(ours[i::count]), theirs[i]) for i in range(count))


def _locate(engines: _Engines, model: PreTrainedModel, tokens: list[int]) -> str:
    """Recompute one sequence on both sides and return the first module, in order of computation, to differ.

    The engine computes all tokens but the last in one step, and that in another. It has no CUDA graphs: a replay calls
    no module.
    """
    with _recorded(engines.model) as ours:
        llm = engines.make(1, max(1, len(tokens) - 1))
        llm.generate([tokens], SamplingParams(max_tokens=1), use_tqdm=False)
    with _recorded(model) as seen, torch.no_grad():
        model(torch.tensor([tokens], device=model.device), logits_to_keep=1)
    previous = "the input"
    for name, (inputs, outputs) in seen.items():
        our_inputs, our_outputs = ours[name]
        if not _equal(our_outputs, outputs):
            if _equal(our_inputs, inputs):
                return f"{name} ({type(engines.model.get_submodule(name)).__name__})"
            return f"{name.rpartition('.')[0]}, between {previous} and {name}"
        previous = name
    return "not reproduced by a single sequence: the difference depends on the batch, or on fused kernels"


def falsify(model: nn.Module, name: str) -> None:
    """Scale the output of a module by some units in its last place. ValueError for a module that isn't there."""
    try:
        module = model.get_submodule(name)
    except AttributeError as error:
        raise ValueError(f"no module {name!r}: {error}") from error

    def scale(output: Any) -> Any:
        if isinstance(output, tuple):
            return tuple(map(scale, output))
        if not torch.is_tensor(output) or not output.is_floating_point():
            return output
        return output * (1 + 4 * torch.finfo(output.dtype).eps)

    module.register_forward_hook(lambda module, args, output: scale(output))
