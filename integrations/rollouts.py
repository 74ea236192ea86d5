"""Rollouts of any engine, read one at a time: plain JSONL, parquet and npz; replies of vLLM and SGLang; dumps of TRL,
verl and Miles. What is read is checked; what is wrong is named with its file and line."""

from __future__ import annotations

import contextlib
import itertools
import math
import pickle
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import orjson

from ..correction.statistics import IMPOSSIBLE


@dataclass
class Rollout:
    """One sampled sequence; all arrays are of its sampled tokens, [T].

    token_ids int64, -1 where a dump holds none (Miles); rollout, old, current, reference f64: log-probs under the
    engine that sampled, the trainer at rollout time, the trainer now, and an exact re-scoring; mask bool, None for all;
    advantages f64; top_token_ids, best_token_ids int64: the most likely token at each position, of the engine (-1 where
    it didn't say) and of the re-scoring; the latter is not in files. group: names the samples of one prompt. source:
    where it was read, for error messages.
    """

    token_ids: np.ndarray
    rollout: np.ndarray
    prompt_token_ids: np.ndarray | None = None
    old: np.ndarray | None = None
    current: np.ndarray | None = None
    reference: np.ndarray | None = None
    mask: np.ndarray | None = None
    advantages: np.ndarray | None = None
    reward: float | None = None
    group: str | None = None
    top_token_ids: np.ndarray | None = None
    best_token_ids: np.ndarray | None = None
    source: str = ""


class RolloutFormatError(ValueError):
    """A record that can't be read: "file:line: what is wrong; expected what". Lines count from 1, file[row] from 0."""


def read_rollouts(path: str | Path, format: str | None = None) -> Iterator[Rollout]:
    """The rollouts of a file, one after another; JSONL and parquet of any size need little memory.

    The format is seen from the content; `format` insists on one: "jsonl" (plain, see `write_rollouts`), "vllm"
    (responses of completions, chat completions or inference/v1/generate) and "sglang" (replies of /generate, or lists
    of them), all one a line; "parquet" and "npz" (columns or arrays with the plain names); "trl" and
    "verl" (dictionaries of padded tensors, .pt or .npz); "miles" (a policy_loss_debug file, or a folder that has some).
    npz: padded [B, T] with `mask` (and prompts [B, P] with `prompt_mask`), or packed [N] with `offsets` [B + 1] (and
    `prompt_offsets`). Raises RolloutFormatError on a bad record, when it is reached.
    """
    path = Path(path)
    if path.is_dir():
        container = "folder"
    else:
        with path.open("rb") as file:
            container = {b"PAR1": "parquet", b"PK\3\4": "zip"}.get(file.read(4), "text")
    formats, read = _CONTAINERS[container]
    if format is not None and format not in formats:
        _fail(path, f"a {container} file can't have format {format!r}", f"one of {', '.join(formats)}")
    return read(path, format)


def write_rollouts(path: str | Path, rollouts: Iterable[Rollout]) -> None:
    """Plain JSONL: a line for each rollout, with the keys prompt_token_ids, token_ids, rollout_logprobs, old_logprobs,
    current_logprobs, reference_logprobs, mask, advantages, reward, group and top_token_ids, where there is a value.

    Log-probs of -inf, which JSON lacks, are written as -1000, which stands for them; NaN (outside the mask) as null.
    """
    with open(path, "wb") as file:
        for rollout in rollouts:
            record = {key: getattr(rollout, name) for key, name in _KEYS.items() if getattr(rollout, name) is not None}
            for key in record.keys() & _ARRAYS.keys():
                array = np.where(record[key] == -np.inf, IMPOSSIBLE, record[key]) if key in _LOGPROBS else record[key]
                record[key] = np.ascontiguousarray(array)
            file.write(orjson.dumps(record, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE))


# --- records -------------------------------------------------------------------------------------------------------

_LOGPROBS = {f"{name}_logprobs": name for name in ("rollout", "old", "current", "reference")}
_FIELDS = ("token_ids", "prompt_token_ids", "mask", "advantages", "reward", "group", "top_token_ids")
_PER_TOKEN = ("token_ids", "mask", "top_token_ids", *_LOGPROBS)
_KEYS = _LOGPROBS | {name: name for name in _FIELDS}  # in files: in a Rollout
_LOWEST, _HIGHEST = np.finfo(np.float32).min, np.finfo(np.float32).max
_ROUNDING = 1e-3  # a log-softmax may round to slightly above 0; a probability or a negated log-prob lies far above
_ARRAYS = {  # lowest and highest legal value, in words
    "mask": (0, 1, "0 or 1, or a boolean, for each token"),
    **dict.fromkeys(("token_ids", "prompt_token_ids", "top_token_ids"), (-1, _HIGHEST, "a flat list of integers")),
    **dict.fromkeys(_LOGPROBS, (-np.inf, _ROUNDING, "a log-prob for each token: at most 0, no NaN or null")),
    "rollout_logprobs": (_LOWEST, _ROUNDING, "a log-prob for each token: finite, at most 0"),
    "advantages": (_LOWEST, _HIGHEST, "one finite number, or one for each token"),
}


def _fail(source: str | Path, wrong: str, expected: str) -> NoReturn:
    raise RolloutFormatError(f"{source}: {wrong}; expected {expected}")


@contextlib.contextmanager
def _located(source: str | Path, expected: str) -> Iterator[None]:
    try:
        yield
    except RolloutFormatError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, pickle.UnpicklingError) as error:
        wrong = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise RolloutFormatError(f"{source}: {wrong}; expected {expected}") from error


def _rollout(record: Mapping[str, Any], source: str) -> Rollout:
    """A checked record. Keys as `write_rollouts` has them, values lists or arrays; outside the mask NaN is legal."""
    for key in ("token_ids", "rollout_logprobs"):
        if record.get(key) is None:
            _fail(source, f"no {key}", "at least token_ids and rollout_logprobs")
    arrays = {key: _array(record[key], key, source) for key in _ARRAYS if record.get(key) is not None}
    ids, sampled = arrays["token_ids"], arrays.get("mask", np.ones(())) != 0
    if "advantages" in arrays and arrays["advantages"].size == 1:
        arrays["advantages"] = np.full(ids.size, arrays["advantages"])
    for key, array in arrays.items():
        (low, high, expected), everywhere = _ARRAYS[key], key in ("mask", "prompt_token_ids")
        if array.ndim != 1 or (array.size != ids.size and key != "prompt_token_ids"):
            _fail(source, f"{key} has shape {list(array.shape)}, token_ids {list(ids.shape)}", expected)
        legal = (array >= low) & (array <= high)
        if not legal.all() and not (legal := legal if everywhere else legal | ~sampled).all():
            _fail(source, f"{key}[{np.argmin(legal)}] is {array[np.argmin(legal)]}", expected)
    if "mask" in arrays:
        arrays["mask"] = sampled
    reward, group = record.get("reward"), record.get("group")
    if reward is not None and not (isinstance(reward, int | float | np.number) and math.isfinite(reward)):
        _fail(source, f"reward is {reward!r}", "a finite number")
    fields: dict[str, Any] = {_KEYS[key]: array for key, array in arrays.items()}
    fields |= {"reward": reward if reward is None else float(reward), "group": group if group is None else str(group)}
    return Rollout(**fields, source=source)


def _array(values: Any, key: str, source: str) -> np.ndarray:
    """int64 of ids, f64 of the rest."""
    array, integers = np.asarray(values), key.endswith("token_ids")
    if array.dtype == object and {type(v) for v in array.flat} <= {int, float, type(None)}:
        array = array.astype(np.float64)  # null becomes NaN
    if array.size and array.dtype.kind not in ("iu" if integers else "iufb" if key == "mask" else "iuf"):
        _fail(source, f"{key} holds {array.dtype.name}", _ARRAYS[key][2])
    return array.astype(np.int64 if integers else np.float64, copy=False)


# --- lines ---------------------------------------------------------------------------------------------------------


def _lines(path: Path, format: str | None) -> Iterator[Rollout]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            with _located(f"{path}:{number}", "a JSON record a line, as the engine gave it"):
                if not line.isspace():
                    yield from _parse(orjson.loads(line), f"{path}:{number}", format)


def _parse(record: Any, source: str, format: str | None) -> Iterator[Rollout]:
    if isinstance(record, list):  # SGLang's reply to a batch
        for index, reply in enumerate(record):
            yield from _parse(reply, f"{source}[{index}]", format)
    elif format == "vllm" or (format is None and "choices" in record):
        yield from _vllm(record, source)
    elif format == "sglang" or (format is None and "meta_info" in record):
        yield _sglang(record, source)
    else:
        yield _rollout(record, source)


def _vllm(response: Mapping[str, Any], source: str) -> Iterator[Rollout]:
    """Choices of one prompt form a group; a response to several prompts tells them apart by prompt_token_ids."""
    prompts: dict[tuple[int, ...], int] = {}
    for index, choice in enumerate(response["choices"]):
        where, logprobs = f"{source}, choice {index}", choice.get("logprobs") or {}
        names, values, tops = (logprobs.get(key) for key in ("tokens", "token_logprobs", "top_logprobs"))
        if (content := logprobs.get("content")) is not None:  # the chat's form
            names, values = [_name(entry) for entry in content], [entry["logprob"] for entry in content]
            tops = [{_name(e): e["logprob"] for e in entry.get("top_logprobs") or ()} for entry in content]
        ids = choice.get("token_ids", choice.get("response_token_ids"))
        if ids is None and -1 in (ids := [_token_id(name) for name in names or ("",)]):
            _fail(where, "no token ids", "a reply to return_token_ids=true or return_tokens_as_token_ids=true")
        if values is None and ids:
            _fail(where, "no log-probs", "a reply to logprobs=0 or more (chat: logprobs=true)")
        prompt = choice.get("prompt_token_ids") or response.get("prompt_token_ids")
        group = f"{response.get('id') or source}/{prompts.setdefault(tuple(prompt or ()), len(prompts))}"
        record = {"token_ids": ids, "rollout_logprobs": values or [], "top_token_ids": _top_ids(tops or ())}
        yield _rollout(record | {"prompt_token_ids": prompt, "group": group}, where)


def _name(entry: Mapping[str, Any]) -> int | str:
    return entry.get("token_id", entry["token"])


def _token_id(name: int | str) -> int:
    """7 or "token_id:7" -> 7; text, which names no id, -> -1."""
    return name if isinstance(name, int) else int(name[9:]) if name.startswith("token_id:") else -1


def _top_ids(tops: Sequence[dict[Any, float] | None]) -> list[int] | None:
    """vLLM lists the sampled token beside the k most likely ones: alone, it is surely the top only above 1/2."""
    ranked, best = any(len(top or ()) > 1 for top in tops), []
    for top in tops:
        name, logprob = max((top or {"": -math.inf}).items(), key=lambda item: item[1])
        best.append(_token_id(name) if ranked or logprob > math.log(0.5) else -1)
    return best if max(best, default=-1) >= 0 else None


def _sglang(reply: Mapping[str, Any], source: str) -> Rollout:
    meta = reply["meta_info"]
    if (triples := meta.get("output_token_logprobs")) is None:
        _fail(source, "no meta_info.output_token_logprobs", "a reply to return_logprob=true: [log-prob, id, text]")
    ids, prompt = [triple[1] for triple in triples], reply.get("prompt_token_ids")
    if reply.get("output_ids") not in (None, ids):
        _fail(source, "output_ids differ from the ids of output_token_logprobs", "the same tokens in both")
    if prompt is None and len(scored := meta.get("input_token_logprobs") or ()) == meta.get("prompt_tokens"):
        prompt = [triple[1] for triple in scored]  # logprob_start_len=0 lists the whole prompt
    tops = meta.get("output_top_logprobs") or ()
    best = [max(top, key=lambda triple: triple[0])[1] if top else -1 for top in tops] if any(tops) else None
    record = {"token_ids": ids, "rollout_logprobs": [triple[0] for triple in triples], "prompt_token_ids": prompt}
    return _rollout(record | {"top_token_ids": best}, source)


# --- files of arrays -------------------------------------------------------------------------------------------------

_OURS = ("token_ids", "rollout_logprobs", "mask", "old_logprobs", "prompt_token_ids")
_THEIRS = {
    "npz": _OURS,
    "trl": ("completion_ids", "sampling_per_token_logps", "completion_mask", "old_per_token_logps", "prompt_ids"),
    "verl": ("responses", "rollout_log_probs", "response_mask", "old_log_probs", "prompts"),
}
_MORE = ("advantages", "current_logprobs", "reference_logprobs", "top_token_ids", "reward", "group")


def _parquet(path: Path, format: str | None) -> Iterator[Rollout]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError("reading parquet needs pyarrow: pip install 'samebits[parquet]'") from error
    stream = {"buffer_size": 2**20, "pre_buffer": False}  # or whole row groups would be held
    with _located(path, "a parquet file"), pyarrow.parquet.ParquetFile(path, **stream) as file:
        columns = [name for name in file.schema_arrow.names if name in _KEYS]
        batches = file.iter_batches(batch_size=64, columns=columns)
        for number, row in enumerate(row for batch in batches for row in zip(*batch.columns, strict=True)):
            lists = [getattr(cell, "values", None) for cell in row]  # None for a scalar or a null
            cells = [c.as_py() if v is None else v.to_numpy(False) for c, v in zip(row, lists, strict=True)]
            yield _rollout(dict(zip(columns, cells, strict=True)), f"{path}[{number}]")


def _dump(path: Path, format: str | None) -> Iterator[Rollout]:
    with _located(
        path, "a dictionary of plain arrays; of verl's DataProto: torch.save(dict(data.batch.items()), path)"
    ):
        data = _load(path)
        signs = {"samples": "miles", "completion_ids": "trl", "responses": "verl"}
        format = format or next((signs[key] for key in data if key in signs), "npz")
        if format == "miles":
            for index, sample in enumerate(data["samples"]):
                yield _miles({k: _numpy(v) for k, v in sample.items() if v is not None}, f"{path}[{index}]")
        else:
            yield from _rows(path, data, format)


def _miles(sample: dict[str, Any], source: str) -> Rollout:
    """The dump holds no token ids."""
    names = ("rollout_log_probs", "old_log_probs", "train_log_probs", "local_loss_mask", "advantages", "group_index")
    keys = ("rollout_logprobs", "old_logprobs", "current_logprobs", "mask", "advantages", "group")
    record = {key: sample.get(name) for key, name in zip(keys, names, strict=True)}
    return _rollout(record | {"token_ids": np.full(len(sample.get("rollout_log_probs", ())), -1)}, source)


def _load(path: Path) -> dict[str, Any]:
    with np.load(path) as file:  # .npz and .pt are both zip files
        if not any(name.endswith("data.pkl") for name in file.files):
            return dict(file)
    import torch

    data = torch.load(path, map_location="cpu", weights_only=True)
    return {key: _numpy(value) for key, value in data.items() if value is not None}


def _numpy(value: Any) -> Any:
    """An array, of a tensor of any dtype; other things as they are."""
    return (value.double() if value.is_floating_point() else value).numpy() if hasattr(value, "numpy") else value


def _rows(path: Path, data: dict[str, Any], format: str) -> Iterator[Rollout]:
    """The sequences of padded arrays, each up to its last valid token, or of packed ones."""
    names: tuple[str, ...] = _THEIRS[format]
    offsets: Any = data.get("offsets")
    for name in names[: 3 if offsets is None else 2]:
        if name not in data:
            _fail(path, f"no {name}", f"the arrays of format {format!r}: {', '.join(names)}")
    found = {ours: data[name] for ours, name in zip(_OURS, names, strict=True) if name in data}
    found |= {key: data[key] for key in _MORE if key in data}
    valid, shape = data.get(names[2]), found["token_ids"].shape
    prompt_mask, prompt_offsets = data.get("prompt_mask"), data.get("prompt_offsets")
    if "tool_mask" in data:  # TRL: what tools wrote is in the completion, but not sampled
        found["mask"] = valid * data["tool_mask"]
    if "attention_mask" in data:  # verl: over prompts and responses
        prompt_mask, valid = np.split(data["attention_mask"], [-shape[-1]], axis=1)
    of_tokens = {key for key in found if key in _PER_TOKEN or (key == "advantages" and found[key].shape == shape)}
    for key in of_tokens:
        if found[key].shape != shape or len(shape) != (2 if offsets is None else 1):
            wrong = f"{key} has shape {list(found[key].shape)}, token_ids {list(shape)}"
            _fail(path, wrong, "[B, T], or [N] with offsets")
    if valid is not None and offsets is None:  # pack them
        keep = np.logical_or.accumulate(valid[:, ::-1] != 0, 1)[:, ::-1]
        found |= {key: found[key][keep] for key in of_tokens}
        offsets = np.cumsum([0, *keep.sum(1)])
    if prompt_mask is not None and "prompt_token_ids" in found:
        found["prompt_token_ids"] = found["prompt_token_ids"][prompt_mask != 0]
        prompt_offsets = np.cumsum([0, *(prompt_mask != 0).sum(1)])
    ends, columns = dict.fromkeys(of_tokens, offsets) | {"prompt_token_ids": prompt_offsets}, {}
    for key, array in found.items():
        if (at := ends.get(key)) is not None:
            if at[0] != 0 or at[-1] != len(array) or (np.diff(at) < 0).any():
                _fail(path, f"offsets of {key} from {at[0]} to {at[-1]}", f"ascending ones from 0 to {len(array)}")
            array = [array[start:end] for start, end in itertools.pairwise(at)]
        if len(array) != len(offsets) - 1:
            _fail(path, f"{key} has {len(array)} rows", f"{len(offsets) - 1}, one a sequence")
        columns[key] = array
    for row, values in enumerate(zip(*columns.values(), strict=True)):
        yield _rollout(dict(zip(columns, values, strict=True)), f"{path}[{row}]")


def _folder(path: Path, format: str | None) -> Iterator[Rollout]:
    files = sorted(path.rglob("rank_*_call_*.pt"), key=lambda file: [int(n) for n in re.findall(r"\d+", file.name)])
    for file in files or _fail(path, "a folder without rank_*_call_*.pt", "Miles' policy_loss_debug"):
        yield from _dump(file, "miles")


_CONTAINERS = {
    "text": (("jsonl", "vllm", "sglang"), _lines),
    "parquet": (("parquet",), _parquet),
    "zip": (("npz", "trl", "verl", "miles"), _dump),
    "folder": (("miles",), _folder),
}
