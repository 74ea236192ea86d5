"""Rollouts of vLLM as plain JSONL. usage: VLLM_PYTHON vllm_rollouts.py JOB.json; see mismatch.py."""

import json
import os
import pathlib
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def main() -> None:
    from vllm import LLM, SamplingParams

    job = json.loads(pathlib.Path(sys.argv[1]).read_text())
    llm = LLM(job["model"], dtype=job["dtype"], max_model_len=2048, max_num_seqs=128, enforce_eager=True, seed=0)
    # two log-probs: the sampled token's and, for argmax flips, the most likely one's
    params = SamplingParams(n=job["n"], temperature=1.0, max_tokens=job["max_tokens"], logprobs=1)
    outputs = llm.generate([{"prompt_token_ids": p} for p in job["prompts"]], params)
    with open(job["out"], "w") as file:
        for group, output in enumerate(outputs):
            for sample in output.outputs:
                record = {
                    "prompt_token_ids": list(output.prompt_token_ids),
                    "token_ids": list(sample.token_ids),
                    "rollout_logprobs": [
                        min(0.0, scores[t].logprob) for t, scores in zip(sample.token_ids, sample.logprobs, strict=True)
                    ],
                    "top_token_ids": [max(scores, key=lambda t: scores[t].logprob) for scores in sample.logprobs],
                    "group": str(group),
                }
                file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
