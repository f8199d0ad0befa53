"""The reference of the configuration: every key, its type, default and meaning, from the docstrings of services/config."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from services.config.explain import Key, keys
from services.config.faults import REPLACED

INTRODUCTION = """# Configuration

A run is one TOML file. Every key below can also be set by an environment variable (`GRPO__SECTION__KEY`) or on the command line
(`section.key=value`); the command line overrides the environment, and the environment the file. A key that does not exist is an
error. `grpo config my.toml` prints a configuration with all defaults; `grpo config --explain` prints this list.

`[]` stands for an entry of a list, such as `[[data.sources]]`; a kind in parentheses has that key alone. A key without a
default is required, except in a section that may be left out.
"""


REPLACED_KEYS = """## Replaced keys

Keys that older versions had. A configuration that sets one is refused in the same words.

| key | what replaces it |
|---|---|
"""


def page() -> str:
    """Return the page."""
    parts = [INTRODUCTION]
    for section, found in groupby(keys(), key=_section):
        parts.append(f"## {section}\n\n{table(found)}")
    replaced = "".join(f"| `{key}` | {cell(text)} |\n" for key, text in sorted(REPLACED.items()))
    return "\n".join(parts) + "\n" + REPLACED_KEYS + replaced


def table(found: Iterable[Key]) -> str:
    """Return keys as a table."""
    rows = [f"| `{key.key}` | {code(key.type)} | {code(key.default)} | {cell(key.help)} |" for key in found]
    return "\n".join(["| key | type | default | meaning |", "|---|---|---|---|", *rows, ""])


def code(text: str) -> str:
    """Return text as code in a cell; empty text stays empty."""
    return f"`{cell(text)}`" if text else ""


def cell(text: str) -> str:
    """Return text as one line in a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


def _section(key: Key) -> str:
    return key.key.partition(".")[0].partition("[")[0].partition("(")[0]
