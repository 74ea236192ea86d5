"""The example of an agent: its environment's tokens are masked, its log-probs compared, and it learns."""

import importlib.util
import pathlib
import random
import re
import subprocess
import sys

import pytest
import torch

from samebits import LLM
from samebits.trainer import exact_model
from samebits.trainer.rl.tiny import make_tiny_model

ROOT = pathlib.Path(__file__).parents[2]
FILE = ROOT / "examples" / "agent_grpo.py"


def run_example(*args) -> str:
    done = subprocess.run([sys.executable, FILE, *map(str, args)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("agent_grpo", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def warm(example, tmp_path_factory):
    """A model that has learned a little, and its engine."""
    folder = tmp_path_factory.mktemp("agent")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    make_tiny_model(folder, example.ALPHABET, **sizes)
    model, llm = exact_model(folder), LLM(folder, kv_cache_memory_bytes=2**24)
    example.warm_up(model, llm.tokenizer, 2, until=1.0, max_steps=60)
    llm.update_weights(model)
    return model, llm


def test_the_calculator_answers_calls_and_nothing_else(example):
    assert example.calculate("[12+34]") == "46;"
    assert {example.calculate(text) for text in ("[12+]", "12+34]", "[1+2+3]", "")} == {"!;"}
    problem = example.Problem([12, 34, 56])
    assert "".join(text for text, _ in problem.demonstration()) == "[12+34]46;[46+56]102;102"
    assert [own for _, own in problem.demonstration()] == [True, False, True, False, True]


def test_what_the_calculator_wrote_is_masked_and_the_bits_are_compared(example, warm):
    model, llm = warm
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    agent = example.Agent(llm, max_turns=3)
    rng = random.Random(0)
    episodes = agent.run([example.draw(rng, 2) for _ in range(4)], 4, seed=1)
    assert any(len(e.turns) > 1 for e in episodes)
    for episode in episodes:
        trace = episode.trace
        pieces = re.findall("(0+|1+)", "".join(str(int(own)) for own in trace.mask))
        start, texts = 0, []
        for piece in pieces:
            texts.append(llm.tokenizer.decode(trace.token_ids[start : start + len(piece)], skip_special_tokens=True))
            start += len(piece)
        assert texts[0] == episode.problem.prompt
        for call, written in zip(texts[1::2], texts[2::2], strict=False):
            assert written == example.calculate(call)
    sampled = sum(sum(e.trace.mask) for e in episodes)
    assert example.learn(model, optimizer, episodes) == sampled
    turn = episodes[3].turns[0]
    turn.logprobs[-1] += 1e-6
    with pytest.raises(RuntimeError, match="1 log-probs differ from the trainer's"):
        example.learn(model, optimizer, episodes)


@pytest.mark.slow
def test_the_example_runs():
    short = ("--steps", 2, "--numbers", 2, "--groups", 2, "--group-size", 2, "--warm-up-steps", 3)
    lines = [line for line in run_example(*short).splitlines() if line.startswith("step")]
    assert len(lines) == 2
    assert all("tokens equal as bits" in line for line in lines)


@pytest.mark.slow
def test_the_example_learns():
    lines = run_example("--steps", 30, "--numbers", 2).splitlines()
    rewards = [float(found[1]) for line in lines if (found := re.search(r"reward (\S+)", line))]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.15
