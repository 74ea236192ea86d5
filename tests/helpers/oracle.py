"""The specification: what a request must return, computed the slow way. No cache, no batch, no schedule."""

import numpy as np
import torch

from samebits.kernels import ops


@torch.no_grad()
def oracle(model, prompt: list[int], params, eos: tuple[int, ...] = ()) -> list[tuple[list[int], list[float]]]:
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
                row.banned = [[*(() if params.ignore_eos else eos), *params.stop_token_ids]]
            token = torch.tensor([-1], device=current.device)
            counters = np.array([params.seed], np.uint64), np.array([sample]), np.array([len(tokens)])
            fields, _ = ops.distribution(logits, row, token, *counters)
            tokens.append(int(token[0]))
            logprobs.append(float(fields[0, 0].float()))
            if (tokens[-1] in eos and not params.ignore_eos) or tokens[-1] in params.stop_token_ids:
                break
        results.append((tokens[len(prompt) :], logprobs))
    return results
