import pytest

from samebits import LLM

from helpers.cluster_runs import SMALL, bits, generate
from helpers.models import make_checkpoint


@pytest.fixture(scope="session")
def paths(tmp_path_factory):
    """Two versions of a model's weights."""
    folder = tmp_path_factory.mktemp("versions")
    return [make_checkpoint(folder / str(seed), "llama", seed=seed, num_hidden_layers=4) for seed in (0, 1)]


@pytest.fixture(scope="session")
def expected(paths):
    """What each version returns, from one engine."""
    return [bits(generate(LLM(path, **SMALL))) for path in paths]


@pytest.fixture(scope="module")
def pair(paths, ray_cluster):
    """Two replicas, shared by the tests that leave them alive. Each test sets the version that it needs."""
    llm = LLM(paths[0], replicas=2, **SMALL)
    yield llm
    llm.close()
