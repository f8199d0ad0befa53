"""reasoning-gym is imported without the plotting library that two of its tasks import, and these tasks still work."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

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


SLOW = """
import time
from . import factory
factory.begun.set()
time.sleep(0.3)
factory.DATASETS["last"] = 1
"""
TWO = """
import sys, threading
sys.path.insert(0, sys.argv[1])
from services.runtime.reasoning_tasks import import_factory
first = threading.Thread(target=import_factory)
first.start()
while "reasoning_gym.factory" not in sys.modules or not hasattr(sys.modules["reasoning_gym.factory"], "begun"):
    pass
sys.modules["reasoning_gym.factory"].begun.wait()
print(sorted(import_factory().DATASETS))
first.join()
"""


def test_a_thread_waits_until_all_tasks_are_imported(tmp_path: Path) -> None:
    """grpo run reads the data and tries the verifiers in two threads, and both import the library."""
    package = tmp_path / "reasoning_gym"
    package.mkdir()
    (package / "__init__.py").write_text(SLOW)
    (package / "factory.py").write_text("import threading\nDATASETS = {}\nbegun = threading.Event()\n")
    done = subprocess.run([sys.executable, "-c", TWO, tmp_path], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("['last']\n", "")
