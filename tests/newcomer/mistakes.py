"""Make every mistake in a fresh folder and check the message of `grpo run`: whether it finds and names it, and how fast."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles

from tests.newcomer import in_configuration, in_data, in_functions, in_machine, in_model
from tests.newcomer.world import Mistake, make, make_model, unnamed

ROOT = Path(__file__).parents[2]
LIMIT_S = 15.0
MISTAKES: list[Mistake] = [
    mistake
    for module in (in_configuration, in_model, in_data, in_functions, in_machine)
    for mistake in module.MISTAKES
]  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """How `grpo run` responds to a mistake."""

    mistake: Mistake
    found: bool
    """Whether it was rejected before anything was started or written."""
    unnamed: list[str]
    """The parts that its message does not name."""
    seconds: float
    output: str


def answer(mistake: Mistake, folder: Path, model: Path) -> Answer:
    """Make a mistake in an empty folder, start the run as a newcomer would, and return the response."""
    make(folder, model)
    for edit in mistake.edits:
        edit(folder)
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", **mistake.environ}
    command = [sys.executable, "-m", "services.console.commands", "run", *(mistake.arguments or ["my.toml"])]
    began = time.monotonic()
    with subprocess.Popen(command, cwd=folder, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as run:
        try:
            _, output = run.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:  # it has started
            run.send_signal(signal.SIGINT)
            _, output = run.communicate()
    seconds = time.monotonic() - began
    return Answer(mistake, refused(run.returncode, folder), unnamed(mistake, folder, output), seconds, output)


def refused(code: int, folder: Path) -> bool:
    """Return whether a run was rejected and left nothing behind but its lock."""
    left = [path for path in folder.glob("runs/*/*") if path.name != "lock"]
    return code in (2, 3) and not left


def survey(names: list[str]) -> list[Answer]:
    """Make the mistakes with these names, or all mistakes if there are none."""
    with tempfile.TemporaryDirectory(prefix="grpo-newcomer-") as place:
        model = Path(place) / "made"
        make_model(model)
        chosen = [mistake for mistake in MISTAKES if not names or mistake.name in names]
        found = list[Answer]()
        for mistake in chosen:
            folder = Path(place) / mistake.name
            folder.mkdir()
            found.append(answer(mistake, folder, model))
        return found


def figures(found: list[Answer]) -> dict[str, float]:
    """Return the counts and the 90th percentile of the time over all answers."""
    seconds = [one.seconds for one in found]
    return {
        "mistakes": len(found),
        "found": sum(one.found for one in found),
        "named": sum(one.found and not one.unnamed for one in found),
        "seconds_p90": round(quantiles(seconds, n=10, method="inclusive")[-1] if len(seconds) > 1 else seconds[0], 2),
    }
