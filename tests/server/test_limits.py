"""One request stops nobody: its size is bounded before it runs, and its reply is made beside the event loop."""

import gc
import itertools
import json
import shutil
import socket
import subprocess
import sys
import threading
import time

import httpx
import psutil
import pytest
import torch

from samebits import LLM, SamplingParams
from samebits.server import protocol, tokenization
from samebits.server.serve import SWITCH_INTERVAL

from helpers.processes import command_line
from helpers.serving import Serving, in_background, served_checkpoint, wait_for

PROMPT = [17, 900, 3, 44]


@pytest.fixture(scope="module")
def wide(checkpoint, tmp_path_factory):
    """A model with room for 8,192 tokens."""
    folder = checkpoint("llama", max_position_embeddings=8192)
    return served_checkpoint(folder, tmp_path_factory.mktemp("served") / "model")


@pytest.fixture(scope="module")
def server(wide):
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with Serving(wide, {"kv_cache_memory_bytes": 2**26, "max_num_batched_tokens": 256}) as server:  # as the command
        yield server
    torch.set_num_threads(before)


# --- what a call may ask for ------------------------------------------------------------------------------------------

TOO_MUCH = {
    "alternatives": ("/v1/completions", {"prompt": PROMPT, "logprobs": 21}, "--max-logprobs 21"),
    "of the prompt": ("/v1/completions", {"prompt": PROMPT, "prompt_logprobs": 1000}, "--max-logprobs 1000"),
    "in a chat": (
        "/v1/chat/completions",
        {"messages": [], "input_ids": PROMPT, "logprobs": True, "top_logprobs": 21},
        "--max-logprobs 21",
    ),
    "SGLang's": (
        "/generate",
        {"input_ids": PROMPT, "return_logprob": True, "top_logprobs_num": 30},
        "--max-logprobs 30",
    ),
    "token in, token out": (
        "/inference/v1/generate",
        {"token_ids": PROMPT, "sampling_params": {"logprobs": 21}},
        "--max-logprobs 21",
    ),
    "n x tokens x alternatives": (
        "/v1/completions",
        {"prompt": PROMPT, "logprobs": 20, "n": 13, "max_tokens": 8000},
        f"--max-reply-logprobs {13 * 8000 * 21}",
    ),
    "prompt tokens": (
        "/v1/completions",
        {"prompt": [[7] * 8000] * 13, "prompt_logprobs": 20, "max_tokens": 1},
        f"--max-reply-logprobs {13 * (8000 * 21 + 1)}",
    ),
    "all that fits": (
        "/generate",
        {"input_ids": PROMPT, "sampling_params": {"n": 300, "max_new_tokens": None}},
        f"--max-reply-logprobs {300 * 8188}",
    ),
    "stop strings": ("/v1/completions", {"prompt": PROMPT, "stop": ["x"] * 65}, "at most 64 stop strings"),
    "long stop strings": ("/v1/completions", {"prompt": PROMPT, "stop": ["x" * 1000, "y" * 25]}, "1024 characters"),
    "stop tokens": ("/v1/completions", {"prompt": PROMPT, "stop_token_ids": [5] * 1025}, "1024 stop_token_ids"),
    "sequences": ("/v1/completions", {"prompt": [[5]] * 131, "n": 8}, "--max-waiting 1048"),
    "a grammar": (
        "/v1/completions",
        {"prompt": PROMPT, "structured_outputs": {"choice": [f"number {i}" for i in range(6000)]}},
        "a grammar, or a forced tool_choice's tools, may have 65536 characters",
    ),
}


@pytest.mark.parametrize("case", TOO_MUCH)
def test_more_than_a_limit_is_a_400_that_names_the_option_which_raises_it(server, case):
    route, body, message = TOO_MUCH[case]
    response = server.post(route, body)
    assert response.status_code == 400 and message in response.json()["message"], response.text[:500]
    assert not server.engine.generations and server.engine.num_sequences == 0
    assert server.ok("/v1/completions", {"prompt": PROMPT, "max_tokens": 1})


def test_raised_limits_let_the_same_calls_through(wide):
    with Serving(wide, max_logprobs=30, max_reply_logprobs=100, max_waiting=0) as server:
        body = {"prompt": PROMPT, "logprobs": 30, "max_tokens": 3, "ignore_eos": True}
        assert [len(t) for t in server.ok("/v1/completions", body)["choices"][0]["logprobs"]["top_logprobs"]]
        assert "--max-reply-logprobs 124" in server.post("/v1/completions", body | {"max_tokens": 4}).text
        assert server.post("/v1/completions", {"prompt": PROMPT, "n": 17}).status_code == 400
        assert server.ok("/v1/completions", {"prompt": PROMPT, "n": 16, "max_tokens": 1})


# --- replies ----------------------------------------------------------------------------------------------------------


def test_log_probs_of_a_prompt_come_once(server):
    body = {"prompt": [PROMPT, [5, 6, 7]], "n": 3, "prompt_logprobs": 2, "max_tokens": 2, "ignore_eos": True}
    choices = server.ok("/v1/completions", body)["choices"]
    assert ["prompt_logprobs" in c for c in choices] == [True, False, False, True, False, False]
    assert [len(choices[i]["prompt_logprobs"]) for i in (0, 3)] == [4, 3]
    text = server.post("/v1/completions", body | {"stream": True}).text
    assert text.count('"prompt_logprobs":[null') == 2
    body = {
        "input_ids": PROMPT, "sampling_params": {"n": 3, "max_new_tokens": 2, "ignore_eos": True},
        "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2,
    }  # fmt: skip
    metas = [sample["meta_info"] for sample in server.ok("/generate", body)]
    assert [len(meta["input_token_logprobs"]) for meta in metas] == [4, 0, 0]
    assert [len(meta.get("input_top_logprobs", ())) for meta in metas] == [4, 0, 0]
    body = {"token_ids": PROMPT, "sampling_params": {"n": 3, "max_tokens": 5, "prompt_logprobs": 0}, "stream": True}
    assert server.post("/inference/v1/generate", body).text.count('"prompt_logprobs":[null') == 1


def test_a_reply_in_pieces_is_the_reply_in_one(server, monkeypatch):
    """At PART = 1 nearly all of each reply is made by threads, piece by piece."""
    calls = [
        ("/v1/completions", {"prompt": [PROMPT, [9]], "n": 2, "logprobs": 3, "prompt_logprobs": 2, "max_tokens": 9}),
        ("/v1/chat/completions", {"messages": [], "input_ids": PROMPT, "logprobs": True, "top_logprobs": 3,
                                  "max_tokens": 9}),
        ("/generate", {"input_ids": [PROMPT, [9]], "return_logprob": True, "top_logprobs_num": 2,
                       "logprob_start_len": 0, "sampling_params": {"n": 2, "max_new_tokens": 9, "sampling_seed": 1}}),
        ("/inference/v1/generate", {"token_ids": PROMPT,
                                    "sampling_params": {"logprobs": 2, "max_tokens": 9, "seed": 1}}),
    ]  # fmt: skip

    def replies():
        for route, body in calls:
            seed = {} if "sampling_params" in body else {"seed": 1}
            for stream in (False, True):
                text = server.post(route, body | seed | {"stream": stream}).text
                yield _timeless([json.loads(x.removeprefix("data: ")) for x in text.split("\n\n") if x[-1:] == "}"])

    whole = list(replies())
    monkeypatch.setattr(protocol, "PART", 1)
    assert list(replies()) == whole


DIFFERS = ("id", "request_id", "created", "e2e_latency", "cached_tokens", "prompt_tokens_details")


def _timeless(value):
    """The value without what differs between two calls."""
    if isinstance(value, list):
        return [_timeless(v) for v in value]
    if not isinstance(value, dict):
        return value
    return {k: _timeless(v) for k, v in value.items() if k not in DIFFERS}


def test_pieces_join_to_the_json_of_the_value():
    value = {
        "a": iter([{}, {"b": iter(())}, b"[1]", [2, None]]),
        "c": {"d": iter(["x"])},
        "e": [{"f": 1.5}],
        "": "\u00e9",
    }
    found = json.loads(b"".join(protocol.pieces(value)))
    assert found == {"a": [{}, {"b": []}, [1], [2, None]], "c": {"d": ["x"]}, "e": [{"f": 1.5}], "": "\u00e9"}


def test_every_reply_tells_the_seed_that_repeats_it(server):
    def completions(more):
        c = server.ok("/v1/completions", {"prompt": PROMPT, "max_tokens": 8, "return_token_ids": True} | more)
        return c["choices"][0]["seed"], c["choices"][0]["token_ids"]

    def chat(more):
        body = {"messages": [], "input_ids": PROMPT, "max_tokens": 8, "return_token_ids": True}
        c = server.ok("/v1/chat/completions", body | more)
        return c["choices"][0]["seed"], c["choices"][0]["token_ids"]

    def tokens(more):
        c = server.ok("/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": {"max_tokens": 8} | more})
        return c["seed"], c["choices"][0]["token_ids"]

    def sglang(more):
        sampling = {"max_new_tokens": 8, "sampling_seed": more.get("seed")}
        c = server.ok("/generate", {"input_ids": PROMPT, "sampling_params": sampling})
        return c["meta_info"]["sampling_seed"], c["output_ids"]

    for route in (completions, chat, tokens, sglang):
        seed, ids = route({})
        assert seed < 2**53, "JSON's readers may hold integers as doubles"
        assert route({"seed": seed}) == (seed, ids), route.__name__
        assert route({})[0] != seed
    text = server.post("/v1/completions", {"prompt": PROMPT, "seed": 4, "stream": True, "max_tokens": 3}).text
    assert text.count('"seed":4') == 1


SEEDS = [2**53, 2**53 + 1, 2**64 - 1, -(2**63)]


def test_seeds_that_no_double_holds_are_told_and_used_exactly(server):
    """The two neighbours of 2**53 are one double: a reader that rounds gives both the same tokens."""
    params = [SamplingParams(max_tokens=12, seed=seed, ignore_eos=True) for seed in SEEDS]
    llm = LLM(server.llm.path, kv_cache_memory_bytes=2**22)
    expected = [o.completions[0].token_ids for o in llm.generate([PROMPT] * len(SEEDS), params, use_tqdm=False)]
    assert expected[0] != expected[1]
    common = {"max_tokens": 12, "ignore_eos": True, "return_token_ids": True}
    for seed, ids in zip(SEEDS, expected, strict=True):
        sglang = {"max_new_tokens": 12, "ignore_eos": True, "sampling_seed": seed}
        sampling = {"max_tokens": 12, "ignore_eos": True, "seed": seed}
        for route, body, told in (
            ("/v1/completions", common | {"prompt": PROMPT, "seed": seed}, "seed"),
            ("/v1/chat/completions", common | {"messages": [], "input_ids": PROMPT, "seed": seed}, "seed"),
            ("/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": sampling}, "seed"),
            ("/generate", {"input_ids": PROMPT, "sampling_params": sglang}, "sampling_seed"),
        ):
            text = server.post(route, body).text
            assert f'"{told}":{seed % 2**64}' in text, (route, text)
            assert f'ids":{json.dumps(ids, separators=(",", ":"))}' in text, (route, text)
            assert f'"{told}":{seed % 2**64}' in server.post(route, body | {"stream": True}).text
    for seed in (2**64, 1.0, 2.0**53):
        assert server.post("/v1/completions", {"prompt": PROMPT, "seed": seed}).status_code == 400


DOM = """
const elements = {}, element = id => elements[id] ??= {style: {}, value: "1", replaceChildren() {}, append() {},
  setAttribute() {}, addEventListener(kind, act) { this[kind] = act; }};
globalThis.document = {getElementById: element, createElement: element, createTextNode: text => text};
globalThis.setInterval = () => 0;
globalThis.fetch = async (path, options) => {
  if (options.method === "POST") console.log(options.body);
  return {ok: false, status: 500, json: async () => ({message: "enough"})};
};
eval(require("fs").readFileSync(0, "utf8").split("<script>")[1].split("</script>")[0]);
element("prompt").value = "ab";
element("seed").value = process.argv[2];
element("form").submit({preventDefault() {}}).then(() => console.log(JSON.stringify(element("error").textContent)));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_page_sends_a_seed_as_it_was_typed(server, tmp_path):
    (tmp_path / "dom.js").write_text(DOM)
    page = server.http.get("/").text

    def sent(seed: str) -> list:
        command = ["node", str(tmp_path / "dom.js"), seed]
        done = subprocess.run(command, input=page, capture_output=True, text=True, check=True, timeout=60)
        return [json.loads(line) for line in done.stdout.splitlines()]

    for seed in SEEDS:
        body, error = sent(str(seed))
        assert (body["seed"], body["prompt"], error) == (seed, "ab", "enough")
    assert "seed" not in sent("")[0]
    (error,) = sent("1.5")
    assert "1.5" in error


def test_alternatives_of_the_same_text_never_hide_the_sampled_tokens_log_prob(server):
    body = {"prompt": PROMPT, "max_tokens": 200, "ignore_eos": True, "logprobs": 20, "temperature": 1.5}
    found = server.ok("/v1/completions", body)["choices"][0]["logprobs"]
    assert sum(len(top) < 20 for top in found["top_logprobs"]), "no two tokens had the same text"
    for token, logprob, top in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True):
        assert top[token] == logprob


def test_a_stream_tells_the_prompts_tokens_at_its_begin_and_its_end(server):
    body = {"input_ids": PROMPT, "return_prompt_token_ids": True, "sampling_params": {"max_new_tokens": 9}}
    assert server.ok("/generate", body)["prompt_token_ids"] == PROMPT
    found = [event.get("prompt_token_ids") for event in events(server.post("/generate", body | {"stream": True}).text)]
    assert len(found) > 2 and found == [PROMPT, *[None] * (len(found) - 2), PROMPT]


def events(text: str) -> list[dict]:
    return [json.loads(x.removeprefix("data: ")) for x in text.split("\n\n") if x.startswith("data: {")]


def test_a_cumulative_stream_grows_with_the_sample_not_with_its_square(server):
    body = {
        "input_ids": PROMPT, "return_logprob": True, "top_logprobs_num": 20, "logprob_start_len": 0,
        "sampling_params": {"max_new_tokens": 800, "ignore_eos": True, "sampling_seed": 5},
    }  # fmt: skip
    whole = server.post("/generate", body)
    stream = server.post("/generate", body | {"stream": True})
    assert len(stream.content) < 45 * len(whole.content)
    found = events(stream.text)
    assert found[-1]["output_ids"] == whole.json()["output_ids"]
    for key in ("output_token_logprobs", "output_top_logprobs", "input_token_logprobs", "input_top_logprobs"):
        assert found[-1]["meta_info"][key] == whole.json()["meta_info"][key]
    for a, b in itertools.pairwise(found):
        assert b["output_ids"][: len(a["output_ids"])] == a["output_ids"]
        assert len(b["meta_info"]["output_top_logprobs"]) == len(b["output_ids"]) == b["meta_info"]["completion_tokens"]
    assert [len(e["meta_info"]["input_token_logprobs"]) for e in found] == [4] + [0] * (len(found) - 2) + [4]
    plain = events(server.post("/generate", {"input_ids": PROMPT, "stream": True, "sampling_params": {
        "max_new_tokens": 800, "ignore_eos": True}}).text)  # fmt: skip
    assert len(plain) == 800, "a stream without log-probs has an event per token"


# --- others wait for nobody's reply -----------------------------------------------------------------------------------

NUMBERS = {"regex": "|".join(f"number {i}" for i in range(4000))}
HEAVY = {
    "a prompt's log-probs": ("/v1/completions", {"prompt": [7] * 6000, "prompt_logprobs": 20, "max_tokens": 1, "n": 8}),
    "alternatives": ("/v1/chat/completions", {"messages": [], "input_ids": PROMPT, "logprobs": True,
                                              "top_logprobs": 20, "max_tokens": 400, "n": 12, "ignore_eos": True}),
    "a cumulative stream": ("/generate", {"input_ids": PROMPT, "stream": True, "return_logprob": True,
                                          "top_logprobs_num": 20, "logprob_start_len": 0,
                                          "sampling_params": {"max_new_tokens": 2000, "ignore_eos": True}}),
    "many long prompts": ("/v1/completions", {"prompt": [[i] * 1000 for i in range(20)], "max_tokens": 40}),
    "more samples than places": ("/v1/completions", {"prompt": PROMPT, "n": 600, "max_tokens": 40, "ignore_eos": True}),
    "a grammar": ("/v1/completions", {"prompt": PROMPT, "n": 500, "max_tokens": 8, "return_token_ids": True,
                                      "structured_outputs": NUMBERS}),
    "a grammar of many prompts": ("/generate", {"input_ids": [[i] for i in range(1000)], "sampling_params": {
        "max_new_tokens": 2, "structured_outputs": NUMBERS}}),
    "a wrong grammar": ("/v1/completions", {"prompt": PROMPT, "structured_outputs": {"regex": "(a" * 30_000}}),
    "a large body": ("/v1/completions", {"prompt": [7] * 5_000_000}),
    "many prompts": ("/v1/completions", {"prompt": [[7] * 4000] * 1150}),
    "wrong items": ("/v1/completions", {"prompt": [None] * 1_000_000}),
    "wrong items of items": ("/generate", {"input_ids": [[5, None]] * 300_000}),
    "wrong items of experts": ("/generate", {"input_ids": [5], "routed_experts_start_len": [None] * 1_000_000}),
    "small prompts": ("/generate", {"input_ids": [[]] * 700_000}),
    "small texts": ("/v1/completions", {"prompt": [""] * 700_000, "add_special_tokens": False}),
    "wrong messages": ("/v1/chat/completions", {"messages": [None] * 1_000_000}),
    "a long name": ("/v1/completions", {"prompt": PROMPT, "temprature" * 10**6: 1}),
    "a long value": ("/v1/completions", {"prompt": PROMPT, "logit_bias": {str(i): i for i in range(500_000)}}),
}  # fmt: skip


# bytes of their replies, at least
SERVED = dict.fromkeys(("a prompt's log-probs", "alternatives", "a cumulative stream"), 2**20)
SERVED |= {"many long prompts": 2**11, "more samples than places": 2**15, "a grammar": 2**14}
SERVED |= {"a grammar of many prompts": 2**17}


def longest_waits(url: str, request) -> tuple[dict[str, float], list]:
    """Seconds that other clients waited at most, by route, while a request is served; and its results."""
    short = {"prompt": PROMPT, "max_tokens": 1}
    waits = {"/health": [0.0], "/v1/completions": [0.0]}
    with in_background(request) as results, httpx.Client(base_url=url, timeout=60) as http:
        while not results:
            for route, seen in waits.items():
                begin = time.perf_counter()
                reply = http.get(route) if route == "/health" else http.post(route, json=short)
                seen.append(time.perf_counter() - begin)
                assert reply.status_code == 200
    return {route: max(seen) for route, seen in waits.items()}, results


LONG = "a cumulative stream", "alternatives", "small prompts"


@pytest.mark.parametrize("case", [pytest.param(case, marks=pytest.mark.slow if case in LONG else []) for case in HEAVY])
def test_while_any_one_request_is_served_others_wait_less_than_a_second(server, monkeypatch, case):
    route, body = HEAVY[case]
    content = json.dumps(body).encode()
    sizes, slices = [], []

    def request():
        headers = {"content-type": "application/json"}
        with httpx.stream("POST", server.url + route, content=content, headers=headers, timeout=300) as reply:
            sizes.append(sum(map(len, reply.iter_raw())))
            return reply.status_code

    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL)  # as `serve` does
    make = protocol._part

    def timed(content, seconds):
        begin = time.thread_time()
        part = make(content, seconds)
        if seconds < 1:  # on the event loop
            slices.append(time.thread_time() - begin)
        return part

    monkeypatch.setattr(protocol, "_part", timed)
    try:
        for _ in range(3):  # a busy machine makes others wait, too
            waits, (status,) = longest_waits(server.url, request)
            if max(waits.values()) < 1:
                break
    finally:
        sys.setswitchinterval(before)
    assert status == (200 if case in SERVED else 400)
    assert status == 400 or sizes[0] > SERVED[case], "too small a reply to prove anything"
    assert max(waits.values()) < (1 if case in SERVED else 3), waits  # a refusal holds Python's lock while it parses
    assert max(slices, default=0) < 0.05, "the event loop made too much of a reply"


@pytest.mark.slow
@pytest.mark.parametrize("scores", [{}, {"prompt_logprobs": 0}, {"prompt_logprobs": 20}], ids=str)
def test_while_a_real_model_reads_a_long_prompt_others_wait_less_than_a_second(smollm2, scores):
    body = {"prompt": list(range(5, 4005)), "max_tokens": 1} | scores
    with command_line(smollm2, kv_bytes=2**28) as (_, url):  # a process of its own, with all cores

        def request():
            return httpx.post(f"{url}/v1/completions", json=body, timeout=300).json()

        for _ in range(3):  # a busy machine makes others wait, too
            waits, (reply,) = longest_waits(url, request)
            if max(waits.values()) < 1:
                break
    assert ("prompt_logprobs" in reply["choices"][0]) == bool(scores)
    assert max(waits.values()) < 1, waits


def test_a_reply_holds_no_more_memory_than_its_values(server):
    """2**18 values: their objects in the engine, and pieces of 64 KB; the JSON is never in memory whole."""
    process = psutil.Process()
    body = {"messages": [], "input_ids": PROMPT, "logprobs": True, "top_logprobs": 20, "n": 24, "max_tokens": 520,
            "ignore_eos": True}  # fmt: skip
    values = 24 * 520 * 21
    sizes, most = [], []

    def request():
        with httpx.stream("POST", server.url + "/v1/chat/completions", json=body, timeout=300) as reply:
            sizes.append(sum(map(len, reply.iter_raw())))

    gc.collect()
    before = process.memory_info().rss
    with in_background(request):
        while not sizes:
            most.append(process.memory_info().rss)
            time.sleep(0.01)
    assert sizes[0] > 70 * values, "the reply would be smaller than its objects"
    assert max(most) - before < 400 * values


# --- texts ------------------------------------------------------------------------------------------------------------

LONG = "word " * 100_000  # 500,000 characters: at least 20,000 tokens of this tokenizer's
LONG_TEXTS = {
    "tokenize": ("/tokenize", {"prompt": LONG}),
    "tokenize a conversation": ("/tokenize", {"messages": [{"role": "user", "content": LONG}]}),
    "a conversation": ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}),
    "a prompt": ("/v1/completions", {"prompt": LONG}),
    "without special tokens": ("/v1/completions", {"prompt": LONG, "add_special_tokens": False}),
    "SGLang's": ("/generate", {"text": LONG}),
    "ids": ("/detokenize", {"tokens": [7] * 8193}),
}


class Tokenizer:
    """The server's tokenizer, with a list of the texts that it encoded; those that begin with "slow" wait."""

    def __init__(self, server, monkeypatch):
        self.real, self.texts, self.go = server.engine.tokenization.tokenizer, [], threading.Event()
        monkeypatch.setattr(server.engine.tokenization.processor, "tokenizer", self)

    def __getattr__(self, name):
        return getattr(self.real, name)

    def encode(self, text, **options):
        self.texts.append(text)
        assert not text.startswith(("slow", "<user>slow")) or self.go.wait(30)
        return self.real.encode(text, **options)


@pytest.mark.parametrize("case", LONG_TEXTS)
def test_what_no_model_has_room_for_is_refused_before_it_is_tokenised(server, monkeypatch, case):
    tokenizer = Tokenizer(server, monkeypatch)
    response = server.post(*LONG_TEXTS[case])
    assert response.status_code == 400 and "leaves no room in max_model_len 8192" in response.text, response.text[:500]
    assert not tokenizer.texts


def raw_post(server, route: str, body: dict) -> socket.socket:
    content = json.dumps(body).encode()
    head = f"POST {route} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
    return connection


ENCODED = {
    "/tokenize": lambda text: {"prompt": text},
    "/v1/chat/completions": lambda text: {"messages": [{"role": "user", "content": text}], "max_tokens": 1},
    "/v1/completions": lambda text: {"prompt": text, "add_special_tokens": False, "max_tokens": 1},
}


@pytest.mark.parametrize("route", ENCODED)
def test_a_text_that_takes_long_holds_nobody_up_and_what_nobody_waits_for_is_dropped(server, monkeypatch, route):
    tokenizer, queued, executor = Tokenizer(server, monkeypatch), [], server.engine.tokenization._executor
    submit = executor.submit
    monkeypatch.setattr(executor, "submit", lambda *call, **how: queued.append(submit(*call, **how)) or queued[-1])
    with in_background(server.ok, "/tokenize", {"prompt": "slow text"}):
        wait_for(lambda: len(tokenizer.texts) == 1)
        reply = httpx.post(server.url + route, json=ENCODED[route]("quick"), timeout=10)
        assert reply.status_code == 200, reply.text
        busy = [raw_post(server, "/tokenize", {"prompt": f"slow {i}"}) for i in range(tokenization.WORKERS - 1)]
        wait_for(lambda: sum(call.running() for call in queued) == tokenization.WORKERS)
        count = len(queued)
        left = raw_post(server, route, ENCODED[route]("nobody waits"))
        wait_for(lambda: len(queued) > count)
        left.close()
        wait_for(queued[-1].cancelled)
        tokenizer.go.set()
        for connection in busy:
            assert connection.recv(12) == b"HTTP/1.1 200"
            connection.close()
    assert server.ok("/tokenize", {"prompt": "last"})
    assert not [text for text in tokenizer.texts if "nobody waits" in text]


def test_many_texts_of_a_call_leave_threads_for_others(server, monkeypatch):
    tokenizer = Tokenizer(server, monkeypatch)
    many = {"prompt": [f"slow {'word ' * 900}{i}" for i in range(3 * tokenization.WORKERS)], "max_tokens": 1}
    with in_background(server.ok, "/v1/completions", many) as replies:
        wait_for(lambda: tokenizer.texts)
        for route, body in ENCODED.items():
            assert httpx.post(server.url + route, json=body("quick"), timeout=10).status_code == 200
        tokenizer.go.set()
    assert len(replies[0]["choices"]) == len(many["prompt"])


ENDS = {
    "an abort of all": ("/abort_request", {"abort_all": True}),
    "an abort by name": ("/abort_requests", {"request_ids": ["named"]}),
    "a pause": ("/pause?mode=abort", None),
    "SGLang's pause": ("/pause_generation", {"mode": "abort"}),
}


SLOW = {
    "texts": ("/v1/completions", {"prompt": ["slow " + "word " * 900, "slow, too"]}),
    "plain texts": ("/v1/completions", {"prompt": ["slow", "slow, too"], "add_special_tokens": False}),
    "a conversation": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "slow"}], "n": 2}),
}


@pytest.mark.parametrize("asked", SLOW)
@pytest.mark.parametrize("case", ENDS)
def test_what_ends_requests_ends_those_that_are_tokenised_too(server, monkeypatch, case, asked):
    tokenizer = Tokenizer(server, monkeypatch)
    route, body = SLOW[asked]
    body = body | {"max_tokens": 4000, "ignore_eos": True, "request_id": "named"}
    with in_background(server.ok, route, body) as replies:
        wait_for(lambda: tokenizer.texts)
        ended = server.ok(*ENDS[case])
        assert ended.get("aborted") in (None, 1 if asked == "a conversation" else 2)
        tokenizer.go.set()
    texts = [c["text"] if "text" in c else c["message"]["content"] for c in replies[0]["choices"]]
    assert [c["finish_reason"] for c in replies[0]["choices"]] == ["abort"] * 2 and texts == [""] * 2
    server.ok("/resume")
    server.idle()


def test_a_server_that_ends_waits_for_no_request_that_was_tokenised_while_it_was_paused(wide, monkeypatch):
    with Serving(wide, {"kv_cache_memory_bytes": 2**24}) as server:
        tokenizer = Tokenizer(server, monkeypatch)
        server.ok("/pause?mode=keep")
        with in_background(server.ok, "/v1/completions", {"prompt": "slow " + "word " * 900}) as replies:
            wait_for(lambda: tokenizer.texts)
            server.engine.loop.call_soon_threadsafe(server.server.handle_exit, 15, None)
            wait_for(lambda: server.engine.state.stopping)
            tokenizer.go.set()
        assert replies[0]["choices"][0]["finish_reason"] == "abort"
        server.thread.join(30)
        assert not server.thread.is_alive()


def test_a_server_ends_although_its_requests_could_not_be_ended(wide, monkeypatch):
    with Serving(wide, {"kv_cache_memory_bytes": 2**24}) as server:

        async def fails(deadline):
            raise RuntimeError("planted")

        monkeypatch.setattr(server.engine, "drain", fails)
        server.engine.loop.call_soon_threadsafe(server.server.handle_exit, 15, None)
        server.thread.join(30)
        assert not server.thread.is_alive()


def test_prompts_of_a_call_that_cant_be_admitted_whole_leave_nothing(server, monkeypatch):
    add = server.llm.add_request

    def fails(request):
        if request.prompt_token_ids == [9]:
            raise RuntimeError("planted")
        return add(request)

    monkeypatch.setattr(server.llm, "add_request", fails)
    reply = server.post("/v1/completions", {"prompt": [PROMPT, [9]], "max_tokens": 4000, "ignore_eos": True})
    assert reply.status_code == 500 and "planted" in reply.text
    server.idle()
