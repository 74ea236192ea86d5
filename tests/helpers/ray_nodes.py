"""A Ray cluster of two nodes on this machine, one of which goes away and comes back: prints what became of replicas."""

import dataclasses
import json
import sys
import time

import ray
from ray.cluster_utils import Cluster

from samebits import LLM, SamplingParams
from samebits.trainer import exact_model


def main(old: str, new: str) -> None:
    prompts = [[5 + i, 7, 9, 11] * 3 for i in range(6)]
    params = SamplingParams(max_tokens=40, seed=1, ignore_eos=True)

    def tokens(outputs) -> list:
        return [(o.completions[0].token_ids, o.completions[0].logprobs) for o in outputs]

    def wait_for(condition) -> None:
        deadline = time.monotonic() + 90
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.1)

    expected = [tokens(LLM(path, kv_cache_memory_bytes=2**20).generate(prompts, params, False)) for path in (old, new)]
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    node = cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=False)
    found = {}
    with LLM(old, replicas=2, backend="ray", kv_cache_memory_bytes=2**20, start_timeout=20.0) as llm:
        engine = llm.engine

        def states() -> list[str]:
            engine.poll()
            return sorted(one.status for one in engine.replicas)

        found["both"] = tokens(llm.generate(prompts, params, False)) == expected[0]
        ids = [llm.add_request(p, params) for p in prompts]
        done = {}
        for _ in range(3):
            done |= {o.request_id: o for o in llm.step()}
        cluster.remove_node(node, allow_graceful=False)
        while llm.has_unfinished_requests():
            done |= {o.request_id: o for o in llm.step()}
        found["in flight"] = tokens([done[i] for i in ids]) == expected[0]
        wait_for(lambda: states() == ["serving", "waiting"])
        start = time.monotonic()
        found["version"] = llm.update_weights(exact_model(new))
        found["update waits"] = time.monotonic() - start
        found["world size"] = llm.world_size
        config = engine.config
        engine.config = dataclasses.replace(config, start_timeout=1.0)
        deadline = time.monotonic() + 25 + 8  # the attempt under way, and as many as may fail in a row
        while time.monotonic() < deadline:
            found["still"] = states()
            time.sleep(0.1)
        engine.config = dataclasses.replace(config, start_timeout=60.0)
        update = llm.begin_weight_update()
        held = []
        wait = engine._wait_for_update
        engine._wait_for_update = lambda: held.append(1) or wait()
        cluster.add_node(num_cpus=1)
        update.load(exact_model(old))
        wait_for(lambda: states() == ["serving", "starting"] and held)
        found["through"] = llm.commit_weight_update(update)
        wait_for(lambda: states() == ["serving", "serving"])
        found["again"] = tokens(llm.generate(prompts, params, False)) == expected[0]
        before = [client.stats.generation_tokens for client in engine.serving]
        llm.generate([[900 + i] for i in range(6)], params, False)  # which neither knows
        found["shares"] = [c.stats.generation_tokens - b for c, b in zip(engine.serving, before, strict=True)]
    ray.shutdown()
    cluster.shutdown()
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
