"""Whether the account of device time is complete when pods are killed.

    python -m benchmarks.accounting --json

Each run trains a tiny model on scripted completions, and a generator or the trainer is killed. `account_closes` is, for each run,
the relative difference between the sum of the account and the device-seconds measured from outside, from the kernel's start and
end times of each pod's processes.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # `python benchmarks/accounting.py` from the repository's root
    sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.common import arguments, report, run
from services.operations.cost import read_account
from tests.runs.test_run import write_run
from tests.support.harness import save_model_folder

CONSOLE = (sys.executable, "-m", "services.console.commands")
RUNS: dict[str, tuple[str, ...]] = {
    "plain": ("trainer.deterministic=true",),
    "ranks": ("trainer.ranks=2", "trainer.zero_stage=1", "trainer.deterministic=false"),
    "replayed": ("replay.max_uses=2", "replay.sampler=prioritized", "replay.capacity=64", "trainer.mini_batches=2"),
}
KILLED = {"plain": "generator-0", "ranks": "trainer-0", "replayed": "generator-0"}
"""Run -> the pod that is killed after its third step."""
STEPS, EVERY = 24, 4  # of a run, and between checkpoints
LOOK_S = 0.02
FORKED_S = 2.0  # a new process may show its parent's command line for this long


class Outside:
    """Measures the device-seconds of a run by the kernel: from the start of a pod's first process to the end of its last."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.lives = folder, dict[str, list[float]]()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def _look(self) -> None:
        known = dict[int, str]()
        while not self._over.wait(LOOK_S):
            now = time.clock_gettime(time.CLOCK_BOOTTIME)
            for proc in Path("/proc").glob("[0-9]*"):
                pid = int(proc.name)
                began = 0.0 if known.get(pid) == "" else _started(proc)
                if began and (pid not in known):
                    pod = self._pod(proc)
                    if pod or now - began > FORKED_S:
                        known[pid] = pod
                if began and known.get(pid):
                    life = self.lives.setdefault(known[pid], [began, now])
                    life[0], life[1] = min(life[0], began), now

    def _pod(self, proc: Path) -> str:
        try:
            words = (proc / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            return ""
        kinds = ("services.generator", "services.trainer")
        if not any(word in kinds for word in words) or not any(str(self.folder) in word for word in words):
            return ""
        return words[words.index("--name") + 1] if "--name" in words else ""

    def end(self) -> dict[str, float]:
        """Stop looking and return the seconds of each pod."""
        self._over.set()
        self._thread.join()
        return {pod: end - began for pod, (began, end) in self.lives.items()}


def _started(proc: Path) -> float:
    try:
        fields = (proc / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return 0.0 if fields[0] == "Z" else int(fields[19]) / os.sysconf("SC_CLK_TCK")


def one_run(folder: Path, name: str, say: Any) -> float:
    """Run one configuration and kill its pod; return the relative error of the account."""
    path = write_run(
        folder, name, f"run.steps={STEPS}", f"checkpoint.every_steps={EVERY}", "checkpoint.keep=20",
        "samples.keep=100000", "generator.count=1", "generator.engine_options.token_s=0.2", "filters.exclude_pass_rate=0",
        *RUNS[name],
    )  # fmt: skip
    outside = Outside(folder / name)
    process = subprocess.Popen([*CONSOLE, "run", str(path), "--no-screen"], stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
    while _steps(folder / name) < 4 and process.poll() is None:
        time.sleep(0.1)
    kill(folder / name, KILLED[name])
    process.wait()
    seen, found = outside.end(), read_account(folder / name)
    devices = {each.pod: each.devices for each in found.processes.values()}
    truth = sum(seconds * devices[pod] for pod, seconds in seen.items() if pod in devices)
    total = sum(found.device_seconds().values())
    say(f"{name}: exit {process.returncode}, account {total:.1f} s of {truth:.1f} s")
    return abs(total - truth) / truth


def _steps(folder: Path) -> int:
    file = folder / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def kill(folder: Path, pod: str) -> None:
    """Kill a pod's process."""
    for proc in Path("/proc").glob("[0-9]*"):
        try:
            words = (proc / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if pod in words and "--name" in words and any(str(folder) in word for word in words):
            os.kill(int(proc.name), signal.SIGKILL)


async def measure(options: argparse.Namespace, folder: Path) -> object:
    """Run the configurations one after another, and report."""
    say = (lambda text: None) if options.json else print
    save_model_folder(folder / "model")
    closes = [one_run(folder, name, say) for name in (options.only.split(",") if options.only else RUNS)]
    return report({"configurations": len(closes), "account_closes_worst": max(closes)}, {"account_closes": closes})


def main() -> int:
    """Parse the command line and measure."""
    parser = arguments(__doc__)
    parser.add_argument("--only", default="", help=f"configurations to run, separated by commas: {', '.join(RUNS)}")
    return run(measure, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
