"""The RL trainer's parts, each against a formula, an oracle or its own repetition."""

import errno
import gc
import json
import math
import os
import subprocess
import sys
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from samebits import LLM, CheckpointError, NumericsError, SamplingParams
from samebits.correction import Correction, preset
from samebits.engine import StructuredOutputsParams
from samebits.trainer import exact_model, token_logprobs
from samebits.trainer.rl import ALGORITHMS, TrainConfig, Trainer, advantages, make_task, pack
from samebits.trainer.rl.checkpoint import checkpoints
from samebits.trainer.rl.invariant import BitComparison
from samebits.trainer.rl.objective import Objective, report
from samebits.trainer.rl.rollout import RewardError, Trajectory
from samebits.trainer.rl.tasks import TASKS, JsonlTask, MathGrader, Problem
from samebits.trainer.rl.tiny import fine_tune, make_tiny_model
from samebits.trainer.verify import falsify

from helpers import faults
from helpers.digits import Digits
from helpers.serving import served_checkpoint

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES["num_key_value_heads"] = 1


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / "model"
    make_tiny_model(folder, Digits.alphabet, seed=3, initializer_range=0.3, **SIZES)
    return str(folder)


def config_of(model, **changes) -> TrainConfig:
    base = {
        "model": model, "groups_per_step": 3, "group_size": 4, "lr": 1e-2, "sampling": SamplingParams(max_tokens=9),
        "max_tokens_per_pack": 40, "engine": {"kv_cache_memory_bytes": 2**21},
    }  # fmt: skip
    return TrainConfig(**{**base, **changes})


def weights(trainer) -> list[torch.Tensor]:
    return [p.full_tensor().detach().clone() for p in trainer.model.parameters()]


def equal(a, b) -> bool:
    return all(map(torch.equal, a, b))


# --- advantages and packing -----------------------------------------------------------------------------------------

REWARDS = torch.tensor([1.0, 0.0, 0.5, 3.0, 3.0, 3.0, -1.0, 0.1])
GROUPS = torch.tensor([4, 4, 4, 9, 9, 9, 2, 2])


def direct(baseline: str) -> torch.Tensor:
    """Group by group, by the papers' formulas."""
    if baseline == "none":
        return REWARDS.double()
    if baseline == "batch-whitened":
        r = REWARDS.double()
        return (r - r.mean()) / (r.std() + 1e-6)
    out = []
    for group in (4, 9, 2):
        r = REWARDS[group == GROUPS].double()
        others = [(r.sum() - x) / (len(r) - 1) for x in r]
        out += {
            "group": [x - r.mean() for x in r],
            "group-std": [(x - r.mean()) / (r.std() + 1e-6) for x in r],
            "leave-one-out": [x - o for x, o in zip(r, others, strict=True)],
        }[baseline]
    return torch.stack(out)


@pytest.mark.parametrize("baseline", ["none", "group", "group-std", "leave-one-out", "batch-whitened"])
def test_advantages_are_their_papers_formulas(baseline):
    torch.testing.assert_close(advantages(REWARDS, GROUPS, baseline), direct(baseline))


@pytest.mark.parametrize("baseline", ["group", "group-std", "leave-one-out", "batch-whitened"])
def test_equal_rewards_leave_exactly_nothing_to_learn(baseline):
    groups = torch.tensor([0] * 3) if baseline != "batch-whitened" else torch.tensor([0, 1, 2])
    assert torch.equal(advantages(torch.full((3,), 0.1), groups, baseline), torch.zeros(3, dtype=torch.float64))
    assert advantages(torch.tensor([0.7]), torch.tensor([5]), baseline).tolist() == [0.0]


def test_rewards_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="finite"):
        advantages(torch.tensor([math.nan]), torch.tensor([0]), "group")
    with pytest.raises(ValueError, match="baseline='mean'"):
        advantages(torch.tensor([1.0]), torch.tensor([0]), "mean")


@given(st.lists(st.integers(1, 60), max_size=40), st.integers(1, 100), st.integers(1, 4))
def test_packs_hold_every_sequence_once_within_the_budget(lengths, budget, ranks):
    packs = pack(lengths, budget, ranks)
    assert len(packs) == ranks and len({len(p) for p in packs}) == 1
    flat = [i for rank in packs for micro in rank for i in micro]
    assert sorted(flat) == list(range(len(lengths)))
    for micro in (m for rank in packs for m in rank):
        assert len(micro) == 1 or sum(lengths[i] for i in micro) <= budget
    if lengths and max(lengths) <= budget:  # balanced: no rank waits for more than one sequence
        loads = [sum(lengths[i] for micro in rank for i in micro) for rank in packs]
        assert max(loads) - min(loads) <= len(packs[0]) * max(lengths)


@settings(max_examples=8, deadline=None)
@given(budget=st.integers(1, 120), seed=st.integers(0, 99))
def test_log_probs_do_not_depend_on_the_packing(checkpoint, budget, seed):
    model = exact_model(checkpoint("qwen3"))
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 40, (9,), generator=generator).tolist()
    sequences = [torch.randint(0, 1000, (n,), generator=generator) for n in lengths]
    with torch.no_grad():
        whole = token_logprobs(model, sequences)
        for members in (m for rank in pack(lengths, budget, 2) for m in rank if m):
            part = token_logprobs(model, [sequences[i] for i in members])
            assert all(torch.equal(p, whole[i]) for p, i in zip(part, members, strict=True))


# --- the objective --------------------------------------------------------------------------------------------------


def made_up_rollouts(model, seed=0):
    """Three completions whose rollout and old log-probs are off by known noise."""
    generator = torch.Generator().manual_seed(seed)
    result, old = [], []
    for group, (prompt, length) in enumerate([(3, 6), (2, 4), (5, 8)]):
        ids = torch.randint(2, 14, (prompt + length,), generator=generator).tolist()
        with torch.no_grad():
            exact = token_logprobs(model, [ids])[0][prompt:]
        mu, pi_old = (exact + 0.3 * torch.randn(length, generator=generator) for _ in range(2))
        versions = torch.zeros(length, dtype=torch.long)
        result.append(Trajectory(group, Problem("", ""), ids[:prompt], ids[prompt:], mu, versions, "stop", 0.0))
        old.append(pi_old)
    return result, old


def reference_loss(model, rollouts, old, advantage, recipe, mode, clip_to, beta, reference):
    """Each algorithm written down once more, per sequence, in fp64 on plain HF."""
    per_sequence, penalties = [], []
    for r, o, A in zip(rollouts, old, advantage, strict=True):
        logits = model(torch.tensor([r.sequence]), use_cache=False).logits[0, len(r.prompt_token_ids) - 1 : -1]
        target = torch.tensor(r.token_ids)[:, None]
        cur = logits.log_softmax(-1).gather(1, target)[:, 0]
        ref = reference(torch.tensor([r.sequence]), use_cache=False).logits[0, len(r.prompt_token_ids) - 1 : -1]
        ref = ref.log_softmax(-1).gather(1, target)[:, 0].detach()
        base = (r.logprobs if mode == "bypass" else o).double()
        weight = (o - r.logprobs).double().exp().clamp(max=2.0) if mode == "decoupled" else 1.0
        ratio = (cur - base).exp()
        low, high = clip_to
        if recipe.kind == "gspo":
            ratio = (cur - base).detach().mean().exp() * (cur - cur.detach()).exp()
        if recipe.kind == "reinforce":
            loss = -A * cur * weight
        elif recipe.kind == "cispo":
            loss = -A * cur * ratio.detach().clamp(1 - low, 1 + high) * weight
        else:
            loss = -torch.min(ratio * A, ratio.clamp(1 - low, 1 + high) * A) * weight
        per_sequence.append(loss)
        penalties.append((ref - cur).exp() - 1 - (ref - cur))
    if recipe.aggregation == "token-mean":
        value = [sum(x.sum() for x in xs) / sum(map(len, xs)) for xs in (per_sequence, penalties)]
    elif recipe.aggregation == "seq-mean-token-mean":
        value = [torch.stack([x.mean() for x in xs]).mean() for xs in (per_sequence, penalties)]
    else:
        divisor = 9.0 if recipe.aggregation.endswith("norm") else 1.0
        value = [torch.stack([x.sum() / divisor for x in xs]).mean() for xs in (per_sequence, penalties)]
    return value[0] + beta * value[1]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("mode", ["recompute", "bypass", "decoupled"])
def test_gradients_are_those_of_plain_hf_in_fp64(tiny, algorithm, mode):
    model, recipe = exact_model(tiny), ALGORITHMS[algorithm]
    correction = preset("token_tis" if mode == "decoupled" else "none")
    config = config_of(tiny, algorithm=algorithm, mode=mode, correction=correction, kl_coef=0.1)
    plain = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float64, attn_implementation="eager")
    moved = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float64, attn_implementation="eager")
    frozen = exact_model(tiny)
    with torch.no_grad():
        frozen.lm_head.weight += 0.05 * torch.sin(torch.arange(32.0))
        moved.lm_head.weight.copy_(frozen.lm_head.weight)
    rollouts, old = made_up_rollouts(model)
    advantage = torch.tensor([1.0, -0.5, 0.25], dtype=torch.float64)
    normalizer = 18 if recipe.aggregation == "token-mean" else 3
    objective = Objective(config, model, frozen)
    for members in ([0, 2], [1]):  # in two packs
        found = objective([rollouts[i] for i in members], advantage[members], [old[i] for i in members], normalizer)
        found[0].backward()
    expected = reference_loss(plain, rollouts, old, advantage, recipe, mode, recipe.clip, 0.1, moved)
    expected.backward()
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        error = (ours.grad - theirs.grad).norm() / theirs.grad.norm()
        assert error < 2e-4, f"{name}: {error}"


def test_k1_is_taken_off_the_advantages_of_all_tokens_before_it(tiny):
    """d/d log pi_t of the expected loss is the sum of the penalties from t on, at -w A / N of REINFORCE."""
    model, frozen = exact_model(tiny), exact_model(tiny)
    with torch.no_grad():
        frozen.lm_head.weight += 0.05 * torch.sin(torch.arange(32.0))
    config = config_of(tiny, algorithm="rloo", kl="k1", kl_coef=0.2)
    rollouts, _ = made_up_rollouts(model)
    loss, current, _ = Objective(config, model, frozen)(rollouts[:1], torch.tensor([1.0]).double(), None, 1)
    (gradient,) = torch.autograd.grad(loss, current[0])
    with torch.no_grad():
        reference = token_logprobs(frozen, [rollouts[0].sequence])[0][3:]
    penalty = (current[0].detach() - reference).double()
    to_go = torch.stack([penalty[i:].sum() for i in range(len(penalty))])
    torch.testing.assert_close(gradient.double(), -(1.0 - 0.2 * to_go), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("mode", ["recompute", "bypass", "decoupled"])
@pytest.mark.parametrize("minibatches", [1, 3])
def test_on_policy_every_ratio_of_the_first_update_is_exactly_one(tiny, mode, minibatches):
    correction = preset("none") if mode == "recompute" else preset("token_tis") if mode == "decoupled" else None
    changes = {} if correction is None else {"correction": correction}
    trainer = Trainer(config_of(tiny, mode=mode, minibatches=minibatches, **changes), Digits())
    found = []
    backward = trainer._backward
    trainer._backward = lambda *args: found.append(backward(*args)) or found[-1]
    metrics = trainer.step()
    assert metrics["max_difference"] == 0 and metrics["compared_tokens"] > 30 and metrics["updates"] == minibatches
    first = report(found[0])
    for name in ("clipped", "k1", "k3", "contribution_positive", "contribution_negative"):
        assert first[name] == 0, name
    assert first["correction/weight_mean"] == 1
    assert metrics["k1"] == metrics["k3"] == 0, "of the whole batch: old log-probs are the rollouts'"
    if minibatches > 1:
        assert metrics["contribution_positive"] != 0, "later updates are off policy"


# --- the loop -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"minibatches": 2, "kl_coef": 0.1}, marks=pytest.mark.slow),
        {"dtype": "bfloat16", "activation_checkpointing": True},
        pytest.param({"dtype": "float16", "minibatches": 2}, marks=pytest.mark.slow),
        {"algorithm": "rloo", "mode": "decoupled", "correction": preset("token_tis"), "filter_uniform": True},
        {"sampling": SamplingParams(max_tokens=9, temperature=0.7, top_p=0.9, min_p=0.01), "algorithm": "gspo"},
    ],
)
def test_six_steps_at_once_are_three_and_three_after_a_restart(tiny, tmp_path, changes):
    def run(folder, stops):
        for stop in stops:
            trainer = Trainer(config_of(tiny, steps=stop, output_dir=folder, **changes), Digits())
            assert trainer.resume() == (stop != stops[0])
            seen = []
            trainer.fit(seen.append)
        optimizer = [v for s in trainer.optimizer.state.values() for v in s.values()]
        return trainer, seen, [getattr(v, "to_local", lambda v=v: v)() for v in optimizer]

    whole, seen, states = run(tmp_path / "a", [6])
    again, seen_again, states_again = run(tmp_path / "b", [3, 6])
    assert len(seen) == 6 and len(seen_again) == 3
    assert all(m["max_difference"] == 0 and m["compared_tokens"] > 20 for m in seen)
    assert equal(weights(whole), weights(again)) and equal(states, states_again)
    for a, b in zip(seen[3:], seen_again, strict=True):
        differing = [k for k in a if a[k] != b[k] and not k.endswith(("seconds", "second"))]
        assert not differing
    assert whole.llm.weight_version == again.llm.weight_version == 6
    assert whole.updates_done == again.updates_done
    assert not equal(weights(whole), weights(Trainer(config_of(tiny, **changes), Digits())))


def test_a_planted_fault_stops_training_before_the_optimizer_moves(tiny):
    for minibatches in (1, 3):
        trainer = Trainer(config_of(tiny, minibatches=minibatches), Digits())
        with torch.no_grad():
            faults.model_of(trainer.llm).model.norm.weight *= 1.0001
        before = weights(trainer)
        with pytest.raises(NumericsError, match=r"tokens differ. group \d, prompt '.*': token \d .* log-prob"):
            trainer.step()
        assert equal(before, weights(trainer)) and trainer.updates_done == 0


def test_check_off_reports_the_difference_and_goes_on(tiny):
    trainer = Trainer(config_of(tiny, check="off"), Digits())
    falsify(faults.model_of(trainer.llm), "model.layers.0.mlp.down_proj")
    with torch.no_grad():
        faults.model_of(trainer.llm).model.norm.weight *= 1.01
    metrics = trainer.step()
    assert metrics["max_difference"] > 0 and metrics["updates"] == 1


def test_check_first_compares_until_it_has_compared(tiny):
    trainer = Trainer(config_of(tiny, check="first"), Digits())
    trainer.step()
    with torch.no_grad():
        faults.model_of(trainer.llm).model.norm.weight *= 1.01
    assert trainer.step()["max_difference"] > 0
    trainer = Trainer(config_of(tiny, check="first", filter_uniform=True), Broken(0.5))
    with torch.no_grad():
        faults.model_of(trainer.llm).model.norm.weight *= 1.01
    with pytest.raises(NumericsError, match="tokens differ"):
        trainer.step()  # nothing to train on; compared all the same


def test_filtered_sequences_are_compared_and_the_rest_makes_equal_updates(tiny):
    class Partly(Digits):
        def reward(self, problem, text):
            return 0.0 if problem.prompt.startswith("00") else super().reward(problem, text)

    trainer = Trainer(config_of(tiny, filter_uniform=True, minibatches=2), Partly())
    sizes = []
    backward = trainer._backward
    trainer._backward = lambda *args: sizes.append(len(args[0].rollouts)) or backward(*args)
    metrics = trainer.step()
    assert sizes == [4, 4] and metrics["updates"] == 2
    assert metrics["compared_tokens"] == 12 * metrics["length"]


def test_old_objects_are_not_looked_through_in_a_step(tiny, monkeypatch):
    trainer = Trainer(config_of(tiny), make_task("arithmetic"))
    seen = []
    faults.before(monkeypatch, trainer.worker, "collect", lambda *args: seen.append(gc.get_freeze_count()))
    trainer.step()
    assert seen[0] > 10**5 and gc.get_freeze_count() == 0
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "_describe", faults.fail(KeyError("x")))
        with pytest.raises(KeyError):
            trainer.step()
    assert gc.get_freeze_count() == 0
    gc.freeze()
    try:
        trainer.evaluate(2)
        assert gc.get_freeze_count() > 0, "what others froze stays so"
    finally:
        gc.unfreeze()


def test_nan_is_a_difference(tiny):
    comparison = BitComparison()
    rollout = Trajectory(0, Problem("p", "a"), [1], [2, 3], torch.tensor([-1.0, math.nan]), torch.zeros(2), "stop", 0.0)
    comparison.see(rollout, torch.tensor([-1.0, -1.0]), 0)
    assert comparison.differing == 1 and comparison.worst > 1e300
    with pytest.raises(NumericsError, match="1 of 2 tokens differ"):
        comparison.require_equal(None, Trainer(config_of(tiny), Digits()).contract)


def test_a_gradient_that_is_not_finite_moves_nothing(tiny):
    trainer = Trainer(config_of(tiny), Digits())
    before = weights(trainer)
    backward = trainer._backward

    def poisoned(*args):
        sums = backward(*args)
        next(trainer.model.parameters()).grad.mul_(math.nan)
        return sums

    trainer._backward = poisoned
    with pytest.raises(FloatingPointError, match="step 0, update 0: the gradient's norm is nan"):
        trainer.step()
    assert equal(before, weights(trainer))


@pytest.mark.slow
def test_fp16_scales_the_loss_as_far_as_gradients_allow(tiny, monkeypatch):
    monkeypatch.setattr("samebits.trainer.rl.loop.LOSS_SCALE_GROWTH", 2)
    plain = Trainer(config_of(tiny, dtype="float16"), Digits())
    high = Trainer(config_of(tiny, dtype="float16"), Digits())
    high.loss_scale = 2.0**60  # beyond fp16, whatever the gradient
    metrics = [t.step() for t in (plain, high)]
    assert 1 < metrics[1]["loss_scale"] < 2.0**60 and metrics[0]["updates"] == metrics[1]["updates"] == 1
    assert metrics[1]["grad_norm"] == pytest.approx(metrics[0]["grad_norm"], rel=0.01)
    assert all(m["max_difference"] == 0 for m in metrics)
    before = plain.loss_scale
    assert plain.step()["loss_scale"] == 2 * before


def test_lr_rises_over_the_warmup(tiny):
    trainer = Trainer(config_of(tiny, warmup=3, lr=0.1, steps=5), Digits())
    rates = []
    trainer.fit(lambda metrics: rates.append(trainer.optimizer.param_groups[0]["lr"]))
    assert rates == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1])


def test_the_control_without_the_promise_names_the_contract(tiny):
    engine = {"kv_cache_memory_bytes": 2**21, "exact": False}
    trainer = Trainer(config_of(tiny, engine=engine), Digits())
    with torch.no_grad():
        faults.model_of(trainer.llm).model.norm.weight *= 1.01
    with pytest.raises(NumericsError, match="the engine runs with exact=False"):
        trainer.step()


def test_staleness_is_bounded_and_every_token_carries_its_version(tiny):
    engine = {"kv_cache_memory_bytes": 2**21, "max_num_seqs": 6}
    trainer = Trainer(config_of(tiny, staleness=2, steps=6, engine=engine), Digits())
    seen = []
    trainer.fit(seen.append)
    assert max(m["max_staleness"] for m in seen) in (1, 2) and seen[0]["max_staleness"] == 0
    assert all(m["max_difference"] == 0 for m in seen), "tokens of the present version are still the trainer's"
    assert any(m["compared_tokens"] < 12 * m["length"] for m in seen[1:]), "old tokens are not compared"


class Broken(Digits):
    def __init__(self, result):
        self.result = result

    def reward(self, problem, text):
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


@pytest.mark.parametrize(("result", "message"), [(KeyError("answer"), "raised KeyError"), (math.nan, "is nan")])
def test_a_reward_that_fails_names_problem_and_answer(tiny, result, message):
    trainer = Trainer(config_of(tiny), Broken(result))
    with pytest.raises(RewardError, match=rf"of the answer .* to '00\+=' {message}"):
        trainer.step()


@pytest.mark.parametrize("filter_uniform", [False, True])
def test_equal_rewards_move_nothing(tiny, filter_uniform):
    trainer = Trainer(config_of(tiny, filter_uniform=filter_uniform, weight_decay=0.1), Broken(0.25))
    before = weights(trainer)
    metrics = trainer.step()
    assert metrics["updates"] == 0 and metrics["reward"] == 0.25 and trainer.llm.weight_version == 0
    assert equal(before, weights(trainer))


@pytest.mark.parametrize("filter_uniform", [False, True])
def test_a_checkpoint_before_the_first_update_changes_nothing_and_loads(tiny, tmp_path, filter_uniform):
    changes = {"filter_uniform": filter_uniform, "output_dir": tmp_path, "steps": 1}
    first = Trainer(config_of(tiny, **changes), Broken(0.5))
    first.fit()
    resumed, plain = Trainer(config_of(tiny, **changes), Digits()), Trainer(config_of(tiny), Digits())
    with pytest.warns(UserWarning, match="task"):
        assert resumed.resume()
    plain.steps_done = 1
    plain.worker.restart(3)
    for trainer in (first, resumed, plain):
        trainer.worker.task = Digits()
        assert trainer.step()["updates"] == 1
    assert equal(weights(first), weights(plain)) and equal(weights(resumed), weights(plain))


def test_a_step_may_be_tried_again_after_a_failing_reward(tiny):
    trainer, plain = Trainer(config_of(tiny), Broken(math.nan)), Trainer(config_of(tiny), Digits())
    with pytest.raises(RewardError):
        trainer.step()
    trainer.worker.task = Digits()
    assert trainer.step()["reward"] == plain.step()["reward"]


def test_after_a_difference_a_step_needs_a_load(tiny, tmp_path):
    trainer = Trainer(config_of(tiny, output_dir=tmp_path, steps=1, sleep=True), Digits())
    trainer.fit()
    plain = Trainer(config_of(tiny, output_dir=tmp_path, sleep=True), Digits())
    assert plain.resume()
    norm = faults.model_of(trainer.llm).model.norm.weight
    with torch.no_grad():
        norm *= 1.0001
    with pytest.raises(NumericsError):
        trainer.step()
    with pytest.raises(RuntimeError, match=r"groups 3 to 5 went to a step that failed: resume\(\) to go on"):
        trainer.step()
    assert trainer.resume()  # and that brings the engine's weights back
    trainer.step(), plain.step()
    assert equal(weights(trainer), weights(plain))


def test_rollouts_of_other_weights_than_expected_stop_the_run(tiny):
    trainer = Trainer(config_of(tiny), Digits())
    trainer.llm.update_weights(trainer.model)
    trainer.llm.engine.weight_version = 0  # as if the engine had been restarted
    trainer.llm.step()
    trainer.llm.engine.weight_version = 5
    trainer.worker.llm = Restarted(trainer.llm)
    with pytest.raises(NumericsError, match="rollouts are 5 to 5 weight versions old, expected 0 to 0"):
        trainer.step()


class Restarted:
    """An engine whose tokens are of version 0, whatever the trainer believes."""

    def __init__(self, llm):
        self.llm = llm

    def __getattr__(self, name):
        return getattr(self.llm, name)

    def step(self):
        self.llm.engine.weight_version = 0
        outputs = self.llm.step()
        self.llm.engine.weight_version = 5
        return outputs


def test_a_sequence_longer_than_the_pack_runs_alone(tiny):
    trainer = Trainer(config_of(tiny, max_tokens_per_pack=2), Digits())
    assert trainer.step()["updates"] == 1


def test_settings_that_contradict_each_other_are_refused(tiny):
    for changes, message in [
        ({"algorithm": "a3c"}, "choose one of grpo"),
        ({"minibatches": 5}, "don't divide"),
        ({"save_every": 1}, "needs an output_dir"),
        ({"sampling": SamplingParams(temperature=0.0)}, "nothing to learn"),
        ({"correction": Correction(denominator="kept")}, "whole update in one pack"),
        ({"max_grad_norm": -1.0}, "must be positive"),
        ({"correction": preset("token_tis")}, "would count it twice"),
        ({"lr": -1.0}, "must be finite and not negative"),
        ({"clip": (5.0, -3.0)}, "expected 0 <= low <= 1"),
        ({"clip": (0.2, 0.2), "algorithm": "rloo"}, "doesn't clip"),
        ({"dual_clip": 0.5}, "must exceed 1"),
        ({"dual_clip": 3.0, "algorithm": "cispo"}, "no clipped surrogate"),
        ({"betas": (0.9, 1.0)}, r"must lie in \[0, 1\)"),
        ({"group_size": 1}, "group_size must be at least 2"),
        ({"group_size": 1, "algorithm": "reinforce", "filter_uniform": True}, "leaves out every group of one sample"),
        ({"sampling": SamplingParams(max_tokens=9, detokenize=False)}, "must detokenize"),
        ({"sampling": SamplingParams(max_tokens=None), "algorithm": "dr_grpo"}, "must set it"),
    ]:
        with pytest.raises(ValueError, match=message):
            config_of(tiny, **changes)


# --- checkpoints ----------------------------------------------------------------------------------------------------


def test_a_full_disk_leaves_the_previous_checkpoint(tiny, tmp_path, monkeypatch):
    trainer = Trainer(config_of(tiny, output_dir=tmp_path, steps=1), Digits())
    trainer.fit()
    trainer.step()

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match=r"step-000002 .*No space left on device.*step-000001 is still there"):
            trainer.save()
    assert [p.name for p in tmp_path.iterdir()] == ["step-000001"]
    fresh = Trainer(config_of(tiny, output_dir=tmp_path), Digits())
    assert fresh.resume() and fresh.steps_done == 1
    trainer.save()
    assert [p.name for p in checkpoints(tmp_path)] == ["step-000001", "step-000002"]


def test_a_checkpoint_of_another_contract_is_refused_by_its_field(tiny, tmp_path):
    Trainer(config_of(tiny, output_dir=tmp_path, steps=1), Digits()).fit()
    file = tmp_path / "step-000001" / "trainer.json"
    state = json.loads(file.read_text())
    state["contract"]["attention"] = "another tree"
    file.write_text(json.dumps(state))
    with pytest.raises(NumericsError, match=r"attention.*another tree"):
        Trainer(config_of(tiny, output_dir=tmp_path), Digits()).resume()


def test_a_damaged_checkpoint_and_one_of_another_model_are_refused(tiny, tmp_path):
    Trainer(config_of(tiny, output_dir=tmp_path, steps=1), Digits()).fit()
    wide = tmp_path / "wide"
    make_tiny_model(wide, Digits.alphabet, **{**SIZES, "hidden_size": 64})
    with pytest.raises(CheckpointError, match="can't be loaded"):
        Trainer(config_of(str(wide), output_dir=tmp_path), Digits()).resume()
    for file in (tmp_path / "step-000001").glob("*.distcp"):
        file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="can't be loaded"):
        Trainer(config_of(tiny, output_dir=tmp_path), Digits()).resume()


def test_a_changed_configuration_is_named_when_a_run_resumes(tiny, tmp_path, recwarn):
    Trainer(config_of(tiny, output_dir=tmp_path, steps=1), Digits()).fit()
    assert Trainer(config_of(tiny, output_dir=tmp_path, steps=9, check="first"), Digits()).resume()
    assert not [w for w in recwarn if "another configuration" in str(w.message)]
    changed = Trainer(config_of(tiny, output_dir=tmp_path, weight_decay=0.5, algorithm="rloo"), Digits())
    with pytest.warns(UserWarning, match=r"algorithm 'grpo' -> 'rloo', weight_decay 0\.0 -> 0\.5$"):
        changed.resume()
    changed.step()
    assert changed.optimizer.param_groups[0]["weight_decay"] == 0.5, "the new settings are in force"
    other = Trainer(config_of(tiny, output_dir=tmp_path), Broken(ValueError()))
    with pytest.warns(UserWarning, match="task {'class': 'Digits'} -> {'class': 'Broken'}"):
        other.resume()
    (tmp_path / "step-000001" / "trainer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"trainer\.json lacks config, contract, loss_scale, step"):
        Trainer(config_of(tiny, output_dir=tmp_path), Digits()).resume()


def test_a_new_run_does_not_write_among_the_checkpoints_of_a_longer_one(tiny, tmp_path):
    Trainer(config_of(tiny, output_dir=tmp_path, steps=2), Digits()).fit()
    with pytest.raises(ValueError, match=r"step-000002 is of a run that is further: call resume\(\), or"):
        Trainer(config_of(tiny, output_dir=tmp_path, steps=1), Digits()).fit()


class Drafter:
    """One that can't be copied, as what holds a connection."""

    def __init__(self):
        self.lock = threading.Lock()

    def __call__(self, ids):
        return ids[-1:]


def test_a_drafter_that_cannot_be_copied_may_train(tiny, tmp_path):
    engine = {"kv_cache_memory_bytes": 2**21, "speculative_config": {"method": Drafter()}}
    Trainer(config_of(tiny, output_dir=tmp_path, steps=1, engine=engine), Digits()).fit()
    assert [p.name for p in checkpoints(tmp_path)] == ["step-000001"]


def test_only_the_newest_checkpoints_are_kept(tiny, tmp_path):
    Trainer(config_of(tiny, output_dir=tmp_path, steps=4, save_every=1, keep=2), Digits()).fit()
    (tmp_path / "step-000003").rename(tmp_path / "step-000003-kept")  # a user's own
    assert [p.name for p in checkpoints(tmp_path)] == ["step-000004"]


# --- tasks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TASKS)
def test_a_task_rewards_its_answers_and_keeps_validation_apart(name):
    task = make_task(name, seed=1)
    train = [task.problem(i) for i in range(300)]
    held = [task.problem(i, "validation") for i in range(300)]
    assert not {p.prompt for p in train} & {p.prompt for p in held}
    assert train == [make_task(name, seed=1).problem(i) for i in range(300)]
    assert len({p.prompt for p in train}) > 200
    assert all(set(p.prompt + p.answer) <= set(task.alphabet) for p in train)
    for problem in train:
        assert task.reward(problem, problem.answer) == 1 and task.reward(problem, f" {problem.answer}\nmore") == 1
        assert task.reward(problem, problem.answer + "0") == 0


def test_answers_are_right():
    for i in range(200):
        a, b = make_task("arithmetic").problem(i).prompt.rstrip("=").split("+")
        assert make_task("arithmetic").problem(i).answer == str(int(a) + int(b))
        p = make_task("sorting").problem(i)
        assert list(p.answer) == sorted(p.prompt[:-1])
        p = make_task("brackets").problem(i)
        text, pairs = p.prompt[:-1] + p.answer, ("()", "[]", "{}")
        while any(x in text for x in pairs):
            for x in pairs:
                text = text.replace(x, "")
        assert text == ""
        p = make_task("counting").problem(i)
        start, step = map(int, p.prompt.rstrip(">").split("+"))
        assert [*map(int, p.answer.split())] == [*range(start + step, 1000, step)]
        assert 60 <= len(p.answer) < 512


def test_problems_that_repeat_come_once_an_epoch_in_an_order_of_its_own():
    task = make_task("counting", num_problems=20)
    epochs = [[task.problem(20 * epoch + i) for i in range(20)] for epoch in range(3)]
    assert epochs[0] != epochs[1]
    assert all({*epoch} == {*epochs[0]} for epoch in epochs)
    assert task.problem(25, "validation") not in epochs[0]
    with pytest.raises(ValueError, match="num_problems must be positive"):
        make_task("counting", num_problems=0)


def test_drafts_change_no_bit_of_a_run_and_follow_the_last_validation(tiny, rows_cost_nothing):
    found = []
    for drafts in ({}, {"speculative_config": {"method": "suffix", "prompt_lookup_min": 1}}):
        trainer = Trainer(config_of(tiny, lr=1e-4, engine={"kv_cache_memory_bytes": 2**21, **drafts}), Digits())
        metrics = []
        steps = []
        for _ in range(2):
            metrics.append({k: v for k, v in trainer.step().items() if "second" not in k})
            before = trainer.llm.stats().steps
            metrics.append(trainer.evaluate(20, temperature=1.0))
            steps.append(trainer.llm.stats().steps - before)
        found.append((metrics, weights(trainer), steps))
    (plain, before, _), (drafted, after, steps) = found
    assert plain == drafted
    assert equal(before, after)
    assert steps[1] < steps[0], "the second validation drafted nothing from the first"


def test_a_jsonl_task_reads_its_lines_and_names_a_bad_one(tmp_path):
    file = tmp_path / "t.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"p{i}", "answer": i}) + "\n" for i in range(50)))
    task = JsonlTask(file)
    count = len(task.problems["train"])
    assert count + len(task.problems["validation"]) == 50 and len(task.problems["validation"]) > 0
    epoch = [task.problem(i).prompt for i in range(count)]
    assert len(set(epoch)) == count and epoch != [task.problem(i + count).prompt for i in range(count)]
    assert task.reward(Problem("p", "7"), " 7 ") == 1 and task.reward(Problem("p", "7"), "17") == 0
    for line in ('{"prompt": "x"}', "{", '{"prompt": "", "answer": "y"}', '["a"]'):
        file.write_text('{"prompt": "a", "answer": "b"}\n' + line + "\n")
        with pytest.raises(ValueError, match=r"t\.jsonl, line 2"):
            JsonlTask(file)
    with pytest.raises(ValueError, match="choose arithmetic, sorting, brackets, counting or the path"):
        make_task("chess")


def test_math_verify_finds_equal_expressions(tmp_path):
    pytest.importorskip("math_verify")
    file = tmp_path / "t.jsonl"
    file.write_text('{"prompt": "a", "answer": "$\\\\frac{1}{2}$"}\n')
    task = JsonlTask(file, verifier="math-verify")
    half = task.problem(0)
    assert task.reward(half, "It is $0.5$.") == 1 and task.reward(half, "It is $0.6$.") == 0
    assert task.reward(half, "no idea") == 0


def test_math_verify_is_stopped_when_it_takes_too_long(caplog):
    pytest.importorskip("math_verify")
    grader = MathGrader(timeout=1.0)
    assert grader.equal("$4$", "$2^2$")
    assert not grader.equal("$4$", "$9^{9^{9^9}}$") and "took longer than 1 s" in caplog.text
    assert grader.equal("$4$", "$2^2$")
    grader._process.kill()  # as the kernel does where memory is short
    grader._process.wait()
    assert grader.equal("$4$", "$2^2$")


def test_supervised_steps_teach_a_tiny_model(tmp_path):
    from transformers import AutoTokenizer

    task = make_task("sorting", size=2)
    make_tiny_model(tmp_path / "m", task.alphabet, **SIZES)
    model, tokenizer = exact_model(tmp_path / "m"), AutoTokenizer.from_pretrained(tmp_path / "m")
    assert tokenizer.decode(tokenizer.encode("90>"), skip_special_tokens=True) == "90>"
    chances = list(fine_tune(model, tokenizer, task, until=0.1, batch_size=16, lr=5e-3))
    assert chances[0] < 0.01 and chances[-1] >= 0.1 and all(c < 0.1 for c in chances[:-1])


def test_an_engine_that_sleeps_while_the_trainer_works_changes_no_bit(tiny):
    """With staleness, so that requests sleep too."""
    results = []
    for sleep in (False, True):
        trainer = Trainer(config_of(tiny, sleep=sleep, staleness=1, steps=2), Digits())
        seen = []
        trainer.fit(seen.append)
        assert all((m["slept_bytes"] == trainer.llm.kv_cache_bytes) == sleep for m in seen)
        results.append(weights(trainer))
    assert equal(*results)


def test_scoring_a_large_vocabulary_keeps_no_logits(tmp_path):
    """2,048 tokens x 50,000 entries are 410 MB of logits; scoring and its backward stay far below."""
    if sys.platform != "linux":
        pytest.skip("the peak is read from /proc")
    run = subprocess.run([sys.executable, "-c", PEAK, str(tmp_path)], capture_output=True, text=True, check=True)
    assert int(run.stdout) < 250e6


PEAK = """
import sys, torch
from transformers import AutoModelForCausalLM, LlamaConfig
from samebits.trainer import exact_model, token_logprobs
sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1)
AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=50_000, **sizes)).save_pretrained(sys.argv[1])
model = exact_model(sys.argv[1])
ids = [torch.arange(256) + i for i in range(8)]
token_logprobs(model, ids[:1])[0].sum().backward()
open("/proc/self/clear_refs", "w").write("5")  # the peak starts anew
values = dict(line.split(":") for line in open("/proc/self/status"))
before = int(values["VmRSS"].split()[0])
torch.cat(token_logprobs(model, ids)).sum().backward()
values = dict(line.split(":") for line in open("/proc/self/status"))
print((int(values["VmHWM"].split()[0]) - before) * 1024)
"""


def test_training_needs_a_tokenizer(checkpoint):
    with pytest.raises(ValueError, match="needs a tokenizer"):
        Trainer(config_of(str(checkpoint("llama"))), Digits())


def test_a_given_engine_is_used(tiny):
    llm = LLM(tiny, kv_cache_memory_bytes=2**21)
    with pytest.raises(ValueError, match=r"has its own settings; leave out engine=\['kv_cache_memory_bytes'\]"):
        Trainer(config_of(tiny), Digits(), llm)
    with pytest.raises(NumericsError, match="dtype: 'float32' here, 'bfloat16' there"):
        Trainer(config_of(tiny, engine={}, dtype="bfloat16"), Digits(), llm)
    trainer = Trainer(config_of(tiny, engine={}), Digits(), llm)
    trainer.step()
    assert trainer.llm is llm and llm.weight_version == 2  # 1: the trainer's weights, sent at the start
    assert 0 <= trainer.evaluate(5) <= 1


def test_a_validation_answers_each_problem_once(tiny, tmp_path, monkeypatch):
    file = tmp_path / "t.jsonl"
    file.write_text("".join(json.dumps({"prompt": str(i), "answer": i}) + "\n" for i in range(50)))
    task = JsonlTask(file)
    trainer = Trainer(config_of(tiny), task)
    asked = []
    faults.before(monkeypatch, trainer.llm, "generate", lambda prompts, _: asked.extend(prompts))
    trainer.evaluate(256)
    assert len(asked) == len(task.problems["validation"]) < 20


def test_grammars_train(checkpoint, tmp_path):
    model = str(served_checkpoint(checkpoint("llama"), tmp_path / "model"))
    grammar = StructuredOutputsParams(regex="[0-9]{1,6}")
    trainer = Trainer(config_of(model, sampling=SamplingParams(max_tokens=9, structured_outputs=grammar)), Digits())
    assert trainer.step()["max_difference"] == 0
