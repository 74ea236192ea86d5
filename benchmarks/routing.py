"""What rollout routing replay would remove, for exact rollouts and for other engines', on a random mixture.

usage: python benchmarks/routing.py [--model small mixture] [--prompts 24] [--tokens 64] [--peers hf vllm] [--json FILE]

hf: transformers' `generate`, batched. vllm: its CPU build, by the interpreter that VLLM_PYTHON names.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import pathlib
import subprocess
import tempfile
from collections.abc import Iterator

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig

from samebits import LLM, SamplingParams
from samebits.cli import mismatch
from samebits.integrations.rollouts import Rollout, write_rollouts
from samebits.trainer import exact_model

PROMPT = 16  # tokens
SIZES = {
    "vocab_size": 8000, "hidden_size": 256, "moe_intermediate_size": 128, "num_hidden_layers": 8, "num_experts": 32,
    "num_experts_per_tok": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "norm_topk_prob": True, "max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
MIXTURE = {"hidden_size": 512, "moe_intermediate_size": 256, "num_attention_heads": 8, "max_position_embeddings": 2048}
MODELS: dict[str, dict[str, object]] = {"small": {}, "mixture": MIXTURE}  # of 110 M parameters


def make_model(folder: pathlib.Path, **sizes: object) -> None:
    """Write a random Qwen3-MoE whose routers and texts are far from flat. sizes: in place of those of SIZES."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**SIZES | sizes), dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            parameter.data *= 5
        elif name == "lm_head.weight":
            parameter.data *= 8
    model.save_pretrained(folder)


def exact_rollouts(folder: pathlib.Path, dtype: str, prompts: list[list[int]], tokens: int) -> Iterator[Rollout]:
    """Rollouts of samebits."""
    llm = LLM(folder, dtype=dtype, kv_cache_memory_bytes=1 << 28)
    params = SamplingParams(max_tokens=tokens, seed=1, ignore_eos=True, routed_experts=True)
    for output in llm.generate(prompts, params, use_tqdm=False):
        (c,) = output.completions
        ids = np.array(c.token_ids), np.array(c.logprobs), np.array(output.prompt_token_ids)
        yield Rollout(*ids, routed_experts=c.routed_experts)


@torch.no_grad()
def generated(folder: pathlib.Path, dtype: str, prompts: list[list[int]], tokens: int) -> Iterator[Rollout]:
    """Rollouts of transformers' batched `generate`, with the experts that its routers chose on the way."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    chosen: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda module, args, out: chosen.append(out[2]))
    torch.manual_seed(1)
    out = model.generate(
        torch.tensor(prompts), max_new_tokens=tokens, do_sample=True, top_k=0, output_logits=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    count = len(model.model.layers)
    steps = [torch.stack(chosen[i : i + count], 1) for i in range(0, len(chosen), count)]  # [B * T, layers, k]
    experts = torch.cat([step.view(len(prompts), -1, *step.shape[1:]) for step in steps], 1)
    sampled = out.sequences[:, PROMPT:]
    logprobs = torch.stack(out.logits, 1).float().log_softmax(-1).gather(2, sampled[..., None])[..., 0]
    for prompt, ids, values, routed in zip(prompts, sampled, logprobs, experts, strict=True):
        yield Rollout(ids.numpy(), values.double().numpy(), np.array(prompt), routed_experts=routed.numpy())


def write_vllm(file: pathlib.Path, folder: pathlib.Path, dtype: str, prompts: list[list[int]], tokens: int) -> None:
    """Rollouts of vLLM, in a process of its own."""
    job = file.with_suffix(".job")
    job.write_text(json.dumps({"model": str(folder), "dtype": dtype, "prompts": prompts, "tokens": tokens}))
    script = pathlib.Path(__file__).with_name("run_vllm_routing.py")
    command = [os.environ["VLLM_PYTHON"], str(script), str(job), str(file)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["small"], choices=MODELS)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--peers", nargs="*", default=["hf"], choices=["hf", "vllm"])
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    rows = []
    rng = np.random.default_rng(0)
    prompts = rng.integers(1, SIZES["vocab_size"], (args.prompts, PROMPT)).tolist()
    with tempfile.TemporaryDirectory() as name:
        for model, dtype in itertools.product(args.model, ("float32", "bfloat16")):
            folder = pathlib.Path(name, model)
            if not folder.exists():
                make_model(folder / "model", **MODELS[model])
            trainer = exact_model(folder / "model", dtype)
            for engine in ("samebits", *args.peers):
                file = folder / f"{engine}-{dtype}.jsonl"
                job = folder / "model", dtype, prompts, args.tokens
                if engine == "vllm":
                    write_vllm(file, *job)
                else:
                    write_rollouts(file, {"samebits": exact_rollouts, "hf": generated}[engine](*job))
                found = mismatch.diagnose(file, trainer, SamplingParams(), use_tqdm=False).replay
                rows.append({"model": model, "engine": engine, "dtype": dtype, **(found or {})})
                print(json.dumps(rows[-1]), flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
