"""The TLS certificate of the endpoints, reloaded when its files change.

Guarantees: connections made after the files change get the new certificate; earlier connections stay open. If a file is missing,
half-written or does not match the other, the previous certificate stays in use and one log line says what to do.
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
    """The certificate in `api.certificate_file`. Raises `ConfigError` if it or its key cannot be used."""

    def __init__(self, given: Api) -> None:
        self._given, self._seen = given, _stamp(given)
        self._refused: Stamp = ()
        self._context = load_certificate(given)

    def present(self, connection: ssl.SSLObject, _name: str | None, _first: ssl.SSLContext) -> None:
        """Serve as `sni_callback` of the server's first context, which calls it for each connection, with or without a name.

        It never changes a context in use, which could leave it with a certificate and key that do not match.
        """
        if (stamp := _stamp(self._given)) != self._seen:
            try:
                self._context, self._seen = load_certificate(self._given), stamp
            except ConfigError as error:  # tried again with each connection, but logged only once
                if stamp != self._refused:
                    log.error("the renewed certificate cannot be used; the previous one stays in use", error=str(error))
                self._refused = stamp
            else:
                log.info("certificate renewed", file=self._given.certificate_file)
        connection.context = self._context


def load_certificate(given: Api) -> ssl.SSLContext:
    """Return a context with the certificate and its key. Raise `ConfigError` if they cannot be used."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(given.certificate_file, given.key_file, password="")  # "": no prompt at the terminal
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"api.certificate_file = {given.certificate_file!r} with api.key_file = {given.key_file!r} cannot be used ({error}): "
            "set them to a certificate and its key without a passphrase, both in PEM"
        ) from None
    return context


def _stamp(given: Api) -> Stamp:
    """Return a value that changes when a file is written, replaced, or linked elsewhere. A missing file gives ()."""
    return tuple(_stamp_of(path) for path in (given.certificate_file, given.key_file))


def _stamp_of(path: str) -> tuple[int, ...]:
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size
