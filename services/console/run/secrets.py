"""Creates the console's secrets, as files that only their owner can read."""

from __future__ import annotations

import os
import secrets
import tempfile
from pathlib import Path

from services.store.acl import GRANTS


def write_secret(path: Path, secret: str) -> None:
    """Atomically write a file that only its owner can read, even if another process writes it at the same time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=f"{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(secret)
        os.replace(temporary, path)
    finally:  # no copy of the secret may stay, whatever fails
        Path(temporary).unlink(missing_ok=True)


def kept_secret(path: Path) -> str:
    """Return the secret in the file; if there is no file or it is empty, create a secret and write it."""
    if not path.exists() or not path.read_text().strip():
        write_secret(path, secrets.token_urlsafe(32))
    return path.read_text().strip()


def user_passwords(folder: Path) -> dict[str, str]:
    """Return the password of each kind of service, from its file in `folder` (redis.password_file). Create missing ones."""
    return {kind: kept_secret(folder / kind) for kind in GRANTS}
