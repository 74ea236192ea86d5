"""Corrections against direct transcriptions of their papers' formulas, and the traps that other implementations met."""

import itertools
import math
import subprocess
import sys

import numpy as np
import pytest
import torch

from samebits.correction import (
    PRESETS,
    Correction,
    Gate,
    LogProbs,
    Statistic,
    Weight,
    contribution,
    correction_metrics,
    effective_coefficients,
    policy_loss,
    preset,
    prune_logits,
    safe_set,
    summarize,
)
from samebits.correction.calibration.grid import optimal_truncation, self_normalized_chi2
from samebits.correction.diagnose import predicted_chi2

TABLE_1 = [0.001, 0.0, 0.0, -0.133, 0.0, -0.008, 0.0, 0.0]  # log ratios of the VeXact paper's Table 1


def batch(seed=0, rows=6, width=9, spread=0.4, fill=float("nan")):
    """Padded [B, T] log-probs of three policies with NaN in the padding; lengths differ, one sequence is empty."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([width, 1, 4, 0, 7, width][:rows])
    mask = torch.arange(width) < lengths[:, None]
    old = -3 * torch.rand(rows, width, generator=g) - 0.01
    rollout = (old + spread * torch.randn(rows, width, generator=g)).clamp_max(-1e-3)
    current = (old + spread * torch.randn(rows, width, generator=g)).clamp_max(-1e-3)
    advantages = torch.randn(rows, generator=g)
    padded = [torch.where(mask, t, fill) for t in (rollout, old, current)]
    return LogProbs(mask, *padded), advantages


def packed(lp):
    """The same batch without padding."""
    values = [None if t is None else t[lp.mask] for t in (lp.rollout, lp.old, lp.current)]
    offsets = torch.cat((torch.zeros(1, dtype=torch.long), lp.lengths.cumsum(0)))
    return LogProbs(torch.ones(int(lp.lengths.sum()), dtype=torch.bool), *values, offsets=offsets)


# --- presets, transcribed in numpy ----------------------------------------------------------------------------------


def k3(d):
    return np.exp(d) - 1 - d


def binary_kl(log_p, log_q):
    p, q = np.clip(np.exp(log_p), 1e-6, 1 - 1e-6), np.clip(np.exp(log_q), 1e-6, 1 - 1e-6)

    def kl(a, b):
        return a * np.log(a / b) + (1 - a) * np.log((1 - a) / (1 - b))

    return np.maximum(kl(p, q), kl(q, p))


def bernoulli_kl(log_p, log_q):
    p, q = (np.clip(np.exp(v), 1e-6, 1 - 1e-6) for v in (log_p, log_q))
    return p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))


def whole(keep, like):
    return np.full(len(like), bool(keep))


# name -> (thresholds, (mu, old, pi, A) -> (weights or None, keep or None)), one sequence at a time
PAPERS = {
    "none": ({}, lambda mu, old, pi, a: (None, None)),
    "token_tis": ({"high": 1.5}, lambda mu, old, pi, a: (np.minimum(np.exp(old - mu), 1.5), None)),
    "sequence_tis": ({"high": 1.5}, lambda mu, old, pi, a: (whole(1, mu) * min(np.exp((old - mu).sum()), 1.5), None)),
    "sequence_is": ({}, lambda mu, old, pi, a: (whole(1, mu) * np.exp((old - mu).sum()), None)),
    "geometric_is": (
        {"low": 0.9, "high": 1.1},
        lambda mu, old, pi, a: (whole(1, mu) * np.clip(np.exp((old - mu).mean()), 0.9, 1.1), None),
    ),
    "icepop": (
        {"low": 0.8, "high": 1.3},
        lambda mu, old, pi, a: (
            np.where((np.exp(old - mu) >= 0.8) & (np.exp(old - mu) <= 1.3), np.exp(old - mu), 0),
            None,
        ),
    ),
    "token_mis": (
        {"high": 1.2},
        lambda mu, old, pi, a: (np.where(np.exp(old - mu) <= 1.2, np.exp(old - mu), 0), None),
    ),
    "sequence_mis": (
        {"high": 1.2},
        lambda mu, old, pi, a: (whole(1, mu) * np.exp((old - mu).sum()) * (np.exp((old - mu).sum()) <= 1.2), None),
    ),
    "geo_rs": (
        {"low": 0.9, "high": 1.15},
        lambda mu, old, pi, a: (None, whole(0.9 <= np.exp((old - mu).mean()) <= 1.15, mu)),
    ),
    "k1_sum_rs": ({"bound": 0.5}, lambda mu, old, pi, a: (None, whole(abs((mu - old).sum()) <= 0.5, mu))),
    "k1_mean_rs": ({"bound": 0.1}, lambda mu, old, pi, a: (None, whole(abs((mu - old).mean()) <= 0.1, mu))),
    "k2_sum_rs": ({"high": 0.5}, lambda mu, old, pi, a: (None, whole(((old - mu) ** 2 / 2).sum() <= 0.5, mu))),
    "k2_mean_rs": ({"high": 0.07}, lambda mu, old, pi, a: (None, whole(((old - mu) ** 2 / 2).mean() <= 0.07, mu))),
    "k3_sum_rs": ({"high": 0.5}, lambda mu, old, pi, a: (None, whole(k3(old - mu).sum() <= 0.5, mu))),
    "k3_mean_rs": ({"high": 0.07}, lambda mu, old, pi, a: (None, whole(k3(old - mu).mean() <= 0.07, mu))),
    "trm": ({"high": 0.2}, lambda mu, old, pi, a: (None, whole(k3(old - mu).max() <= 0.2, mu))),
    "veto": ({"low": 0.6}, lambda mu, old, pi, a: (None, whole(np.exp(old - mu).min() >= 0.6, mu))),
    "opsm": (
        {"delta": 0.05, "ratio": "current/rollout"},
        lambda mu, old, pi, a: (None, whole(not (a < 0 and (mu - pi).mean() > 0.05), mu)),
    ),
    "kpop": ({"high": 0.1}, lambda mu, old, pi, a: (None, binary_kl(old, mu) <= 0.1)),
    "srs_k3_corr": ({"high": 0.07}, lambda mu, old, pi, a: (None, whole(k3(old - mu).mean() <= 0.07, mu))),
    "srs_k3_ppo": ({"high": 0.07}, lambda mu, old, pi, a: (None, whole(k3(pi - mu).mean() <= 0.07, mu))),
    "tis_srs_k1_corr": (
        {"cap": 1.4, "high": 0.1},
        lambda mu, old, pi, a: (np.minimum(np.exp(old - mu), 1.4), whole((mu - old).mean() <= 0.1, mu)),
    ),
    "tis_srs_k3_corr": (
        {"cap": 1.4, "high": 0.07},
        lambda mu, old, pi, a: (np.minimum(np.exp(old - mu), 1.4), whole(k3(old - mu).mean() <= 0.07, mu)),
    ),
}


PAPERS |= {
    "tis_geo_rs": (
        {"cap": 1.4, "low": 0.9, "high": 1.15},
        lambda mu, old, pi, a: (np.minimum(np.exp(old - mu), 1.4), whole(0.9 <= np.exp((old - mu).mean()) <= 1.15, mu)),
    ),
    "dppo_tv": (
        {"low": 0.03, "high": 0.05},
        lambda mu, old, pi, a: (
            None,
            np.exp(pi) - np.exp(mu) <= 0.05 if a > 0 else np.exp(pi) - np.exp(mu) >= -0.03,
        ),
    ),
    "dppo_kl": (
        {"low": 0.005, "high": 0.01},
        lambda mu, old, pi, a: (
            None,
            (bernoulli_kl(mu, pi) <= 0.01) | (pi <= mu) if a > 0 else (bernoulli_kl(mu, pi) <= 0.005) | (pi >= mu),
        ),
    ),
    "ipo": ({"high": 0.05}, lambda mu, old, pi, a: (None, np.abs(np.exp(pi) - np.exp(mu)) <= 0.05)),
}
ELSEWHERE = {"m2po", "veto_probability"}  # tests/correction/test_methods.py


def test_every_preset_has_its_transcription():
    assert set(PAPERS) | ELSEWHERE == set(PRESETS)


@pytest.mark.parametrize("name", PAPERS)
def test_a_preset_is_its_papers_formula(name):
    thresholds, formula = PAPERS[name]
    kept = []
    for seed in range(4):
        lp, advantages = batch(seed)
        got = preset(name, **thresholds)(lp, advantages)
        assert got.weights.dtype == torch.float32
        for i, n in enumerate(lp.lengths.tolist()):
            if n == 0:
                continue
            mu, old, pi = (t[i, :n].double().numpy() for t in (lp.rollout, lp.old, lp.current))
            weights, keep = formula(mu, old, pi, float(advantages[i]))
            expected = np.ones(n) if weights is None else weights
            np.testing.assert_allclose(got.weights[i, :n].numpy(), expected, rtol=1e-6)
            assert got.keep[i, :n].tolist() == (np.ones(n, bool) if keep is None else keep).tolist()
            kept += got.keep[i, :n].tolist()
        assert not got.keep[~lp.mask].any()
        assert not got.weights[~lp.mask].any()
    if preset(name, **thresholds).gates:
        assert 0 < np.mean(kept) < 1, "the thresholds decide nothing: this case proves nothing"


@pytest.mark.parametrize("name", PAPERS)
def test_padded_and_packed_are_the_same_and_padding_is_never_read(name):
    correction = preset(name, **PAPERS[name][0])
    lp, advantages = batch(1)
    ours, flat = correction(lp, advantages), correction(packed(lp), advantages)
    assert torch.equal(ours.weights[lp.mask], flat.weights)
    assert torch.equal(ours.keep[lp.mask], flat.keep)
    other, _ = batch(1, fill=float("inf"))
    again = correction(other, advantages)
    assert torch.equal(ours.weights, again.weights)
    assert torch.equal(ours.keep, again.keep)


@pytest.mark.parametrize("name", PAPERS)
def test_without_mismatch_a_correction_does_nothing(name):
    lp, advantages = batch(2)
    same = LogProbs(lp.mask, lp.old, lp.old, lp.old)
    result = preset(name, **PAPERS[name][0])(same, advantages)
    assert result.weights[lp.mask].eq(1).all()
    assert result.keep[lp.mask].all()


@pytest.mark.parametrize(
    ("name", "key", "values"),
    [
        ("k3_mean_rs", "high", [0.01, 0.05, 0.1, 1.0]),
        ("trm", "high", [0.01, 0.1, 1.0]),
        ("veto", "low", [0.9, 0.5, 0.1]),
        ("opsm", "delta", [-0.5, 0.0, 0.5]),
        ("k1_sum_rs", "bound", [0.1, 0.5, 2.0]),
    ],
)
def test_a_looser_threshold_keeps_no_less(name, key, values):
    extra = {"ratio": "current/rollout"} if name == "opsm" else {}
    lp, advantages = batch(3)
    keeps = [preset(name, **{key: v}, **extra)(lp, advantages).keep for v in values]
    assert all((tight <= loose).all() for tight, loose in itertools.pairwise(keeps))
    assert keeps[0].sum() < keeps[-1].sum()


def test_gates_are_idempotent_and_never_change_weights():
    lp, advantages = batch(4)
    gate = Gate(Statistic("old/rollout", "k3", "mean"), high=0.07)
    weight = Weight(Statistic("old/rollout"), high=1.5)
    once, twice = Correction(weight, (gate,))(lp, advantages), Correction(weight, (gate, gate))(lp, advantages)
    assert torch.equal(once.keep, twice.keep)
    assert not once.keep[lp.mask].all()
    assert torch.equal(once.weights, Correction(weight)(lp, advantages).weights)


def test_the_order_of_tokens_decides_no_sequence_gate():
    lp, _ = batch(5)
    flipped = LogProbs(lp.mask.flip(1), *(t.flip(1) for t in (lp.rollout, lp.old, lp.current)))
    for name in ("geo_rs", "k3_sum_rs", "trm", "veto"):
        correction = preset(name, **PAPERS[name][0])
        assert torch.equal(correction(lp).keep, correction(flipped).keep.flip(1))


# --- traps that other implementations met ---------------------------------------------------------------------------


def test_bounds_of_a_ratio_are_of_that_ratio():
    """verl compares -log r with [log lo, log hi]: "0.6_1.4" keeps 1.5 and drops 0.65."""
    ratios = [0.5, 0.65, 0.72, 1.35, 1.5, 1.65]
    d = torch.tensor([ratios]).log()
    lp = LogProbs(torch.ones_like(d, dtype=torch.bool), torch.full_like(d, -5.0), d - 5.0)
    gate = Gate.on_ratio(Statistic("old/rollout"), 0.6, 1.4)
    assert Correction(gates=(gate,))(lp).keep.tolist() == [[False, True, True, True, False, False]]


def test_all_rejected_is_finite_with_zero_gradients():
    """verl's bypass loss is NaN there."""
    lp, advantages = batch(6)
    for aggregation, denominator in itertools.product(
        ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum"), ("original", "kept")
    ):
        nothing = Correction(gates=(Gate(Statistic("old/rollout", "abs"), high=-1.0),), denominator=denominator)
        current = lp.current.clone().requires_grad_()
        result = policy_loss(
            LogProbs(lp.mask, lp.rollout, lp.old, current),
            advantages,
            "decoupled",
            correction=nothing,
            aggregation=aggregation,
        )
        assert result.loss == 0
        result.loss.backward()
        assert not current.grad.any()


def test_the_denominator_is_what_was_asked_for():
    lp, advantages = batch(7)
    gate = (Gate(Statistic("old/rollout", "k3", "mean"), high=0.07),)
    sizes = {}
    for denominator in ("original", "kept"):
        got = policy_loss(lp, advantages, "decoupled", correction=Correction(gates=gate, denominator=denominator))
        sizes[denominator] = float(got.loss)
    keep = Correction(gates=gate)(lp).keep
    assert 0 < keep.sum() < lp.mask.sum()
    assert math.isclose(sizes["original"] * int(lp.mask.sum()), sizes["kept"] * int(keep.sum()), rel_tol=1e-12)


def test_a_weight_in_bypass_is_refused_and_not_ignored():
    """verl's bypass + ppo_clip computes the weights and ignores them."""
    lp, advantages = batch()
    with pytest.raises(ValueError, match="count it twice"):
        policy_loss(lp, advantages, "bypass", correction=preset("token_tis"))
    with pytest.raises(ValueError, match="recompute ignores"):
        policy_loss(lp, advantages, "recompute", correction=preset("token_tis"))
    weight = Correction(Weight(Statistic("current/rollout"), high=2.0))
    with pytest.raises(ValueError, match="of old/rollout, not current/rollout"):
        policy_loss(lp, advantages, "decoupled", correction=weight)
    assert policy_loss(lp, advantages, "bypass", "reinforce", weight).loss.isfinite()


def test_opsm_has_no_default_ratio_and_missing_log_probs_raise():
    """Miles' sees staleness only, TRL falls back to pi_old silently."""
    with pytest.raises(ValueError, match="ratio named"):
        preset("opsm")
    lp, advantages = batch()
    without = LogProbs(lp.mask, old=lp.old, current=lp.current)
    with pytest.raises(ValueError, match="'rollout' policy are needed"):
        preset("opsm", ratio="current/rollout")(without, advantages)
    with pytest.raises(ValueError, match="give the advantages"):
        preset("opsm", ratio="current/rollout")(lp)


def test_k3_of_small_ratios_keeps_its_digits():
    """exp(d) - 1 - d in fp32 is off by 230 % at 1e-4."""
    for power in (10, 13, 20):  # fp32 inputs whose difference is exact
        d = 2.0**-power
        below = torch.full((1, 1), -1.0)
        lp = LogProbs(torch.ones(1, 1, dtype=torch.bool), below, below + d)
        exact = d * d / 2 * (1 + d / 3 + d * d / 12)
        assert math.isclose(float(Statistic("old/rollout", "k3").of(lp)), exact, rel_tol=1e-8)


def test_extreme_ratios_stay_finite():
    d = torch.tensor([[800.0, -800.0, 0.0]])
    rollout = torch.full_like(d, -900.0)
    lp = LogProbs(torch.ones_like(d, dtype=torch.bool), rollout, rollout + d, rollout + d)
    for name, (thresholds, _) in PAPERS.items():
        result = preset(name, **thresholds)(lp, torch.tensor([1.0]))
        assert result.weights.isfinite().all(), name
    assert Correction(Weight(Statistic("old/rollout")))(lp).weights[0, 0] == pytest.approx(math.exp(20))


def test_a_token_that_the_trainer_excludes_counts_as_ratio_0():
    old = torch.tensor([[-torch.inf, -1.0]])
    lp = LogProbs(torch.ones(1, 2, dtype=torch.bool), torch.full((1, 2), -1.0), old, old)
    assert preset("token_tis")(lp).weights[0].tolist() == pytest.approx([math.exp(-20), 1.0])
    assert not preset("veto")(lp).keep.any()
    assert Statistic("current/old", "log_ratio").of(lp).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("kind", ["ppo", "gspo", "cispo", "reinforce"])
def test_a_token_that_the_current_policy_excludes_leaves_the_loss_finite(kind):
    current = torch.tensor([[-torch.inf, -1.0]], requires_grad=True)
    old = torch.full((1, 2), -1.0)
    lp = LogProbs(torch.ones(1, 2, dtype=torch.bool), old, old, current)
    loss = policy_loss(lp, torch.tensor([1.0]), "recompute", kind).loss
    loss.backward()
    assert loss.isfinite()
    assert current.grad.isfinite().all()
    assert current.grad[0, 0] == 0


def test_an_empty_sequence_changes_no_normalised_weight():
    rollout = torch.full((3, 1), -1.0)
    full = LogProbs(torch.tensor([[1], [1], [0]]), rollout, rollout + math.log(0.5))
    normal = Weight(Statistic("old/rollout", aggregate="sum"), normalize=True)
    assert normal.of(full)[:2].tolist() == pytest.approx([1.0, 1.0])


def test_advantages_that_could_be_of_tokens_or_sequences_are_refused():
    lp = LogProbs(torch.ones(2), torch.zeros(2), torch.zeros(2), torch.zeros(2), torch.tensor([0, 2, 2]))
    with pytest.raises(ValueError, match=r"give \[sequences, 1\]"):
        policy_loss(lp, torch.tensor([5.0, -7.0]), "recompute")
    e = effective_coefficients(lp, torch.tensor([[5.0], [-7.0]]), "recompute")
    assert e.tolist() == [-2.5, -2.5]


def test_gates_of_staleness_alone_go_with_recompute():
    """Miles' --use-opsm default."""
    lp, advantages = batch()
    loss = policy_loss(lp, advantages, "recompute", correction=preset("opsm", ratio="current/old", delta=0.0))
    assert 0 < loss.corrected.keep.sum() < lp.mask.sum()


def test_weights_are_constants_to_autograd():
    """Without the detach, verl's gradient gained log pi * grad w."""
    lp, advantages = batch(9)
    leaves = [t.clone().requires_grad_() for t in (lp.rollout, lp.old, lp.current)]
    result = preset("token_tis")(LogProbs(lp.mask, *leaves), advantages)
    assert not result.weights.requires_grad
    policy_loss(LogProbs(lp.mask, *leaves), advantages, "decoupled", correction=preset("token_tis")).loss.backward()
    assert leaves[0].grad is None
    assert leaves[1].grad is None
    assert leaves[2].grad[lp.mask].isfinite().all()
    assert not leaves[2].grad[~lp.mask].any()


def test_self_normalisation_divides_by_the_mean_of_the_level_and_of_all_ranks():
    lp, _ = batch(10)
    for aggregate in ("token", "sum"):
        plain = Weight(Statistic("old/rollout", aggregate=aggregate), high=1.5)
        normal = Weight(plain.statistic, high=1.5, normalize=True)
        real = slice(None) if aggregate == "token" else lp.lengths > 0
        assert torch.allclose(normal.of(lp), plain.of(lp) / plain.of(lp)[real].mean())
        halves = LogProbs(lp.mask[:3], *(t[:3] for t in (lp.rollout, lp.old, lp.current)))
        counted = plain.of(lp)[real]
        total = torch.stack((counted.sum(), counted.new_tensor(float(len(counted)))))
        part = Weight.of(normal, halves, lambda _, total=total: total)
        assert torch.allclose(part, normal.of(lp)[: len(part)])


def kish(weights):
    """Effective sample size, as a share (Kish, 1965)."""
    return float(weights.sum() ** 2 / weights.square().sum()) / len(weights)


def test_metrics_are_sums_before_rejection_that_add_up_over_ranks():
    lp, advantages = batch(16)
    gates = (Gate(Statistic("old/rollout", "k3", "mean"), high=0.07), Gate(Statistic("old/rollout", "abs"), high=0.5))
    correction = Correction(Weight(Statistic("old/rollout"), low=0.8, high=1.2, outside="zero"), gates)
    whole = correction_metrics(correction, lp, advantages)
    parts = [
        correction_metrics(
            correction, LogProbs(lp.mask[s], *(t[s] for t in (lp.rollout, lp.old, lp.current))), advantages[s]
        )
        for s in (slice(0, 2), slice(2, 6))
    ]
    for name, value in whole.items():
        assert float(value) == pytest.approx(float(parts[0][name] + parts[1][name])), name
    ratio = (lp.values("old") - lp.values("rollout")).exp()
    weights, keep = correction.on_tokens(lp, None)
    found = summarize(whole)
    assert whole["tokens"] == lp.mask.sum()
    assert found["above_bound"] == pytest.approx(float((ratio > 1.2).double().mean()))
    assert found["below_bound"] == pytest.approx(float((ratio < 0.8).double().mean()))
    assert found["rejected_tokens"] == pytest.approx(1 - float((keep & (weights > 0)).double().mean()))
    assert found["rejected_by_gate_1"] == pytest.approx(float((ratio.log().abs() > 0.5).double().mean()))
    used = torch.where(keep, weights, 0.0)
    assert found["ess_token"] == pytest.approx(kish(used))
    a = advantages.double()[lp.segment]
    dropped = used == 0
    assert found["rejected_advantage"] == pytest.approx(float(a.abs()[dropped].sum() / a.abs().sum()))
    assert found["rejected_negative_tokens"] == pytest.approx(float(dropped[a < 0].double().mean()))
    mean = [float(used[lp.segment == i].mean()) for i in range(6) if lp.lengths[i]]
    assert found["ess_sequence"] == pytest.approx(kish(torch.tensor(mean)))
    nothing = Correction(gates=(Gate(Statistic("old/rollout", "abs"), high=-1.0),))
    assert all(math.isfinite(v) for v in summarize(correction_metrics(nothing, lp)).values())


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Gate(Statistic("old/rollout"), 2.0, 0.5), "low < high"),
        (lambda: Gate(Statistic("old/rollout")), "needs a bound"),
        (lambda: Gate(Statistic("old/rollout", "k3"), low=0.1), "only an upper bound"),
        (lambda: Gate.on_ratio(Statistic("old/rollout", "k1"), 0.5, 2.0), "need the kernel 'log_ratio'"),
        (lambda: Gate.on_ratio(Statistic("old/rollout"), -1.0, 2.0), "positive"),
        (lambda: Gate(Statistic("old/rollout"), float("nan"), 1.0), "low < high"),
        (lambda: Weight(Statistic("old/rollout", "k3")), "exponential of a log ratio"),
        (lambda: Weight(Statistic("old/rollout", aggregate="max")), "exponential of a log ratio"),
        (lambda: Weight(Statistic("old/rollout"), outside="drop"), "choose one of clip, zero, keep"),
        (lambda: Statistic("rollout/old"), "choose one of old/rollout"),
        (lambda: Statistic("old/rollout", "k4"), "choose one of"),
        (lambda: Correction(denominator="all"), "choose one of original, kept"),
        (lambda: preset("tis"), "choose one of none, token_tis"),
        (lambda: LogProbs(torch.ones(2, 3), old=torch.zeros(2, 4)), r"\[2, 4\]"),
        (lambda: LogProbs(torch.ones(2, 3), old=torch.zeros(2, 3, dtype=torch.long)), "floating"),
        (lambda: LogProbs(torch.ones(2, 3), old=torch.full((2, 3), torch.nan)), "6 non-finite"),
        (lambda: LogProbs(torch.ones(2, 3), rollout=torch.full((2, 3), -torch.inf)), "non-finite"),
        (lambda: LogProbs(torch.ones(6), old=torch.zeros(6)), "offsets"),
        (lambda: LogProbs(torch.ones(6), offsets=torch.tensor([0, 4])), "from 0 to the number of tokens, 6"),
        (lambda: LogProbs(torch.ones(6), offsets=torch.tensor([0, 4, 2, 6])), "not decrease"),
    ],
)
def test_bad_input_is_refused_with_what_to_do(build, message):
    with pytest.raises(ValueError, match=message):
        build()


# --- losses ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["recompute", "bypass", "decoupled"])
@pytest.mark.parametrize("gated", [False, True])
def test_the_gradient_is_the_closed_form(mode, gated):
    """dL/dlog pi = -w m r A 1[unclipped] / N."""
    lp, advantages = batch(11, spread=0.3)
    gates = (Gate(Statistic("old/rollout", "k3", "mean"), high=0.05),) if gated and mode != "recompute" else ()
    weight = Weight(Statistic("old/rollout"), high=1.2) if mode == "decoupled" else None
    correction = Correction(weight, gates)
    got = effective_coefficients(lp, advantages, mode, correction=correction, clip=(0.2, 0.28))
    a = advantages.double()[lp.segment]
    below = lp.values("rollout" if mode == "bypass" else "old")
    r = (lp.values("current") - below).exp()
    w, m = correction.on_tokens(lp, a)
    clipped = ((a > 0) & (r > 1.28)) | ((a < 0) & (r < 0.8))
    expected = -w * m * r * a * ~clipped / len(a)
    assert clipped.any()
    assert torch.allclose(got, expected, rtol=1e-5, atol=1e-9)  # autograd leaves in fp32


def test_the_gradient_of_losses_without_a_clipped_term_is_the_closed_form():
    """-w m A / N of REINFORCE in bypass with a weight of pi/mu, -w m clip(r) A / N of CISPO."""
    lp, advantages = batch(13, spread=0.3)
    a = advantages.double()[lp.segment]
    gate = (Gate(Statistic("old/rollout", "k3", "mean"), high=0.05),)
    for mode, kind, ratio in (("bypass", "reinforce", "current/rollout"), ("decoupled", "cispo", "old/rollout")):
        correction = Correction(Weight(Statistic(ratio), high=1.2), gate)
        w, m = correction.on_tokens(lp, a)
        r = (lp.values("current") - lp.values("old")).exp().clamp(0.8, 1.28) if kind == "cispo" else 1.0
        got = effective_coefficients(lp, advantages, mode, kind=kind, correction=correction, clip=(0.2, 0.28))
        assert 0 < m.sum() < len(m)
        assert torch.allclose(got, -w * m * r * a / len(a), rtol=1e-5, atol=1e-9)


def test_decoupled_with_whole_weights_is_bypass_but_for_the_clip():
    lp, advantages = batch(12)
    open_clip = {"clip": (1.0, 1e9)}
    whole_weight = Correction(Weight(Statistic("old/rollout")))
    decoupled = effective_coefficients(lp, advantages, "decoupled", correction=whole_weight, **open_clip)
    bypass = effective_coefficients(lp, advantages, "bypass", **open_clip)
    assert torch.allclose(decoupled, bypass, rtol=1e-5)


def test_on_policy_every_loss_has_the_gradient_of_reinforce():
    lp, advantages = batch(13)
    here = LogProbs(lp.mask, lp.old, lp.old, lp.old)
    expected = effective_coefficients(here, advantages, "recompute", kind="reinforce")
    for kind, mode in itertools.product(("ppo", "gspo", "cispo"), ("recompute", "bypass", "decoupled")):
        assert torch.allclose(effective_coefficients(here, advantages, mode, kind=kind), expected, rtol=1e-5), kind


def test_dual_clip_caps_the_loss_of_bad_samples_alone():
    old = torch.full((1, 2), -3.0)
    current = old + torch.tensor([[math.log(5.0), math.log(5.0)]])
    lp = LogProbs(torch.ones(1, 2, dtype=torch.bool), old, old, current)
    advantages = torch.tensor([[-1.0, 1.0]])
    e = effective_coefficients(lp, advantages, "recompute", dual_clip=3.0)
    assert e.tolist() == [0.0, 0.0]  # A < 0: r = 5 > 3; A > 0: r > 1.2
    e = effective_coefficients(lp, advantages, "recompute", dual_clip=6.0)
    assert e.tolist() == pytest.approx([2.5, 0.0], rel=1e-5)


def test_gspo_clips_whole_sequences():
    old = torch.full((2, 2), -3.0)
    current = old + torch.tensor([[0.5, -0.45], [0.5, 0.3]])
    lp = LogProbs(torch.ones(2, 2, dtype=torch.bool), old, old, current)
    e = effective_coefficients(lp, torch.ones(2), "recompute", kind="gspo", clip=(0.2, 0.2))
    s = math.exp(0.025)
    assert e.tolist() == pytest.approx([-s / 4, -s / 4, 0.0, 0.0], rel=1e-4)


@pytest.mark.parametrize(
    "aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
)
def test_aggregations_against_loops(aggregation):
    lp, advantages = batch(14)
    extra = {"divisor": 8.0} if aggregation.endswith("norm") else {}
    got = policy_loss(lp, advantages, "recompute", aggregation=aggregation, **extra).loss
    rows = []
    for i, n in enumerate(lp.lengths.tolist()):
        r = (lp.current[i, :n].double() - lp.old[i, :n].double()).exp()
        a = advantages[i].double()
        rows.append(-torch.minimum(r * a, r.clamp(0.8, 1.2) * a))
    full = [r for r in rows if len(r)]
    expected = {
        "token-mean": torch.cat(full).mean(),
        "seq-mean-token-mean": sum(r.mean() for r in full) / len(full),
        "seq-mean-token-sum": sum(r.sum() for r in full) / len(full),
        "seq-mean-token-sum-norm": sum(r.sum() for r in full) / len(full) / 8,
    }[aggregation]
    assert float(got) == pytest.approx(float(expected), rel=1e-6)


def test_micro_batches_with_a_normalizer_sum_to_the_batch():
    lp, advantages = batch(15)
    tokens = float(lp.mask.sum())
    parts = [
        policy_loss(
            LogProbs(lp.mask[s], *(t[s] for t in (lp.rollout, lp.old, lp.current))),
            advantages[s],
            "recompute",
            normalizer=tokens,
        ).loss
        for s in (slice(0, 2), slice(2, 6))
    ]
    assert float(sum(parts)) == pytest.approx(float(policy_loss(lp, advantages, "recompute").loss), rel=1e-12)


def test_contribution_is_zero_on_policy_and_has_the_gradient_of_the_surrogate():
    d = torch.tensor([-0.3, -0.1, 0.0, 0.2], dtype=torch.float64, requires_grad=True)
    c = contribution(d, torch.ones(4))
    assert c[2] == 0
    assert torch.allclose(torch.autograd.grad(c.sum(), d)[0], -d.exp())


# --- theory and published numbers -----------------------------------------------------------------------------------


def test_published_numbers():
    for ratio, length, published in ((1.01, 200, 7.316), (1.05, 200, 17292.6), (1.1, 100, 13780.6)):
        rollout = torch.full((1, length), -2.0, dtype=torch.float64)
        lp = LogProbs(torch.ones(1, length, dtype=torch.bool), rollout, rollout + math.log(ratio))
        assert float(Weight(Statistic("old/rollout", aggregate="sum")).of(lp)) == pytest.approx(published, rel=1e-4)
    for chi2, c in ((1.0, 2.0), (3.5, 3.0), (11.5, 5.0)):
        assert optimal_truncation(chi2) == pytest.approx(c)
        bound = lambda c, chi2=chi2: c**2 + (2 * (1 + chi2) / c) ** 2  # noqa: E731 - of the squared error, for K = 1
        assert bound(c) == pytest.approx(4 * (1 + chi2))
        assert all(bound(c * f) > bound(c) for f in (0.9, 1.1))
    assert pytest.approx(1677.7, abs=0.05) == 4096**2 * 1e-4  # T^2 delta: the trust region's bound


def test_table_1_of_vexact():
    d = torch.tensor([TABLE_1])
    lp = LogProbs(torch.ones_like(d, dtype=torch.bool), torch.full_like(d, -1.0), d - 1.0)
    of = lambda *a: float(Statistic("old/rollout", *a).of(lp))  # noqa: E731
    assert of("k1", "mean") == pytest.approx(0.0175, abs=5e-5)
    assert of("k3", "sum") == pytest.approx(0.0085, abs=5e-5)
    assert of("k3", "mean") == pytest.approx(0.00106, abs=5e-6)
    assert math.exp(of("log_ratio", "sum")) == pytest.approx(0.869, abs=5e-4)
    assert math.exp(of("log_ratio", "mean")) == pytest.approx(0.9827, abs=5e-5)
    rho = d.double().exp()[0]
    assert float(rho.square().mean() - 1) == pytest.approx(-0.031, abs=5e-4)  # the plug-in is negative ...
    assert float(self_normalized_chi2(rho)) > 0  # ... and this can't be
    assert not preset("srs_k3_corr", aggregate="sum")(lp).keep.any()  # the two readings of the paper's gate
    assert not preset("srs_k3_corr")(lp).keep.any()
    assert preset("srs_k3_corr", high=0.0011)(lp).keep.all()


def test_feasibility_law_for_gaussian_log_ratios():
    """d ~ N(-s^2/2, s^2) per token makes E[rho] = 1, K3 = s^2/2 and chi2 = exp(s^2 T) - 1 exactly."""
    g = torch.Generator().manual_seed(0)
    s, length = 0.05, 100
    d = s * torch.randn(200_000, length, generator=g, dtype=torch.float64) - s * s / 2
    measured = float(self_normalized_chi2(d.sum(1).exp()))
    assert predicted_chi2(s * s / 2, length) == pytest.approx(math.expm1(s * s * length))
    assert measured == pytest.approx(predicted_chi2(s * s / 2, length), rel=0.05)
    assert predicted_chi2(1e-3, 8192) == pytest.approx(1.3e7, rel=0.02)
    assert predicted_chi2(1.0, 1e9) == math.inf


# --- dynamic vocabulary pruning -------------------------------------------------------------------------------------


def test_pruning_keeps_what_min_p_keeps_wherever_the_logits_lie():
    """A fill of -50 stops working where logits sit near -50."""
    z = 3 * torch.randn(50, 200, generator=torch.Generator().manual_seed(0))
    rho = 1e-2
    p = z.double().softmax(-1)
    expected = p >= rho * p.amax(-1, keepdim=True)
    exact = (z.double().masked_fill(~expected, -torch.inf)).log_softmax(-1)
    for shift in (0.0, 30.0, -60.0, 1000.0):
        moved = z + shift
        assert torch.equal(safe_set(moved, rho), safe_set(z, rho))
        inside = prune_logits(moved, rho).double().log_softmax(-1)[expected]
        assert (inside - exact[expected]).abs().max() < 2e-4  # fp32 logits around 1000 carry 6e-5
    assert torch.equal(safe_set(z, rho), expected)
    assert torch.equal(prune_logits(z, 0.0), z)


def test_pruning_has_no_gradient_through_its_set():
    z = torch.randn(4, 30, requires_grad=True)
    prune_logits(z, 0.05).log_softmax(-1)[:, 3].sum().backward()
    assert not z.grad[~safe_set(z, 0.05)].any()
    with pytest.raises(ValueError, match="at most 1"):
        safe_set(z, 1.5)


def test_pruned_trainer_equals_the_engine_with_min_p(checkpoint):
    """`token_logprobs(min_p=rho)` is the trainer's side of pruning; `prune_logits` the same up to rounding."""
    from samebits import LLM, SamplingParams
    from samebits.trainer import exact_model, token_logprobs

    path, rho = checkpoint("llama"), 0.02
    params = SamplingParams(min_p=rho, max_tokens=20, seed=1)
    out = LLM(path, kv_cache_memory_bytes=2**22).generate([[5, 6, 7]], params, use_tqdm=False)[0]
    sequence = [5, 6, 7, *out.completions[0].token_ids]
    model = exact_model(path)
    with torch.no_grad():
        ours = token_logprobs(model, [sequence], params)[0][3:]
        logits = model(torch.tensor([sequence])).logits[0, 2:-1]
    assert ours.tolist() == out.completions[0].logprobs
    pruned = prune_logits(logits.double(), rho).log_softmax(-1).gather(1, torch.tensor(sequence[3:])[:, None])[:, 0]
    assert torch.allclose(pruned.float(), ours, atol=1e-5)


def test_correction_stands_alone():
    code = """
import sys
import samebits.correction
loaded = [m for m in sys.modules if m.startswith("samebits.") and not m.startswith("samebits.correction")]
assert not loaded, loaded
assert "transformers" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
