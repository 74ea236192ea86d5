"""`samebits diagnose` and `samebits rollout`: files of rollouts to plain numbers. `report.py` shows them."""

from __future__ import annotations

import heapq
import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import yaml
from tqdm import tqdm
from transformers import PreTrainedModel

from ..correction import Correction, Diagnosis, LogProbs
from ..correction.losses import Mode
from ..correction.statistics import Ratio
from ..engine import LLM, SamplingParams
from ..engine.weights.spec import buckets
from ..integrations.rollouts import Rollout, RolloutFormatError, read_rollouts, write_rollouts
from ..model.routing import routers
from .provenance import FOREIGN, check_sampling, pair_of, provenance_of
from .replay import ReplayReport, scored_with_replay

TOKENS_PER_BATCH = 1 << 18
WORST = 20  # tokens shown
CONTEXT = 12  # tokens before each of them


@dataclass
class Report:
    """A measured mismatch. summary: see `Diagnosis.summary`; worst: the tokens with the largest |d|, in context;
    trainer_gap: the largest |reference - old| where a file holds the trainer's own log-probs beside the re-scored ones;
    replay: of a mixture of experts, see `ReplayReport.summary`; warnings: sentences.
    """

    summary: dict[str, Any]
    survival: tuple[list[float], list[float]]
    worst: list[dict[str, Any]] = field(default_factory=list)
    trainer_gap: float | None = None
    replay: dict[str, Any] | None = None
    warnings: list[str] = field(default_factory=list)


def scored(rollouts: Iterable[Rollout], model: PreTrainedModel, params: SamplingParams) -> Iterator[Rollout]:
    """Yield each rollout with `reference` and `best_token_ids` filled in."""
    from ..trainer.rescore import rescore

    asked, waiting = itertools.tee(rollouts)
    scores = rescore(model, (pair_of(r, model.config.vocab_size) for r in asked), params)
    for rollout, (logprobs, best) in zip(waiting, scores, strict=True):
        rollout.reference = logprobs.double().numpy()
        rollout.best_token_ids = best.numpy()
        yield rollout


def packed(rollouts: list[Rollout], trainer: Literal["old", "reference", "replayed"]) -> LogProbs:
    """One batch without padding. trainer: what stands for the trainer's log-probs, the file's or the re-scored ones."""

    def joined(name: str) -> torch.Tensor | None:
        arrays = [getattr(r, name) for r in rollouts]
        return None if any(a is None for a in arrays) else torch.from_numpy(np.concatenate(arrays))

    old = joined(trainer)
    if old is None:
        missing = next(r for r in rollouts if getattr(r, trainer) is None)
        wanted = "old_logprobs, or a --model to re-score with"
        raise RolloutFormatError(f"{missing.source}: no trainer's log-probs; expected {wanted}")
    mask = torch.from_numpy(np.concatenate([r.valid for r in rollouts]))
    offsets = torch.tensor([0, *(len(r.token_ids) for r in rollouts)]).cumsum(0)
    return LogProbs(mask, joined("rollout"), old, joined("current"), offsets)


def diagnose(
    path: str | Path,
    model: PreTrainedModel | None = None,
    params: SamplingParams | None = None,
    use_tqdm: bool = True,
    ratio: Ratio = "old/rollout",
) -> Report:
    """Return the measures of a file of rollouts, engine against trainer; with a model, against its exact scores. ratio:
    the two policies to compare; those of staleness need the records' current_logprobs."""
    trainer: Literal["old", "reference"] = "old" if model is None else "reference"
    rollouts = read_rollouts(path)
    if model is not None:
        rollouts = check_sampling(rollouts, params or SamplingParams())
    replay = None
    if model is not None and routers(model):
        replay = ReplayReport(model)
        rollouts = scored_with_replay(rollouts, model, params or SamplingParams(), replay)
    elif model is not None:
        rollouts = scored(rollouts, model, params or SamplingParams())
    bar = tqdm(rollouts, desc="Reading" if model is None else "Scoring", unit="seq", delay=2, disable=not use_tqdm)
    diagnosis = Diagnosis(ratio)
    gaps: list[float] = []
    copied = True
    found: list[dict[str, Any]] = []
    for batch in buckets(bar, lambda rollout: len(rollout.token_ids), TOKENS_PER_BATCH):
        lp = packed(batch, trainer)
        if "current" in ratio and lp.current is None:
            missing = next(r for r in batch if r.current is None)
            raise RolloutFormatError(f"{missing.source}: no current_logprobs; expected them for the ratio {ratio}")
        d = diagnosis.add(lp, _flips(batch)[lp.mask])
        if replay is not None and (known := [r for r in batch if r.replayed is not None]):
            replay.own.add(packed(known, "reference"))
            replay.replayed.add(packed(known, "replayed"))
        found += _worst(batch, lp, d, ratio)
        found = heapq.nlargest(WORST, found, key=lambda token: token["abs"])
        if any(r.old is None for r in batch):
            copied = False
            continue
        own = lp if trainer == "old" else packed(batch, "old")
        copied &= torch.equal(own.values("old"), own.values("rollout"))
        if len(d):
            difference = own.values("old") - lp.values("old")
            gaps.append(float(difference.abs().max()))
    if not diagnosis.sums["all"].any():
        raise RolloutFormatError(f"{path}: no valid tokens to diagnose; expected rollouts with sampled tokens")
    summary = diagnosis.summary()
    copied = copied and ratio == "old/rollout"
    copied = copied and (model is None or summary["max_abs"] > 0)  # re-scored and equal: an exact engine's
    hint = "Give a --model to re-score them." if model is None else "The exact scores count here."
    warnings = [f"{_COPIED} {hint}"] if copied else []
    warnings += [_FOREIGN] if ratio == "old/rollout" and summary["mean_abs"] > FOREIGN else []
    gap = None if model is None or copied or not gaps else max(gaps)
    return Report(summary, diagnosis.survival(), found, gap, None if replay is None else replay.summary(), warnings)


_COPIED = (
    "The file's old log-probs are the engine's own, bit for bit. An exact engine's are, but so are those in dumps of "
    "trainers in bypass mode (verl's bypass_mode, Miles' use_rollout_logprobs), whose tokens then read as without "
    "mismatch."
)
_FOREIGN = (
    "This is more than numerics can explain. Are these the model, the temperature and the filters that the engine "
    "sampled with, and its log-probs those after them?"
)


def _flips(rollouts: list[Rollout]) -> torch.Tensor:
    """Arrays of all tokens, as `Diagnosis.add` takes them."""

    def of(rollout: Rollout) -> np.ndarray:
        top = rollout.top_token_ids
        if top is None or rollout.best_token_ids is None:
            return np.full(len(rollout.token_ids), -1)
        return np.where(top < 0, -1, top != rollout.best_token_ids)

    return torch.from_numpy(np.concatenate([of(r) for r in rollouts]))


def _worst(batch: list[Rollout], lp: LogProbs, d: torch.Tensor, ratio: Ratio) -> list[dict[str, Any]]:
    index = lp.mask.nonzero()[:, 0]
    assert lp.offsets is not None
    policies = ratio.split("/")
    above, below = (lp.values(policy) for policy in policies)
    tokens = []
    for at in d.abs().topk(min(WORST, len(d))).indices.tolist():
        row = int(lp.segment[at])
        rollout = batch[row]
        position = int(index[at] - lp.offsets[row])
        prompt = [] if rollout.prompt_token_ids is None else rollout.prompt_token_ids.tolist()
        before = prompt + rollout.token_ids[:position].tolist()
        tokens.append({
            "abs": abs(float(d[at])), f"{policies[0]}_logprob": float(above[at]),
            f"{policies[1]}_logprob": float(below[at]), "token_id": int(rollout.token_ids[position]),
            "position": position, "context": before[-CONTEXT:], "source": rollout.source,
        })  # fmt: skip
    return tokens


def write_exact(llm: LLM, prompts: Path, out: Path, params: SamplingParams) -> int:
    """Rollouts of every prompt of a JSONL file, grouped by its line; their trainer's log-probs are the engine's. A seed
    gives each prompt random numbers of its own: calibrate takes prompts for independent."""
    with prompts.open("rb") as file:
        asked = {n: _prompt(llm, line, f"{prompts}:{n}") for n, line in enumerate(file, 1) if line.strip()}
    params = replace(params, routed_experts=llm.engine.has_experts)
    outputs = llm.generate(list(asked.values()), params.per_prompt(len(asked)))
    for group, output in zip(asked, outputs, strict=True):  # before an earlier file is written over
        if failed := [c.stop_reason for c in output.completions if c.finish_reason == "error"]:
            raise FloatingPointError(f"{prompts}:{group}: {failed[0]}")
    contract = llm.contract  # None where the engine is not exact
    provenance = None if contract is None else provenance_of(llm.weight_checksums(), contract, params)

    def rollouts() -> Iterator[Rollout]:
        for group, output in zip(asked, outputs, strict=True):
            for c in output.completions:
                logprobs = np.array(c.logprobs)
                prompt = np.array(output.prompt_token_ids)
                yield Rollout(
                    np.array(c.token_ids), logprobs, prompt, old=logprobs, group=str(group), provenance=provenance,
                    routed_experts=c.routed_experts,
                )  # fmt: skip

    write_rollouts(out, rollouts())
    return sum(len(o.completions) for o in outputs)


def _prompt(llm: LLM, line: bytes, source: str) -> Any:
    try:
        record = json.loads(line)
        keys = set(record) & {"prompt", "prompt_token_ids", "messages"}
    except (ValueError, TypeError) as error:
        raise RolloutFormatError(f"{source}: {error}; expected a JSON object") from error
    if len(keys) != 1:
        found = sorted(keys or record)
        raise RolloutFormatError(f"{source}: has {found}; expected one of prompt, prompt_token_ids, messages")
    key = keys.pop()
    if key != "messages":
        return {key: record[key]}
    try:
        return llm.chat_prompt(record[key])
    except ValueError as error:
        raise RolloutFormatError(f"{source}: {error}") from error


def snippets(mode: Mode, correction: Correction) -> dict[str, str]:
    """Return a YAML text per framework, with what its code does otherwise; or that it can't express this."""
    from ..integrations import corrections as c

    frameworks = {
        "verl: algorithm.rollout_correction": (c.to_verl, c.from_verl),
        "TRL: GRPOConfig": (c.to_trl, c.from_trl),
        "Miles: arguments": (c.to_miles, c.from_miles),
        "slime: arguments": (c.to_slime, c.from_slime),
    }
    texts = {}
    for framework, (write, read) in frameworks.items():
        try:
            settings = write(mode, correction)
        except ValueError as error:
            texts[framework] = f"# {error}"
            continue
        text = yaml.safe_dump(settings, sort_keys=False).strip() if settings else "# the defaults"
        texts[framework] = "\n".join([text, *(f"# {note}" for note in read(settings).notes)])
    return texts
