"""A weight update reaches all replicas, or none."""

import contextlib
import shutil
import threading
import time

import numpy as np
import pytest

from samebits import LLM
from samebits.cluster.actors import RemoteWorkers
from samebits.engine import WeightUpdateError, WorkerError
from samebits.engine.weights import TransferError, WeightGroup, specs_of
from samebits.engine.weights.group import listening_store
from samebits.trainer import exact_model, token_logprobs

from helpers import faults
from helpers.cluster_runs import PARAMS, PROMPTS, SMALL, bits, generate, run_and
from helpers.serving import wait_for


@pytest.mark.parametrize("source", ["module", "tensors", "directory"])
def test_an_update_reaches_all_replicas(pair, paths, expected, source):
    old, new = (paths[0], paths[1]) if source != "tensors" else (paths[1], paths[0])
    pair.update_weights(old)
    model = exact_model(new)
    given = {"module": model, "tensors": model.state_dict().items(), "directory": new}[source]
    version = pair.update_weights(given)
    outputs = generate(pair)
    assert bits(outputs) == expected[paths.index(new)]
    assert {c.weight_version for o in outputs for c in o.completions} == {version}
    assert pair.weight_checksums() == LLM(new, **SMALL).weight_checksums()


def test_an_update_in_mid_flight_labels_each_token(pair, paths):
    version = pair.update_weights(paths[0])
    outputs = run_and(pair, lambda: pair.update_weights(paths[1]))
    models = {version: exact_model(paths[0]), version + 1: exact_model(paths[1])}
    both = 0
    for prompt, out in zip(PROMPTS, outputs, strict=True):
        for c in out.completions:
            both += len(c.weight_versions) == 2
            for span in c.weight_versions:
                scored = token_logprobs(models[span.version], [prompt + c.token_ids], PARAMS)[0][len(prompt) :].detach()
                assert c.logprobs[span.start : span.end] == scored[span.start : span.end].tolist()
    assert both


def broken(model, how):
    state = dict(model.state_dict())
    name = "model.layers.3.mlp.up_proj.weight"
    if how == "missing":
        del state[name]
    elif how == "shape":
        state[name] = state[name][:-1]
    elif how == "nan":
        state[name] = state[name].clone()
        state[name][0, 0] = float("nan")
    elif how == "unknown":
        state["another"] = state[name]
    return state.items()


@pytest.mark.parametrize("how", ["missing", "shape", "nan", "unknown"])
def test_a_bad_update_changes_no_replica(pair, paths, expected, how):
    version = pair.update_weights(paths[0])
    with pytest.raises((WeightUpdateError, TransferError)):
        pair.update_weights(broken(exact_model(paths[1]), how))
    assert pair.weight_version == version
    assert bits(generate(pair)) == expected[0]
    assert pair.update_weights(exact_model(paths[1])) == version + 1, "the next update goes through"
    assert bits(generate(pair)) == expected[1]


@pytest.mark.parametrize(
    "verb",
    [*(pytest.param(verb, marks=pytest.mark.slow) for verb in ("begin_update", "load_bucket")), "prepare_update"],
)
def test_a_replica_that_dies_before_the_commit_takes_the_update_with_it(pair, paths, expected, verb, monkeypatch):
    version = pair.update_weights(exact_model(paths[0]))
    monkeypatch.setattr(pair.engine.workers, "timeout", 5.0)
    victim = pair.engine.replicas[1]
    faults.at(monkeypatch, victim, verb, faults.dies(victim))
    start = time.monotonic()
    with pytest.raises((WorkerError, WeightUpdateError)):
        pair.update_weights(exact_model(paths[1]))
    assert pair.weight_version == version and time.monotonic() - start < 15
    assert bits(generate(pair)) == expected[0]
    wait_for(lambda: faults.serve(pair), 60)
    assert pair.update_weights(exact_model(paths[1])) == version + 1
    assert bits(generate(pair)) == expected[1]


def send(llm, model, timeout: float = 5.0) -> int:
    """An update over a weight group, whose rank 0 sends from a thread."""
    state = model.state_dict()
    ranks = llm.engine.workers.world_size + 1
    store = listening_store("127.0.0.1")

    def sender() -> None:
        with (
            contextlib.suppress(TransferError),
            WeightGroup("127.0.0.1", store.port, 0, ranks, "g", timeout=timeout) as group,
        ):
            group.send(state.items(), specs_of(state))

    thread = threading.Thread(target=sender)
    thread.start()
    try:
        llm.engine.workers.join_weight_group("g", "127.0.0.1", store.port, 1, ranks, "gloo", timeout)
        update = llm.begin_weight_update()
        try:
            update.receive("g", specs_of(state))
            return llm.commit_weight_update(update)
        except Exception:
            update.abort()
            raise
    finally:
        thread.join()


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["join_weight_group", "receive_tensors"])
def test_a_replica_that_dies_in_a_weight_group_takes_the_update_with_it(pair, paths, expected, verb, monkeypatch):
    version = pair.update_weights(paths[0])
    assert send(pair, exact_model(paths[1])) == version + 1
    assert bits(generate(pair)) == expected[1]
    victim = pair.engine.replicas[1]
    faults.at(monkeypatch, victim, verb, faults.dies(victim))
    with pytest.raises((WorkerError, TransferError, WeightUpdateError)):
        send(pair, exact_model(paths[0]))
    assert not pair.engine.workers.weight_groups
    assert pair.weight_version == version + 1 and bits(generate(pair)) == expected[1]
    wait_for(lambda: faults.serve(pair), 60)
    assert send(pair, exact_model(paths[0])) == version + 2
    assert bits(generate(pair)) == expected[0]


def test_two_open_updates_are_both_good_and_hold_new_replicas_back(pair, paths, expected):
    """As with one replica: each handle is good for one commit, whichever was opened first."""
    version = pair.update_weights(paths[0])
    first, second = pair.begin_weight_update(), pair.begin_weight_update()
    first.load(exact_model(paths[1]))
    assert pair.commit_weight_update(first) == version + 1
    assert bits(generate(pair)) == expected[1]
    faults.kill(pair.engine.replicas[1])
    wait_for(lambda: faults.serve(pair, 1), 60)
    with pytest.raises(WeightUpdateError, match="send it again"):  # the replicas are not those that it was begun with
        pair.commit_weight_update(second)
    wait_for(lambda: faults.serve(pair), 60)  # nothing holds the new replica back any more
    assert pair.weight_version == version + 1 and bits(generate(pair)) == expected[1]


@pytest.mark.parametrize("how", ["dies", pytest.param("fails", marks=pytest.mark.slow)])
def test_a_replica_lost_at_the_commit_comes_back_with_the_new_version(pair, paths, expected, how, monkeypatch):
    before = pair.update_weights(paths[0])
    victim = pair.engine.replicas[0]

    def unknown(start, group, method, verb, update_id, *args):
        return start(group, method, verb, "no such update", *args)

    faults.at(monkeypatch, victim, "switch_weights", faults.dies(victim) if how == "dies" else unknown)
    version = pair.update_weights(exact_model(paths[1]))
    assert version == before + 1 and bits(generate(pair)) == expected[1]
    wait_for(lambda: faults.serve(pair), 60)
    outputs = generate(pair)
    assert bits(outputs) == expected[1] and {c.weight_version for o in outputs for c in o.completions} == {version}
    assert min(client.stats.generation_tokens for client in pair.engine.serving) > 0


@pytest.mark.parametrize("phase", ["transfer", "prepare"])
def test_a_replica_that_fails_before_the_commit_takes_the_update_with_it(pair, paths, expected, phase, monkeypatch):
    """And lives: it can't read a bucket, or finds in the end that it had not got one."""
    version = pair.update_weights(exact_model(paths[0]))
    before = [one.client for one in pair.engine.replicas]

    def torn(start, group, method, verb, update_id, data, specs):
        return start(group, method, verb, update_id, [np.zeros(3, np.uint8)] * len(specs), specs)

    with monkeypatch.context() as patch:
        faults.at(patch, pair.engine.replicas[1], "load_bucket", torn if phase == "transfer" else faults.lost)
        with pytest.raises((RuntimeError, WeightUpdateError), match=r"size|missing"):
            pair.update_weights(exact_model(paths[1]))
    assert pair.weight_version == version and bits(generate(pair)) == expected[0]
    assert [one.client for one in pair.engine.replicas] == before, "an error is no death"
    assert pair.update_weights(exact_model(paths[1])) == version + 1 and bits(generate(pair)) == expected[1]


@pytest.mark.parametrize("source", [pytest.param("directory", marks=pytest.mark.slow), "module"])
def test_a_replica_that_comes_back_while_all_sleep_wakes_up_with_the_version_in_force(pair, paths, expected, source):
    new = paths[1] if source == "directory" else exact_model(paths[1])
    pair.update_weights(new)
    pair.sleep(2)
    faults.kill(pair.engine.replicas[1])
    wait_for(lambda: not faults.serve(pair))
    wait_for(lambda: faults.serve(pair), 60)
    pair.wake_up()
    if source == "module":  # gone with the sleep, on all replicas: none may fall back to the first checkpoint
        assert not pair.ready
        with pytest.raises(RuntimeError, match="sleeps"):
            generate(pair)
        pair.update_weights(new)
    assert bits(generate(pair)) == expected[1]
    assert pair.weight_checksums()


def test_a_new_replica_takes_weights_from_another_not_from_files_that_changed(pair, paths, tmp_path, expected):
    """A trainer that writes each version over the last."""
    latest = tmp_path / "latest"
    shutil.copytree(paths[1], latest)
    pair.update_weights(latest)
    shutil.copy(paths[0] / "model.safetensors", latest)
    faults.kill(pair.engine.replicas[0])
    wait_for(lambda: not faults.serve(pair))
    wait_for(lambda: faults.serve(pair), 60)
    assert bits(generate(pair)) == expected[1]


@pytest.mark.slow
def test_weights_whose_files_changed_are_lost_with_the_last_replica(paths, tmp_path, expected, ray_cluster):
    """A restart that read the files again would serve other weights under the old version."""
    path = tmp_path / "model"
    shutil.copytree(paths[0], path)
    with LLM(path, replicas=2, **SMALL) as llm:
        assert bits(generate(llm)) == expected[0]
        shutil.copytree(paths[1], path, dirs_exist_ok=True)
        for one in llm.engine.replicas:
            faults.kill(one)
        wait_for(lambda: faults.serve(llm) and not llm.has_weights, 60)
        llm.update_weights(path)
        llm.wake_up()
        assert bits(generate(llm)) == expected[1]


def test_what_no_replica_can_do_is_an_error_and_ends_none(paths, tmp_path, expected, ray_cluster):
    """Weights that slept and whose files have changed meanwhile."""
    path = tmp_path / "model"
    shutil.copytree(paths[0], path)
    with LLM(path, replicas=2, **SMALL) as llm:
        before = [one.client for one in llm.engine.replicas]
        llm.sleep(2)
        shutil.copytree(paths[1], path, dirs_exist_ok=True)
        with pytest.raises(WeightUpdateError, match="changed"):
            llm.wake_up()
        assert not llm.ready
        llm.update_weights(path)
        llm.wake_up()
        assert bits(generate(llm)) == expected[1]
        assert faults.serve(llm) and [one.client for one in llm.engine.replicas] == before


def test_files_that_change_while_replicas_read_them_are_no_update(pair, paths, tmp_path, expected, monkeypatch):
    """Each reads a directory by itself: they might come to hold different weights."""
    pair.update_weights(paths[0])
    path = tmp_path / "model"
    shutil.copytree(paths[0], path)
    before = RemoteWorkers.collective_rpc

    def read_and_write(self, method, *args, **options):
        found = before(self, method, *args, **options)
        if method == "load_directory":
            shutil.copytree(paths[1], path, dirs_exist_ok=True)
        return found

    monkeypatch.setattr(RemoteWorkers, "collective_rpc", read_and_write)
    with pytest.raises(WeightUpdateError, match="changed while they were read"):
        pair.update_weights(path)
    assert bits(generate(pair)) == expected[0]


@pytest.mark.slow
def test_a_new_replica_gets_weights_that_only_others_have(pair, paths, expected):
    version = pair.update_weights(exact_model(paths[1]))  # from a trainer: no directory to read
    faults.kill(pair.engine.replicas[1])
    wait_for(lambda: not faults.serve(pair))
    assert bits(generate(pair)) == expected[1]
    wait_for(lambda: faults.serve(pair), 60)
    outputs = generate(pair)
    assert bits(outputs) == expected[1]
    assert {c.weight_version for o in outputs for c in o.completions} == {version}
    assert pair.engine.replicas[1].client.stats.generation_tokens > 0


@pytest.mark.slow
def test_replicas_that_come_back_together_copy_weights_from_those_that_serve(paths, expected, ray_cluster, monkeypatch):
    """Two of three; then one whose donor dies, which is no reason to start it again."""
    with LLM(paths[0], replicas=3, kv_cache_memory_bytes=2**20, worker_timeout=5.0) as llm:
        llm.update_weights(exact_model(paths[1]))  # from a trainer: they can only come from another replica
        replicas = llm.engine.replicas
        donor = replicas[0].client
        for one in replicas[1:]:
            faults.kill(one)
        wait_for(lambda: not faults.serve(llm, 3))
        wait_for(lambda: faults.serve(llm, 3), 60)
        assert replicas[0].client is donor
        assert bits(generate(llm)) == expected[1]
        launched = []
        start = llm.engine._start
        monkeypatch.setattr(llm.engine, "_start", lambda one: launched.append(one.index) or start(one))
        lender = replicas[2 % 2]  # the one that `_admit` chooses for the third of three, where two serve
        faults.at(monkeypatch, lender, "read_weights", faults.dies(lender))
        faults.kill(replicas[2])
        wait_for(lambda: not faults.serve(llm, 3))
        wait_for(lambda: faults.serve(llm, 3), 90)
        assert sorted(launched) == [0, 2]
        assert bits(generate(llm)) == expected[1] and llm.weight_checksums()
