"""Turns joined to traces: whose tokens are whose, and the trainer's bits on those that were sampled."""

import pytest
import torch

from samebits import LLM, SamplingParams
from samebits.integrations import Turn, join_turns
from samebits.trainer import exact_model, token_logprobs

ENVIRONMENT = [700, 3, 44, 9]


def test_a_trace_has_every_turn_once_and_the_trainers_bits_where_the_policy_sampled(checkpoint):
    path = checkpoint("qwen2")
    llm = LLM(path)
    params = SamplingParams(max_tokens=7, ignore_eos=True, temperature=0.8, top_p=0.9, seed=3)
    prompt, turns = [17, 900, 3], []
    for _ in range(3):
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        turns.append(Turn.of(prompt, output.completions[0]))
        prompt = prompt + output.completions[0].token_ids + ENVIRONMENT
    (trace,) = join_turns(turns)
    assert trace.token_ids == prompt[: -len(ENVIRONMENT)]
    assert trace.mask == [False] * 3 + [True] * 7 + ([False] * 4 + [True] * 7) * 2
    lens = [trace.num_prompt_tokens]
    scored = token_logprobs(exact_model(path), [trace.token_ids], params, prompt_lens=lens)[0].detach()
    mask = torch.tensor(trace.mask)
    assert torch.equal(scored[mask], torch.tensor(trace.logprobs)[mask])
    assert not torch.equal(scored[3:], torch.tensor(trace.logprobs)[3:])  # the environment's tokens are scored, too


def test_a_prompt_that_does_not_go_on_begins_another_trace():
    first = Turn([1, 2], [3, 4], [-0.1, -0.2])
    again = Turn([1, 2, 3, 5], [6], [-0.3])  # 4 was encoded as 5
    (one, other) = join_turns([first, again])
    assert (one.token_ids, one.mask) == ([1, 2, 3, 4], [False, False, True, True])
    assert (other.token_ids, other.mask, other.num_prompt_tokens) == ([1, 2, 3, 5, 6], [False] * 4 + [True], 4)
    assert len(join_turns([first, Turn([1, 2, 3, 4], [5], [0.0])])) == 1
    assert len(join_turns([first, Turn([1, 2, 3], [5], [0.0])])) == 2  # cut
    assert join_turns([]) == []


@pytest.mark.parametrize("wrong", [([], [1], [0.0]), ([1], [2, 3], [0.0])], ids=str)
def test_a_turn_without_its_log_probs_is_refused(wrong):
    with pytest.raises(ValueError, match="a turn needs a prompt, and a log-prob per token"):
        Turn(*wrong)
