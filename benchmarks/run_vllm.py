"""One timed run of vLLM, after two tokens of each sample to warm up.

usage: VLLM_PYTHON run_vllm.py JOB.json; see throughput.py.
"""

import json
import os
import pathlib
import sys
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def main() -> None:
    from vllm import LLM, SamplingParams

    job = json.loads(pathlib.Path(sys.argv[1]).read_text())
    limits = {"max_model_len": 2048, "max_num_seqs": 128, "enforce_eager": True, "skip_tokenizer_init": True}
    llm = LLM(job["model"], dtype=job["dtype"], enable_prefix_caching=True, **limits)
    prompts = [{"prompt_token_ids": p} for p in job["prompts"] for _ in range(job["n"])]
    lens = [m for m in job["output_lens"] for _ in range(job["n"])]
    params = [SamplingParams(temperature=1.0, max_tokens=m, ignore_eos=True, logprobs=0) for m in lens]
    warm_up = SamplingParams(temperature=1.0, max_tokens=2, ignore_eos=True, logprobs=0)
    llm.generate(prompts, warm_up, use_tqdm=False)
    llm.reset_prefix_cache()
    start = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    print(json.dumps({"engine": "vLLM", "seconds": [seconds], "output_tok_s": [sum(lens) / seconds]}))


if __name__ == "__main__":
    main()
