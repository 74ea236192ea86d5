"""Replicas and stages that die or hang while many clients generate: no reply is lost, and each is an engine's here."""

import random
import threading

import pytest

from samebits import LLM, SamplingParams

from helpers import faults
from helpers.cluster_runs import SMALL
from helpers.serving import Serving, wait_for

PROMPTS = [[17, 900, 3, 44], [5] * 40, [9, 8, 7]]
TOKENS = 60


def request(seed: int) -> tuple[list[int], SamplingParams]:
    return PROMPTS[seed % len(PROMPTS)], SamplingParams(max_tokens=TOKENS, seed=seed, ignore_eos=True, n=2)


def check(path, replies: dict[int, list]) -> None:
    """Hold every reply against an engine of this process."""
    llm = LLM(path, kv_cache_memory_bytes=2**22)
    prompts, params = zip(*map(request, replies), strict=True)
    for found, output in zip(replies.values(), llm.generate(list(prompts), list(params), use_tqdm=False), strict=True):
        assert [c["token_ids"] for c in found] == [c.token_ids for c in output.completions]
        logprobs = [[e["logprob"] for e in c["logprobs"]["content"]] for c in found]
        assert logprobs == [c.logprobs for c in output.completions]


def generate_all_the_time(server, replies: dict[int, list], numbers, done: threading.Event) -> None:
    for seed in numbers:
        if done.is_set():
            return
        prompt, params = request(seed)
        sampling = {"max_tokens": TOKENS, "seed": seed, "ignore_eos": True, "n": params.n, "logprobs": 0}
        replies[seed] = server.ok("/inference/v1/generate", {"token_ids": prompt, "sampling_params": sampling})[
            "choices"
        ]


@pytest.mark.slow
@pytest.mark.parametrize("fault", [faults.kill, faults.stop])
@pytest.mark.parametrize("layout", [{"replicas": 2}, {"pipeline_parallel_size": 2}])
def test_every_reply_under_faults_is_an_engines(paths, ray_cluster, layout, fault):
    replies: dict[int, list] = {}
    done = threading.Event()
    rng = random.Random(0)
    with Serving(paths[0], llm={**layout, **SMALL, "worker_timeout": 5.0}) as server:
        arguments = [(server, replies, range(i, 10**6, 6), done) for i in range(6)]
        clients = [threading.Thread(target=generate_all_the_time, args=a, daemon=True) for a in arguments]
        for client in clients:
            client.start()
        engine = server.llm.engine
        tokens = 0
        for _ in range(3):
            before = len(replies)
            wait_for(lambda before=before: len(replies) > before + 6, 90)
            fault(rng.choice([actor for replica in engine.serving for actor in replica.actors]))
            wait_for(lambda: len(engine.serving) < len(engine.replicas), 60)
            wait_for(lambda: len(engine.serving) == len(engine.replicas), 90)
            counted = server.llm.stats().generation_tokens
            assert counted >= tokens, "a counter fell"
            tokens = counted
        done.set()
        for client in clients:
            client.join(90)
            assert not client.is_alive(), "a request hangs"
        server.idle()
    assert len(replies) > 18
    check(paths[0], replies)
