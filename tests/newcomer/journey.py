"""The README's path from an empty folder to a learning curve: install, model, custom data and reward, init, run."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
STEPS = 20
ROWS = 400
TERMS = 4
REWARD = '''\
def score(completion: str, answer: str) -> float:
    """Half for ending with a number, half for the right one."""
    said = completion.rpartition("= ")[2].strip()
    return 0.5 * said.lstrip("-").isdigit() + 0.5 * (said == answer)
'''


@dataclass
class Journey:
    """The steps taken and their durations."""

    seconds: dict[str, float] = field(default_factory=dict[str, float])
    launches: int = 0
    curve: int = 0
    """Steps in metrics.jsonl."""

    @property
    def minutes(self) -> float:
        """Return the minutes from the empty folder to the curve."""
        return sum(self.seconds.values()) / 60


def travel(place: Path, install: bool) -> Journey:
    """Make the journey in an empty folder. `install`: first install a copy of this repository into a separate environment."""
    found, source = Journey(), ROOT
    if install:
        source = place / "grpo"
        _copy(source)
        _timed(found, "install", ["make", "install"], source)
    python = source / ".venv" / "bin" / "python"
    python = python if python.exists() else Path(sys.executable)
    environ = {**os.environ, "PYTHONPATH": str(source)}
    mine = place / "mine"
    mine.mkdir()
    _timed(found, "model", [str(python), "-m", "examples.arithmetic.warmstart", "--out", str(mine / "model")], source, environ)
    _write(mine)
    grpo = [str(python), "-m", "services.console.commands"]
    _timed(
        found,
        "init",
        [*grpo, "init", "my.toml", "--model", "model", "--data", "sums.jsonl", "--reward", "reward.py"],
        mine,
        environ,
    )
    while not found.curve and found.launches < 3:
        found.launches += 1
        _timed(
            found,
            f"run {found.launches}",
            [*grpo, "run", "my.toml", f"run.steps={STEPS}", "--no-screen"],
            mine,
            environ,
            check=False,
        )
        metrics = mine / "runs" / "my" / "metrics.jsonl"
        drawn = (mine / "runs" / "my" / "report.png").exists()
        found.curve = len(metrics.read_text().splitlines()) if drawn else 0
    return found


def _copy(to: Path) -> None:
    """Copy the files tracked by git, as a clone would."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, to / name)


def _write(folder: Path) -> None:
    """Write sums with their answers, and a reward function for them."""
    numbers = random.Random(0)
    rows = list[str]()
    for _ in range(ROWS):
        terms = [numbers.randint(0, 9) for _ in range(TERMS)]
        signs = [numbers.choice("+-") for _ in terms[1:]]
        text = str(terms[0]) + "".join(f" {sign} {term}" for sign, term in zip(signs, terms[1:], strict=True))
        rows.append(json.dumps({"question": f"Calculate {text}.", "answer": str(eval(text))}))
    (folder / "sums.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "reward.py").write_text(REWARD)


def _timed(
    found: Journey, what: str, command: Sequence[str], folder: Path, environ: dict[str, str] | None = None, check: bool = True
) -> None:
    began = time.monotonic()
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    found.seconds[what] = round(time.monotonic() - began, 1)
    if done.returncode and check:
        raise RuntimeError(f"{what}: {' '.join(command)} failed with {done.returncode}: {done.stderr[-2000:]}")
    if done.returncode:
        print(done.stdout[-2000:], done.stderr[-2000:], file=sys.stderr)
