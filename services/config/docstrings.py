"""The docstrings of the fields of classes, e.g. of configuration keys, read from the source on request."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import GetJsonSchemaHandler
    from pydantic.json_schema import JsonSchemaValue
    from pydantic_core import CoreSchema


def described(kind: type, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
    """Return the JSON schema of a class with the docstrings of its fields as descriptions."""
    schema = handler.resolve_ref_schema(handler(core_schema))
    for name, text in docstrings(kind).items():
        schema.get("properties", {}).get(name, {}).setdefault("description", text)
    return schema


def docstrings(kind: type) -> dict[str, str]:
    """Return the docstring of each field of a class, which is the string after it in the source."""
    found = dict[str, str]()
    for base in reversed(kind.__mro__):
        found |= _sources(base.__module__).get(base.__name__, {})
    return found


@cache
def _sources(module: str) -> dict[str, dict[str, str]]:
    """Return class -> key -> docstring of a module."""
    if not module.startswith("services."):
        return {}
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: dict(_of_class(node)) for node in tree.body if isinstance(node, ast.ClassDef)}


def _of_class(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for key, text in zip(node.body, node.body[1:], strict=False):
        match key, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(said))):
                yield name, inspect.cleandoc(said)
            case _:
                pass
