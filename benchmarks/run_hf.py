"""One timed run of transformers' `generate`, a padded batch, after two tokens of each sample to warm up.

usage: python run_hf.py JOB.json; see throughput.py.
"""

import json
import pathlib
import resource
import sys
import time

import torch
from transformers import AutoModelForCausalLM

job = json.loads(pathlib.Path(sys.argv[1]).read_text())
model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=getattr(torch, job["dtype"])).eval()
prompts = [p for p in job["prompts"] for _ in range(job["n"])]
width = max(map(len, prompts))
ids = torch.tensor([[2] * (width - len(p)) + p for p in prompts])
mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
tokens = job["n"] * sum(job["output_lens"])  # what was asked for; a padded batch computes more


def run(new_tokens: int) -> float:
    start = time.perf_counter()
    with torch.inference_mode():
        sampling = {"do_sample": True, "top_k": 0, "eos_token_id": None, "pad_token_id": 2}
        model.generate(ids, attention_mask=mask, max_new_tokens=new_tokens, **sampling)
    return time.perf_counter() - start


run(2)
seconds = run(max(job["output_lens"]))
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
result = {
    "engine": "HF generate",
    "seconds": [seconds],
    "output_tok_s": [tokens / seconds],
    "peak_resident_mb": round(peak),
}
print(json.dumps(result))
