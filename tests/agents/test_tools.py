"""Tool calls: parsed from what the tested families' templates have models write, whole or piece by piece."""

import dataclasses
import functools
import json
import pathlib
import random
import time
from array import array

import numpy as np
import pytest
from transformers import AutoTokenizer

from samebits.agents import FORMATS, tool_format
from samebits.agents.kept_ids import KeptIds
from samebits.engine.structured_outputs import Constraint
from samebits.server.options import ServerOptions

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
    ("granite", "one"): '<|tool_call|>[{"name": "add", "arguments": {"a": 1, "b": true}}]',
    (
        "granite",
        "two",
    ): '<|tool_call|> [{"name": "add", "arguments": {"a": 1, "b": true}}, {"name": "now", "arguments": {}}]',
    (
        "cohere",
        "one",
    ): '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "add", "parameters": {"a": 1, "b": true}}\n]'
    "<|END_ACTION|>",
    (
        "cohere",
        "two",
    ): 'A plan.\n<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "add", "parameters": {"a": 1, "b": true}},'
    '\n    {"tool_call_id": "1", "tool_name": "now", "parameters": {}}\n]<|END_ACTION|>',
    (
        "qwen3_coder",
        "one",
    ): "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\ntrue\n</parameter>\n"
    "</function>\n</tool_call>",
    (
        "qwen3_coder",
        "two",
    ): "So:\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nTrue\n</parameter>\n"
    "</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
    (
        "glm45",
        "one",
    ): "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n<arg_value>true"
    "</arg_value>\n</tool_call>",
    (
        "glm45",
        "two",
    ): "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>b</arg_key><arg_value>true</arg_value>"
    "</tool_call><tool_call>now</tool_call>",
    ("seed_oss", "one"): "<seed:tool_call>\n<function=add>\n<parameter=a>1</parameter>\n<parameter=b>true</parameter>\n"
    "</function>\n</seed:tool_call>",
    (
        "seed_oss",
        "two",
    ): "<seed:tool_call>\n<function=add>\n<parameter=a>1</parameter>\n<parameter=b>true</parameter>\n</function>\n"
    "</seed:tool_call>\n<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>",
    (
        "minimax_m2",
        "one",
    ): '<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">1</parameter>\n<parameter name="b">true'
    "</parameter>\n</invoke>\n</minimax:tool_call>",
    (
        "minimax_m2",
        "two",
    ): 'Yes.\n<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">1</parameter>\n<parameter name="b">true'
    '</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
}


@pytest.mark.parametrize(("name", "count"), WRITTEN, ids=str)
def test_calls_are_found(name, count):
    _, calls = FORMATS[name].parse(WRITTEN[name, count], TOOLS)
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


SCHEMAS = {
    "text": {"type": "string"},
    "number": {"type": ["number", "null"]},
    "either": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "list": {"$ref": "#/$defs/list"},
    "unit": {"$ref": "#/$defs/unit"},
    "free": {},
    "three": {"const": 3},
    "all": {"allOf": [{"type": "integer"}, {"minimum": 1}]},
    "odd": {"enum": 5, "anyOf": None, "type": None},
}
CONVERT = {
    "type": "function",
    "function": {
        "name": "convert",
        "parameters": {
            "type": "object",
            "properties": SCHEMAS,
            "required": ["text", "unit", "list"],
            "$defs": {"list": {"type": "array", "items": {"type": "integer"}}, "unit": {"enum": ["1", "2"]}},
        },
    },
}


TAGGED = [name for name, form in FORMATS.items() if form.tags]


@pytest.mark.parametrize("name", TAGGED)
def test_tags_hold_what_the_tools_schema_says(name):
    form = FORMATS[name]
    before, after = form.tags

    def write(**values):
        tags = "".join(before.replace("{key}", key) + value + after for key, value in values.items())
        opening, _, _ = WRITTEN[name, "one"].partition(before.partition("{key}")[0] + "a")
        return opening.replace("add", "convert") + tags + form.after

    def read(tools, **values):
        _, (call,) = form.parse(write(**values), tools)
        return json.loads(call["function"]["arguments"])

    given = {
        "text": "75",
        "number": "7.5",
        "either": "None",
        "list": "[1, 2]",
        "unit": "1",
        "free": "7",
        "three": "3",
        "all": "4",
        "odd": "5",
        "other": "x > 1",
    }
    assert read([{"type": "custom"}, CONVERT], **given) == {
        "text": "75", "number": 7.5, "either": None, "list": [1, 2], "unit": "1", "free": "7", "three": 3, "all": 4,
        "odd": "5", "other": "x > 1",
    }  # fmt: skip
    code = "  def f():\n    return 1\n\n"
    assert read([CONVERT], number="many", text=code) == {"number": "many", "text": code}
    for no_json in ("{1, 2}", "NaN", "b'x'"):  # though Python would read it
        assert read([CONVERT], number=no_json) == {"number": no_json}
    assert read([], number="7") == {"number": "7"}  # of an unknown tool nothing is known
    unfinished = write(text="a")[: -len(form.after)]
    assert form.parse(unfinished, [CONVERT]) == (unfinished, [])


@pytest.mark.parametrize("name", TAGGED)
def test_calls_as_tags_are_not_forced(name):
    with pytest.raises(ValueError, match="leave tool_choice at auto"):
        FORMATS[name].forced([CONVERT], {})


HOSTILE = [
    "<tool_call>\n<function=add>\n<parameter=k>\n" + "\n" * 50_000,
    "<tool_call>add\n<arg_key>k</arg_key>" + "\n" * 50_000,
    " " * 50_000 + "x",
    "; " * 50_000,
    '<tool_call>{"name": "add", "arguments": ' + "[" * 5_000,
    '<tool_call>{"name": "add", "arguments": {"a": "\\ud83d"}}</tool_call>',
    "<tool_call>[] and more",
    '[TOOL_CALLS][] {"',
]


@pytest.mark.parametrize("name", FORMATS)
def test_what_no_client_could_read_stays_text_and_takes_no_time(name):
    start = time.perf_counter()
    for text in HOSTILE:
        assert FORMATS[name].parse(text, [CONVERT]) == (text, [])
    assert time.perf_counter() - start < 1.0


def test_deep_values_in_tags_stay_text():
    form = FORMATS["qwen3_coder"]
    for value in ("[" * 20_000, "-" * 3_000 + "1"):
        text = f"<tool_call>\n<function=convert>\n<parameter=list>\n{value}\n</parameter>\n</function>\n</tool_call>"
        _, (call,) = form.parse(text, [CONVERT])
        assert json.loads(call["function"]["arguments"]) == {"list": value}


@pytest.mark.parametrize("name", FORMATS)
def test_a_stream_never_tells_what_a_call_claims_later(name):
    marks = [WRITTEN[name, "one"], WRITTEN[name, "two"], "a", " ", "\n", "; ", "<tool_call>", '{"name": "add"', "[]"]
    marks += ['<invoke name="add">\n</invoke>', '{"name": "add", "parameters": {}}', "[TOOL_CALLS]", "Hello"]
    rng = random.Random(name)
    found = 0
    for _ in range(300):
        text = "".join(rng.choices(marks, k=rng.randint(1, 5)))
        before, calls = FORMATS[name].parse(text, TOOLS)
        found += len(calls)
        for end in range(len(text)):
            assert len(text[: FORMATS[name].visible(text[:end])].rstrip()) <= len(before)
    assert found > 30


@pytest.mark.parametrize("name", FORMATS)
def test_plain_text_and_malformed_calls_stay_text(name):
    whole = WRITTEN[name, "one"]
    for text in ("", "Hello, {world}.", "a < b", whole[: whole.index("true") + 2]):
        assert FORMATS[name].parse(text) == (text, [])
    if FORMATS[name].tags is None:
        for text in (whole.replace("}", "", 1), whole.replace('"a": 1', "7")):
            assert FORMATS[name].parse(text) == (text, [])
    assert FORMATS[name].visible("Hello") == 5


def test_a_call_in_the_arguments_of_a_call_is_no_call():
    inner = WRITTEN["hermes", "one"]
    text = '<tool_call>{"name": "say", "arguments": ' + json.dumps({"text": inner}) + "}</tool_call>"
    _, calls = FORMATS["hermes"].parse(text)
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [{"text": inner}]


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in TAGGED])
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


REAL = {
    "qwen2_5": "hermes", "qwen3": "hermes", "qwen3_instruct_2507": "hermes", "qwen3_5_nothink": "qwen3_coder",
    "qwen3_5_think": "qwen3_coder", "nemotron_3_nano": "qwen3_coder", "glm4moe": "glm45", "llama3_1": "llama3_json",
    "llama3_2": "llama3_json",
}  # fmt: skip


@pytest.mark.parametrize("name", REAL)
def test_calls_that_real_templates_write_are_found(name, tmp_path):
    """The templates are those that TRL brings; what they make of a message with calls is what models learn to write."""
    trl = pytest.importorskip("trl")
    file = pathlib.Path(trl.__file__).with_name("chat_templates") / f"{name}.jinja"
    if not file.exists():
        pytest.skip("this TRL has no such template")
    add_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.chat_template = file.read_text()
    form = tool_format("auto", tokenizer.chat_template)
    assert form is FORMATS[REAL[name]]
    question = [{"role": "user", "content": "hi"}]
    functions = ({"name": "add", "arguments": {"a": 1, "b": True}}, {"name": "now", "arguments": {}})
    calls = [{"id": f"{i:09}", "type": "function", "function": each} for i, each in enumerate(functions)]
    for made in (calls[:1],) if "llama" in name else (calls[:1], calls):
        render = functools.partial(tokenizer.apply_chat_template, tools=TOOLS, tokenize=False)
        whole = render([*question, {"role": "assistant", "content": "", "tool_calls": made}])
        asked = render(question, add_generation_prompt="llama" in name)  # others begin with a thought
        assert whole.startswith(asked)
        _, found = form.parse(whole.removeprefix(asked), TOOLS)
        assert [c["function"] for c in found] == [ADD, NOW][: len(made)]


def test_a_format_of_ones_own_is_a_file(tmp_path):
    form = {"start": "CALL ", "held": "CALL", "before": 'CALL {"name": "{name}", "arguments": ', "after": "}"}
    (tmp_path / "own.json").write_text(json.dumps(form))
    own = tool_format(str(tmp_path / "own.json"), None)
    assert [c["function"] for c in own.parse('CALL {"name": "add", "arguments": {"a": 1, "b": true}}')[1]] == [ADD]
    with pytest.raises(ValueError, match="can't be forced; leave tool_choice at auto"):
        dataclasses.replace(own, before="").forced(TOOLS, {})
    for text, message in (("{", "own.json"), (json.dumps(form | {"start": "("}), "unterminated"), ("{}", "start")):
        (tmp_path / "own.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            ServerOptions(tool_parser=str(tmp_path / "own.json"))


def test_the_format_follows_the_template():
    qwen = '{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call> <tool_call>'
    llama = 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.'
    for template, name in ((qwen, "hermes"), (llama, "llama3_json"), ("[TOOL_CALLS][", "mistral")):
        assert tool_format("auto", template) is FORMATS[name]
    for name, form in FORMATS.items():  # as templates show models what to write
        if name != "llama3_json":
            assert tool_format("auto", f"For each call, write: {WRITTEN[name, 'one']}") is form
    assert tool_format("auto", "[TOOL_CALLS]name[ARGS]") is FORMATS["mistral-args"]
    assert tool_format("auto", "<user>") is None
    assert tool_format("auto", None) is None
    assert tool_format("off", qwen) is None
    assert tool_format("mistral", qwen) is FORMATS["mistral"]
    with pytest.raises(ValueError, match=r"choose auto, off, .*hermes"):
        tool_format("qwen", None)


def test_a_conversation_that_is_too_long_to_be_kept_drops_no_other():
    kept = KeptIds(10)
    kept.add(b"a", [1, 2, 3])
    kept.add(b"b", range(11))
    assert kept.find([b"a"]) == (0, array("i", [1, 2, 3])) and kept.find([b"b"]) == (0, ())
