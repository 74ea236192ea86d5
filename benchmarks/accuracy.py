"""Errors of log-probs against fp64, beside those of HuggingFace's own forward. usage: python benchmarks/accuracy.py

One text, the licence, scored token by token by SmolLM2 (or --model).
"""

from __future__ import annotations

import argparse
import json
import pathlib

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from samebits.model.checkpoint import resolve
from samebits.trainer import exact_model, token_logprobs

TEXT = pathlib.Path(__file__).parent.parent / "LICENSE"


@torch.no_grad()
def of_hf(path: pathlib.Path, ids: list[int], dtype: torch.dtype) -> torch.Tensor:
    """fp64 [tokens - 1]: the log-prob of each token but the first, by HF in a dtype; the log-softmax is fp64's."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa").eval()
    logp = model(torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1)
    return logp.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


@torch.no_grad()
def of_samebits(path: pathlib.Path, ids: list[int], dtype: torch.dtype) -> torch.Tensor:
    """The same by the exact model, whose log-probs are fp32."""
    model = exact_model(path, dtype)
    return token_logprobs(model, [ids])[0][1:].double()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="checkpoint directory, hub id or smollm2")
    parser.add_argument("--tokens", type=int, default=1663, help="of the text, at most")
    args = parser.parse_args()
    path = resolve(args.model)
    ids = AutoTokenizer.from_pretrained(path)(TEXT.read_text())["input_ids"][: args.tokens]
    exact = of_hf(path, ids, torch.float64)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        ours, theirs = ((of(path, ids, dtype) - exact).abs() for of in (of_samebits, of_hf))
        row = {"dtype": str(dtype).removeprefix("torch."), "tokens": len(exact)}
        row |= {"mean_error": float(ours.mean()), "mean_error_hf": float(theirs.mean())}
        row |= {"ratio": float(ours.mean() / theirs.mean()), "largest_ratio": float(ours.max() / theirs.max())}
        print(json.dumps(row))


if __name__ == "__main__":
    main()
