"""Removes guards one at a time, and runs the tests of the store without each."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import resource
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from unittest import mock

from services.console.run.redis_server import RedisServer
from tests.mutants.explained import EXPLAINED
from tests.mutants.guards import Guard
from tests.mutants.killers import Killer, killers, survives
from tests.support.preloading.memory import freeze_for_good

MUTANT_LIMIT_S = 1800.0  # a test may wait forever
SERVER_LIMITS = {resource.RLIMIT_CPU: 60, resource.RLIMIT_AS: 2 << 30}
"""Limits of the server's CPU seconds and memory: without a guard, a function may loop and accumulate data without end."""
LIBRARY = ("services.store.connection.library", "tests.store.replay.tables.library", "tests.repeats.repeater.library",
           "tests.store.replay.draws.library")  # fmt: skip


@dataclass
class MutantsFound:
    """Outcome for each guard."""

    guards: int = 0
    killed: dict[str, str] = field(default_factory=dict)
    """Guard -> the test that noticed its removal."""
    survivors: list[str] = field(default_factory=list)

    @property
    def unexplained(self) -> list[str]:
        """Return the unexplained survivors."""
        return [name for name in self.survivors if name not in EXPLAINED]


def campaign(chosen: Sequence[Guard], workers: int, tell: Callable[[str], None]) -> MutantsFound:
    """Try all guards."""
    found, kills, order = MutantsFound(len(chosen)), Counter[str](), killers()
    waiting, running = list(reversed(chosen)), dict[int, tuple[Guard, Connection, int, float]]()
    context = multiprocessing.get_context("fork")  # avoids importing everything again
    while waiting or running:
        while waiting and len(running) < workers:
            guard = waiting.pop()
            ours, theirs = context.Pipe()
            ranked = sorted(order, key=lambda killer: (not killer.near(guard.place), -kills[killer.name]))
            process = context.Process(target=_try, args=(guard, ranked, theirs))
            process.start()
            theirs.close()
            assert process.pid is not None
            running[process.pid] = guard, ours, process.pid, time.monotonic() + MUTANT_LIMIT_S
        for pid, (guard, ours, group, deadline) in list(running.items()):
            if not ours.poll(0.05) and time.monotonic() < deadline:
                continue
            try:
                killer = ours.recv() if ours.poll() else "it does not end"
            except EOFError:
                killer = "it does not load"
            os.killpg(group, signal.SIGKILL)  # and its server
            os.waitpid(pid, 0)
            del running[pid]
            if killer:
                kills[killer] += 1
                found.killed[guard.name] = killer
            else:
                found.survivors.append(guard.name)
            tell(f"{'killed by ' + killer if killer else 'SURVIVED'}: {guard.name}")
    return found


def _try(guard: Guard, order: Sequence[Killer], answer: Connection) -> None:
    """Run the tests without the guard, in a separate process and process group."""
    os.setpgid(0, 0)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    freeze_for_good()  # objects of the parent process may refer to threads that do not exist here, so they must not be collected
    with tempfile.TemporaryDirectory() as folder:
        server = RedisServer(Path(folder))
        server.start()
        for what, limit in SERVER_LIMITS.items():
            resource.prlimit(server.pid, what, (limit, limit))
        removed = guard.removed()
        for place in LIBRARY:
            mock.patch(place, return_value=removed).start()
        killer = asyncio.run(survives(server, order))
        answer.send(killer.name if killer else "")
        server.stop()
    os._exit(0)
