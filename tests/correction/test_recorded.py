"""What verl, TRL, Miles and slime compute, recorded from their own code (record_trainers.py), is expressible: their
settings, translated, give the recorded gradients, or differ for a reason that is known and checked."""

import json
from pathlib import Path

import pytest
import torch

from samebits.correction import Correction, LogProbs, Statistic, Weight, policy_loss, preset
from samebits.integrations.corrections import from_miles, from_slime, from_trl, from_verl

RECORDED = {name: json.loads((Path(__file__).parent / f"recorded/{name}.json").read_text())
            for name in ("verl", "trl", "miles", "slime")}  # fmt: skip
CLIP = (0.2, 0.28)


def data(name):
    values = {key: torch.tensor(rows, dtype=torch.float64) for key, rows in RECORDED[name]["inputs"].items()}
    advantages = values.pop("advantages")
    values["current"].requires_grad_()
    return LogProbs(**values), advantages


def gradient(name, mode, correction, kind, **how):
    lp, advantages = data(name)
    loss = policy_loss(lp, advantages, mode, kind, correction, **{"clip": CLIP, **how}).loss
    (found,) = torch.autograd.grad(loss, lp.current)
    return found[lp.mask]


def verl(case):
    """Losses are summed over sequences; SAPO's is always a mean over tokens, and vanilla's has a dual clip."""
    config, name = case["config"], case["loss"]
    how = {"aggregation": "seq-mean-token-mean" if name == "sapo" else "seq-mean-token-sum", "normalizer": 1.0}
    if name.startswith("dppo"):
        gates = preset(name, low=case["low"], high=case["high"]).gates
        weight = Weight(Statistic("current/rollout"), high=20.0)
        return gradient("verl", "bypass", Correction(weight, gates), "reinforce", **how)
    mode, correction, _ = from_verl(config)
    if mode == "bypass" and config["loss_type"] == "reinforce":
        return gradient("verl", mode, correction, "reinforce", **how)
    if name in ("vanilla", "bypass_mode"):
        return gradient("verl", mode, correction, "ppo", dual_clip=3.0, **how)
    return gradient("verl", mode, correction, name, **how)


def trl(case):
    kind = {"grpo": "ppo", "dapo": "ppo"}.get(case["loss"], case["loss"])
    kind = "gspo" if case["level"] == "sequence" else kind
    mode, correction, _ = from_trl(case["config"])
    per_sequence = case["loss"] in ("grpo", "sapo")
    how = {"aggregation": "seq-mean-token-mean" if per_sequence else "token-mean"}
    how |= {"clip": (1.0, 0.28)} if kind == "cispo" else {}  # its ratio has no lower bound
    return gradient("trl", mode, correction, kind, **how)


def of_miles(name, read):
    def translate(case):
        mode, correction, _ = read(case["config"])
        return gradient(name, mode, correction, "ppo", aggregation="seq-mean-token-sum", normalizer=1.0)

    return translate


TRANSLATE = {"verl": verl, "trl": trl, "miles": of_miles("miles", from_miles), "slime": of_miles("slime", from_slime)}


# --- what differs, and why -------------------------------------------------------------------------------------------


def inverted(case):
    """verl compares -log r with the bounds of log r: with the pair that our note gives it is what was recorded."""
    config = case["config"]
    options = (config.get("rollout_rs") or "").split(",")
    notes = [note for note in from_verl(config).notes if "compares -log r" in note]
    if not notes:
        return None
    thresholds = str(config["rollout_rs_threshold"]).split(",")
    for index, option in enumerate(options):
        if option.endswith("k1"):
            low, high = map(float, thresholds[index].split("_"))
            thresholds[index] = f"{1 / high!r}_{1 / low!r}"
    return verl({**case, "config": {**config, "rollout_rs_threshold": ",".join(thresholds)}})


def averaged(case):
    """With a ratio per sequence and weights per token TRL gives each token the mean of its sequence's weights."""
    config = case["config"]
    if case["level"] != "sequence" or not config["vllm_importance_sampling_mode"].startswith("token"):
        return None
    lp, _ = data("trl")
    ours = trl(case)
    return lp.per_sequence(ours, "mean")[lp.segment]


REASONS = {"verl": inverted, "trl": averaged}
DIFFERENT = {"verl": 16, "trl": 32, "miles": 0, "slime": 0}


@pytest.mark.parametrize("name", RECORDED)
def test_settings_give_the_gradients_that_trainers_compute(name):
    """Or those of the reason for which they differ; as many as these decide, no more."""
    different = 0
    for case in RECORDED[name]["cases"]:
        expected = torch.tensor(case["gradient"], dtype=torch.float64)
        ours = TRANSLATE[name](case)
        if not torch.allclose(ours, expected, rtol=1e-5, atol=1e-7):
            reason = REASONS.get(name, lambda _: None)(case)
            assert reason is not None, case
            torch.testing.assert_close(reason, expected, rtol=1e-5, atol=1e-7)
            different += 1
    assert different == DIFFERENT[name]


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_options_decide_something(name):
    cases = RECORDED[name]["cases"]
    assert len({tuple(case["gradient"]) for case in cases}) > len(cases) / 4
