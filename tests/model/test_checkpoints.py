"""Checkpoint folders: what their headers say, and whether they are what they were."""

import json
import os
import shutil

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
