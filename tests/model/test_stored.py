"""Stored names of a model's tensors: what transformers writes, read back by their places."""

import copy

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from samebits.model.stored import stored_pieces
from samebits.trainer import save_weights

from helpers.models import make_checkpoint
from helpers.moe import tiny_moe

STORED = {
    "ernie4_5_moe": 6 * 3 + 1,  # the router's bias, too
    "minimax_m2": 2 * (5 * 3 + 2),  # router and bias
    "qwen3_moe": 2 * 5 * 3,
    "mixtral": 2 * (3 * 3 + 1),
    "granitemoe": 2 * 3,
    "glm4_moe": 6 * 3,
}


@pytest.mark.parametrize("family", STORED)
def test_each_tensor_that_transformers_writes_is_its_piece_of_the_model(family, tmp_path):
    model = tiny_moe(family)
    model.save_pretrained(tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    state, pieces = model.state_dict(), stored_pieces(model)
    assert len(pieces) == STORED[family]
    assert set(written) - set(state) == set(pieces)
    for name, piece in pieces.items():
        assert torch.equal(piece.of(state[piece.tensor]), written[name]), name
    covered = {}
    for piece in pieces.values():
        covered.setdefault(piece.tensor, []).append((piece.start, piece.rows))
    for name, runs in covered.items():
        runs.sort()
        assert [start for start, _ in runs] == [sum(rows for _, rows in runs[:i]) for i in range(len(runs))]
        assert (
            sum(rows for _, rows in runs) == (state[name][..., 0] if state[name].dim() > 1 else state[name]).numel()
        ), "a row in no piece"


def test_a_model_that_was_loaded_from_stacked_tensors_has_the_same_pieces(tmp_path):
    model = tiny_moe("qwen3_moe")
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(model.config)
    loaded = copy.copy(model)
    loaded._weight_conversions = []
    assert stored_pieces(model) == stored_pieces(empty) == stored_pieces(loaded) != {}


def test_a_dense_model_has_none(tmp_path):
    assert stored_pieces(AutoModelForCausalLM.from_pretrained(make_checkpoint(tmp_path, "llama"))) == {}


@pytest.mark.parametrize("family", STORED)
def test_a_checkpoint_of_ours_has_the_tensors_of_transformers_own(family, tmp_path):
    model = tiny_moe(family, dtype=torch.bfloat16)
    save_weights(model, tmp_path / "ours", max_file_bytes=2000)
    model.save_pretrained(tmp_path / "theirs")
    ours = {n: t for file in (tmp_path / "ours").glob("*.safetensors") for n, t in load_file(file).items()}
    theirs = load_file(tmp_path / "theirs" / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor) and ours[name].dtype == tensor.dtype, name
