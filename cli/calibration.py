"""`samebits calibrate`: files of rollouts to a calibration, and what it was made from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from ..correction import Correction
from ..correction.calibration import Calibration, Traces, Verdict, calibrate, candidate_grid
from ..correction.calibration.calibrate import check_settings
from ..correction.calibration.verdict import MARGIN, MAX_BIAS
from ..correction.losses import Mode, check_combination
from ..engine import SamplingParams
from ..integrations.corrections import from_plain
from ..integrations.rollouts import Rollout, RolloutFormatError, read_rollouts
from . import provenance as origin
from .mismatch import packed, scored
from .scores import token_scores

_REPLAY = (
    "The rollouts carry experts. Replay of these (R3) changes the trainer's log-probs, not a token's weight, so it is "
    "no candidate here; `samebits diagnose --model` shows what it would remove."
)


@dataclass
class Calibrated:
    """A calibration of files. candidates: by name; provenance: what it was made from, plain values; warnings:
    sentences.
    """

    result: Calibration
    candidates: dict[str, Correction]
    provenance: dict[str, Any]
    warnings: list[str] = field(default_factory=list)


def calibrate_files(
    path: str | Path,
    reference: str | Path | None,
    model: PreTrainedModel | None = None,
    params: SamplingParams | None = None,
    mode: Mode = "decoupled",
    batch_size: int = 256,
    seed: int = 0,
    candidates: str | Path | None = None,
    margin: float = MARGIN,
    max_bias: float = MAX_BIAS,
) -> Calibrated:
    """Return a calibration of a file of traces against one of exact rollouts. candidates: a file with more of them, as
    `read_candidates` reads it; margin, max_bias: see `calibrate`.

    With a model both are re-scored: a reference whose log-probs are not the exact ones, bit for bit, is refused, and so
    are traces that the model can't have sampled. The order of records changes nothing.
    """
    check_settings(batch_size, margin, max_bias)
    params = params or SamplingParams()
    own = {} if candidates is None else read_candidates(candidates, mode)
    warnings: list[str] = []
    prompts: dict[str, Rollout] = {}
    paths = [path] if reference is None else [path, reference]
    sides = [_read(p, model, params, prompts, warnings) for p in paths]
    if len({side[0].group is None for side in sides}) > 1:
        raise RolloutFormatError(f"{path}, {reference}: one of them has groups; expected them in both or in neither")
    sides, dropped = origin.shared_groups(*sides)
    if any(rollout.routed_experts is not None for rollout in sides[0]):
        warnings.append(_REPLAY)
    if dropped:
        warnings.append(f"{dropped} groups are in one of the two files only, and are left out.")
    facts: dict[str, Any] = {
        "mode": mode,
        "batch_size": batch_size,
        "seed": seed,
        "margin": margin,
        "max_bias": max_bias,
    }
    facts |= {"rollouts": str(path), **_kinds("rollouts", sides[0])}
    if reference is not None:
        facts |= {"reference": str(reference), **_kinds("reference", sides[1])}
    if model is not None:
        expected = origin.expected_provenance(model, params)
        facts |= {**expected, "dtype": str(model.dtype).removeprefix("torch.")}
        sides[0] = list(origin.check_sampling(sides[0], params))
        origin.check_engine(sides[0], path)
        if reference is not None:
            origin.check_reference(sides[1], expected)
            if not all(r.provenance for r in sides[1]):
                warnings.append("The reference doesn't say what made it; its log-probs are the exact ones.")
    names = {group: number for number, group in enumerate(sorted(prompts))}
    traces = [_traces(side, names, model, params, seed) for side in sides]
    grid = candidate_grid(traces[0].logprobs, mode)
    if taken := sorted(name for name in own.keys() & grid.keys() if own[name] != grid[name]):
        raise ValueError(f"{candidates}: {', '.join(taken)}: a candidate of the grid's; expected another name")
    grid |= own
    truth = traces[1] if len(traces) > 1 else None
    result = calibrate(
        traces[0], grid, truth, mode=mode, batch_size=batch_size, margin=margin, max_bias=max_bias, seed=seed
    )
    equal = not traces[0].on_policy().logprobs.log_ratio("current/rollout").any()
    if model is not None and equal and not traces[0].logprobs.log_ratio("old/rollout").any():
        result = replace(result, verdict=Verdict("re-scored, all log-probs are the engine's, bit for bit", "none"))
    return Calibrated(result, grid, facts, warnings)


def read_candidates(path: str | Path, mode: Mode) -> dict[str, Correction]:
    """Corrections of a JSON file: name -> settings, see `from_plain`. Raises ValueError with the name of one that
    can't be, or doesn't fit the mode."""
    try:
        data = json.loads(Path(path).read_bytes())
        if not isinstance(data, dict):
            raise TypeError("not an object")
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}; expected a JSON object of name -> correction") from error
    found = {}
    for name, settings in data.items():
        try:
            found[name] = from_plain(settings)
            check_combination(mode, "ppo", found[name])
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}: {name}: {error}") from error
    return found


def _read(
    path: str | Path,
    model: PreTrainedModel | None,
    params: SamplingParams,
    prompts: dict[str, Rollout],
    warnings: list[str],
) -> list[Rollout]:
    rollouts, copies = origin.in_order(read_rollouts(path))
    if not rollouts:
        raise RolloutFormatError(f"{path}: no rollouts; expected at least one")
    if copies:
        warnings.append(f"{path}: {copies} records are copies of others, and are left out.")
    origin.check_groups(rollouts, prompts)
    if model is None:
        return rollouts
    bar = tqdm(rollouts, desc=f"Scoring {Path(path).name}", unit="seq", delay=2)
    return list(scored(bar, model, params))


def _traces(
    rollouts: list[Rollout],
    names: dict[str, int],
    model: PreTrainedModel | None,
    params: SamplingParams,
    seed: int,
) -> Traces:
    """Advantages as recorded, or the reward less its group's mean. With a model, re-scored and with tokens' scores.
    names: a number for each group."""
    lp = packed(rollouts, "old" if model is None else "reference")
    groups = None
    if rollouts[0].group is not None:
        groups = torch.tensor([names[str(r.group)] for r in rollouts])
    scores = None
    if model is not None:
        pairs = [origin.pair_of(r, model.config.vocab_size) for r in rollouts]
        scores = token_scores(model, pairs, params.temperature or 1.0, seed).at(lp.mask)
    return Traces(lp, _advantages(rollouts, groups), scores, groups)


def _advantages(rollouts: Sequence[Rollout], groups: torch.Tensor | None) -> torch.Tensor:
    if all(r.advantages is not None for r in rollouts):
        return torch.from_numpy(np.concatenate([r.advantages for r in rollouts if r.advantages is not None]))
    lacking = next((r for r in rollouts if r.reward is None), None)
    if lacking is not None:
        raise RolloutFormatError(f"{lacking.source}: no advantages and no reward; expected one of them")
    from ..trainer.rl.losses import advantages

    rewards = torch.tensor([r.reward for r in rollouts], dtype=torch.float64)
    group = torch.zeros(len(rewards), dtype=torch.long) if groups is None else groups
    return advantages(rewards, group, "group")[:, None]


def _kinds(name: str, rollouts: list[Rollout]) -> dict[str, int]:
    return {f"{name}_{what}": count for what, count in origin.counts(rollouts).items()}
