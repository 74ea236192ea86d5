"""Tool calls: found in a completion's text by the conventions of its chat template, and forced by a grammar."""

from __future__ import annotations

import ast
import contextlib
import functools
import json
import pathlib
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..engine import StructuredOutputsParams

_DECODER = json.JSONDecoder()
_SPACING = {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", "}  # as templates write JSON


@dataclass(frozen=True)
class ToolFormat:
    """How a family of chat templates writes calls.

    start: a regular expression for what comes before a call's JSON; where it has a group `name`, that is the tool's
    name and the JSON is its arguments alone. held: a stream tells nothing from this string on; "" holds back whatever
    begins like a call. before, after: the text around the arguments of a call that is forced, with `{name}` for the
    tool's. tags: the text before, with `{key}`, and after each argument's value, where arguments are tags in place of
    JSON. sign: a string that the family's templates contain.
    """

    start: str
    held: str
    before: str
    after: str
    tags: Sequence[str] | None = None
    sign: str = ""

    def __post_init__(self) -> None:
        re.compile(self.start)  # an error is found here

    def parse(self, text: str, tools: Sequence[dict] = ()) -> tuple[str, list[dict]]:
        """Return the text before the calls, and the calls in OpenAI's form. Malformed calls stay text, all of it.

        tools: those that were given, whose schemas tell what kinds of values tags hold.
        """
        start = re.compile(self.start)
        match = start.search(text)
        before = text[: match.start()].rstrip() if match else text
        calls: list[dict] = []
        while match:
            try:
                value, end = self._tagged(text, match, tools) if self.tags else _DECODER.raw_decode(text, match.end())
                calls += [_call(match, v) for v in (value if isinstance(value, list) else [value])]
            except (ValueError, TypeError, KeyError):
                return text, []
            match = start.search(text, end)
        return before, calls

    def _tagged(self, text: str, match: re.Match[str], tools: Sequence[dict]) -> tuple[dict[str, Any], int]:
        """Return the arguments of a call that writes them as tags, and where they end."""
        known = next((_properties(tool) for tool in tools if function_of(tool).get("name") == match["name"]), {})
        arguments = {}
        end = match.end()
        while found := self._argument.match(text, end):
            key, value = found.groups()
            arguments[key] = value if _is_text(known.get(key)) else _value(value)
            end = found.end()
        if not text.startswith(self.after.partition("\n")[0], end):
            raise ValueError("the call doesn't end")
        return arguments, end

    @functools.cached_property
    def _argument(self) -> re.Pattern[str]:
        before, after = (r"\s*".join(map(re.escape, tag.split("\n"))) for tag in self.tags or ())
        return re.compile(before.replace(re.escape("{key}"), '([^<>"]+)') + "(.*?)" + after, re.DOTALL)

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
            inner = self._forced_tags(tool, parameters, special_ids) if self.tags else _json(parameters)
            opening = self.before.replace("{name}", json.dumps(function["name"])[1:-1])
            rules.append(f"{_literal(opening, special_ids)} {inner} {_literal(self.after, special_ids)}")
        return StructuredOutputsParams(grammar="start: " + "\n  | ".join(rules))

    def _forced_tags(self, tool: dict, parameters: dict, special_ids: Mapping[str, int]) -> str:
        """Arguments in the schema's order, text without a `<`."""
        shared = {name: parameters[name] for name in ("$defs", "definitions") if name in parameters}
        before, after = self.tags or ("", "")
        rules = []
        for key, schema in _properties(tool).items():
            texts = [
                json.dumps(value, ensure_ascii=False) for value in schema.get("enum", ()) if isinstance(value, str)
            ]
            end = _literal(after, special_ids)
            value = "(" + " | ".join(texts) + ")"
            if not _is_text(schema):
                value = _json(schema | shared)
            elif not texts:  # a lexer takes all it can, the line's end before the tag, too
                value = r"/[^<]*\n/" if after.startswith("\n") else "/[^<]*/"
                end = _literal(after.lstrip("\n"), special_ids)
            rule = f"({_literal(before.replace('{key}', key), special_ids)} {value} {end})"
            rules.append(rule if key in parameters.get("required", ()) else rule + "?")
        return " ".join(rules)


def function_of(tool: dict) -> dict[str, Any]:
    """Return a tool's name, description and parameters; nothing of a tool of another kind."""
    found = tool.get("function")
    return found if isinstance(found, dict) else {}


def _properties(tool: dict) -> dict[str, dict]:
    """The schemas of a tool's arguments, those that are objects."""
    parameters = function_of(tool).get("parameters")
    found = parameters.get("properties") if isinstance(parameters, dict) else None
    return {key: schema for key, schema in found.items() if isinstance(schema, dict)} if isinstance(found, dict) else {}


def _is_text(schema: dict | None) -> bool:
    """True if a value of this schema may be a string, or nothing is known of it."""
    if not isinstance(schema, dict):
        return True
    if "enum" in schema:
        return any(isinstance(value, str) for value in schema["enum"])
    if options := schema.get("anyOf") or schema.get("oneOf"):
        return any(map(_is_text, options))
    return "string" in schema.get("type", () if "$ref" in schema else ("string",))


def _value(text: str) -> Any:
    """A value as JSON, or as Python writes it, as some templates do; else the text."""
    for read in (json.loads, ast.literal_eval):
        with contextlib.suppress(ValueError, SyntaxError):
            return read(text)
    return text


def _call(match: re.Match[str], value: dict) -> dict:
    named = "name" in match.re.groupindex
    name = match["name"] if named else value["tool_name" if "tool_name" in value else "name"]
    arguments = value if named else value["arguments"] if "arguments" in value else value["parameters"]
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError("a call has a name and an object of arguments")
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": uuid.uuid4().hex[:9], "type": "function", "function": function}  # nine, as Mistral's templates want


def _json(schema: dict) -> str:
    """A grammar's rule for JSON of this schema."""
    return f"%json {json.dumps(schema | {'x-guidance': _SPACING})}"


def _literal(text: str, special_ids: Mapping[str, int]) -> str:
    """The text as a grammar's literals, with special tokens as such."""
    pieces = re.split("(" + "|".join(map(re.escape, sorted(special_ids, key=len, reverse=True))) + ")", text)
    named = [f"<[{special_ids[p]}]>" if p in special_ids else json.dumps(p, ensure_ascii=False) for p in pieces if p]
    return " ".join(named)


FORMATS = {
    name: ToolFormat(**fields)
    for name, fields in json.loads(pathlib.Path(__file__).with_name("tool_formats.json").read_text()).items()
}


def tool_format(name: str, template: str | None) -> ToolFormat | None:
    """Return the format of this name, or of a JSON file with a `ToolFormat`'s fields.

    For "auto" it is the first whose sign the chat template bears; for "off" None.
    """
    if name == "auto":
        return next((f for f in FORMATS.values() if f.sign in (template or "")), None)
    if name.endswith(".json"):
        try:
            return ToolFormat(**json.loads(pathlib.Path(name).read_text()))
        except (OSError, ValueError, TypeError, re.error) as error:
            raise ValueError(f"tool_parser {name}: {error}") from error
    if name not in ("off", *FORMATS):
        raise ValueError(f"tool_parser {name!r}: choose auto, off, {', '.join(FORMATS)}, or a .json file")
    return FORMATS.get(name)
