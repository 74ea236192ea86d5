"""How layers are cut into stages, and that the stages make up the model."""

import itertools
import random

import pytest
import torch

from samebits.model import exact_model
from samebits.model.stage import shift_layer, split_by_size, split_layers, stage_model

from helpers.engines import prompt_of
from helpers.families import make_family

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_split_is_as_good_as_the_best_of_all():
    rng = random.Random(0)
    for _ in range(50):
        count, stages = rng.randint(3, 8), rng.randint(1, 3)
        costs, head = [rng.randint(1, 9) for _ in range(count)], rng.randint(0, 20)
        found = split_layers(costs, head, stages)
        assert [a for a, _ in found] == [0, *(b for _, b in found[:-1])] and found[-1][1] == count

        def dearest(cuts, costs=costs, head=head, count=count):
            bounds = list(itertools.pairwise((0, *cuts, count)))
            return max(sum(costs[a:b]) + (head if b == count else 0) for a, b in bounds)

        best = min(dearest(cuts) for cuts in itertools.combinations(range(1, count), stages - 1))
        assert dearest([b for _, b in found[:-1]]) == best
        assert all(b > a for a, b in found)


def test_layers_are_cut_by_what_they_weigh(checkpoint):
    path = checkpoint("llama", num_hidden_layers=4)  # its head weighs as much as a layer and a half
    assert split_by_size(path, 2) == [(0, 3), (3, 4)]
    with pytest.raises(ValueError, match="the model has 4 layers"):
        split_by_size(path, 5)


def test_a_tensors_name_follows_its_layer():
    name = "model.layers.3.self_attn.q_proj.weight"
    assert shift_layer(name, 9) == "model.layers.12.self_attn.q_proj.weight"
    assert shift_layer(shift_layer(name, 9), -9) == name
    assert shift_layer("model.embed_tokens.weight", 3) == "model.embed_tokens.weight"


@pytest.mark.parametrize("family", ["llama", "llama3-bias", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("cuts", [(0, 3), (0, 1, 3), (0, 1, 2, 3)], ids=str)
@torch.no_grad()
def test_stages_one_after_the_other_are_the_model_as_bits(checkpoint, family, cuts):
    path = checkpoint(family, num_hidden_layers=3)
    ids = torch.tensor([prompt_of(50)])
    given = {"input_ids": ids}
    for layers in itertools.pairwise(cuts):
        stage = stage_model(path, "float32", "cpu", layers)
        hidden = stage.base_model(**given).last_hidden_state
        given = {"inputs_embeds": hidden}
    assert torch.equal(stage.lm_head(hidden), exact_model(path)(ids).logits)


def test_a_stage_holds_its_own_tensors_alone(checkpoint):
    """An embedding that is tied to the head comes with both ends."""
    path = checkpoint("llama", num_hidden_layers=3)
    whole = {name for name, _ in exact_model(path).named_parameters()}
    parts = []
    for first, last in ((0, 1), (1, 2), (2, 3)):
        names = [name for name, _ in stage_model(path, "float32", "cpu", (first, last)).named_parameters()]
        parts.append({shift_layer(name, first) for name in names})
    assert set.union(*parts) == whole
    assert parts[0] & parts[2] == {"model.embed_tokens.weight"}
    assert not parts[1] & (parts[0] | parts[2])
    assert all(".layers.1." in name for name in parts[1])


@pytest.mark.parametrize("family", ["dots1", "ernie4_5_moe", "glm4_moe", "hy_v3", "minimax_m2", "solar_open"])
def test_a_stage_keeps_in_float32_what_the_whole_model_does(tmp_path, family):
    """A router's bias, which some families declare and others name."""
    path = make_family(tmp_path, family)
    whole = exact_model(path, "bfloat16").state_dict()
    part = stage_model(path, "bfloat16", "cpu", (0, 3)).state_dict()
    assert whole.keys() == part.keys()
    assert all(part[name].dtype == tensor.dtype and torch.equal(part[name], tensor) for name, tensor in whole.items())
