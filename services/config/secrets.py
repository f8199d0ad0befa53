"""Values of keys for messages and pages, without anything that may be secret. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

HIDDEN = "(hidden)"
_WORDS = "(?:password|passwd|secret|token|(?:api)?key|credentials?)"
_SECRET = re.compile(rf"(?:^|[._-]){_WORDS}$", re.IGNORECASE)
"""Names of keys that may hold a secret."""
_IN_ADDRESS = re.compile(r"(://[^:/@\s]*):.+@")
_IN_QUERY = re.compile(rf"([?&](?:[\w.-]*[._-])?{_WORDS}=)[^&#\s]+", re.IGNORECASE)


def shown(key: str, value: Any) -> str:
    """Return the value of a key for a message, with `HIDDEN` in place of secrets."""
    return repr(without_secrets(key, value))


def holds_secret(key: str) -> bool:
    """Return whether a key, by its name, may hold a secret."""
    return _SECRET.search(key) is not None


def without_secrets(key: str, value: Any) -> Any:
    """Return the value of a key with `HIDDEN` in place of secrets, also in what a table or list holds, and in addresses."""
    if isinstance(value, Mapping):
        return {name: without_secrets(str(name), each) for name, each in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list):
        return [without_secrets(key, each) for each in cast("list[Any]", value)]
    if holds_secret(key) and not isinstance(value, bool | None):
        return HIDDEN
    if not isinstance(value, str) or "://" not in value:
        return value
    return _IN_QUERY.sub(rf"\1{HIDDEN}", _IN_ADDRESS.sub(rf"\1:{HIDDEN}@", value))
