"""The trainer's side of the weight-sync rounds (docs/design.md, section 8; a member's is services/generator/weights.py).

Guarantees: `run` returns once at least one generator holds the version, and tells who; every wait has a limit; a
collective that failed is never tried again inside its epoch, only under a new one and without those who failed.
Waits for: generators that are loaded, their acknowledgements, the broadcast. Unblocked by: `fleet`, `acks`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from services.protocol.config import RunConfig
from services.protocol.messages import PodStatus, Round
from services.protocol.store import Store
from services.runtime.bell import Bell
from services.runtime.portal import Portal
from services.trainer.rounds import Group, Membership, answered
from services.trainer.weights import SendFailed, WeightSender

log = structlog.get_logger()

LOOK_S = 1.0  # a missed ring costs at most this much
RETRY_PAUSE_S = 1.0


class Stopped(Exception):
    """The process is asked to stop."""


class Alone(Exception):
    """No generator is there to take the weights, and none is to be waited for."""


@dataclass(frozen=True)
class SyncReport:
    """What a round came to."""

    version: int
    epoch: int
    members: tuple[str, ...]
    attempts: int
    total_s: float
    transfer_s: float


class SyncRounds:
    """Opens rounds and sees them through."""

    def __init__(
        self,
        config: RunConfig,
        store: Store,
        bell: Bell,
        portal: Portal,
        fence: int,
        sender: WeightSender,
        send: Callable[[], None],
        tick: Callable[[], None],
    ) -> None:
        """`send` broadcasts with all ranks; `tick` keeps ranks and liveness alive while waiting, and raises `Stopped`."""
        self.config, self.store, self.bell = config, store, bell
        self._call, self._fence, self._sender, self._send, self._tick = portal.call, fence, sender, send, tick
        last, _ = portal.call(store.round())
        self._attempt = last.attempt if last else 0
        self._membership = Membership(last.epoch if last else 0)
        self._address = ("", 0)
        self._applied: dict[str, int] = {}  # the last version each member acknowledged

    def run(self, version: int, ending: Callable[[], bool] = lambda: False) -> SyncReport:
        """Bring `version` to every loaded generator; waits until at least one holds it. Raises `Alone` if `ending` before."""
        started, before = time.monotonic(), self._attempt
        while True:
            if report := self._try(version, self._live, started, before):
                return report
            if ending():
                raise Alone
            self._wait(RETRY_PAUSE_S)

    def catch_up(self, version: int) -> SyncReport | None:
        """Bring `version` to the generators that do not hold it, if there are any."""
        return self._try(version, lambda: self._behind(version), time.monotonic(), self._attempt)

    def _try(self, version: int, candidates: Callable[[], dict[str, int]], started: float, before: int) -> SyncReport | None:
        """Attempt after attempt, each without those who failed in one before; None when nobody is left."""
        self._membership.begin()
        while worlds := self._membership.choose(candidates()):
            attempt_started = time.monotonic()
            if applied := self._attempt_round(version, worlds):
                self._applied |= dict.fromkeys(applied, version)
                done, attempts = time.monotonic(), self._attempt - before
                members = tuple(sorted(applied))
                return SyncReport(version, self._membership.epoch, members, attempts, done - started, done - attempt_started)
        return None

    def _live(self) -> dict[str, int]:
        return {pod.member: pod.world for pod in self._generators()}

    def _behind(self, version: int) -> dict[str, int]:
        """Those that hold another version; what a member acknowledged counts before its next heartbeat says so."""
        return {
            pod.member: pod.world
            for pod in self._generators()
            if pod.version != version and self._applied.get(pod.member) != version
        }

    def _generators(self) -> list[PodStatus]:
        members = self._call(self.store.members(self.config.fleet.ttl_s))
        return [pod for pod in members if pod.kind == "generator" and pod.world > 0 and pod.phase != "draining"]

    def _attempt_round(self, version: int, worlds: dict[str, int]) -> set[str]:
        """One attempt; the members that applied the version, none when it has to be tried again."""
        self._attempt += 1
        if not self._membership.fits(worlds):
            self._sender.close_group()
            present = self._phase(self._round(version, "gather", dict.fromkeys(worlds, 0), 0, self._membership.epoch))
            self._membership.exclude(set(worlds) - present)
            worlds = {member: world for member, world in worlds.items() if member in present}
            if not worlds or not self._make_group(version, worlds):
                return set()
        group = self._membership.group
        assert group is not None
        ready = self._phase(self._of_group(version, "pause", group))
        if ready != set(group.ranks):
            return self._give_up(version, group, set(group.ranks) - ready)
        self._open(self._of_group(version, "transfer", group))
        try:
            self._send()
        except SendFailed as error:
            log.warning("broadcast failed", epoch=group.epoch, error=str(error))
            _, failed = answered(self._acks(), group.ranks, "transfer")
            return self._give_up(version, group, failed)
        applied = self._collect(self._of_group(version, "transfer", group), self.config.sync.transfer_deadline_s)
        if applied != set(group.ranks):
            self._give_up(version, group, set(group.ranks) - applied)
        self._open(self._of_group(version, "done", group))
        return applied

    def _make_group(self, version: int, worlds: dict[str, int]) -> bool:
        group = self._membership.remake(worlds)
        self._address = self._sender.open(group.world_size)
        self._open(self._round(version, "join", dict(group.ranks), group.world_size, group.epoch))
        try:
            self._sender.connect()
        except SendFailed as error:
            log.warning("group could not be made", epoch=group.epoch, error=str(error))
            done, _ = answered(self._acks(), group.ranks, "join")
            self._give_up(version, group, set(group.ranks) - done)
            return False
        joined = self._collect(self._of_group(version, "join", group), self.config.sync.join_deadline_s)
        if joined != set(group.ranks):
            self._give_up(version, group, set(group.ranks) - joined)
            return False
        return True

    def _give_up(self, version: int, group: Group, blamed: set[str]) -> set[str]:
        """Tear the group down; whoever is blamed is out until the next round."""
        log.warning("weight-sync round goes on under a new epoch", epoch=group.epoch, without=sorted(blamed))
        self._membership.exclude(blamed)
        self._membership.breaks()
        self._sender.close_group()
        self._open(self._of_group(version, "failed", group))
        return set()

    def _phase(self, current: Round) -> set[str]:
        self._open(current)
        return self._collect(current, self.config.sync.join_deadline_s)

    def _open(self, current: Round) -> None:
        self._call(self.store.set_round(self._fence, current))

    def _acks(self) -> dict[str, tuple[str, str]]:
        return self._call(self.store.round())[1]

    def _collect(self, current: Round, limit_s: float) -> set[str]:
        """Members that acknowledge a phase before its deadline. A reported failure is an answer; who is gone is not awaited."""
        deadline = time.monotonic() + limit_s
        while True:
            done, failed = answered(self._acks(), current.members, current.phase)
            awaited = (set(current.members) - done - failed) & set(self._live())
            if not awaited or time.monotonic() > deadline:
                return done
            self._wait(min(LOOK_S, max(0.0, deadline - time.monotonic())))

    def _wait(self, seconds: float) -> None:
        self._tick()
        self._call(self.bell.wait("acks", "fleet", timeout=seconds))

    def _of_group(self, version: int, phase: str, group: Group) -> Round:
        return self._round(version, phase, dict(group.ranks), group.world_size, group.epoch)

    def _round(self, version: int, phase: str, members: dict[str, int], world_size: int, epoch: int) -> Round:
        host, port = self._address if phase == "join" else ("", 0)
        return Round(epoch, version, phase, members, world_size, self._sender.backend, host, port, self._attempt)
