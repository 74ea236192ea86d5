"""Written settings have names that exist, what can't be parsed whole is refused, and each trainer's loss is ours."""

import itertools
import json
from pathlib import Path

import pytest
import torch

from samebits.correction import PRESETS, Correction, Gate, LogProbs, Statistic, Weight, policy_loss, preset
from samebits.integrations.corrections import (
    from_areal,
    from_miles,
    from_prime_rl,
    from_skyrl,
    from_slime,
    from_trl,
    from_verl,
    to_miles,
    to_slime,
    to_trl,
    to_verl,
)

# Names that each version accepts: verl's algorithm/rollout_correction.yaml and its list of options for rollout_rs,
# fields of TRL's GRPOConfig, arguments of Miles and slime with those of their mis.yaml.
VERL_091 = {
    "rollout_is", "rollout_is_threshold", "rollout_rs", "rollout_rs_threshold", "bypass_mode", "loss_type",
    "rollout_is_batch_normalize",
}  # fmt: skip
VERL_091_RS = {
    "token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3", "seq_mean_k1", "seq_mean_k2",
    "seq_mean_k3", "seq_max_k2", "seq_max_k3",
}  # fmt: skip
TRL_116 = {
    "use_vllm", "vllm_importance_sampling_correction", "vllm_importance_sampling_mode",
    "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min", "vllm_importance_sampling_cap",
    "off_policy_mask_threshold",
}  # fmt: skip
MILES_2026_08 = {
    "use_tis", "tis_clip", "tis_clip_low", "custom_tis_function_path", "use_rollout_logprobs", "use_opsm", "opsm_delta",
    "tis_level", "tis_mode", "tis_lower_bound", "tis_upper_bound", "tis_batch_normalize", "use_rs", "rs_level",
    "rs_lower_bound", "rs_upper_bound", "rs_veto_threshold",
}  # fmt: skip
PATHS = {
    to_miles: {
        "miles.backends.training_utils.loss_hub.corrections.icepop_function",
        "examples.infra_features.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp",
    },
    to_slime: {
        "slime.backends.megatron_utils.loss.icepop_function",
        "examples.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp",
    },
}


def written(write, mode):
    """What `write` makes of every preset that it can express."""
    for name in PRESETS:
        extra = {"ratio": "current/rollout"} if name == "opsm" else {}
        try:
            yield write(mode, preset(name, **extra))
        except ValueError:
            continue


def test_written_names_exist_in_the_stated_versions():
    for mode in ("decoupled", "bypass"):
        for config in written(to_verl, mode):
            assert set(config) <= VERL_091
            assert set((config["rollout_rs"] or "token_k1").split(",")) <= VERL_091_RS
    for config in written(to_trl, "decoupled"):
        assert set(config) <= TRL_116
    for write, paths in PATHS.items():
        seen = set()
        for config in written(write, "decoupled"):
            assert set(config) <= MILES_2026_08
            seen.add(config.get("custom_tis_function_path"))
        assert seen == paths | {None}, "a path is never written: this case proves nothing"


def test_every_option_is_in_a_case_recorded_from_the_trainers_own_code():
    """Those cases are held against our translations in tests/correction/test_recorded.py."""
    unused = {"use_vllm", "vllm_importance_sampling_cap"}  # always on; an older name
    known = {"verl": VERL_091, "trl": TRL_116 - unused, "miles": MILES_2026_08, "slime": MILES_2026_08}
    folder = Path(__file__).parents[1] / "correction" / "recorded"
    configs = {
        name: [c["config"] for c in json.loads((folder / f"{name}.json").read_text())["cases"]] for name in known
    }
    for name, options in known.items():
        assert {option for config in configs[name] for option in config} == options
    modes = {config.get("vllm_importance_sampling_mode") for config in configs["trl"]}
    assert modes == {"token_truncate", "token_mask", "sequence_truncate", "sequence_mask"}
    assert {gate for config in configs["verl"] for gate in (config.get("rollout_rs") or "").split(",")} - {""} == (
        VERL_091_RS
    )
    assert {config.get("rollout_is") for config in configs["verl"]} == {None, "token", "sequence"}
    for name in ("miles", "slime"):
        assert {c["tis_mode"] for c in configs[name] if "tis_mode" in c} == {"truncate", "clip", "mask"}
        assert {c["rs_level"] for c in configs[name] if c.get("use_rs")} == set(LEVELS)


def combinations(**options):
    return [dict(zip(options, values, strict=True)) for values in itertools.product(*options.values())]


IS = "vllm_importance_sampling"
LEVELS = ("token", "sequence", "geometric")
OPTIONS = {
    from_verl: (to_verl, combinations(
        rollout_is=(None, "token", "sequence"), rollout_rs=(None, *sorted(VERL_091_RS)), rollout_rs_threshold=(2.0,),
        rollout_is_batch_normalize=(False, True), bypass_mode=(False, True), loss_type=("ppo_clip", "reinforce"),
    )),
    from_trl: (to_trl, combinations(**{
        f"{IS}_correction": (False, True), f"{IS}_clip_min": (None, 0.5), "off_policy_mask_threshold": (None, 0.1),
        f"{IS}_mode": ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
    })),
    from_miles: (to_miles, combinations(
        use_tis=(True,), tis_level=LEVELS, tis_mode=("truncate", "clip", "mask"), use_rs=(False, True), rs_level=LEVELS,
        tis_batch_normalize=(False, True), use_opsm=(False, True), rs_veto_threshold=(None, 1e-4),
    )),
}  # fmt: skip


@pytest.mark.parametrize("read", OPTIONS)
def test_every_combination_of_options_is_translated_whole_or_refused_by_name(read):
    """What is read and written again is read as the same correction: nothing was dropped on the way."""
    write, configs = OPTIONS[read]
    found = []
    for config in configs:
        if config.get("tis_batch_normalize") and config["tis_level"] == "geometric":
            with pytest.raises(ValueError, match="refuses tis_batch_normalize"):
                read(config)
            continue
        mode, correction, _ = read(config)
        written = write(mode, correction) if mode != "recompute" else config
        assert read(written)[:2] == (mode, correction), config
        found.append((mode, correction))
    assert len({repr(each) for each in found}) > len(found) / 4, "options change nothing: this case proves nothing"


@pytest.mark.parametrize(
    ("read", "config", "name"),
    [
        (from_verl, {"rollout_rs": "sequence", "rollout_rs_threshold": 2}, "rollout_rs='sequence'"),
        (from_verl, {"rollout_token_veto_threshold": 1e-4}, "rollout_token_veto_threshold"),
        (from_trl, {"loss_type": "vespo"}, "loss_type"),
        (from_trl, {"use_bias_correction_kl": True}, "use_bias_correction_kl"),
        (from_miles, {"use_unbiased_kl": True}, "use_unbiased_kl"),
        (from_miles, {"use_rollout_routing_replay": True}, "use_rollout_routing_replay"),
    ],
)
def test_options_that_are_no_weight_and_no_gate_are_refused_by_name(read, config, name):
    with pytest.raises(ValueError, match=name):
        read(config)


def test_kpop_is_not_written_for_verl_but_read_with_a_note():
    with pytest.raises(ValueError, match="verl can't express"):
        to_verl("decoupled", preset("kpop"))
    _, correction, notes = from_verl({"rollout_rs": "binary_kl", "rollout_rs_threshold": 0.1})
    assert correction.gates == preset("kpop").gates
    assert any("PR #6800" in note for note in notes)


@pytest.mark.parametrize(
    "config",
    [
        {"rollout_rs": "token_k2", "rollout_rs_threshold": "0.1_0.5"},
        {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2.0_9"},
        {"rollout_is": "token", "rollout_is_threshold": "0.5_2_9"},
        {"rollout_is": "token", "rollout_is_threshold": "two"},
        {"rollout_is": "token", "rollout_is_threshold": ""},
        {"rollout_rs": ",", "rollout_rs_threshold": "0.5"},
        {"rollout_is": "token", "rollout_is_threshold": "0_2"},
        {"rollout_is": "token", "rollout_is_threshold": "-0.5_2"},
        {"rollout_rs": "token_k1", "rollout_rs_threshold": "0_2"},
        {"rollout_rs": "seq_mean_k2", "rollout_rs_threshold": "-1"},
        {"rollout_rs": "seq_mean_k3,", "rollout_rs_threshold": "0.5"},
    ],
)
def test_verl_thresholds_are_parsed_whole_or_refused(config):
    with pytest.raises(ValueError, match=r"expected|choose one of"):
        from_verl(config)


def test_a_loss_type_that_verl_ignores_is_noted():
    assert any("ignores loss_type" in note for note in from_verl({"loss_type": "reinforce"}).notes)


def test_slime_reads_its_own_paths_and_refuses_others():
    path = "slime.backends.megatron_utils.loss.icepop_function"
    mode, correction, _ = from_slime({"use_tis": True, "tis_clip_low": 0.5, "custom_tis_function_path": path})
    assert (mode, correction) == ("decoupled", preset("icepop", low=0.5, high=2.0))
    with pytest.raises(ValueError, match="custom_tis_function_path"):
        from_slime({"use_tis": True, "custom_tis_function_path": "mine.other"})
    with pytest.raises(ValueError, match="slime refuses use_tis"):
        from_slime({"use_tis": True, "use_rollout_logprobs": True})


def log_probs(seed=0):
    g = torch.Generator().manual_seed(seed)
    rollout = -2 * torch.rand(4, 5, generator=g, dtype=torch.float64)
    old, current = (rollout + 0.5 * torch.randn(4, 5, generator=g, dtype=torch.float64) for _ in range(2))
    mask = torch.arange(5)[None] < torch.tensor([5, 3, 1, 4])[:, None]
    lp = LogProbs(mask, rollout, old.clamp_max(0), current.clamp_max(0).requires_grad_())
    return lp, torch.randn(4, generator=g, dtype=torch.float64)


def gradient(lp, advantages, mode, kind, correction):
    loss = policy_loss(
        lp, advantages, mode, kind, correction, aggregation="seq-mean-token-sum", normalizer=1.0
    ).loss  # a sum
    (found,) = torch.autograd.grad(loss, lp.current)
    return found[lp.mask]


def test_prime_rls_default_loss_is_ours():
    """-A r 1[inside], r = current/rollout with its gradient; the mask by a difference of probabilities and A's sign."""
    lp, advantages = log_probs()
    mode, correction, notes = from_prime_rl({"dppo_mask_low": 0.05, "dppo_mask_high": 0.1})
    assert any("kl_tau" in note for note in notes)
    assert any("kind='reinforce'" in note for note in notes)
    a = advantages[:, None].expand_as(lp.mask)
    apart = lp.current.detach().exp() - lp.rollout.exp()
    invalid = torch.where(a > 0, apart > 0.1, apart < -0.05)
    theirs = -a * (lp.current - lp.rollout).exp() * (lp.mask & ~invalid)
    (expected,) = torch.autograd.grad(theirs.sum(), lp.current)
    got = gradient(lp, advantages, mode, "reinforce", correction)
    torch.testing.assert_close(got, expected[lp.mask])
    assert 0 < int((invalid & lp.mask).sum()) < int(lp.mask.sum()), "the mask decides nothing"
    ipo = from_prime_rl({"type": "ipo", "ipo_threshold": 0.05, "kl_tau": 0.0})
    assert ipo.correction.gates == preset("ipo", high=0.05).gates
    assert not any("kl_tau" in note for note in ipo.notes)
    for wrong in ({"type": "sft"}, {"ipo_threshold": 0.1}):
        with pytest.raises(ValueError, match=r"choose one of|has no"):
            from_prime_rl(wrong)


def test_skyrls_corrections_are_ours():
    config = {
        "tis_ratio_type": "token", "sequence_mask_metric": "geometric", "outlier_token_is_threshold_low": 1e-4,
        "outlier_token_is_threshold_high": 100.0, "token_mask_is_threshold_low": 0.2,
        "token_mask_is_threshold_high": 5.0,
    }  # fmt: skip
    mode, correction, notes = from_skyrl({"off_policy_correction": config})
    assert mode == "decoupled"
    (note,) = notes
    assert "leaves out masked tokens from ratios of sequences" in note
    tim = "old/rollout"
    expected = (
        Gate.on_ratio(Statistic(tim, aggregate="mean"), 0.99, 1.01),
        Gate.on_ratio(Statistic(tim, aggregate="min"), 1e-4, None),
        Gate.on_ratio(Statistic(tim, aggregate="max"), None, 100.0),
        Gate.on_ratio(Statistic(tim), 0.2, 5.0),
    )
    assert correction == Correction(Weight(Statistic(tim), high=2.0), expected)
    mode, correction, notes = from_skyrl({"off_policy_correction": {"token_mask_is_threshold_high": 5.0}})
    assert (mode, correction) == ("recompute", Correction())
    assert any("one bound alone is ignored" in note for note in notes)
    product = {"tis_ratio_type": "sequence", "sequence_mask_metric": "product"}
    _, correction, _ = from_skyrl({"off_policy_correction": product})
    assert correction.weight == preset("sequence_tis", high=5.0).weight
    assert correction.gates == (Gate.on_ratio(Statistic(tim, aggregate="sum"), 0.5, 2.0),)
    mode, correction, notes = from_skyrl(
        {"policy_loss_type": "dppo", "dppo": {"dppo_type": "binary_kl", "delta_low": 0.05}}
    )
    assert mode == "bypass"
    assert correction.gates == preset("dppo_kl", low=0.05, high=0.2).gates
    assert "The loss is kind='reinforce' of policy_loss." in notes
    assert from_skyrl({}).mode == "recompute"
    with pytest.raises(ValueError, match="already has the ratio"):
        from_skyrl({"policy_loss_type": "rollout_is", "off_policy_correction": {"tis_ratio_type": "token"}})
    with pytest.raises(ValueError, match="has no tis"):
        from_skyrl({"off_policy_correction": {"tis": "token"}})


def test_areals_rejection_sampling_is_ours():
    tim = "old/rollout"
    mode, correction, _ = from_areal({"use_decoupled_loss": True, "rejection_sampling": {}})
    assert mode == "decoupled"
    assert correction == Correction(Weight(Statistic(tim)), (Gate.on_ratio(Statistic(tim), None, 5.0),))
    clamp = {"level": "sequence", "action": "clamp", "upper": 2.0}
    _, correction, _ = from_areal({"use_decoupled_loss": True, "rejection_sampling": clamp})
    assert correction == Correction(Weight(Statistic(tim, aggregate="mean"), high=2.0))
    k3 = {"level": "sequence", "metric": "kl_k3", "agg": "max", "upper": 0.5}
    _, correction, _ = from_areal({"use_decoupled_loss": True, "rejection_sampling": k3, "m2_threshold": 0.04})
    assert correction.gates == (Gate(Statistic(tim, "k3", "max"), high=0.5), *preset("m2po").gates)
    mode, correction, notes = from_areal({"rejection_sampling": {}, "importance_sampling_level": "sequence"})
    assert (mode, correction.gates) == ("bypass", ())
    assert any("ignored" in note for note in notes)
    assert any("gspo" in note for note in notes)
    assert from_areal({"recompute_logprob": True}).mode == "recompute"
    mode, correction, notes = from_areal({"use_decoupled_loss": True})
    assert (mode, correction) == ("recompute", Correction())
    assert any("no weight" in note for note in notes)
    mode, correction, notes = from_areal({"m2_threshold": 0.04})
    assert correction == Correction()
    assert any("drops nothing" in note for note in notes)
    m2 = from_areal({"m2_threshold": 0.04, "prox_logp_method": "reuse_train_logp"}).correction
    assert m2.gates == preset("m2po", ratio="current/rollout").gates
    assert any(
        "interpolated" in n for n in from_areal({"use_decoupled_loss": True, "prox_logp_method": "loglinear"}).notes
    )
    for wrong in (
        {"use_decoupled_loss": True, "rejection_sampling": {"metric": "kl_k2", "action": "clamp"}},
        {"use_sapo_loss": True, "use_decoupled_loss": True},
        {"behave_imp_weight_cap": 5.0},
        {"prox_logp_method": "magic"},
        {"use_decoupled_loss": True, "rejection_sampling": clamp | {"agg": "magic"}},
        {"use_decoupled_loss": True, "rejection_sampling": clamp | {"agg": "max", "lower": 0.5}},
    ):
        with pytest.raises(ValueError, match=r"AReaL|choose one of"):
            from_areal(wrong)


@pytest.mark.parametrize("write", [to_miles, to_slime])
def test_two_opsm_gates_are_not_one(write):
    gates = (
        preset("opsm", delta=1e-4, ratio="current/old").gates + preset("opsm", delta=1e-2, ratio="current/old").gates
    )
    with pytest.raises(ValueError, match="a second opsm"):
        write("decoupled", Correction(gates=gates))
