"""Drafters of all kinds, from right ones to nonsense."""

import random

from samebits import LLM

VOCAB = 40  # so small that texts repeat themselves
DRAFTERS = ("suffix", "ngram", "right", "right, then wrong", "noise")


class Prophet:
    """Knows what comes: the tokens of some requests under some weights. wrong_after: right ones, then two others."""

    def __init__(self, path, models, requests, wrong_after=100):
        self.wrong_after = wrong_after
        llm = LLM(path, dtype=str(models[0].dtype).removeprefix("torch."))
        prompts, params = zip(*requests, strict=True)
        self.texts = []
        for model in models:
            llm.update_weights(model)
            for out in llm.generate(list(prompts), list(params), use_tqdm=False):
                self.texts += [out.prompt_token_ids + c.token_ids for c in out.completions]

    def __call__(self, ids):
        text = next((text for text in self.texts if text[: len(ids)] == ids), ids)
        right = text[len(ids) :][: self.wrong_after]
        return right + [(ids[-1] + 1) % VOCAB] * 2


class Noise:
    """Random tokens, EOS among them, and now and then none, or something that is no token."""

    def __init__(self, seed):
        self.rng = random.Random(seed)

    def __call__(self, ids):
        kinds = [[2], [self.rng.randrange(VOCAB) for _ in range(5)], [], ids[-3:], [10**6], ["x"]]
        return self.rng.choice(kinds)


def speculative_config(kind, path, models, requests, rng):
    """A setting of `speculative_config`; `kind` names the drafter."""
    drafters = {
        "right": lambda: Prophet(path, models, requests),
        "right, then wrong": lambda: Prophet(path, models, requests, rng.randint(0, 3)),
        "noise": lambda: Noise(rng.random()),
    }
    method = drafters[kind]() if kind in drafters else kind
    lookup = {} if callable(method) else {"prompt_lookup_min": rng.choice((1, 2))}
    return {"method": method, "num_speculative_tokens": rng.choice((1, 2, 5, 8)), **lookup}
