"""Processes of an environment: their Python interpreter, and the variables they inherit."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from services.config.environments import EnvironmentConfig

_SERVICES = Path(__file__).resolve().parents[2]


def inherited(environment: EnvironmentConfig) -> list[str]:
    """Return the environment variables that its processes inherit although they look like secrets."""
    token = [environment.token_env] if environment.kind == "mcp" and environment.token_env else []
    return [*environment.variables, *token]


def in_interpreter(interpreter: str, folder: Path, variables: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """Return the Python to start and its environment variables; `interpreter` empty: the one that runs this.

    Another one sees only this package of this one's libraries, through a link in `folder`.
    """
    if not interpreter:
        return sys.executable, dict(variables)
    package = folder / "package"
    package.mkdir(exist_ok=True)
    if not (package / "services").exists():
        (package / "services").symlink_to(_SERVICES)
    return interpreter, {**variables, "PYTHONPATH": str(package)}
