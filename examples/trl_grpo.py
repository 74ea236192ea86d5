"""TRL's GRPO on exact rollouts: a tiny model, made from scratch, learns to sort digits in minutes on two cores.

usage: python examples/trl_grpo.py [--steps 100] [--folder out/trl_grpo] [--figure curve.png]
The figure shows the reward and each step's token ratios, beside those that TRL's own model gives the same rollouts.
"""

import argparse
import pathlib

from samebits.integrations.trl import ExactGRPOTrainer  # before torch, so that waiting threads don't spin

# isort: split

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig
from trl.trainer.utils import selective_log_softmax

from samebits.trainer import exact_model, save_weights
from samebits.trainer.rl.tasks import Sorting
from samebits.trainer.rl.tiny import fine_tune, make_tiny_model

TASK = Sorting(size=6)


def make_start(folder: pathlib.Path) -> pathlib.Path:
    """Write a tiny model that sorts one in five problems."""
    start = folder / "start"
    if not start.exists():
        make_tiny_model(folder / "random", TASK.alphabet)
        model = exact_model(folder / "random")
        for chance in fine_tune(model, AutoTokenizer.from_pretrained(folder / "random"), TASK):
            print(f"\rsolved problems first: {chance:.0%} right, of 20%", end="", flush=True)
        print()
        save_weights(model, start)
    return start


def sorted_right(completions: list[str], answer: list[str], **_) -> list[float]:
    """Reward 1 for the digits in order."""
    return [float(text.strip() == right) for text, right in zip(completions, answer, strict=True)]


class ComparedTrainer(ExactGRPOTrainer):
    """Logs, too, the ratios that TRL's own model and log-softmax give the rollouts."""

    plain = None

    @torch.no_grad()
    def _generate_and_score_completions(self, inputs):
        found = super()._generate_and_score_completions(inputs)
        if self.plain is None:
            path, dtype = self.model.config._name_or_path, self.model.dtype
            self.plain = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
        self.plain.load_state_dict(self.model.state_dict())
        ids = torch.cat((found["prompt_ids"], found["completion_ids"]), 1)
        mask = torch.cat((found["prompt_mask"], found["completion_mask"]), 1)
        count = found["completion_ids"].shape[1]
        logits = self.plain(ids, attention_mask=mask, logits_to_keep=count + 1).logits[:, :-1]
        logprobs = selective_log_softmax(logits / self.temperature, found["completion_ids"])
        ratio = (logprobs - found["sampling_per_token_logps"]).exp()[found["completion_mask"].bool()]
        self._metrics["train"]["plain_ratio/min"].append(ratio.min().item())
        self._metrics["train"]["plain_ratio/max"].append(ratio.max().item())
        return found


def draw(logs: list[dict], file: pathlib.Path) -> None:
    """Draw rewards and ratios per step."""
    import matplotlib.pyplot as plt

    steps = range(1, len(logs) + 1)
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    left.plot(steps, [entry["reward"] for entry in logs], color="tab:blue")
    left.set(xlabel="step", ylabel="reward", ylim=(0, 1), title="TRL's GRPO, sorting six digits")
    ratio = "sampling/importance_sampling_ratio/"
    for low, high, color, label in (
        ("plain_ratio/min", "plain_ratio/max", "tab:orange", "TRL's model on the same rollouts"),
        (ratio + "min", ratio + "max", "tab:blue", "exact"),
    ):
        right.fill_between(steps, [e[low] for e in logs], [e[high] for e in logs], color=color, label=label, lw=1.5)
    right.set(xlabel="step", ylabel="trainer / rollout", title="Smallest to largest token ratio, bfloat16")
    low, high = right.get_ylim()
    right.set_ylim(low, high + 0.3 * (high - low))
    right.legend(loc="upper left")
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("out/trl_grpo"))
    parser.add_argument("--figure", type=pathlib.Path)
    options = parser.parse_args()
    problems = [TASK.problem(index) for index in range(4096)]
    config = GRPOConfig(
        output_dir=str(options.folder / "run"), max_steps=options.steps, per_device_train_batch_size=128,
        num_generations=8, max_completion_length=10, learning_rate=1e-4, lr_scheduler_type="constant", beta=0.0,
        model_init_kwargs={"dtype": "bfloat16"}, logging_steps=1, save_strategy="no", report_to="none",
        use_cpu=not torch.cuda.is_available(),
        vllm_importance_sampling_mode="token_truncate",  # logs the ratios of tokens, not of whole sequences
    )  # fmt: skip
    trainer = (ComparedTrainer if options.figure else ExactGRPOTrainer)(
        model=str(make_start(options.folder)),
        args=config,
        reward_funcs=sorted_right,
        train_dataset=Dataset.from_list([{"prompt": p.prompt, "answer": p.answer} for p in problems]),
        engine={"kv_cache_memory_bytes": 2**27},
    )
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    ratios = {e[f"sampling/importance_sampling_ratio/{part}"] for e in logs for part in ("min", "mean", "max")}
    print(f"reward {logs[0]['reward']:.2f} -> {logs[-1]['reward']:.2f}; all ratios: {ratios}")
    if options.figure:
        draw(logs, options.figure)


if __name__ == "__main__":
    main()
