"""Both backends have the names and signatures of the border between ops and kernels. (mypy compares their types.)"""

import ast
import inspect
from itertools import chain

import pytest
import torch

from samebits.kernels import cpu, ops, triton
from samebits.kernels.backend import Backend, DecoderLayers

FUNCTIONS = {name: f for name, f in vars(Backend).items() if inspect.isfunction(f) and not name.startswith("_")}
CONSTANTS = set(Backend.__annotations__)
CLASSES = {"decoder_layers": DecoderLayers}


def parameters(function) -> list[tuple]:
    """Name, kind and default of each parameter but `self`."""
    found = inspect.signature(function).parameters.values()
    return [(p.name, p.kind, p.default) for p in found if p.name != "self"]


@pytest.mark.parametrize("backend", [cpu, triton], ids=["cpu", "triton"])
def test_a_backend_has_the_names_of_the_protocol(backend):
    names = CONSTANTS | FUNCTIONS.keys() | CLASSES.keys()
    assert names <= vars(backend).keys()
    nodes = [*ast.walk(ast.parse(inspect.getsource(backend)))]
    imports = [node.names for node in nodes if isinstance(node, ast.ImportFrom) and node.level]
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    assert {name.asname or name.name for name in chain(*imports)} <= names | used  # ruff can't tell


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("backend", [cpu, triton], ids=["cpu", "triton"])
def test_a_backend_s_functions_have_the_signatures_of_the_protocol(backend, name):
    assert parameters(getattr(backend, name)) == parameters(FUNCTIONS[name])


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("backend", [cpu, triton], ids=["cpu", "triton"])
def test_a_backend_s_classes_have_the_signatures_of_the_protocol(backend, name):
    for method in ("__init__", "__call__"):
        assert parameters(getattr(getattr(backend, name), method)) == parameters(getattr(CLASSES[name], method))


def test_both_backends_know_the_same_activations():
    assert cpu.ACTIVATIONS == triton.ACTIVATIONS


def test_a_device_without_kernels_is_refused():
    with pytest.raises(NotImplementedError, match="no kernels for device 'meta'; supported: cpu, cuda"):
        ops.backend(torch.device("meta"))


@pytest.mark.parametrize("backend", [cpu, triton], ids=["cpu", "triton"])
@pytest.mark.parametrize(("lengths", "group"), [([1, 1, 1], 3), ([5, 1, 200, 64], 4), ([7], 100)])
@pytest.mark.parametrize("limited", [False, True])
def test_work_items_cover_every_token_once(backend, lengths, group, limited):
    most = backend.tile_tokens(group) if limited else None
    items = backend.work_items(lengths, group, most)
    covered = sorted((first + i, sequence) for first, count, sequence, *_ in items.tolist() for i in range(count))
    assert covered == list(enumerate(sequence for sequence, length in enumerate(lengths) for _ in range(length)))
    assert not limited or items[:, 1].max() <= most
