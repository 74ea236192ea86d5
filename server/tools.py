"""Tool calls: found in a completion's text by the conventions of its chat template, and forced by a grammar."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..engine import StructuredOutputsParams

_DECODER = json.JSONDecoder()
_SPACING = {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", "}  # as templates write JSON


@dataclass(frozen=True)
class ToolFormat:
    """How a family of chat templates writes calls.

    sign: a string that its templates contain. start: what comes before a call's JSON; where it has a group `name`, that
    is the tool's name and the JSON is its arguments alone. held: a stream tells nothing from this string on; "" holds
    back whatever begins like a call. before, after: the text around the arguments of a call that is forced.
    """

    sign: str
    start: re.Pattern[str]
    held: str
    before: str
    after: str

    def parse(self, text: str) -> tuple[str, list[dict]]:
        """Return the text before the calls, and the calls in OpenAI's form. Malformed calls stay text, all of it."""
        match = self.start.search(text)
        before = text[: match.start()].rstrip() if match else text
        calls: list[dict] = []
        while match:
            try:
                value, end = _DECODER.raw_decode(text, match.end())
                calls += [_call(match, v) for v in (value if isinstance(value, list) else [value])]
            except (ValueError, TypeError, KeyError):
                return text, []
            match = self.start.search(text, end)
        return before, calls

    def visible(self, text: str) -> int:
        """The number of characters that a stream may tell of an unfinished text: what no call can claim."""
        if not self.held:
            return 0 if text.lstrip()[:1] in ("", "{", "<") else len(text)
        if self.held in text:
            return text.index(self.held)
        partial = [n for n in range(1, len(self.held)) if text.endswith(self.held[:n])]
        return len(text) - max(partial, default=0)

    def forced(self, tools: Sequence[dict], special_ids: Mapping[str, int]) -> StructuredOutputsParams:
        """The grammar of a completion that calls one of these tools. special_ids: of the model's special tokens."""
        rules = []
        for tool in tools:
            function = tool["function"]
            parameters = function.get("parameters") or {"type": "object"}
            if not isinstance(parameters, dict):
                raise ValueError(f"the parameters of tool {function['name']!r} must be a JSON schema")
            schema = json.dumps(parameters | {"x-guidance": _SPACING})
            opening = self.before.replace("{name}", json.dumps(function["name"])[1:-1])
            rules.append(f"{_literal(opening, special_ids)} %json {schema} {_literal(self.after, special_ids)}")
        return StructuredOutputsParams(grammar="start: " + "\n  | ".join(rules))


def _call(match: re.Match[str], value: dict) -> dict:
    named = "name" in match.re.groupindex
    name = match["name"] if named else value["name"]
    arguments = value if named else value["arguments"] if "arguments" in value else value["parameters"]
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError("a call has a name and an object of arguments")
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": uuid.uuid4().hex[:9], "type": "function", "function": function}  # nine, as Mistral's templates want


def _literal(text: str, special_ids: Mapping[str, int]) -> str:
    """The text as a grammar's literals, with special tokens as such."""
    pieces = re.split("(" + "|".join(map(re.escape, sorted(special_ids, key=len, reverse=True))) + ")", text)
    named = [f"<[{special_ids[p]}]>" if p in special_ids else json.dumps(p, ensure_ascii=False) for p in pieces if p]
    return " ".join(named)


_XML_CALLS = re.compile("<arg_key>|<function=")  # within <tool_call>: GLM-4.5 and later, Qwen3-Coder and 3.5
_MISTRAL = "[TOOL_CALLS]"
FORMATS = {
    "hermes": ToolFormat("<tool_call>", re.compile(r"<tool_call>\s*"), "<tool_call>",
                         '<tool_call>\n{"name": "{name}", "arguments": ', "}\n</tool_call>"),
    "mistral-args": ToolFormat("[ARGS]", re.compile(r"\[TOOL_CALLS\](?P<name>[^\s\[{]+)(?:\[CALL_ID\]\w+)?\[ARGS\]\s*"),
                               _MISTRAL, "[TOOL_CALLS]{name}[ARGS]", ""),
    "mistral": ToolFormat(_MISTRAL, re.compile(r"\[TOOL_CALLS\]\s*"), _MISTRAL,
                          '[TOOL_CALLS][{"name": "{name}", "arguments": ', "}]"),
    "llama3_json": ToolFormat('"parameters": dictionary of argument', re.compile(
                              r'(?:\A\s*(?:<\|python_tag\|>)?\s*|;\s*)(?=\{\s*"name")'), "",
                              '{"name": "{name}", "parameters": ', "}"),
}  # fmt: skip


def tool_format(name: str, template: str | None) -> ToolFormat | None:
    """Return the format of this name; for "auto", the first whose sign the chat template bears; for "off", None.

    "auto" is None, too, for a template whose `<tool_call>` holds XML.
    """
    if name == "auto":
        text = template or ""
        return None if _XML_CALLS.search(text) else next((f for f in FORMATS.values() if f.sign in text), None)
    if name not in ("off", *FORMATS):
        raise ValueError(f"tool_parser {name!r}: choose auto, off, {', '.join(FORMATS)}")
    return FORMATS.get(name)
