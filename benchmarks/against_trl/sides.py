"""Run the example with `grpo run` or with one of TRL's trainers (run.py), each in its own process and with its best settings.

`grpo run` always gets `OURS`. TRL's sides get `TRL`, with whichever change in `TRIED` made the most steps per second in short
runs on the same machine before the comparison. Ours is not tuned in this way.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import redis

from benchmarks.against_trl.curves import Curve
from benchmarks.against_trl.environment import trl_python
from services.config import load_resolved
from services.console.run.folder import RunFolder
from services.protocol.keys import Keys
from services.runtime.process_tools import die_with_parent

ROOT = Path(__file__).parent.parent.parent
CONFIG = "examples/arithmetic/config.toml"
NAME = "ours"
OURS = (
    "generator.count=1",
    "generator.max_num_seqs=512",
    "generator.engine_options.kv_cache_memory_bytes=167772160",
    "checkpoint.every_steps=1000",
)
"""One engine with the resources of two, and no checkpoints, like TRL."""
TRL: dict[str, dict[str, Any]] = {
    "trl": {"kind": "generate", "threads": 2, "micro_batch": 256},
    "trl_vllm": {"kind": "colocated", "threads": 2, "micro_batch": 256},
    "trl_async": {"kind": "async", "threads": 1, "server_threads": 1, "micro_batch": 256, "in_flight": 512, "staleness": 1},
}
TRIED: dict[str, list[dict[str, Any]]] = {
    "trl": [{}, {"threads": 1}, {"micro_batch": 64}, {"micro_batch": 64, "threads": 1}, {"cache": "static"}],
    "trl_vllm": [{}, {"threads": 1}, {"micro_batch": 64}],
    "trl_async": [{}, {"threads": 2}, {"server_threads": 2}, {"in_flight": 768}, {"staleness": 2}],
}
"""Changes to `TRL` to try. The asynchronous trainer's loss only equals ours with a single micro-batch."""
POLL_S = 0.5
CLAIM_POLL_S = 0.05
END_S = 30.0


class RunFailed(Exception):
    """A run failed; the message says how."""


class Watch:
    """Measures the peak resident memory of a process and its descendants, twice a second, and how idle the cores are."""

    def __init__(self, pid: int) -> None:
        self._process, self.peak_mib, self._over = psutil.Process(pid), 0.0, threading.Event()
        self._before = psutil.cpu_times()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._over.wait(POLL_S):
            total = 0
            with contextlib.suppress(psutil.Error):
                for process in [self._process, *self._process.children(recursive=True)]:
                    with contextlib.suppress(psutil.Error):
                        total += process.memory_info().rss
            self.peak_mib = max(self.peak_mib, total / 2**20)

    def end(self) -> float:
        """Stop, and return the share of all cores' time that was idle."""
        self._over.set()
        self._thread.join()
        after = psutil.cpu_times()
        spent = sum(after) - sum(self._before)
        return (after.idle - self._before.idle) / spent if spent else 0.0


@contextlib.contextmanager
def running(command: Sequence[str], log: Path, limit_s: float, **options: Any) -> Iterator[tuple[subprocess.Popen[str], Curve]]:
    """Run a command, and yield it with an empty curve, which gets memory and idle share at the end. Raises RunFailed."""
    with log.open("w") as errors:
        curve = Curve(time.time(), load=os.getloadavg()[0])
        process = subprocess.Popen(command, cwd=ROOT, stderr=errors, text=True, preexec_fn=die_with_parent, **options)
        late = threading.Event()

        def stop() -> None:
            process.terminate()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()  # its children die with it

        def end_late() -> None:
            late.set()
            stop()

        limit, watch = threading.Timer(limit_s, end_late), Watch(process.pid)
        limit.start()
        try:
            yield process, curve
        except BaseException:
            stop()
            raise
        finally:
            process.wait()
            limit.cancel()
            curve.idle_share, curve.peak_mib = watch.end(), watch.peak_mib
    if late.is_set():
        raise RunFailed(f"took longer than {limit_s:g} s")
    if process.returncode:
        raise RunFailed(f"exit code {process.returncode}: {log.read_text()[-1500:]}")


def first_claim(place: RunFolder, process: subprocess.Popen[str]) -> float:
    """Wait until a generator claims its first ticket, which it samples at once; return the clock time. NaN if the run ends."""
    client: redis.Redis | None = None
    while process.poll() is None:
        try:
            if client is None and place.config.exists() and (place.redis / "password").exists():
                password = (place.redis / "password").read_text().strip()
                client = redis.Redis.from_url(load_resolved(place.config).redis.url, password=password)
            if client is not None and client.exists(Keys(NAME).claims):
                client.close()
                return time.time()
        except (OSError, redis.RedisError, RuntimeError):
            client = None  # not up yet
        time.sleep(CLAIM_POLL_S)
    return float("nan")


def ours(folder: Path, overrides: Sequence[str], limit_s: float) -> Curve:
    """Run `grpo run` to its end, and return its curve."""
    given = [f"run.name={NAME}", f"run.dir={folder}", *OURS, *overrides]
    command = [sys.executable, "-m", "services.console.commands", "run", CONFIG, "--fresh", "--no-screen", *given]
    with running(command, folder / "ours.log", limit_s, stdout=subprocess.DEVNULL) as (process, curve):
        curve.generating = first_claim(RunFolder(folder / NAME), process) - curve.started
    made = 0.0
    for record in map(json.loads, (folder / NAME / "metrics.jsonl").read_text().splitlines()):
        trained, total = record["tokens/train/sum"], record["tokens/gen/total"]
        curve.add(
            record["time_s"], record["reward/train/mean"], total - made, trained, lag=record["staleness/trained/mean"],
            completions=round(trained / record["length/train/mean"]), rate=record["learning_rate/train/value"],
        )  # fmt: skip
        made = total
    return curve


def trl(folder: Path, overrides: Sequence[str], limit_s: float, settings: Mapping[str, Any]) -> Curve:
    """Run one of TRL's trainers on the same example, and return its curve."""
    job = {
        "config": CONFIG, "overrides": list(overrides), "folder": str(folder / "trl"), "kind": settings["kind"],
        "settings": dict(settings),
    }  # fmt: skip
    (folder / "job.json").write_text(json.dumps(job))
    command = [str(trl_python()), str(ROOT / "benchmarks" / "against_trl" / "run.py"), str(folder / "job.json")]
    with running(command, folder / "trl.log", limit_s, stdout=subprocess.PIPE) as (process, curve):
        assert process.stdout is not None
        for step in map(json.loads, process.stdout):
            if "generating" in step:
                curve.generating = step["generating"] - curve.started
                continue
            curve.add(
                step["time_s"], step["reward"], step["tokens"], step["tokens"], lag=step["lag"],
                completions=step["completions"], rate=step["rate"],
            )  # fmt: skip
    return curve


def side(name: str, overrides: Sequence[str], limit_s: float, settings: Mapping[str, Any] | None = None) -> Curve:
    """Run a side once: `ours`, one of `TRL` with its settings, or `staleness_N`, which is ours with that bound.

    Raises RunFailed.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        if name in TRL:
            return trl(Path(folder), overrides, limit_s, settings or TRL[name])
        bound = [f"admission.max_staleness={name.removeprefix('staleness_')}"] if name.startswith("staleness_") else []
        return ours(Path(folder), [*overrides, *bound], limit_s)
