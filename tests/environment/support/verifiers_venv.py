"""Create virtual environments with the library verifiers in seconds: they share this one's libraries and add what it lacks."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

MODULES = Path(__file__).with_name("verifiers_modules")
VERSION = "0.4.0"
LACKING = (
    "aiofiles", "connectrpc==0.11.1", "mcp==2.0.0", "openai-harmony", "prime-pydantic-config", "prime-runs", "prime-sandboxes",
    "prime-traces", "prime-tunnel", "protobuf-py==0.1.1", "protobuf-py-ext==0.1.1", "pyqwest", "renderers", "tenacity",
)  # fmt: skip
"""Packages that importing verifiers needs beyond the tests' libraries, at resolved versions."""


def make_interpreter(folder: Path) -> Path:
    """Return the Python of a virtual environment with verifiers and the environments of `MODULES`."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    [packages] = folder.glob("lib/python*/site-packages")
    (packages / "own.pth").write_text(
        f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    )  # these come after the environment's own packages
    (packages / "modules.pth").write_text(f"{MODULES}\n")
    command = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--no-compile", "--only-binary", ":all:"]
    subprocess.run([*command, "--target", packages, f"verifiers=={VERSION}", *LACKING], check=True)
    python = folder / "bin" / "python"
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    # compiles the modules that workers need, which write no bytecode
    subprocess.run([python, "-c", "import gc; gc.disable(); import v1_single, v1_tools"], env=environ, check=True)
    return python
