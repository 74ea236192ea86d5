"""The proof on a user's own model and machine: random schedules through the engine, recomputed by the trainer."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel

from ..engine import LLM, SamplingParams
from ..engine.core import EngineCore
from ..engine.executor import LocalExecutor
from ..engine.model_runner import ModelRunner
from ..kernels import ops
from ..model import exact_model
from ..model.exact import ExactLinear, ExactRMSNorm
from ..scheduler import Batch
from .logprobs import token_logprobs

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
    dtype: str = "float32",
    seed: int = 0,
    plant_fault: str | None = None,
    use_tqdm: bool = True,
    device: str = "cpu",
) -> VerifyReport:
    """Runs every setting of SAMPLING under a random schedule and compares all log-probs, as bits, with the trainer's.

    The KV pool is kept small, so that sequences are preempted; prompts share prefixes; n > 1. plant_fault: a module of
    the engine whose op is replaced by torch's own first, to see that the proof can fail. On a difference, both sides
    recompute the sequence and `fault` names the first module whose output differs.
    """
    model = exact_model(name, dtype, device)
    rng = random.Random(seed)
    vocab, room = model.config.vocab_size, min(model.config.max_position_embeddings, 512)
    longest = min(96, room // 2)
    pool = 5 * 2 * longest  # tokens
    llm = LLM(
        name, dtype=dtype, device=device, max_model_len=room,
        kv_cache_memory_bytes=_kv_bytes(model, pool), skip_tokenizer_init=True,
    )  # fmt: skip
    if plant_fault is not None:
        replace_op(_runner(llm).model, plant_fault)
    rounds, first = [], None
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
            _core(llm).scheduler.max_num_seqs = rng.choice((1, 3, 16))
            _core(llm).scheduler.max_num_batched_tokens = rng.choice((5, 17, 64, 512))
            torch.set_num_threads(rng.choice((1, threads)))
            this, found = _round(llm, model, prompts, params, label)
            rounds.append(this)
            first = first or found
    finally:
        torch.set_num_threads(threads)
    fault = None if first is None else locate(llm, model, *first)
    assert llm.contract is not None
    return VerifyReport(llm.contract.hash, rounds, fault)


def _core(llm: LLM) -> EngineCore:
    assert isinstance(llm.engine, EngineCore)
    return llm.engine


def _runner(llm: LLM) -> ModelRunner:
    executor = _core(llm).executor
    assert isinstance(executor, LocalExecutor)
    return executor.workers[0].runner


def _kv_bytes(model, tokens: int) -> int:
    return ModelRunner.block_bytes(model) * -(-tokens // ops.backend(model.device).BLOCK)


def _round(llm: LLM, model, prompts, params: SamplingParams, label: str):
    before, schedule = llm.stats(), _core(llm).scheduler
    outputs = llm.generate(prompts, params, use_tqdm=False)
    after = llm.stats()
    pairs = [(o.prompt_token_ids, c) for o in outputs for c in o.completions]
    sequences = [prompt + c.token_ids for prompt, c in pairs]
    with torch.no_grad():
        expected = token_logprobs(model, sequences, params)
    differing, worst, first = 0, 0.0, None
    for (prompt, completion), sequence, logprobs in zip(pairs, sequences, expected, strict=True):
        ours, theirs = torch.tensor(completion.logprobs), logprobs[len(prompt) :].cpu()
        unequal = ours != theirs
        if unequal.any():
            differing += int(unequal.sum())
            worst = max(worst, float((ours - theirs).abs().max()))
            first = first or (sequence, len(prompt) + int(unequal.nonzero()[0]) - 1)
    this = Round(
        label, schedule.max_num_seqs, schedule.max_num_batched_tokens, torch.get_num_threads(),
        sum(len(c.token_ids) for _, c in pairs), after.preemptions - before.preemptions,
        after.prefix_hit_tokens - before.prefix_hit_tokens, differing, worst,
    )  # fmt: skip
    return this, first


class _Recorder:
    """Inputs and outputs of every leaf module at every token, in order of completion; later forwards append."""

    def __init__(self, model: nn.Module):
        self.seen: dict[str, tuple[list[Tensor], list[Tensor]]] = {}
        leaves = [(name, m) for name, m in model.named_modules() if not list(m.children())]
        self.handles = [m.register_forward_hook(self._hook(name)) for name, m in leaves]

    def _hook(self, name: str):
        def hook(module, args, output):
            outputs = output if isinstance(output, tuple) else (output,)
            inputs, results = self.seen.setdefault(name, ([], []))
            inputs += [_by_token(t) for t in args if torch.is_tensor(t)]
            results += [_by_token(t) for t in outputs if torch.is_tensor(t)]

        return hook

    def __enter__(self) -> _Recorder:
        return self

    def __exit__(self, *exception) -> None:
        for handle in self.handles:
            handle.remove()


def _by_token(tensor: Tensor) -> Tensor:
    """[1, T, ...] or [R, ...] -> [tokens, ...], a copy."""
    batched = tensor.dim() > 2 or not tensor.is_floating_point()  # [1, T] token ids and positions
    return (tensor[0] if batched else tensor).detach().clone()


def _equal(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    """Two forwards' tensors against those of one: the same values token by token."""
    if len(ours) == len(theirs):
        return all(map(torch.equal, ours, theirs))
    count = len(theirs)
    return all(torch.equal(torch.cat(ours[i::count]), theirs[i]) for i in range(count))


def locate(llm: LLM, model: PreTrainedModel, sequence: list[int], position: int) -> str:
    """Recomputes one sequence up to `position` on both sides; the first module, in order of computation, to differ."""
    tokens = sequence[: position + 1]
    ours = _engine_activations(llm, tokens)
    with _Recorder(model) as recorder, torch.no_grad():
        model(torch.tensor([tokens], device=model.device), logits_to_keep=1)
    previous = "the input"
    for name, (inputs, outputs) in recorder.seen.items():
        our_inputs, our_outputs = ours[name]
        if not _equal(our_outputs, outputs):
            if _equal(our_inputs, inputs):
                return f"{name} ({type(_runner(llm).model.get_submodule(name)).__name__})"
            return f"{name.rpartition('.')[0]}, between {previous} and {name}"
        previous = name
    return "not reproduced by a single sequence: the difference depends on the batch, or on fused kernels"


def _engine_activations(llm: LLM, tokens: list[int]) -> dict[str, tuple[list[Tensor], list[Tensor]]]:
    """The engine's activations: a prefill of all tokens but the last, then a step of one token."""
    _runner(llm).graphs = None  # a replay calls no module
    sample = llm.process(tokens, SamplingParams(max_tokens=1), "activations").samples[0]
    blocks = _core(llm).scheduler.blocks
    if not blocks.allocate(sample, len(tokens)):
        raise MemoryError("the KV pool is in use")
    try:
        with _Recorder(_runner(llm).model) as recorder:
            for count in filter(None, (len(tokens) - 1, 1)):
                sample.num_scheduled_tokens = count
                _runner(llm).run(_core(llm).planner.plan(Batch([sample]), [])[0])
                sample.num_cached_tokens += count
    finally:
        blocks.free(sample)
    return recorder.seen


def replace_op(model: nn.Module, name: str) -> None:
    """Put torch's own op in the place of one exact module (a linear or a norm). ValueError for anything else."""
    try:
        module = model.get_submodule(name)
    except AttributeError as error:
        raise ValueError(f"no module {name!r}: {error}") from error
    plain: nn.Module
    if isinstance(module, ExactRMSNorm):
        plain = nn.RMSNorm(module.weight.shape, module.variance_epsilon)
        plain.weight = module.weight
    elif isinstance(module, ExactLinear):
        weight = module.weight if module.packed is None else module.packed.rows(torch.arange(module.out_features))
        plain = nn.Linear(module.in_features, module.out_features, module.bias is not None, dtype=weight.dtype)
        plain.weight.data = weight.detach().contiguous()
        if module.bias is not None:
            plain.bias.data = module.bias.detach()
    else:
        raise ValueError(f"{name!r} is a {type(module).__name__}; choose a linear or a norm")
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, plain)
