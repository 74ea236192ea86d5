"""The promise: no schedule changes a bit. Random schedules against the oracle, with a negative control."""

import random
from dataclasses import replace

import pytest
import torch

from samebits import LLM, SamplingParams
from samebits.kernels import cpu
from samebits.trainer import exact_model, token_logprobs

from helpers.adapters import adapted_model, lora
from helpers.families import FAMILIES, MIXTURES, make_family, random_sizes
from helpers.models import CONFIGS
from helpers.oracle import oracle
from helpers.schedules import (
    assert_trainers_experts,
    check_against_trainer,
    check_results,
    random_requests,
    run_schedule,
    two_versions,
)

slow = pytest.mark.slow
CASES = [3, pytest.param(24, marks=slow)]  # and more, if these preempt no sequence or share nothing


def check_schedules(path, dtype, models, name, cases, first=0, settings=lambda rng: {}, together=(2,)) -> None:
    """So many random schedules, and more until there were preemptions, prefix hits, samples of two versions, and reads
    that sequences shared, where `together` tells of these.

    Where processes are at work, their speed has a say in it. settings: of the engine, drawn anew for each.
    """
    preemptions = hits = mixed = 0
    for case in range(first, first + 24):
        if case >= first + cases and preemptions and hits and mixed and max(together) > 1:
            break
        rng = random.Random(f"{name}-{case}")
        requests = random_requests(rng, 1001, 8, 45)
        results, llm = run_schedule(path, dtype, rng, requests, models, **settings(rng))
        mixed += check_results(models, requests, results)
        preemptions += llm.stats().preemptions
        hits += llm.stats().prefix_hit_tokens
    assert preemptions and hits and mixed and max(together) > 1, "the schedules exercised nothing"


@pytest.fixture
def together(monkeypatch):
    """How many items each step's attention takes together at most."""
    found, share_reads = [], cpu.share_reads

    def spy(*args):
        items = share_reads(*args)
        found.append(items[:, 3].max())
        return items

    monkeypatch.setattr(cpu, "share_reads", spy)
    return found


OFTEN = {"float32": ["llama", "qwen2"], "bfloat16": ["llama", "qwen3", "qwen3_moe"], "float16": []}
KINDS = [
    pytest.param(family, dtype, marks=[] if family in often else slow)
    for family in [*CONFIGS, "qwen3_moe"]
    for dtype, often in OFTEN.items()
]


@pytest.mark.parametrize("cases", CASES)
@pytest.mark.parametrize(("family", "dtype"), KINDS)
def test_no_schedule_changes_a_bit(checkpoint, together, family, dtype, cases):
    path, models = two_versions(checkpoint, family, dtype)
    check_schedules(path, dtype, models, f"{family}-{dtype}", cases, together=together)


FAST = {"qwen3_moe", "glm4_moe", "granite", "gemma3_text", "smollm3"}
OTHERS = [f if f in FAST else pytest.param(f, marks=slow) for f in FAMILIES if f not in CONFIGS]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", pytest.param("float16", marks=slow)])
@pytest.mark.parametrize("family", OTHERS)
def test_no_schedule_changes_a_bit_of_another_family(checkpoint, family, dtype):
    """In one stage, and in bfloat16 in two; against the trainer, packed."""
    path = checkpoint(family)
    model = exact_model(path, dtype)
    stages = {"pipeline_parallel_size": 2, "stage_layers": (2, 1), "backend": "inproc", "batches_in_flight": 2}
    layout = stages if dtype == "bfloat16" else {}
    rng = random.Random(f"{family}-{dtype}")
    requests = random_requests(rng, 1001, 8, 45)
    results, _ = run_schedule(path, dtype, rng, requests, [model], **layout)
    check_against_trainer(model, requests, results)


def check_random_mixture(folder, case, **layout) -> None:
    """Draw a mixture's sizes and a schedule; compare log-probs and experts with the trainer's.

    The cases have each family in two dtypes and two splits into stages.
    """
    rng = random.Random(f"mixture-{case}")
    family = MIXTURES[case % len(MIXTURES)]
    path = make_family(folder / "model", family, case, **random_sizes(rng, family))
    dtype = ["float32", "bfloat16", "float16"][(case + case // len(MIXTURES)) % 3]
    split = [(3,), (2, 1), (1, 1, 1)][(case // 2 + case // len(MIXTURES)) % 3]
    if len(split) > 1:
        layout |= {"pipeline_parallel_size": len(split), "stage_layers": split, "batches_in_flight": 3}
    model = exact_model(path, dtype)
    requests = [(prompt, replace(p, routed_experts=True)) for prompt, p in random_requests(rng, 1001, 8, 45)]
    results, _ = run_schedule(path, dtype, rng, requests, [model], **layout)
    check_against_trainer(model, requests, results)
    for output in results:
        assert_trainers_experts(model, output)


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("case", range(12))
def test_no_schedule_changes_a_bit_of_a_mixture_of_random_sizes(tmp_path, case, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check_random_mixture(tmp_path, case, backend="inproc")
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.parametrize("case", range(12))
def test_no_process_changes_a_bit_of_a_mixture_of_random_sizes(tmp_path, case, ray_cluster):
    """Two replicas of one to three stages each."""
    check_random_mixture(tmp_path, case, replicas=2)


@pytest.mark.parametrize("cases", CASES)
@pytest.mark.parametrize(
    ("family", "stages"),
    [
        pytest.param(family, stages, marks=[] if (family, stages) == ("llama", 3) else slow)
        for family in CONFIGS
        for stages in (2, 3)
    ],
)
def test_no_pipeline_changes_a_bit(checkpoint, family, stages, cases):
    """Stages of one process, several batches under way: the schedules of a pipeline without its processes."""
    dtype = {2: "bfloat16", 3: "float32"}[stages]
    path, models = two_versions(checkpoint, family, dtype, num_hidden_layers=stages)

    def settings(rng):
        return {"pipeline_parallel_size": stages, "backend": "inproc", "batches_in_flight": rng.randint(1, 4)}

    check_schedules(path, dtype, models, f"{family}-{stages}", cases, settings=settings)


@pytest.mark.parametrize("cases", CASES)
@pytest.mark.parametrize(
    ("family", "dtype", "stages"),
    [
        ("qwen2", "float32", 1),
        pytest.param("qwen2", "bfloat16", 1, marks=slow),
        pytest.param("qwen2", "bfloat16", 2, marks=slow),
        pytest.param("qwen2", "float32", 2, marks=slow),
        pytest.param("qwen2_moe", "float32", 1, marks=slow),
        pytest.param("qwen2_moe", "bfloat16", 2, marks=slow),
    ],
)
def test_no_schedule_changes_a_bit_of_an_adapter(checkpoint, family, dtype, stages, cases):
    """Updates of the adapter alone; the engine begins with one of zeros. Of a mixture, attention and shared experts
    have one."""
    path = checkpoint(family)
    config = lora(rank_pattern={"o_proj": 17})
    models = [exact_model(path, dtype, adapter=config), adapted_model(path, dtype, 1, config)]

    def settings(rng):
        cut = {"pipeline_parallel_size": 2, "stage_layers": (1, models[0].config.num_hidden_layers - 1)}
        layout = {"backend": "inproc", "batches_in_flight": rng.randint(1, 4), **cut}
        return {"adapter": config, **(layout if stages == 2 else {})}

    check_schedules(path, dtype, models, f"adapter-{family}-{dtype}-{stages}", cases, settings=settings)


def test_negative_control_tokens_of_another_version_are_noticed(checkpoint):
    path, models = two_versions(checkpoint, "qwen3", "float32")
    requests = [([5, 7, 9], SamplingParams(max_tokens=20, seed=1, ignore_eos=True))] * 6
    for seed in range(10):
        results, _ = run_schedule(path, "float32", random.Random(seed), requests, models)
        check_results(models, requests, results)
        if len({s.version % 2 for out in results for c in out.completions for s in c.weight_versions}) == 2:
            break
    else:
        pytest.fail("no update came in between")
    for wrong in (models[::-1], models[:1], models[1:]):
        with pytest.raises(AssertionError):
            check_results(wrong, requests, results)


PROCESSES = [  # layouts of processes, and the seed of a schedule that mostly exercises all
    ({"replicas": 2}, "float16", 1),
    ({"pipeline_parallel_size": 2, "stage_layers": (1, 2), "batches_in_flight": 3}, "bfloat16", 2),
    ({"pipeline_parallel_size": 3, "stage_layers": (1, 1, 1), "batches_in_flight": 3}, "float32", 2),
]


@pytest.mark.slow
def test_no_process_changes_a_bit_of_an_adapter(checkpoint, ray_cluster):
    """Two replicas of two stages each; updates of the adapter alone reach all of them."""
    path = checkpoint("qwen3", num_hidden_layers=3)
    models = [exact_model(path, adapter=lora()), adapted_model(path, seed=1)]
    layout = {"replicas": 2, "pipeline_parallel_size": 2, "stage_layers": (1, 2), "adapter": lora()}
    check_schedules(path, "float32", models, "processes-adapter", 1, 1, lambda rng: layout)


@pytest.mark.parametrize("cases", [1, pytest.param(8, marks=slow)])
def test_no_process_changes_a_bit(checkpoint, cases, ray_cluster):
    """Three stages; in the longer run replicas, and two stages."""
    for layout, dtype, first in PROCESSES if cases > 1 else PROCESSES[2:]:
        path, models = two_versions(checkpoint, "qwen3", dtype, num_hidden_layers=3)
        name = f"processes-{layout.get('pipeline_parallel_size', 1)}"
        check_schedules(path, dtype, models, name, cases, first, lambda rng, layout=layout: layout)


@pytest.mark.slow
@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "qwen3"])
def test_no_replica_changes_a_bit_of_another_family(checkpoint, family, ray_cluster):
    path = checkpoint(family, num_hidden_layers=3)
    model = exact_model(path, "float16")
    requests = random_requests(random.Random(family), 1001, 8, 45)
    results, _ = run_schedule(path, "float16", random.Random(family), requests, [model], replicas=2)
    check_against_trainer(model, requests, results)


@pytest.mark.slow
def test_smollm2_no_schedule_changes_a_bit(smollm2):
    model = exact_model(smollm2)
    rng = random.Random(1)
    requests = random_requests(rng, 49152, 5, 70)
    results, _ = run_schedule(smollm2, "float32", rng, requests, [model])
    check_against_trainer(model, requests, results)
    first = results[0]
    prompt, params = requests[0]
    assert [(c.token_ids, c.logprobs) for c in first.completions] == oracle(model, prompt, params, eos=(2,))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gemma3_270m_no_schedule_changes_a_bit(gemma3_270m, dtype):
    """Its windows are of 512 tokens."""
    model = exact_model(gemma3_270m, dtype)
    rng = random.Random(dtype)
    requests = random_requests(rng, 262_144, 4, 70)
    requests.append(([rng.randrange(262_144) for _ in range(600)], SamplingParams(max_tokens=8, seed=5)))
    results, _ = run_schedule(gemma3_270m, dtype, rng, requests, [model])
    check_against_trainer(model, requests, results)


@pytest.mark.parametrize("pipeline", [{}, {"pipeline_parallel_size": 2, "backend": "inproc"}], ids=str)
@pytest.mark.parametrize("attention", ["samebits", "sdpa"])
def test_negative_control_without_exact_ops_bits_differ(checkpoint, attention, pipeline):
    """With torch's linears and norms alone, and with its attention in the trainer too; in one stage and in two."""
    path = checkpoint("llama", hidden_size=320, intermediate_size=768, num_attention_heads=16)
    model = exact_model(path, exact=False)
    model.set_attn_implementation(attention)
    rng = random.Random(0)
    prompts = [[rng.randrange(1001) for _ in range(rng.randint(20, 60))] for _ in range(6)]
    llm = LLM(path, exact=False, max_num_batched_tokens=37, **pipeline)
    outputs = llm.generate(prompts, SamplingParams(max_tokens=30, ignore_eos=True), use_tqdm=False)
    sequences = [o.prompt_token_ids + o.completions[0].token_ids for o in outputs]
    with torch.no_grad():
        logprobs = token_logprobs(model, sequences)
    differ = [
        not torch.equal(torch.tensor(o.completions[0].logprobs), lp[len(o.prompt_token_ids) :])
        for o, lp in zip(outputs, logprobs, strict=True)
    ]
    assert any(differ), "torch's own ops agreed as bits: this test proves nothing here"
