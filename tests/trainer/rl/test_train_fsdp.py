"""The training loop over several processes: the same rollouts, close gradients, checkpoints that outlive a worker."""

import contextlib
import os
import pathlib
import subprocess
import sys

import pytest
import torch

from samebits import LLM, SamplingParams, WeightUpdateError
from samebits.trainer import exact_model
from samebits.trainer.rl import TrainConfig, Trainer, make_task
from samebits.trainer.rl.tiny import make_tiny_model

from helpers import fsdp_train
from helpers.ranks import run_ranks
from helpers.serving import Serving

SCRIPT = pathlib.Path(__file__).parents[2] / "helpers" / "fsdp_train.py"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / "model"
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    make_tiny_model(folder, make_task("arithmetic").alphabet, seed=1, initializer_range=0.3, **sizes)
    return str(folder)


def job_of(tiny: str, folder: pathlib.Path, action="step", engine_url=None, sync_dir=None, **changes) -> list[str]:
    """Files of a job and of its result."""
    folder.mkdir()
    job = {"model": tiny, "output_dir": str(folder), "action": action, "engine_url": engine_url}
    job |= {"sync_dir": sync_dir, "changes": changes}
    torch.save(job, folder / "job.pt")
    return [str(folder / "job.pt"), str(folder / "out.pt")]


def torchrun(world: int, *job, **more) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}", str(SCRIPT)]
    return subprocess.run(
        [*command, *job_of(*job, **more)],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def trained(world: int, *job, **more):
    """The result of a job whose ranks start without torchrun, which is sooner."""
    files = job_of(*job, **more)
    run_ranks(world, fsdp_train.main, *files)
    return torch.load(files[1])


@pytest.fixture(scope="module")
def results(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("worlds")
    return folder, {world: trained(world, tiny, folder / str(world)) for world in (1, 2)}


def test_one_rank_and_two_make_the_same_rollouts_and_close_gradients(results):
    one, two = results[1][1], results[1][2]
    assert len(one["rollouts"]) == 20
    for (group, tokens, logprobs), (group2, tokens2, logprobs2) in zip(one["rollouts"], two["rollouts"], strict=True):
        assert group == group2 and tokens == tokens2 and torch.equal(logprobs, logprobs2)
    for result in (one, two):
        assert result["metrics"]["max_difference"] == 0
        assert result["metrics"]["compared_tokens"] == sum(len(t) for _, t, _ in result["rollouts"])
    for a, b in zip(one["gradients"], two["gradients"], strict=True):
        assert (a - b).norm() <= 1e-5 * a.norm()
    for name in ("reward", "length", "entropy", "grad_norm", "staleness"):
        assert one["metrics"][name] == pytest.approx(two["metrics"][name], rel=1e-5), name


def test_a_checkpoint_of_two_ranks_resumes_on_one(results, tiny):
    folder, found = results
    trainer = Trainer(
        TrainConfig(model=tiny, output_dir=folder / "2", engine={"kv_cache_memory_bytes": 2**21}),
        make_task("arithmetic"),
    )
    assert trainer.resume() and trainer.steps_done == 1
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter.full_tensor(), found[2]["weights"][name])


def test_saved_weights_are_a_checkpoint_that_an_engine_takes_or_refuses(results, tiny):
    folder, found = results
    saved = folder / "2" / "model"
    assert len(list(saved.glob("*.safetensors"))) > 1
    for name, parameter in exact_model(saved).named_parameters():
        assert torch.equal(parameter, found[2]["weights"][name])
    llm, fresh = LLM(tiny), LLM(saved)
    llm.update_weights(saved)
    params = SamplingParams(max_tokens=8, seed=1)
    a, b = (e.generate(["3+4=", "12+"], params, use_tqdm=False) for e in (llm, fresh))
    assert [c.completions[0].logprobs for c in a] == [c.completions[0].logprobs for c in b]
    file = sorted(saved.glob("*.safetensors"))[0]
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))  # one bit of one weight
    with pytest.raises(WeightUpdateError, match=r"the bytes of tensor .* are not those that were written"):
        llm.update_weights(saved)
    assert llm.weight_version == 1
    again = llm.generate(["3+4=", "12+"], params, use_tqdm=False)
    assert [c.completions[0].logprobs for c in again] == [c.completions[0].logprobs for c in a]


@pytest.mark.slow
def test_a_killed_worker_ends_the_launcher_and_the_last_checkpoint_loads(tiny, tmp_path):
    run = torchrun(2, tiny, tmp_path / "run", "fit_and_die")
    assert run.returncode != 0 and "SIGKILL" in run.stderr
    trainer = Trainer(
        TrainConfig(model=tiny, output_dir=tmp_path / "run", engine={"kv_cache_memory_bytes": 2**21}),
        make_task("arithmetic"),
    )
    assert trainer.resume() and trainer.steps_done == 2


def test_where_one_rank_fails_alone_the_other_learns_of_it_and_both_go_on(tiny, tmp_path):
    (first, old), (second, new) = trained(2, tiny, tmp_path / "run", "fail_alone", steps=1)
    assert new[0] == old[0] + 1 and new[1] == old[1] > new[0], "ranks are at one version again"
    for seen in (first, second):
        evaluate, step, save, weights, again, sync, resume, after = seen
        assert all("division by zero" in problem for problem in (evaluate, step, sync))
        assert all("No space left on device" in problem for problem in (save, weights))
        assert again is None and resume is None and after is None
    assert "rank 1 failed: ZeroDivisionError" in first[0] and "rank 0 failed: OSError" in second[3]


@pytest.mark.parametrize(
    "changes",
    [
        {"minibatches": 2, "kl_coef": 0.1, "sleep": True},
        pytest.param({"dtype": "float16", "minibatches": 2}, marks=pytest.mark.slow),
        pytest.param(
            {"dtype": "bfloat16", "filter_uniform": True, "activation_checkpointing": True, "kl_coef": 0.1, "kl": "k1"},
            marks=pytest.mark.slow,
        ),
        pytest.param(  # one sequence a pack
            {"groups_per_step": 1, "group_size": 2, "minibatches": 2, "max_tokens_per_pack": 4096},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_two_ranks_resume_to_the_bit(tiny, tmp_path, changes):
    found = trained(2, tiny, tmp_path / "run", "fit_in_parts", **changes)
    (whole, validation, weights), (parts, validation2, weights2) = found
    assert len(whole) == 4 and validation == validation2
    assert all(torch.equal(weights[name], weights2[name]) for name in weights)
    for a, b in zip(whole, parts, strict=True):
        assert a["max_difference"] == 0 and a["compared_tokens"] > 0
        assert not [k for k in a if a[k] != b[k] and not k.endswith(("seconds", "second"))]
    assert all("kl" in m for m in whole) == ("kl_coef" in changes)


@pytest.mark.slow
def test_a_mixture_on_two_ranks_resumes_to_the_bit(tmp_path):
    make_tiny_model(
        tmp_path / "model", make_task("arithmetic").alphabet, seed=3, experts=True, hidden_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, moe_intermediate_size=24, initializer_range=0.3,
    )  # fmt: skip
    more = {"router_aux_loss_coef": 0.01, "minibatches": 2}
    (whole, _, weights), (parts, _, resumed) = trained(2, tmp_path / "model", tmp_path / "run", "fit_in_parts", **more)
    assert all(torch.equal(weights[name], resumed[name]) for name in weights)
    for a, b in zip(whole, parts, strict=True):
        assert a["max_difference"] == b["max_difference"] == 0 and a["compared_tokens"] > 0 and a["grad_norm"] > 0
        assert a["grad_norm"] == b["grad_norm"]


@pytest.mark.slow
def test_staleness_over_two_ranks_keeps_the_bits(tiny, tmp_path):
    (whole, *_), _ = trained(2, tiny, tmp_path / "run", "fit_in_parts", staleness=1)
    assert max(m["max_staleness"] for m in whole) == 1 and all(m["max_difference"] == 0 for m in whole)


LATE = """
import os, pathlib, sys, torch.distributed as dist
from samebits.trainer import exact_model, shard

dist.init_process_group("gloo")
dist.barrier()
for task in pathlib.Path("/proc/self/task").iterdir():
    os.sched_setaffinity(int(task.name), {min(os.sched_getaffinity(0))})
    if "gloo" in (task / "comm").read_text():
        os.setpriority(os.PRIO_PROCESS, int(task.name), 19)
model = shard(exact_model(sys.argv[1]))
dist.all_gather_object([None, None], [p.full_tensor() for p in model.parameters()])
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.skipif(not pathlib.Path("/proc/self/task").exists(), reason="finds gloo's threads in Linux's /proc")
def test_ranks_end_in_peace_when_gloos_threads_are_late(tiny, tmp_path):
    script = tmp_path / "late.py"
    script.write_text(LATE)
    for _ in range(6):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
        run = subprocess.run([*command, tiny], capture_output=True, text=True, timeout=100)
        assert run.returncode == 0, run.stderr[-3000:]


@pytest.mark.parametrize(
    ("through", "engine"),
    [
        ("process group", {}),
        pytest.param("directory", {}, marks=pytest.mark.slow),
        pytest.param("directory", {"replicas": 2}, marks=pytest.mark.slow),
        pytest.param("process group", {"replicas": 2, "pipeline_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param(
            "process group", {"replicas": 2, "pipeline_parallel_size": 2, "backend": "ray"}, marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_an_engine_behind_http_keeps_the_bits_through_updates(results, tiny, tmp_path, through, engine, request):
    """Two FSDP ranks, one server."""
    if "backend" in engine:
        request.getfixturevalue("ray_cluster")
    sync_dir = str(tmp_path / "weights") if through == "directory" else None
    with Serving(tiny, engine) as server, contextlib.closing(server.llm):
        found = trained(2, tiny, tmp_path / "run", engine_url=server.url, sync_dir=sync_dir)
        assert server.llm.weight_version == 3  # the trainer's own at the start, and two updates
    here = results[1][2]
    for (_, tokens, logprobs), (_, there, remote) in zip(here["rollouts"], found["rollouts"][:20], strict=True):
        assert tokens == there and torch.equal(logprobs, remote)
    assert found["metrics"]["max_difference"] == found["second"]["max_difference"] == 0
    assert found["second"]["version"] == 2 and found["second"]["compared_tokens"] > 50
