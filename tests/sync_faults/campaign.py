"""Rounds in each of which one member is hit, followed by rounds without a fault until it is back.

Guarantees: the invariants are checked after every round (`_judge`); a fault strikes in its phase or is counted as missed; a
campaign that hangs dumps the stacks of all threads and exits.
"""

from __future__ import annotations

import faulthandler
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import services.weights.broadcast.gloo as sending
from services.console.run.redis_server import RedisServer
from services.protocol.messages import Round
from services.weights.broadcast.host_memory import lay_end_to_end
from services.weights.rounds.leader import SyncReport
from services.weights.versions.objects import Data, FolderObjects
from tests.support.rounds_world import World, open_world
from tests.sync_faults.faults import Fault
from tests.sync_faults.member import digest
from tests.sync_faults.members import Member
from tests.sync_faults.network import Loopback, Networks

WIDTH, LAYERS = 512, 6  # tensors of 1 MiB, one per bucket
BUCKET = 1 << 20
CHANGED = 0.02  # share of the rows that a version changes
MID_BROADCAST = 3  # a fault in the phase `transfer` strikes before this bucket
BETWEEN_S = 0.2  # pause between two rounds, for the rest of a step
LOAD_LIMIT_S = 180.0  # limit for all members to start
SLACK_S = 5.0  # for a shared machine
BACK_LIMIT_S = 180.0  # limit for a member to return: a new process first loads torch, perhaps on a shared machine


@dataclass
class Hit:
    """A fault and its cost."""

    fault: Fault
    struck: bool = False
    round_s: float = 0.0
    """Duration of its round in seconds."""
    later_s: list[float] = field(default_factory=list)
    """Durations of the later rounds, up to the first that the victim took part in."""
    missed: int = 0
    """Versions that the victim did not receive in their round."""


@dataclass
class Outcome:
    """Results of a campaign."""

    hits: list[Hit] = field(default_factory=list)
    rounds: int = 0
    compared: int = 0
    """Digests of members compared with the trainer's."""
    violations: list[str] = field(default_factory=list)


class Campaign:
    """The trainer's side, and members to hit."""

    def __init__(self, world: World, members: dict[str, Member], outcome: Outcome) -> None:
        self.world, self.members, self.outcome = world, members, outcome
        self.version = -1
        self._digests: dict[int, str] = {}
        self._skipped: dict[str, int] = dict.fromkeys(members, 0)  # rounds missed in a row by a member that was not hit
        self._hit: Hit | None = None  # armed, or being recovered from
        self._sent = 0
        self._watching: threading.Thread | None = None
        sync = world.config.sync
        self.deadline_s = 3 * sync.answer_s + 2 * sync.deadline_s + SLACK_S
        """Limit of a broken attempt and the next one together. When a member is cut off in `join`, gloo waits several times."""
        self.short_s = 0.4 * sync.answer_s
        self.long_s = sync.answer_s + sync.deadline_s + 1.0

    def run(self, faults: Iterator[Fault], tell: Any) -> None:
        """Apply all faults, unless a check fails."""
        self._await_members()
        self._round()
        for fault in faults:
            hit = self._hit = Hit(fault)
            self.outcome.hits.append(hit)
            if fault.phase in ("gather", "join"):
                self.world.rounds.membership.breaks()  # a group that persists has neither phase
            report = self._round()
            hit.round_s = report.total_s
            hit.missed += fault.victim not in _names(report)
            tell(f"{fault}: round of {hit.round_s:.2f} s" + ("" if hit.struck else ", not struck"))
            self._recover(hit)
            tell(f"    back after {hit.missed} versions missed, rounds of {' '.join(f'{s:.2f}' for s in hit.later_s)} s")
            self._hit = None
            if self.outcome.violations:
                return

    def _recover(self, hit: Hit) -> None:
        victim = self.members[hit.fault.victim]
        deadline = time.monotonic() + self.long_s + BACK_LIMIT_S
        while time.monotonic() < deadline:
            time.sleep(BETWEEN_S)
            over = victim.over.is_set()
            report = self._round()
            hit.later_s.append(report.total_s)
            if set(self.members) == _names(report) and over:
                return
            hit.missed += hit.fault.victim not in _names(report)
            if self.outcome.violations:
                return
        self.outcome.violations.append(f"{hit.fault}: it is not back after {len(hit.later_s)} rounds")

    def _round(self) -> SyncReport:
        """Send one version to all members."""
        self.version += 1
        self._sent = 0
        with torch.no_grad():
            torch.manual_seed(self.version)
            for weight in self.world.model.parameters():
                weight[torch.rand(len(weight)) < CHANGED] = torch.randn(weight.shape[1])
                weight.view(-1)[0] = self.version
        self._digests[self.version] = digest(dict(self.world.model.named_parameters()))
        faulthandler.dump_traceback_later(4 * self.deadline_s, exit=True)
        report = self.world.train(self.version)
        if self._watching is not None:
            self._watching.join()
            self._watching = None
        faulthandler.cancel_dump_traceback_later()
        self.outcome.rounds += 1
        self._judge(report)
        return report

    def _judge(self, report: SyncReport) -> None:
        violations, present = self.outcome.violations, _names(report)
        if report.total_s > self.deadline_s:
            violations.append(f"version {self.version} took {report.total_s:.1f} s, more than {self.deadline_s:g} s")
        for name, member in self.members.items():
            hit = self._hit is not None and self._hit.fault.victim == name
            self._skipped[name] = 0 if hit or name in present else self._skipped[name] + 1
            if self._skipped[name] > 1:
                violations.append(f"{name} was not hit and skipped versions {self.version - 1} and {self.version}")
            if name in present and not (hit and self._hit and self._hit.fault.verb == "kill"):
                self._compare(name, self.version, member.took(self.version))
            if (held := member.held()) is not None and held[0] >= 0:
                self._compare(name, *held)
            violations += member.wrong

    def _compare(self, name: str, version: int, held: str) -> None:
        self.outcome.compared += 1
        if held != self._digests[version]:
            self.outcome.violations.append(
                f"{name} says it holds version {version}, with other weights than the trainer's: {held!r}"
            )

    def _await_members(self) -> None:
        deadline = time.monotonic() + LOAD_LIMIT_S
        while len(self.world.rounds.live()) < len(self.members):
            assert time.monotonic() < deadline, "the members did not start; their logs say why"
            for member in self.members.values():
                member.start_again_if_it_ended()  # as a kubelet would: on a busy machine its first connection may time out
            time.sleep(0.05)

    def strike(self) -> None:
        """Apply the armed fault once."""
        if self._hit is not None and not self._hit.struck:
            self._hit.struck = True
            fault = self._hit.fault
            self.members[fault.victim].hit(fault, self.short_s if fault.kind.endswith("-short") else self.long_s)

    def opened(self, current: Round) -> None:
        """Handle a newly opened phase."""
        if current.phase == "transfer" and self._armed("applied", current.members):
            self._watching = threading.Thread(target=self._watch, args=(current.attempt,), daemon=True)
            self._watching.start()
        elif self._armed(current.phase, current.members) and current.phase != "transfer":
            self.strike()

    def sends(self) -> None:
        """Handle a bucket about to be sent."""
        self._sent += 1
        victim = {f"{self._hit.fault.victim}:": 0} if self._hit else {}
        if self._sent == MID_BROADCAST and self._armed("transfer", victim):
            self.strike()

    def _watch(self, attempt: int) -> None:
        """Strike once the victim has acknowledged, possibly before others have."""
        while True:
            current, acks = self.world.portal.call(self.world.store.fleet.round())
            if current is None or current.attempt != attempt:
                return
            if self._armed("applied", {member: 0 for member, (stage, _) in acks.items() if stage == "applied"}):
                self.strike()
            if current.phase != "transfer":
                return
            time.sleep(0.001)

    def _armed(self, phase: str, members: dict[str, int]) -> bool:
        hit = self._hit
        return (
            hit is not None
            and not hit.struck
            and hit.fault.phase == phase
            and any(member.startswith(f"{hit.fault.victim}:") for member in members)
        )


@contextmanager
def open_campaign(
    folder: Path,
    names: Sequence[str],
    networks: bool,
    deadline_s: float,
    outcome: Outcome,
    way: Sequence[str] = (),
) -> Iterator[Campaign]:
    """Yield a campaign whose members are starting. `way`: keys of `sync` that select the transport."""
    torch.set_num_threads(1)
    network = Networks() if networks else Loopback()
    server = RedisServer(folder / "redis")
    server.start()
    limits = (f"sync.deadline_s={deadline_s}", f"sync.host={network.trainer}")
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    lay_end_to_end(model)  # as the trainer does, so that buckets are sent in place
    members: dict[str, Member] = {}
    try:
        given = (*limits, "run.name=rounds", "fleet.ttl_s=5", *way)
        with open_world(folder, server, *given, model=model, bucket_bytes=BUCKET) as world:
            try:
                for i, name in enumerate(names):
                    place = ("127.0.0.1", server.port)
                    streams = i % 2 == 1 and world.config.sync.backend != "store"
                    members[name] = Member(name, streams, network, world.config, world.portal, place)
                campaign = Campaign(world, members, outcome)
                with _watched(world, campaign):
                    yield campaign
            finally:
                for member in members.values():
                    member.close()
    finally:
        network.close()
        server.stop()


@contextmanager
def _watched(world: World, campaign: Campaign) -> Iterator[None]:
    """Notify the campaign of phases and buckets."""
    broadcast, put = sending.begin_broadcast, FolderObjects.put

    def sends(group: Any, buffer: torch.Tensor, deadline: Any) -> Any:
        campaign.sends()
        return broadcast(group, buffer, deadline)

    def puts(self: FolderObjects, name: str, data: Data) -> None:
        campaign.sends()  # a version in a store is a part, a manifest and the catalogue
        put(self, name, data)

    world.watchers.append(campaign.opened)
    sending.begin_broadcast, FolderObjects.put = sends, puts
    try:
        yield
    finally:
        sending.begin_broadcast, FolderObjects.put = broadcast, put


def _names(report: SyncReport) -> set[str]:
    return {member.partition(":")[0] for member in report.members}
