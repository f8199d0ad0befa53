"""The metrics that docs/metrics.md documents. In its first column, `{a,b}` lists alternatives and `<name>` is any one part."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

PAGE = Path(__file__).parent.parent.parent / "docs" / "metrics.md"


def undocumented(keys: Iterable[str]) -> set[str]:
    """Return the keys that the page does not document."""
    known = [re.compile(pattern) for pattern in _patterns(PAGE.read_text())]
    return {key for key in keys if not any(pattern.fullmatch(key) for pattern in known)}


def _patterns(page: str) -> Iterator[str]:
    for line in page.splitlines():
        if line.startswith("| `"):
            for name in re.findall(r"`([^`]+)`", line.split(" | ")[0]):
                choices = [part.split(",") for part in re.split(r"[{}]", name)]
                for spelt in itertools.product(*choices):
                    yield re.sub(r"<\w+>", "[^/]+", "".join(spelt))
