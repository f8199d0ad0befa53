"""The wheel contains every file of the package, and works in an environment without a checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.newcomer.world import make_model

ROOT = Path(__file__).parent.parent.parent
BUILT_FROM = ("services", "pyproject.toml", "README.md", "LICENSE")
NOT_PACKED = (".md",)


def run(*command: object, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run([str(word) for word in command], cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy, as setuptools writes into the folder."""
    source = tmp_path_factory.mktemp("source")
    for name in run("git", "ls-files", *BUILT_FROM, cwd=ROOT).splitlines():
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    run(
        sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", source / "dist", source, cwd=source
    )
    [built] = (source / "dist").glob("grpo-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel with access to this environment's libraries but not to the checkout; return its programs' folder."""
    place = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", place, cwd=place)
    python = place / "bin" / "python"
    packages = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=place).strip())
    (packages / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", wheel, cwd=place)
    return place / "bin"


@pytest.mark.slow
def test_the_wheel_has_every_file_and_its_metadata(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as packed:
        names = set(packed.namelist())
        [about] = [name for name in names if name.endswith("METADATA")]
        metadata = packed.read(about).decode()
    expected = {name for name in run("git", "ls-files", "services", cwd=ROOT).splitlines() if not name.endswith(NOT_PACKED)}
    assert {name for name in expected if (ROOT / name).is_file()} <= names
    for text in ("Name: grpo", "License-Expression: Apache-2.0", "Author: ", "Classifier: ", "# "):
        assert text in metadata


@pytest.mark.slow
def test_the_command_works_without_a_checkout(installed: Path, tmp_path: Path) -> None:
    where = run(installed / "python", "-c", "import services; print(services.__path__[0])", cwd=tmp_path)
    assert where.startswith(str(installed.parent))
    assert run(installed / "grpo", "--version", cwd=tmp_path).startswith("grpo 0.2.0")
    assert "run" in run(installed / "grpo", "--help", cwd=tmp_path)
    make_model(tmp_path / "model")
    (tmp_path / "data.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    run(installed / "grpo", "init", "run.toml", "--model", "model", "--data", "data.jsonl", cwd=tmp_path)
    assert "sampling" in run(installed / "grpo", "config", "run.toml", cwd=tmp_path)
