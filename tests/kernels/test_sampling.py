"""Draws follow the distribution that is reported, filters keep what they say, nobody touches a neighbour's token."""

import importlib
import math

import numba
import numpy as np
import pytest
import torch

from samebits import LLM, SamplingParams
from samebits.kernels import ops
from samebits.trainer import exact_model, token_logprobs

kernel = importlib.import_module("samebits.kernels.cpu.sampling")


def called(callee):
    """A function of kernels, which are all that can call it, as one that Python calls."""

    @numba.njit(error_model="numpy")
    def call(*args):
        return callee(*args)

    return call


exp = called(importlib.import_module("samebits.kernels.cpu.elementwise").exp)
uniform, draw_at, sum_of_groups = called(kernel.uniform), called(kernel._draw), called(kernel._sum)

VOCAB = 301  # crosses a group of partial sums, no multiple of anything
FILTERS = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.7},
    {"top_k": 7},
    {"top_p": 0.8},
    {"min_p": 0.05},
    {"temperature": 1.3, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
]


pytestmark = pytest.mark.usefixtures("one_thread")


def logits_row(seed=0, vocab=VOCAB, scale=2.0):
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * scale


def row_params(count, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    return ops.RowParams.repeat(count, temperature, top_k, top_p, min_p)


def draw(row, count, seeds=0, samples=0, positions=0, banned=(), **setting):
    """`count` draws from one row of logits -> tokens [count]; a counter is a number or one per draw."""
    params = row_params(count, **setting)
    params.masks, params.mask_rows = ops.stack_masks([ops.mask_without(banned, len(row))] * count)
    counters = [
        np.broadcast_to(np.asarray(c, t), count).copy() for c, t in ((seeds, "u8"), (samples, "i8"), (positions, "i8"))
    ]
    return ops.sample(row.repeat(count, 1), params, np.full(count, -1), *counters).tokens.numpy()


def score(row, banned=(), **setting):
    """(log-prob of every token [V], threshold) of one row of logits."""
    vocab = len(row)
    params = row_params(vocab, **setting)
    params.masks, params.mask_rows = ops.stack_masks([ops.mask_without(banned, vocab)] * vocab)
    _, scores, thresholds = ops.sample(row.repeat(vocab, 1), params, np.arange(vocab))
    return scores.logprob, float(thresholds[0])


def reference(row, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The distribution in fp64, by sorting; ties at an edge stay in."""
    z = (row / (temperature or 1.0)).double()
    p = z.softmax(0)
    if top_k and temperature:
        p = torch.where(z >= z.sort(descending=True).values[top_k - 1], p, 0.0)
    if top_p < 1 and temperature:
        q, order = (p / p.sum()).sort(descending=True)
        edge = z[order[int((q.cumsum(0) < top_p).sum())]]
        p = torch.where(z >= edge, p, 0.0)
    if min_p and temperature:
        p = torch.where(p >= min_p * p.max(), p, 0.0)
    return p / p.sum()


def p_value(counts, probabilities):
    """Of Pearson's chi-square, by the cube-root normal approximation (Wilson & Hilferty, 1931)."""
    expected = np.asarray(probabilities, np.float64) * counts.sum()
    rare = expected < 10
    expected = np.append(expected[~rare], expected[rare].sum())
    counts = np.append(counts[~rare], counts[rare].sum())
    counts, expected = counts[expected > 0], expected[expected > 0]
    statistic, free = ((counts - expected) ** 2 / expected).sum(), len(counts) - 1
    deviation = ((statistic / free) ** (1 / 3) - (1 - 2 / (9 * free))) / math.sqrt(2 / (9 * free))
    return math.erfc(deviation / math.sqrt(2)) / 2


def assert_follows(tokens, probabilities):
    counts = np.bincount(tokens, minlength=len(probabilities))
    assert not counts[np.asarray(probabilities) == 0].any(), "a token outside the distribution was drawn"
    assert 1e-4 < p_value(counts, probabilities) < 1 - 1e-4


# --- draws follow the distribution ------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", FILTERS, ids=str)
def test_samples_of_a_group_follow_the_distribution(setting):
    row = logits_row(1)
    tokens = draw(row, 60_000, seeds=11, samples=np.arange(60_000), positions=5, **setting)
    assert_follows(tokens, reference(row, **setting))


@pytest.mark.parametrize("counter", ["seeds", "samples", "positions"])
def test_draws_along_each_counter_follow_the_distribution(counter):
    row = logits_row(2)
    for first in (0, 2**40 - 7):
        tokens = draw(row, 40_000, **{counter: np.arange(40_000) + first})
        assert_follows(tokens, reference(row))


def test_negative_control_chi_square_sees_a_slightly_wrong_temperature():
    row = logits_row(1)
    tokens = draw(row, 60_000, seeds=11, samples=np.arange(60_000), positions=5)
    assert p_value(np.bincount(tokens, minlength=VOCAB), reference(row, temperature=1.05)) < 1e-4


def test_draws_with_bans_follow_the_distribution_without_the_banned_tokens():
    row = logits_row(3)
    banned = [int(row.argmax()), 0, VOCAB - 1]
    p = reference(row)
    p[banned] = 0
    tokens = draw(row, 40_000, seeds=1, samples=np.arange(40_000), banned=banned)
    assert_follows(tokens, p / p.sum())


@pytest.mark.parametrize("setting", [*FILTERS, {"temperature": 0.0}], ids=str)
def test_reported_logprobs_are_those_of_the_distribution_drawn_from(setting):
    row = logits_row(4)
    logprobs, _ = score(row, **setting)
    expected = reference(row, **setting)
    assert torch.equal(logprobs > -math.inf, expected > 0)
    kept = expected > 0
    assert (logprobs[kept] - expected[kept].log()).abs().max() < 1e-6
    assert abs(float(logprobs.exp().sum()) - 1) < 1e-6


def test_the_reported_entropy_is_that_of_the_distribution():
    for setting in FILTERS:
        row = logits_row(5)
        scores = ops.sample(row[None], row_params(1, **setting), np.array([0])).scores
        p = reference(row, **setting)
        assert abs(float(scores.entropy[0]) + float(torch.xlogy(p, p).sum())) < 1e-6


# --- random numbers ---------------------------------------------------------------------------------------------------


def uniforms(count, seed=0, sample=0, position=0, along="sample"):
    at = {"seed": seed, "sample": sample, "position": position}
    result = []
    for i in range(count):
        now = {**at, along: at[along] + i}
        result.append(uniform(np.uint64(now["seed"]), np.int64(now["sample"]), np.int64(now["position"])))
    return np.array(result)


@pytest.mark.parametrize("along", ["seed", "sample", "position"])
def test_uniform_is_well_distributed_in_0_1_along_each_counter(along):
    u = uniforms(40_000, seed=3, along=along)
    assert (u >= 0).all()
    assert (u < 1).all()
    assert len(set(u)) == len(u)
    assert 1e-4 < p_value(np.bincount((u * 128).astype(int), minlength=128), np.full(128, 1 / 128)) < 1 - 1e-4
    pairs = (u[:-1:2] * 12).astype(int) * 12 + (u[1::2] * 12).astype(int)
    assert 1e-4 < p_value(np.bincount(pairs, minlength=144), np.full(144, 1 / 144)) < 1 - 1e-4, "successive ones depend"
    last_bits = (u * 2.0**53).astype(np.uint64) % np.uint64(16)
    assert 1e-4 < p_value(np.bincount(last_bits.astype(int), minlength=16), np.full(16, 1 / 16)) < 1 - 1e-4


def test_uniform_uses_all_bits_of_all_three_counters():
    points = {
        (0, 0, 0),
        (2**64 - 1, 0, 0),
        (2**63, 0, 0),
        (1, 2, 3),
        (1, 3, 2),
        (2, 1, 3),
        (3, 2, 1),
        (2, 3, 1),
        (3, 1, 2),
    }
    points |= {(2**b, 0, 0) for b in range(64)} | {(0, 2**b, 0) for b in range(31)} | {(0, 0, 2**b) for b in range(31)}
    values = {uniform(np.uint64(a), np.int64(b), np.int64(c)) for a, b, c in points}
    assert len(values) == len(points)


BELOW_ONE = float(np.nextafter(1.0, 0.0))


def group_sums(weights, z, threshold):
    """The sum of the weights of tokens that reach the threshold, and those of its groups, as a draw takes them."""
    sums = np.empty(-(-z.size // kernel._GROUP))
    return sum_of_groups(weights, z, threshold, sums, np.empty(32)), sums


@pytest.mark.parametrize("u", [BELOW_ONE, 1.0, 1 - 2**-52])
def test_u_close_to_1_yields_a_token_of_the_distribution(u):
    """u = 1 makes an infinite Gumbel (SGLang #25106)."""
    rng = np.random.default_rng(0)
    for case in range(300):
        z = rng.normal(size=int(rng.integers(1, 700))).astype(np.float32) * 8
        z[rng.random(z.size) < 0.3] = -np.inf  # weightless tokens, the last among them more often than not
        z[rng.integers(z.size)] = 0.0
        weights = np.exp(z - z.max())
        threshold = np.float32(-np.inf) if case % 2 else np.sort(z)[-min(5, int((z > -np.inf).sum()))]
        total, sums = group_sums(weights, z, threshold)
        token = draw_at(weights, z, threshold, u, total, sums)
        assert 0 <= token < z.size
        assert weights[token] > 0
        assert z[token] >= threshold
        if u == 1.0:
            assert token == np.flatnonzero((weights > 0) & (z >= threshold))[-1]


def test_u_of_0_yields_the_first_token_that_has_weight():
    z = np.array([-np.inf, -np.inf, -3.0, 0.0], np.float32)
    weights = np.exp(z)
    for threshold, first in ((-np.inf, 2), (-1.0, 3)):
        total, sums = group_sums(weights, z, np.float32(threshold))
        assert draw_at(weights, z, np.float32(threshold), 0.0, total, sums) == first


def test_a_draw_inverts_the_cumulative_distribution():
    rng = np.random.default_rng(1)
    z = rng.normal(size=700).astype(np.float32)
    weights = np.exp(z)
    cumulative = weights.astype(np.float64).cumsum()
    unsure, (_, sums) = 0, group_sums(weights, z, np.float32(-np.inf))
    for u in [*rng.random(2000), *((cumulative[[254, 255, 256, 511, 512]] / cumulative[-1]) + 1e-9)]:
        expected = int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))
        if np.abs(cumulative - u * cumulative[-1]).min() < 1e-10:
            unsure += 1
            continue
        assert draw_at(weights, z, np.float32(-np.inf), u, cumulative[-1], sums) == expected
    assert unsure < 5


# --- filters ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("k", [1, 2, 50, VOCAB - 1])
def test_top_k_threshold_is_the_kth_largest_value(k, temperature):
    for seed in range(5):
        row = logits_row(seed)
        logprobs, threshold = score(row, top_k=k, temperature=temperature)
        z = row / temperature
        assert threshold == float(z.topk(k).values[-1])
        assert torch.equal((logprobs > -math.inf).nonzero().flatten(), z.topk(k).indices.sort().values)


@pytest.mark.parametrize("k", [0, -1, VOCAB, VOCAB + 5])
def test_a_top_k_that_keeps_everything_is_off(k):
    row = logits_row(6)
    assert torch.equal(score(row, top_k=k)[0], score(row)[0])


@pytest.mark.parametrize(
    "row",
    [[-1.0, -2.0, -3.0], [0.0, -0.0, -1.0], [1e-42, 0.0, -1e-42], [3e38, -3e38, 0.0], [-5e-41, -1e-45, 1.0]],
    ids=str,
)
def test_top_k_orders_all_kinds_of_floats(row):
    row = torch.tensor(row)
    for k in (1, 2):
        assert score(row, top_k=k)[1] == float(row.topk(k).values[-1])


@pytest.mark.parametrize("top_k", [0, 30])
@pytest.mark.parametrize("top_p", [1e-6, 0.1, 0.5, 0.8, 0.95, 0.999])
def test_top_p_keeps_the_smallest_set_that_reaches_the_mass(top_p, top_k):
    sure = 0
    for seed in range(10):
        row = logits_row(seed)
        p = row.double().softmax(0)
        p, order = p.sort(descending=True)
        if top_k:
            p, order = p[:top_k] / p[:top_k].sum(), order[:top_k]
        mass = p.cumsum(0)
        if (mass - top_p).abs().min() < 1e-6:
            continue
        sure += 1
        smallest = int((mass < top_p).sum()) + 1
        kept = (score(row, top_p=top_p, top_k=top_k)[0] > -math.inf).nonzero().flatten()
        assert torch.equal(kept, order[:smallest].sort().values)
    assert sure >= 8


def edges_by_trying(z, top_k, top_p):
    """The threshold of tempered logits [V]: every logit is tried as the edge, its mass by the kernel's own sum."""
    edges, edge = np.unique(z), -np.inf
    if 0 < top_k < len(z):
        edge = max(e for e in edges if (z >= e).sum() >= top_k)
    if top_p < 1:
        with np.errstate(over="ignore"):
            weights = np.array([exp(x) for x in z - z.max()], np.float32)
        mass = top_p * group_sums(weights, z, np.float32(edge))[0]
        edge = max(e for e in edges if e >= edge and group_sums(weights, z, e)[0] >= mass)
    return float(edge)


HARD_ROWS = {  # name -> fp32 [V] logits
    "normal": logits_row(1),
    "flat": logits_row(2, scale=1e-3),
    "wide": logits_row(3, scale=60.0),
    "equal": torch.zeros(VOCAB),
    "two values": torch.arange(VOCAB).remainder(2).float(),
    "ties": logits_row(4).mul(4).round().div(4),
    "masked": torch.where(torch.arange(VOCAB) < 290, -torch.inf, logits_row(5)),
    "far tail": torch.cat((torch.zeros(1), -40 - logits_row(6, VOCAB - 1).abs() * 30)),
    "signed zeros": torch.tensor([0.0, -0.0, 1.0, -1.0] * 75 + [0.0]),
    "tiny": logits_row(7, scale=1e-44),
    "huge": logits_row(8, scale=1.0).sign() * 3e38,
    "bins' edges": torch.arange(VOCAB) / -64.0,
}


@pytest.mark.parametrize("row", HARD_ROWS)
@pytest.mark.parametrize("top_k", [0, 1, 5, 12, 150, VOCAB - 1])
def test_a_threshold_is_the_one_that_trying_every_logit_finds(row, top_k):
    z = HARD_ROWS[row]
    for top_p in (1.0, 1e-12, 0.3, 0.5, 0.9, 0.999, 1 - 2**-52):
        threshold = ops.sample(z[None], row_params(1, top_k=top_k, top_p=top_p), np.full(1, -1)).thresholds
        assert float(threshold) == edges_by_trying(z.numpy(), top_k, top_p), top_p


@pytest.mark.parametrize("min_p", [1e-6, 0.01, 0.3, 1.0])
def test_min_p_keeps_the_tokens_that_reach_its_share_of_the_most_probable(min_p):
    for seed in range(10):
        row = logits_row(seed)
        p = row.double().softmax(0)
        kept = score(row, min_p=min_p)[0] > -math.inf
        clear = (p / (min_p * p.max())).log().abs() > 1e-5
        assert torch.equal(kept[clear], (p >= min_p * p.max())[clear])
        assert kept[row.argmax()]


@pytest.mark.parametrize("setting", FILTERS[3:], ids=str)
def test_tokens_outside_the_filters_get_minus_infinity_and_are_never_drawn(setting):
    row = logits_row(7)
    outside = (reference(row, **setting) == 0).numpy()
    assert outside.any()
    assert (score(row, **setting)[0][torch.from_numpy(outside)] == -math.inf).all()
    drawn = np.unique(draw(row, 20_000, seeds=np.arange(20_000), **setting))
    assert not outside[drawn].any()


@pytest.mark.parametrize(
    ("row", "setting", "kept"),
    [
        ([3.0, 2.0, 2.0, 2.0, 1.0], {"top_k": 2}, [0, 1, 2, 3]),
        ([2.0, 3.0, 3.0, 1.0], {"top_k": 1}, [1, 2]),
        ([0.0, 0.0, 0.0, 0.0], {"top_p": 0.3}, [0, 1, 2, 3]),
        ([5.0, 1.0, 1.0, -9.0], {"top_p": 0.97}, [0, 1, 2]),
        ([4.0, 4.0, 3.0], {"min_p": 1.0}, [0, 1]),
        ([4.0, 4.0, 3.0], {"top_p": 0.01}, [0, 1]),
    ],
)
def test_ties_at_a_filters_edge_stay_in(row, setting, kept):
    logprobs, _ = score(torch.tensor(row), **setting)
    assert (logprobs > -math.inf).nonzero().flatten().tolist() == kept
    assert set(draw(torch.tensor(row), 4000, seeds=np.arange(4000), **setting)) == set(kept)


# --- greedy and bans --------------------------------------------------------------------------------------------------


def test_greedy_takes_the_most_probable_token_and_the_lowest_id_on_ties():
    assert set(draw(torch.tensor([1.0, 3.0, 2.0, 3.0, 3.0]), 50, seeds=np.arange(50), temperature=0.0)) == {1}
    for seed in range(20):
        row = logits_row(seed).round()  # many ties
        expected = int((row == row.max()).nonzero()[0])
        assert draw(row, 1, temperature=0.0)[0] == expected


def test_greedy_ignores_filters_and_reports_temperature_1():
    row = logits_row(8)
    everything = score(row, temperature=0.0, top_k=1, top_p=0.1, min_p=0.5)[0]
    assert torch.equal(everything, score(row)[0])


@pytest.mark.parametrize("setting", [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 0.01}, {"min_p": 1.0}], ids=str)
def test_a_banned_token_makes_room_for_the_next_one(setting):
    row = logits_row(9)
    best, second = row.topk(2).indices.tolist()
    assert set(draw(row, 100, seeds=np.arange(100), banned=[best], **setting)) == {second}
    logprobs, _ = score(row, banned=[best], **setting)
    assert logprobs[best] == -math.inf
    if setting != {"temperature": 0.0}:
        assert logprobs[second] == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 150, VOCAB - 1])
@pytest.mark.parametrize("setting", [{}, {"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.8}], ids=str)
def test_a_logit_that_is_not_finite_is_reported_as_nan(setting, at, bad):
    rows = logits_row(10).repeat(2, 1)
    rows[1, at] = bad
    sampled = ops.sample(rows, row_params(2, **setting), np.array([-1, -1]))
    scores = torch.stack(sampled.scores)
    assert ((sampled.tokens >= 0) & (sampled.tokens < VOCAB)).all(), "a step under way may read it"
    assert scores[:, 0].isfinite().all()
    assert scores[:, 1].isnan().any()


# --- neighbours -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_of_the_kernel_never_depends_on_its_neighbours(threads):
    rng = np.random.default_rng(0)
    count = 60
    logits = torch.stack([logits_row(i, scale=1 + i % 4) for i in range(count)])
    settings = [[*FILTERS, {"temperature": 0.0}][i] for i in rng.integers(len(FILTERS) + 1, size=count)]
    banned = [rng.integers(VOCAB, size=int(n)).tolist() for n in rng.integers(4, size=count)]
    seeds, samples, positions = (
        rng.integers(2**63, size=count).astype("u8"),
        rng.integers(9, size=count),
        rng.integers(500, size=count),
    )

    def run(index):
        each = [row_params(1, **settings[i]) for i in index]
        params = ops.RowParams(
            *(np.concatenate([getattr(p, name) for p in each]) for name in ("temperature", "top_k", "top_p", "min_p")),
            *ops.stack_masks([ops.mask_without(banned[i], VOCAB) if banned[i] else None for i in index]),
        )
        counters = seeds[index], samples[index], positions[index]
        tokens, scores, thresholds = ops.sample(logits[index], params, np.full(len(index), -1), *counters)
        return tokens, torch.stack(scores, 1), thresholds

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole = run(list(range(count)))
        alone = [run([i]) for i in range(count)]
        order = rng.permutation(count).tolist()
        mixed = run(order)
    finally:
        torch.set_num_threads(before)
    for i, one in enumerate(alone):
        at = order.index(i)
        for a, b, c in zip(whole, one, mixed, strict=True):
            assert np.array_equal(np.asarray(a)[i], np.asarray(b)[0])
            assert np.array_equal(np.asarray(a)[i], np.asarray(c)[at])


def pairs(output):
    return [(c.token_ids, c.logprobs) for c in output.completions]


@pytest.fixture
def llm(checkpoint):
    return LLM(checkpoint("llama"), kv_cache_memory_bytes=2**22)


PROMPT = [17, 900, 3, 44]


def test_a_neighbours_parameters_never_change_a_token(llm):
    """Neighbours with different sampling parameters change your token (SGLang #35697) or crash the loop (VeXact)."""
    mine = SamplingParams(temperature=0.9, top_k=50, max_tokens=12, seed=5)
    alone = llm.generate(PROMPT, mine, use_tqdm=False)[0]
    neighbours = [
        SamplingParams(
            **setting, max_tokens=9, seed=seed, logprobs=seed or None, raw_logprobs=bool(seed), min_tokens=seed
        )
        for seed, setting in enumerate([*FILTERS, {"temperature": 0.0}])
    ]
    for place in (0, 4, len(neighbours)):
        params = [*neighbours[:place], mine, *neighbours[place:]]
        outputs = llm.generate([PROMPT] * len(params), params, use_tqdm=False)
        assert pairs(outputs[place]) == pairs(alone)


def test_samples_of_a_group_differ(llm):
    for seed in (None, 0, 7):
        params = SamplingParams(n=8, temperature=5.0, max_tokens=12, ignore_eos=True, seed=seed)
        output = llm.generate(PROMPT, params, use_tqdm=False)[0]
        assert [c.index for c in output.completions] == list(range(8))
        assert len({tuple(c.token_ids) for c in output.completions}) == 8


def test_an_unset_seed_differs_from_request_to_request(llm):
    """A constant default seed clones every sample of a group (UniRL #208)."""
    params = SamplingParams(temperature=5.0, max_tokens=12, ignore_eos=True)
    outputs = llm.generate([PROMPT] * 4, params, use_tqdm=False) + llm.generate([PROMPT] * 4, params, use_tqdm=False)
    assert len({tuple(o.completions[0].token_ids) for o in outputs}) == 8


def test_two_runs_with_one_seed_are_identical(checkpoint, llm):
    params = SamplingParams(n=3, max_tokens=20, seed=9, top_p=0.9)
    first = llm.generate(PROMPT, params, use_tqdm=False)[0]
    again = llm.generate(PROMPT, params, use_tqdm=False)[0]
    elsewhere = LLM(checkpoint("llama"), kv_cache_memory_bytes=2**22).generate(PROMPT, params, use_tqdm=False)[0]
    other = llm.generate(PROMPT, SamplingParams(n=3, max_tokens=20, seed=10, top_p=0.9), use_tqdm=False)[0]
    assert pairs(first) == pairs(again) == pairs(elsewhere)
    assert pairs(first) != pairs(other)


def test_a_sample_depends_on_its_index_not_on_the_size_of_its_group(llm):
    small, large = (llm.generate(PROMPT, SamplingParams(n=n, max_tokens=15, seed=3), use_tqdm=False)[0] for n in (2, 6))
    assert pairs(large)[:2] == pairs(small)


def test_min_tokens_bans_eos_and_stop_tokens_until_then(checkpoint, llm):
    model = exact_model(checkpoint("llama"))
    free = llm.generate(PROMPT, SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True), use_tqdm=False)[0]
    stop = free.completions[0].token_ids[0]  # the most probable token, every time
    for setting in ({"temperature": 0.0}, {"top_k": 3, "seed": 2}, {"temperature": 0.7, "seed": 1}):
        params = SamplingParams(n=16, max_tokens=8, min_tokens=5, stop_token_ids=[stop], **setting)
        output = llm.generate(PROMPT, params, use_tqdm=False)[0]
        for c in output.completions:
            assert not {stop, 2} & set(c.token_ids[:5])
            logprobs = token_logprobs(model, [PROMPT + c.token_ids], params, prompt_lens=[len(PROMPT)])[0]
            assert torch.equal(torch.tensor(c.logprobs), logprobs[len(PROMPT) :].detach())
    unbanned = SamplingParams(max_tokens=8, stop_token_ids=[stop], temperature=0.0)
    assert llm.generate(PROMPT, unbanned, use_tqdm=False)[0].completions[0].token_ids == [stop]


def test_stop_tokens_outside_the_vocabulary_are_refused_on_both_sides(checkpoint, llm):
    """A ban is a write into the row of logits: it must not land beside it."""
    params = SamplingParams(min_tokens=2, stop_token_ids=[1001])
    with pytest.raises(ValueError, match="out of range"):
        llm.generate(PROMPT, params, use_tqdm=False)
    with pytest.raises(ValueError, match="out of range"):
        token_logprobs(exact_model(checkpoint("llama")), [PROMPT], params, prompt_lens=[1])
