"""The bearer token of a service, from the environment variable or the file that the configuration names.

Guarantees: its value is sent to the service and appears nowhere else; `redacted` removes it from texts of the service, which may
repeat it.
"""

from __future__ import annotations

from services.config.secrets import read_token
from services.config.verifiers import RemoteVerifier
from services.verifiers.base import VerifierFailure


class ServiceToken:
    """A token that can be read again."""

    def __init__(self, config: RemoteVerifier) -> None:
        self._place, self._value = config.token, ""

    def read(self) -> None:
        """Read it. Raises `VerifierFailure` for one that is missing or cannot be sent, and keeps the last one."""
        if self._place:
            try:
                self._value = read_token(self._place)
            except ValueError as error:
                raise VerifierFailure(str(error)) from None

    @property
    def headers(self) -> dict[str, str]:
        """Return the headers of a request."""
        return {"Authorization": f"Bearer {self._value}"} if self._value else {}

    def redacted(self, text: str) -> str:
        """Return `text` without the token."""
        return text.replace(self._value, "***") if self._value else text
