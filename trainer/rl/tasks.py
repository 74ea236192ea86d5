"""Verifiable tasks: problems, numbered so that any rank and any restart can name them, and the reward of an answer."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import pathlib
import random
import select
import subprocess
import sys
import weakref
import zlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, Protocol

from ...correction.statistics import require_choice

logger = logging.getLogger(__name__)

Split = Literal["train", "validation"]


@dataclass(frozen=True)
class Problem:
    """A prompt, and the answer that a verifier compares with."""

    prompt: str
    answer: str


class Task(Protocol):
    """The interface between a training loop and a task; write your own with these two methods."""

    def problem(self, index: int, split: Split = "train") -> Problem:
        """The problem of this number: the same on every call."""

    def reward(self, problem: Problem, text: str) -> float:
        """The reward of a completion, without special tokens. Finite."""


class GeneratedTask:
    """Problems drawn from a distribution; one in ten, by a hash of its prompt, is kept for validation.

    num_problems: how many to train on, each epoch in its order; None: always new ones.
    """

    alphabet: str  # all characters of prompts and answers
    least = 2

    def __init__(self, size: int = 6, seed: int = 0, num_problems: int | None = None):
        if size < self.least:
            raise ValueError(f"a problem needs a size of at least {self.least}, got {size}")
        if num_problems is not None and num_problems < 1:
            raise ValueError(f"num_problems must be positive, got {num_problems}; leave it out for ever new ones")
        self.size = size
        self.seed = seed
        self.num_problems = num_problems

    def draw(self, rng: random.Random) -> Problem:
        """A random problem."""
        raise NotImplementedError

    def problem(self, index: int, split: Split = "train") -> Problem:
        """The problem of this number: the same on every call."""
        if self.num_problems is not None and split == "train":
            epoch, place = divmod(index, self.num_problems)
            index = _shuffled(self.num_problems, f"{self.seed}/{split}/{epoch}")[place]
        rng = random.Random(f"{self.seed}/{split}/{index}")
        while True:
            problem = self.draw(rng)
            if _split_of(problem) == split:
                return problem

    def reward(self, problem: Problem, text: str) -> float:
        """1 if the first line of the completion is the answer, else 0."""
        return float(text.strip().partition("\n")[0].strip() == problem.answer)


class Arithmetic(GeneratedTask):
    """Addition with carry: "47+85=" -> "132"."""

    alphabet = "0123456789+="
    least = 1

    def __init__(self, size: int = 2, seed: int = 0, num_problems: int | None = None):
        super().__init__(size, seed, num_problems)

    def draw(self, rng: random.Random) -> Problem:
        """Two numbers of `size` digits and their sum."""
        a = rng.randrange(10**self.size)
        b = rng.randrange(10**self.size)
        return Problem(f"{a}+{b}=", str(a + b))


class Sorting(GeneratedTask):
    """Sorting digits: "31402>" -> "01234"."""

    alphabet = "0123456789>"

    def draw(self, rng: random.Random) -> Problem:
        """Digits, and the same in order."""
        digits = [rng.choice("0123456789") for _ in range(self.size)]
        return Problem("".join(digits) + ">", "".join(sorted(digits)))


class Brackets(GeneratedTask):
    """Closing brackets: "([{}>" -> "])". The answer closes all that is open, innermost first."""

    alphabet = "()[]{}>"

    def __init__(self, size: int = 10, seed: int = 0, num_problems: int | None = None):
        super().__init__(size, seed, num_problems)

    def draw(self, rng: random.Random) -> Problem:
        """Open brackets, and those that close them."""
        closing = {"(": ")", "[": "]", "{": "}"}
        text = ""
        stack: list[str] = []
        for _ in range(rng.randint(self.size // 2, self.size)):
            if len(stack) > 1 and rng.random() < 0.4:  # something is always left to close
                text += stack.pop()
            else:
                bracket = rng.choice("([{")
                text += bracket
                stack.append(closing[bracket])
        return Problem(text + ">", "".join(reversed(stack)))


class Counting(GeneratedTask):
    """Counting on in steps, as far as the digits reach: "930+4>" -> "934 938 942 ... 998". Answers are long, of 64 to
    500 characters, and few of them much longer than the others.

    size: digits of a number.
    """

    alphabet = "0123456789+> "
    least = 3

    def __init__(self, size: int = 3, seed: int = 0, num_problems: int | None = None):
        super().__init__(size, seed, num_problems)

    def draw(self, rng: random.Random) -> Problem:
        """A number and a step, and all numbers that follow in such steps."""
        limit = 10**self.size
        step = rng.randint(1, 8)
        count = rng.randint(64, rng.randint(64, 496)) // (self.size + 1)
        start = limit - rng.randint(1, step) - step * count
        numbers = range(start + step, limit, step)
        return Problem(f"{start:0{self.size}}+{step}>", " ".join(f"{n:0{self.size}}" for n in numbers))


class JsonlTask:
    """Lines {"prompt": ..., "answer": ...}; every tenth, by a hash of its prompt, is kept for validation.

    verifier: "exact", the stripped completion is the answer; or "math-verify", the package of this name finds them
    mathematically equal (extra `math`). ValueError names the line that is wrong.
    """

    def __init__(self, path: str | os.PathLike, verifier: Literal["exact", "math-verify"] = "exact", seed: int = 0):
        require_choice("verifier", verifier, ("exact", "math-verify"))
        self.path = path
        self.verifier = verifier
        self.seed = seed
        self._grader = MathGrader() if verifier == "math-verify" else None
        self.problems: dict[Split, list[Problem]] = {"train": [], "validation": []}
        with open(path, encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    problem = self._parse(line, number)
                    self.problems[_split_of(problem)].append(problem)
        if not self.problems["train"]:
            raise ValueError(f"{path}: no problems to train on")

    @property
    def num_validation(self) -> int:
        """The number of problems kept for validation."""
        return len(self.problems["validation"])

    def _parse(self, line: str, number: int) -> Problem:
        where = f"{self.path}, line {number}"
        try:
            record = json.loads(line)
            prompt = record["prompt"]
            answer = record["answer"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f'{where}: expected {{"prompt": ..., "answer": ...}} ({error!r})') from error
        if not isinstance(prompt, str) or not prompt or not isinstance(answer, str | int | float):
            raise ValueError(f"{where}: prompt is a non-empty string, answer a string or a number")
        return Problem(prompt, str(answer))

    def problem(self, index: int, split: Split = "train") -> Problem:
        """The problem of this number; each epoch has its order. Raises ValueError where the split is empty."""
        problems = self.problems[split]
        if not problems:
            raise ValueError(f"{self.path}: too few problems to keep any for {split}")
        epoch, place = divmod(index, len(problems))
        return problems[_shuffled(len(problems), f"{self.seed}/{split}/{epoch}")[place]]

    def reward(self, problem: Problem, text: str) -> float:
        """1 for the right answer, else 0."""
        if self._grader is not None:
            return float(self._grader.equal(problem.answer, text))
        return float(text.strip() == problem.answer.strip())


class MathGrader:
    """math-verify in another process, which is stopped and replaced when an expression takes longer than `timeout`
    seconds: such an answer is wrong, and a warning in the log."""

    def __init__(self, timeout: float = 10.0):
        if importlib.util.find_spec("math_verify") is None:
            raise ImportError("the verifier math-verify needs: pip install 'samebits[math]'")
        self.timeout = timeout
        self._process: subprocess.Popen[str] | None = None

    def equal(self, answer: str, text: str) -> bool:
        """True if the text ends in an expression that equals the answer."""
        if self._process is None or self._process.poll() is not None:  # it may have died meanwhile
            script = pathlib.Path(__file__).with_name("math_grader.py")
            command = [sys.executable, "-P", str(script)]  # -P: its neighbours here aren't its modules
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            weakref.finalize(self, self._process.kill)
            if self._ask("1", "1", 120.0) is None:  # loads its libraries
                raise RuntimeError("math-verify doesn't start")
        found = self._ask(answer, text, self.timeout)
        if found is None:
            logger.warning("math-verify took longer than %g s or died on %.200r: it is wrong", self.timeout, text)
        return bool(found)

    def _ask(self, answer: str, text: str, timeout: float) -> bool | None:
        """Return the grader's verdict, or None if it takes too long or dies."""
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it died: there is nothing to read, either
            process.stdin.write(json.dumps([answer, text]) + "\n")
            process.stdin.flush()
        if select.select([process.stdout], [], [], timeout)[0] and (line := process.stdout.readline()):
            return json.loads(line)
        process.kill()
        process.wait()
        self._process = None
        return None


TASKS = {"arithmetic": Arithmetic, "sorting": Sorting, "brackets": Brackets, "counting": Counting}


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


def _split_of(problem: Problem) -> Split:
    return "train" if zlib.crc32(problem.prompt.encode()) % 10 else "validation"
