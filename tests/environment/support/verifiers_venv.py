"""Create virtual environments with the library verifiers in seconds: they share this one's libraries and add what it lacks."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

MODULES = Path(__file__).with_name("verifiers_modules")
COMMON = (
    "aiofiles", "connectrpc==0.11.1", "openai-harmony", "prime-pydantic-config", "prime-sandboxes", "prime-tunnel",
    "protobuf-py==0.1.1", "protobuf-py-ext==0.1.1", "pyqwest", "renderers", "tenacity",
)  # fmt: skip
LACKING = {
    "0.3.1": (*COMMON, "aiolimiter", "datasets", "httpx-sse", "mcp==1.30.0", "multiprocess", "pandas"),
    "0.4.0": (*COMMON, "mcp==2.0.0", "prime-runs", "prime-traces"),
}
"""Version of verifiers -> the packages that importing it needs beyond the tests' libraries, at resolved versions."""
LOADED = {
    "0.3.1": "from verifiers.legacy import load_environment as load; load('classic_single'); load('classic_tools')",
    "0.4.0": "import v1_single, v1_tools",
}
"""Version -> code that loads environments once, to compile the modules that they need: workers write no bytecode."""


def make_interpreter(folder: Path, version: str) -> Path:
    """Return the Python of a virtual environment with verifiers and the environments of `MODULES`."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    [packages] = folder.glob("lib/python*/site-packages")
    (packages / "own.pth").write_text(
        f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    )  # these come after the environment's own packages
    (packages / "modules.pth").write_text(f"{MODULES}\n")
    command = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--no-compile", "--only-binary", ":all:"]
    subprocess.run([*command, "--target", packages, f"verifiers=={version}", *LACKING[version]], check=True)
    python = folder / "bin" / "python"
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run([python, "-c", f"import gc; gc.disable(); {LOADED[version]}"], env=environ, check=True)
    return python
