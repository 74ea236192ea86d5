"""What the engine offers to a server: deltas, released memory, salted prefixes, updates in parts."""

import ctypes
import dataclasses
import mmap
import subprocess
import sys

import pytest
import torch

from samebits import LLM, SamplingParams, WeightUpdateError
from samebits.engine import RequestOutputKind
from samebits.trainer import exact_model, token_logprobs

from helpers.engines import PROMPT, check
from helpers.models import make_checkpoint
from helpers.moe import save_tiny_moe

pytestmark = pytest.mark.usefixtures("one_thread")


def one(llm, params, prompt=PROMPT):
    return llm.generate([prompt], params, use_tqdm=False)[0]


def test_deltas_join_to_what_generate_returns_and_final_only_comes_once(llm):
    params = SamplingParams(n=3, max_tokens=9, seed=1, logprobs=2, prompt_logprobs=1)
    whole = one(llm, params)
    delta = llm.add_request(PROMPT, dataclasses.replace(params, output_kind=RequestOutputKind.DELTA))
    final = llm.add_request(PROMPT, dataclasses.replace(params, output_kind=RequestOutputKind.FINAL_ONLY))
    seen = {delta: [], final: []}
    while llm.has_unfinished_requests():
        for output in llm.step():
            seen[output.request_id].append(output)
    assert seen[final] == [dataclasses.replace(whole, request_id=final)]
    assert [o.prompt_logprobs for o in seen[delta] if o.prompt_logprobs] == [whole.prompt_logprobs]
    for completion in whole.completions:
        parts = [c for o in seen[delta] for c in o.completions if c.index == completion.index]
        for name in ("token_ids", "logprobs", "top_logprobs", "ranks"):
            assert [x for p in parts for x in getattr(p, name)] == getattr(completion, name), name
        assert [p.finish_reason for p in parts] == [None] * (len(parts) - 1) + [completion.finish_reason]
        assert [(s.start, s.end) for p in parts for s in p.weight_versions] == [(i, i + 1) for i in range(len(parts))]


def test_ranks_count_the_more_probable_tokens(llm):
    completion = one(llm, SamplingParams(max_tokens=6, seed=2, logprobs=1000, min_tokens=6)).completions[0]
    for token, rank, top in zip(completion.token_ids, completion.ranks, completion.top_logprobs, strict=True):
        assert list(top)[rank - 1] == token
    greedy = one(llm, SamplingParams(max_tokens=6, temperature=0, logprobs=0)).completions[0]
    assert greedy.ranks == [1] * 6


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_frees_what_it_says_and_running_requests_lose_no_bit(own, level):
    params = SamplingParams(n=2, max_tokens=30, seed=1, ignore_eos=True)
    alone = one(own, params)
    request = own.add_request(PROMPT, params)
    for _ in range(9):
        own.step()
    assert own.sleep(level) == own.kv_cache_bytes + (own.weight_bytes if level == 2 else 0)
    assert own.sleep(level) == 0
    with pytest.raises(RuntimeError, match="wake_up"):
        own.step()
    own.wake_up()
    while own.has_unfinished_requests():
        last = own.step()
    assert dataclasses.replace(last[-1], request_id=alone.request_id) == alone
    assert last[-1].request_id == request


def test_weights_that_were_dropped_after_an_update_need_another(own, tmp_path):
    state = exact_model(make_checkpoint(tmp_path / "new", "llama", seed=5)).state_dict()
    own.update_weights(state.items())
    expected = one(own, SamplingParams(max_tokens=5, seed=1))
    own.sleep(level=2)
    own.wake_up()
    assert not own.ready
    with pytest.raises(RuntimeError, match="update_weights"):
        one(own, SamplingParams(max_tokens=5))
    own.update_weights(state.items())
    assert one(own, SamplingParams(max_tokens=5, seed=1)).completions[0].logprobs == expected.completions[0].logprobs
    with pytest.raises(ValueError, match="choose from weights, kv_cache"):
        own.wake_up(["everything"])
    with pytest.raises(ValueError, match="sleep level"):
        own.sleep(3)


def test_an_update_in_parts_is_in_force_when_it_is_whole(own, shared, tmp_path):
    new = make_checkpoint(tmp_path / "new", "llama", seed=5)
    items = list(exact_model(new).state_dict().items())
    update = own.begin_weight_update()
    update.load(items[:3])
    with pytest.raises(WeightUpdateError, match="missing"):
        own.commit_weight_update(update)
    with pytest.raises(WeightUpdateError, match="given twice"):
        update.load(items[:1])
    update.load(items[3:])
    assert (update.missing, own.weight_version) == ([], 0)
    assert own.commit_weight_update(update, version=4) == 4
    fresh = one(shared(new), SamplingParams(max_tokens=5, seed=1))
    assert one(own, SamplingParams(max_tokens=5, seed=1)).completions[0].logprobs == fresh.completions[0].logprobs


def test_old_kv_that_is_kept_is_marked_not_shared_and_forgotten_by_a_preemption(own, tmp_path):
    new = exact_model(make_checkpoint(tmp_path / "new", "llama", seed=5))
    params = SamplingParams(n=2, max_tokens=60, seed=1, ignore_eos=True)
    request = own.add_request([7] * 40, params)
    for _ in range(5):
        own.step()
    own.update_weights(new, recompute_running=False)
    check(own)
    for _ in range(40):
        own.step()
    assert not own.engine.scheduler.blocks.block_of, "old KV was published"
    own.reset_prefix_cache(reset_running_requests=True)
    while own.has_unfinished_requests():
        last = {o.request_id: o for o in own.step()}
    for c in last[request].completions:
        assert [(s.version, s.start, s.end, s.stale_kv) for s in c.weight_versions] == [
            (0, 0, 5, False), (1, 5, 45, True), (1, 45, 60, False),
        ]  # fmt: skip
        scored = token_logprobs(new, [[7] * 40 + c.token_ids])[0][40:]
        assert torch.equal(scored[45:], torch.tensor(c.logprobs[45:]))
        assert not torch.equal(scored[5:45], torch.tensor(c.logprobs[5:45]))


def test_a_token_of_old_kv_keeps_its_mark_when_its_sequence_is_preempted_meanwhile(checkpoint, tmp_path):
    """Two batches under way: the token comes after the KV that gave it is gone."""
    pipeline = {"pipeline_parallel_size": 2, "backend": "inproc", "batches_in_flight": 2}
    llm = LLM(checkpoint("llama"), kv_cache_memory_bytes=2**22, **pipeline)
    new = exact_model(make_checkpoint(tmp_path / "new", "llama", seed=5))
    llm.add_request([7] * 40, SamplingParams(n=2, max_tokens=20, seed=1, ignore_eos=True))
    for _ in range(4):
        llm.step()
    llm.update_weights(new, recompute_running=False)
    llm.step()
    late = [s for s in llm.engine.scheduler.running if s.num_pending]
    assert late and all(s.stale_kv for s in late)
    number = late[0].num_completion_tokens
    llm.engine.scheduler._preempt(late[0])
    while llm.has_unfinished_requests():
        (out,) = llm.step()
    spans = out.completions[late[0].sample_index].weight_versions
    assert next(s for s in spans if s.start <= number < s.end).stale_kv and not spans[-1].stale_kv
    scored = token_logprobs(new, [[7] * 40 + out.completions[late[0].sample_index].token_ids])[0][40:]
    assert torch.equal(scored[number + 1 :], torch.tensor(out.completions[late[0].sample_index].logprobs[number + 1 :]))


def test_a_prompt_half_scored_is_scored_anew_even_where_old_kv_is_kept(checkpoint, tmp_path):
    llm = LLM(checkpoint("llama"), kv_cache_memory_bytes=2**22, max_num_batched_tokens=16)
    new, prompt = exact_model(make_checkpoint(tmp_path / "new", "llama", seed=5)), list(range(3, 63))
    llm.add_request(prompt, SamplingParams(max_tokens=2, prompt_logprobs=True))
    llm.step()
    llm.update_weights(new, recompute_running=False)
    while llm.has_unfinished_requests():
        last = llm.step()
    assert last[0].prompt_logprobs == token_logprobs(new, [prompt])[0].tolist()


def test_prefixes_are_shared_within_a_cache_salt_alone(llm):
    hits = []
    for salt in ("a", "a", "b", None, "b"):
        prompt = {"prompt_token_ids": [11] * 100} | ({"cache_salt": salt} if salt else {})
        hits.append(one(llm, SamplingParams(max_tokens=1), prompt).num_cached_tokens)
    assert hits == [0, 96, 0, 0, 96]
    with pytest.raises(ValueError, match="cache_salt must be a non-empty string"):
        one(llm, SamplingParams(), {"prompt_token_ids": [1], "cache_salt": 5})


def resident_bytes(tensor):
    """Return how much of a tensor's memory, in whole pages, the system has given."""
    first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    count = (tensor.data_ptr() + tensor.nbytes - first) // mmap.PAGESIZE
    pages = (ctypes.c_ubyte * count)()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(first), ctypes.c_size_t(count * mmap.PAGESIZE), pages) == 0
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


GROWTH = """
import psutil, sys
from samebits import LLM, SamplingParams
small, large, dtype = sys.argv[1:]
def resident(path):
    llm = LLM(path, dtype=dtype, kv_cache_memory_bytes=2**25, skip_tokenizer_init=True)
    llm.generate([[5, 6, 7]] * 8, SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    return llm, psutil.Process().memory_info().rss
llm, before = resident(small)  # libraries and kernels
llm.close()
del llm
print(resident(large)[1] - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="asks for the memory that Linux has given")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_holds_its_weights_once_its_pool_and_little_more(tmp_path, dtype):
    for name, sizes in (
        ("small", {}),
        ("large", {"hidden_size": 512, "moe_intermediate_size": 256, "num_experts": 32}),
    ):
        save_tiny_moe(tmp_path / name, "qwen3_moe", num_hidden_layers=3, **sizes)
    command = [sys.executable, "-c", GROWTH, str(tmp_path / "small"), str(tmp_path / "large"), dtype]
    grown = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])
    file = sum(part.stat().st_size for part in (tmp_path / "large").glob("*.safetensors"))
    weights = file if dtype == "float32" else file // 2
    assert weights > 2**26 and grown < 1.05 * (weights + 2**25) + 2**23


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux which pages are there")
def test_a_pool_of_a_given_size_is_taken_at_start(checkpoint):
    llm = LLM(checkpoint("llama"), kv_cache_memory_bytes=2**26)
    pool = [tensor for caches in llm.engine.executor.workers[0].runner.kv_caches for tensor in caches]
    assert sum(map(resident_bytes, pool)) > 0.9 * 2**26
    mapping = mmap.mmap(-1, 2**26)  # torch.empty may hand out pages that were freed
    assert resident_bytes(torch.frombuffer(mapping, dtype=torch.uint8)) == 0  # or this test couldn't fail
    assert llm.stats().kv_blocks_used == 0
