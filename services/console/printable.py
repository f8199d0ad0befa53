"""Makes untrusted text safe for a terminal: text from models, data sets and generators cannot move the cursor or hide.

Guarantees: the output contains no control or invisible characters, except line feeds where they are kept.
"""

from __future__ import annotations

import re
import sys
from typing import Any

import msgspec

_ESCAPES = {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\x1b": "\\e"}


def printable(text: object, keep_lines: bool = False) -> str:
    """Escape every non-printable character of `text`: controls, formats such as bidi marks, lone surrogates."""
    return "".join(c if c.isprintable() or (keep_lines and c == "\n") else _escape(c) for c in str(text))


def safe_json(text: str) -> str:
    """Escape every non-printable character in JSON as `\\uXXXX`, which keeps its meaning."""
    return re.sub(r"[^\x20-\x7e\n]", lambda found: found[0] if found[0].isprintable() else _json_escape(found[0]), text)


def say(text: object) -> None:
    """Print a line for people on standard error, made printable."""
    print(printable(text), file=sys.stderr, flush=True)


def print_json(value: Any, *, line: bool = False) -> None:
    """Print a value as JSON that is safe for a terminal; as one `line` if there may be more."""
    encoded = msgspec.json.encode(value)
    print(safe_json((encoded if line else msgspec.json.format(encoded, indent=2)).decode()), flush=True)


def _escape(c: str) -> str:
    code = ord(c)
    return _ESCAPES.get(c) or (f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}")


def _json_escape(c: str) -> str:
    """Escape a character as the UTF-16 units that JSON uses."""
    units = c.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[i : i + 2].hex()}" for i in range(0, len(units), 2))
