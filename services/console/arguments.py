"""Makes typer fast. By itself it prepares every command in order to run one, and checks each argument with a separate pydantic
model, which takes longer than most commands do.

Guarantees: an argument that is left out or is plain text has the value that typer would give it; any other is checked by typer,
whose errors stay. A version of typer with other classes checks them all.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import typer
from typer.core import TyperArgument, TyperOption

USAGE_ERROR: Any = typer.BadParameter.__base__
"""The error that typer raises for arguments that it rejects: a class of its bundled click, which has no public name."""
_UNDECIDED = object()


def only(app: typer.Typer, given: Sequence[str]) -> typer.Typer:
    """Return an app that has just the command or the group of commands that is called, or all of them if none is."""
    named = given[0] if given else ""
    commands = [each for each in app.registered_commands if each.callback and _name(each.name, each.callback) == named]
    groups = [each for each in app.registered_groups if each.name == named]
    if not commands and not groups:
        return app
    chosen = copy.copy(app)
    chosen.registered_commands, chosen.registered_groups = commands, groups
    return chosen


def _name(name: str | None, callback: Any) -> str:
    return name or str(callback.__name__).replace("_", "-")


def quicken() -> None:
    """Let typer check only what needs a check."""
    for kind in (TyperOption, TyperArgument):
        checked = getattr(kind, "process_value", None)
        if checked is not None and hasattr(kind, "get_runtime_param") and checked is not _process_value:
            kind.checked_value, kind.process_value = checked, _process_value  # type: ignore[attr-defined, method-assign]


def _process_value(parameter: Any, context: Any, value: Any) -> Any:
    """Return the value of an argument, as `process_value` of typer's classes does."""
    plain = _left_out(parameter) if value is None else _plain(parameter.type_descriptor.annotation, value)
    if plain is _UNDECIDED or (parameter.required and parameter.value_is_missing(plain)):
        return parameter.checked_value(context, value)
    return plain if parameter.callback is None else parameter.callback(context, parameter, plain)


def _left_out(parameter: Any) -> Any:
    return () if parameter.multiple or parameter.nargs == -1 else None


def _plain(annotation: Any, value: Any) -> Any:
    """Return the value of an argument that needs no check."""
    if get_origin(annotation) is list:
        texts = get_args(annotation) == (str,) and all(isinstance(one, str) for one in value)
        return list(value) if texts else _UNDECIDED
    if get_origin(annotation) is Literal:
        return value if value in get_args(annotation) else _UNDECIDED
    if annotation is Path and isinstance(value, str):
        return Path(value) if os.access(value, os.R_OK) or not os.path.lexists(value) else _UNDECIDED
    return value if annotation in (str, bool, int, float, Path) and type(value) is _made_by(annotation) else _UNDECIDED


def _made_by(annotation: Any) -> type:
    """Return the class of a type's values: only a default is not text, and it needs no check."""
    return type(Path()) if annotation is Path else annotation
