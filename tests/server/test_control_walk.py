"""Random walks through the server's states, held against their table; tokens under load against an engine here."""

import itertools
import random
import threading
import time

import pytest
import torch

from samebits import LLM, SamplingParams
from samebits.trainer import exact_model, token_logprobs

from helpers.models import make_checkpoint
from helpers.serving import Serving, served_checkpoint, wait_for

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPTS = [[17, 900, 3, 44], [5] * 40, [9, 8, 7]]
VERBS = {
    "pause abort": ("/pause?mode=abort", None),
    "pause wait": ("/pause?mode=wait", None),
    "pause keep": ("/pause?mode=keep", None),
    "pause in_place": ("/pause_generation", {"mode": "in_place"}),
    "pause retract": ("/pause_generation", {"mode": "retract"}),
    "resume": ("/resume", None),
    "continue": ("/continue_generation", {}),
    "sleep 1": ("/sleep?level=1", None),
    "sleep 2": ("/sleep?level=2", None),
    "sleep wait": ("/sleep?level=1&mode=wait", None),
    "wake up": ("/wake_up", None),
    "release": ("/release_memory_occupation", {"tags": ["kv_cache"]}),
    "take": ("/resume_memory_occupation", None),
    "begin": ("/begin_weight_update", {}),
    "end": ("/end_weight_update", {}),
    "update": ("/update_weights_from_disk", {}),
    "reset": ("/weights_checker", {"action": "reset"}),
    "abort": ("/abort_request", {"abort_all": True}),
    "flush": ("/flush_cache", {}),
}


@pytest.fixture(scope="module")
def paths(checkpoint, tmp_path_factory):
    """The checkpoints of versions "a..." (and "default") and "b..."."""
    served = served_checkpoint(checkpoint("llama"), tmp_path_factory.mktemp("served") / "model")
    return {"a": served, "b": make_checkpoint(tmp_path_factory.mktemp("other") / "model", "llama", seed=5)}


def asked(verb: str, paths, rng, labels) -> tuple[str, dict | None]:
    route, body = VERBS[verb]
    if verb == "update":
        name = rng.choice("ab")
        body = {"model_path": str(paths[name]), "weight_version": f"{name}{next(labels)}"}
    return route, body


class Model:
    """The states' table once more, for one client without requests."""

    def __init__(self):
        self.paused = self.begun = self.staged = False
        self.weights = self.kv = True

    @property
    def state(self) -> str:
        if not (self.weights and self.kv):
            return "asleep"
        return "updating" if self.begun else "paused" if self.paused else "serving"

    def take(self, verb: str) -> int:
        """Do what the verb does; return the status that it gets."""
        kind = verb.split()[0]
        if kind in ("pause", "sleep"):
            self.paused = True
            self.kv = self.kv and kind != "sleep"
            self.weights = self.weights and verb != "sleep 2"
        elif verb in ("resume", "continue"):
            if self.staged and self.paused:
                self.begun = self.staged = False
                return 409
            self.paused = False
        elif verb == "wake up":
            self.weights = self.kv = True
            self.paused = self.paused and self.begun
        elif verb == "release":
            self.kv = False
        elif verb == "reset":
            self.weights = False
        elif verb == "take":
            self.weights = self.kv = True
        elif verb == "begin":
            self.begun, self.staged = True, False
        elif verb == "update":
            if self.staged:  # twice
                self.begun = self.staged = False
                return 400
            self.staged = self.begun
            self.weights = self.weights or not self.begun
        elif verb == "end":
            if not self.begun:
                return 409
            complete = self.staged
            self.begun = self.staged = False
            self.weights = self.weights or complete
            return 200 if complete else 400
        return 200


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_one_client_walks_through_the_table(paths, seed):
    rng = random.Random(seed)
    labels = itertools.count(1)
    model = Model()
    walked = []
    with Serving(paths["a"]) as server:
        for _ in range(150):
            verb = rng.choice(list(VERBS))
            route, body = asked(verb, paths, rng, labels)
            walked.append(verb)
            status = server.post(route, body).status_code
            assert status == model.take(verb), walked
            assert server.get("/is_paused") == {"is_paused": model.paused, "state": model.state}, walked
            awake = model.state != "asleep"
            assert server.http.get("/health").status_code == (200 if awake else 503)
            assert server.get("/is_sleeping") == {"is_sleeping": not awake}
            if not model.paused:
                body = {"input_ids": [3], "sampling_params": {"max_new_tokens": 1}}
                assert server.post("/generate", body).status_code == (200 if awake else 503), walked


class Load:
    """Clients that generate all the time; keeps every reply."""

    def __init__(self, server, count: int, max_tokens: int):
        self.server = server
        self.max_tokens = max_tokens
        self.replies: list[tuple[list[int], int, dict]] = []
        self.failures: list[str] = []
        self.done = threading.Event()
        self.threads = [threading.Thread(target=self._run, args=(i,), daemon=True) for i in range(count)]

    def _run(self, number: int) -> None:
        for turn in itertools.count():
            if self.done.is_set():
                return
            seed = 1000 * number + turn
            prompt = PROMPTS[seed % len(PROMPTS)]
            sampling = {"max_tokens": self.max_tokens, "ignore_eos": True, "seed": seed, "logprobs": 0}
            reply = self.server.post("/inference/v1/generate", {"token_ids": prompt, "sampling_params": sampling})
            if reply.status_code == 200:
                self.replies.append((prompt, seed, reply.json()["choices"][0]))
            elif reply.status_code == 503:
                time.sleep(0.02)
            else:
                self.failures.append(reply.text)

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *exc):
        self.done.set()
        for thread in self.threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in self.threads), "a request hangs"


def check_replies(load: Load, paths) -> tuple[int, int]:
    """Hold every reply against models and engines here; return how many tokens were compared with each."""
    models = {name: exact_model(path) for name, path in paths.items()}
    engines = {name: LLM(path, kv_cache_memory_bytes=2**22) for name, path in paths.items()}
    compared = same_version = 0
    for prompt, seed, choice in load.replies:
        tokens = choice["token_ids"]
        logprobs = torch.tensor([e["logprob"] for e in choice["logprobs"]["content"]])
        assert len(tokens) == len(logprobs) <= load.max_tokens
        assert choice["finish_reason"] == ("length" if len(tokens) == load.max_tokens else "abort")
        spans = [(s["version"].replace("default", "a")[0], s) for s in choice["weight_versions"]]
        assert [*(s["start"] for _, s in spans), len(tokens)] == [0, *(s["end"] for _, s in spans)]
        exact = [(name, s["start"], s["end"]) for name, s in spans if not s.get("stale_kv")]
        for name, begin, end in exact:
            scored = token_logprobs(models[name], [prompt + tokens])[0][len(prompt) :]
            assert torch.equal(logprobs[begin:end], scored[begin:end].detach())
            compared += end - begin
        if len(exact) == len(spans) == 1:
            params = SamplingParams(max_tokens=load.max_tokens, ignore_eos=True, seed=seed)
            (whole,) = engines[spans[0][0]].generate([prompt], params, use_tqdm=False)[0].completions
            assert tokens == whole.token_ids[: len(tokens)]
            assert logprobs.tolist() == whole.logprobs[: len(tokens)]
            same_version += len(tokens)
    return compared, same_version


def walk_with_two_clients(paths, seed: int, steps: int, **options) -> tuple[int, int]:
    """Two clients walk at once under load; then the server must serve as ever. Return what was compared."""
    labels = itertools.count(1)
    replies: list[tuple[str, int, str]] = []

    def walk(rng: random.Random) -> None:
        for _ in range(steps):
            verb = rng.choice([*VERBS, *["resume", "wake up"] * 4])
            route, body = asked(verb, paths, rng, labels)
            reply = server.post(route, body)
            replies.append((verb, reply.status_code, reply.text))
            time.sleep(rng.random() * 0.1)

    with Serving(paths["a"], **options) as server, Load(server, 4, 40) as load:
        walkers = [threading.Thread(target=walk, args=(random.Random(f"{seed} {i}"),), daemon=True) for i in range(2)]
        for walker in walkers:
            walker.start()
        for walker in walkers:
            walker.join(60 + steps)
        assert not any(walker.is_alive() for walker in walkers), f"a call hangs after {replies[-4:]}"
        wrong = [
            r for r in replies if r[1] not in (200, 409) and not (r[0] in ("flush", "update", "end") and r[1] == 400)
        ]
        assert not wrong
        wait_for(lambda: server.post("/wake_up").status_code == 200)
        wait_for(lambda: server.post("/resume").status_code == 200)
        before = len(load.replies)
        wait_for(lambda: len(load.replies) > before + 4)
        load.done.set()
        server.idle()
        assert server.get("/is_paused")["is_paused"] is False
    assert not load.failures
    return check_replies(load, paths)


def test_two_clients_walk_under_load_and_every_token_is_its_versions(paths):
    compared, same_version = walk_with_two_clients(paths, 0, 40)
    assert compared > 200 and same_version > 100


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 4))
def test_two_clients_walk_for_long(paths, seed):
    compared, same_version = walk_with_two_clients(paths, seed, 300)
    assert compared > 2000 and same_version > 1000
