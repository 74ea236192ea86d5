"""Rollouts of vLLM's CPU build with the experts that its routers chose, which that build can't return itself.

usage: VLLM_PYTHON run_vllm_routing.py JOB.json OUT.jsonl; see routing.py. Its router and its model runner are watched
in this process: a step's rows belong to the requests of its input batch, in their order.
"""

import json
import os
import pathlib
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


def main() -> None:
    import torch
    from vllm import LLM, SamplingParams
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    job = json.loads(pathlib.Path(sys.argv[1]).read_text())
    step: list = []
    rows: dict[str, list] = {}
    route, execute = CPURouter._compute_routing, GPUModelRunner.execute_model

    def routed(self, *args, **kwargs):
        weights, ids = route(self, *args, **kwargs)
        step.append(ids.clone())
        return weights, ids

    def executed(self, scheduler_output, *args, **kwargs):
        step.clear()
        out = execute(self, scheduler_output, *args, **kwargs)
        counts, start = scheduler_output.num_scheduled_tokens, 0
        for request in self.input_batch.req_ids if step else ():
            end = start + counts[request]
            rows.setdefault(request, []).append(torch.stack([ids[start:end] for ids in step], 1))
            start = end
        return out

    CPURouter._compute_routing, GPUModelRunner.execute_model = routed, executed
    limits = {"max_model_len": 512, "max_num_seqs": 128, "enforce_eager": True, "skip_tokenizer_init": True}
    llm = LLM(job["model"], dtype=job["dtype"], enable_prefix_caching=False, **limits)
    rows.clear()
    prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    params = SamplingParams(temperature=1.0, max_tokens=job["tokens"], ignore_eos=True, logprobs=0, seed=1)
    with open(sys.argv[2], "w") as file:
        for output in llm.generate(prompts, params, use_tqdm=False):
            (found,) = (experts for name, experts in rows.items() if name.split("-")[0] == output.request_id)
            (c,) = output.outputs
            logprobs = [top[token].logprob for token, top in zip(c.token_ids, c.logprobs, strict=True)]
            record = {
                "prompt_token_ids": output.prompt_token_ids,
                "token_ids": list(c.token_ids),
                "rollout_logprobs": logprobs,
                "routed_experts": torch.cat(found).tolist(),
            }
            file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
