"""`make gpu` where there is no GPU: the scripts that a machine with one runs are sound."""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import time

import pytest

import gpu
import gpu_report
from helpers import faulty_parts
from isolate import Part, Reply, run_parts

FOLDER = pathlib.Path(gpu.__file__).parent
VERSIONS = Part("probes", "versions", 20, dict)


def fresh() -> dict:
    return {"versions": {}, "probes": {}, "bits": {}, "speed": {}, "errors": {}, "skipped": {}, "seconds": {}}


def end(result: dict, folder: pathlib.Path, stopped: str | None = None) -> str | int:
    return gpu.conclude(argparse.Namespace(out=folder, golden=folder, tiny=False), result, stopped)


def test_parts_have_names_of_their_own():
    names = [name for _, name, _ in gpu.PARTS]
    assert len(set(names)) == len(names) and set(names).issuperset((*gpu.OPTIONAL, *gpu.ON_GPUS))


@pytest.mark.slow
def test_a_tiny_run_of_everything(tmp_path):
    """Gates on interpreted kernels, timings on the CPU's."""
    folder = ["--out", tmp_path, "--golden", tmp_path, "--cache", tmp_path / "cache.tar.gz"]
    command = [sys.executable, FOLDER / "gpu.py", "--tiny", "--device", "cpu", *folder, "--seconds", "900"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    result = json.loads((tmp_path / "gpu_none.json").read_text())
    assert run.returncode == 0, (run.stdout, run.stderr, result["errors"])
    assert not result["skipped"]
    assert len(result["compiled"]) == os.cpu_count() and all("bound, 0 failed" in said for said in result["compiled"])
    ran = {name for group in gpu.GROUPS for name in result[group]} | {"versions"}
    assert ran == {name for _, name, _ in gpu.PARTS} - set(gpu.ON_GPUS)
    assert result["bits"]["linear"]["compared"] > 20
    assert (tmp_path / "gpu_none.md").read_text().count("## ") > 5


TINY = """
import sys, gpu, gpu_parts
known = {}
for group, name, _ in gpu.PARTS:
    if name not in gpu.ON_GPUS:
        gpu_parts.load(group, "cpu")
        known[name] = found = gpu_parts.run(group, name, "cpu", sys.argv[1], True, known)
        assert found and not (isinstance(found, dict) and found.get("differ")), (name, found)
        assert group == "speed" or name == "versions" or found["compared"], name
        print(name)
"""


def test_each_part_runs_on_tiny_shapes(tmp_path):
    """All in one process, which saves most of their time."""
    command = [sys.executable, "-c", TINY, str(tmp_path)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=FOLDER, env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.split("\n")[:-1] == [name for _, name, _ in gpu.PARTS if name not in gpu.ON_GPUS]


def precompile(*options: str, change: str = "") -> subprocess.CompletedProcess:
    code = f"import torch, gpu_precompile\n{change}\ngpu_precompile.main()"
    command = [sys.executable, "-c", code, "0", "1", "--dry", *options]
    return subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_calls_that_are_compiled_ahead_fit_the_kernels():
    """Each is bound as a launch binds it; nothing is compiled. A control calls a kernel as it was called once."""
    whole, tiny = precompile(), precompile("--tiny")
    for run, least in ((whole, 200), (tiny, 60)):
        assert run.returncode == 0, (run.stdout, run.stderr)
        count, _, rest = run.stdout.partition(" bound, ")
        assert int(count) > least and rest == "0 failed\n"
    change = (
        "module = gpu_precompile.MODULES['elementwise']\n"
        "module.rms_norm = lambda x, *_: module.launch(module._rms_norm, (1,), x, x, num_warps=4)"
    )
    stale = precompile("--tiny", change=change)
    assert stale.returncode == 1 and "_rms_norm: TypeError" in stale.stdout


def test_a_failure_to_compile_ahead_fails_the_run():
    result = fresh()
    programs = "print('3 compiled, 0 failed')", "print('trace'); print('2 compiled, 1 failed; _linear'); exit(1)"
    processes = [subprocess.Popen([sys.executable, "-c", p], stdout=subprocess.PIPE, text=True) for p in programs]
    gpu.finish(processes, time.monotonic() + 60, result)
    assert result["compiled"] == ["3 compiled, 0 failed", "2 compiled, 1 failed; _linear"]
    assert set(result["errors"]) == {"precompile"}


def test_failures_are_reported_with_their_case_and_others_go_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PYTHONPATH", str(FOLDER))
    result, command = fresh(), [sys.executable, faulty_parts.__file__]
    replies = run_parts(faulty_parts.PARTS, command, tmp_path, time.monotonic() + 60)
    assert gpu.collect(replies, result, lambda part: None) is None
    printed = capsys.readouterr().out
    assert set(result["errors"]) == {"crash", "hang", "no memory"}
    assert set(result["skipped"]) == {"missing"}, "a comparison fails no run"
    for line in ("died of SIGSEGV", "in: tile 128x256, 17 rows", "DIFFERS bfloat16 qkv: 17 rows", "in: batch 256"):
        assert line in printed
    assert end(result, tmp_path) == 1
    page = capsys.readouterr().out
    assert "| crash | died of SIGSEGV | tile 128x256, 17 rows |" in page
    assert "| missing (a comparison) | ZeroDivisionError |" in page


def test_what_fails_a_run(tmp_path):
    """A wrong bit and an error do; a comparison's error doesn't; a hash that changed does."""
    good = {"compared": 3, "differ": [], "hashes": {"qkv": "aa"}}
    assert end(fresh() | {"bits": {"linear": good}}, tmp_path) == 0
    assert end(fresh() | {"bits": {"linear": good}, "skipped": {"vllm": {"kind": "x"}}}, tmp_path) == 0
    assert end(fresh() | {"bits": {"linear": good | {"differ": ["17 rows"]}}}, tmp_path) == 1
    assert end(fresh() | {"errors": {"decode": {"kind": "out of memory"}}}, tmp_path) == 1
    changed = fresh() | {"bits": {"linear": good | {"hashes": {"qkv": "bb"}}}}
    assert end(changed, tmp_path) == 1 and set(changed["errors"]) == {"linear: qkv"}
    assert end(fresh(), tmp_path, "no C compiler") == "stopped: no C compiler"


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (Reply({"differ": [], "compared": 1, "stop": "no C compiler"}, None, 1.0), "no C compiler"),
        (Reply(None, {"kind": "died of SIGSEGV", "message": ""}, 1.0), "probe compiler failed"),
    ],
)
def test_the_first_probes_say_whether_to_go_on(reply, reason):
    result, later = fresh(), []

    def replies():
        yield VERSIONS, Reply({"gpu": "H100"}, None, 1.0)
        yield Part("probes", "probe compiler", 1, dict), reply
        later.append("started")
        yield Part("bits", "linear", 1, dict), Reply({}, None, 1.0)

    assert gpu.collect(replies(), result, lambda part: None) == reason
    assert not later and result["versions"] == {"gpu": "H100"}


CACHED = """
import pathlib, shutil, sys
import gpu, torch, triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

class NoDriver:
    get_current_target = lambda self: GPUTarget("cuda", 90, 32)
    get_current_device = lambda self: 0
    get_current_stream = lambda self, device: 0

@triton.jit
def double(x, y):
    i = tl.arange(0, 64)
    tl.store(y + i, 2 * tl.load(x + i))

driver.set_active(NoDriver())
knobs.compilation.listener = lambda *, cache_hit, **_: print(cache_hit)
archive, *folders = map(pathlib.Path, sys.argv[1:])
for folder in folders:
    gpu.restore_cache(archive, folder)
    knobs.cache.dir = str(folder)
    double.device_caches.clear()
    double.warmup(torch.empty(64), torch.empty(64), grid=(1,))
    gpu.keep_cache(archive, folder)
    shutil.move(folder, folder.with_suffix(".away"))
"""


def test_the_compile_cache_is_kept_and_restored(tmp_path):
    """In another folder, as on another machine: nothing is compiled again. Steps on the way to a binary aren't kept."""
    archive, first, second = tmp_path / "deep/cache.tar.gz", tmp_path / "a", tmp_path / "b"
    gpu.restore_cache(archive, first)
    assert not list(first.iterdir()), "there is none yet"
    (tmp_path / "cached.py").write_text(CACHED)
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(FOLDER)}
    command = [sys.executable, tmp_path / "cached.py", archive, first, second]
    assert subprocess.check_output(command, env=environment, text=True) == "False\nTrue\n"
    kept = [{file.suffix for file in tmp_path.glob(f"{folder}.away/*/double*")} for folder in "ab"]
    assert kept[0] > kept[1] == {".cubin", ".json"}


def test_hashes_are_compared_with_those_of_gpus_alike(tmp_path):
    """An H200 has an H100's matrix units, and as many multiprocessors, so the same random numbers."""
    good = {"compared": 3, "differ": [], "hashes": {"qkv": "aa"}}
    alike = {"compute capability": "9.0", "multiprocessors": "132", "triton": "3.6.0"}
    runs = (("H100", {}, "aa", 0), ("H200", {}, "bb", 1), ("H100 PCIe", {"multiprocessors": "114"}, "bb", 0))
    for name, other, found, code in runs:
        result = fresh() | {
            "versions": {"gpu": name} | alike | other,
            "bits": {"linear": good | {"hashes": {"qkv": found}}},
        }
        assert end(result, tmp_path) == code
    assert json.loads((gpu.RESULTS / "gpu_hashes_9_0_132.json").read_text())["triton 3.6.0"]


def test_bars_are_computed_from_what_was_measured():
    """Exactness costs what the plain step would take with the library's attention; what is missing is left open."""
    row = {"context": 1024, "exact_ms": 10.0, "plain_ms": 9.8, "of_bound": 0.65}
    attention = {"batch": 32, "context": 1024, "layers": 28, "us": 50.0, "library_us": 40.0}
    speed = {
        "decode": [row | {"batch": 8}, row | {"batch": 32}, row | {"batch": 256}, row | {"batch": 32, "context": 8192}],
        "attention layer": [attention], "training": {"step_over_hf": 1.3}, "large batch": {"output_tok_s": 26_000.0},
        "experts layer": [{"of_grouped_mm": 0.9}, {"of_grouped_mm": 1.1}],
    }  # fmt: skip
    found = {bar["bar"]: (bar["figure"], bar["met"]) for bar in gpu_report.bars(speed)}
    assert found["exactness costs of decode, batch >= 32"] == (pytest.approx(1 - (9.8 - 0.28) / 10), True)
    assert found["exactness costs of decode, batch <= 8"] == (pytest.approx(0.02), True)
    assert found["decode, batch 32, 1k, of the bandwidth bound"] == (0.65, True)
    assert found["decode, batch 256, 1k, of the bandwidth bound"] == (0.65, False)
    assert found["trainer's forward + backward, of HF's with SDPA"] == (1.3, False)
    assert found["output tok/s, 1.7B shape, batch 512"] == (26_000.0, True)
    assert found["output tok/s, of HF's continuous batching"] == (None, None)
    assert found["experts layer, of grouped_mm"] == (0.9, None)


def test_without_a_gpu_it_says_so(tmp_path):
    command = [sys.executable, FOLDER / "gpu.py", "--out", tmp_path, "--cache", tmp_path / "cache"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert "torch sees no NVIDIA GPU" in run.stderr
