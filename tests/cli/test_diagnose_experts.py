"""`samebits diagnose` on a mixture of experts: whose experts differ, and what replaying them would remove."""

import dataclasses
import json
import pathlib

import numpy as np
import pytest
import routing
import torch
from transformers import AutoModelForCausalLM

from samebits import LLM, SamplingParams
from samebits.cli import mismatch, report
from samebits.cli.replay import RoutingDiagnosis
from samebits.integrations.rollouts import RolloutFormatError, read_rollouts, write_rollouts
from samebits.model.routing import routers
from samebits.trainer import exact_model, token_logprobs

from helpers.moe import save_tiny_moe

pytestmark = pytest.mark.usefixtures("one_thread")
RECORDED = pathlib.Path(__file__).parent / "recorded" / "vllm_routing.jsonl"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return save_tiny_moe(tmp_path_factory.mktemp("moe") / "model", "qwen3_moe", num_experts=8)


@pytest.fixture(scope="module")
def exact(path, tmp_path_factory):
    """What `samebits rollout` writes."""
    prompts = tmp_path_factory.mktemp("rollouts") / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt_token_ids": [5, 6, 7 + n]}) + "\n" for n in range(6)))
    llm = LLM(path, kv_cache_memory_bytes=1 << 20)
    out = prompts.with_name("exact.jsonl")
    mismatch.write_exact(llm, prompts, out, SamplingParams(n=2, max_tokens=24, seed=1, ignore_eos=True))
    return out


@pytest.fixture(scope="module")
def inexact(path, exact, tmp_path_factory):
    """The same texts as an engine in bf16 would score and route them: transformers' own code."""
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    plain.set_experts_implementation("eager")
    rollouts = []
    for r in read_rollouts(exact):
        ids = torch.tensor([[*r.prompt_token_ids, *r.token_ids]])
        chosen = []
        handles = [
            layer.mlp.gate.register_forward_hook(lambda m, args, out, to=chosen: to.append(out[2]))
            for layer in plain.model.layers
        ]
        with torch.no_grad():
            logprobs = plain(ids).logits[0].float().log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
        for handle in handles:
            handle.remove()
        start = len(r.prompt_token_ids) - 1
        experts = torch.stack(chosen, 1)[:-1].numpy()
        rollouts.append(
            dataclasses.replace(r, rollout=logprobs[start:].double().numpy(), old=None, routed_experts=experts)
        )
    out = tmp_path_factory.mktemp("rollouts") / "inexact.jsonl"
    write_rollouts(out, rollouts)
    return out


def test_exact_rollouts_have_the_models_own_experts(path, exact):
    found = mismatch.diagnose(exact, exact_model(path), use_tqdm=False)
    assert found.summary["max_abs"] == 0
    s = found.replay
    assert s["sets_differ"] == s["tokens_differ"] == 0 and s["overlap"] == 1
    assert s["tokens"] == 12 * 26 and [row["sets_differ"] for row in s["by_layer"]] == [0, 0]
    assert set(s["own"].values()) == set(s["replayed"].values()) == {0.0}


def test_what_replay_would_remove_is_shown_beside_the_mismatch(path, inexact):
    found = mismatch.diagnose(inexact, exact_model(path), use_tqdm=False)
    s = found.replay
    assert 0 < s["sets_differ"] < s["tokens_differ"] < 1
    assert np.isclose(s["sets_differ"], np.mean([row["sets_differ"] for row in s["by_layer"]]))
    assert 0 < s["replayed"]["k3"] < s["own"]["k3"] == found.summary["k3"]
    text = report.page("x", report.diagnosis(found))
    assert "Replaying the engine's (R3) would leave" in text and "Experts by layer" in text


def test_replay_removes_most_of_the_mismatch_of_recorded_rollouts_of_vllm(tmp_path):
    """By its CPU build in bf16, on a mixture whose experts weigh much (benchmarks/routing.py --model heavy --keep)."""
    routing.make_model(tmp_path, **routing.MODELS["heavy"])
    model = exact_model(tmp_path, "bfloat16")
    s = mismatch.diagnose(RECORDED, model, SamplingParams(), use_tqdm=False).replay
    assert s["tokens"] == 24 * (16 + 64 - 1)
    assert s["sets_differ"] == pytest.approx(0.091, abs=0.003)
    assert s["tokens_differ"] == pytest.approx(0.36, abs=0.01)
    assert s["own"]["k3"] > 10 * s["replayed"]["k3"] > 0

    prompts = [r.prompt_token_ids.tolist() for r in read_rollouts(RECORDED)]
    write_rollouts(tmp_path / "exact.jsonl", routing.exact_rollouts(tmp_path, "bfloat16", prompts, 16))
    s = mismatch.diagnose(tmp_path / "exact.jsonl", model, SamplingParams(), use_tqdm=False).replay
    assert s["sets_differ"] == 0 and set(s["own"].values()) == set(s["replayed"].values()) == {0.0}


def test_the_shares_are_those_of_a_count_by_hand(path, inexact):
    model = exact_model(path)
    differ = np.zeros(len(routers(model)))
    tokens = 0
    for r in read_rollouts(inexact):
        with torch.no_grad():
            _, (own,) = token_logprobs(model, [[*r.prompt_token_ids, *r.token_ids]], return_routed_experts=True)
        for mine, theirs in zip(own[:-1].numpy(), r.routed_experts, strict=True):
            differ += [set(a) != set(b) for a, b in zip(mine, theirs, strict=True)]
            tokens += 1
    s = mismatch.diagnose(inexact, model, use_tqdm=False).replay
    assert np.allclose([row["sets_differ"] for row in s["by_layer"]], differ / tokens)


def test_without_a_model_or_without_experts_nothing_is_said_of_them(path, exact, tmp_path):
    assert mismatch.diagnose(exact, use_tqdm=False).replay is None
    bare = [dataclasses.replace(r, routed_experts=None) for r in read_rollouts(exact)]
    write_rollouts(tmp_path / "bare.jsonl", bare)
    assert mismatch.diagnose(tmp_path / "bare.jsonl", exact_model(path), use_tqdm=False).replay is None


def test_experts_of_another_model_are_refused_with_their_line(path, exact, tmp_path):
    (first, *_) = read_rollouts(exact)
    wrong = dataclasses.replace(first, routed_experts=first.routed_experts[:, :1])
    write_rollouts(tmp_path / "wrong.jsonl", [wrong])
    with pytest.raises(RolloutFormatError, match=r"wrong.jsonl:1: routed experts have shape \[26, 1, 2\]"):
        mismatch.diagnose(tmp_path / "wrong.jsonl", exact_model(path), use_tqdm=False)


def test_sets_not_orders_are_compared():
    found = RoutingDiagnosis([1])
    first = torch.tensor([[[0, 0], [2, 5]], [[0, 0], [1, 4]], [[0, 0], [-1, -1]]])
    second = torch.tensor([[[3, 3], [5, 2]], [[0, 0], [1, 6]], [[0, 0], [1, 2]]])
    found.add(first, second)
    s = found.summary()
    assert (s["tokens"], s["sets_differ"], s["tokens_differ"], s["overlap"]) == (2, 0.5, 0.5, 0.75)
    assert s["by_layer"] == [{"layer": 1, "sets_differ": 0.5, "overlap": 0.75}]
