"""A trainer pod of a cluster: runs the ranks of one node as one process. `python -m services.trainer.node`

The environment says which node this is (GRPO_NODE of GRPO_NODES) and where rank 0 is (MASTER_ADDR, MASTER_PORT). The ranks of
`trainer.ranks` are distributed evenly, and the ranks of a node are consecutive.

Guarantees: a rank that fails ends the other ranks of its node, and its exit code becomes the node's; the ranks of other nodes
fail in their next collective, so that all nodes restart and reconnect. No rank outlives this process. If told to stop while ranks
load, it exits at once, with EXIT_UNLOADED and a line that says so.
Waits for: the ranks, SIGTERM. Unblocked by: a tick of `TICK_S`; once told to stop, by GRPO_STOP_S at the latest.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass

from services.config import ConfigError
from services.http.entry import Arguments, arguments, end_process, leaving_at_once, report, rest, unloaded
from services.protocol.errors import StoreError
from services.runtime import logs
from services.runtime.child_processes import ChildService, ProcessPlan, ServicePlan, rank_environment
from services.runtime.exits import EXIT_FAILED, EXIT_OK, EXIT_UNLOADED
from services.runtime.loops import FATAL

TICK_S = 0.1
NAME_LIMIT_S = 120.0  # after this the ranks start, and report what is missing
STOP_S = 30.0  # used without GRPO_STOP_S; rank 0 finishes its step and saves
LAST_WORDS_S = 5.0  # time for the other ranks to report why they fail too


@dataclass(frozen=True)
class TrainerNode:
    """This node's place among the nodes."""

    index: int
    count: int
    host: str  # of rank 0
    stop_s: float

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> TrainerNode:
        """Read the environment. Raises `ConfigError` for invalid values."""
        try:
            node = cls(
                int(environ.get("GRPO_NODE", "0")),
                int(environ.get("GRPO_NODES", "1")),
                environ.get("MASTER_ADDR", "127.0.0.1"),
                float(environ.get("GRPO_STOP_S", STOP_S)),
            )
        except ValueError as error:
            raise ConfigError(f"GRPO_NODE, GRPO_NODES and GRPO_STOP_S must be numbers: {error}") from None
        if not 0 <= node.index < node.count:
            raise ConfigError(f"GRPO_NODE = {node.index} must be between 0 and GRPO_NODES - 1 = {node.count - 1}")
        return node

    def plan(self, ranks: int, given: Arguments, path: str) -> ServicePlan:
        """Return the plan of this node's ranks."""
        if ranks % self.count:
            raise ConfigError(f"trainer.ranks = {ranks} must be a multiple of GRPO_NODES = {self.count}")
        local = ranks // self.count
        pods = []
        for i in range(local):
            rank = self.index * local + i
            name = given.name if i == 0 else f"{given.name}.{i}"
            argv = (sys.executable, "-m", "services.trainer", "--config", path, "--name", name)
            pods.append(ProcessPlan(name, argv, rank_environment(rank, i, ranks, self.host)))
        return ServicePlan("trainer", tuple(pods), stop_s=self.stop_s)


def main(argv: list[str] | None = None) -> int:
    """Run this node's ranks until they end. Returns the exit code."""
    try:
        with leaving_at_once():
            given = arguments("trainer", argv)
            logs.configure(given.config.run.name, given.name)
            child = ChildService(TrainerNode.from_environment(os.environ).plan(given.config.trainer.ranks, given, given.path))
            if asyncio.run(rest("trainer", given)):
                return EXIT_OK
            _await_name(child)
            child.start(os.environ)
    except KeyboardInterrupt:
        return EXIT_OK
    except (*FATAL, StoreError) as error:
        return report(error)
    for sig in (signal.SIGTERM, signal.SIGINT):
        signal.signal(sig, lambda *_: child.terminate())
    try:
        return _see_through(child)
    finally:
        child.kill()


def _await_name(child: ChildService) -> None:
    """Wait until MASTER_ADDR resolves. A cluster publishes the name a moment after the pod of rank 0 has started."""
    host, deadline = child.plan.pods[0].environ["MASTER_ADDR"], time.monotonic() + NAME_LIMIT_S
    while time.monotonic() < deadline:
        try:
            socket.gethostbyname(host)
            return
        except OSError:
            time.sleep(1.0)


def _see_through(child: ChildService) -> int:
    """Wait until every rank has ended, one has failed, or one was stopped before it had loaded. Returns the exit code."""
    while child.alive and not child.overdue and not any(child.codes):
        time.sleep(TICK_S)
    if child.asked < float("inf") and -signal.SIGTERM in child.codes:
        # Only a rank that has not loaded ends by the signal, and without it the others cannot have trained.
        print(unloaded(time.monotonic() - child.started), end="", file=sys.stderr, flush=True)
        return EXIT_UNLOADED
    if child.overdue:
        return EXIT_FAILED
    deadline = time.monotonic() + LAST_WORDS_S
    while child.alive and time.monotonic() < deadline:
        time.sleep(TICK_S)
    failed = next((code for code in child.codes if code), EXIT_OK)
    return failed if failed >= 0 else 128 - failed  # for a signal, the code a shell reports


if __name__ == "__main__":
    end_process(main())
