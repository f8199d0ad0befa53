"""Secrets that the console makes: files that their owner alone can read."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from services.store.acl import GRANTS


def write_secret(path: Path, secret: str) -> None:
    """A file that only its owner can read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(secret)


def kept_secret(path: Path) -> str:
    """What the file holds; a new secret, written there, if there is none."""
    if not path.exists():
        write_secret(path, secrets.token_urlsafe(32))
    return path.read_text().strip()


def user_passwords(folder: Path) -> dict[str, str]:
    """The password of each kind of service, from its file in `folder` (redis.users_dir); missing ones are made."""
    return {kind: kept_secret(folder / kind) for kind in GRANTS}
