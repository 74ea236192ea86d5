"""The README's example: sample with the engine, score with the trainer, compare bits, take a step, update, repeat."""

from samebits import LLM, SamplingParams  # before torch: it sets how OpenMP's threads wait
from samebits.trainer import exact_model, token_logprobs

import torch

llm = LLM("smollm2")
params = SamplingParams(n=4, temperature=1.0, max_tokens=32, seed=7)
out = llm.generate("The capital of France is", params)[0]
sequences = [out.prompt_token_ids + c.token_ids for c in out.completions]

model = exact_model("smollm2")  # a HF module: wrap it with fully_shard, give it to any optimizer
logprobs = token_logprobs(model, sequences, params)  # differentiable
for completion, logprob in zip(out.completions, logprobs, strict=True):
    rollout, trainer = torch.tensor(completion.logprobs), logprob[len(out.prompt_token_ids) :]
    print(torch.equal(rollout, trainer), repr(completion.text))

torch.stack([lp.sum() for lp in logprobs]).mean().backward()
torch.optim.SGD(model.parameters(), lr=1e-4).step()
print("weight version", llm.update_weights(model))  # the next rollouts are on-policy again, to the bit
