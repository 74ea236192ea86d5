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


def test_the_compile_cache_is_kept_and_restored(tmp_path):
    kept, folder, archive = tmp_path / "a", tmp_path / "b", tmp_path / "deep/cache.tar.gz"
    (kept / "hash").mkdir(parents=True)
    (kept / "hash/kernel.cubin").write_bytes(b"\x7fELF")
    gpu.restore_cache(archive, folder)
    assert not list(folder.iterdir()), "there is none yet"
    gpu.keep_cache(archive, kept)
    gpu.restore_cache(archive, folder)
    assert (folder / "hash/kernel.cubin").read_bytes() == b"\x7fELF"


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
