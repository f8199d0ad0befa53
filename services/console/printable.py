"""Text of others, fit for a terminal: what models, data sets and generators wrote cannot move the cursor or hide.

Guarantees: of what comes out, no character controls a terminal or is invisible, but for line feeds where they are kept.
"""

from __future__ import annotations

import re

from rich.text import Text

_ESCAPES = {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\x1b": "\\e"}


def printable(text: object, keep_lines: bool = False) -> str:
    """`text` with every character that is not printable (controls, formats such as bidi marks, lone surrogates) as an escape."""
    return "".join(c if c.isprintable() or (keep_lines and c == "\n") else _escape(c) for c in str(text))


def cell(text: object, style: str = "", keep_lines: bool = False) -> Text:
    """The same for a table of rich, whose markup it is not."""
    return Text(printable(text, keep_lines), style)


def safe_json(text: str) -> str:
    """JSON with every such character inside its strings as `\\uXXXX`, which means the same."""
    return re.sub(r"[^\x20-\x7e\n]", lambda found: found[0] if found[0].isprintable() else _json_escape(found[0]), text)


def _escape(c: str) -> str:
    code = ord(c)
    return _ESCAPES.get(c) or (f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}")


def _json_escape(c: str) -> str:
    """JSON counts in UTF-16 units."""
    units = c.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[i : i + 2].hex()}" for i in range(0, len(units), 2))
