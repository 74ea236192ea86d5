"""A rank that scores sequences under FSDP2 in several ways, optionally after optimizer steps; rank 0 saves."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy

from samebits import LLM, NumericsError, SamplingParams
from samebits.model.routing import expert_sizes
from samebits.trainer import exact_model, selective_log_softmax, shard, token_logprobs


def score(model, job) -> dict:
    """Log-probs of the job's sequences: packed, right-padded and left-padded, these also from the model's logits."""
    params = SamplingParams(**job["sampling"])
    sequences = job["sequences"]
    lens = {"prompt_lens": job["prompt_lens"]}
    with torch.no_grad():
        packed = token_logprobs(model, sequences, params, **lens)
        width = max(map(len, sequences))
        result = {"packed": packed}
        for side in ("right", "left"):
            ids, mask = torch.zeros(len(sequences), width, dtype=torch.long), torch.zeros(len(sequences), width)
            for i, s in enumerate(sequences):
                where = slice(0, len(s)) if side == "right" else slice(width - len(s), width)
                ids[i, where], mask[i, where] = torch.tensor(s), 1
            padded = token_logprobs(model, ids, params, attention_mask=mask, **lens)
            result[side] = [row[m.bool()] for row, m in zip(padded, mask, strict=True)]
            if not params.min_tokens:
                logits = model(ids, attention_mask=mask).logits
                rows = torch.zeros_like(padded)
                rows[:, 1:] = selective_log_softmax(logits[:, :-1], ids[:, 1:], params)
                result[f"{side}, from logits"] = [row[m.bool()] for row, m in zip(rows, mask, strict=True)]
        if expert_sizes(model)[1]:
            _, own = token_logprobs(model, sequences, params, return_routed_experts=True)
            result["replayed"] = token_logprobs(model, sequences, params, routed_experts=own, **lens)
            result["foreign"] = token_logprobs(model, sequences, params, routed_experts=foreign(model, own), **lens)
    return result


def foreign(model, own: list) -> list:
    """Other experts than a model's own ones: each one's neighbour."""
    experts = expert_sizes(model)[1]
    return [(ids + 1) % experts for ids in own]


def main(job_file: str, out_file: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    job = torch.load(job_file, weights_only=False)
    torch.set_num_threads(job["threads"])
    model = exact_model(job["path"], "float32" if job["master"] else job["dtype"], adapter=job["adapter"])
    dtype = getattr(torch, job["dtype"])
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    model = shard(model, **({"mp_policy": policy} if job["master"] else {}))
    if job["checkpointing"]:
        model.gradient_checkpointing_enable()
        model.train()
    result = train(model, job) if job["rounds"] else score(model, job)
    idle = rank == 0  # a rank with nothing to predict takes part in the collectives of the others
    token_logprobs(model, [[5]] if idle else [[5, 6, 7]])[0].sum().backward()
    if rank == 0:
        torch.save(result, out_file)
    dist.barrier()
    dist.destroy_process_group()


def train(model, job) -> dict:
    """Rollout, compare, optimizer step, update_weights; several rounds. Every rank holds an engine."""
    adapter_dtype = job["dtype"] if job["master"] else "float32"
    settings = {"kv_cache_memory_bytes": 2**22, "adapter_dtype": adapter_dtype}
    llm = LLM(job["path"], dtype=job["dtype"], adapter=job["adapter"], **settings)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    params = SamplingParams(**job["sampling"])
    equal, moved, gradients = [], [], []
    for step in range(job["rounds"]):
        outputs = llm.generate(job["prompts"], params, use_tqdm=False)
        pairs = [(len(o.prompt_token_ids), o.prompt_token_ids + c.token_ids, c) for o in outputs for c in o.completions]
        logprobs = token_logprobs(model, [s for _, s, _ in pairs], params, prompt_lens=[p for p, _, _ in pairs])
        equal.append(
            all(
                torch.equal(torch.tensor(c.logprobs), lp[p:].detach())
                for (p, _, c), lp in zip(pairs, logprobs, strict=True)
            )
        )
        moved.append([c.logprobs for _, _, c in pairs])
        loss = -sum((-1.0) ** i * lp.sum() for i, lp in enumerate(logprobs)) / len(pairs)
        optimizer.zero_grad()
        loss.backward()
        gradients.append([p.grad.full_tensor().clone() for p in model.parameters() if p.grad is not None])
        optimizer.step()
        assert llm.update_weights(model) == step + 1
    result = {"equal": equal, "logprobs": moved, "gradients": gradients}
    return result | ({"refused": refusal(model, job)} if job["adapter"] and job["master"] else {})


def refusal(model, job) -> str:
    """What an engine that keeps its adapter in fp32 says to a model whose adapter FSDP2 casts."""
    llm = LLM(job["path"], dtype=job["dtype"], adapter=job["adapter"], kv_cache_memory_bytes=2**22)
    before = llm.weight_checksums()
    try:
        llm.update_weights(model)
    except NumericsError as error:
        assert llm.weight_version == 0 and llm.weight_checksums() == before
        return str(error)
    return ""
