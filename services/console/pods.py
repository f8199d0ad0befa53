"""Service processes: started with their log, watched, ended with all their children.

Guarantees: a service does not outlive the console (it gets a SIGTERM when that dies) and its children do not outlive its
kill (a session of its own, ended as a group). Units must be started from the thread that lives longest, because the
kernel's parent-death signal is tied to the thread.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from services.console.plan import PodPlan, UnitPlan
from services.runtime.processes import die_with_parent, free_port

ERROR_PREFIX = "error: "  # how a service says what ended it (services/runtime/service.py)
LAST_WORDS_BYTES = 64 * 1024


class Pod:
    """One service process and its log."""

    def __init__(self, plan: PodPlan, logs: Path) -> None:
        self.plan = plan
        self.name = plan.name
        self.log = logs / f"{plan.name}.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    def start(self, environ: Mapping[str, str], lock_fd: int) -> None:
        """Start the process; what it prints is appended to its log."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                self.plan.argv, env={**environ, **self.plan.environ}, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                preexec_fn=die_with_parent, start_new_session=True, pass_fds=(lock_fd,),
            )  # fmt: skip

    @property
    def pid(self) -> int:
        """Process id, 0 before the first start."""
        return self._process.pid if self._process else 0

    @property
    def code(self) -> int | None:
        """Exit code, negative for a signal; None while the process runs."""
        return self._process.poll() if self._process else None

    def terminate(self) -> None:
        """Ask it to end."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    def kill(self) -> None:
        """End it and all it started."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def last_error(self) -> str:
        """The error line of this life of the process, without its prefix; empty: it left none."""
        return last_error(self.log, self._log_start)


class Unit:
    """Pods that live and die together."""

    def __init__(self, plan: UnitPlan, logs: Path) -> None:
        self.plan = plan
        self.name = plan.name
        self.pods = [Pod(pod, logs) for pod in plan.pods]
        self.started = time.monotonic()

    def start(self, environ: Mapping[str, str], lock_fd: int) -> None:
        """Start every pod."""
        meeting = {"MASTER_PORT": str(free_port())} if self.plan.collective else {}
        self.started = time.monotonic()
        for pod in self.pods:
            pod.start({**environ, **meeting}, lock_fd)

    @property
    def codes(self) -> list[int | None]:
        """Exit codes of the pods, None for one that runs."""
        return [pod.code for pod in self.pods]

    @property
    def alive(self) -> bool:
        """Whether any pod runs."""
        return any(code is None for code in self.codes)

    def terminate(self) -> None:
        """Ask every pod to end."""
        for pod in self.pods:
            pod.terminate()

    def kill(self) -> None:
        """End every pod and all they started."""
        for pod in self.pods:
            pod.kill()


def last_error(log: Path, start: int = 0) -> str:
    """The last line of `log` after byte `start` that begins with `error: `, without that prefix."""
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(max(start, log.stat().st_size - LAST_WORDS_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    return next((line.removeprefix(ERROR_PREFIX) for line in reversed(lines) if line.startswith(ERROR_PREFIX)), "")
