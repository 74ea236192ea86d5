"""Small engines, and what tests ask of them."""

import functools
import json
import random
import shutil

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from samebits import LLM, SamplingParams
from samebits.engine.model_runner import ModelRunner
from samebits.trainer import token_logprobs

from helpers.invariants import check_scheduler
from helpers.models import AWKWARD

VOCAB, BLOCK = AWKWARD["vocab_size"], 32
PROMPT = [17, 900, 3, 44]


SETTINGS = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.6},
    {"temperature": 1.4, "top_k": 6},
    {"top_p": 0.7},
    {"min_p": 0.1},
]
FREE = SamplingParams(max_tokens=12, seed=6, ignore_eos=True)


def prompt_of(length, seed=0):
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(length)]


@functools.cache
def block_bytes(dtype):
    """Of one KV block of the tiny checkpoints: their shapes are all the same."""
    return ModelRunner.block_bytes(
        AutoModelForCausalLM.from_config(LlamaConfig(**AWKWARD), dtype=getattr(torch, dtype))
    )


def engine(path, tokens=4096, **settings):
    """An engine whose KV cache holds `tokens` tokens."""
    pool = tokens // BLOCK * block_bytes(settings.get("dtype", "float32"))
    llm = LLM(path, kv_cache_memory_bytes=pool, **settings)
    assert llm.stats().kv_blocks_total == tokens // BLOCK
    return llm


def generate(llm, prompts, params):
    return llm.generate(prompts, params, use_tqdm=False)


def one(llm, prompt, params):
    """The completion of one prompt."""
    return generate(llm, [prompt], params)[0].completions[0]


def pairs(output):
    return [(c.token_ids, c.logprobs) for c in output.completions]


def check(llm):
    """The scheduler's invariants."""
    check_scheduler(llm.engine.scheduler)


def run_all(llm):
    """Steps until nothing is left -> {request id: last snapshot}."""
    last = {}
    for _ in range(5000):
        if not llm.has_unfinished_requests():
            break
        last |= {out.request_id: out for out in llm.step()}
        check(llm)
    assert not llm.has_unfinished_requests(), "livelock"
    return last


def assert_idle(llm):
    check(llm)
    stats = llm.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_blocks_used) == (0, 0, 0)
    assert not llm.has_unfinished_requests()


def assert_untouched(llm, checksums):
    """Idle, as on its first day: an engine that other tests may go on with."""
    assert_idle(llm)
    assert llm.ready and not llm.engine.paused
    assert (llm.weight_version, llm.weight_checksums()) == (0, checksums)


def trainer_logprobs(model, sequences, params=None, **kwargs):
    with torch.no_grad():
        return [lp.tolist() for lp in token_logprobs(model, sequences, params, **kwargs)]


def copy_of(checkpoint, folder, generation_config=None, **config):
    """A copy of a checkpoint with other entries in its config files."""
    path = folder / "copy"
    shutil.copytree(checkpoint, path)
    if generation_config is not None:
        (path / "generation_config.json").write_text(json.dumps(generation_config))
    if config:
        old = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**old, **config}))
    return path
