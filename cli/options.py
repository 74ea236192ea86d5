"""Command-line options from the fields of a dataclass: nothing is restated by hand."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from typing import Annotated, Any, get_type_hints

import typer

SHORT = {"pipeline_parallel_size": "--pp"}  # what is typed most has a second name


def help_of(config: type) -> dict[str, str]:
    """The help of each field, from the "Attributes:" section of the class's docstring (Google style)."""
    _, _, section = inspect.cleandoc(config.__doc__ or "").partition("Attributes:\n")
    entries = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", section, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}


def numbers(text: str) -> tuple[int, ...]:
    """Whole numbers with commas between them. Raises typer.BadParameter."""
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{text!r}: expected numbers with commas between them, such as 17,13") from None


def options_of(config: type, defaults: dict[str, Any]) -> list[inspect.Parameter]:
    """A keyword parameter for each field of a config dataclass, as typer reads them.

    defaults: of the command line, where they differ from the class's.
    """
    hints = get_type_hints(config)
    texts = help_of(config)
    parameters = []
    for field in fields(config):
        default = defaults.get(field.name, _default(field))
        flag = f"--{field.name.replace('_', '-')}"
        names = [SHORT[field.name], flag] if field.name in SHORT else []
        kind = hints[field.name]
        option = typer.Option(*names, help=texts[field.name])
        if "tuple" in str(kind):
            kind = str | None
            option = typer.Option(*names, help=texts[field.name], callback=lambda text: text and numbers(text))
        parameters.append(
            inspect.Parameter(
                field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
            )
        )
    return parameters


def _default(field: Field) -> Any:
    return None if field.default is MISSING else field.default


def takes(config: type, **defaults: Any) -> Callable[[Callable], Callable]:
    """Decorate a command whose `**settings` are the fields of a config dataclass: each becomes an option."""

    def decorate(command: Callable) -> Callable:
        own = inspect.signature(command, eval_str=True).parameters
        kept = [p for p in own.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        parameters = [*kept, *options_of(config, defaults)]

        @functools.wraps(command)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return command(*args, **kwargs)

        wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
        del wrapper.__wrapped__  # or typer would read the command's own signature
        return wrapper

    return decorate
