"""Checkpoint folders: what their headers say, and whether they are what they were."""

import json
import os
import resource
import shutil
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from samebits import CheckpointError
from samebits.model import exact_model
from samebits.model.checkpoint import StoredWeights, manifest

from helpers.engines import copy_of


def test_the_headers_name_every_tensor_with_its_shape(checkpoint):
    path = checkpoint("qwen3")
    state = load_file(path / "model.safetensors")
    assert {name: shape for name, (shape, _) in manifest(path).items()} == {
        name: tuple(tensor.shape) for name, tensor in state.items()
    }


def test_a_tensor_in_two_files_and_a_file_of_another_kind_are_refused_by_name(checkpoint, tmp_path):
    path = copy_of(checkpoint("llama"), tmp_path)
    save_file({"model.norm.weight": torch.zeros(100)}, path / "more.safetensors")
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight' is in both .* and more\.safetensors"):
        manifest(path)
    (path / "more.safetensors").write_bytes((9).to_bytes(8, "little") + b"no header")
    with pytest.raises(CheckpointError, match=r"more\.safetensors is truncated, or not a safetensors file"):
        manifest(path)


def test_an_index_says_which_files_count(checkpoint, tmp_path):
    path = copy_of(checkpoint("llama"), tmp_path)
    names = manifest(path)
    save_file({"model.norm.weight": torch.zeros(100)}, path / "stray.safetensors")
    index = {"weight_map": dict.fromkeys(names, "model.safetensors")}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert manifest(path) == names


def test_stored_weights_know_of_a_file_that_changed_came_or_went(checkpoint, tmp_path):
    path = copy_of(checkpoint("llama"), tmp_path)
    stored = StoredWeights.at(path)
    assert stored.unchanged
    file = path / "model.safetensors"
    shutil.copy(file, path / "new.safetensors")
    assert not stored.unchanged
    (path / "new.safetensors").unlink()
    assert stored.unchanged
    os.utime(file, (1, 1))
    assert not stored.unchanged
    file.unlink()
    assert not stored.unchanged


def test_what_a_trainer_saves_is_a_checkpoint_of_the_same_model_for_anybody(checkpoint, tmp_path):
    """In config.json stands the class of transformers, not the one whose forward scores tokens."""
    model = exact_model(checkpoint("qwen2"))
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["Qwen2ForCausalLM"]
    again = exact_model(tmp_path).state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("entry", ["/etc/passwd", "../other/model.safetensors", "a/../../x.safetensors"])
def test_an_index_names_files_below_its_directory_alone(checkpoint, tmp_path, entry):
    path = copy_of(checkpoint("llama"), tmp_path)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": entry}}))
    with pytest.raises(CheckpointError, match="not below its directory"):
        manifest(path)


@pytest.mark.parametrize(
    "text",
    ["", "no json", "[]", "5", "{}", '{"weight_map": []}', '{"weight_map": {"a": 5}}', '{"weight_map": {"a": ["b"]}}',
     '{"weight_map": {"a": null}}'],
)  # fmt: skip
def test_an_index_of_another_form_is_refused(checkpoint, tmp_path, text):
    path = copy_of(checkpoint("llama"), tmp_path)
    (path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match="is not an index of safetensors files"):
        manifest(path)


def test_an_index_larger_than_any_models_is_not_read(checkpoint, tmp_path):
    path = copy_of(checkpoint("llama"), tmp_path)
    with (path / "model.safetensors.index.json").open("w") as file:
        file.truncate(2**40)  # without blocks on disk
    with pytest.raises(CheckpointError, match="has more than 67108864 bytes"):
        manifest(path)


def file_of(header: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header


@pytest.mark.parametrize(
    "data",
    [b"", file_of(b"[1]"), file_of(b"{}" * 9), file_of(b'{"a": {"shape": [1], "data_offsets": [0, 4]}}') + b"1234",
     file_of(b'{"a": {"dtype": "F32", "shape": [1]}}') + b"1234", file_of(b"secret", 2**62), file_of(b'{"secret'),
     file_of(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}') + b"12"],
)  # fmt: skip
def test_a_file_with_another_header_is_refused_without_a_word_of_it(checkpoint, tmp_path, data):
    path = copy_of(checkpoint("llama"), tmp_path)
    (path / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated, or not a safetensors file") as refused:
        manifest(path)
    assert "secret" not in str(refused.value)


def test_a_length_of_a_header_is_not_believed(checkpoint, tmp_path):
    """A sparse file whose header claims 8 GB costs neither time nor memory."""
    path = copy_of(checkpoint("llama"), tmp_path)
    with (path / "model.safetensors").open("wb") as file:
        file.write(file_of(b"{", 2**33))
        file.truncate(2**33 + 8)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        manifest(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**18  # KiB


def test_a_directory_that_is_none_and_one_without_files_are_told_apart(checkpoint, tmp_path):
    with pytest.raises(CheckpointError, match="there is no directory"):
        manifest(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "model.safetensors")  # nothing waits for what nobody writes
    with pytest.raises(CheckpointError, match="has no safetensors files"):
        manifest(tmp_path)
