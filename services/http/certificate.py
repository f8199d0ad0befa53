"""The TLS certificate of the endpoints, reloaded when its files change.

Guarantees: connections made after the files change get the new certificate; earlier connections stay open. If a file is missing,
half-written or does not match the other, the previous certificate stays in use and one log line says what to do.
"""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Sequence
from pathlib import Path

import structlog

from services.config import ConfigError
from services.config.root import Api

log = structlog.get_logger()

Stamp = tuple[tuple[int, ...], ...]


class Certificate:
    """The certificate in `api.certificate_file`. Raises `ConfigError` if it or its key cannot be used."""

    def __init__(self, given: Api) -> None:
        self.files = files_of(given)
        self._given, self._seen = given, _stamp(self.files)
        self._refused: Stamp = ()
        self._context = load_certificate(given)

    def present(self, connection: ssl.SSLObject, _name: str | None, _first: ssl.SSLContext) -> None:
        """Serve as `sni_callback` of the server's first context, which calls it for each connection, with or without a name.

        It never changes a context in use, which could leave it with a certificate and key that do not match.
        """
        if (stamp := _stamp(self.files)) != self._seen:
            try:
                self._context, self._seen = load_certificate(self._given), stamp
            except ConfigError as error:  # tried again with each connection, but logged only once
                if stamp != self._refused:
                    log.error("the renewed certificate cannot be used; the previous one stays in use", error=str(error))
                self._refused = stamp
            else:
                log.info("certificate renewed", file=self._given.certificate_file)
        connection.context = self._context


def files_of(given: Api) -> tuple[Path, Path]:
    """Return the files of the certificate and of its key, which may be the same."""
    path = Path(given.certificate_file)
    return (path / "tls.crt", path / "tls.key") if path.is_dir() else (path, path)


def load_certificate(given: Api) -> ssl.SSLContext:
    """Return a context with the certificate and its key. Raise `ConfigError` if they cannot be used."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(*files_of(given), password="")  # "": no prompt at the terminal
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"api.certificate_file = {given.certificate_file!r} cannot be used ({error}): set it to a file with a certificate "
            "and its key without a passphrase, in PEM, or to a folder with tls.crt and tls.key"
        ) from None
    return context


def shared_name(given: Api) -> str:
    """Return the first host name in the endpoints' certificate, which pods that are called by address share; empty: none."""
    try:
        decoded = ssl._ssl._test_decode_cert(files_of(given)[0])  # type: ignore[attr-defined]  # the library has no other parser
    except OSError:  # none is configured, or it is not on this machine
        return ""
    return next((name for kind, name in decoded.get("subjectAltName", ()) if kind == "DNS"), "")


def _stamp(files: Sequence[Path]) -> Stamp:
    """Return a value that changes when a file is written, replaced, or linked elsewhere. A missing file gives nothing."""
    found = list[tuple[int, ...]]()
    for path in files:
        with contextlib.suppress(OSError):
            stat = path.stat()
            found.append((stat.st_dev, stat.st_ino, stat.st_mtime_ns, stat.st_size))
    return tuple(found)
