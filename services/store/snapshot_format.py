"""A snapshot: dataprep's state in a checkpoint, as a file of messages. Pure, except for reading and writing that file.

Guarantees: reading any bytes gives the messages or raises `SnapshotError`; nothing is executed; neither side holds more than a
message of a few hundred groups in memory.

A file is one `Head`, then `Groups`, `Rows` and `Letters`; each message is preceded by its length.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from services.protocol import codec
from services.protocol.keys import Keys

LAYOUT = 1
"""Layout version of the file. A reader rejects newer ones."""

CLOCKS = (1, 2, 3, 4)
"""Sets of clocks of the replay table, each for weights of sixteen powers of two; 1 for the lightest."""

LENGTH_BYTES = 8
LARGEST = 1 << 32


class SnapshotError(Exception):
    """A snapshot cannot be read or does not fit the run; the message says why."""


class SnapshotGroup(msgspec.Struct, frozen=True, array_like=True):
    """A group in the replay table, or in a step that was prepared and not trained."""

    name: str
    seq: int
    fields: dict[str, bytes]  # of its hash: header, payload, seq, uses
    payload: bytes | None  # None: payloads were not saved
    version: float | None  # score of replay:version; None: the group has left the table
    weight: float | None = None
    clock: float | None = None  # score in the set of clocks of its weight
    idle: float | None = None


class Head(msgspec.Struct, frozen=True):
    """All small values. Steps after `step` are prepared and not trained."""

    layout: int
    step: int  # the last committed step
    run: dict[str, str]
    ledger: dict[str, int]
    outstanding: dict[str, int]  # ticket -> issue sequence: neither settled nor lost
    requeued: list[str]
    evaluating: bool  # whether an evaluation round was open
    order: dict[str, bytes]
    table: dict[str, str]  # replay:state
    gaps: dict[str, int]
    trained: dict[int, bytes]  # epoch -> bitmap
    plans: dict[int, dict[str, bytes]]  # step -> its hash
    departed: list[str]  # groups that these steps need and that have since left the table
    whole: bool  # whether payloads are saved too


class _Layout(msgspec.Struct, frozen=True):
    layout: int


class Groups(msgspec.Struct, frozen=True, tag="groups"):
    """Some of the groups, in order of issue."""

    groups: list[SnapshotGroup]


class Rows(msgspec.Struct, frozen=True, tag="rows"):
    """Some fields of the hash `key`."""

    key: str  # rates | drops
    fields: dict[str, bytes]


class Letters(msgspec.Struct, frozen=True, tag="letters"):
    """Some dead letters, oldest first: entry and its fields."""

    entries: list[tuple[str, dict[str, bytes]]]


Piece = Groups | Rows | Letters


def clock_key(keys: Keys, number: int) -> str:
    """Return the key of a set of clocks."""
    return f"{keys.replay_clock}:{number}"


def clock_of(weight: float) -> int:
    """Return the set of clocks of a weight above 0 (as in functions/replay_table.lua)."""
    return max(1, min(len(CLOCKS), (math.frexp(weight)[1] - 1) // 16 + 3))


class Writer:
    """Writes a snapshot to `path`."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")

    def add(self, message: Head | Piece) -> None:
        """Append a message. Raises `OSError`."""
        body = codec.encode(message)
        self._file.write(len(body).to_bytes(LENGTH_BYTES, "little") + body)

    def close(self) -> None:
        """Close the file; the owner of its folder forces it to disk."""
        self._file.close()


class Snapshot:
    """A snapshot file: its head, and its pieces one by one."""

    def __init__(self, path: Path) -> None:
        """Open the file. Raises `SnapshotError` if it cannot be used."""
        self.path = path
        self.head = self._head()

    def pieces(self) -> Iterator[Piece]:
        """Yield everything after the head."""
        messages = self._messages()
        next(messages)
        for body in messages:
            yield self._read(body, Piece)

    def _head(self) -> Head:
        body = next(self._messages(), None)
        if body is None:
            raise SnapshotError(f"{self.path} is empty")
        layout = self._read(body, _Layout).layout  # first, because a newer head may not match ours
        if layout > LAYOUT:
            raise SnapshotError(f"{self.path} has layout {layout}, but this program reads up to {LAYOUT}: use a newer version")
        return self._read(body, Head)

    def _read(self, body: bytes, kind: Any) -> Any:
        try:
            return codec.decode(body, kind)
        except codec.CorruptMessage as error:
            raise SnapshotError(f"{self.path} is damaged: {error}") from None

    def _messages(self) -> Iterator[bytes]:
        try:
            with self.path.open("rb") as file:
                while length := file.read(LENGTH_BYTES):
                    size = int.from_bytes(length, "little")
                    body = file.read(size) if len(length) == LENGTH_BYTES and size <= LARGEST else b""
                    if not body or len(body) < size:
                        raise SnapshotError(f"{self.path} is damaged: it ends within a message")
                    yield body
        except OSError as error:
            raise SnapshotError(f"{self.path} cannot be read: {error.strerror}") from None


@dataclass(frozen=True)
class Restoration:
    """The state that a run is restored to."""

    fields: dict[str, int | str]
    """Fields of the run's hash."""
    ledger: dict[str, int]
    table: dict[str, str]
    gaps: dict[str, int]
    reissue: dict[str, int]
    """Tickets to be issued again -> issue sequence: those in progress, and finished groups without a payload."""
    plans: dict[int, dict[str, bytes]]
    whole: bool
    """Whether groups and plans are restored; otherwise the table begins empty."""
    lost_round: int
    """Version whose evaluation round was open and cannot be held again, since it is not published again; -1: none."""


def restoration(head: Head, untrained: dict[str, int], planned: dict[str, int], keep_plans: bool) -> Restoration:
    """Return what to restore from a snapshot.

    `untrained`: groups in the table that no step has drawn -> issue sequence; `planned`: groups of prepared steps that train for
    the first time. `keep_plans`: whether those steps can be trained as they were planned.
    With payloads and plans everything is restored. Otherwise the table begins empty and no step is prepared: trained groups are
    done, the others are generated again, in their old order, and the table's counters go back to what was trained.
    """
    whole = head.whole and (keep_plans or not head.plans)
    nows = [f"now:{number}" for number in CLOCKS]
    table, gaps, ledger, reissue = dict(head.table), dict(head.gaps), dict(head.ledger), dict(head.outstanding)
    if "now" in table:  # of a release in which all clocks had one time
        table |= dict.fromkeys(nows, table.pop("now"))
    held = len(untrained) + len(planned)
    if not whole:
        reissue |= untrained | planned
        held = 0
        gone = ("base", "rescaling")  # of weights by recency: the next step may be one of an earlier base
        table = {name: value for name, value in table.items() if not name.startswith("uses:") and name not in gone}
        table |= dict.fromkeys((*nows, "idle_now", "weight_sum", "weight_rest"), "0")
        drawn = sum(len(plan["groups"].split()) for plan in head.plans.values())
        table["inserted"] = str(int(table.get("inserted", "0")) - len(untrained) - len(planned))
        table["drawn"] = str(int(table.get("drawn", "0")) - drawn)
        for plan in head.plans.values():  # filtered groups that had their place in it
            words = plan.get("gaps", b"").decode().split()
            gaps |= {words[i]: int(words[i + 1]) for i in range(0, len(words), 2)}
    plans = head.plans if whole else {}
    evaluated = int(head.run.get("evaluated_version", "-1"))
    lost_round = -1
    if head.evaluating and evaluated <= head.step:
        lost_round = evaluated
    elif head.evaluating:
        evaluated -= 1  # its round was open, or opened ahead: it is held again
    fields: dict[str, int | str] = {
        "cursor": int(head.run["cursor"]), "slots_used": len(reissue) + held, "last_epoch": int(head.run["last_epoch"]),
        "evaluated_version": evaluated, "prepared_step": max(plans, default=head.step), "published_version": head.step + 1,
        "committed_step": head.step, "checkpointed_step": head.step, "retired_step": head.step,
    }  # fmt: skip
    fields |= {name: head.run[name] for name in ("letter_before", "letter_paused") if name in head.run}  # if prompts have failed
    ledger["reissued"] = ledger.get("reissued", 0) + len(reissue)
    return Restoration(fields, ledger, table, gaps, reissue, plans, whole, lost_round)
