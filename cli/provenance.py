"""The origin of a file of rollouts, and a check of it: model checksum, contract, sampling parameters, exact bits."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from ..correction.statistics import IMPOSSIBLE
from ..engine import SamplingParams
from ..engine.weights.spec import checksum
from ..integrations.rollouts import Rollout, RolloutFormatError
from ..kernels.contract import Contract
from ..model.stored import stored_state

_DISTRIBUTION = "temperature", "top_k", "top_p", "min_p", "min_tokens"
_COPY = -20.0  # nats: two draws of a less likely sequence are a copy
FOREIGN = 1.0  # nats: no numerical format moves log-probs as far on average; another model or temperature may
_EXCLUDED = 1e-3  # share of tokens that the given filters would not have let through


def provenance_of(checksums: dict[str, str], contract: Contract, params: SamplingParams) -> dict[str, Any]:
    """Return the origin that a record of exact rollouts states. checksums: of each tensor of the model."""
    digest = hashlib.blake2b(repr(sorted(checksums.items())).encode(), digest_size=16).hexdigest()
    return {"model": digest, "contract": contract.hash, **_distribution(params)}


def _distribution(params: SamplingParams) -> dict[str, Any]:
    """Return the parameters that decide what tokens are sampled from, as JSON has them."""
    found = {name: getattr(params, name) for name in _DISTRIBUTION}
    if params.min_tokens:  # what ends a completion can't come before
        found |= {"ignore_eos": params.ignore_eos, "stop_token_ids": sorted(set(params.stop_token_ids))}
    return found


def expected_provenance(model: PreTrainedModel, params: SamplingParams) -> dict[str, Any]:
    """The provenance that rollouts of an exact engine with this model must have."""
    contract = Contract.of(model.dtype, model.device)
    return provenance_of({name: checksum([p.detach()]) for name, p in stored_state(model).items()}, contract, params)


def check_sampling(rollouts: Iterable[Rollout], params: SamplingParams) -> Iterator[Rollout]:
    """Yield the rollouts. Raises RolloutFormatError at one that says it was sampled with other parameters."""
    for rollout in rollouts:
        _check_origin(rollout, _distribution(params))
        yield rollout


def _check_origin(rollout: Rollout, expected: dict[str, Any]) -> None:
    for name, value in expected.items():
        recorded = (rollout.provenance or {}).get(name, value)
        if recorded != value:
            raise RolloutFormatError(
                f"{rollout.source}: it was sampled with {name} {recorded}, not {value}; expected rollouts of the given "
                "--model with the given sampling options"
            )


def check_reference(rollouts: Iterable[Rollout], expected: dict[str, Any]) -> None:
    """Refuse a reference that wasn't sampled by an exact engine with this model and these parameters: every log-prob
    must be the re-scored one, bit for bit. Raises RolloutFormatError with the first token that isn't."""
    for rollout in rollouts:
        _check_origin(rollout, expected)
        assert rollout.reference is not None
        recorded = rollout.rollout.astype(np.float32)
        exact = rollout.reference.astype(np.float32)
        wrong = (recorded != exact) & rollout.valid
        if wrong.any():
            at = int(wrong.argmax())
            raise RolloutFormatError(
                f"{rollout.source}: rollout_logprobs[{at}] is {recorded[at]:.9g}, the exact one {exact[at]:.9g}: this "
                "is no exact reference; expected the output of `samebits rollout` with this model and these options"
            )


def check_engine(rollouts: list[Rollout], path: object) -> None:
    """Refuse rollouts that can't come from the model, temperature and filters that re-scored them."""
    engine = np.concatenate([r.rollout[r.valid] for r in rollouts])
    exact = np.concatenate([r.reference[r.valid] for r in rollouts if r.reference is not None])
    possible = exact > IMPOSSIBLE
    excluded = int((~possible).sum())
    if excluded > _EXCLUDED * len(exact):
        raise RolloutFormatError(
            f"{path}: {excluded} of {len(exact)} tokens could not be sampled under the given filters; expected the "
            "--top-k, --top-p, --min-p and --min-tokens that the engine sampled with"
        )
    distance = float(np.abs(engine - exact)[possible].mean()) if possible.any() else 0.0
    if distance > FOREIGN:
        raise RolloutFormatError(
            f"{path}: log-probs differ from the exact ones by {distance:.2f} nats on average, more than numerics can "
            "explain; expected the --model and --temperature that the engine sampled with, and log-probs after filters"
        )


def in_order(rollouts: Iterable[Rollout]) -> tuple[list[Rollout], int]:
    """Rollouts in an order that their content fixes, without copies; and how many copies there were.

    Files that hold the same records, in any order or number of parts, give the same list.
    """
    alike: dict[bytes, list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        parts = (_ids(rollout.prompt_token_ids), _ids(rollout.token_ids), rollout.rollout)
        alike[b"".join(part.tobytes() for part in parts)].append(rollout)
    kept = []
    for key in sorted(alike):
        same = sorted(alike[key], key=_rest)
        likely = float(same[0].rollout[same[0].valid].sum()) >= _COPY
        kept += same if likely else same[:1]
    copies = sum(map(len, alike.values())) - len(kept)
    return sorted(kept, key=lambda r: r.group or ""), copies


def _ids(values: np.ndarray | None) -> np.ndarray:
    return np.zeros(0, np.int64) if values is None else np.append(values, -2)  # the end of each part


def _rest(rollout: Rollout) -> tuple[bytes, ...]:
    """Return all that may differ between rollouts of equal tokens, to be sorted by."""
    arrays = (rollout.old, rollout.current, rollout.mask, rollout.advantages, rollout.top_token_ids)
    plain = repr((rollout.group, rollout.reward, rollout.provenance)).encode()
    return plain, *(b"" if a is None else np.ascontiguousarray(a).tobytes() for a in arrays)


def check_groups(rollouts: Iterable[Rollout], prompts: dict[str, Rollout]) -> None:
    """Refuse groups that some records lack, and one group's name for several prompts. prompts: a record of each group
    seen so far, in any file; added to."""
    first: dict[bool, Rollout] = {}
    for rollout in rollouts:
        first.setdefault(rollout.group is None, rollout)
        if len(first) == 2:
            raise RolloutFormatError(
                f"{first[True].source}: no group, while {first[False].source} has one; expected it in all records of a "
                "file or in none"
            )
        if rollout.group is None:
            continue
        other = prompts.setdefault(rollout.group, rollout)
        if not np.array_equal(_ids(other.prompt_token_ids), _ids(rollout.prompt_token_ids)):
            raise RolloutFormatError(
                f"{rollout.source}: group {rollout.group!r} has another prompt than in {other.source}; expected equal "
                "prompt_token_ids in all records of a group, in the reference's too"
            )


def pair_of(rollout: Rollout, vocab_size: int) -> tuple[list[int], list[int]]:
    """(prompt, completion) as token ids. Raises RolloutFormatError where there are none, or not the model's."""
    prompt = rollout.prompt_token_ids
    check_ids(rollout, vocab_size)
    if prompt is None or not len(prompt) or (rollout.token_ids < 0).any():
        raise RolloutFormatError(f"{rollout.source}: no token ids to score; expected prompt_token_ids and token_ids")
    return prompt.tolist(), rollout.token_ids.tolist()


def check_ids(rollout: Rollout, vocab_size: int) -> None:
    """Refuse token ids that the model lacks, with their place."""
    for name in ("prompt_token_ids", "token_ids"):
        values = getattr(rollout, name)
        if values is not None and len(values) and values.max() >= vocab_size:
            at = int(values.argmax())
            raise RolloutFormatError(
                f"{rollout.source}: {name}[{at}] is {values[at]}; expected ids below {vocab_size}, the model's size"
            )


def shared_groups(*sides: list[Rollout]) -> tuple[list[list[Rollout]], int]:
    """The sides with only those groups that all have, where some are shared and some aren't; and how many groups were
    left out. Sides that share none stay whole: they are independent."""
    names = [{r.group for r in side} for side in sides]
    common = set.intersection(*names)
    every = set.union(*names)
    if None in every or not common or common == every:
        return list(sides), 0
    return [[r for r in side if r.group in common] for side in sides], len(every) - len(common)


def counts(rollouts: list[Rollout]) -> dict[str, int]:
    """The sequences, prompts and tokens of a file."""
    groups = {r.group for r in rollouts}
    tokens = sum(int(r.valid.sum()) for r in rollouts)
    return {"sequences": len(rollouts), "prompts": len(groups), "tokens": tokens}
