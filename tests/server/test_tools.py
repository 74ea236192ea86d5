"""Tool calls: parsed from what the tested families' templates have models write, whole or piece by piece."""

import json

import numpy as np
import pytest
from transformers import AutoTokenizer

from samebits.engine.structured_outputs import Constraint
from samebits.server.tools import FORMATS, tool_format

from helpers.agents import TOOLS
from helpers.serving import add_tokenizer

ADD = {"name": "add", "arguments": '{"a": 1, "b": true}'}
NOW = {"name": "now", "arguments": "{}"}
WRITTEN = {
    ("hermes", "one"): '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": true}}\n</tool_call>',
    ("hermes", "two"): 'I will.\n<tool_call>\n{"name":"add","arguments":{"a":1,"b":true}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    ("llama3_json", "one"): '{"name": "add", "parameters": {"a": 1, "b": true}}',
    ("llama3_json", "two"): '<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": true}}; '
    '{"name": "now", "parameters": {}}',
    ("mistral", "one"): '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": true}}]',
    ("mistral", "two"): 'Yes. [TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": true}}, '
    '{"name": "now", "arguments": {}}]',
    ("mistral-args", "one"): '[TOOL_CALLS]add[ARGS]{"a": 1, "b": true}',
    ("mistral-args", "two"): '[TOOL_CALLS]add[CALL_ID]x1[ARGS]{"a": 1, "b": true}[TOOL_CALLS]now[ARGS]{}',
}


@pytest.mark.parametrize(("name", "count"), WRITTEN, ids=str)
def test_calls_are_found(name, count):
    _, calls = FORMATS[name].parse(WRITTEN[name, count])
    assert [call["function"] for call in calls] == ([ADD] if count == "one" else [ADD, NOW])
    assert len({call["id"] for call in calls}) == len(calls)
    assert all(call["type"] == "function" and len(call["id"]) == 9 for call in calls)


@pytest.mark.parametrize(("name", "count"), WRITTEN, ids=str)
def test_a_stream_tells_what_comes_before_a_call_and_nothing_of_the_call(name, count):
    text = WRITTEN[name, count]
    before, _ = FORMATS[name].parse(text)
    told = [FORMATS[name].visible(text[:end]) for end in range(len(text) + 1)]
    assert told == sorted(told)
    assert text[: told[-1]].rstrip() == before


@pytest.mark.parametrize("name", FORMATS)
def test_plain_text_and_malformed_calls_stay_text(name):
    whole = WRITTEN[name, "one"]
    for text in ("", "Hello, {world}.", "a < b", whole[:-16], whole.replace("}", "", 1), whole.replace('"a": 1', "7")):
        assert FORMATS[name].parse(text) == (text, [])
    assert FORMATS[name].visible("Hello") == 5


def test_a_call_in_the_arguments_of_a_call_is_no_call():
    inner = WRITTEN["hermes", "one"]
    text = '<tool_call>{"name": "say", "arguments": ' + json.dumps({"text": inner}) + "}</tool_call>"
    _, calls = FORMATS["hermes"].parse(text)
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [{"text": inner}]


@pytest.mark.parametrize("name", FORMATS)
def test_a_forced_call_allows_what_the_parser_finds_and_nothing_else(name, tmp_path):
    add_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    structure = FORMATS[name].forced(TOOLS, {"[ARGS]": 1, "<pad>": 0})
    known, _, call = WRITTEN[name, "one"].partition("[ARGS]")
    ids = tokenizer.encode(known) + ([1, *tokenizer.encode(call)] if call else [])
    constraint = Constraint(structure, tokenizer, 1001, [2])
    for token in ids:
        constraint.advance(token)
    assert np.unpackbits(constraint.mask.view(np.uint8), bitorder="little").nonzero()[0].tolist() == [2]
    with pytest.raises(ValueError, match="doesn't satisfy the grammar"):
        Constraint(structure, tokenizer, 1001, [2]).advance(tokenizer.encode("H")[0])


def test_the_format_follows_the_template():
    qwen = '{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call> <tool_call>'
    llama = 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.'
    for template, name in ((qwen, "hermes"), (llama, "llama3_json"), ("[TOOL_CALLS][", "mistral")):
        assert tool_format("auto", template) is FORMATS[name]
    assert tool_format("auto", "[TOOL_CALLS]name[ARGS]") is FORMATS["mistral-args"]
    assert tool_format("auto", "<user>") is None
    assert tool_format("auto", None) is None
    assert tool_format("off", qwen) is None
    assert tool_format("mistral", qwen) is FORMATS["mistral"]
    with pytest.raises(ValueError, match="choose auto, off, hermes"):
        tool_format("qwen", None)


@pytest.mark.parametrize(
    "written",
    [
        "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value>\n</tool_call>",
        "<tool_call>\n<function=example_function_name>\n<parameter=example_1>\nvalue_1\n</parameter>\n</function>\n</tool_call>",
    ],
    ids=["GLM-4.5", "Qwen3-Coder"],
)
def test_a_template_whose_calls_are_xml_has_no_format_of_its_own(written):
    assert FORMATS["hermes"].parse(written) == (written, [])
    assert tool_format("auto", f"For each function call, output: {written}") is None
    assert tool_format("hermes", written) is FORMATS["hermes"]
