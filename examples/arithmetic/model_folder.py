"""Folders of models that an example makes.

Guarantees: a folder appears complete or not at all; one that was made from the same stamp is left unchanged, and one made by
anything else is never replaced.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

STAMP = "warmstart.json"


def make_folder(folder: Path, stamp: Mapping[str, Any], fill: Callable[[Path], Mapping[str, float]]) -> None:
    """Have `fill` fill a folder, and keep what it measured with the stamp; do nothing if it was made from this stamp.

    Raises `ValueError` if the folder holds something that must not be replaced.
    """
    if _made(folder, stamp):
        print(f"{folder} is already made with these arguments")
        return
    started = time.monotonic()
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        measured = fill(temporary)
        seconds = round(time.monotonic() - started, 1)
        (temporary / STAMP).write_text(json.dumps({"made_from": stamp, "measured": measured}, indent=2) + "\n", encoding="utf-8")
        _swap(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    print(f"{folder}: ready in {seconds:g} s")


def _made(folder: Path, stamp: Mapping[str, Any]) -> bool:
    """Return whether `folder` was made from `stamp`. Raises `ValueError` if it holds something that must not be replaced."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return False
    try:
        return json.loads((folder / STAMP).read_text(encoding="utf-8"))["made_from"] == stamp
    except (OSError, ValueError, KeyError):
        raise ValueError(f"--out = {folder} contains files that this command did not make: choose another folder") from None


def _swap(new: Path, folder: Path) -> None:
    """Replace `folder` with `new`. For a moment neither exists, but never half of one."""
    old = new.with_name(f"{new.name}.old")
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
