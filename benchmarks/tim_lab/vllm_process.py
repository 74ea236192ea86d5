"""vLLM behind a pipe: run by `engines.VLLM` with the Python of an environment that has vLLM (VLLM_PYTHON).

A line of JSON in, a line out: {"weights": folder} loads a checkpoint; {"prompts": [ids], "params": [keywords]} answers
[[{"token_ids", "logprobs", "finish_reason"} per sample] per prompt].
"""

import json
import os
import sys

os.environ |= {
    "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}  # fmt: skip
replies = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)  # vLLM prints on stdout

from vllm import LLM, SamplingParams  # noqa: E402


def sample(output) -> dict:
    logprobs = [row[token].logprob for token, row in zip(output.token_ids, output.logprobs, strict=True)]
    return {"token_ids": list(output.token_ids), "logprobs": logprobs, "finish_reason": output.finish_reason}


def main(model: str, dtype: str) -> None:
    llm = LLM(model, dtype=dtype, enforce_eager=True, max_num_seqs=256, skip_tokenizer_init=True)
    print(json.dumps("ready"), file=replies)
    for line in sys.stdin:
        request = json.loads(line)
        if "weights" in request:
            llm.collective_rpc("reload_weights", kwargs={"weights_path": request["weights"]})
            llm.reset_prefix_cache()
            reply: object = "loaded"
        else:
            prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
            params = [SamplingParams(logprobs=0, detokenize=False, **keywords) for keywords in request["params"]]
            reply = [[sample(o) for o in r.outputs] for r in llm.generate(prompts, params, use_tqdm=False)]
        print(json.dumps(reply), file=replies)


if __name__ == "__main__":
    main(*sys.argv[1:])
