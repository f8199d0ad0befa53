"""The typed store: one method per Redis Function, and the only user of Redis clients.

Guarantees: every hand-over is one atomic call; every call may be repeated after a lost reply without a second effect, so
the client retries by itself through a restart of the server. What a method cannot do it says with a `StoreError`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import Any, NamedTuple, Self, TypeVar

import msgspec
import redis.asyncio as aioredis
from redis.exceptions import RedisError, ResponseError

from services.protocol import codec
from services.protocol.client import check_server, explain, make_client
from services.protocol.coalesce import Coalescer
from services.protocol.errors import DifferentRun, Fenced, OutOfOrder, StoreError
from services.protocol.functions import library
from services.protocol.keys import Keys
from services.protocol.messages import WIRE, Header, Payload, PodStatus, RankPlan, Round, StepPlan, Ticket
from services.protocol.records import BufferedGroup, Claim, HeaderEntry, RunState, Settlement, read_claim, read_header, read_state

T = TypeVar("T")

__all__ = ["BufferedGroup", "Claim", "HeaderEntry", "RunState", "Settlement", "Store"]

METRICS_KEPT = 100_000  # entries of the metrics stream, some 50 MB
SUBMITTED_TOGETHER = 16  # groups in one request, of some 40 KB each: below a MB a request costs no more per group
FETCHED_TOGETHER = 16
LANES = 2  # requests under way at a time: the server works on one while the client does on the other


class _Submission(NamedTuple):
    """A group on its way to Redis."""

    write: tuple[Any, ...]  # the command that writes the payload
    args: tuple[Any, ...]  # of the function that commits it


class Store:
    """A run's state in Redis. Make one with `connect`; close it with `close`."""

    def __init__(self, client: aioredis.Redis, keys: Keys, url: str = "") -> None:
        self.client = client
        self.keys = keys
        self.url = url
        self._library, self._code = library()
        self._submissions = Coalescer(self._submit, SUBMITTED_TOGETHER, LANES)

    @classmethod
    async def connect(cls, url: str, run: str, password: str | None = None) -> Self:
        """Connect, check the server and load the functions. Raises `StoreError` in seconds when any of it fails."""
        await check_server(url, password)
        store = cls(make_client(url, password), Keys(run), url)
        try:
            await store._load_functions()
        except StoreError:
            await store.close()
            raise
        return store

    async def close(self) -> None:
        """Close the connections."""
        await self.client.aclose()

    async def _load_functions(self) -> None:
        try:
            await self.client.execute_command("FUNCTION", "LOAD", self._code)
        except RedisError as error:
            if "already exists" not in str(error):
                raise explain(self.url, error) from None

    async def _ask(self, reply: Awaitable[Any]) -> Any:
        """Await a plain command; its errors become the store's."""
        try:
            return await reply
        except RedisError as error:
            raise explain(self.url, error) from None

    async def _call(self, function: str, *args: Any) -> Any:
        """Call a function of the library."""
        return (await self._send(self._function(function, *args)))[0]

    def _function(self, name: str, *args: Any) -> tuple[Any, ...]:
        return ("FCALL", f"{self._library}_{name}", 1, self.keys.prefix, *args)

    async def _send(self, *commands: tuple[Any, ...]) -> list[Any]:
        """Send commands in one go; their replies. Raises what the first refused one means."""
        for _ in range(2):
            replies = await self._ask(self._replies(commands))
            errors = [reply for reply in replies if isinstance(reply, Exception)]
            if not any("Function not found" in str(error) for error in errors):
                break
            await self._load_functions()  # the server was replaced by an empty one
        for error in errors:
            raise self._refusal(error) from None
        return replies

    async def _replies(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        if len(commands) == 1:  # cheaper than a pipeline of one
            try:
                return [await self.client.execute_command(*commands[0])]
            except ResponseError as error:
                return [error]
        async with self.client.pipeline(transaction=False) as pipe:
            for command in commands:
                pipe.execute_command(*command)
            return await pipe.execute(raise_on_error=False)

    def _refusal(self, error: Exception) -> Exception:
        kind, _, rest = str(error).partition(" ")
        match kind:
            case "FENCED":
                return Fenced(rest)
            case "OUTOFORDER":
                return OutOfOrder(rest)
            case "DIFFERENT":
                return DifferentRun(f"run {self.keys.name!r} exists with another {rest}: choose another run.name")
            case _:
                return explain(self.url, error) if isinstance(error, RedisError) else error

    # -- the run ------------------------------------------------------------------------------------------------------

    async def create(self, config: str, dataset: str, steps: int, slots: int) -> bool:
        """Create the run, or attach to the same one (False). Raises `DifferentRun` when the name is taken."""
        return bool(await self._call("create", WIRE, config, dataset, steps, slots))

    async def state(self) -> RunState | None:
        """The run's state, or None when it was not created yet."""
        return read_state(self.keys.name, await self._ask(self.client.hgetall(self.keys.run)))

    async def pause(self, role: str, why: str) -> None:
        """Desire that `generator`, `dataprep` or `trainer` pods pause, until resumed."""
        await self._call("desire", f"paused:{role}", why)

    async def resume(self, role: str) -> None:
        """Desire that pods of the role go on."""
        await self._call("desire", f"paused:{role}", "")

    async def stop(self, why: str) -> None:
        """Desire that the run ends early: the trainer finishes its step, saves and calls `finish`."""
        await self._call("desire", "stopping", why)

    async def finish(self, how: str) -> None:
        """The run has ended; every service exits."""
        await self._call("desire", "finished", how)

    async def audit(self) -> dict[str, int]:
        """Counts of every place a ticket can be in, and of every outcome, in one instant (functions/control.lua)."""
        reply = await self._call("audit")
        return {reply[i].decode(): int(reply[i + 1]) for i in range(0, len(reply), 2)}

    # -- leadership -----------------------------------------------------------------------------------------------------

    async def lead(self, candidate: str, lease_s: float) -> int | None:
        """Take or renew the leadership of dataprep; the fencing number, or None when another leads."""
        return int(await self._call("lead", candidate, int(lease_s * 1000))) or None

    async def step_down(self, candidate: str) -> None:
        """Give the leadership up at once."""
        await self._call("step_down", candidate)

    async def attach_trainer(self) -> int:
        """The trainer's fencing number: older trainers are refused from now on."""
        return int(await self._call("attach_trainer"))

    # -- tickets --------------------------------------------------------------------------------------------------------

    async def issue(self, fence: int, cursor: int, tickets: Sequence[Ticket]) -> int:
        """Issue as many of `tickets`, which start at `cursor`, as slots are free. Returns how many."""
        args: list[Any] = []
        for ticket in tickets:
            args += (ticket.id, codec.encode(ticket))
        return int(await self._call("issue", fence, cursor, *args))

    async def claim(
        self,
        consumer: str,
        version: int,
        lease_s: float,
        count: int,
        scan: str = "0-0",
        adopt: bool = False,
        max_expiries: int = 16,
    ) -> tuple[str, list[Claim]]:
        """Claim up to `count` tickets for a pod that holds `version`. Returns the next scan position and the claims."""
        reply = await self._call("claim", consumer, version, int(lease_s * 1000), count, scan, int(adopt), max_expiries)
        claims = [read_claim(*reply[i : i + 4]) for i in range(1, len(reply), 4)]
        return reply[0].decode(), claims

    async def renew(self, consumer: str, claims: Sequence[Claim]) -> set[str]:
        """Renew leases; the entries that are lost."""
        args = [part for claim in claims for part in (claim.entry, claim.fence)]
        return {entry.decode() for entry in await self._call("renew", consumer, *args)}

    async def release(self, consumer: str, claim: Claim) -> bool:
        """Hand a ticket back; another pod may claim it at once."""
        return bool(await self._call("release", consumer, claim.entry, claim.fence))

    async def fail(self, consumer: str, claim: Claim, reason: str, max_attempts: int) -> bool:
        """Hand a ticket back after a failure, or bury it (True) after `max_attempts` of them."""
        args = (consumer, claim.entry, claim.fence, claim.ticket_id, claim.body, max_attempts, reason)
        return int(await self._call("fail", *args)) == 1

    async def submit(self, consumer: str, claim: Claim, header: Header, payload: bytes, ttl_s: int) -> bool:
        """Write the payload, then commit it with its header. False: the ticket was not held any more, nothing is stored.

        `payload` is an encoded `Payload`; it is written with an expiry that the commit takes away. Groups that are submitted
        at the same time travel together.
        """
        accepted = await self._submissions.ask(
            _Submission(
                ("SET", self.keys.payload(claim.payload), payload, "EX", ttl_s, "NX"),
                (consumer, claim.entry, claim.fence, claim.ticket_id, codec.encode(header)),
            )
        )
        if accepted == -1:
            raise StoreError(f"payload of ticket {claim.ticket_id} expired before its header arrived: raise replay.payload_ttl_s")
        return bool(accepted)

    async def _submit(self, groups: Sequence[_Submission]) -> list[int]:
        args = [arg for group in groups for arg in group.args]
        return (await self._send(*[group.write for group in groups], self._function("submit", *args)))[-1]

    async def save_partial(self, consumer: str, claim: Claim, data: bytes, ttl_s: int) -> bool:
        """Save the tokens so far of a ticket. False: it was not held any more."""
        return bool(await self._call("save_partial", consumer, claim.entry, claim.fence, claim.ticket_id, ttl_s, data))

    async def load_partial(self, ticket: str) -> bytes | None:
        """The tokens so far of a ticket that somebody began."""
        return await self._ask(self.client.get(self.keys.partial(ticket)))

    # -- headers and the replay table -----------------------------------------------------------------------------------

    async def read_headers(self, fence: int, count: int) -> list[HeaderEntry]:
        """Headers that are not settled, oldest first."""
        reply = await self._call("read_headers", fence, count)
        return [read_header(reply[i], reply[i + 1]) for i in range(0, len(reply), 2)]

    async def settle(self, fence: int, settlements: Sequence[Settlement], capacity: int, remover: str = "fifo") -> int:
        """Settle headers in one go; `remover` makes room in a full table. Returns how many were not settled before."""
        args: list[Any] = []
        for s in settlements:
            args += (s.item.entry, s.item.ticket, s.item.payload, s.action, s.seq, s.oldest, s.item.body)
        return int(await self._call("settle", fence, capacity, remover, *args))

    async def sweep(self, fence: int, groups: Sequence[str]) -> int:
        """Drop groups of the table that have become stale. Returns how many were still there."""
        return int(await self._call("sweep", fence, *groups)) if groups else 0

    async def outstanding(self) -> int | None:
        """Sequence of the oldest ticket that is issued and not settled."""
        first = await self._ask(self.client.zrange(self.keys.outstanding, 0, 0, withscores=True))
        return int(first[0][1]) if first else None

    async def outstanding_count(self) -> int:
        """How many tickets are issued and not settled."""
        return int(await self._ask(self.client.zcard(self.keys.outstanding)))

    async def oldest_groups(self, count: int) -> list[BufferedGroup]:
        """The first `count` groups of the table in order of issue."""
        found = await self._ask(self.client.zrange(self.keys.replay_order, 0, count - 1))
        names = [name.decode() for name in found]
        rows = await self._send(*[("HMGET", self.keys.group(name), "uses", "header") for name in names])
        return [
            BufferedGroup(name, int(uses), codec.decode(header, Header))
            for name, (uses, header) in zip(names, rows, strict=True)
            if header is not None  # it left between the two reads; to the leader, who alone takes groups out, none does
        ]

    # -- steps ----------------------------------------------------------------------------------------------------------

    async def prepare(self, fence: int, plan: StepPlan, ranks: Sequence[RankPlan], stale: Sequence[str], max_uses: int) -> None:
        """Write the plan of a step, draw its groups from the table and drop `stale` ones. Raises `OutOfOrder`."""
        args = [" ".join(stale), " ".join(plan.groups), codec.encode(plan), *map(codec.encode, ranks)]
        await self._call("prepare", fence, plan.step, max_uses, *args)

    async def plan(self, step: int) -> StepPlan | None:
        """The plan of a step, or None when it is not prepared or already retired."""
        raw = await self._ask(self.client.hget(self.keys.step(step), "plan"))
        return None if raw is None else codec.decode(raw, StepPlan)

    async def rank_plan(self, step: int, rank: int) -> RankPlan:
        """The rows of one rank."""
        raw = await self._ask(self.client.hget(self.keys.step(step), f"rank:{rank}"))
        if raw is None:
            raise StoreError(f"step {step} was planned without rank {rank}: start as many ranks as trainer.ranks says")
        return codec.decode(raw, RankPlan)

    async def payloads(self, names: Sequence[str]) -> dict[str, Payload]:
        """Payloads by name. A missing one is an error: its plan promises it."""
        pieces = [names[i : i + FETCHED_TOGETHER] for i in range(0, len(names), FETCHED_TOGETHER)]
        fetched: dict[str, Payload] = {}

        async def fetch(lane: int) -> None:
            for piece in pieces[lane::LANES]:
                values = await self._ask(self.client.mget([self.keys.payload(name) for name in piece]))
                for name, value in zip(piece, values, strict=True):
                    if value is None:
                        raise StoreError(
                            f"payload {name} is gone from Redis: is an eviction policy or another client deleting keys?"
                        )
                    fetched[name] = codec.decode(value, Payload)

        await asyncio.gather(*(fetch(lane) for lane in range(LANES)))
        return fetched

    async def commit(self, fence: int, step: int) -> bool:
        """Count a step as trained. False: it was committed before. Raises `OutOfOrder`, `Fenced`."""
        return bool(await self._call("commit", fence, step))

    async def publish(self, fence: int, version: int) -> bool:
        """The fleet holds `version`; the slots of its steps come free. False: it was published before."""
        return bool(await self._call("publish", fence, version))

    async def checkpointed(self, fence: int, step: int) -> None:
        """A checkpoint holds every step up to and including `step`."""
        await self._call("checkpointed", fence, step)

    async def retire(self) -> int:
        """Delete plans and payloads that a checkpoint covers. Returns how many steps were retired."""
        retired = 0
        while await self._call("retire"):
            retired += 1
        return retired

    # -- fleet and weight-sync rounds -------------------------------------------------------------------------------------

    async def beat(self, status: PodStatus, ttl_s: float) -> None:
        """Renew a pod's heartbeat and what it says of itself."""
        await self._call("beat", status.member, msgspec.json.encode(status), int(ttl_s * 1000))

    async def leave(self, status: PodStatus) -> None:
        """A pod leaves the fleet."""
        await self._call("leave", status.member, status.name)

    async def members(self, ttl_s: float) -> list[PodStatus]:
        """Pods heard of within `ttl_s`."""
        reply = await self._call("members", int(ttl_s * 1000))
        found = [_decoded(raw, PodStatus) for raw in reply[1::2]]
        return [status for status in found if status is not None]

    async def set_round(self, fence: int, round: Round) -> None:
        """Open or advance a weight-sync round."""
        await self._call("round", fence, round.attempt, msgspec.json.encode(round))

    async def round(self) -> tuple[Round | None, dict[str, tuple[str, str]]]:
        """The current round and its acknowledgements: member -> (stage, detail)."""
        raw = await self._ask(self.client.hgetall(self.keys.sync))
        if b"round" not in raw:
            return None, {}
        acks = {key.decode().removeprefix("ack:"): value.decode() for key, value in raw.items() if key.startswith(b"ack:")}
        return _decoded(raw[b"round"], Round), {k: (v.partition(" ")[0], v.partition(" ")[2]) for k, v in acks.items()}

    async def acknowledge(self, member: str, attempt: int, stage: str, detail: str = "") -> bool:
        """Acknowledge a stage of a round. False: the round is over."""
        return bool(await self._call("acknowledge", member, attempt, stage, detail))

    # -- the console's view ---------------------------------------------------------------------------------------------

    async def record(self, metrics: dict[str, float]) -> None:
        """Append the metrics of a step to the capped stream."""
        await self._send(("XADD", self.keys.metrics, "MAXLEN", "~", METRICS_KEPT, "*", "m", msgspec.json.encode(metrics)))

    async def metrics(self, after: str = "-", count: int = 1000) -> list[tuple[str, dict[str, float]]]:
        """Entries of the metrics stream after an entry id, oldest first."""
        first = after if after == "-" else f"({after}"
        entries = await self._ask(self.client.xrange(self.keys.metrics, first, "+", count))
        return [(entry.decode(), msgspec.json.decode(fields[b"m"])) for entry, fields in entries]

    async def dead_letters(self, count: int = 100) -> list[tuple[str, str]]:
        """The last dead letters: ticket and reason."""
        entries = await self._ask(self.client.xrevrange(self.keys.deadletter, count=count))
        return [(f[b"ticket"].decode(errors="replace"), f[b"reason"].decode(errors="replace")) for _, f in entries]

    async def listen(self) -> AsyncIterator[str]:
        """Topics that changed, as they change: `tickets`, `headers`, `steps`, `version`, `sync`, … A hint, never the truth."""
        async with self.client.pubsub(ignore_subscribe_messages=True) as channel:
            await self._ask(channel.subscribe(self.keys.bell))
            yield "connected"
            while True:
                message = await self._ask(channel.get_message(timeout=1.0))
                if message:
                    yield message["data"].decode()

    async def delete_run(self) -> None:
        """Delete every key of the run."""
        pattern = f"{self.keys.prefix.replace('{', '[{]').replace('}', '[}]')}:*"
        cursor = 0
        while True:
            cursor, found = await self._ask(self.client.scan(cursor, match=pattern, count=1000))
            if found:
                await self._send(("UNLINK", *found))
            if cursor == 0:
                return


def _decoded(raw: bytes | None, type: type[T]) -> T | None:
    """The JSON message, or None where the bytes are none: foreign bytes end no loop."""
    try:
        return None if raw is None else msgspec.json.decode(raw, type=type)
    except msgspec.MsgspecError:
        return None
