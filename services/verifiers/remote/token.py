"""The bearer token of a service, from the environment variable or the file that the configuration names.

Guarantees: its value is sent to the service and appears nowhere else; `redacted` removes it from texts of the service, which may
repeat it.
"""

from __future__ import annotations

import os
from pathlib import Path

from services.config.verifiers import RemoteVerifier
from services.verifiers.base import VerifierFailure


class ServiceToken:
    """A token that can be read again."""

    def __init__(self, config: RemoteVerifier) -> None:
        self._env, self._file = config.token_env, config.token_file
        self._value = ""

    def read(self) -> None:
        """Read it. Raises `VerifierFailure` for one that is missing or cannot be sent, and keeps the last one."""
        self._value = self._found()

    @property
    def headers(self) -> dict[str, str]:
        """Return the headers of a request."""
        return {"Authorization": f"Bearer {self._value}"} if self._value else {}

    def redacted(self, text: str) -> str:
        """Return `text` without the token."""
        return text.replace(self._value, "***") if self._value else text

    def __str__(self) -> str:
        """Return the token's origin."""
        return f"token_env = {self._env}" if self._env else f"token_file = {self._file}" if self._file else "no token"

    def _found(self) -> str:
        if self._env:
            token = os.environ.get(self._env, "").strip()
            if not token:
                raise VerifierFailure(f"{self}: the environment variable is not set or empty: set it, or remove token_env")
        elif self._file:
            try:
                token = Path(self._file).read_text().strip()
            except (OSError, UnicodeDecodeError) as error:
                reason = error.strerror if isinstance(error, OSError) else "it is not text"
                raise VerifierFailure(f"{self}: the file cannot be read ({reason}): create it, or remove token_file") from None
            if not token:
                raise VerifierFailure(f"{self}: the file is empty: write the token into it, or remove token_file")
        else:
            return ""
        if not (token.isascii() and token.isprintable()):
            raise VerifierFailure(f"{self}: the token has characters that a header cannot contain: check what was stored")
        return token
