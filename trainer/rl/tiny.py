"""A model small enough to learn a built-in task on a laptop: made from scratch, warmed up on solved problems."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
)

from ..logprobs import token_logprobs
from .tasks import Task

PAD = "<pad>"
EOS = "<eos>"


def make_tiny_model(folder: str | os.PathLike, alphabet: str, seed: int = 0, experts: bool = False, **config) -> None:
    """Write a random Llama of 0.8 M parameters with a tokenizer of single characters; `config` overrides its own.

    experts: a Qwen3-MoE instead, of 1.9 M parameters, 0.7 M of which a token meets: 8 experts, 2 per token.
    """
    vocabulary = {token: i for i, token in enumerate([PAD, EOS, *dict.fromkeys(alphabet)])}
    characters = Tokenizer(models.WordLevel(vocabulary))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")  # type: ignore[assignment]
    characters.decoder = decoders.Fuse()  # type: ignore[assignment]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=characters, eos_token=EOS, pad_token=PAD)
    sizes = {
        "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 4, "max_position_embeddings": 1024, "tie_word_embeddings": False,
    }  # fmt: skip
    kind: Any = LlamaConfig
    if experts:
        kind = Qwen3MoeConfig
        sizes |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}
    ids = {"vocab_size": len(vocabulary), "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(kind(**{**sizes, **ids, **config})).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def fine_tune(
    model: PreTrainedModel,
    tokenizer,
    task: Task,
    until: float = 0.2,
    max_steps: int = 1000,
    batch_size: int = 64,
    lr: float = 1e-3,
    seed: int = 0,
) -> Iterator[float]:
    """Supervised steps on a task's problems with their answers and EOS, until the model answers well enough.

    Yields after each step what the model's chance was to sample the answers of its batch, before it learned them, as an
    average over the last ten batches; ends when that is `until`. AdamW, gradient norm at most 1.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.0)
    rng = random.Random(f"{seed}/demonstrations")
    numbers = getattr(task, "num_problems", None) or 2**40  # of one epoch: another one's order would be made anew
    chances: list[float] = []
    for _ in range(max_steps):
        problems = [task.problem(rng.getrandbits(40) % numbers) for _ in range(batch_size)]
        prompts = [tokenizer.encode(p.prompt) for p in problems]
        answers = [[*tokenizer.encode(p.answer), tokenizer.eos_token_id] for p in problems]
        sequences = [p + a for p, a in zip(prompts, answers, strict=True)]
        logprobs = token_logprobs(model, sequences, prompt_lens=[len(p) for p in prompts])
        sums = torch.stack([values.sum() for values in logprobs])
        optimizer.zero_grad()
        (-sums.sum() / sum(map(len, answers))).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        chances.append(float(sums.detach().exp().mean()))
        recent = sum(chances[-10:]) / 10
        yield recent
        if recent >= until:
            return
    raise RuntimeError(f"after {max_steps} supervised steps {recent:.0%} of the answers are right, not {until:.0%}")
