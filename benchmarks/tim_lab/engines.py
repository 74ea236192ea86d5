"""Engines with a mismatch of known origin: the trainer's weights, other numerics."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer

from samebits import LLM, Completion, RequestOutput, SamplingParams
from samebits.engine import VersionSpan
from samebits.engine.weights.spec import full_tensors
from samebits.integrations import RemoteEngine


class RoundedWeights(LLM):
    """Serves the trainer's weights after `rounding` has been applied to every matrix."""

    def __init__(self, model, rounding: Callable[[Tensor], Tensor], **settings):
        super().__init__(model, **settings)
        self.rounding = rounding

    def update_weights(self, source, version: int | None = None) -> int:
        return super().update_weights(self._rounded(source), version)

    def _rounded(self, source: nn.Module) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in full_tensors(source.state_dict()):
            yield name, self.rounding(tensor) if tensor.dim() == 2 else tensor


class NoisyLogits(LLM):
    """Adds independent uniform noise in [-epsilon, epsilon] to every logit before sampling.

    The perturbation of Proposition 4.2 of the vocabulary-pruning paper (arXiv 2512.23087).
    """

    def __init__(self, model, epsilon: float, **settings):
        super().__init__(model, **settings)
        generator = torch.Generator().manual_seed(0)

        def perturb(head, args, logits: Tensor) -> Tensor:
            noise = torch.rand(logits.shape, generator=generator, dtype=logits.dtype)
            return logits + epsilon * (2 * noise - 1)

        self.engine.executor.workers[0].runner.model.get_output_embeddings().register_forward_hook(perturb)


class VLLM:
    """vLLM's CPU build in a process of its own, with what `RemoteEngine` asks of a client."""

    contract = None  # its numerics are its own

    def __init__(self, model: str | os.PathLike, dtype: str):
        script = pathlib.Path(__file__).with_name("vllm_process.py")
        command = [os.environ["VLLM_PYTHON"], str(script), str(model), dtype]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self.context_length = AutoConfig.from_pretrained(model).max_position_embeddings
        self.weight_version = 0
        self._reply()

    def generate(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[RequestOutput]:
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        keywords = [
            {"n": p.n, "temperature": p.temperature, "max_tokens": p.max_tokens, "seed": (p.seed or 0) % 2**63}
            for p in each
        ]
        replies = self._ask({"prompts": [list(ids) for ids in prompts], "params": keywords})
        return [
            RequestOutput("", None, list(ids), [self._completion(i, s) for i, s in enumerate(samples)], None, True)
            for ids, samples in zip(prompts, replies, strict=True)
        ]

    def _completion(self, index: int, sample: dict) -> Completion:
        spans = [VersionSpan(self.weight_version, 0, len(sample["token_ids"]))]
        text = self._tokenizer.decode(sample["token_ids"], skip_special_tokens=True)
        return Completion(
            index, sample["token_ids"], sample["logprobs"], sample["finish_reason"], None, spans, text=text
        )

    def send_weights(self, specs, tensors: Iterable[tuple[str, Tensor]], version: int | None = None) -> int:
        with tempfile.TemporaryDirectory() as folder:
            state = {name: tensor.detach().contiguous() for name, tensor in tensors}
            save_file(state, pathlib.Path(folder) / "model.safetensors", {"format": "pt"})
            self._ask({"weights": folder})
        self.weight_version = self.weight_version + 1 if version is None else version
        return self.weight_version

    def _ask(self, request: dict):
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._reply()

    def _reply(self):
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"vLLM's process ended with exit code {self._process.wait()}")
        return json.loads(line)


def to_int8(weight: Tensor) -> Tensor:
    """Symmetric, a scale per output channel, back in the weight's dtype."""
    scale = weight.abs().amax(1, keepdim=True).clamp_min(1e-12) / 127
    return (weight / scale).round().clamp(-127, 127) * scale


ENGINES: dict[str, Callable[..., Any]] = {
    "exact": LLM,
    "switches off": lambda model, **settings: LLM(model, exact=False, **settings),  # torch's own linears and norms
    "vLLM": lambda model, dtype, **_: LLM(model, engine=RemoteEngine(VLLM(model, dtype), model)),
    "bf16": lambda model, **settings: LLM(model, **{**settings, "dtype": "bfloat16"}),
    "fp16": lambda model, **settings: LLM(model, **{**settings, "dtype": "float16"}),
    "int8 weights": lambda model, **settings: RoundedWeights(model, to_int8, **settings),
    "noise 1": lambda model, **settings: NoisyLogits(model, 1.0, **settings),
    "noise 2": lambda model, **settings: NoisyLogits(model, 2.0, **settings),
}
