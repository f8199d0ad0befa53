"""Values for messages, without anything that may be secret. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

HIDDEN = "(hidden)"
_SECRET = re.compile(r"(?:^|[._-])(?:password|passwd|secret|token|(?:api)?key|credentials?)$", re.IGNORECASE)
"""Names of keys that may hold a secret."""
_IN_ADDRESS = re.compile(r"(://[^:/@\s]*):.+@")


def shown(key: str, value: Any) -> str:
    """Return the value of a key for a message, with `HIDDEN` in place of secrets."""
    return repr(_without_secrets(key, value))


def holds_secret(key: str) -> bool:
    """Return whether a key, by its name, may hold a secret."""
    return _SECRET.search(key) is not None


def _without_secrets(key: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_secrets(str(name), each) for name, each in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list):
        return [_without_secrets(key, each) for each in cast("list[Any]", value)]
    if holds_secret(key) and not isinstance(value, bool | None):
        return HIDDEN
    return _IN_ADDRESS.sub(rf"\1:{HIDDEN}@", value) if isinstance(value, str) else value
