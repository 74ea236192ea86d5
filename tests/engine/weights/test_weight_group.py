"""Weights over a process group: what arrives is what was sent, and nothing that goes wrong hangs either side."""

import contextlib
import itertools
import multiprocessing
import socket
import time
from types import SimpleNamespace

import pytest
import torch

from samebits.engine.weights import TensorSpec, TransferError, WeightGroup, specs_of
from samebits.engine.weights.group import WHOLE, listening_store
from samebits.engine.weights.spec import parse_specs

from helpers import transfer_peer
from helpers.transfer_peer import tensors
from helpers.waiting import in_background


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.fixture(scope="module")
def sender():
    """sender(act, **options): starts rank 0 in a process; gives its port and the process."""
    context = multiprocessing.get_context("forkserver")  # imports torch once
    context.set_forkserver_preload(["samebits.engine.weights"])
    warm_up = context.Process(target=int)
    warm_up.start()
    warm_up.join()

    @contextlib.contextmanager
    def start(act="send", world_size=2, name="w", **options):
        port = free_port()
        process = context.Process(target=transfer_peer.send, args=(port, world_size, name, act, options), daemon=True)
        process.start()
        try:
            yield port, process
        finally:
            process.kill()
            process.join()

    return start


def identical(pairs, expected):
    got = dict(pairs)
    return list(got) == list(expected) and all(
        got[n].dtype == t.dtype and got[n].shape == t.shape and torch.equal(got[n], t) for n, t in expected.items()
    )


@pytest.mark.parametrize(("act", "bucket_bytes"), [("send", None), ("send", 64), ("beside-default", WHOLE)])
def test_tensors_arrive_as_they_were_sent_in_buckets_of_any_size(sender, act, bucket_bytes):
    with (
        sender(act, count=17, rounds=3, bucket_bytes=bucket_bytes) as (port, process),
        WeightGroup("127.0.0.1", port, 1, 2, "w", timeout=30) as group,
    ):
        for round in range(3):
            expected = tensors(17, round)
            assert identical(group.receive(specs_of(expected), bucket_bytes), expected)
        process.join(20)
        assert process.exitcode == 0


def test_senders_that_use_torchs_own_helper_are_understood(sender):
    with sender("sglang", count=5) as (port, process), WeightGroup("127.0.0.1", port, 1, 2, "w", timeout=30) as group:
        assert identical(group.receive(specs_of(tensors(5))), tensors(5))
        process.join(20)
        assert process.exitcode == 0


def test_a_receiver_that_stops_early_stays_in_step(sender):
    with sender(count=9, rounds=2) as (port, process), WeightGroup("127.0.0.1", port, 1, 2, "w", timeout=30) as group:
        with contextlib.closing(group.receive(specs_of(tensors(9)))) as pairs:
            next(pairs)
        expected = tensors(9, 1)
        assert identical(group.receive(specs_of(expected)), expected)
        process.join(20)
        assert process.exitcode == 0


def test_a_group_is_made_again_under_its_name(sender):
    for _ in range(2):
        with sender(count=2) as (port, _), WeightGroup("127.0.0.1", str(port), 1, 2, "w", timeout=30) as group:
            assert identical(group.receive(specs_of(tensors(2))), tensors(2))
        group.close()
        with pytest.raises(TransferError, match="closed"):
            next(group.receive(specs_of(tensors(1))))


@pytest.mark.parametrize(("act", "dies"), [("dawdle", True), ("dawdle", False), ("wrong-order", False)])
def test_a_sender_that_dies_dawdles_or_errs_is_an_error_in_time(sender, act, dies):
    with sender(act, count=3) as (port, process), WeightGroup("127.0.0.1", port, 1, 2, "w", timeout=4) as group:
        if dies:
            process.kill()  # by now: an end before both had joined would be an error of the rendezvous
        with in_background(list, group.receive(specs_of(tensors(3)))) as results:
            pass
        with pytest.raises(TransferError, match="'t0'"):
            raise results[0]
        assert not group.usable
        assert act != "dawdle" or dies or process.is_alive(), "the receiver waited for as long as its sender lived"


def test_a_listening_store_keeps_its_port_for_the_group():
    """Between the choice of a port and the rendezvous another process could take it."""
    store = listening_store("127.0.0.1")
    with pytest.raises(OSError, match="in use"):
        socket.create_server(("", store.port))
    with in_background(WeightGroup, "127.0.0.1", store.port, 1, 2) as results:
        first = WeightGroup("127.0.0.1", store.port, 0, 2)
    for group in (first, *results):
        group.close()


def test_a_port_that_comes_again_serves_another_group(monkeypatch):
    """torch keeps a note of a port's store when that is gone."""
    port = listening_store("127.0.0.1").port
    create = socket.create_server
    monkeypatch.setattr(socket, "create_server", lambda _, **options: create(("", port), **options))
    store = listening_store("127.0.0.1")
    assert store.port == port
    with in_background(WeightGroup, "127.0.0.1", port, 1, 2) as results:
        first = WeightGroup("127.0.0.1", port, 0, 2)
    for group in (first, *results):
        group.close()


def test_an_address_that_is_not_ours_is_an_error_in_time():
    with pytest.raises(TransferError, match=r"no weight group at 'no\.such\.host\.invalid'"):
        listening_store("no.such.host.invalid", timeout=1)


def test_a_rendezvous_that_nobody_comes_to_times_out():
    with in_background(WeightGroup, "127.0.0.1", free_port(), 1, 2, timeout=1) as results:
        pass
    with pytest.raises(TransferError, match="could not join"):
        raise results[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"backend": "mpi"}, "choose 'gloo' or 'nccl'"),
        ({"rank": 2}, "at least 2 ranks"),
        ({"rank": 0, "world_size": 1}, "at least 2 ranks"),
    ],
)
def test_a_group_that_cannot_be_is_refused_at_once(arguments, message):
    with pytest.raises(ValueError, match=message):
        WeightGroup("127.0.0.1", free_port(), **{"rank": 1, "world_size": 2, **arguments})


def test_nccl_without_a_gpu_says_so():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ValueError, match="use 'gloo'"):
        WeightGroup("127.0.0.1", free_port(), 1, 2, backend="nccl")


def test_lists_of_tensors_from_the_wire_are_parsed_or_refused():
    assert parse_specs(["a"], ["bfloat16"], [[2, 3]]) == [TensorSpec("a", (2, 3), torch.bfloat16)]
    assert parse_specs(["a"], ["torch.float32"], [[]])[0].nbytes == 4
    for arguments, message in [
        (([], [], []), "names no tensors"),
        ((["a"], [], [[1]]), "1 names, 0 dtypes"),
        ((["a"], ["bf17"], [[1]]), "unknown dtype 'bf17'"),
        ((["a"], ["nn"], [[1]]), "unknown dtype 'nn'"),
    ]:
        with pytest.raises(ValueError, match=message):
            parse_specs(*arguments)


@pytest.mark.parametrize(("polls", "arrives"), [(3, True), (10**9, False)])
def test_the_host_sleeps_while_nccl_receives(polls, arrives):
    """NCCL's `wait`, given a limit, would spin; and it would order streams alone, given none: what is late is seen."""
    calls, left = [], itertools.count(1)
    work = SimpleNamespace(is_completed=lambda: next(left) > polls, wait=lambda limit: calls.append("wait"))
    group = WeightGroup.__new__(WeightGroup)
    group.backend, group.timeout, group.name, group.rank, group.world_size = "nccl", 0.2, "w", 1, 2
    group._backend = SimpleNamespace(abort=lambda: calls.append("abort"))
    bucket = [TensorSpec("lm_head.weight", (2, 2), torch.float32)]
    if arrives:
        group._wait(work, bucket)
        assert calls == ["wait"] and next(left) == polls + 2
        return
    with pytest.raises(TransferError, match=r"'lm_head.weight'.* took more than 0.2 s on rank 1 of 2: timed out"):
        group._wait(work, bucket)
    assert calls == ["abort"] and not group.usable


def test_a_listener_that_says_nothing_is_an_error_in_time():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        begin = time.monotonic()
        with pytest.raises(TransferError, match="answers nothing"):
            WeightGroup("127.0.0.1", listener.getsockname()[1], rank=1, world_size=2, timeout=0.5)
        assert time.monotonic() - begin < 10
