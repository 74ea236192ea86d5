"""A short run of a TRL trainer on a small model, in this process or under torchrun: trl_run.py JOB.json RESULT.json"""

from __future__ import annotations

import hashlib
import json
import pathlib
import sys
from unittest.mock import patch

import torch
from accelerate import state
from accelerate.utils import DistributedType
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.trainer import grpo_trainer

from samebits.integrations.trl import ExactGRPOTrainer, ExactRLOOTrainer

TRAINERS = {
    "grpo": (ExactGRPOTrainer, GRPOConfig),
    "rloo": (ExactRLOOTrainer, RLOOConfig),
    "plain grpo": (GRPOTrainer, GRPOConfig),
    "plain rloo": (RLOOTrainer, RLOOConfig),
}
ENGINE = {"kv_cache_memory_bytes": 2**22, "max_num_seqs": 8}
PROMPTS = ["a", "The capital of France is", "one two three four five", "to be or not", "x" * 40, "42", "yes", "no, "]


def sevens(completion_ids, **_) -> list[float]:
    """Reward tokens that seven divides."""
    return [sum(token % 7 == 0 for token in ids) / len(ids) for ids in completion_ids]


def configure(kind: str, folder, **changes):
    """A trainer's class and its configuration: three steps of two groups of four."""
    trainer, config = TRAINERS[kind]
    base = {
        "output_dir": str(folder), "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 12,
        "max_steps": 3, "learning_rate": 1e-3, "logging_steps": 1, "report_to": "none", "save_strategy": "no",
        "use_cpu": True, "bf16": False, "seed": 3, "disable_tqdm": True, "lr_scheduler_type": "constant",
    }  # fmt: skip
    return trainer, config(**base | changes)


def make(kind: str, path, folder, engine=ENGINE, trainer: dict | None = None, adapter: dict | None = None, **changes):
    """A trainer on the checkpoint at `path`; adapter: fields of a LoraConfig."""
    cls, config = configure(kind, folder, **changes)
    more = dict(trainer or {})
    if not kind.startswith("plain"):
        more["engine"] = engine
    if adapter is not None:
        more["peft_config"] = LoraConfig(**adapter)
    more.setdefault("train_dataset", Dataset.from_dict({"prompt": PROMPTS}))
    more.setdefault("reward_funcs", sevens)
    return cls(model=more.pop("model", str(path)), args=config, **more)


TOOL_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for t in m.tool_calls or [] %}{{ t.function.name }} {{ t.function.arguments }}{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TOOL_LOOP = {  # of up to three calls; many tokens end a turn
    "max_completion_length": 200, "max_tool_calling_iterations": 3,
    "generation_kwargs": {"stop_token_ids": list(range(3, 1001, 9))},
}  # fmt: skip


def double(x: int) -> int:
    """
    Double a number.

    Args:
        x: the number.
    """
    return 2 * x


def count_messages(completions, **_) -> list[float]:
    """Reward long conversations."""
    return [float(len(messages)) for messages in completions]


def tool_loop(path, tool=double) -> dict:
    """The parts of a trainer whose model calls a tool with its answers' first tokens, two of three."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = TOOL_TEMPLATE
    tokenizer.response_template = "`parse` reads it"  # what a tiny random model says is nobody's format
    data = Dataset.from_dict({"prompt": [[{"role": "user", "content": p}] for p in PROMPTS]})
    return {"tools": [tool], "processing_class": tokenizer, "train_dataset": data, "reward_funcs": count_messages}


def parsing():
    """Return a patch of the function by which TRL reads calls from token ids."""

    def parse(_, ids, **__):
        call = {"type": "function", "function": {"name": "double", "arguments": {"x": ids[0]}}}
        return {"role": "assistant", "content": "", "tool_calls": [call] if ids[0] % 3 else []}

    return patch.object(grpo_trainer, "parse_response", parse)


def run(kind: str, path, folder, resume=None, **options) -> dict:
    """Train; return what was logged each step, and a hash of the weights at the end."""
    if options.pop("tools", False):
        with parsing():
            return run(kind, path, folder, resume, trainer=tool_loop(path), **TOOL_LOOP | options)
    trainer = make(kind, path, folder, **options)
    trainer.train(resume_from_checkpoint=resume)
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    digest = hashlib.sha256()
    for name, tensor in trainer.accelerator.get_state_dict(trainer.model_wrapped).items():
        digest.update(name.encode() + tensor.detach().cpu().float().numpy().tobytes())
    return {"logs": logs, "weights": digest.hexdigest()}


def ratios(result: dict) -> set[float]:
    """All importance ratios that a run logged, at the steps that generated."""
    name = "sampling/importance_sampling_ratio/"
    found = [entry for entry in result["logs"] if name + "min" in entry]
    return {entry[name + part] for entry in found for part in ("min", "mean", "max")}


def allow_fsdp_on_cpu() -> None:
    """Let accelerate take FSDP2 on CPUs, which it does for a list of accelerators only."""
    plain = state.AcceleratorState.__init__

    def init(self, *args, fsdp_plugin=None, **kwargs):
        plain(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        plugin = fsdp_plugin or self.__dict__.get("fsdp_plugin")
        if plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            if self._mixed_precision != "no":
                plugin.set_mixed_precision(self._mixed_precision)
            self.distributed_type = DistributedType.FSDP
            self.fsdp_plugin = plugin
            state.PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    state.AcceleratorState.__init__ = init


def main(job_file: str, result_file: str) -> None:
    torch.set_num_threads(1)
    job = json.loads(pathlib.Path(job_file).read_text())
    if job.pop("fsdp", False):
        allow_fsdp_on_cpu()
    result = run(**job)
    if state.PartialState().is_main_process:
        pathlib.Path(result_file).write_text(json.dumps(result))
    torch.distributed.barrier()  # a rank that leaves early may end the others' threads with an abort
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
