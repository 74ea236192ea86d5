"""The mismatch that rollout routing replay would remove, for exact rollouts and for other engines', on random mixtures.

usage: python benchmarks/routing.py [--model small heavy mixture] [--prompts 24] [--tokens 64] [--peers hf vllm]
           [--dtype float32 bfloat16] [--json FILE] [--keep FOLDER]

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
import zlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig

from samebits import LLM, SamplingParams
from samebits.cli import mismatch
from samebits.integrations.rollouts import Rollout, read_rollouts, write_rollouts
from samebits.trainer import exact_model

PROMPT = 16  # tokens
SIZES = {
    "vocab_size": 8000, "hidden_size": 256, "moe_intermediate_size": 128, "num_hidden_layers": 8, "num_experts": 32,
    "num_experts_per_tok": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "norm_topk_prob": True, "max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
MIXTURE = {"hidden_size": 512, "moe_intermediate_size": 256, "num_attention_heads": 8, "max_position_embeddings": 2048}
MODELS: dict[str, dict[str, Any]] = {  # mixture: of 110 M parameters; heavy: flips make most of the mismatch
    "small": {}, "heavy": {"scale_of_experts": 1.7}, "mixture": MIXTURE,
}  # fmt: skip


@torch.no_grad()
def make_model(folder: pathlib.Path, scale_of_experts: float = 1.0, **sizes: object) -> None:
    """Write a random Qwen3-MoE whose routers and texts are far from flat: the same one whatever draws HF's code does.

    scale_of_experts: of their weights; the larger, the more a flipped expert changes what comes after it. sizes: in
    place of those of SIZES.
    """
    model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**SIZES | sizes), dtype=torch.float32)
    of_experts = dict.fromkeys(("gate_up_proj", "down_proj"), scale_of_experts)
    scales = {"mlp.gate.weight": 5.0, "lm_head.weight": 8.0, **of_experts}
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            scale = next((scale for end, scale in scales.items() if name.endswith(end)), 1.0)
            seed = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            parameter.normal_(0.0, 0.02 * scale, generator=seed)
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
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--peers", nargs="*", default=["hf"], choices=["hf", "vllm"])
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--keep", type=pathlib.Path, help="a folder for the rollouts")
    args = parser.parse_args()
    rows = []
    rng = np.random.default_rng(0)
    prompts = rng.integers(1, SIZES["vocab_size"], (args.prompts, PROMPT)).tolist()
    with tempfile.TemporaryDirectory() as name:
        for model, dtype in itertools.product(args.model, args.dtype):
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
                if args.keep:
                    args.keep.mkdir(parents=True, exist_ok=True)
                    kept = (replace(r, routed_experts=r.routed_experts.astype(np.uint8)) for r in read_rollouts(file))
                    write_rollouts(args.keep / f"{model}-{file.name}", kept)
                found = mismatch.diagnose(file, trainer, SamplingParams(), use_tqdm=False).replay
                rows.append({"model": model, "engine": engine, "dtype": dtype, **(found or {})})
                print(json.dumps(rows[-1]), flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
