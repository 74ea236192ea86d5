"""Engines with a mismatch of known origin: the trainer's weights, other numerics."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from samebits import LLM
from samebits.engine.transfer import full_tensors


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

        self._runner.model.get_output_embeddings().register_forward_hook(perturb)


def to_int8(weight: Tensor) -> Tensor:
    """Symmetric, a scale per output channel, back in the weight's dtype."""
    scale = weight.abs().amax(1, keepdim=True).clamp_min(1e-12) / 127
    return (weight / scale).round().clamp(-127, 127) * scale


def through(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda weight: weight.to(dtype).to(weight.dtype)


ENGINES: dict[str, tuple[str, Callable[..., LLM]]] = {
    "exact": ("samebits", LLM),
    "switches off": ("torch's own linears and norms", lambda m, **k: LLM(m, exact=False, **k)),
    "fp16 weights": ("weights rounded to fp16", lambda m, **k: RoundedWeights(m, through(torch.float16), **k)),
    "bf16 weights": ("weights rounded to bf16", lambda m, **k: RoundedWeights(m, through(torch.bfloat16), **k)),
    "bf16": ("all of it in bf16", lambda m, **k: LLM(m, **{**k, "dtype": "bfloat16"})),
    "int8 weights": ("weights rounded to int8", lambda m, **k: RoundedWeights(m, to_int8, **k)),
    "noise 1": ("logits +- 1", lambda m, **k: NoisyLogits(m, 1.0, **k)),
    "noise 2": ("logits +- 2", lambda m, **k: NoisyLogits(m, 2.0, **k)),
}
