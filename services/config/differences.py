"""Compares two configurations, or parts of them, key by key. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Return a tree of sections as key -> value; entries of lists of sections are numbered."""
    if isinstance(tree, list) and tree and isinstance(cast("list[Any]", tree)[0], Mapping):
        tree = {str(i): item for i, item in enumerate(cast("list[Any]", tree))}
    if not isinstance(tree, Mapping):
        return {prefix: tree}
    branches = cast("Mapping[str, Any]", tree).items()
    return {key: value for name, branch in branches for key, value in flat(branch, f"{prefix}.{name}".strip(".")).items()}


def differing(old: Any, new: Any) -> dict[str, tuple[Any, Any]]:
    """Return the keys whose values differ between two trees of sections, with both values; None: it has no such key."""
    before, now = flat(old), flat(new)
    return {key: (before.get(key), now.get(key)) for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)}
