"""Starts and watches service processes, and ends them with all their children. `grpo run` manages a whole run this way, a trainer
pod its ranks.

Guarantees: a service does not outlive the process that started it (it gets a SIGTERM when that dies), and its children do not
outlive its kill (it has its own session, which is killed as a group). Children must be started from the thread that lives
longest, because the kernel's parent-death signal is tied to the thread.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from services.runtime.exits import OUT_OF_MEMORY, VAGUE, cause, oom_kills
from services.runtime.process_tools import die_with_parent, free_port

LAST_WORDS_BYTES = 256 * 1024
STOP_S = 5.0  # how long a process without other duties may take to end


@dataclass(frozen=True)
class ProcessPlan:
    """One service process."""

    name: str
    argv: tuple[str, ...]
    environ: Mapping[str, str] = field(default_factory=dict)  # added to the common environment


@dataclass(frozen=True)
class ServicePlan:
    """Pods that start and end together: all trainer ranks, or a single pod of another kind."""

    name: str
    pods: tuple[ProcessPlan, ...]
    collective: bool = False  # the pods meet at MASTER_PORT, which changes with every start
    essential: bool = True  # the run cannot continue without it
    stays: bool = False  # does not end with the run, only on request
    stop_s: float = STOP_S  # how long it may take to end after it was asked to


def rank_environment(rank: int, local_rank: int, world: int, host: str) -> dict[str, str]:
    """Return a trainer rank's identity as torchrun sets it (services/trainer/ranks); MASTER_PORT is added separately."""
    return {"RANK": str(rank), "LOCAL_RANK": str(local_rank), "WORLD_SIZE": str(world), "MASTER_ADDR": host}


class ChildProcess:
    """One service process and its log; without a log folder it prints to its parent's output."""

    def __init__(self, plan: ProcessPlan, logs: Path | None) -> None:
        self.plan = plan
        self.name = plan.name
        self.log = logs / f"{plan.name}.log" if logs else None
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0
        self._oom_kills = 0  # before the last start

    def start(self, environ: Mapping[str, str], *pass_fds: int) -> None:
        """Start the process and append its output to its log."""
        self._oom_kills = oom_kills()
        with contextlib.ExitStack() as stack:
            log = None
            if self.log is not None:
                self.log.parent.mkdir(parents=True, exist_ok=True)
                log = stack.enter_context(self.log.open("ab"))
                self._log_start = log.tell()
            self._process = subprocess.Popen(
                self.plan.argv,
                env={**environ, **self.plan.environ},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent,
                start_new_session=True,
                pass_fds=pass_fds,
            )

    @property
    def pid(self) -> int:
        """Return the process id, 0 before the first start."""
        return self._process.pid if self._process else 0

    @property
    def code(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process runs."""
        return self._process.poll() if self._process else None

    def terminate(self) -> None:
        """Ask it to exit."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    def kill(self) -> None:
        """Kill it and everything it started."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def cause(self) -> str:
        """Return why the process failed, from its log since its last start or the kernel; empty if neither says.

        If memory ran out, that is the reason for a kill, and for an error that says only that another process has died.
        """
        if self.code in (None, 0, -signal.SIGTERM):
            return ""
        logged = ""
        if self.code != -signal.SIGKILL and self.log is not None and self.log.exists():
            with self.log.open("rb") as file:
                file.seek(max(self._log_start, self.log.stat().st_size - LAST_WORDS_BYTES))
                logged = cause(file.read().decode(errors="replace"))
        if (self.code == -signal.SIGKILL or VAGUE.search(logged)) and oom_kills() > self._oom_kills:
            return OUT_OF_MEMORY
        return logged


class ChildService:
    """Pods that start and end together."""

    def __init__(self, plan: ServicePlan, logs: Path | None = None) -> None:
        self.plan = plan
        self.name = plan.name
        self.pods = [ChildProcess(pod, logs) for pod in plan.pods]
        self.started = time.monotonic()
        self.asked = float("inf")  # when it was first asked to exit
        self.retired = False  # no longer wanted: its end is not a failure

    def start(self, environ: Mapping[str, str], *pass_fds: int) -> None:
        """Start every pod. Files open under `pass_fds` are open in the pods too."""
        meeting = {"MASTER_PORT": str(free_port())} if self.plan.collective else {}
        self.started, self.asked = time.monotonic(), float("inf")
        for pod in self.pods:
            pod.start({**environ, **meeting}, *pass_fds)

    @property
    def codes(self) -> list[int | None]:
        """Return the exit codes of the pods, None for one that runs."""
        return [pod.code for pod in self.pods]

    @property
    def alive(self) -> bool:
        """Return whether any pod runs."""
        return any(pod.pid and pod.code is None for pod in self.pods)

    def terminate(self) -> None:
        """Ask every pod to exit."""
        self.asked = min(self.asked, time.monotonic())
        for pod in self.pods:
            pod.terminate()

    def retire(self) -> None:
        """Ask it to exit, and not to be restarted."""
        self.retired = True
        self.terminate()

    @property
    def overdue(self) -> bool:
        """Return whether its time to exit has passed and it still runs."""
        return time.monotonic() - self.asked > self.plan.stop_s and self.alive

    def kill(self) -> None:
        """Kill every pod and everything they started."""
        for pod in self.pods:
            pod.kill()
