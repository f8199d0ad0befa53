"""The typed store: the only maker of Redis clients, and one method per Redis Function.

Guarantees: every hand-over is one atomic call; every call may be repeated after a lost reply without a second effect, so
the client retries by itself through a restart of the server. What a method cannot do it says with a `StoreError`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import msgspec
import redis.asyncio as aioredis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import AuthenticationError, ConnectionError, RedisError, ResponseError, TimeoutError

from services.protocol import codec
from services.protocol.errors import DifferentRun, Fenced, OutOfOrder, StoreError
from services.protocol.functions import library
from services.protocol.keys import Keys
from services.protocol.messages import WIRE, Header, Payload, PodStatus, RankPlan, Round, StepPlan, Ticket

OLDEST_SERVER = (7, 0)  # the first Redis with Functions
CONNECT_TIMEOUT_S = 5.0
REPLY_TIMEOUT_S = 60.0  # longer than an AOF rewrite was ever seen to stall a reply
RETRIES = 12  # back-off 0.05 s doubling to 1 s: about 9 s, a restart of a server
METRICS_KEPT = 100_000  # entries of the metrics stream, some 50 MB


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


class Store:
    """A run's state in Redis. Make one with `connect`; close it with `close`."""

    def __init__(self, client: aioredis.Redis, keys: Keys) -> None:
        self.client = client
        self.keys = keys
        self._library, self._code = library()

    @classmethod
    async def connect(cls, url: str, run: str, password: str | None = None) -> Self:
        """Connect, check the server and load the functions. Raises `StoreError` in seconds when any of it fails."""
        try:
            client = make_client(url, password)
        except ValueError as error:
            raise StoreError(f"redis.url = {url!r} is not a Redis address: {error}; use redis://host:port/0") from None
        store = cls(client, Keys(run))
        try:
            await store._check_server(url)
            await store._load_functions()
        except StoreError:
            await client.aclose()
            raise
        except RedisError as error:
            await client.aclose()
            raise unusable(url, error) from None
        return store

    async def close(self) -> None:
        """Close the connections."""
        await self.client.aclose()

    async def _check_server(self, url: str) -> None:
        probe = make_client(url, self.client.connection_pool.connection_kwargs.get("password"), retries=2)
        try:
            info = await probe.info("server")
            policy = (await probe.config_get("maxmemory-policy")).get(b"maxmemory-policy", b"noeviction").decode()
        except ResponseError:  # CONFIG may be forbidden by the provider; then the policy cannot be checked
            policy = "noeviction"
        finally:
            await probe.aclose()
        version = str(info.get("valkey_version") or info["redis_version"])
        if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_SERVER:
            raise StoreError(f"Redis at {url} is {version}, which has no Functions: run Redis 7.0 or newer, or Valkey")
        if policy != "noeviction":
            raise StoreError(
                f"Redis at {url} has maxmemory-policy {policy}, which may delete a run's state: set it to noeviction"
            )

    async def _load_functions(self) -> None:
        try:
            await self.client.execute_command("FUNCTION", "LOAD", self._code)
        except ResponseError as error:
            if "already exists" not in str(error):
                raise

    async def _call(self, function: str, *args: Any) -> Any:
        try:
            return await self.client.execute_command("FCALL", f"{self._library}_{function}", 1, self.keys.prefix, *args)
        except ResponseError as error:
            text = str(error)
            if "Function not found" in text:  # the server was replaced by an empty one
                await self._load_functions()
                return await self._call(function, *args)
            kind, _, rest = text.partition(" ")
            match kind:
                case "FENCED":
                    raise Fenced(rest) from None
                case "OUTOFORDER":
                    raise OutOfOrder(rest) from None
                case "DIFFERENT":
                    raise DifferentRun(f"run {self.keys.name!r} exists with another {rest}: choose another run.name") from None
                case _:
                    raise

    # -- the run ------------------------------------------------------------------------------------------------------

    async def create(self, config: str, dataset: str, steps: int, slots: int) -> bool:
        """Create the run, or attach to the same one (False). Raises `DifferentRun` when the name is taken."""
        return bool(await self._call("create", WIRE, config, dataset, steps, slots))

    async def state(self) -> RunState | None:
        """The run's state, or None when it was not created yet."""
        raw = {key.decode(): value.decode() for key, value in (await self.client.hgetall(self.keys.run)).items()}
        if not raw:
            return None
        if int(raw["wire"]) != WIRE:
            raise DifferentRun(
                f"run {self.keys.name!r} has wire version {raw['wire']}, this program speaks {WIRE}: use the matching one"
            )
        numbers = (
            "steps",
            "slots",
            "slots_used",
            "cursor",
            "published_version",
            "prepared_step",
            "committed_step",
            "checkpointed_step",
        )
        return RunState(
            **{name: int(raw[name]) for name in numbers},
            leader=raw.get("leader", ""),
            paused={key.removeprefix("paused:"): value for key, value in raw.items() if key.startswith("paused:")},
            stopping=raw.get("stopping", ""),
            finished=raw.get("finished", ""),
            dataset=raw["dataset"],
            config=raw["config"],
        )

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
        claims = [_claim(*reply[i : i + 4]) for i in range(1, len(reply), 4)]
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

        `payload` is an encoded `Payload`; it is written with an expiry that the commit takes away.
        """
        async with self.client.pipeline(transaction=False) as pipe:
            pipe.set(self.keys.payload(claim.payload), payload, ex=ttl_s, nx=True)
            pipe.execute_command(
                "FCALL", f"{self._library}_submit", 1, self.keys.prefix,
                consumer, claim.entry, claim.fence, claim.ticket_id, codec.encode(header),
            )  # fmt: skip
            _, accepted = await pipe.execute()
        if accepted == -1:
            raise StoreError(f"payload of ticket {claim.ticket_id} expired before its header arrived: raise replay.payload_ttl_s")
        return bool(accepted)

    async def save_partial(self, consumer: str, claim: Claim, data: bytes, ttl_s: int) -> bool:
        """Save the tokens so far of a ticket. False: it was not held any more."""
        return bool(await self._call("save_partial", consumer, claim.entry, claim.fence, claim.ticket_id, ttl_s, data))

    async def load_partial(self, ticket: str) -> bytes | None:
        """The tokens so far of a ticket that somebody began."""
        return await self.client.get(self.keys.partial(ticket))

    # -- headers and the replay table -----------------------------------------------------------------------------------

    async def read_headers(self, fence: int, count: int) -> list[HeaderEntry]:
        """Headers that are not settled, oldest first."""
        reply = await self._call("read_headers", fence, count)
        return [_header_entry(reply[i], reply[i + 1]) for i in range(0, len(reply), 2)]

    async def settle(self, fence: int, settlements: Sequence[Settlement], capacity: int) -> int:
        """Settle headers in one go. Those settled before are passed over; returns how many were not."""
        args: list[Any] = []
        for s in settlements:
            args += (s.item.entry, s.item.ticket, s.item.payload, s.action, s.seq, s.oldest, s.item.body)
        return int(await self._call("settle", fence, capacity, *args))

    async def sweep(self, fence: int, groups: Sequence[str]) -> int:
        """Drop groups of the table that have become stale. Returns how many were still there."""
        return int(await self._call("sweep", fence, *groups)) if groups else 0

    async def outstanding(self) -> int | None:
        """Sequence of the oldest ticket that is issued and not settled."""
        first = await self.client.zrange(self.keys.outstanding, 0, 0, withscores=True)
        return int(first[0][1]) if first else None

    async def outstanding_count(self) -> int:
        """How many tickets are issued and not settled."""
        return int(await self.client.zcard(self.keys.outstanding))

    async def oldest_groups(self, count: int) -> list[BufferedGroup]:
        """The first `count` groups of the table in order of issue."""
        names = [name.decode() for name in await self.client.zrange(self.keys.replay_order, 0, count - 1)]
        async with self.client.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.hmget(self.keys.group(name), "uses", "header")
            rows = await pipe.execute()
        return [
            BufferedGroup(name, int(uses), codec.decode(header, Header)) for name, (uses, header) in zip(names, rows, strict=True)
        ]

    # -- steps ----------------------------------------------------------------------------------------------------------

    async def prepare(self, fence: int, plan: StepPlan, ranks: Sequence[RankPlan], stale: Sequence[str], max_uses: int) -> None:
        """Write the plan of a step, draw its groups from the table and drop `stale` ones. Raises `OutOfOrder`."""
        args = [" ".join(stale), " ".join(plan.groups), codec.encode(plan), *map(codec.encode, ranks)]
        await self._call("prepare", fence, plan.step, max_uses, *args)

    async def plan(self, step: int) -> StepPlan | None:
        """The plan of a step, or None when it is not prepared or already retired."""
        raw = await self.client.hget(self.keys.step(step), "plan")
        return None if raw is None else codec.decode(raw, StepPlan)

    async def rank_plan(self, step: int, rank: int) -> RankPlan:
        """The rows of one rank."""
        raw = await self.client.hget(self.keys.step(step), f"rank:{rank}")
        if raw is None:
            raise StoreError(f"step {step} was planned without rank {rank}: start as many ranks as trainer.ranks says")
        return codec.decode(raw, RankPlan)

    async def payloads(self, names: Sequence[str]) -> dict[str, Payload]:
        """Payloads by name. A missing one is an error: its plan promises it."""
        values = await self.client.mget([self.keys.payload(name) for name in names]) if names else []
        missing = [name for name, value in zip(names, values, strict=True) if value is None]
        if missing:
            raise StoreError(
                f"payloads {', '.join(missing[:3])} are gone from Redis: is an eviction policy or another client deleting keys?"
            )
        return {name: codec.decode(value, Payload) for name, value in zip(names, values, strict=True)}

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
        return [msgspec.json.decode(raw, type=PodStatus) for raw in reply[1::2]]

    async def set_round(self, fence: int, round: Round) -> None:
        """Open or advance a weight-sync round."""
        await self._call("round", fence, round.attempt, msgspec.json.encode(round))

    async def round(self) -> tuple[Round | None, dict[str, tuple[str, str]]]:
        """The current round and its acknowledgements: member -> (stage, detail)."""
        raw = await self.client.hgetall(self.keys.sync)
        if b"round" not in raw:
            return None, {}
        acks = {key.decode().removeprefix("ack:"): value.decode() for key, value in raw.items() if key.startswith(b"ack:")}
        return msgspec.json.decode(raw[b"round"], type=Round), {
            k: (v.partition(" ")[0], v.partition(" ")[2]) for k, v in acks.items()
        }

    async def acknowledge(self, member: str, attempt: int, stage: str, detail: str = "") -> bool:
        """Acknowledge a stage of a round. False: the round is over."""
        return bool(await self._call("acknowledge", member, attempt, stage, detail))

    # -- the console's view ---------------------------------------------------------------------------------------------

    async def record(self, metrics: dict[str, float]) -> None:
        """Append the metrics of a step to the capped stream."""
        await self.client.xadd(self.keys.metrics, {"m": msgspec.json.encode(metrics)}, maxlen=METRICS_KEPT, approximate=True)

    async def metrics(self, after: str = "-", count: int = 1000) -> list[tuple[str, dict[str, float]]]:
        """Entries of the metrics stream after an entry id, oldest first."""
        entries = await self.client.xrange(self.keys.metrics, after if after == "-" else f"({after}", "+", count)
        return [(entry.decode(), msgspec.json.decode(fields[b"m"])) for entry, fields in entries]

    async def dead_letters(self, count: int = 100) -> list[tuple[str, str]]:
        """The last dead letters: ticket and reason."""
        entries = await self.client.xrevrange(self.keys.deadletter, count=count)
        return [(f[b"ticket"].decode(errors="replace"), f[b"reason"].decode(errors="replace")) for _, f in entries]

    async def listen(self) -> AsyncIterator[str]:
        """Topics that changed, as they change: `tickets`, `headers`, `steps`, `version`, `sync`, … A hint, never the truth."""
        async with self.client.pubsub(ignore_subscribe_messages=True) as channel:
            await channel.subscribe(self.keys.bell)
            yield "connected"
            while True:
                message = await channel.get_message(timeout=1.0)
                if message:
                    yield message["data"].decode()

    async def delete_run(self) -> None:
        """Delete every key of the run."""
        async for key in self.client.scan_iter(match=f"{self.keys.prefix.replace('{', '[{]').replace('}', '[}]')}:*", count=1000):
            await self.client.unlink(key)


def make_client(url: str, password: str | None = None, retries: int = RETRIES) -> aioredis.Redis:
    """The one place where a Redis client is made: binary replies, bounded waits, bounded retries."""
    return aioredis.Redis.from_url(
        url,
        password=password,
        socket_connect_timeout=CONNECT_TIMEOUT_S,
        socket_timeout=REPLY_TIMEOUT_S,
        socket_keepalive=True,
        health_check_interval=15,
        retry=Retry(ExponentialBackoff(cap=1.0, base=0.05), retries),
        retry_on_error=[ConnectionError, TimeoutError],
    )


def unusable(url: str, error: RedisError) -> StoreError:
    """A one-line account of why a server cannot be used."""
    if isinstance(error, AuthenticationError) or "NOAUTH" in str(error) or "WRONGPASS" in str(error):
        return StoreError(f"Redis at {url} refused the password: set redis.password_file or GRPO_REDIS_PASSWORD")
    if isinstance(error, ConnectionError | TimeoutError):
        return StoreError(f"Redis at {url} cannot be reached ({error}): is it running, and is redis.url right?")
    return StoreError(f"Redis at {url} cannot be used: {error}")


def _claim(entry: bytes, fence: int, ticket_id: bytes, body: bytes) -> Claim:
    try:
        ticket = codec.decode(body, Ticket)
    except codec.CorruptMessage:
        ticket = None
    return Claim(entry.decode(), fence, ticket_id.decode(), body, ticket)


def _header_entry(entry: bytes, fields: list[bytes]) -> HeaderEntry:
    named = dict(zip(fields[::2], fields[1::2], strict=False))
    body = named.get(b"body", b"")
    ticket, payload = (named.get(name, b"").decode(errors="replace") for name in (b"ticket", b"payload"))
    try:
        header, fault = codec.decode(body, Header), ""
        if header.ticket != ticket:
            header, fault = None, f"header names ticket {header.ticket}"
    except codec.CorruptMessage as error:
        header, fault = None, str(error)
    return HeaderEntry(entry.decode(), ticket, payload, body, header, fault)
