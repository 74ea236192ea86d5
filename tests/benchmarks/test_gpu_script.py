"""`make gpu` where there is no GPU: the script that a machine with one runs is sound."""

import json
import pathlib
import subprocess
import sys

import pytest

import gpu
from helpers.interpreter import interpreted

FOLDER = pathlib.Path(gpu.__file__).parent


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("only", ["bits", "speed"])
def test_tiny_run(only, tmp_path, monkeypatch, one_thread):
    """The gate on interpreted kernels, the timings on the CPU's; and a hash that changed is a failure."""
    arguments = ["gpu.py", "--tiny", "--device", "cpu", "--only", only, "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setattr(gpu.gpu_bits, "properties", lambda *_: {"schedules": 0, "differ": []})  # test_triton.py has it
    with interpreted() if only == "bits" else monkeypatch.context(), pytest.raises(SystemExit) as end:
        gpu.main()
    result = json.loads((tmp_path / "gpu_none.json").read_text())
    assert end.value.code is False, result["errors"]
    if only == "speed":
        assert set(result["speed"]) == {
            "rates", "experts", "decode", "training", "large_batch", "workload", "workload without exact ops"
        }  # fmt: skip
        assert (tmp_path / "gpu_none.md").read_text().count("## ") == len(result["speed"])
        return
    assert all(not part["differ"] for part in result["bits"].values())
    assert result["bits"]["linear"]["compared"] > 20
    kept = tmp_path / "gpu_none_hashes.json"
    hashes = json.loads(kept.read_text())
    (compiler,) = hashes
    name = next(iter(hashes[compiler]))
    hashes[compiler][name] = "changed"
    kept.write_text(json.dumps(hashes))
    assert gpu.golden(result["bits"], kept, compiler) == [name]


def test_without_a_gpu_it_says_so():
    run = subprocess.run([sys.executable, FOLDER / "gpu.py"], capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert "torch sees no NVIDIA GPU" in run.stderr
