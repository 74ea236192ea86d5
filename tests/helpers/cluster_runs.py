"""What the tests of replicas and stages run, and what must come of it."""

import time

from samebits import SamplingParams

SMALL = {"kv_cache_memory_bytes": 2**20, "worker_timeout": 20.0}
PROMPTS = [[5 + i, 7, 9, 11] * (3 + i) for i in range(12)]
PARAMS = SamplingParams(n=2, max_tokens=60, seed=1, ignore_eos=True)


def bits(outputs):
    return [(c.token_ids, c.logprobs) for o in outputs for c in o.completions]


def generate(llm):
    return llm.generate(PROMPTS, PARAMS, use_tqdm=False)


def run_and(llm, action, after: int = 40):
    """Generates; `action` is called when that many tokens have come."""
    ids = [llm.add_request(p, PARAMS) for p in PROMPTS]
    done, fired = {}, False
    deadline = time.monotonic() + 90
    while llm.has_unfinished_requests():
        assert time.monotonic() < deadline, "hangs"
        for out in llm.step():
            done[out.request_id] = out
        if not fired and sum(len(c.token_ids) for o in done.values() for c in o.completions) > after:
            fired = True
            action()
    assert fired
    return [done[i] for i in ids]
