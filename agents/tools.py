"""Tool calls: found in a completion's text by the conventions of its chat template, and forced by a grammar."""

from __future__ import annotations

import ast
import contextlib
import json
import pathlib
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..engine import StructuredOutputsParams

_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"\s*")
_SPACING = {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", "}  # as templates write JSON


@dataclass(frozen=True)
class ToolFormat:
    """How a family of chat templates writes calls.

    start: a regular expression for what comes before a call's JSON; where it has a group `name`, that is the tool's
    name and the JSON is its arguments alone. again: the same after a call, where it differs. held: a stream tells
    nothing from this string on; "" holds back whatever begins like a call. before, after: the text around the arguments
    of a call that is forced, with `{name}` for the tool's; without `before` none can be. tags: the text before, with
    `{key}`, and after each argument's value, where arguments are tags in place of JSON; `after` then ends them. sign: a
    string that the family's templates contain.
    """

    start: str
    held: str
    after: str
    before: str = ""
    again: str = ""
    tags: Sequence[str] | None = None
    sign: str = ""

    def __post_init__(self) -> None:
        named = (
            "name" in re.compile(self.start).groupindex and "name" in re.compile(self.again or self.start).groupindex
        )
        if not all(isinstance(text, str) for text in (self.held, self.before, self.after, *(self.tags or ()))):
            raise ValueError("held, before, after and tags are strings")
        if self.tags is not None and not (len(self.tags) == 2 and "{key}" in self.tags[0] and named and self.after):
            raise ValueError("tags are two, one before with {key}; they need a group `name` in `start`, and `after`")
        if self.tags and self.before:
            raise ValueError("a call with tags can't be forced: leave out `before`")

    def parse(self, text: str, tools: Sequence[dict] = ()) -> tuple[str, list[dict]]:
        """Return the text before the calls, and the calls in OpenAI's form. Malformed calls stay text, all of it.

        tools: those that were given, whose schemas tell what kinds of values tags hold.
        """
        match = re.search(self.start, text)
        before = text[: match.start()].rstrip() if match else text
        calls: list[dict] = []
        while match:
            try:
                value, end = self._tagged(text, match, tools) if self.tags else _DECODER.raw_decode(text, match.end())
                calls += [_call(match, v) for v in (value if isinstance(value, list) else [value])]
            except (ValueError, TypeError, KeyError, RecursionError):
                return text, []
            match = re.compile(self.again or self.start).search(text, end)
        return (before, calls) if calls else (text, [])

    def _tagged(self, text: str, match: re.Match[str], tools: Sequence[dict]) -> tuple[dict[str, Any], int]:
        """Return the arguments of a call that writes them as tags, and where they end."""
        called = (tool for tool in tools if function_of(tool).get("name") == match["name"])
        parameters = function_of(next(called, {})).get("parameters")
        known = parameters.get("properties") if isinstance(parameters, dict) else None
        before, after = self.tags or ("", "")
        close = after.strip("\n")
        opening = r"\s*".join(map(re.escape, before.rstrip("\n").split("\n"))).replace(r"\{key\}", '([^<>"]+)')
        arguments = {}
        end = match.end()
        while found := re.compile(opening).match(text, end):
            stop = text.index(close, found.end())
            value = text[found.end() : stop]
            value = value.removeprefix("\n") if before.endswith("\n") else value
            value = value.removesuffix("\n") if after.startswith("\n") else value
            schema = known.get(found[1]) if isinstance(known, dict) else None
            arguments[found[1]] = value if _is_text(schema, parameters) else _value(value)
            end = _SPACE.match(text, stop + len(close)).end()  # type: ignore[union-attr]
        if not text.startswith(self.after, end):
            raise ValueError("the call doesn't end")
        return arguments, end

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
        if not self.before:
            raise ValueError("the way in which this model writes calls can't be forced; leave tool_choice at auto")
        rules = []
        for tool in tools:
            function = tool["function"]
            parameters = function.get("parameters") or {"type": "object"}
            if not isinstance(parameters, dict):
                raise ValueError(f"the parameters of tool {function['name']!r} must be a JSON schema")
            schema = json.dumps(parameters | {"x-guidance": _SPACING})
            opening = self.before.replace("{name}", json.dumps(function["name"], ensure_ascii=False)[1:-1])
            rules.append(f"{_literal(opening, special_ids)} %json {schema} {_literal(self.after, special_ids)}")
        return StructuredOutputsParams(grammar="start: " + "\n  | ".join(rules))


def function_of(tool: dict) -> dict[str, Any]:
    """Return a tool's name, description and parameters; nothing of a tool of another kind."""
    found = tool.get("function")
    return found if isinstance(found, dict) else {}


def _is_text(schema: Any, parameters: Any, depth: int = 8) -> bool:
    """True if a value of this schema, one within `parameters`, may be a string, or nothing is known of it."""
    match schema if depth else None:
        case {"$ref": str(ref)}:
            found = parameters
            for name in ref.removeprefix("#/").split("/"):
                found = found.get(name) if isinstance(found, dict) else None
            return _is_text(found, parameters, depth - 1)
        case {"const": value}:
            return isinstance(value, str)
        case {"enum": list(values)}:
            return any(isinstance(value, str) for value in values)
        case {"anyOf": list(options)} | {"oneOf": list(options)}:
            return any(_is_text(option, parameters, depth - 1) for option in options)
        case {"allOf": list(parts)}:
            return all(_is_text(part, parameters, depth - 1) for part in parts)
        case {"type": str(kind)}:
            return kind == "string"
        case {"type": list(kinds)}:
            return "string" in kinds
    return True


def _value(text: str) -> Any:
    """A value as JSON, or as Python writes it, as some templates do; else the text."""
    for read in (json.loads, ast.literal_eval):
        with contextlib.suppress(ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            value = read(text)
            json.dumps(value, allow_nan=False)  # else it is no argument: a set, say
            return value
    return text


def _call(match: re.Match[str], value: dict) -> dict:
    named = "name" in match.re.groupindex
    name = match["name"] if named else value["tool_name" if "tool_name" in value else "name"]
    arguments = value if named else value["arguments"] if "arguments" in value else value["parameters"]
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError("a call has a name and an object of arguments")
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    "".join(function.values()).encode()  # UnicodeEncodeError, a ValueError: half a character, which no reply can hold
    return {"id": uuid.uuid4().hex[:9], "type": "function", "function": function}  # nine, as Mistral's templates want


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
