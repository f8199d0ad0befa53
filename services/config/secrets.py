"""Values of keys for messages and pages, without anything that may be secret, and tokens where keys name them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote, urlsplit

HIDDEN = "(hidden)"
TOKEN = r"^(env:[A-Za-z_]\w*|file:.+)?$"
"""Pattern of a key that says where a token is."""
_WORDS = "(?:password|passwd|secret|token|(?:api)?key|credentials?)"
_SECRET = re.compile(rf"(?:^|[._-]){_WORDS}$", re.IGNORECASE)
"""Names of keys that may hold a secret."""
_LOGIN = re.compile(r"(?<=://).*@", re.DOTALL)
"""User name and password of an address: whatever stands between `://` and the last `@`, since they may hold any character."""
_IN_QUERY = re.compile(rf"([?&](?:[\w.-]*[._-])?{_WORDS}=)[^&#\s]+", re.IGNORECASE)


def variable_of(token: str) -> str:
    """Return the environment variable that holds a token, or "" if none does."""
    return token.removeprefix("env:") if token.startswith("env:") else ""


def read_token(token: str) -> str:
    """Return the token that is where `token` says. Raises ValueError for one that is missing or cannot be sent."""
    kind, _, place = token.partition(":")
    if kind == "env":
        value = os.environ.get(place, "").strip()
        if not value:
            raise ValueError(f"token = {token}: the environment variable is not set or empty: set it, or remove token")
    else:
        try:
            value = Path(place).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not text"
            raise ValueError(f"token = {token}: the file cannot be read ({reason}): create it, or remove token") from None
        if not value:
            raise ValueError(f"token = {token}: the file is empty: write the token into it, or remove token")
    if not (value.isascii() and value.isprintable()):
        raise ValueError(f"token = {token}: the token has characters that a header cannot contain: check what was stored")
    return value


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
    if holds_secret(key) and not isinstance(value, bool | None) and not re.match(TOKEN, str(value)):
        return HIDDEN
    if not isinstance(value, str) or "://" not in value:
        return value
    return _IN_QUERY.sub(rf"\1{HIDDEN}", _LOGIN.sub(f"{HIDDEN}@", value))


def has_login(address: str) -> bool:
    """Return whether an address has a user name or password."""
    return _LOGIN.search(address) is not None


def split_password(url: str) -> tuple[str, str]:
    """Split a Redis address into the address without password, which may be shown, and the password, which may not.

    Both are empty without an address. Raise ValueError for what is none; its text shows no password.
    """
    if not url:
        return "", ""
    scheme, _, rest = url.partition("://")
    login, _, place = rest.rpartition("@")
    if scheme == "unix" and login.startswith("/"):  # a folder with @ in its name
        login, place = "", rest
    if scheme not in ("redis", "rediss", "unix"):
        raise ValueError("is not a Redis address: use redis://host:port/0")
    if set(login) & set("/?#[]"):
        raise ValueError(
            "is not a Redis address: in a user name or password write %2F for /, %3F for ?, %23 for #, %5B for [ and %5D for ]"
        )
    try:
        _ = urlsplit(f"{scheme}://{place}").port
    except ValueError as error:
        raise ValueError(f"is not a Redis address ({error}): use redis://host:port/0") from None
    user, _, password = login.partition(":")
    return f"{scheme}://{f'{user}@' if user else ''}{place}", unquote(password)
