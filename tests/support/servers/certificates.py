"""A certificate authority and a certificate, for 127.0.0.1 or other names, created with openssl."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from dataclasses import dataclass, fields
from pathlib import Path


@dataclass(frozen=True)
class Certificates:
    """PEM files."""

    authority: Path
    certificate: Path
    key: Path


def make_certificates(folder: Path, subject_names: str = "IP:127.0.0.1") -> Certificates:
    """Create a certificate that is valid for a day. `subject_names`: its subject alternative names, such as `DNS:redis`."""
    authority, certificate, key, authority_key = (folder / name for name in ("ca.pem", "cert.pem", "key.pem", "ca-key.pem"))
    elliptic = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1")
    _openssl("req", "-x509", *elliptic, "-subj", "/CN=tests", "-keyout", authority_key, "-out", authority)
    signed = ("-CA", authority, "-CAkey", authority_key, "-addext", f"subjectAltName={subject_names}")
    leaf = ("-addext", "basicConstraints=critical,CA:FALSE")
    _openssl("req", "-x509", *elliptic, "-subj", "/CN=127.0.0.1", "-keyout", key, "-out", certificate, *signed, *leaf)
    return Certificates(authority, certificate, key)


def put(certificates: Certificates, folder: Path) -> Certificates:
    """Mount them in a folder as Kubernetes mounts Secrets: the files are links into a folder that is swapped atomically."""
    generation = Path(tempfile.mkdtemp(prefix="..", dir=folder))
    for field in fields(certificates):
        shutil.copy(getattr(certificates, field.name), generation / field.name)
        if not (folder / field.name).is_symlink():
            (folder / field.name).symlink_to(Path("..data", field.name))
    (folder / "..next").symlink_to(generation.name)
    (folder / "..next").rename(folder / "..data")
    return Certificates(*(folder / field.name for field in fields(certificates)))


def _openssl(*arguments: object) -> None:
    done = subprocess.run(["openssl", *map(str, arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
