"""Service processes: started, watched, ended with all their children. `grpo run` keeps all of a run so, a trainer pod its ranks.

Guarantees: a service does not outlive who started it (it gets a SIGTERM when that dies) and its children do not outlive its
kill (a session of its own, ended as a group). Children must be started from the thread that lives longest, because the
kernel's parent-death signal is tied to the thread.
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

from services.runtime.process_tools import die_with_parent, free_port

ERROR_PREFIX = "error: "  # how a service says what ended it (services/runtime/entry.py)
LAST_WORDS_BYTES = 64 * 1024
STOP_S = 5.0  # how long a process without other duties may take to end


@dataclass(frozen=True)
class ProcessPlan:
    """One service process."""

    name: str
    argv: tuple[str, ...]
    environ: Mapping[str, str] = field(default_factory=dict)  # laid over the common environment


@dataclass(frozen=True)
class ServicePlan:
    """Pods that live and die together: all trainer ranks, or a single pod of another kind."""

    name: str
    pods: tuple[ProcessPlan, ...]
    collective: bool = False  # the pods meet at MASTER_PORT, a new one with every start
    essential: bool = True  # the run cannot do without it
    stays: bool = False  # does not end with the run, but when it is asked to
    stop_s: float = STOP_S  # how long it may take to end once it was asked to


def rank_environment(rank: int, local_rank: int, world: int, host: str) -> dict[str, str]:
    """Who a trainer rank is, as torchrun says it too (services/trainer/ranks.py); MASTER_PORT beside."""
    return {"RANK": str(rank), "LOCAL_RANK": str(local_rank), "WORLD_SIZE": str(world), "MASTER_ADDR": host}


class ChildProcess:
    """One service process and its log; without a folder for logs it prints where its parent does."""

    def __init__(self, plan: ProcessPlan, logs: Path | None) -> None:
        self.plan = plan
        self.name = plan.name
        self.log = logs / f"{plan.name}.log" if logs else None
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    def start(self, environ: Mapping[str, str], *pass_fds: int) -> None:
        """Start the process; what it prints is appended to its log."""
        with contextlib.ExitStack() as stack:
            log = None
            if self.log is not None:
                self.log.parent.mkdir(parents=True, exist_ok=True)
                log = stack.enter_context(self.log.open("ab"))
                self._log_start = log.tell()
            self._process = subprocess.Popen(
                self.plan.argv, env={**environ, **self.plan.environ}, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                preexec_fn=die_with_parent, start_new_session=True, pass_fds=pass_fds,
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
        return last_error(self.log, self._log_start) if self.log else ""


class ChildService:
    """Pods that live and die together."""

    def __init__(self, plan: ServicePlan, logs: Path | None = None) -> None:
        self.plan = plan
        self.name = plan.name
        self.pods = [ChildProcess(pod, logs) for pod in plan.pods]
        self.started = time.monotonic()
        self.asked = float("inf")  # when it was first asked to end
        self.retired = False  # not wanted any more: its end is no death

    def start(self, environ: Mapping[str, str], *pass_fds: int) -> None:
        """Start every pod; files that are open under `pass_fds` are open in it too."""
        meeting = {"MASTER_PORT": str(free_port())} if self.plan.collective else {}
        self.started, self.asked = time.monotonic(), float("inf")
        for pod in self.pods:
            pod.start({**environ, **meeting}, *pass_fds)

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
        self.asked = min(self.asked, time.monotonic())
        for pod in self.pods:
            pod.terminate()

    def retire(self) -> None:
        """Ask it to end for good."""
        self.retired = True
        self.terminate()

    @property
    def overdue(self) -> bool:
        """Whether it was asked to end, has had its time, and still runs."""
        return time.monotonic() - self.asked > self.plan.stop_s and self.alive

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
