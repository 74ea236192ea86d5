"""Rollouts of any engine, read one at a time: plain JSONL, parquet and npz; replies of vLLM and SGLang; dumps of TRL,
verl and Miles. What is read is checked; what is wrong is named with its file and line."""

from __future__ import annotations

import contextlib
import itertools
import math
import pickle
import re
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import orjson

from ..correction.statistics import IMPOSSIBLE
from ..engine.expert_wire import npy_text, parse_ids


@dataclass
class Rollout:
    """One sampled sequence; all arrays are of its sampled tokens, [T].

    token_ids int64, -1 where a dump holds none (Miles); rollout, old, current, reference f64: log-probs under the
    engine that sampled, the trainer at rollout time, the trainer now, and an exact re-scoring; mask bool, None for all;
    advantages f64; top_token_ids, best_token_ids int64: the most likely token at each position, of the engine (-1 where
    it didn't say) and of the re-scoring; the latter is not in files. routed_experts: integers, each token's experts in
    each layer, [tokens of prompt and completion but perhaps the last, layers, k], or flat; replayed f64: log-probs of
    an exact re-scoring with these, not in files. group: names the samples of one prompt.
    provenance: what made it (model checksum, contract hash, sampling parameters). source: where it was read, for error
    messages.
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
    routed_experts: np.ndarray | None = None
    replayed: np.ndarray | None = None
    provenance: dict[str, Any] | None = None
    source: str = ""

    @property
    def valid(self) -> np.ndarray:
        """The mask, bool [T]; of all tokens where there is none."""
        return np.ones(len(self.token_ids), bool) if self.mask is None else self.mask


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
    current_logprobs, reference_logprobs, mask, advantages, reward, group, top_token_ids, routed_experts (a .npy file in
    base64) and provenance, where there is a value.

    Log-probs of -inf, which JSON lacks, are written as -1000, which stands for them; NaN (outside the mask) as null.
    """
    with open(path, "wb") as file:
        for rollout in rollouts:
            record = {key: getattr(rollout, name) for key, name in _KEYS.items() if getattr(rollout, name) is not None}
            for key in record.keys() & _ARRAYS.keys():
                array = np.where(record[key] == -np.inf, IMPOSSIBLE, record[key]) if key in _LOGPROBS else record[key]
                record[key] = np.ascontiguousarray(array)
            if rollout.routed_experts is not None:
                record["routed_experts"] = npy_text(rollout.routed_experts)
            file.write(orjson.dumps(record, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE))


# --- records -------------------------------------------------------------------------------------------------------

_LOGPROBS = {f"{name}_logprobs": name for name in ("rollout", "old", "current", "reference")}
_SAME = (
    "token_ids", "prompt_token_ids", "mask", "advantages", "reward", "group", "top_token_ids", "routed_experts",
    "provenance",
)  # fmt: skip
_KEYS = _LOGPROBS | {name: name for name in _SAME}  # in files: in a Rollout
_PER_TOKEN = ("token_ids", "mask", "top_token_ids", *_LOGPROBS)
_LARGEST = float(np.finfo(np.float32).max)
_LARGEST_REWARD = 1e12  # differences of larger ones lose the digits that advantages are made of
_ROUNDING = 1e-3  # a log-softmax may round to slightly above 0; a probability or a negated log-prob lies far above
_ARRAYS: dict[str, tuple[float, float, str]] = {  # lowest and highest legal value, in words
    "mask": (0, 1, "0 or 1, or a boolean, for each token"),
    **dict.fromkeys(("token_ids", "prompt_token_ids", "top_token_ids"), (-1, _LARGEST, "a flat list of integers")),
    **dict.fromkeys(
        _LOGPROBS, (IMPOSSIBLE, _ROUNDING, f"a log-prob for each token: at most 0, at least {IMPOSSIBLE:g}")
    ),
    "rollout_logprobs": (
        IMPOSSIBLE,
        _ROUNDING,
        f"a finite log-prob for each token: at most 0, at least {IMPOSSIBLE:g}",
    ),
    "advantages": (-_LARGEST, _LARGEST, "one finite number, or one for each token"),
}


_DAMAGED = (
    ValueError, LookupError, TypeError, AttributeError, EOFError, pickle.UnpicklingError, zipfile.BadZipFile,
    zlib.error,
)  # fmt: skip


def _fail(source: str | Path, wrong: str, expected: str) -> NoReturn:
    raise RolloutFormatError(f"{source}: {wrong}; expected {expected}")


@contextlib.contextmanager
def _located(source: str | Path, expected: str) -> Iterator[None]:
    try:
        yield
    except RolloutFormatError:
        raise
    except _DAMAGED as error:
        wrong = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise RolloutFormatError(f"{source}: {wrong}; expected {expected}") from error


def _rollout(record: Mapping[str, Any], source: str) -> Rollout:
    """A checked record. Keys as `write_rollouts` has them, values lists or arrays; outside the mask NaN is legal."""
    for key in ("token_ids", "rollout_logprobs"):
        if record.get(key) is None:
            _fail(source, f"no {key}", "at least token_ids and rollout_logprobs")
    arrays = {key: _array(record[key], key, source) for key in _ARRAYS if record.get(key) is not None}
    size = arrays["token_ids"].size
    sampled = arrays.get("mask", np.ones(())) != 0
    if "advantages" in arrays and arrays["advantages"].size == 1:
        arrays["advantages"] = np.full(size, arrays["advantages"])
    for key, array in arrays.items():
        low, high, expected = _ARRAYS[key]
        if array.ndim != 1 or (array.size != size and key != "prompt_token_ids"):
            _fail(source, f"{key} has shape {list(array.shape)}, token_ids {list(arrays['token_ids'].shape)}", expected)
        wrong = ~((array >= low) & (array <= high))
        if key in _LOGPROBS and key != "rollout_logprobs" and wrong.any():
            wrong &= array != -np.inf  # a token that the trainer's filters exclude
        if key not in ("mask", "prompt_token_ids"):
            wrong &= sampled
        if wrong.any():
            _fail(source, f"{key}[{wrong.argmax()}] is {array[wrong.argmax()]}", expected)
    fields: dict[str, Any] = {_KEYS[key]: array for key, array in arrays.items()}
    if "mask" in arrays:
        fields["mask"] = sampled
    group = record.get("group")
    reward = record.get("reward")
    if reward is not None and not (
        isinstance(reward, int | float | np.number) and abs(float(reward)) <= _LARGEST_REWARD
    ):
        _fail(source, f"reward is {reward!r}", f"a number of at most {_LARGEST_REWARD:g} in size")
    provenance = record.get("provenance")
    if provenance is not None and not isinstance(provenance, Mapping):
        _fail(source, f"provenance is {provenance!r}", "an object")
    if (routed := record.get("routed_experts")) is not None:
        with _located(source, "routed experts as integers, nested or in base64"):
            fields["routed_experts"] = parse_ids(routed)
    fields["provenance"] = provenance
    fields["reward"] = None if reward is None else float(reward)
    return Rollout(**fields, group=None if group is None else str(group), source=source)


def _array(values: Any, key: str, source: str) -> np.ndarray:
    """int64 of ids, f64 of the rest."""
    array = np.asarray(values)
    if array.dtype == object and {type(v) for v in array.flat} <= {int, float, type(None)}:
        array = array.astype(np.float64)  # null becomes NaN
    integers = key.endswith("token_ids")
    kinds = "iu" if integers else "iufb" if key == "mask" else "iuf"
    if array.size and array.dtype.kind not in kinds:
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
        where = f"{source}, choice {index}"
        logprobs = choice.get("logprobs") or {}
        values, names, tops = (logprobs.get(key) for key in ("token_logprobs", "tokens", "top_logprobs"))
        if (content := logprobs.get("content")) is not None:  # the chat's form
            values = [entry["logprob"] for entry in content]
            names = [_name(entry) for entry in content]
            tops = [_by_name(entry.get("top_logprobs")) for entry in content]
        ids = choice.get("token_ids", choice.get("response_token_ids"))
        if ids is None:
            ids = [_token_id(name) for name in names or [""]]
            if -1 in ids:
                _fail(where, "no token ids", "a reply to return_token_ids=true or return_tokens_as_token_ids=true")
        if values is None and ids:
            _fail(where, "no log-probs", "a reply to logprobs=0 or more (chat: logprobs=true)")
        prompt = choice.get("prompt_token_ids") or response.get("prompt_token_ids")
        group = f"{response.get('id') or source}/{prompts.setdefault(tuple(prompt or ()), len(prompts))}"
        record = {"token_ids": ids, "rollout_logprobs": values or [], "top_token_ids": _top_ids(tops or ())}
        record["routed_experts"] = choice.get("routed_experts")
        yield _rollout(record | {"prompt_token_ids": prompt, "group": group}, where)


def _name(entry: Mapping[str, Any]) -> int | str:
    return entry.get("token_id", entry["token"])


def _by_name(entries: Sequence[Mapping[str, Any]] | None) -> dict[int | str, float]:
    return {_name(entry): entry["logprob"] for entry in entries or ()}


def _token_id(name: int | str) -> int:
    """7 or "token_id:7" -> 7; text, which names no id, -> -1."""
    return name if isinstance(name, int) else int(name[9:]) if name.startswith("token_id:") else -1


def _top_ids(tops: Sequence[dict[Any, float] | None]) -> list[int] | None:
    """vLLM lists the sampled token beside the k most likely ones: alone, it is surely the top only above 1/2."""
    ranked = any(len(top or ()) > 1 for top in tops)
    best = []
    for top in tops:
        name, logprob = max((top or {"": -math.inf}).items(), key=lambda item: item[1])
        best.append(_token_id(name) if ranked or logprob > math.log(0.5) else -1)
    return best if max(best, default=-1) >= 0 else None


def _sglang(reply: Mapping[str, Any], source: str) -> Rollout:
    meta = reply["meta_info"]
    triples = meta.get("output_token_logprobs")
    if triples is None:
        _fail(source, "no meta_info.output_token_logprobs", "a reply to return_logprob=true: [log-prob, id, text]")
    ids = [token for _, token, _ in triples]
    if reply.get("output_ids") not in (None, ids):
        _fail(source, "output_ids differ from the ids of output_token_logprobs", "the same tokens in both")
    record: dict[str, Any] = {"token_ids": ids, "rollout_logprobs": [logprob for logprob, _, _ in triples]}
    record["prompt_token_ids"] = reply.get("prompt_token_ids")
    record["routed_experts"] = meta.get("routed_experts")
    scored = meta.get("input_token_logprobs") or ()
    if record["prompt_token_ids"] is None and len(scored) == meta.get("prompt_tokens"):
        record["prompt_token_ids"] = [token for _, token, _ in scored]  # logprob_start_len=0 lists the whole prompt
    tops = meta.get("output_top_logprobs") or ()
    if any(tops):
        record["top_token_ids"] = [max(top, key=itemgetter(0))[1] if top else -1 for top in tops]
    return _rollout(record, source)


# --- files of arrays -------------------------------------------------------------------------------------------------

_DUMPS = ("npz", "trl", "verl", "miles")
_NAMES = {  # in each of these, where a dump has another name than ours
    "token_ids": ("token_ids", "completion_ids", "responses", "token_ids"),
    "rollout_logprobs": ("rollout_logprobs", "sampling_per_token_logps", "rollout_log_probs", "rollout_log_probs"),
    "mask": ("mask", "completion_mask", "response_mask", "local_loss_mask"),
    "old_logprobs": ("old_logprobs", "old_per_token_logps", "old_log_probs", "old_log_probs"),
    "prompt_token_ids": ("prompt_token_ids", "prompt_ids", "prompts", "prompt_token_ids"),
    "current_logprobs": ("current_logprobs", "current_logprobs", "current_logprobs", "train_log_probs"),
    "group": ("group", "group", "group", "group_index"),
    "routed_experts": ("routed_experts", "routed_experts", "routed_experts", "rollout_routed_experts"),
}


def _renamed(data: Mapping[str, Any], format: str) -> dict[str, Any]:
    """The fields of a dump, by our names."""
    names = {key: _NAMES[key][_DUMPS.index(format)] if key in _NAMES else key for key in _KEYS}
    return {key: data[name] for key, name in names.items() if data.get(name) is not None}


def _parquet(path: Path, format: str | None) -> Iterator[Rollout]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError("reading parquet needs pyarrow: pip install 'samebits[parquet]'") from error
    stream = {"buffer_size": 2**20, "pre_buffer": False}  # or whole row groups would be held
    with _located(path, "a parquet file"), pyarrow.parquet.ParquetFile(path, **stream) as file:
        columns = [name for name in file.schema_arrow.names if name in _KEYS]
        batches = file.iter_batches(batch_size=64, columns=columns)
        rows = itertools.chain.from_iterable(zip(*batch.columns, strict=True) for batch in batches)
        for number, row in enumerate(rows):
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
                yield _rollout(_sample(sample), f"{path}[{index}]")
        else:
            yield from _rows(path, data, format)


def _sample(sample: Mapping[str, Any]) -> dict[str, Any]:
    """A sample of Miles' policy_loss_debug, which holds no token ids, or of its or slime's rollout data."""
    record = {key: _numpy(value) for key, value in _renamed(sample, "miles").items()}
    if sample.get("tokens") is None:
        return record | {"token_ids": np.full(len(record.get("rollout_logprobs", ())), -1)}
    tokens = np.asarray(_numpy(sample["tokens"]))
    start = len(tokens) - sample["response_length"]
    mask = sample.get("loss_mask")
    return record | {"token_ids": tokens[start:], "prompt_token_ids": tokens[:start], "mask": _numpy(mask)}


def _load(path: Path) -> dict[str, Any]:
    with np.load(path) as file:  # .npz and .pt are both zip files
        if not any(name.endswith("data.pkl") for name in file.files):
            return dict(file)
    import torch

    with torch.serialization.safe_globals(_ARRAY_PICKLES):
        try:
            data = torch.load(path, map_location="cpu", weights_only=True)
        except RuntimeError as error:  # of its reader of archives
            raise ValueError(str(error)) from error
    return {key: _numpy(value) for key, value in data.items() if value is not None}


_ARRAY_PICKLES: list[Any] = [  # what a pickled array of integers or floats names
    np.ndarray, np.dtype, np.empty(0).__reduce__()[0], *(type(np.dtype(kind)) for kind in "BHiqfd"),
]  # fmt: skip


def _numpy(value: Any) -> Any:
    """An array, of a tensor of any dtype; other things as they are."""
    if not hasattr(value, "numpy"):
        return value
    return (value.double() if value.is_floating_point() else value).numpy()


def _rows(path: Path, data: dict[str, Any], format: str) -> Iterator[Rollout]:
    """The sequences of padded arrays, each up to its last valid token, or of packed ones."""
    found = _renamed(data, format)
    packed = "offsets" in data
    for key in ("token_ids", "rollout_logprobs") if packed else ("token_ids", "rollout_logprobs", "mask"):
        if key not in found:
            names = [row[_DUMPS.index(format)] for row in _NAMES.values()]
            _fail(
                path, f"no {_NAMES[key][_DUMPS.index(format)]}", f"the arrays of format {format!r}: {', '.join(names)}"
            )
    shape = found["token_ids"].shape
    per_token = {key for key in found if key in _PER_TOKEN or (key == "advantages" and found[key].shape == shape)}
    for key in per_token:
        if found[key].shape != shape or len(shape) != (1 if packed else 2):
            wrong = f"{key} has shape {list(found[key].shape)}, token_ids {list(shape)}"
            _fail(path, wrong, "[B, T], or [N] with offsets")
    if packed:
        places = dict.fromkeys(per_token, _spans(path, "token_ids", data["offsets"], found))
        if "prompt_offsets" in data:
            places["prompt_token_ids"] = _spans(path, "prompt_token_ids", data["prompt_offsets"], found)
    else:
        valid = found["mask"]
        prompt_mask = data.get("prompt_mask")
        if "tool_mask" in data:  # TRL: what tools wrote is in the completion, but not sampled
            found["mask"] = valid * data["tool_mask"]
        if "attention_mask" in data:  # verl: over prompts and responses
            prompt_mask, valid = np.split(data["attention_mask"], [-shape[1]], axis=1)
        lengths = ((valid[:, ::-1] != 0).cumsum(1) > 0).sum(1)
        if "routed_experts" in found and "attention_mask" in data:
            found["routed_experts"] = _of_tokens(found["routed_experts"], data["attention_mask"])
        tokens: list[Any] = [(row, slice(length)) for row, length in enumerate(lengths)]
        places = dict.fromkeys(per_token, tokens)
        if prompt_mask is not None:
            places["prompt_token_ids"] = [(row, mask != 0) for row, mask in enumerate(prompt_mask)]
    count = len(places["token_ids"])
    for key, array in found.items():
        rows = len(places.get(key, array))
        if rows != count:
            _fail(path, f"{key} has {rows} rows", f"{count}, one a sequence")
    for row in range(count):
        record = {key: array[places[key][row] if key in places else row] for key, array in found.items()}
        yield _rollout(record, f"{path}[{row}]")


def _of_tokens(routed: np.ndarray, attention_mask: np.ndarray) -> np.ndarray:
    """verl's experts [B, prompt + response, layers, k] of each row's tokens. A token of zeros was not recorded: -1."""
    unknown = ~routed.any((2, 3), keepdims=True)
    known = np.where(unknown, -1, routed.astype(np.int64))
    rows = np.empty(len(known), object)
    rows[:] = [ids[mask != 0] for ids, mask in zip(known, attention_mask, strict=True)]
    return rows


def _spans(path: Path, key: str, offsets: np.ndarray, found: dict[str, Any]) -> list[Any]:
    size = len(found[key])
    if offsets[0] != 0 or offsets[-1] != size or (np.diff(offsets) < 0).any():
        _fail(path, f"offsets of {key} from {offsets[0]} to {offsets[-1]}", f"ascending ones from 0 to {size}")
    return [slice(start, end) for start, end in itertools.pairwise(offsets)]


def _folder(path: Path, format: str | None) -> Iterator[Rollout]:
    files = sorted(path.rglob("rank_*_call_*.pt"), key=lambda file: [int(n) for n in re.findall(r"\d+", file.name)])
    parts = sorted(path.glob("*.jsonl"))
    if not files and not parts:
        _fail(path, "a folder without *.jsonl or rank_*_call_*.pt", "parts of one file, or Miles' policy_loss_debug")
    for file in parts if not files else ():
        yield from _lines(file, format)
    for file in files:
        yield from _dump(file, "miles")


_CONTAINERS = {
    "text": (("jsonl", "vllm", "sglang"), _lines),
    "parquet": (("parquet",), _parquet),
    "zip": (("npz", "trl", "verl", "miles"), _dump),
    "folder": (("jsonl", "vllm", "sglang", "miles"), _folder),
}
