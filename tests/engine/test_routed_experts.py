"""The experts that an engine reports are those of the trainer, as arrays, whatever the schedule was."""

import dataclasses
import random

import numpy as np
import pytest

from samebits import LLM, SamplingParams
from samebits.engine.expert_reader import ExpertReader
from samebits.engine.sampling_params import RequestOutputKind
from samebits.model.routing import routers
from samebits.trainer import exact_model

from helpers.families import BEFORE_5_13
from helpers.faults import fail
from helpers.moe import MOE, save_tiny_moe
from helpers.schedules import (
    assert_trainers_experts,
    random_requests,
    run_schedule,
    tight_pool,
    trainers_experts,
)

pytestmark = pytest.mark.usefixtures("one_thread")

FAMILIES = ["qwen3_moe", "glm4_moe"]
ALL = [family for family in MOE if family != "granitemoe" or not BEFORE_5_13]
VOCAB = 64


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """models(family, dtype) -> a checkpoint and the trainer's model of it."""
    made = {}

    def get(family, dtype="float32"):
        if (family, dtype) not in made:
            path = save_tiny_moe(tmp_path_factory.mktemp(family) / "model", family)
            made[family, dtype] = path, exact_model(path, dtype)
        return made[family, dtype]

    return get


LAYOUTS = {
    "one stage": {},
    "drafts": {"speculative_config": {"method": "suffix", "num_speculative_tokens": 4}},
    "two stages": {"pipeline_parallel_size": 2, "backend": "inproc", "batches_in_flight": 2},
    "processes": {"replicas": 2, "pipeline_parallel_size": 2},
}
OFTEN = ("qwen3_moe", "one stage"), ("glm4_moe", "drafts"), ("glm4_moe", "two stages")  # by `make test`


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param(family, layout, marks=[] if (family, layout) in OFTEN else pytest.mark.slow)
        for family in FAMILIES
        for layout in LAYOUTS
    ],
)
@pytest.mark.usefixtures("rows_cost_nothing")
def test_no_schedule_changes_them(request, models, family, layout, tmp_path):
    """Chunks, prefix hits, several samples, preemption, aborts, updates, drafts, stages and replicas.

    KV, and what is noted beside it, is computed anew after an update, so they are those of a sample's last weights.
    """
    if layout == "processes":
        request.getfixturevalue("ray_cluster")
    path, first = models(family)
    versions = [first, exact_model(save_tiny_moe(tmp_path / "other", family, seed=1))]
    drafted = updated = 0
    for case in range(1 if layout == "processes" else 2):
        rng = random.Random(f"{family} {layout} {case}")
        requests = [
            (prompt, dataclasses.replace(params, routed_experts=True))
            for prompt, params in random_requests(rng, VOCAB, 8, 60)
        ]
        results, llm = run_schedule(path, "float32", rng, requests, versions, **LAYOUTS[layout])
        drafted += 0 if layout == "processes" else llm.stats().draft_tokens
        for output in results:
            last = {c.weight_versions[-1].version for c in output.completions}
            updated += max(last) > 0
            for version in last:
                of_version = [c for c in output.completions if c.weight_versions[-1].version == version]
                of_these = dataclasses.replace(output, completions=of_version)
                assert_trainers_experts(versions[version % 2], of_these)
    assert updated or layout == "processes"
    assert bool(drafted) == (layout == "drafts")


@pytest.mark.parametrize("family", ALL)
def test_those_of_each_family_are_the_trainers_in_bf16(models, family):
    path, model = models(family, "bfloat16")
    rng = random.Random(family)
    params = SamplingParams(max_tokens=12, seed=3, routed_experts=True)
    requests = [([rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 40))], params) for _ in range(4)]
    results, _ = run_schedule(path, "bfloat16", rng, requests, [model])
    for output in results:
        assert_trainers_experts(model, output)


def test_they_survive_preemption_and_prefix_hits(models):
    path, model = models("qwen3_moe")
    prompts = [[*range(3, 40), number] for number in range(6)]
    params = SamplingParams(n=2, max_tokens=40, seed=1, ignore_eos=True, routed_experts=True)
    llm = LLM(path, kv_cache_memory_bytes=tight_pool(model, [(prompts[0], params)], 4), max_num_batched_tokens=50)
    for output in llm.generate(prompts, params, use_tqdm=False):
        assert_trainers_experts(model, output)
    stats = llm.stats()
    assert stats.preemptions and stats.prefix_hit_tokens, "the schedule proves nothing"


@pytest.mark.parametrize("n", [1, 3])
def test_a_last_token_that_was_under_way_at_a_preemption_is_sampled_again(models, monkeypatch, n):
    """All samples end within a few steps, in a pool that holds few of them."""
    path, model = models("qwen3_moe")
    dropped = []
    lacks = ExpertReader.lacks_rows

    def spy(reader, sample):
        if found := lacks(reader, sample):
            dropped.append((sample, len(sample.token_ids)))
        return found

    monkeypatch.setattr(ExpertReader, "lacks_rows", spy)
    for case in range(40):
        rng = random.Random(case)
        prompts = [[rng.randrange(3, VOCAB) for _ in range(rng.randint(50, 64))] for _ in range(8)]
        params = [SamplingParams(n=n, max_tokens=rng.randint(1, 12), seed=i, routed_experts=True) for i in range(8)]
        pool = tight_pool(model, [*zip(prompts, params, strict=True)], n)
        llm = LLM(path, kv_cache_memory_bytes=pool, max_num_batched_tokens=200, async_scheduling=True)
        expected = LLM(path, kv_cache_memory_bytes=1 << 22).generate(prompts, params, use_tqdm=False)
        for output, whole in zip(llm.generate(prompts, params, use_tqdm=False), expected, strict=True):
            assert [c.token_ids for c in output.completions] == [c.token_ids for c in whole.completions]
            assert [c.logprobs for c in output.completions] == [c.logprobs for c in whole.completions]
            assert_trainers_experts(model, output)
        if any(len(sample.token_ids) == tokens + 1 for sample, tokens in dropped):
            return
    pytest.fail("no last token was under way when its sample was preempted")


@pytest.mark.parametrize("tokens", [1, 2])
def test_a_sample_that_ends_before_it_has_a_place_has_its_prompts(models, tokens):
    """Of four samples two run, one on a copy that is yet to be made; all first tokens come of the first one's KV."""
    path, model = models("qwen3_moe")
    params = SamplingParams(n=4, max_tokens=tokens, seed=1, ignore_eos=True, routed_experts=True)
    llm = LLM(path, kv_cache_memory_bytes=1 << 20, max_num_seqs=2)
    (output,) = llm.generate([[*range(3, 40)]], params, use_tqdm=False)
    assert_trainers_experts(model, output)


def test_what_an_aborted_request_had_is_reported_and_the_rest_is_unknown(models):
    path, model = models("qwen3_moe")
    llm = LLM(path, kv_cache_memory_bytes=1 << 20, max_num_batched_tokens=16)
    prompt = list(range(3, 43))
    request = llm.add_request(prompt, SamplingParams(n=2, max_tokens=9, routed_experts=True))
    llm.step()
    llm.abort(request)
    (output,) = llm.step()
    first, second = (c.routed_experts for c in output.completions)
    expected = trainers_experts(model, prompt)
    assert first.shape == second.shape == expected.shape
    for found in (first, second):  # the second would have begun with the first one's
        assert found.dtype == np.int32 and np.array_equal(found[:16], expected[:16])
        assert (found[16:] == -1).all()


class LateStep:
    """A step whose last stage computes when its tokens are waited for, or its turn comes."""

    def __init__(self, worker, plan, hidden, before):
        self.worker = worker
        self.given = plan, hidden
        self.before = before
        self.tokens = None

    def wait(self):
        if self.tokens is None:
            if self.before is not None:
                self.before.wait()
            self.tokens = self.worker.execute_model(*self.given).wait()
        return self.tokens


def test_an_abort_while_a_stage_is_behind_reads_what_the_stage_has_yet_to_compute(models, monkeypatch):
    path, model = models("qwen3_moe")
    layout = {"pipeline_parallel_size": 2, "backend": "inproc", "batches_in_flight": 3}
    llm = LLM(path, kv_cache_memory_bytes=1 << 20, max_num_batched_tokens=16, **layout)
    first, last = llm.engine.executor.workers
    steps = [None]

    def submit(plan):
        steps.append(LateStep(last, plan, first.execute_model(plan), steps[-1]))
        return steps[-1]

    monkeypatch.setattr(llm.engine.executor, "submit", submit)
    prompts = [list(range(3, 51)), list(range(3, 35))]
    requests = [llm.add_request(p, SamplingParams(max_tokens=9, routed_experts=True)) for p in prompts]
    llm.step()
    assert any(step.tokens is None for step in steps[1:]), "no step is under way"
    outputs = []
    for request in requests:
        llm.abort(request)
    while len(outputs) < len(prompts):
        outputs += [output for output in llm.step() if output.finished]
    for output in outputs:
        (found,) = (c.routed_experts for c in output.completions)
        known = (found >= 0).all((1, 2))
        assert np.array_equal(found[known], trainers_experts(model, output.prompt_token_ids)[known])
    assert any((o.completions[0].routed_experts[16:] >= 0).any() for o in outputs), "no row was under way"


def test_they_start_where_they_are_asked_to_and_come_with_the_end(models):
    path, model = models("qwen3_moe")
    llm = LLM(path, kv_cache_memory_bytes=1 << 20)
    prompt = [7, 8, 9, 10, 11]
    for start in (0, 3, 5, 100):
        params = SamplingParams(max_tokens=4, seed=1, routed_experts=True, routed_experts_prompt_start=start)
        output = llm.generate([prompt], params, use_tqdm=False)[0]
        assert_trainers_experts(model, output, start)
    for kind in (RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE):
        request = llm.add_request(prompt, dataclasses.replace(params, output_kind=kind))
        seen = []
        while llm.has_unfinished_requests():
            seen += [c.routed_experts for out in llm.step() for c in out.completions if out.request_id == request]
        assert [e is None for e in seen] == [True, True, True, False]
    plain = llm.generate([prompt], SamplingParams(max_tokens=4), use_tqdm=False)[0]
    assert plain.completions[0].routed_experts is None


def test_a_model_without_experts_and_wrong_settings_are_refused(models, checkpoint):
    params = SamplingParams(routed_experts=True)
    with pytest.raises(ValueError, match=r"routed_experts: .* is no mixture of experts"):
        LLM(checkpoint("llama"), kv_cache_memory_bytes=1 << 20).generate([[5]], params, use_tqdm=False)
    with pytest.raises(ValueError, match="which weren't asked for"):
        SamplingParams(routed_experts_prompt_start=3)
    with pytest.raises(ValueError, match="routed_experts_prompt_start must be at least 0"):
        SamplingParams(routed_experts=True, routed_experts_prompt_start=-1)
    with pytest.raises(TypeError, match="routed_experts must be a bool"):
        SamplingParams(routed_experts=1)


def test_they_outlive_the_kv_cache(models):
    """Their record goes with it: no router keeps the last step's."""
    path, model = models("qwen3_moe")
    llm = LLM(path, kv_cache_memory_bytes=1 << 20)
    params = SamplingParams(max_tokens=9, seed=1, routed_experts=True, ignore_eos=True)
    request = llm.add_request([7, 8, 9], params)
    model_routers = routers(llm.engine.executor.workers[0].model).values()
    given = []
    hooks = [r.register_forward_hook(lambda router, *_: given.append(router.routing.choose)) for r in model_routers]
    llm.step()
    assert all(given) and given and not any(router.routing.choose for router in model_routers)
    for hook in hooks:
        hook.remove()
    llm.sleep()
    llm.wake_up()
    while llm.has_unfinished_requests():
        found = {out.request_id: out for out in llm.step()}
    assert_trainers_experts(model, found[request])


def test_more_than_256_experts(tmp_path):
    path = save_tiny_moe(tmp_path, "qwen3_moe", num_experts=300, num_experts_per_tok=3)
    output = LLM(path, kv_cache_memory_bytes=1 << 22).generate(
        [[7, 8, 9]], SamplingParams(max_tokens=9, seed=1, routed_experts=True), use_tqdm=False
    )[0]
    (completion,) = output.completions
    assert completion.routed_experts.dtype == np.uint16 and completion.routed_experts.max() > 255
    assert np.array_equal(
        completion.routed_experts, trainers_experts(exact_model(path), [7, 8, 9, *completion.token_ids])
    )


def test_a_broken_engine_s_requests_end_without_their_experts(models, monkeypatch):
    """They can't be read any more; a request that stayed would keep a server's loop busy for ever."""
    path, _ = models("qwen3_moe")
    llm = LLM(path, kv_cache_memory_bytes=1 << 20)
    request = llm.add_request([3, 4, 5], SamplingParams(max_tokens=9, routed_experts=True))
    llm.step()
    llm.engine.failure = "a fault of the device"
    monkeypatch.setattr(llm.engine.executor, "collective_rpc", fail(RuntimeError("a fault of the device")))
    llm.abort(request)
    (output,) = llm.take_outputs()
    assert output.finished and output.completions[0].routed_experts is None
    assert not llm.has_unfinished_requests()
