"""Settings of a process that decide bits elsewhere: each side gives the same bits under them, or refuses by name."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from helpers.hostile import SETTINGS
from helpers.models import make_checkpoint

REFUSED = {  # setting -> a word of the refusal
    "flush-to-zero": "flushed to zero",
    "round down": "rounding mode",
    "round up": "rounding mode",
    "round to zero": "rounding mode",
}
MEETS_DENORMALS = 1e-39  # times weights: most of these products are denormal


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A model whose forward meets denormal numbers, which count."""
    path = make_checkpoint(tmp_path_factory.mktemp("denormal") / "model", "llama")
    state = load_file(path / "model.safetensors")
    for name, tensor in state.items():
        if "up_proj" in name:
            tensor.mul_(MEETS_DENORMALS)
        if "down_proj" in name:
            tensor.mul_(0.1 / MEETS_DENORMALS)
    save_file(state, path / "model.safetensors", {"format": "pt"})
    return path


def run(path, *cases: str, **environment: str) -> dict:
    """What each case printed, by case."""
    command = [sys.executable, "-m", "helpers.hostile", str(path), *cases]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=Path(__file__).parent)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def plain(path):
    (found,) = run(path, "none/both/use").values()
    assert found["engine"] == found["trainer"]
    return found


def check(found: dict, plain) -> None:
    """Each case either has the bits of a process without settings, or is refused by its name."""
    for case, sides in found.items():
        setting, side, _ = case.split("/")
        for name, bits in sides.items():
            if setting in REFUSED and name == side:
                assert REFUSED[setting] in bits, case
            else:
                assert bits == plain[name], case


def test_the_most_hostile_settings_are_refused_or_change_no_bit(path, plain):
    refused = ["flush-to-zero/trainer/use", "flush-to-zero/engine/use", "round up/engine/use", "round up/trainer/load"]
    others = [f"default dtype {dtype}/engine/load" for dtype in ("float64", "bfloat16")]
    others += ["autocast bfloat16/trainer/use", "inference mode/engine/load"]
    check(run(path, *refused, *others), plain)


@pytest.mark.slow
@pytest.mark.parametrize("side", ["engine", "trainer"])
def test_every_setting_of_one_side_from_its_loading_or_its_use_on(path, plain, side):
    settings = sorted(SETTINGS.keys() - {"none", "torch.compile"})
    found = run(path, *("/".join(case) for case in itertools.product(settings, [side], ["load", "use"])))
    assert len(found) == 2 * len(settings)
    check(found, plain)


@pytest.mark.slow
def test_a_compiled_model_gives_the_same_bits(path, plain):
    check(run(path, "torch.compile/trainer/use"), plain)


ENVIRONMENTS = [
    {"ATEN_CPU_CAPABILITY": "default"},
    {"ATEN_CPU_CAPABILITY": "avx2"},
    {"NUMBA_THREADING_LAYER": "workqueue", "OMP_NUM_THREADS": "2"},
    {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+sse,+sse2,+sse4.2,+avx,+avx2,+fma"},
    {"NUMBA_CPU_NAME": "generic"},
    {"OMP_NUM_THREADS": "4"},
    {"NUMBA_NUM_THREADS": "1", "OMP_NUM_THREADS": "2"},
    {"DNNL_DEFAULT_FPMATH_MODE": "BF16"},
]


@pytest.mark.slow
@pytest.mark.parametrize("environment", ENVIRONMENTS, ids=lambda e: " ".join(f"{k}={v}" for k, v in e.items()))
def test_environment_variables_change_no_bit(path, plain, environment):
    check(run(path, "none/both/use", **environment), plain)


@pytest.mark.slow
def test_a_threading_layer_that_is_not_there_is_named(path, plain):
    (found,) = run(path, "none/both/use", NUMBA_THREADING_LAYER="tbb").values()
    assert found == plain or "NUMBA_THREADING_LAYER=tbb" in found["engine"]


@pytest.mark.slow
def test_threads_that_were_started_while_denormals_were_flushed_are_found(path):
    """The setting is a thread's own: OpenMP's threads keep what the one had that started them."""
    script = (
        "import torch; torch.set_num_threads(2); torch.set_flush_denormal(True); torch.ones(10**6).mul_(2);"
        "torch.set_flush_denormal(False); from samebits.trainer import exact_model; exact_model(PATH)"
    ).replace("PATH", repr(str(path)))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "denormal numbers are flushed to zero" in done.stderr


@pytest.mark.slow
def test_a_module_that_was_compiled_by_itself_is_refused_by_its_name(path):
    script = (
        "from samebits.trainer import exact_model, token_logprobs; model = exact_model(PATH);"
        "model.model.layers[1].mlp.compile(); token_logprobs(model, [[5, 6, 7]])"
    ).replace("PATH", repr(str(path)))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "module 'layers.1.mlp' was given to torch.compile" in done.stderr
