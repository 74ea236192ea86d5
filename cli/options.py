"""Options of commands that are the fields of a configuration's dataclass: names, types, defaults and help.

The dataclass is read as source and not imported: that would load torch, and `--help` is to answer at once. What a field
is for stands in the string below it, which is also what the API's pages and editors show.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import pathlib
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, get_args, get_type_hints

import typer

PACKAGE = pathlib.Path(__file__).parent.parent
NAMES = {"Literal": Literal, "Sequence": Sequence, "pathlib": pathlib}  # that the types of options are made of


@dataclass(frozen=True)
class Setting:
    """A field of a configuration, as it stands in the source: annotation, default (None: it has none) and help."""

    annotation: ast.expr
    default: ast.expr | None
    help: str


@dataclass(frozen=True)
class Options:
    """Fields of a configuration as options of a command.

    flags: more names of an option, by field. defaults: a command's own, by field.
    """

    settings: dict[str, Setting]
    flags: dict[str, list[str]]
    defaults: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, file: str, name: str, flags: dict[str, list[str]]) -> Options:
        """All fields of the dataclass `name` in a file of this package."""
        tree = ast.parse((PACKAGE / file).read_text())
        (body,) = (node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
        settings = {}
        for node, below in itertools.pairwise([*body, ast.Pass()]):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                settings[node.target.id] = Setting(node.annotation, node.value, _text(below))
        return cls(settings, flags)

    def only(self, *names: str) -> Options:
        """These fields alone."""
        return replace(self, settings={name: self.settings[name] for name in names})

    def without(self, *names: str) -> Options:
        """All fields but these."""
        return self.only(*(name for name in self.settings if name not in names))

    def with_defaults(self, **defaults: Any) -> Options:
        """The same fields with a command's own defaults."""
        return replace(self, defaults=self.defaults | defaults)

    def default(self, name: str) -> Any:
        """The default of a field, None for an empty sequence, ... for none."""
        if name in self.defaults:
            return self.defaults[name]
        source = self.settings[name].default
        if source is None:
            return ...
        value = ast.literal_eval(source)
        return None if value == () else value

    def changed(self, values: dict[str, Any]) -> dict[str, Any]:
        """Those of the values that aren't their fields' defaults."""
        return {name: value for name, value in values.items() if value != self.default(name)}

    def parameter(self, name: str) -> inspect.Parameter:
        """The parameter that typer makes a field's option of."""
        setting = self.settings[name]
        kind, how = _option_type(eval(ast.unparse(setting.annotation), dict(NAMES)))
        default = self.default(name)
        long = f"--{name.replace('_', '-')}"
        if kind is bool and default is not False:
            long = f"{long}/--no{long[1:]}"
        option = typer.Option(long, *self.flags.get(name, ()), help=setting.help, **how)
        return inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if default is ... else default,
            annotation=Annotated[kind | None if default is None else kind, option],
        )


def with_options(**groups: Options) -> Callable[[Callable], Callable]:
    """Give a command options in place of the parameters that are named; it gets each group's values as a dict."""

    def decorate(command: Callable) -> Callable:
        hints = get_type_hints(command, include_extras=True)
        parameters: list[inspect.Parameter] = []
        for name, own in inspect.signature(command).parameters.items():
            if name in groups:
                parameters += map(groups[name].parameter, groups[name].settings)
            else:
                parameters.append(own.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name]))

        @functools.wraps(command)
        def run(**values: Any) -> None:
            for name, group in groups.items():
                values[name] = {setting: values.pop(setting) for setting in group.settings}
            command(**values)

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


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
    if annotation == Sequence[str]:
        return list[str], {"metavar": "TEXT"}
    return annotation, {}


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))
