"""The certificate that the endpoints present, as its files have it now.

Guarantees: a connection that is made after the files changed gets the new certificate, and those before it go on; files that are
gone, half written or do not belong together leave the certificate that was there, with one line in the log that says what to do.
"""

from __future__ import annotations

import os
import ssl

import structlog

from services.config import ConfigError
from services.config.root import Api

log = structlog.get_logger()

Stamp = tuple[tuple[int, ...], ...]


class Certificate:
    """Of endpoints with an `api.certificate_file`. Raises `ConfigError` where that or its key cannot be used."""

    def __init__(self, given: Api) -> None:
        self._given, self._seen = given, _stamp(given)
        self._refused: Stamp = ()
        self._context = load_certificate(given)

    def present(self, connection: ssl.SSLObject, _name: str | None, _first: ssl.SSLContext) -> None:
        """`sni_callback` of the context that a server was started with: called for each connection, named or not.

        A context that is in use is never changed: half of a pair would be in it for a moment, or for good.
        """
        if (stamp := _stamp(self._given)) != self._seen:
            try:
                self._context, self._seen = load_certificate(self._given), stamp
            except ConfigError as error:  # tried again with each connection, told once
                if stamp != self._refused:
                    log.error("a renewed certificate cannot be used, the one before goes on", error=str(error))
                self._refused = stamp
            else:
                log.info("the certificate was renewed", file=self._given.certificate_file)
        connection.context = self._context


def load_certificate(given: Api) -> ssl.SSLContext:
    """A context with the certificate and its key. Raises `ConfigError` where they cannot be used."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(given.certificate_file, given.key_file, password="")  # "": nobody is asked at the terminal
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"api.certificate_file = {given.certificate_file!r} with api.key_file = {given.key_file!r} cannot be used ({error}): "
            "name a certificate and its key without a passphrase, both PEM"
        ) from None
    return context


def _stamp(given: Api) -> Stamp:
    """What changes when a file is written, replaced, or reached by another link. A file that is gone: nothing."""
    return tuple(_stamp_of(path) for path in (given.certificate_file, given.key_file))


def _stamp_of(path: str) -> tuple[int, ...]:
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size
