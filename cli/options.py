"""Options of commands that are the fields of a configuration's dataclass: names, types, defaults and help.

The dataclass is read as source and not imported: that would load torch, and `--help` is to answer at once. What a field
is for stands in the string below it, which is also what the API's pages and editors show.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import json
import pathlib
import types
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, get_args, get_type_hints

import typer

PACKAGE = pathlib.Path(__file__).parent.parent
NAMES: dict[str, Any] = {
    "Literal": Literal,
    "Sequence": Sequence,
    "Any": Any,
    "pathlib": pathlib,
    "StructuredOutputsParams": str,
    "Adapter": str,
}  # that the types of options are made of


class Options(dict[str, inspect.Parameter]):
    """Fields of a configuration as options of a command: typer's parameters, by name."""

    @classmethod
    def of(cls, file: str, name: str, flags: dict[str, str]) -> Options:
        """Return the fields of the dataclass `name` in a file of this package, but those whose default is no literal.

        flags: short names of options, by field.
        """
        tree = ast.parse((PACKAGE / file).read_text())
        (body,) = (node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
        parameters = {}
        for node, below in itertools.pairwise([*body, ast.Pass()]):
            if isinstance(node, ast.AnnAssign) and not isinstance(node.value, ast.Call | ast.Attribute):
                field = ast.unparse(node.target)
                parameters[field] = _parameter(field, node, _text(below), flags.get(field))
        return cls(parameters)

    def only(self, *names: str) -> Options:
        """These fields alone."""
        return Options({name: self[name] for name in names})

    def without(self, *names: str) -> Options:
        """Return all fields but these."""
        return self.only(*(name for name in self if name not in names))

    def with_defaults(self, **defaults: Any) -> Options:
        """The same fields with a command's own defaults."""
        own = {name: self[name].replace(default=value) for name, value in defaults.items()}
        return Options(self | own)

    def changed(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return the values that differ from their fields' defaults."""
        return {name: value for name, value in values.items() if value != self[name].default}


def with_options(**groups: Options) -> Callable[[Callable], Callable]:
    """Return a decorator: a command gets options for the parameters named, and the values of each as a dict."""

    def decorate(command: Callable) -> Callable:
        hints = get_type_hints(command, include_extras=True)
        own = [p for name, p in inspect.signature(command).parameters.items() if name not in groups]
        parameters = [p.replace(kind=p.KEYWORD_ONLY, annotation=hints[p.name]) for p in own]
        for group in groups.values():
            parameters += group.values()

        @functools.wraps(command)
        def run(**values: Any) -> None:
            for name, group in groups.items():
                values[name] = {field: values.pop(field) for field in group}
            command(**values)

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


def _parameter(name: str, field: ast.AnnAssign, text: str, flag: str | None) -> inspect.Parameter:
    """The parameter that typer makes a field's option of; the default of an empty sequence is None."""
    annotation = eval(ast.unparse(field.annotation), NAMES)
    kind, how = _option_type(annotation)
    default = inspect.Parameter.empty if field.value is None else ast.literal_eval(field.value)
    default = None if default == () else default
    names = [f"--{name.replace('_', '-')}", flag] if flag else []
    option = typer.Option(*names, help=text, **how)
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind | None if default is None else kind, option],
    )


def _text(node: ast.stmt) -> str:
    """The string that a statement is, in one line; "" if it is anything else."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return " ".join(node.value.value.split())
    return ""


def _option_type(annotation: Any) -> tuple[Any, dict[str, Any]]:
    """The type of an option's values, without None, and more arguments of `typer.Option`."""
    if isinstance(annotation, types.UnionType):  # of "a string or several", several
        annotation = [kind for kind in get_args(annotation) if kind is not types.NoneType][-1]
    if annotation in (Sequence[int], tuple[int, ...]):
        return str, {"parser": _integers, "metavar": "INT,INT,..."}
    if annotation == dict[str, Any]:
        return str, {"parser": json.loads, "metavar": "JSON"}
    if annotation == Sequence[str]:
        return list[str], {"metavar": "TEXT"}
    return annotation, {}


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


ENGINE = Options.of("engine/config.py", "EngineConfig", {"pipeline_parallel_size": "--pp"})
SERVER = Options.of("server/options.py", "ServerOptions", {})
SAMPLING = Options.of("engine/sampling_params.py", "SamplingParams", {"n": "-n"})
SAMPLING = SAMPLING.without("logprobs", "prompt_logprobs", "raw_logprobs", "detokenize")  # commands show what they show
SAMPLING = SAMPLING.without("structured_outputs", "routed_experts", "routed_experts_prompt_start")  # for programs
