"""reasoning-gym is imported without the plotting library that two of its tasks import, and those work nevertheless."""

from __future__ import annotations

import json
import subprocess
import sys

LOADED = """
import json, sys
from services.runtime.reasoning_tasks import import_factory
factory = import_factory()
before = "matplotlib" in sys.modules
entries = [factory.create_dataset(task, size=1, seed=3)[0] for task in ("chain_sum", "game_of_life", "game_of_life_halting")]
print(json.dumps([before, "matplotlib" in sys.modules, [entry["question"] for entry in entries]]))
"""
PLAIN = """
import json
from reasoning_gym.factory import create_dataset
tasks = ("chain_sum", "game_of_life", "game_of_life_halting")
print(json.dumps([create_dataset(task, size=1, seed=3)[0]["question"] for task in tasks]))
"""


def printed(code: str) -> object:
    return json.loads(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)


def test_plotting_is_imported_once_a_task_computes_with_it() -> None:
    assert printed(LOADED) == [False, True, printed(PLAIN)]
