"""The trainer's side of the weight-sync rounds (docs/design.md, section 8; member.py has a member's).

Guarantees: a version is published once at least one generator holds it; every wait has a limit; a collective that failed is never
retried inside its epoch, only under a new one and without the members that failed; a member that cannot reach the trainer costs
one round's `gather` and rejoins when it reports that it can; a weight that arrives changed in two consecutive transfers ends the
run.
Waits for: generators that are loaded, their acknowledgements, the broadcast. Unblocked by: `fleet`, `acks`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

import structlog

from services.protocol.messages import CHANGED, PodStatus, Round
from services.runtime.loops import Fatal
from services.runtime.portal import Portal
from services.runtime.service import Service
from services.weights.rounds.membership import CollectiveGroup, Membership, answered
from services.weights.rounds.metrics import RoundMetrics
from services.weights.transport import Sender, SendFailed

log = structlog.get_logger()

POLL_S = 1.0  # a missed notification costs at most this much
RETRY_PAUSE_S = 1.0
ARRIVAL_POLL_S = 0.02  # the arrival of a rank at the rendezvous sends no notification


Send = Callable[[int, int, bool], None]
"""Calls `Sender.send` on all ranks, with its arguments."""


class Stopped(Exception):
    """The process was asked to stop."""


class Alone(Exception):
    """No generator is available to take the weights, and none is expected."""


@dataclass(frozen=True)
class SyncReport:
    """Outcome of a round. Seconds run to the last acknowledgement, for the round and for its last attempt."""

    version: int
    epoch: int
    members: tuple[str, ...]
    attempts: int
    total_s: float
    transfer_s: float


@dataclass(frozen=True)
class Sent:
    """A round whose weights have been sent, but not all applied."""

    transfer: Round
    group: CollectiveGroup
    attempt_began: float
    first: tuple[float, int]  # when the first attempt for this version began, and the number of attempts before it


class SyncRounds:
    """Opens rounds and runs them to completion."""

    def __init__(
        self,
        service: Service,
        portal: Portal,
        fence: int,
        sender: Sender,
        send: Send,
        tick: Callable[[], None],
        metrics: RoundMetrics | None = None,
    ) -> None:
        """`tick` keeps ranks and liveness alive while waiting, and raises `Stopped`."""
        self.config, self.store, self.notifications, self.fence = service.config, service.store, service.notifications, fence
        self.portal, self._call = portal, portal.call
        self._sender, self._send_on_all, self._tick = sender, send, tick
        self._metrics, self._clock = metrics, metrics.sync_clock() if metrics else None
        last, _ = portal.call(self.store.fleet.round())
        self._attempt = last.attempt if last else 0
        self.membership = Membership(last.epoch if last else 0)
        self._address = ("", 0)
        self._changed: set[str] = set()  # weights that arrived changed in the last transfer
        self._applied: dict[str, int] = {}  # the last version that each member acknowledged
        self._answered = 0.0  # when the answers of the last phase were complete, or its deadline passed
        self._acks: dict[str, tuple[str, str]] = {}  # stage and detail of each member when a phase's answers were last read

    def run(self, version: int, ending: Callable[[], bool] = lambda: False, first: tuple[float, int] | None = None) -> SyncReport:
        """Bring `version` to every loaded generator; wait until at least one holds it. Raises `Alone` if `ending` comes first.

        `first`: when the first attempt for this version began and the number of attempts before it, if there was one.
        """
        first = first or (time.monotonic(), self._attempt)
        while True:
            before = self._attempt
            if report := self._try(version, self.live, first):
                return report
            self.pause(ending, failed=self._attempt > before)

    def send(self, version: int, ending: Callable[[], bool] = lambda: False) -> Sent:
        """Send `version` to every loaded generator. Return once all of it is sent: `conclude` waits until it is applied.

        Raises `Alone` if `ending` comes before there is a generator that takes it.
        """
        first = (time.monotonic(), self._attempt)
        while True:
            self.membership.begin()
            before = self._attempt
            if sent := self._send(version, self.live, first):
                return sent
            self.pause(ending, failed=self._attempt > before)

    def conclude(self, sent: Sent, tick: Callable[[], None]) -> SyncReport | None:
        """Wait for the members' answers to what was sent, and end the round. Returns None if none of them applied it.

        No other method may be called meanwhile. `tick` is called between waits.
        """
        version, group, (started, before) = sent.transfer.version, sent.group, sent.first
        applied = self._collect(sent.transfer, self.config.sync.deadline_s, tick)
        if applied != set(group.ranks):
            self._give_up(version, group, set(group.ranks) - applied)
        self._judge(group)
        self._open(self._of_group(version, "done", group))
        self._sweep()
        if not applied:
            return None
        self._applied |= dict.fromkeys(applied, version)
        total_s, transfer_s = self._answered - started, self._answered - sent.attempt_began
        members, attempts = tuple(sorted(applied)), self._attempt - before
        return SyncReport(version, group.epoch, members, attempts, total_s, transfer_s)

    def pause(self, ending: Callable[[], bool], failed: bool = True) -> None:
        """Wait a moment before a version is sent again, less if no attempt `failed` and a generator arrives.

        Raises `Alone` if `ending`.
        """
        if ending():
            raise Alone
        self._wait(RETRY_PAUSE_S, whole=failed)

    def catch_up(self, version: int) -> SyncReport | None:
        """Bring `version` to the generators that do not hold it yet, if any. From a store they fetch it themselves."""
        if self._sender.backend == "store":
            return None
        return self._try(version, lambda: self._behind(version), (time.monotonic(), self._attempt))

    def _try(self, version: int, candidates: Callable[[], dict[str, int]], first: tuple[float, int]) -> SyncReport | None:
        """Make attempts, each without the members that failed in an earlier one. Returns None when no member is left."""
        self.membership.begin()
        while sent := self._send(version, candidates, first):
            if report := self.conclude(sent, self._tick):
                return report
        return None

    def _send(self, version: int, candidates: Callable[[], dict[str, int]], first: tuple[float, int]) -> Sent | None:
        """Attempt to send until it succeeds. Returns None when no member is left."""
        while worlds := self.membership.choose(candidates()):
            blamed = set(self.membership.excluded)
            if sent := self._send_round(version, worlds, first):
                return sent
            if self.membership.excluded == blamed:  # the sender's own fault, e.g. a full disk
                self._wait(RETRY_PAUSE_S, whole=True)
        return None

    def _heard(self) -> set[str]:
        """Return the live members, including those that later rounds exclude: they still answer this one."""
        return {pod.member for pod in self._call(self.store.fleet.members(self.config.fleet.ttl_s))}

    def live(self) -> dict[str, int]:
        """Return the members to include in a round, with their number of ranks."""
        return {pod.member: pod.world for pod in self._generators()}

    def _behind(self, version: int) -> dict[str, int]:
        """Return the members that hold other weights. A version counts as soon as it is acknowledged, before the next heartbeat
        says so.
        """
        return {
            pod.member: pod.world
            for pod in self._generators()
            if (pod.version, pod.trainer_fence) != (version, self.fence) and self._applied.get(pod.member) != version
        }

    def _generators(self) -> list[PodStatus]:
        """Return the generators to include: not those that fetch weights themselves, and those that could not reach the trainer
        only if there are no others.
        """
        members = self._call(self.store.fleet.members(self.config.fleet.ttl_s))
        able = [pod for pod in members if pod.phase != "draining" and not pod.fetching]
        loaded = [pod for pod in able if pod.kind == "generator" and pod.world > 0]
        return [pod for pod in loaded if not pod.unreached] or loaded

    def _send_round(self, version: int, worlds: dict[str, int], first: tuple[float, int]) -> Sent | None:
        """Make one attempt to send. Returns None if it must be repeated."""
        attempt_began = time.monotonic()
        self._attempt += 1
        if not self.membership.fits(worlds):
            try:
                self._address = self._sender.open(self.fence)
            except SendFailed as error:
                log.warning("failed to open a weight group", error=str(error))
                self.membership.exclude(worlds)
                self._sweep()
                return None
            asked = dict.fromkeys(worlds, 0)
            present = self._phase(self._round(version, "gather", asked, 0, self.membership.epoch))
            self._leave_out(set(worlds) - present)
            worlds = {member: world for member, world in worlds.items() if member in present}
            if not worlds:  # those that were asked are free again; that all declined is no failure
                self._open(self._round(version, "failed", asked, 0, self.membership.epoch), counts=False)
            if not worlds or not self._make_group(version, worlds):
                return None
        group = self.membership.group
        assert group is not None
        ready = self._phase(self._of_group(version, "pause", group))
        if ready != set(group.ranks):
            self._give_up(version, group, set(group.ranks) - ready)
            return None
        transfer = self._of_group(version, "transfer", group)
        if not self._sender.ahead:
            self._open(transfer)
        try:
            self._send_on_all(version, self.fence, bool(self._changed))
        except SendFailed as error:
            log.warning("failed to send weights", epoch=group.epoch, error=str(error))
            self._give_up(version, group, self.membership.suspects())
            self._sweep()
            return None
        if self._sender.ahead:
            self._open(transfer)
        return Sent(transfer, group, attempt_began, first)

    def _sweep(self) -> None:
        """Delete what the store no longer needs; after a failure, too, since the volume may be full of it."""
        members = self.store.fleet.members
        self._sender.sweep(lambda: {pod.fetching for pod in self._call(members(self.config.fleet.ttl_s))})

    def _judge(self, group: CollectiveGroup) -> None:
        """End the run if a weight arrives changed twice: once may be an accident, but further rounds would only hide a fault."""
        before = self._changed
        acks = {member: detail for member, (stage, detail) in self._acks.items() if stage == "failed" and member in group.ranks}
        self._changed = {detail.removeprefix(CHANGED) for detail in acks.values() if detail.startswith(CHANGED)}
        for tensor in sorted(self._changed & before):
            raise Fatal(
                f"weight {tensor!r} was corrupted in two consecutive transfers, last at {', '.join(sorted(acks))}: check memory "
                "and network there and at the trainer"
            )

    def _make_group(self, version: int, worlds: dict[str, int]) -> bool:
        group = self.membership.remake(worlds)
        self._open(self._of_group(version, "join", group))
        if missing := self._await_arrival(group):
            self._give_up(version, group, missing)
            return False
        try:
            self._sender.connect(group.world_size)
        except SendFailed as error:
            log.warning("failed to form a weight group", epoch=group.epoch, error=str(error))
            self._give_up(version, group, self.membership.suspects())
            return False
        joined = self._collect(self._of_group(version, "join", group), self.config.sync.answer_s, self._tick)
        if joined != set(group.ranks):
            self._give_up(version, group, set(group.ranks) - joined)
            return False
        return True

    def _await_arrival(self, group: CollectiveGroup) -> set[str]:
        """Return members that have not arrived at the rendezvous with all their ranks before the deadline, or never will.

        Waits for the others even after one has failed; otherwise they would try to reach a closed rendezvous until their own
        deadline.
        """
        deadline = time.monotonic() + self.config.sync.answer_s
        awaited = range(1, group.world_size)
        while awaited := self._sender.absent(awaited):
            missing = group.owners(awaited)
            answers = answered(self._read_acks(), group.ranks, "join")
            if not answers.awaited(missing, self._heard()) or time.monotonic() > deadline:
                return missing
            self._wait(ARRIVAL_POLL_S)
        return set()

    def _leave_out(self, members: Collection[str]) -> None:
        if members:
            acks = self._read_acks()
            said = {member: acks.get(member, ("", ""))[1] or "no answer" for member in sorted(members)}
            log.warning("excluded members from a weight-sync round", attempt=self._attempt, members=said)
        self.membership.exclude(members)

    def _give_up(self, version: int, group: CollectiveGroup, blamed: Collection[str]) -> None:
        """Tear the group down and exclude members that are blamed or have declined until the next round."""
        log.warning("retrying the weight-sync round under a new epoch", epoch=group.epoch)
        self._leave_out(blamed)
        self.membership.breaks()
        self._sender.close()
        self._open(self._of_group(version, "failed", group))

    def _phase(self, current: Round) -> set[str]:
        self._open(current)
        return self._collect(current, self.config.sync.answer_s, self._tick)

    def _open(self, current: Round, counts: bool = True) -> None:
        if counts and self._metrics is not None and self._clock is not None:
            self._clock.enter(current.phase)
            if current.phase == "failed":
                self._metrics.sync_failures.inc()
        self._call(self.store.fleet.set_round(self.fence, current))

    def _read_acks(self) -> dict[str, tuple[str, str]]:
        return self._call(self.store.fleet.round())[1]

    def _collect(self, current: Round, limit_s: float, tick: Callable[[], None]) -> set[str]:
        """Return the members that acknowledge a phase before its deadline. A reported failure counts as an answer; a member that
        is gone is not awaited.
        """
        started, late = time.monotonic(), set[str]()
        deadline = started + limit_s
        while True:
            tick()
            self._acks = self._call(self._next_acks(min(POLL_S, max(0.0, deadline - time.monotonic()))))
            answers = answered(self._acks, current.members, current.phase)
            silent = answers.awaited(current.members, current.members)
            late = silent or late
            self._answered = time.monotonic()
            if not silent or not silent & self._heard() or self._answered > deadline:
                if (waited_s := self._answered - started) > POLL_S:
                    log.info("slow sync phase", phase=current.phase, seconds=round(waited_s, 3), last=sorted(late))
                return set(answers.done)

    async def _next_acks(self, seconds: float) -> dict[str, tuple[str, str]]:
        """Return the answers once the last member has answered, which sends a notification, or after `seconds`."""
        await self.notifications.wait("acks", "fleet", timeout=seconds)
        return (await self.store.fleet.round())[1]

    def _wait(self, seconds: float, whole: bool = False) -> None:
        """Wait until something arrives, or the `whole` time: answers to a failed attempt must not hasten the next."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self._tick()
            self._call(self.notifications.wait("acks", "fleet", timeout=left))
            if not whole:
                return

    def _of_group(self, version: int, phase: str, group: CollectiveGroup) -> Round:
        return self._round(version, phase, dict(group.ranks), group.world_size, group.epoch)

    def _round(self, version: int, phase: str, members: dict[str, int], world_size: int, epoch: int) -> Round:
        return Round(epoch, version, phase, members, world_size, self._sender.backend, *self._address, self._attempt, self.fence)
