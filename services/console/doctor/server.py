"""Looks at Redis: whether it is reached, what it is, how it keeps what it holds, its memory, its clock, its users."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.config import ConfigError, RunConfig
from services.console.doctor import Finding, fault, note, ok, told
from services.console.local.redis_server import find_server
from services.protocol.errors import StoreError
from services.protocol.shards import shards
from services.runtime.http.credentials import redis_login, redis_password
from services.store import Store
from services.store.acl import GRANTS
from services.store.connection.client import ClusterNode, Login, ask_nodes
from services.store.connection.cluster import in_cluster

SKEW_S = 1.0  # beyond, times in logs and metrics of different machines cannot be compared; leases go by the server's clock alone
SLOW_S = 0.02  # of a round trip: each hand-over takes some
PINGS = 5
GIBIBYTE = 2**30
PAYLOAD_BYTES = 10  # of a token that is under way
TYPICAL_SHARE = 0.5  # memory under way that a server should have room for twice, as an append-only file is rewritten


@dataclass(frozen=True)
class Asked:
    """What a server said of itself, and how long it took."""

    info: dict[str, Any]
    round_trip_s: float
    skew_s: float
    nodes: Sequence[ClusterNode] = ()
    """In a Cluster: itself, and the others on which the run is."""


async def server(config: RunConfig, url: str, password: str) -> AsyncIterator[Finding]:
    """The Redis at `url`; without one, the server that `grpo run` would start."""
    if not url:
        try:
            yield ok("Redis", f"the run's own server: {find_server()}")
        except StoreError as error:
            yield told("Redis", error)
        return
    try:
        asked = await _ask(config, url, _login(config, password))
    except (StoreError, ConfigError) as error:
        yield told("Redis", error)
        return
    for finding in judge(asked, config):
        yield finding
    for node in asked.nodes[1:]:
        if isinstance(node.said, StoreError):
            yield told(f"Redis: {node}", node.said)
            continue
        yield judge_node(node, node.said)
        if node.role == "master":
            for finding in _judge_master(str(node), node.said, config, node.shards):
                yield finding
    async for finding in _users(config, url):
        yield finding


def _login(config: RunConfig, password: str) -> Login:
    """The server's default user where its password is known, else one of the users whose passwords lie here."""
    password = password or redis_password(config) or ""
    here = users_here(config)
    return redis_login(config, here[0]) if here and not password else Login(password, ca_file=config.redis.ca_file)


def users_here(config: RunConfig) -> list[str]:
    """Kinds of service whose passwords lie in `redis.users_dir`: on one machine all, in a pod its own."""
    folder = Path(config.redis.users_dir)
    return [kind for kind in GRANTS if config.redis.users_dir and (folder / kind).exists()]


async def _ask(config: RunConfig, url: str, login: Login) -> Asked:
    store = await Store.connect(url, config.run.name, login)
    try:
        spread = config.redis.payload_shards
        if spread:
            await store.check_shards(spread)
        keys = [shard.prefix for shard in shards(config.run.name, spread)] if spread else []
        info = await store.client.info()
        trips = []
        for _ in range(PINGS):
            began = time.monotonic()
            seconds, microseconds = await store.client.time()
            trips.append(time.monotonic() - began)
        skew_s = seconds + microseconds / 1e6 - time.time()
        return Asked(info, min(trips), skew_s, await ask_nodes(url, login, store.keys.prefix, keys))
    finally:
        await store.close()


def judge(asked: Asked, config: RunConfig) -> list[Finding]:
    """What that means for a run. Pure."""
    info, found = asked.info, []
    name = "Valkey" if "valkey_version" in info else "Redis"
    version = info.get("valkey_version") or info.get("redis_version")
    found.append(ok("Redis", f"{name} {version}, {1000 * asked.round_trip_s:.1f} ms away, evicts nothing"))
    if asked.round_trip_s > SLOW_S:
        found.append(note("Redis: distance", f"{1000 * asked.round_trip_s:.0f} ms a call", "run it near the trainer"))
    if info.get("aof_enabled"):
        found.append(ok("Redis: durability", "append-only file on"))
    else:
        remedy = "set appendonly yes (CONFIG SET appendonly yes, and in its configuration)"
        found.append(fault("Redis: durability", "no append-only file: a restart loses the run since its last checkpoint", remedy))
    if info.get("aof_enabled") and info.get("aof_last_write_status", "ok") != "ok":
        found.append(fault("Redis: disk", "it cannot write its append-only file", "free space on its disk"))
    found += _judge_master("", info, config, asked.nodes[0].shards if asked.nodes else 0)
    detail = f"{asked.skew_s:+.3f} s against this machine"
    if abs(asked.skew_s) > SKEW_S:
        found.append(
            fault("clock", f"Redis' is {detail}", "let both machines take their time from NTP (chrony, systemd-timesyncd)")
        )
    else:
        found.append(ok("clock", f"Redis' is {detail}"))
    return found


def judge_node(node: ClusterNode, info: dict[str, Any]) -> Finding:
    """Whether a run is safe on another node than the master that was judged. Pure."""
    what, wrong = f"Redis: {node}", dict[str, str]()
    if (policy := info.get("maxmemory_policy", "noeviction")) != "noeviction":
        wrong[f"maxmemory-policy {policy}"] = "maxmemory-policy noeviction"
    if not info.get("aof_enabled"):
        wrong["no append-only file"] = "appendonly yes"
    if not wrong:
        return ok(what, "evicts nothing, append-only file on")
    loses = "a restart may lose payloads" if node.role == "master" else "a failover makes it the master, which may lose the run"
    detail = f"{' and '.join(wrong)}: {loses}"
    return fault(what, detail, f"set {' and '.join(wrong.values())} (CONFIG SET, and in its configuration)")


def _judge_master(which: str, info: dict[str, Any], config: RunConfig, held: int) -> list[Finding]:
    """Of the master that has the run's index, or of another that has `held` of its shards."""
    found = []
    if in_cluster(info) and not info.get("connected_slaves"):
        whose = f"the {which}, which has shards of the run," if which else "the master that owns the run's slot"
        remedy = "give it one, or the run stands still for as long as that master is away"
        found.append(note("Redis: Cluster", f"{whose} has no replica", remedy))
    return [*found, _memory(f"Redis: memory of {which}" if which else "Redis: memory", info, config, held)]


def _memory(what: str, info: dict[str, Any], config: RunConfig, held: int) -> Finding:
    limit = (config.redis.max_memory_mib << 20) or int(info.get("maxmemory", 0)) or int(info.get("total_system_memory", 0))
    used = int(info.get("used_memory", 0))
    tokens = config.slots * config.sampling.group_size * (config.sampling.max_tokens + config.data.max_prompt_tokens)
    needed = tokens * PAYLOAD_BYTES * (held / config.redis.payload_shards if config.redis.payload_shards else 1)
    used_of = f"{used / GIBIBYTE:.2f} of {limit / GIBIBYTE:.2f} GiB used"
    detail = f"{used_of}; a run's groups under way take {needed / GIBIBYTE:.2f} GiB at most"
    if limit and used + needed > TYPICAL_SHARE * limit:
        remedy = "raise its maxmemory, or lower admission.prompts_per_step, admission.max_staleness or sampling.max_tokens"
        return fault(what, detail, remedy)
    return ok(what, detail)


async def _users(config: RunConfig, url: str) -> AsyncIterator[Finding]:
    """Whether the users whose passwords lie here are let in."""
    if not config.redis.users_dir:
        yield note("Redis: users", "all services are one user", "grpo acl makes one for each kind of service (docs/security.md)")
        return
    let_in = []
    if not (here := users_here(config)):
        yield fault(
            "Redis: users", f"redis.users_dir = {config.redis.users_dir!r} holds no password", "mount or make one: grpo acl"
        )
    for kind in here:
        try:
            store = await Store.connect(url, config.run.name, redis_login(config, kind))
            await store.state()
            await store.close()
            let_in.append(kind)
        except (StoreError, ConfigError) as error:
            yield told(f"Redis: user {kind}", error)
    if let_in:
        yield ok("Redis: users", f"let in: {', '.join(let_in)}")
