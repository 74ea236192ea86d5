"""RL on a mixture of experts: exact at every step, resumed to the bit, with and without the routers' loss."""

import pytest
import torch

from samebits import SamplingParams
from samebits.trainer.rl import TrainConfig, Trainer
from samebits.trainer.rl.tiny import make_tiny_model

from helpers.digits import Digits

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "moe_intermediate_size": 24, "initializer_range": 0.3,
}  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / "model"
    make_tiny_model(folder, Digits.alphabet, seed=3, experts=True, **SIZES)
    return str(folder)


def trainer_of(model, **changes):
    base = {
        "model": model, "groups_per_step": 3, "group_size": 4, "lr": 1e-2, "sampling": SamplingParams(max_tokens=9),
        "max_tokens_per_pack": 40, "engine": {"kv_cache_memory_bytes": 2**21},
    }  # fmt: skip
    return Trainer(TrainConfig(**{**base, **changes}), Digits())


def weights(trainer):
    return {name: p.full_tensor().detach().clone() for name, p in trainer.model.named_parameters()}


def test_steps_are_exact_and_resume_to_the_bit(tiny, tmp_path):
    settings = {"router_aux_loss_coef": 0.01, "activation_checkpointing": True}
    whole = trainer_of(tiny, **settings)
    steps = [whole.step() for _ in range(4)]
    assert all(m["max_difference"] == 0 and m["compared_tokens"] > 0 and m["grad_norm"] > 0 for m in steps)
    trainer_of(tiny, output_dir=tmp_path, steps=2, **settings).fit()
    resumed = trainer_of(tiny, output_dir=tmp_path, steps=4, **settings)
    assert resumed.resume()
    assert [resumed.step()["reward"] for _ in range(2)] == [m["reward"] for m in steps[2:]]
    assert all(torch.equal(a, b) for a, b in zip(weights(whole).values(), weights(resumed).values(), strict=True))


def test_the_routers_loss_changes_gradients_alone(tiny):
    off, on = trainer_of(tiny), trainer_of(tiny, router_aux_loss_coef=10.0)
    without, with_it = off.step(), on.step()
    for name in ("reward", "entropy", "k3", "length"):
        assert without[name] == with_it[name]
    assert "router_loss" not in without and with_it["router_loss"] >= 1.9  # k at least, of evenly busy experts
    assert with_it["max_difference"] == 0
    a, b = weights(off), weights(on)
    assert not any(torch.equal(a[name], b[name]) for name in a if name.endswith("gate.weight"))


def test_the_routers_loss_is_the_same_in_any_number_of_packs(tiny):
    """A pack's loss counts by its share of the tokens: means of means, nearly those of the whole."""
    trainers = [trainer_of(tiny, router_aux_loss_coef=1.0, max_tokens_per_pack=size) for size in (40, 4096)]
    norms = [trainer.step()["grad_norm"] for trainer in trainers]
    assert norms[0] == pytest.approx(norms[1], rel=0.2)


def test_a_dense_model_has_no_such_loss(tmp_path):
    make_tiny_model(tmp_path, Digits.alphabet, seed=3)
    with pytest.raises(ValueError, match=r"router_aux_loss_coef: transformers has no such loss for .*Llama"):
        trainer_of(str(tmp_path), router_aux_loss_coef=0.1)
