"""Agents over HTTP: tool calls, structured outputs, and turns whose tokens nobody encodes again."""

import json

import openai
import pytest
import torch
from transformers import AutoTokenizer

from samebits import SamplingParams
from samebits.engine import StructuredOutputsParams
from samebits.integrations import Client
from samebits.kernels import ops
from samebits.trainer import exact_model, token_logprobs

from helpers.agents import TOOLS, agent_checkpoint
from helpers.serving import Serving

BLOCK = ops.backend(torch.device("cpu")).BLOCK
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"], "additionalProperties": False}
NAMED = {"type": "function", "function": {"name": "now"}}


@pytest.fixture(scope="module")
def path(checkpoint, tmp_path_factory):
    return agent_checkpoint(checkpoint, tmp_path_factory.mktemp("agents") / "model")


@pytest.fixture(scope="module")
def shared(path):
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with Serving(path, {"kv_cache_memory_bytes": 2**24}) as server:
        yield server
    torch.set_num_threads(before)


@pytest.fixture
def server(shared):
    yield shared
    shared.idle()


@pytest.fixture
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def ask(client, messages, **more):
    extra = {"return_token_ids": True} | more.pop("extra_body", {})
    settings = {"model": "tiny", "max_tokens": 200, "seed": 3, "tools": TOOLS} | more
    return client.chat.completions.create(messages=messages, extra_body=extra, **settings)


def user(text="What is the sum, dear machine, of one and one?"):
    return [{"role": "user", "content": text}]


def test_three_turns_of_a_tool_loop_find_every_whole_block_in_the_cache(server, client, path):
    messages = user()
    before, model = [], exact_model(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    for turn in range(3):
        reply = ask(client, messages, tool_choice="required", seed=turn, logprobs=True)
        choice = reply.choices[0]
        assert choice.finish_reason == "tool_calls"
        prompt = reply.prompt_token_ids
        assert prompt[: len(before)] == before
        cached = reply.usage.prompt_tokens_details.cached_tokens
        assert cached == max(0, len(before) - 1) // BLOCK * BLOCK  # the last token's KV was never needed
        assert tokenizer.decode(prompt) == tokenizer.apply_chat_template(
            [m if isinstance(m, dict) else with_objects(m.model_dump(exclude_none=True)) for m in messages],
            tools=TOOLS, tokenize=False, add_generation_prompt=True,
        )  # fmt: skip
        structure = server.service.tool_format.forced(TOOLS, {"<pad>": 0, "<bos>": 1, "<eos>": 2})
        params = SamplingParams(structured_outputs=structure)
        sequence = prompt + choice.token_ids
        exact = token_logprobs(model, [sequence], params, prompt_lens=[len(prompt)], tokenizer=tokenizer)[0]
        assert exact[len(prompt) :].tolist() == [entry.logprob for entry in choice.logprobs.content]
        before = sequence
        messages.append(choice.message)
        for call in choice.message.tool_calls:
            assert call.function.name in ("add", "now")
            json.loads(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "42"})


def with_objects(message: dict) -> dict:
    """A message with the arguments of its calls as objects, as templates want them."""
    for call in message.get("tool_calls", []):
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return message


def test_control_a_turn_that_the_server_did_not_write_is_encoded_and_text_drifts(client, path):
    first = ask(client, user(), max_tokens=60)
    prompt, answer = first.prompt_token_ids, first.choices[0]
    told = answer.message.model_dump(exclude_none=True)
    follow = [*user(), told, *user("And then?")]
    kept = ask(client, follow, max_tokens=1).prompt_token_ids
    assert kept[: len(prompt) + len(answer.token_ids)] == prompt + answer.token_ids
    changed = told | {"content": told["content"] + "!"}
    encoded = ask(client, [*user(), changed, *user("And then?")], max_tokens=1).prompt_token_ids
    assert encoded[: len(prompt)] == prompt
    assert encoded[: len(prompt) + len(answer.token_ids)] != prompt + answer.token_ids
    other_tools = ask(client, follow, max_tokens=1, tools=TOOLS[:1]).prompt_token_ids
    assert other_tools[: len(prompt)] != prompt


def test_a_call_that_a_client_writes_otherwise_is_the_same_call(client):
    answer = ask(client, user(), tool_choice="required", seed=1)
    ids = answer.prompt_token_ids + answer.choices[0].token_ids
    (call,) = answer.choices[0].message.tool_calls
    arguments = json.dumps(json.loads(call.function.arguments), indent=2)
    told = {"function": {"arguments": arguments, "name": call.function.name}, "type": "function", "id": call.id}
    for content in (None, "", []):
        message = {"role": "assistant", "content": content, "tool_calls": [told | {"index": 0}], "refusal": None}
        follow = [*user(), message, {"role": "tool", "tool_call_id": call.id, "content": "1"}]
        assert ask(client, follow, max_tokens=1).prompt_token_ids[: len(ids)] == ids
    other = told | {"function": {"arguments": '{"a": 7}', "name": call.function.name}}
    follow[1] = message | {"tool_calls": [other]}
    assert ask(client, follow, max_tokens=1).prompt_token_ids[: len(ids)] != ids


def test_arguments_may_be_any_json(client):
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 123456789012345678901234567890, "é": NaN}}\n</tool_call>'
    reply = ask(client, user(), extra_body={"structured_outputs": {"choice": [call]}})
    answer = reply.choices[0]
    assert answer.finish_reason == "tool_calls"
    assert json.loads(answer.message.tool_calls[0].function.arguments)["a"] == 123456789012345678901234567890
    follow = [*user(), answer.message, {"role": "tool", "tool_call_id": "x", "content": "1"}]
    ids = reply.prompt_token_ids + answer.token_ids
    assert ask(client, follow, max_tokens=1).prompt_token_ids[: len(ids)] == ids


def test_a_streamed_answer_is_kept_too_and_several_samples_each_for_itself(client):
    chunks = [*ask(client, user(), max_tokens=20, n=2, stream=True, stream_options={"include_usage": True})]
    texts, ids = {0: "", 1: ""}, {0: [], 1: []}
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            ids[choice.index] += choice.token_ids
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens is not None
    prompt = chunks[0].prompt_token_ids
    for index in (0, 1):
        follow = [*user(), {"role": "assistant", "content": texts[index]}, *user("And?")]
        found = ask(client, follow, max_tokens=1).prompt_token_ids
        assert found[: len(prompt) + len(ids[index])] == prompt + ids[index]


def test_ids_that_a_client_gave_and_turns_of_another_salt_are_kept_for_nobody(client):
    given = {"input_ids": [17, 900, 3, 44]}
    for extra, salt in ((given, {}), ({"cache_salt": "a"}, {"cache_salt": "b"})):
        answer = ask(client, user("Who?"), max_tokens=40, extra_body=extra)
        ids = answer.prompt_token_ids + answer.choices[0].token_ids
        follow = [*user("Who?"), answer.choices[0].message, *user("And?")]
        assert ask(client, follow, max_tokens=1, extra_body=salt).prompt_token_ids[: len(ids)] != ids


def test_kept_turns_are_bounded_and_can_be_off(path):
    with Serving(path, {"kv_cache_memory_bytes": 2**23}, kept_tokens=150) as server:
        for number in range(4):
            body = {"messages": user(f"question {number}"), "max_tokens": 30, "ignore_eos": True}
            server.ok("/v1/chat/completions", body)
            assert server.service.kept.num_tokens <= 150
        assert 0 < len(server.service.kept._turns) < 4
    with Serving(path, {"kv_cache_memory_bytes": 2**23}, kept_tokens=0) as server:
        server.ok("/v1/chat/completions", {"messages": user(), "max_tokens": 30, "ignore_eos": True})
        assert not server.service.kept._turns


@pytest.mark.parametrize("stream", [False, True])
def test_auto_parses_what_the_model_writes_and_the_raw_text_stays_beside_it(client, stream):
    wanted = {"structured_outputs": {"choice": ["ab " + CALL]}}
    reply = ask(client, user(), tool_choice="auto", stream=stream, extra_body=wanted)
    if stream:
        chunks = [chunk.choices[0] for chunk in reply]
        content = "".join(c.delta.content or "" for c in chunks)
        (calls,) = [c.delta.tool_calls for c in chunks if c.delta.tool_calls]
        last = chunks[-1]
        assert content == "ab "
        assert calls[0].index == 0
    else:
        last = reply.choices[0]
        calls = last.message.tool_calls
        assert last.message.content == "ab"
        assert last.token_ids[-1] == 2
    assert last.finish_reason == "tool_calls"
    assert last.text == "ab " + CALL
    assert (calls[0].function.name, json.loads(calls[0].function.arguments)) == ("add", {"a": 1})


def test_none_leaves_the_prompt_as_it_is_and_parses_nothing(client):
    wanted = {"structured_outputs": {"choice": [CALL]}}
    auto = ask(client, user(), extra_body=wanted)
    none = ask(client, user(), tool_choice="none", extra_body=wanted)
    assert none.prompt_token_ids == auto.prompt_token_ids
    assert none.choices[0].message.tool_calls is None
    assert (none.choices[0].message.content, none.choices[0].finish_reason) == (CALL, "stop")
    without = ask(client, user(), tools=openai.NOT_GIVEN, extra_body=wanted)
    assert without.prompt_token_ids != auto.prompt_token_ids


def test_a_named_tool_is_the_one_that_is_called(client):
    for seed in range(3):
        message = ask(client, user(), tool_choice=NAMED, seed=seed).choices[0].message
        assert [(c.function.name, c.function.arguments) for c in message.tool_calls] == [("now", "{}")]
        assert message.content is None


@pytest.mark.parametrize("stream", [False, True])
def test_response_format_gives_json_with_the_trainers_bits(client, path, stream):
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    reply = ask(client, user(), response_format=format, logprobs=True, tools=openai.NOT_GIVEN, stream=stream)
    chunks = [*reply] if stream else [reply]
    choices = [chunk.choices[0] for chunk in chunks]
    text = "".join((c.delta if stream else c.message).content for c in choices)
    assert json.loads(text)["x"] in (1, 2)
    ids = [token for choice in choices for token in choice.token_ids]
    logprobs = [entry.logprob for choice in choices for entry in choice.logprobs.content]
    prompt = chunks[0].prompt_token_ids
    params = SamplingParams(structured_outputs=StructuredOutputsParams(json=SCHEMA))
    tokenizer = AutoTokenizer.from_pretrained(path)
    scored = token_logprobs(exact_model(path), [prompt + ids], params, prompt_lens=[len(prompt)], tokenizer=tokenizer)
    assert scored[0][len(prompt) :].tolist() == logprobs


def test_every_dialect_takes_a_grammar_and_gives_the_same_tokens(server):
    ids, setting = [17, 900, 3], {"max_tokens": 30, "seed": 5}
    regex = "[ab]{3,9}"
    found = []
    for structure in ({"structured_outputs": {"regex": regex}}, {"regex": regex}):
        sampling = {"max_new_tokens": 30, "sampling_seed": 5} | structure
        found.append(server.ok("/generate", {"input_ids": ids, "sampling_params": sampling})["output_ids"])
    body = {"prompt": ids, "return_token_ids": True, "structured_outputs": {"regex": regex}} | setting
    found.append(server.ok("/v1/completions", body)["choices"][0]["token_ids"])
    body = {"token_ids": ids, "sampling_params": {"structured_outputs": {"regex": regex}} | setting}
    found.append(server.ok("/inference/v1/generate", body)["choices"][0]["token_ids"])
    with Client(server.url) as client:
        params = SamplingParams(structured_outputs=StructuredOutputsParams(regex=regex), **setting)
        found.append(client.generate([ids], params)[0].completions[0].token_ids)
    assert found == [found[0]] * 5
    schema = {"json_schema": json.dumps(SCHEMA), "max_new_tokens": 60}
    assert json.loads(server.ok("/generate", {"input_ids": ids, "sampling_params": schema})["text"])["x"] in (1, 2)


BAD = [
    ({"response_format": {"type": "xml"}}, "give text, json_object, or json_schema"),
    ({"response_format": {"type": "json_schema"}}, "give text, json_object, or json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": "{}"}}, "give text, json_object, or json_schema"),
    ({"tool_choice": {"function": "now"}, "tools": TOOLS}, "needs that tool among"),
    ({"tool_choice": "required", "tools": [{"function": "now"}]}, "needs that tool among"),
    ({"tool_choice": "required", "tools": [{"function": {"name": "f", "parameters": "{}"}}]}, "must be a JSON schema"),
    ({"messages": [{"role": "assistant", "tool_calls": ["now"]}]}, "must be a list of objects"),
    ({"messages": [{"role": "assistant", "tool_calls": {"a": 1}}]}, "must be a list of objects"),
    ({"structured_outputs": {"choice": 5}}, "choice must be"),
    ({"structured_outputs": {"json": 5}}, "structured_outputs"),
    ({"structured_outputs": {"grammar": 5}}, "grammar must be a string"),
    ({"structured_outputs": {"regex": "["}}, "unclosed character class"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "exactly one of"),
    ({"structured_outputs": {"regexp": "a"}}, "regexp"),
    ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "either"),
    ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "leave min_tokens and ignore_eos out"),
    ({"tool_choice": "required"}, "needs that tool among"),
    ({"tool_choice": NAMED, "tools": TOOLS[:1]}, "needs that tool among"),
    ({"tool_choice": "required", "tools": TOOLS, "response_format": {"type": "json_object"}}, "leaves no room"),
    ({"tool_choice": "any", "tools": TOOLS}, "tool_choice"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}, "not JSON"),
]


@pytest.mark.parametrize(("given", "message"), BAD, ids=str)
def test_bad_requests_say_what_to_do(server, given, message):
    response = server.post("/v1/chat/completions", {"messages": user(), "max_tokens": 3} | given)
    assert response.status_code == 400, response.text
    assert message in response.json()["message"]


def nested(depth: int) -> str:
    """JSON of objects in objects."""
    return '{"a": ' * depth + "1" + "}" * depth


DEEP_CALL = {"function": {"name": "f", "arguments": "[" * 100_000}}
DEEP = {
    "arguments": json.dumps({"messages": [{"role": "assistant", "tool_calls": [DEEP_CALL]}]}),
    "a message": '{"messages": [{"role": "user", "content": "", "more": ' + nested(1010) + "}]}",
    "a schema": '{"messages": [], "structured_outputs": {"json": ' + nested(1010) + "}}",
    "a body": '{"messages": ' + nested(5000) + "}",
}


@pytest.mark.parametrize("what", DEEP)
def test_what_is_nested_too_deeply_is_a_400(server, what):
    headers = {"content-type": "application/json"}
    response = server.http.post("/v1/chat/completions", content=DEEP[what], headers=headers)
    assert response.status_code == 400, response.text


def test_a_forced_call_needs_a_template_whose_calls_are_known(path):
    with Serving(path, {"kv_cache_memory_bytes": 2**23}, tool_parser="off") as server:
        body = {"messages": user(), "tools": TOOLS, "max_tokens": 3}
        assert server.ok("/v1/chat/completions", body)["choices"][0]["finish_reason"] == "length"
        response = server.post("/v1/chat/completions", body | {"tool_choice": "required"})
        assert response.status_code == 400
        assert "--tool-parser auto" not in response.json()["message"]
        assert " | hermes | " in response.json()["message"]
