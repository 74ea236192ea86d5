"""Engine against an FSDP2 trainer in processes of its own: the same bits."""

import os
import pathlib
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from samebits import LLM, SamplingParams
from samebits.trainer import exact_model, token_logprobs

pytestmark = pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable:FutureWarning")

SCRIPT = pathlib.Path(__file__).with_name("fsdp_score.py")


def torchrun(world: int, job: dict, folder: pathlib.Path) -> dict:
    torch.save(job, folder / "job.pt")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}", str(SCRIPT)]
    env = {**os.environ, "OMP_NUM_THREADS": str(job["threads"])}
    run = subprocess.run(
        [*command, str(folder / "job.pt"), str(folder / "out.pt")], env=env, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[:3000]
    return torch.load(folder / "out.pt")


def job_of(path, dtype, sampling, **changes) -> dict:
    base = {
        "path": str(path),
        "dtype": dtype,
        "sampling": sampling,
        "threads": 1,
        "checkpointing": False,
        "master": False,
        "rounds": 0,
    }
    return {**base, **changes}


PROMPTS = [[5, 6, 7], [900] * 40, list(range(100, 133)), [3]]

SETTINGS = [
    # world, threads, dtype, fp32 master, checkpointing, sampling, family
    (1, 2, "float32", False, False, {"temperature": 0.6}, "llama"),
    (2, 1, "float32", False, True, {"temperature": 1.3, "top_k": 30}, "qwen3"),
    (2, 1, "bfloat16", True, False, {"top_p": 0.8}, "qwen2"),
    (1, 2, "bfloat16", False, True, {"min_p": 0.05}, "mistral"),
    (2, 1, "bfloat16", False, False, {"temperature": 1.0, "min_tokens": 5}, "llama3-bias"),
]


@pytest.mark.parametrize(("world", "threads", "dtype", "master", "checkpointing", "sampling", "family"), SETTINGS)
def test_fsdp_trainer_recomputes_the_rollout_bit_for_bit(
    checkpoint, tmp_path, world, threads, dtype, master, checkpointing, sampling, family
):
    path = checkpoint(family)
    llm = LLM(path, dtype=dtype, kv_cache_memory_bytes=2**22)
    full = {**sampling, "n": 3, "max_tokens": 25, "seed": 11}
    outputs = llm.generate(PROMPTS, SamplingParams(**full), use_tqdm=False)
    sequences = [o.prompt_token_ids + c.token_ids for o in outputs for c in o.completions]
    lens = [len(o.prompt_token_ids) for o in outputs for _ in o.completions]
    job = job_of(path, dtype, full, threads=threads, checkpointing=checkpointing, master=master)
    scores = torchrun(world, {**job, "sequences": sequences, "prompt_lens": lens}, tmp_path)
    rollout = [torch.tensor(c.logprobs) for o in outputs for c in o.completions]
    for way in ("packed", "right", "left"):
        for ours, prompt, theirs in zip(rollout, lens, scores[way], strict=True):
            assert torch.equal(ours, theirs[prompt:]), way


@pytest.mark.parametrize(("world", "dtype", "checkpointing"), [(1, "float32", True), (2, "bfloat16", False)])
def test_three_rounds_of_training_stay_equal_and_repeat(checkpoint, tmp_path, world, dtype, checkpointing):
    sampling = {"n": 2, "max_tokens": 20, "seed": 3, "temperature": 1.3}
    job = job_of(checkpoint("llama"), dtype, sampling, rounds=3, master=True, checkpointing=checkpointing)
    first = torchrun(world, {**job, "prompts": PROMPTS}, tmp_path)
    assert first["equal"] == [True] * 3
    assert first["logprobs"][0] != first["logprobs"][1], "the optimizer did not move the weights"
    if world == 1:
        again = torchrun(world, {**job, "prompts": PROMPTS}, tmp_path)
        for a, b in zip(first["gradients"], again["gradients"], strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True)), "gradients differ from run to run"


def test_gradients_are_close_to_plain_hf_in_fp64(checkpoint):
    for family in ("llama", "llama3-bias", "qwen3", "mistral"):
        path = checkpoint(family)
        ids = [[5, 6, 7, 8] * 15, list(range(50, 91))]
        ours = exact_model(path)
        reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager")
        sum(lp.sum() for lp in token_logprobs(ours, ids)).backward()
        for s in ids:
            logits = reference(torch.tensor([s]), use_cache=False).logits[0, :-1]
            logits.log_softmax(-1).gather(1, torch.tensor(s[1:])[:, None]).sum().backward()
        expected = dict(reference.named_parameters())
        floor = 1e-3 * max(p.grad.norm() for p in expected.values())  # a key's bias has almost no gradient
        for name, parameter in ours.named_parameters():
            exact = expected[name].grad
            error = (parameter.grad - exact).norm() / exact.norm().clamp_min(floor)
            assert error < 5e-4, f"{family} {name}: {error}"


def test_activation_checkpointing_changes_no_gradient_bit(checkpoint):
    grads = []
    for recompute in (False, True):
        model = exact_model(checkpoint("qwen2")).train()
        if recompute:
            model.gradient_checkpointing_enable()
        sum(lp.sum() for lp in token_logprobs(model, PROMPTS[:3])).backward()
        grads.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
