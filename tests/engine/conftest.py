import pytest

from samebits.trainer import exact_model

from helpers.engines import FREE, PROMPT, engine, one


@pytest.fixture
def llm(checkpoint):
    return engine(checkpoint("llama"))


@pytest.fixture(scope="module")
def trainer(checkpoint):
    return exact_model(checkpoint("llama"))


@pytest.fixture
def free(llm):
    """12 distinct tokens that nothing stopped."""
    tokens = one(llm, PROMPT, FREE).token_ids
    assert len(tokens) == len(set(tokens)) == 12
    assert 2 not in tokens
    return tokens
