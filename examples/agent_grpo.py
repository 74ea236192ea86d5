"""GRPO on a tool task, in minutes on two cores: add up numbers with a calculator that adds two.

The model sees "12+34+56=" and writes a call, "[12+34]"; the calculator appends "46;", and so on, until the model writes
the sum and ends. A call ends a turn, and the next turn's prompt is all tokens so far: nothing is encoded again. What
the calculator wrote is masked from the loss. At each step every sampled token's log-prob is compared with the
trainer's, as bits.
"""

from __future__ import annotations

import argparse
import random
import re
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from transformers import AutoTokenizer

from samebits import LLM, SamplingParams
from samebits.correction import LogProbs, policy_loss
from samebits.integrations import Trace, Turn, join_turns
from samebits.trainer import exact_model, token_logprobs
from samebits.trainer.rl.losses import advantages
from samebits.trainer.rl.tiny import make_tiny_model

ALPHABET = "0123456789+=[];!"
MAX_TURN = 12  # tokens of a turn


@dataclass
class Problem:
    """Numbers to add, and their sum."""

    numbers: list[int]

    @property
    def prompt(self) -> str:
        return "+".join(map(str, self.numbers)) + "="

    @property
    def answer(self) -> str:
        return str(sum(self.numbers))

    def demonstration(self) -> Iterator[tuple[str, bool]]:
        """The pieces of a perfect run, and whether the model writes them."""
        total = self.numbers[0]
        for number in self.numbers[1:]:
            yield f"[{total}+{number}]", True
            total += number
            yield f"{total};", False
        yield self.answer, True


def draw(rng: random.Random, count: int) -> Problem:
    """A random problem of `count` numbers."""
    return Problem([rng.randrange(100) for _ in range(count)])


def calculate(call: str) -> str:
    """The calculator's answer to a turn that ends with a call; "!" where it is none."""
    match = re.fullmatch(r"\[(\d{1,4})\+(\d{1,4})\]", call)
    return f"{int(match[1]) + int(match[2])};" if match else "!;"


@dataclass
class Episode:
    """An agent's run at a problem. group: the problem's number in its step."""

    group: int
    problem: Problem
    seed: int
    prompt: list[int]
    turns: list[Turn] = field(default_factory=list)
    reward: float | None = None  # once it has ended

    @property
    def trace(self) -> Trace:
        """All its tokens: each prompt is all that was before it, so there is one trace."""
        (trace,) = join_turns(self.turns)
        return trace


class Agent:
    """Runs episodes of `max_turns` turns, each turn of all of them in one call of the engine."""

    def __init__(self, llm: LLM, max_turns: int):
        self.llm = llm
        self.tokenizer = llm.tokenizer
        self.max_turns = max_turns
        self.call_end = self.tokenizer.convert_tokens_to_ids("]")

    def run(self, problems: list[Problem], group_size: int, seed: int) -> list[Episode]:
        """Return `group_size` finished episodes of each problem."""
        rng = random.Random(seed)
        episodes = [
            Episode(group, problem, rng.getrandbits(63), self.tokenizer.encode(problem.prompt))
            for group, problem in enumerate(problems)
            for _ in range(group_size)
        ]
        for _ in range(self.max_turns):
            running = [e for e in episodes if e.reward is None]
            params = [SamplingParams(max_tokens=MAX_TURN, seed=e.seed, stop_token_ids=[self.call_end]) for e in running]
            outputs = self.llm.generate([e.prompt for e in running], params, use_tqdm=False) if running else []
            for episode, output in zip(running, outputs, strict=True):
                self._take(episode, output.completions[0])
        for episode in episodes:
            episode.reward = episode.reward or 0.0
        return episodes

    def _take(self, episode: Episode, completion) -> None:
        episode.turns.append(Turn.of(episode.prompt, completion))
        text = self.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        if completion.stop_reason == self.call_end:
            written = self.tokenizer.encode(calculate(text))
            episode.prompt = episode.prompt + completion.token_ids + written
        else:
            episode.reward = float(completion.finish_reason == "stop" and text == episode.problem.answer)


def warm_up(model, tokenizer, count: int, until: float, max_steps: int, seed: int = 0) -> float:
    """Learn demonstrations until perfect runs have this probability, by their mean over ten batches. Return it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.98), weight_decay=0.0)
    rng = random.Random(f"{seed}/demonstrations")
    chances = [0.0]
    for _ in range(max_steps):
        sequences, masks = [], []
        for problem in (draw(rng, count) for _ in range(32)):
            ids = tokenizer.encode(problem.prompt)
            mask = [False] * len(ids)
            for text, own in problem.demonstration():
                piece = tokenizer.encode(text)
                ids += piece
                mask += [own] * len(piece)
            sequences.append([*ids, tokenizer.eos_token_id])
            masks.append(torch.tensor([*mask, True]))
        logprobs = token_logprobs(model, sequences)
        sums = torch.stack([(lp * mask).sum() for lp, mask in zip(logprobs, masks, strict=True)])
        optimizer.zero_grad()
        (-sums.sum() / sum(int(mask.sum()) for mask in masks)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        chances.append(float(sums.detach().exp().mean()))
        if sum(chances[-10:]) / 10 >= until:
            break
    return sum(chances[-10:]) / 10


def learn(model, optimizer, episodes: list[Episode]) -> int:
    """One GRPO step. Return how many tokens' bits were compared; RuntimeError where any differ."""
    traces = [e.trace for e in episodes]
    sequences = [t.token_ids for t in traces]
    current = torch.cat(token_logprobs(model, sequences, prompt_lens=[t.num_prompt_tokens for t in traces]))
    rollout = torch.cat([torch.tensor(t.logprobs) for t in traces])
    mask = torch.cat([torch.tensor(t.mask) for t in traces])
    if not torch.equal(current.detach()[mask], rollout[mask]):
        raise RuntimeError(f"{int((current.detach() != rollout)[mask].sum())} log-probs differ from the trainer's")
    rewards = torch.tensor([e.reward for e in episodes], dtype=torch.float64)
    gains = advantages(rewards, torch.tensor([e.group for e in episodes]), "group-std")
    offsets = torch.tensor([0, *map(len, sequences)]).cumsum(0)
    data = LogProbs(mask=mask, rollout=rollout, current=current, offsets=offsets)
    optimizer.zero_grad()
    policy_loss(data, gains, "bypass", "ppo").loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return int(mask.sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--numbers", type=int, default=3, help="numbers to add; each but the first is a call")
    parser.add_argument("--groups", type=int, default=24, help="problems per step")
    parser.add_argument("--group-size", type=int, default=8, help="episodes per problem")
    parser.add_argument("--warm-up", type=float, default=0.2, help="share of perfect runs to begin with")
    parser.add_argument("--warm-up-steps", type=int, default=2000, help="supervised steps at most")
    parser.add_argument("--lr", type=float, default=2e-4)
    args = parser.parse_args()
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_model(folder, ALPHABET)
        model = exact_model(folder)
        chance = warm_up(model, AutoTokenizer.from_pretrained(folder), args.numbers, args.warm_up, args.warm_up_steps)
        print(f"warmed up in {time.perf_counter() - begin:.0f} s: {chance:.0%} of the runs are perfect", flush=True)
        llm = LLM(folder, kv_cache_memory_bytes=2**28)
        llm.update_weights(model)
        agent = Agent(llm, max_turns=args.numbers + 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.0)
        rise = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
        rng = random.Random("problems")
        for step in range(args.steps):
            episodes = agent.run([draw(rng, args.numbers) for _ in range(args.groups)], args.group_size, step)
            compared = learn(model, optimizer, episodes)
            rise.step()
            llm.update_weights(model)
            reward = sum(e.reward for e in episodes) / len(episodes)
            turns = sum(len(e.turns) for e in episodes) / len(episodes)
            print(
                f"step {step + 1:3}  reward {reward:.2f}  turns {turns:.1f}  {compared} tokens equal as bits  "
                f"{time.perf_counter() - begin:.0f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
