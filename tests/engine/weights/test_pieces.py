"""Updates that bring tensors under a checkpoint's names, in pieces or whole: a worker's side, without an engine."""

import random

import pytest
import torch

from samebits.engine.weights.store import StagedWeights, WeightStore
from samebits.engine.weights.table import WeightUpdateError
from samebits.model.stored import stored_pieces

from helpers.moe import MOE, stored_state, tiny_moe

DOWN, GATE = (f"model.layers.1.mlp.experts.3.{name}_proj.weight" for name in ("down", "gate"))
STACKED = "model.layers.1.mlp.experts.down_proj"


def staged(model, pairs, **settings):
    """The store after an update of these pairs."""
    store = WeightStore(model, **settings)
    update = StagedWeights(store)
    update.load(pairs)
    update.check_complete({False})
    assert not update.partial
    store.switch(update)
    return store


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("names", ["stacked", "stored", "both"])
@pytest.mark.parametrize("family", MOE)
def test_either_layout_in_any_order_gives_the_same_weights(family, names, dtype):
    new, old = tiny_moe(family, seed=1).to(torch.float32), tiny_moe(family, dtype=dtype)
    pairs = list((new.state_dict() if names == "stacked" else stored_state(new)).items())
    if names == "both":  # one layer stacked, one in pieces
        state, pieces = new.state_dict(), stored_pieces(new)
        first = {piece.tensor for piece in pieces.values() if ".layers.1." in piece.tensor}
        assert first
        pairs = [(n, t) for n, t in pairs if n not in pieces or pieces[n].tensor not in first]
        pairs += [(n, state[n]) for n in first]
    random.Random(family + names).shuffle(pairs)
    kept = {name: tensor.dtype for name, tensor in old.state_dict().items()}  # a router's bias in fp32, if so in HF's
    store = staged(old, pairs)
    for name, tensor in new.state_dict().items():
        wanted = tensor.to(kept[name])
        assert torch.equal(old.state_dict()[name], wanted) and old.state_dict()[name].dtype == wanted.dtype, name
    assert {spec.name for spec in store.specs()} == set(new.state_dict())


def test_a_stage_takes_its_own_experts():
    model, new = tiny_moe("qwen3_moe", num_hidden_layers=1), tiny_moe("qwen3_moe", seed=1)
    model.lm_head, model.model.embed_tokens, model.model.norm = None, None, torch.nn.Identity()
    staged(model, stored_state(new).items(), first_layer=1, whole=False)
    theirs = new.model.layers[1].state_dict()
    for name, tensor in model.model.layers[0].state_dict().items():
        assert torch.equal(tensor, theirs[name]), name


DAMAGE = {
    "missing": (lambda s: s.pop(DOWN), rf"1 tensors are missing, first '{DOWN}'"),
    "missing whole": (
        lambda s: [s.pop(k) for k in [*s] if "layers.1.mlp.experts" in k],
        rf"missing, first '{STACKED}'",
    ),
    "misshapen": (lambda s: s.update({DOWN: s[DOWN].t()}), rf"{DOWN}' has shape \[12, 20\], expected \[20, 12\]"),
    "unknown": (lambda s: s.update({DOWN.replace("3", "9"): s[DOWN]}), "unknown tensor 'model.layers.1.mlp.experts.9"),
    "not finite": (lambda s: s.update({GATE: s[GATE] / 0}), rf"{GATE}' holds NaN or infinity"),
    "dtype": (lambda s: s.update({GATE: s[GATE].double()}), rf"{GATE}' is torch.float64"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_an_expert_that_is_wrong_is_named(kind):
    damage, message = DAMAGE[kind]
    model, state = tiny_moe("qwen3_moe"), stored_state(tiny_moe("qwen3_moe", seed=1))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    damage(state)
    with pytest.raises(WeightUpdateError, match=message):
        staged(model, state.items())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("again", "message"),
    [
        (DOWN, f"'{DOWN}' was given twice$"),
        (STACKED, f"'{STACKED}' was given twice: it came as '.*experts.0.down_proj.weight', too"),
    ],
)
def test_an_expert_that_comes_twice_is_named(again, message):
    new = tiny_moe("qwen3_moe", seed=1)
    tensors = stored_state(new) | new.state_dict()
    pairs = [*stored_state(new).items(), (again, tensors[again])]
    with pytest.raises(WeightUpdateError, match=message):
        staged(tiny_moe("qwen3_moe"), pairs)
    with pytest.raises(WeightUpdateError, match="was given twice"):
        staged(tiny_moe("qwen3_moe"), reversed(pairs))
