"""A trainer's rollouts: groups of samples per prompt, scored, in the same order on every rank."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from ...engine import LLM, SamplingParams
from ...engine.outputs import Completion, RequestOutput
from ..fsdp import together
from .tasks import Problem, Task


class RewardError(RuntimeError):
    """A task's reward function failed; the message names the problem and the completion."""


@dataclass(frozen=True)
class Trajectory:
    """A rewarded sample. group: number of its problem. logprobs: fp32 [T], versions: int64 [T], the weights' of each
    token."""

    group: int
    problem: Problem
    prompt_token_ids: list[int]
    token_ids: list[int]
    logprobs: Tensor
    versions: Tensor
    finish_reason: str
    reward: float

    @property
    def sequence(self) -> list[int]:
        """Token ids of prompt and completion."""
        return self.prompt_token_ids + self.token_ids


class RolloutWorker:
    """The feeder of an engine with groups numbered 0, 1, 2 …; rank r of n serves those with number % n == r.

    Problem and random numbers depend on the group's number alone, so that the number of ranks changes no rollout.
    """

    def __init__(self, llm: LLM, task: Task, params: SamplingParams, seed: int, chat: bool = False):
        if llm.tokenizer is None:
            raise ValueError(f"training on a task needs a tokenizer, and {llm.path} has none")
        self.llm = llm
        self.task = task
        self.params = params
        self.seed = seed
        self.chat = chat
        self.rank = dist.get_rank()
        self.world = dist.get_world_size()
        self._submitted = 0  # the next group that nobody asked the engine for
        self._running: dict[str, tuple[int, Problem]] = {}
        self._finished: dict[int, list[Trajectory]] = {}

    def restart(self, first: int) -> None:
        """Forget everything; the next group is `first`."""
        for request_id in list(self._running):
            self.llm.abort(request_id)
        self._running.clear()
        self._finished.clear()
        self._submitted = first

    def collect(self, first: int, last: int, ahead: int = 0) -> list[Trajectory]:
        """Return all ranks' rollouts of groups [first, last), in order; `ahead` more groups are started meanwhile.

        Groups that run ahead go on under whatever weights come: each of their tokens carries its version.
        """
        try:
            with together():
                mine = self._collect(first, last, ahead)
        except BaseException:
            self.restart(first)  # so that the step may be tried again
            raise
        gathered: list[list[Trajectory]] = [[]] * self.world
        dist.all_gather_object(gathered, mine)
        return sorted(chain.from_iterable(gathered), key=lambda r: r.group)  # stable: samples stay in order

    def _collect(self, first: int, last: int, ahead: int) -> list[Trajectory]:
        self._submit(last + ahead)
        wanted = {g for g in range(first, last) if g % self.world == self.rank}
        while not wanted <= self._finished.keys():
            if not self._running:
                raise RuntimeError(f"groups {first} to {last - 1} went to a step that failed: resume() to go on")
            for output in self.llm.step():
                if output.finished and output.request_id in self._running:
                    self._finish(output)
        return list(chain.from_iterable(self._finished.pop(group) for group in sorted(wanted)))

    def evaluate(self, count: int, temperature: float = 0.0) -> float:
        """Mean reward of answers to the first `count` validation problems, over all ranks.

        A task with `num_validation` has no more than that many.

        Each problem has random numbers of its own, the same every time: drafts follow the last validation's answers.
        """
        params = replace(self.params, n=1, temperature=temperature, top_k=0, top_p=1.0, min_p=0.0)
        with together():
            numbers = range(self.rank, min(count, getattr(self.task, "num_validation", 0) or count), self.world)
            problems = [self.task.problem(i, "validation") for i in numbers]
            each = [replace(params, seed=i) for i in numbers]
            outputs = self.llm.generate([self._prompt(p) for p in problems], each, use_tqdm=False)
            rewards = [self._reward(p, o.completions[0]) for p, o in zip(problems, outputs, strict=True)]
        total = torch.tensor([sum(rewards), len(rewards)], dtype=torch.float64)
        dist.all_reduce(total)
        return float(total[0] / total[1])

    def _submit(self, end: int) -> None:
        for group in range(self._submitted, end):
            if group % self.world == self.rank:
                problem = self.task.problem(group)
                seed = random.Random(f"{self.seed}/{group}").getrandbits(64)
                request = self.llm.add_request(self._prompt(problem), replace(self.params, seed=seed))
                self._running[request] = group, problem
        self._submitted = max(self._submitted, end)

    def _prompt(self, problem: Problem):
        return self.llm.chat_prompt([{"role": "user", "content": problem.prompt}]) if self.chat else problem.prompt

    def _finish(self, output: RequestOutput) -> None:
        group, problem = self._running.pop(output.request_id)
        self._finished[group] = [
            self._trajectory(group, problem, output.prompt_token_ids, c) for c in output.completions
        ]

    def _trajectory(self, group: int, problem: Problem, prompt: list[int], completion: Completion) -> Trajectory:
        reason = completion.finish_reason
        if reason not in ("stop", "length"):
            raise RuntimeError(f"the engine gave up {problem.prompt!r}: {reason}, {completion.stop_reason}")
        versions = torch.cat([torch.full((s.end - s.start,), s.version) for s in completion.weight_versions])
        logprobs = torch.tensor(completion.logprobs)
        reward = self._reward(problem, completion)
        return Trajectory(group, problem, prompt, completion.token_ids, logprobs, versions, reason, reward)

    def _reward(self, problem: Problem, completion: Completion) -> float:
        where = f"of the answer {completion.text!r} to {problem.prompt!r}"
        try:
            reward = float(self.task.reward(problem, completion.text or ""))
        except Exception as error:
            raise RewardError(f"the reward {where} raised {type(error).__name__}: {error}") from error
        if not math.isfinite(reward):
            raise RewardError(f"the reward {where} is {reward}; rewards must be finite")
        return reward
