"""A task for tiny models whose reward is never far."""

from samebits.trainer.rl.tasks import Problem


class Digits:
    """Rewards the share of even digits: no model is so bad that it gets none."""

    alphabet = "0123456789+="

    def problem(self, index, split="train"):
        return Problem(f"{index % 7}{index % 10}+=", "0")

    def reward(self, problem, text):
        return sum(c in "02468" for c in text) / max(1, len(text))
