"""Verifiable tasks: problems, numbered so that any rank and any restart can name them, and the reward of an answer."""

from __future__ import annotations

import json
import os
import random
import zlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, Protocol

Split = Literal["train", "validation"]


@dataclass(frozen=True)
class Problem:
    prompt: str
    answer: str


class Task(Protocol):
    """What a training loop asks of a task; write your own with these two methods."""

    def problem(self, index: int, split: Split = "train") -> Problem:
        """The problem of this number: the same on every call."""

    def reward(self, problem: Problem, text: str) -> float:
        """The reward of a completion, without special tokens. Finite."""


class GeneratedTask:
    """Problems drawn from a distribution; one in ten, by a hash of its prompt, is kept for validation."""

    alphabet: str  # all characters of prompts and answers

    def __init__(self, seed: int = 0):
        self.seed = seed

    def draw(self, rng: random.Random) -> Problem:
        raise NotImplementedError

    def problem(self, index: int, split: Split = "train") -> Problem:
        rng = random.Random(f"{self.seed}/{split}/{index}")
        while True:
            problem = self.draw(rng)
            if _held_out(problem.prompt) == (split == "validation"):
                return problem

    def reward(self, problem: Problem, text: str) -> float:
        """1 if the first line of the completion is the answer, else 0."""
        return float(text.strip().partition("\n")[0].strip() == problem.answer)


class Arithmetic(GeneratedTask):
    """Addition with carry: "47+85=" -> "132"."""

    alphabet = "0123456789+="

    def __init__(self, digits: int = 2, seed: int = 0):
        super().__init__(seed)
        self.digits = digits

    def draw(self, rng: random.Random) -> Problem:
        a, b = rng.randrange(10**self.digits), rng.randrange(10**self.digits)
        return Problem(f"{a}+{b}=", str(a + b))


class Sorting(GeneratedTask):
    """Sorting digits: "31402>" -> "01234"."""

    alphabet = "0123456789>"

    def __init__(self, length: int = 6, seed: int = 0):
        super().__init__(seed)
        self.length = length

    def draw(self, rng: random.Random) -> Problem:
        digits = [rng.choice("0123456789") for _ in range(self.length)]
        return Problem("".join(digits) + ">", "".join(sorted(digits)))


class Brackets(GeneratedTask):
    """Closing brackets: "([{}>" -> "])". The answer closes all that is open, innermost first."""

    alphabet = "()[]{}>"

    def __init__(self, length: int = 10, seed: int = 0):
        super().__init__(seed)
        self.length = length

    def draw(self, rng: random.Random) -> Problem:
        closing = {"(": ")", "[": "]", "{": "}"}
        text = ""
        stack: list[str] = []
        for _ in range(rng.randint(self.length // 2, self.length)):
            if len(stack) > 1 and rng.random() < 0.4:  # something is always left to close
                text += stack.pop()
            else:
                text += (bracket := rng.choice("([{"))
                stack.append(closing[bracket])
        return Problem(text + ">", "".join(reversed(stack)))


class JsonlTask:
    """Lines {"prompt": ..., "answer": ...}; every tenth, by a hash of its prompt, is kept for validation.

    verifier: "exact", the stripped completion is the answer; or "math-verify", the package of this name finds them
    mathematically equal (extra `math`). ValueError names the line that is wrong.
    """

    def __init__(self, path: str | os.PathLike, verifier: Literal["exact", "math-verify"] = "exact", seed: int = 0):
        if verifier not in ("exact", "math-verify"):
            raise ValueError(f"verifier {verifier!r}; choose exact or math-verify")
        self.path, self.verifier, self.seed = path, verifier, seed
        if verifier == "math-verify":
            try:
                import math_verify  # noqa: F401
            except ImportError as error:
                raise ImportError("the verifier math-verify needs: pip install 'samebits[math]'") from error
        self.problems: dict[str, list[Problem]] = {"train": [], "validation": []}
        with open(path, encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    problem = self._parse(line, number)
                    self.problems["validation" if _held_out(problem.prompt) else "train"].append(problem)
        if not self.problems["train"]:
            raise ValueError(f"{path}: no problems to train on")

    def _parse(self, line: str, number: int) -> Problem:
        try:
            record = json.loads(line)
            prompt, answer = record["prompt"], record["answer"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f'{self.path}, line {number}: expected {{"prompt": ..., "answer": ...}} ({error!r})'
            ) from error
        if not isinstance(prompt, str) or not prompt or not isinstance(answer, str | int | float):
            raise ValueError(f"{self.path}, line {number}: prompt is a non-empty string, answer a string or a number")
        return Problem(prompt, str(answer))

    def problem(self, index: int, split: Split = "train") -> Problem:
        problems = self.problems[split]
        if not problems:
            raise ValueError(f"{self.path}: too few problems to keep any for {split}")
        epoch, place = divmod(index, len(problems))
        return problems[_shuffled(len(problems), f"{self.seed}/{split}/{epoch}")[place]]

    def reward(self, problem: Problem, text: str) -> float:
        if self.verifier == "exact":
            return float(text.strip() == problem.answer.strip())
        from math_verify import parse, verify

        # its timeouts use signals, which only the main thread may set
        found = parse(text, parsing_timeout=None)
        return float(verify(parse(problem.answer, parsing_timeout=None), found, timeout_seconds=None))


TASKS = {"arithmetic": Arithmetic, "sorting": Sorting, "brackets": Brackets}


def make_task(name: str, **options) -> Task:
    """A built-in task by name, or a JsonlTask for the path of a .jsonl file; options go to its class."""
    if name in TASKS:
        return TASKS[name](**options)
    if name.endswith(".jsonl"):
        return JsonlTask(name, **options)
    raise ValueError(f"task {name!r}; choose {', '.join(TASKS)} or the path of a .jsonl file")


@lru_cache(maxsize=4)
def _shuffled(count: int, seed: str) -> list[int]:
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return order


def _held_out(prompt: str) -> bool:
    return zlib.crc32(prompt.encode()) % 10 == 0
