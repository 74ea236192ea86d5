import pytest

from samebits.trainer import exact_model

from helpers.engines import FREE, PROMPT, assert_untouched, engine, one


@pytest.fixture(scope="module")
def engines_to_read():
    """(checkpoint, settings) -> an engine and its weights' checksums."""
    made = {}
    yield made
    for llm, _ in made.values():
        llm.close()


@pytest.fixture
def shared(engines_to_read):
    """shared(checkpoint, **settings) -> the module's engine of these settings, for tests that leave it as it was.

    Each call gives it with its first weights and without cached prefixes; its counters go on. A test that changes
    weights, breaks an engine or patches it makes one of its own: `engine` of helpers.engines, or the fixture `own`.
    """
    used = {}

    def get(path, **settings):
        key = str(path), *sorted(settings.items())
        if key not in engines_to_read:
            llm = engine(path, **settings)
            engines_to_read[key] = llm, llm.weight_checksums()
        llm = engines_to_read[key][0]
        llm.reset_prefix_cache(reset_running_requests=key not in used)  # which takes in steps under way, too
        used[key] = engines_to_read[key]
        return llm

    yield get
    for key, (llm, checksums) in used.items():
        del engines_to_read[key]  # a test that leaves something behind spoils no other
        assert_untouched(llm, checksums)
        engines_to_read[key] = llm, checksums


@pytest.fixture
def llm(shared, checkpoint):
    """To be left as it was: see `shared`."""
    return shared(checkpoint("llama"))


@pytest.fixture
def own(checkpoint):
    """An engine of the test's own, to change or to break."""
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
