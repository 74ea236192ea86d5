"""Diagnosis and calibration against a Markov policy whose gradient and chi2 are known exactly."""

import dataclasses
import io
import json
import math
import re
import sys

import numpy as np
import pytest
import torch
from rich.console import Console

from samebits import SamplingParams
from samebits.cli import calibration, mismatch, report
from samebits.correction import (
    PRESETS,
    Correction,
    Diagnosis,
    LogProbs,
    preset,
)
from samebits.correction.calibration import Scores, Traces, calibrate, candidate_grid
from samebits.correction.calibration.alignment import Gradients, compare
from samebits.correction.calibration.verdict import MARGIN
from samebits.correction.diagnose import predicted_chi2
from samebits.integrations.rollouts import Rollout, RolloutFormatError, read_rollouts, write_rollouts

VOCAB, LENGTH, BATCH = 5, 32, 256


class Toy:
    """Token t depends on token t - 1 alone. mu is pi with noise on its logits; the reward is a sum over tokens."""

    def __init__(self, spread, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.theta = torch.randn(VOCAB + 1, VOCAB, generator=g, dtype=torch.float64)
        noise = torch.randn(VOCAB + 1, VOCAB, generator=g, dtype=torch.float64)
        self.log_pi = self.theta.log_softmax(-1)
        self.log_mu = (self.theta + spread * noise).log_softmax(-1)
        self.value = torch.randn(VOCAB, generator=g, dtype=torch.float64)
        self.generator = g

    def expected_return(self, theta):
        p, total = torch.nn.functional.one_hot(torch.tensor(VOCAB), VOCAB + 1).double(), 0.0
        for _ in range(LENGTH):
            tokens = p @ theta.softmax(-1)
            total = total + tokens @ self.value
            p = torch.cat((tokens, torch.zeros(1, dtype=torch.float64)))
        return total

    def gradient(self):
        theta = self.theta.clone().requires_grad_()
        self.expected_return(theta).backward()
        return theta.grad.flatten()

    def chi2(self):
        ratio = (2 * self.log_pi - self.log_mu).exp()
        u = torch.nn.functional.one_hot(torch.tensor(VOCAB), VOCAB + 1).double()
        for _ in range(LENGTH):
            u = torch.cat((u @ ratio, torch.zeros(1, dtype=torch.float64)))
        return float(u.sum()) - 1

    def sample(self, count, exact=False):
        """Traces of `count` sequences from mu, or (exact) from pi, scored by pi."""
        table = self.log_pi if exact else self.log_mu
        previous, tokens = torch.full((count,), VOCAB), []
        seen = []
        for _ in range(LENGTH):
            seen.append(previous)
            previous = torch.multinomial(table.exp()[previous], 1, generator=self.generator)[:, 0]
            tokens.append(previous)
        before, after = torch.stack(seen, 1).flatten(), torch.stack(tokens, 1).flatten()
        one_hot = torch.nn.functional.one_hot
        step = one_hot(after, VOCAB).double() - self.log_pi.exp()[before]
        sketch = (one_hot(before, VOCAB + 1)[:, :, None] * step[:, None, :]).flatten(1)
        rewards = self.value[after].view(count, LENGTH).sum(1)
        advantages = rewards - float(self.expected_return(self.theta))
        mask, offsets = torch.ones(count * LENGTH, dtype=torch.bool), torch.arange(0, count * LENGTH + 1, LENGTH)
        lp = LogProbs(mask, table[before, after], self.log_pi[before, after], offsets=offsets)
        return Traces(lp, advantages, Scores(sketch))


CANDIDATES = {
    "none": Correction(),
    "token_tis@2": preset("token_tis"),
    "sequence_tis@1.2": preset("sequence_tis", high=1.2),
    "sequence_tis@3": preset("sequence_tis", high=3.0),
    "sequence_is": preset("sequence_is"),
    "geo_rs@0.01": preset("geo_rs", low=math.exp(-0.01), high=math.exp(0.01)),
}


def truth(toy, count=60_000):
    """Each candidate's expected cosine with the exact gradient, from its exact target and very many samples."""
    exact, traces = toy.gradient(), toy.sample(count).on_policy()
    cosines = {}
    for name, correction in CANDIDATES.items():
        weights, keep = correction.on_tokens(traces.logprobs, None)
        e = torch.where(keep, weights, 0.0) * traces.advantages[traces.logprobs.segment]
        g = (traces.scores.left.view(count, LENGTH, -1) * e.view(count, LENGTH, 1)).sum(1)
        mean, variance = g.mean(0), g.var(0).sum()
        length = (mean.square().sum() - variance / count + variance / BATCH).sqrt()
        cosines[name] = float(mean @ exact / (exact.norm() * length))
    return cosines


@pytest.mark.parametrize(
    ("spread", "expected"),
    [
        pytest.param(0.02, {"none"}, marks=pytest.mark.slow),
        (0.5, {"token_tis@2", "sequence_tis@3", "sequence_tis@1.2"}),
    ],
)
def test_calibration_recommends_what_the_exact_computation_says(spread, expected):
    """In a clean and in a heavy-tailed regime."""
    toy = Toy(spread)
    cosines = truth(toy)
    best = max(cosines.values())
    good = {name for name, c in cosines.items() if c >= best - 2 * MARGIN}
    result = calibrate(toy.sample(20_000), CANDIDATES, toy.sample(20_000, exact=True), batch_size=BATCH)
    assert result.verdict.recommended in expected & good, (result.verdict.reason, cosines)
    errors = {a.name: a.coefficient_error for a in result.assessments}
    assert errors["token_tis@2"] <= errors["none"] + 0.01
    unbiased = next(a for a in result.assessments if a.name == "sequence_is")
    for a in result.assessments:
        if spread < 0.1 or a is not unbiased:  # its variance is the heavy tail itself: no sample shows it whole
            assert a.alignment.cosine == pytest.approx(cosines[a.name], abs=0.03), a.name
            assert a.alignment.interval[0] - 0.02 <= cosines[a.name] <= a.alignment.interval[1] + 0.02
    if spread < 0.1:
        assert unbiased.alignment.scale == pytest.approx(1.0, abs=0.1)
        assert result.chi2_sequence == pytest.approx(toy.chi2(), rel=0.2)
    else:
        assert toy.chi2() > 5, "not heavy-tailed: this case proves nothing"
        none = next(a for a in result.assessments if a.name == "none")
        assert cosines["none"] < best - MARGIN
        assert none.alignment.direction_interval[0] > 0.1
        assert unbiased.alignment is None
        assert "sum of squares" in unbiased.unestimable or "tail" in unbiased.unestimable


def test_calibration_refuses_when_there_are_too_few_samples_and_says_how_many_would_do():
    toy = Toy(0.5)
    result = calibrate(toy.sample(60), CANDIDATES, toy.sample(60, exact=True), batch_size=BATCH)
    assert result.verdict.recommended is None
    assert "sequences of each kind would do" in result.verdict.reason
    assert result.verdict.needed_sequences > 60
    for count in (250, 1000):  # it never recommends what the exact computation says is clearly worse
        again = calibrate(toy.sample(count), CANDIDATES, toy.sample(count, exact=True), batch_size=BATCH)
        if again.verdict.recommended is not None:
            cosines = truth(toy)
            assert cosines[again.verdict.recommended] > max(cosines.values()) - 4 * MARGIN


def test_calibration_without_exact_rollouts_measures_but_does_not_recommend():
    toy = Toy(0.1)
    result = calibrate(toy.sample(500), CANDIDATES)
    assert result.verdict.recommended is None
    assert "no exact rollouts" in result.verdict.reason
    assert all(a.alignment is None and a.metrics["ess_sequence"] > 0 for a in result.assessments)


def test_calibration_without_gradients_measures_but_does_not_recommend():
    """Sums of coefficients alone would recommend what the exact computation says is worse, on this very toy."""
    toy = Toy(0.5)
    bare = [dataclasses.replace(t, scores=None) for t in (toy.sample(2000), toy.sample(2000, exact=True))]
    result = calibrate(bare[0], CANDIDATES, bare[1])
    assert result.verdict.recommended is None
    assert "no gradients to compare" in result.verdict.reason
    errors = {a.name: a.coefficient_error for a in result.assessments}
    assert errors["token_tis@2"] < errors["none"]


def test_acceptance_is_counted_by_prompt_and_by_the_advantages_sign():
    """Three prompts of four samples: one whole, one that loses its only good sample, one that loses all."""
    d = torch.tensor([0.0, 0, 0, 0, 1, 0, 0, 0, 1, 1, 1, 1], dtype=torch.float64)
    advantages = torch.tensor([1.0, -1, 1, -1, 3, -1, -1, -1, 1, -1, 1, -1])
    rollout = torch.full((12,), -3.0, dtype=torch.float64)
    lp = LogProbs(torch.ones(12), rollout, rollout + d, offsets=torch.arange(13))
    traces = Traces(lp, advantages[:, None], groups=torch.arange(3).repeat_interleave(4))
    (a,) = calibrate(traces, {"trm": preset("trm")}).assessments
    assert (a.accepted_by_group[0], a.accepted_by_group[5], a.accepted_by_group[10]) == (0.0, 0.75, 1.0)
    assert a.groups_without_positives == pytest.approx(2 / 3)
    assert a.metrics["rejected_positive_tokens"] == pytest.approx(3 / 5)
    assert a.metrics["rejected_negative_tokens"] == pytest.approx(2 / 7)


def test_contributions_are_means_of_c_by_sign():
    """C = -(r - 1) A: r = 1.5 lies below 0 for A > 0, above for A < 0; exact rollouts are at 0."""
    rollout = torch.full((4,), -3.0, dtype=torch.float64)
    old = rollout + torch.tensor([1.5, 1.5, 1.0, 1.0], dtype=torch.float64).log()
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0])[:, None]
    traces = Traces(LogProbs(torch.ones(4), rollout, old, offsets=torch.arange(5)), advantages)
    (a,) = calibrate(traces, {"none": Correction()}).assessments
    assert a.contribution_means == pytest.approx((-0.25, 0.25))


def test_the_null_is_what_exact_rollouts_reach_against_exact_ones():
    toy = Toy(0.1)
    result = calibrate(toy.sample(4000), CANDIDATES, toy.sample(4000, exact=True), batch_size=BATCH)
    unbiased = next(a for a in result.assessments if a.name == "sequence_tis@3")
    assert result.null.cosine == pytest.approx(truth(toy)["sequence_is"], abs=0.03)
    assert result.null.interval[0] - 0.02 <= unbiased.alignment.cosine <= result.null.interval[1] + 0.02
    assert all(a.accepted_exact == 1.0 for a in result.assessments), "without staleness no exact sequence is dropped"


def test_log_probs_that_are_the_engines_own_are_refused_and_warned_of(tmp_path):
    """Dumps of bypass mode store the engine's log-probs as the trainer's: their mismatch reads 0."""
    toy = Toy(0.3)
    exact = toy.sample(200, exact=True)
    verdict = calibrate(exact, CANDIDATES, exact).verdict
    assert verdict.recommended is None
    assert "bypass" in verdict.reason
    copied, honest = toy_file(tmp_path / "copied.jsonl", toy, 16, exact=True), toy_file(tmp_path / "a.jsonl", toy, 16)
    (warning,) = mismatch.diagnose(copied, use_tqdm=False).warnings
    assert "bypass" in warning
    assert "--model" in warning
    assert "bypass" in report.page("x", report.diagnosis(mismatch.diagnose(copied, use_tqdm=False)))
    assert mismatch.diagnose(honest, use_tqdm=False).warnings == []


@pytest.mark.parametrize("kind", ["equal rewards", "one group", "one sequence"])
def test_calibration_refuses_degenerate_data(kind):
    toy = Toy(0.3)
    count = 1 if kind == "one sequence" else 200
    sides = [toy.sample(count), toy.sample(count, exact=True)]
    if kind == "equal rewards":
        sides = [dataclasses.replace(t, advantages=torch.zeros(count)) for t in sides]
    if kind == "one group":
        sides = [dataclasses.replace(t, groups=torch.zeros(count, dtype=torch.long)) for t in sides]
    assert calibrate(sides[0], CANDIDATES, sides[1]).verdict.recommended is None


def test_prompts_in_common_are_not_taken_for_agreement():
    """Both sides' groups share a large effect of their prompt, and differ in direction: the cosine is known."""
    g = torch.Generator().manual_seed(0)
    groups, features = 60, 12
    mean, other = torch.randn(2, features, generator=g, dtype=torch.float64)
    other -= mean * (mean @ other) / mean.square().sum()
    tilted = mean + 0.5 * other * mean.norm() / other.norm()
    exact, found = 1 / math.sqrt(1.25), []
    for _ in range(20):
        prompt = 4 * torch.randn(groups, features, generator=g, dtype=torch.float64)
        noise = torch.randn(2, groups, features, generator=g, dtype=torch.float64)
        ours, theirs = prompt + tilted + 0.3 * noise[0], prompt + mean + 0.3 * noise[1]
        sides = Gradients(ours[:, None]), Gradients(theirs[:, None])
        rows = [compare(sides[:1], sides[1], groups, p, 1e12, 20, 0).rows[0].cosine for p in (True, False)]
        found.append(rows)
    paired, independent = np.median(np.array(found), axis=0)
    assert paired == pytest.approx(exact, abs=0.05)
    assert independent > 1, "the correction corrects nothing here"


def test_a_weight_that_is_zero_outside_its_bounds_is_a_rejection_in_the_report():
    traces = Toy(0.3).sample(200)
    (a,) = calibrate(traces, {"mis": preset("sequence_mis", high=1e-8)}).assessments
    assert {a.metrics[f"rejected_{what}"] for what in ("tokens", "sequences", "advantage")} == {1.0}
    assert a.accepted_by_length == [0.0] * 10


def test_rescoring_shares_prefixes_and_changes_no_bit(checkpoint):
    from samebits.kernels import ops
    from samebits.trainer import exact_model, rescore, token_logprobs

    model = exact_model(checkpoint("llama"))
    g = np.random.default_rng(0)
    long, other = g.integers(0, 1000, 100).tolist(), g.integers(0, 1000, 40).tolist()
    prompts = [long, long, long[:70] + other, other, long[:64], [7], long[:33], long]
    pairs = [
        (prompt, g.integers(0, 1000, n).tolist()) for prompt, n in zip(prompts, (5, 40, 1, 9, 0, 3, 33, 2), strict=True)
    ]
    params = SamplingParams(temperature=0.7, top_p=0.9)
    for budget in (4096, 150):
        for (prompt, completion), (scores, best) in zip(pairs, rescore(model, pairs, params, budget), strict=True):
            (alone,), (top,) = token_logprobs(model, [prompt + completion], params, return_argmax=True)
            assert torch.equal(scores, alone[len(prompt) :])
            assert torch.equal(best, top[len(prompt) :])
    shared = ops.packed_layout([40, 8], 1, torch.device("cpu"), [0, 32])
    assert shared.block_tables.tolist() == [0, 1, 0, 2]
    assert shared.positions.tolist() == [*range(40), *range(32, 40)]
    swapped = [([*other[:32], 5], [6, 7]), ([*long[:32], 5], [6, 7])]  # what a mistaken prefix would do
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[rescore.__module__], "_common_prefix", lambda a, b: 32)
        mistaken = [scores for scores, _ in rescore(model, swapped)]
    assert not torch.equal(mistaken[1], [scores for scores, _ in rescore(model, swapped)][1])


def test_the_grid_has_each_family_at_thresholds_that_decide_something():
    traces = Toy(0.3).sample(2000)
    grid = candidate_grid(traces.logprobs)
    assert {n.partition("@")[0] for n in grid} >= {
        "none",
        "token_tis",
        "sequence_tis",
        "icepop",
        "geo_rs",
        "trm",
        "opsm",
        "veto",
    }
    result = calibrate(traces, grid, Toy(0.3).sample(2000, exact=True), resamples=50)
    shares = {a.name: 1 - a.metrics["rejected_sequences"] for a in result.assessments if a.name.startswith("geo_rs@")}
    assert sorted(round(s, 2) for s in shares.values()) == [0.5, 0.75, 0.9, 0.99]
    assert all(len(a.accepted_by_length) == 10 for a in result.assessments)
    assert not any("tis" in name or "mis" in name for name in candidate_grid(traces.logprobs, "bypass"))


def test_gates_on_length_show_in_the_acceptance_by_length():
    """Geo-RS drops short answers: the mean of few tokens spreads wider."""
    g = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 200, (2000,), generator=g)
    offsets = torch.cat((torch.zeros(1, dtype=torch.long), lengths.cumsum(0)))
    total = int(lengths.sum())
    rollout = torch.full((total,), -1.0, dtype=torch.float64)
    lp = LogProbs(
        torch.ones(total, dtype=torch.bool), rollout, rollout + 0.01 * torch.randn(total, generator=g), offsets=offsets
    )
    gate = {"geo_rs": preset("geo_rs")}
    (a,) = calibrate(Traces(lp, torch.randn(2000, generator=g)), gate).assessments
    assert a.accepted_by_length[0] < 0.5 < a.accepted_by_length[-1]


# --- diagnosis ------------------------------------------------------------------------------------------------------


def test_diagnosis_against_numpy():
    lp = Toy(0.3).sample(300).logprobs
    diagnosis = Diagnosis()
    diagnosis.add(lp)
    s = diagnosis.summary()
    d = (lp.old - lp.rollout).numpy()
    rho, sequences = np.exp(d), d.reshape(300, LENGTH)
    rho_seq = np.exp(sequences.sum(1))
    assert (s["tokens"], s["sequences"], s["mean_length"]) == (300 * LENGTH, 300, LENGTH)
    assert s["mean_abs"] == pytest.approx(np.abs(d).mean())
    assert s["max_abs"] == pytest.approx(np.abs(d).max())
    assert s["k1"] == pytest.approx(-d.mean())
    assert s["k2"] == pytest.approx((d**2 / 2).mean())
    assert s["k3"] == pytest.approx((rho - 1 - d).mean())
    assert s["chi2_token"] == pytest.approx((rho**2).mean() / rho.mean() ** 2 - 1)
    assert s["chi2_sequence"] == pytest.approx((rho_seq**2).mean() / rho_seq.mean() ** 2 - 1)
    assert s["ess_sequence"] == pytest.approx(rho_seq.sum() ** 2 / (rho_seq**2).sum() / 300)
    assert s["perplexity_below"] == pytest.approx(np.exp(-lp.rollout.view(300, -1).mean(1).numpy()).mean())
    assert s["perplexity_ratio"] == pytest.approx(np.exp(-sequences.mean(1)).mean())
    for q, value in s["quantiles"].items():
        assert value == pytest.approx(np.quantile(np.abs(d), float(q)), rel=0.08)
    for key in ("by_probability", "by_position", "by_length"):
        assert sum(row["tokens"] for row in s[key]) == 300 * LENGTH
        assert sum(row["tokens"] * row["mean_abs"] for row in s[key]) == pytest.approx(np.abs(d).sum())


def test_diagnosis_in_parts_reduced_over_ranks_is_that_of_the_whole():
    lp = Toy(0.3).sample(100).logprobs
    cut = 40 * LENGTH
    first = LogProbs(lp.mask[:cut], lp.rollout[:cut], lp.old[:cut], offsets=lp.offsets[:41])
    second = LogProbs(lp.mask[cut:], lp.rollout[cut:], lp.old[cut:], offsets=lp.offsets[40:] - cut)
    whole, left, right = Diagnosis(), Diagnosis(), Diagnosis()
    whole.add(lp)
    left.add(first)
    right.add(second)
    of_left = []
    left.all_reduce(lambda tensor, how: of_left.append(tensor) or tensor)
    others = iter(of_left)
    right.all_reduce(lambda t, how: t + next(others) if how == "sum" else torch.maximum(t, next(others)))
    assert json.dumps(rounded(right.summary())) == json.dumps(rounded(whole.summary()))


def rounded(value):
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    if isinstance(value, list):
        return [rounded(v) for v in value]
    return float(f"{value:.9g}") if isinstance(value, float) else value


def test_exact_rollouts_are_exactly_zero_everywhere(checkpoint, tmp_path):
    """The engine's own rollouts, re-scored by the trainer: the null of every statistic."""
    from samebits import LLM
    from samebits.trainer import exact_model

    params = SamplingParams(n=4, temperature=0.7, top_p=0.95, max_tokens=24, seed=5)
    outputs = LLM(checkpoint("llama"), kv_cache_memory_bytes=2**22).generate(
        [[5, 6, 7], [900, 3]], params, use_tqdm=False
    )
    path = tmp_path / "exact.jsonl"
    write_rollouts(path, (
        Rollout(
            np.array(c.token_ids), np.array(c.logprobs), np.array(o.prompt_token_ids),
            reward=float(c.index), group=o.request_id,
        )
        for o in outputs for c in o.completions
    ))  # fmt: skip
    result = mismatch.diagnose(path, exact_model(checkpoint("llama")), params, use_tqdm=False)
    s = result.summary
    assert s["tokens"] == sum(len(c.token_ids) for o in outputs for c in o.completions)
    for key in ("mean_abs", "max_abs", "k1", "k2", "k3", "chi2_token", "chi2_sequence", "mean_probability_gap"):
        assert s[key] == 0.0, key
    assert (s["exact"], s["ess_token"], s["ess_sequence"], s["perplexity_ratio"]) == (1.0, 1.0, 1.0, 1.0)
    assert set(s["quantiles"].values()) == {0.0}
    model = exact_model(checkpoint("llama"))
    traces = Traces(
        mismatch.packed(list(mismatch.scored(read_rollouts(path), model, params)), "reference"), torch.ones(8)
    )
    traces = traces.on_policy()
    extra = {"opsm": {"ratio": "current/rollout"}}
    for name, build in PRESETS.items():
        if name == "veto_probability":  # unlikely tokens are no mismatch
            continue
        correction = build(**extra.get(name, {}))
        got = correction(traces.logprobs, traces.advantages)
        assert got.weights.eq(1).all(), name
        assert got.keep.all(), name


def test_a_mismatched_engine_shows_in_context_and_with_flips(checkpoint, tmp_path):
    from samebits.trainer import exact_model, rescore

    model = exact_model(checkpoint("llama"))
    (scores, best), *_ = rescore(model, [([5, 6], [7, 8, 9, 10])])
    wrong = scores.double().numpy().copy()
    wrong[2] -= 0.5
    tops = best.numpy().copy()
    tops[1] = (tops[1] + 1) % 1001
    path = tmp_path / "rollouts.jsonl"
    write_rollouts(path, [Rollout(np.array([7, 8, 9, 10]), wrong, np.array([5, 6]), top_token_ids=tops)])
    result = mismatch.diagnose(path, model, use_tqdm=False)
    assert result.warnings == []
    write_rollouts(path, [Rollout(np.array([7, 8, 9, 10]), wrong, np.array([5, 6]), old=wrong, top_token_ids=tops)])
    result = mismatch.diagnose(path, model, use_tqdm=False)
    assert "bypass" in result.warnings[0]
    assert result.trainer_gap is None
    assert result.summary["argmax_flips"] == 0.25
    assert result.summary["exact"] == 0.75
    worst = result.worst[0]
    assert worst["abs"] == pytest.approx(0.5, rel=1e-6)
    assert (worst["token_id"], worst["position"], worst["context"]) == (9, 2, [5, 6, 7, 8])
    assert worst["source"].endswith("rollouts.jsonl:1")


def test_what_is_missing_is_named_with_its_line(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    rollout = Rollout(np.array([7, 8]), np.array([-1.0, -2.0]))
    write_rollouts(path, [rollout])
    with pytest.raises(
        RolloutFormatError, match=r"rollouts.jsonl:1: no trainer's log-probs; expected old_logprobs, or a --model"
    ):
        mismatch.diagnose(path, use_tqdm=False)
    rollout.old = np.array([-1.0, -2.5])
    write_rollouts(path, [rollout])
    assert mismatch.diagnose(path, use_tqdm=False).summary["max_abs"] == 0.5
    with pytest.raises(RolloutFormatError, match=r"rollouts.jsonl:1: no advantages and no reward"):
        calibration.calibrate_files(path, None)
    path.write_text("")
    with pytest.raises(ValueError, match="no rollouts"):
        calibration.calibrate_files(path, None)
    with pytest.raises(ValueError, match=r"rollouts.jsonl: no valid tokens"):
        mismatch.diagnose(path, use_tqdm=False)


def toy_file(path, toy, count, exact=False):
    """Groups of 8; the toy's tokens stand for token ids."""
    traces = toy.sample(count, exact)
    lp = traces.logprobs
    rows = slice_rows(lp)
    write_rollouts(path, (
        Rollout(np.zeros(LENGTH, int), mu, old=old, advantages=np.full(LENGTH, a), group=str(i // 8))
        for i, (mu, old, a) in enumerate(zip(rows[0], rows[1], traces.advantages.tolist(), strict=True))
    ))  # fmt: skip
    return path


def slice_rows(lp):
    return [t.view(-1, LENGTH).numpy() for t in (lp.rollout, lp.old)]


def test_reports_are_self_contained_pages(tmp_path):
    toy = Toy(0.3)
    engine, exact = (
        toy_file(tmp_path / "engine.jsonl", toy, 400),
        toy_file(tmp_path / "exact.jsonl", toy, 400, exact=True),
    )
    page = report.page("Mismatch <here>", report.diagnosis(mismatch.diagnose(engine, use_tqdm=False)))
    found = calibration.calibrate_files(engine, exact)
    result = found.result
    assert result.verdict.recommended is None  # no gradients in these files
    parts = report.calibration(found, mismatch.snippets("decoupled", found.candidates["token_tis@2"]))
    second = report.page("Calibration", parts)
    assert "Mismatch &lt;here&gt;" in page
    assert "rollout_is" in second
    for text in (page, second):
        assert "<svg" in text
        assert not re.search(r"(src|href)=.http", text)
        assert text.count("<table>") == text.count("</table>") > 0
    console = Console(width=200, record=True, file=io.StringIO())
    report.show(console, parts)
    shown, text = console.export_text(), report.markdown(parts)
    for a in result.assessments:
        assert a.name in text
    assert "none" in shown
    assert "![What does each throw away?](kept.png)" in text


def test_rollouts_of_the_toy_survive_the_file(tmp_path):
    toy = Toy(0.3)
    path = toy_file(tmp_path / "a.jsonl", toy, 16)
    assert len({r.group for r in read_rollouts(path)}) == 2
    assert mismatch.diagnose(path, use_tqdm=False).summary["tokens"] == 16 * LENGTH
    assert predicted_chi2(0.0, 100) == 0
