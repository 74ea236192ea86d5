"""Methods of 2026 against their closed forms: gradients, enumerated expectations, published algorithms written anew."""

import math

import pytest
import torch

from samebits.correction import (
    PRESETS,
    Correction,
    LogProbs,
    Statistic,
    Weight,
    envelope,
    expected_score,
    optimal_token_baseline,
    policy_loss,
    preset,
    prune_logits,
    replay_mask,
)
from samebits.correction.losses import check_combination
from samebits.integrations.corrections import from_plain, in_words

F64 = torch.float64


def batch(seed=0, rows=5, length=6):
    g = torch.Generator().manual_seed(seed)
    rollout = -torch.rand(rows, length, generator=g, dtype=F64) - 0.05
    old, current = (rollout + 0.3 * torch.randn(rows, length, generator=g, dtype=F64) for _ in range(2))
    mask = torch.arange(length)[None] < torch.tensor([6, 4, 1, 6, 3])[:, None]
    lp = LogProbs(mask, rollout, old.clamp_max(-1e-3), current.clamp_max(-1e-3).requires_grad_())
    return lp, torch.randn(rows, generator=g, dtype=F64)


def gradient(lp, loss):
    (found,) = torch.autograd.grad(loss, lp.current)
    return found[lp.mask]


def test_sapo_has_its_closed_form_gradient():
    """d/d log pi of -4 / t sigmoid(t (r - 1)) A is -4 p (1 - p) r A, with p the sigmoid."""
    lp, advantages = batch()
    kwargs = {"aggregation": "seq-mean-token-sum", "normalizer": 1.0}
    got = gradient(lp, policy_loss(lp, advantages, "recompute", "sapo", **kwargs).loss)
    r = (lp.current - lp.old).exp().detach()[lp.mask]
    a = advantages[:, None].expand_as(lp.mask)[lp.mask]
    p = torch.sigmoid(torch.where(a > 0, 1.0, 1.05) * (r - 1))
    torch.testing.assert_close(got, -4 * p * (1 - p) * r * a, rtol=1e-12, atol=0)
    other = gradient(lp, policy_loss(lp, advantages, "recompute", "sapo", soft=(2.0, 3.0), **kwargs).loss)
    assert not torch.allclose(got, other)


def test_vespo_takes_weights_of_tokens_alone():
    with pytest.raises(ValueError, match="give it a weight per token"):
        check_combination("decoupled", "vespo", preset("sequence_tis"))
    check_combination("decoupled", "vespo", preset("token_tis"))


@pytest.mark.parametrize("weighed", [False, True])
def test_vespo_has_its_closed_form_gradient(weighed):
    """-phi(w) A with phi = exp(l + k log w - l w) of the sequence's ratio, in which the weights are."""
    lp, advantages = batch()
    correction = preset("token_tis", high=1.2) if weighed else Correction()
    loss = policy_loss(
        lp, advantages, "decoupled", "vespo", correction, aggregation="seq-mean-token-sum", normalizer=1.0
    ).loss
    tokens = (lp.current - lp.old).detach()
    if weighed:
        tokens = tokens + (lp.old - lp.rollout).exp().clamp_max(1.2).log()
    log_w = torch.where(lp.mask, tokens, 0.0).sum(1)
    k, l = torch.where(advantages >= 0, 2.0, 3.0), torch.where(advantages >= 0, 3.0, 2.0)
    phi = (l + k * log_w - l * log_w.exp()).exp()
    expected = (-phi * advantages)[:, None].expand_as(lp.mask)[lp.mask]
    torch.testing.assert_close(gradient(lp, loss), expected, rtol=1e-12, atol=0)


def test_dppo_masks_only_what_moves_outward():
    """A > 0 is dropped where p grew by more than 0.2, A < 0 where it fell by more: the gradient is 0 there alone."""
    rollout = torch.tensor([[0.5, 0.5, 0.5, 0.5, 0.5]], dtype=F64).log()
    current = torch.tensor([[0.75, 0.25, 0.69, 0.31, 0.5]], dtype=F64).log().requires_grad_()
    lp = LogProbs(torch.ones(1, 5), rollout, current.detach(), current)
    weight = Weight(Statistic("current/rollout"))
    for sign, dropped in ((1.0, 0), (-1.0, 1)):
        correction = Correction(weight, preset("dppo_tv").gates)
        loss = policy_loss(
            lp,
            torch.tensor([sign]),
            "bypass",
            "reinforce",
            correction,
            aggregation="seq-mean-token-sum",
            normalizer=1.0,
        ).loss
        expected = -sign * (current - rollout).exp().detach()[0]
        expected[dropped] = 0.0
        torch.testing.assert_close(gradient(lp, loss), expected)


@pytest.mark.parametrize("threshold", [0.01, 0.04, 0.08])
def test_m2po_drops_the_largest_until_the_second_moment_holds(threshold):
    lp, advantages = batch()
    kept = preset("m2po", high=threshold)(lp, advantages).keep[lp.mask]
    moments = (lp.old - lp.rollout).square()[lp.mask]
    order = moments.argsort(descending=True).tolist()
    while order and moments[order].mean() > threshold:  # as the paper says it
        order.pop(0)
    assert sorted(order) == kept.nonzero()[:, 0].tolist()
    assert 0 < len(order) < len(moments), "the threshold decides nothing"


def test_veto_on_a_probability_looks_at_the_trainers_alone():
    old = torch.tensor([[0.5, 1e-7], [0.5, 1e-5]], dtype=F64).log()
    lp = LogProbs(torch.ones(2, 2), old.clone(), old)
    assert preset("veto_probability")(lp).keep.tolist() == [[False, False], [True, True]]
    assert preset("veto")(lp).keep.all()  # the ratio is 1


@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize("head", [5, 9])
def test_score_centering_leaves_no_drift(head, cap):
    """With a constant advantage the expected gradient is 0, enumerated over the vocabulary, where the tail has the
    trainer's proportions; without it, it isn't."""
    g = torch.Generator().manual_seed(3)
    vocab = 9
    theta = torch.randn(vocab, generator=g, dtype=F64).requires_grad_()
    log_pi = theta.log_softmax(-1)
    pi = log_pi.detach().exp()
    noise = 0.6 * torch.randn(head, generator=g, dtype=F64)
    order = pi.argsort(descending=True)
    mu = pi.clone()
    mu[order[:head]] *= noise.exp()
    mu = torch.where(torch.isin(torch.arange(vocab), order[:head]), mu * 0.9 / mu[order[:head]].sum(), 0.0)
    tail = torch.isin(torch.arange(vocab), order[head:])
    mu = torch.where(tail, 0.1 * pi / pi[tail].sum().clamp_min(1e-300), mu) if head < vocab else mu / mu.sum()
    weight = None if cap is None else Weight(Statistic("current/rollout"), high=cap)
    w = torch.ones(vocab, dtype=F64) if weight is None else (pi / mu).clamp_max(cap)
    drift = torch.autograd.grad((mu * w * log_pi).sum(), theta, retain_graph=True)[0]
    score = expected_score(log_pi[order[:head]], mu[order[:head]].log(), weight)
    taken = torch.autograd.grad(score, theta)[0]
    torch.testing.assert_close(taken, drift, rtol=1e-9, atol=1e-12)
    assert drift.abs().max() > 1e-3, "no drift: this case proves nothing"


def test_centering_enters_the_loss_times_the_advantage():
    lp, advantages = batch()
    score = torch.randn(lp.mask.shape, generator=torch.Generator().manual_seed(1), dtype=F64)
    kwargs = {"aggregation": "seq-mean-token-sum", "normalizer": 1.0}
    plain = policy_loss(lp, advantages, "bypass", "reinforce", **kwargs).loss
    centred = policy_loss(lp, advantages, "bypass", "reinforce", centering=score, **kwargs).loss
    expected = (score * advantages[:, None])[lp.mask].sum()
    torch.testing.assert_close(centred - plain, expected)


def test_the_interpolated_proximal_policy_lies_between():
    lp, _ = batch()
    torch.testing.assert_close(lp.interpolated(0.25).old, 0.75 * lp.rollout + 0.25 * lp.current.detach())
    assert torch.equal(lp.interpolated(0.0).old, lp.rollout)
    with pytest.raises(ValueError, match="share=2"):
        lp.interpolated(2.0)


def test_the_optimal_token_baseline_minimises_the_variance():
    """For one token, E[R |s|^2] / E[|s|^2] is the constant with the smallest variance of (R - b) s, by enumeration."""
    pi = torch.tensor([0.6, 0.3, 0.1], dtype=F64)
    reward = torch.tensor([1.0, -2.0, 9.0], dtype=F64)
    count = (pi * 10).round().long()  # a group that holds each token as often as pi says
    rows = torch.arange(3).repeat_interleave(count)
    size = len(rows), 1
    b = optimal_token_baseline(
        reward[rows].view(size), torch.ones(size), pi[rows].log().view(size), pi.square().sum().expand(size),
        torch.zeros(len(rows), dtype=torch.long),
    )  # fmt: skip

    def variance(baseline):
        score = torch.eye(3, dtype=F64) - pi
        g = (reward - baseline)[:, None] * score
        return float((pi[:, None] * g.square()).sum() - (pi @ g).square().sum())

    best = float(b[0, 0])
    at = [variance(best + step) for step in (-0.1, 0.0, 0.1)]
    assert b.unique().numel() == 1
    assert at[1] < min(at[0], at[2])
    assert variance(float((pi * reward).sum())) > at[1] + 1e-3, "the mean would do as well: this case proves nothing"


def test_the_optimal_token_baseline_follows_the_groups_and_lengths():
    g = torch.Generator().manual_seed(0)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0]], dtype=torch.bool)
    returns, old = torch.randn(3, 3, generator=g, dtype=F64), -torch.rand(3, 3, generator=g, dtype=F64)
    square = torch.rand(3, 3, generator=g, dtype=F64)
    weights = torch.rand(3, 3, generator=g, dtype=F64)
    got = optimal_token_baseline(returns, mask, old, square, torch.tensor([0, 0, 1]), weights)
    energy = ((1 - 2 * old.exp() + square) * weights**2 * mask).cumsum(1)
    expected = (returns * energy)[:2].sum(0) / energy[:2].sum(0)
    torch.testing.assert_close(got[:2, :2], expected[None, :2].expand(2, 2))
    assert got[0, 2] == 0  # no other reaches it
    assert not got[2].any()  # alone in its group


def test_a_replayed_mask_scores_the_distribution_that_was_sampled():
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 7, generator=g, dtype=F64, requires_grad=True)
    kept = torch.tensor([[3, 1, -1], [0, 6, 2], [5, -1, -1], [0, -1, 3]])
    log_pi = replay_mask(logits, kept).log_softmax(-1)
    for row, ids in enumerate(kept.tolist()):
        ids = [i for i in ids if i >= 0]
        torch.testing.assert_close(log_pi[row, ids], logits[row, ids].log_softmax(-1))
        assert log_pi[row].exp()[[i for i in range(7) if i not in ids]].sum() < 1e-20
    (grad,) = torch.autograd.grad(log_pi[0, 3], logits)
    assert grad[0, [0, 2, 4, 5, 6]].abs().max() < 1e-20


def test_logits_off_by_at_most_eps_stay_in_the_envelope_and_use_it():
    g = torch.Generator().manual_seed(0)
    z = 3 * torch.randn(4000, 6, generator=g, dtype=F64)
    error = 0.05 * (2 * torch.rand(4000, 6, generator=g, dtype=F64) - 1)
    a, b = z.log_softmax(-1), (z + error).log_softmax(-1)
    bound = envelope(torch.minimum(a, b).exp(), 0.05)
    assert ((a - b).abs() <= bound + 1e-12).all()
    assert ((a - b).abs() / bound).max() > 0.8
    assert not torch.equal(prune_logits(z, 0.1), z)


def test_corrections_are_read_from_plain_data():
    own = from_plain({
        "weight": {"ratio": "old/rollout", "aggregate": "sum", "high": 2.0},
        "gates": [{"ratio": "current/rollout", "kernel": "tv", "low": -0.2, "high": 0.2, "side": "outward"}],
    })  # fmt: skip
    assert own.gates == preset("dppo_tv").gates
    assert own.weight == preset("sequence_tis").weight
    assert from_plain({"preset": "icepop", "high": 3.0}) == preset("icepop", high=3.0)
    for wrong, message in (
        ({"wieght": {}}, "unknown wieght"),
        ({"preset": "tis"}, "choose one of"),
        ({"gates": [{"ratio": "old/rollout", "kernel": "k4", "high": 1}]}, "k4"),
        ({"gates": [{"ratio": "old/rollout", "kernel": "k3", "high": 1, "low": 0.5, "average": True}]}, "upper bound"),
    ):
        with pytest.raises(ValueError, match=message):
            from_plain(wrong)
    assert math.isclose(preset("veto_probability", low=1e-6).gates[0].low, math.log(1e-6))


def test_a_correction_is_told_in_words():
    """Each part of it: ratio, bounds, what becomes of those beyond, and what is dropped on which side."""
    for correction, words in (
        (preset("none"), "leaves the loss as it is"),
        (preset("token_tis"), "multiplies a token's loss by its probability ratio old/rollout, cut at 2"),
        (
            preset("sequence_mis", low=0.5),
            "multiplies a token's loss by its sequence's probability ratio old/rollout, 0 beyond 0.5 and 3",
        ),
        (
            preset("tis_srs_k3_corr"),
            "multiplies a token's loss by its probability ratio old/rollout, cut at 2, and drops sequences where the "
            "mean of k3 of old/rollout is > 0.001",
        ),
        (preset("m2po"), "drops the tokens with the largest k2 of old/rollout until the mean is at most 0.02"),
        (
            Correction(Weight(Statistic("old/rollout"), normalize=True), denominator="kept"),
            "multiplies a token's loss by its probability ratio old/rollout, cut at no bound, over the batch's mean of "
            "it, and divides by what is kept",
        ),
        (preset("dppo_tv"), "drops tokens where the tv of current/rollout is < -0.2 or > 0.2 on A's side"),
        (
            preset("opsm", ratio="current/old"),
            "drops sequences where the mean of k1 of current/old is > 0.0001 and A < 0",
        ),
    ):
        assert in_words(correction) == words
    assert len({in_words(preset(n, **({"ratio": "current/old"} if n == "opsm" else {}))) for n in PRESETS}) > 20
