"""What the store hands out and takes: values read from Redis, without a way back to it."""

from __future__ import annotations

from dataclasses import dataclass

from services.protocol import codec
from services.protocol.errors import DifferentRun
from services.protocol.messages import WIRE, Header, Ticket


@dataclass(frozen=True)
class Claim:
    """A ticket under lease. `fence` proves the claim; `ticket` is None when its bytes are corrupt."""

    entry: str
    fence: int
    ticket_id: str
    body: bytes
    ticket: Ticket | None

    @property
    def payload(self) -> str:
        """Suffix of the payload key: unique to this claim, so that no late writer can touch another's bytes."""
        return f"{self.ticket_id}.{self.fence}"


@dataclass(frozen=True)
class HeaderEntry:
    """An entry of the headers stream; `header` is None when its bytes are corrupt, `fault` says how."""

    entry: str
    ticket: str
    payload: str
    body: bytes
    header: Header | None
    fault: str = ""


@dataclass(frozen=True)
class Settlement:
    """What becomes of a header: `insert`, `stale`, `filtered:<reason>` or `failed:<reason>`."""

    item: HeaderEntry
    action: str
    seq: int = 0
    oldest: int = 0


@dataclass(frozen=True)
class BufferedGroup:
    """A group in the replay table."""

    group: str
    uses: int
    header: Header


@dataclass(frozen=True)
class RunState:
    """The run's hash. Steps and versions start at -1: nothing yet."""

    steps: int
    slots: int
    slots_used: int
    cursor: int
    published_version: int
    prepared_step: int
    committed_step: int
    checkpointed_step: int
    leader: str
    paused: dict[str, str]  # role -> who and why
    stopping: str  # who and why, or empty
    finished: str  # how the run ended, or empty
    dataset: str
    config: str

    @property
    def ended(self) -> bool:
        """No more work is to be started."""
        return bool(self.stopping or self.finished)


_NUMBERS = (
    "steps", "slots", "slots_used", "cursor", "published_version", "prepared_step", "committed_step", "checkpointed_step",
)  # fmt: skip


def read_state(run: str, fields: dict[bytes, bytes]) -> RunState | None:
    """The run's hash as `RunState`; None when the run was not created yet, though somebody may have paused it already."""
    raw = {key.decode(): value.decode() for key, value in fields.items()}
    if "wire" not in raw:
        return None
    if int(raw["wire"]) != WIRE:
        raise DifferentRun(f"run {run!r} has wire version {raw['wire']}, this program speaks {WIRE}: use the matching one")
    return RunState(
        **{name: int(raw[name]) for name in _NUMBERS},
        leader=raw.get("leader", ""),
        paused={key.removeprefix("paused:"): value for key, value in raw.items() if key.startswith("paused:")},
        stopping=raw.get("stopping", ""),
        finished=raw.get("finished", ""),
        dataset=raw["dataset"],
        config=raw["config"],
    )


def read_claim(entry: bytes, fence: bytes, ticket_id: bytes, body: bytes) -> Claim:
    """A claim as the function returns it."""
    name = ticket_id.decode(errors="replace")
    try:
        ticket = codec.decode(body, Ticket)
    except codec.CorruptMessage:
        ticket = None
    if ticket is not None and ticket.id != name:
        ticket = None
    return Claim(entry.decode(), int(fence), name, body, ticket)


def read_header(entry: bytes, fields: list[bytes]) -> HeaderEntry:
    """An entry of the headers stream. What the generator wrote must agree with what the server noted beside it."""
    named = dict(zip(fields[::2], fields[1::2], strict=False))
    body = named.get(b"body", b"")
    ticket, payload = (named.get(name, b"").decode(errors="replace") for name in (b"ticket", b"payload"))
    try:
        header, fault = codec.decode(body, Header), ""
        if (header.ticket, header.payload) != (ticket, payload):
            header, fault = (
                None,
                f"header names ticket {header.ticket} and payload {header.payload}, its entry {ticket} and {payload}",
            )
    except codec.CorruptMessage as error:
        header, fault = None, str(error)
    return HeaderEntry(entry.decode(), ticket, payload, body, header, fault)
