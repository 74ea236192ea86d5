from __future__ import annotations

import pytest

from models import make_checkpoint


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
