"""The specification: what a request must return, computed the slow way. No cache, no batch, no schedule."""

import numpy as np
import torch

from samebits.engine.structured_outputs import Constraint
from samebits.kernels import ops


@torch.no_grad()
def oracle(
    model, prompt: list[int], params, eos: tuple[int, ...] = (), tokenizer=None
) -> list[tuple[list[int], list[float]]]:
    """(token ids, log-probs) of each of the n samples, each token from a full forward of all tokens before it.

    model: or a function of (sample, number of the token) to the model that gives it, where weights change meanwhile.
    """
    model_of = (lambda *_: model) if isinstance(model, torch.nn.Module) else model
    results = []
    for sample in range(params.n):
        tokens, logprobs = list(prompt), []
        while len(logprobs) < params.max_tokens:
            current = model_of(sample, len(logprobs))
            logits = current(torch.tensor([tokens], device=current.device), logits_to_keep=1).logits[0]
            row = ops.RowParams.repeat(1, params.temperature, params.top_k, params.top_p, params.min_p)
            if len(logprobs) < params.min_tokens:
                early = [*(() if params.ignore_eos else eos), *params.stop_token_ids]
                row.masks, row.mask_rows = ops.stack_masks([ops.mask_without(early, logits.shape[1])])
            if params.structured_outputs is not None:
                constraint = Constraint(params.structured_outputs, tokenizer, logits.shape[1], eos)
                for token in tokens[len(prompt) :]:
                    constraint.advance(token)
                row.masks, row.mask_rows = ops.stack_masks([constraint.mask])
            counters = np.array([params.seed], np.uint64), np.array([sample]), np.array([len(tokens)])
            drawn = ops.sample(logits, row, torch.tensor([-1], device=current.device), *counters)
            tokens.append(int(drawn.tokens[0]))
            logprobs.append(float(drawn.scores.logprob[0].float()))
            if (tokens[-1] in eos and not params.ignore_eos) or tokens[-1] in params.stop_token_ids:
                break
        results.append((tokens[len(prompt) :], logprobs))
    return results
