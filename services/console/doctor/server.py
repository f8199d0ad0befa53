"""Checks of Redis: reachability, version, durability, memory, clock and users."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.config import ConfigError, RunConfig
from services.console.doctor import Finding, fault, note, ok, told
from services.http.credentials import holds_users, redis_login, redis_password
from services.protocol.errors import StoreError
from services.runtime.redis_process import find_server
from services.store import Store
from services.store.acl import GRANTS
from services.store.client import ClusterNode, Login, ask_nodes, in_cluster
from services.store.payloads import SHARDS

SKEW_S = 1.0  # above this, logs and metrics of different machines cannot be compared; leases use the server's clock only
SLOW_S = 0.02  # for a round trip: each hand-over takes several
PINGS = 5
GIBIBYTE = 2**30
PAYLOAD_BYTES = 10  # per token in flight
TYPICAL_SHARE = 0.5  # of the memory: rewriting the append-only file may need as much again


@dataclass(frozen=True)
class Asked:
    """What a server reports about itself, and its round-trip time."""

    info: dict[str, Any]
    round_trip_s: float
    skew_s: float
    nodes: Sequence[ClusterNode] = ()
    """In a Redis Cluster: this node, and the others that hold parts of the run."""


async def server(config: RunConfig, url: str, password: str) -> AsyncIterator[Finding]:
    """Check the Redis at `url` or, if empty, the server that `grpo run` would start."""
    if not url:
        try:
            yield ok("Redis", f"the run's own server: {find_server()}")
        except StoreError as error:
            yield told("Redis", error)
        return
    try:
        asked = await _ask(config, url, login(config, password))
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


def login(config: RunConfig, password: str) -> Login:
    """Return the login of the server's default user if its password is known, else of a user whose password is stored here."""
    password = password or redis_password(config) or ""
    here = users_here(config)
    return redis_login(config, here[0]) if here and not password else Login(password, ca_file=config.redis.ca_file)


def users_here(config: RunConfig) -> list[str]:
    """Return the kinds of service whose passwords are in the folder `redis.password_file`: all on one machine, only its own in a
    pod.
    """
    return [kind for kind in GRANTS if holds_users(config) and (Path(config.redis.password_file) / kind).exists()]


async def _ask(config: RunConfig, url: str, login: Login) -> Asked:
    store = await Store.connect(url, config.run.name, login)
    try:
        await store.payloads.check()
        keys = [shard.keys.prefix for shard in store.payloads.shards]
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
    """Evaluate the server's report. Pure."""
    info, found = asked.info, []
    name = "Valkey" if "valkey_version" in info else "Redis"
    version = info.get("valkey_version") or info.get("redis_version")
    found.append(ok("Redis", f"{name} {version}, {1000 * asked.round_trip_s:.1f} ms round trip, no eviction"))
    if asked.round_trip_s > SLOW_S:
        found.append(note("Redis: latency", f"{1000 * asked.round_trip_s:.0f} ms per call", "run it close to the trainer"))
    if info.get("aof_enabled"):
        found.append(ok("Redis: durability", "append-only file on"))
    else:
        remedy = "set appendonly yes (with CONFIG SET and in its configuration file)"
        found.append(
            fault("Redis: durability", "append-only file off: a restart loses the run since its last checkpoint", remedy)
        )
    if info.get("aof_enabled") and info.get("aof_last_write_status", "ok") != "ok":
        found.append(fault("Redis: disk", "it cannot write its append-only file", "free space on its disk"))
    found += _judge_master("", info, config, asked.nodes[0].shards if asked.nodes else 0)
    detail = f"the clock of Redis is {asked.skew_s:+.3f} s off this machine's"
    if abs(asked.skew_s) > SKEW_S:
        found.append(fault("clock", detail, "synchronize both machines with NTP (chrony, systemd-timesyncd)"))
    else:
        found.append(ok("clock", detail))
    return found


def judge_node(node: ClusterNode, info: dict[str, Any]) -> Finding:
    """Judge whether a run is safe on a node other than the master, which is already judged. Pure."""
    what, wrong = f"Redis: {node}", dict[str, str]()
    if (policy := info.get("maxmemory_policy", "noeviction")) != "noeviction":
        wrong[f"maxmemory-policy {policy}"] = "maxmemory-policy noeviction"
    if not info.get("aof_enabled"):
        wrong["append-only file off"] = "appendonly yes"
    if not wrong:
        return ok(what, "no eviction, append-only file on")
    loses = "a restart may lose payloads" if node.role == "master" else "if a failover makes it the master, the run may be lost"
    detail = f"{' and '.join(wrong)}: {loses}"
    return fault(what, detail, f"set {' and '.join(wrong.values())} (with CONFIG SET and in its configuration file)")


def _judge_master(which: str, info: dict[str, Any], config: RunConfig, held: int) -> list[Finding]:
    """Judge the master that holds the run's index, or another (`which`) that holds `held` of its shards."""
    found = []
    if in_cluster(info) and not info.get("connected_slaves"):
        whose = f"the {which}, which holds shards of the run," if which else "the master that owns the run's slot"
        remedy = "add one; otherwise the run stops while that master is down"
        found.append(note("Redis: Cluster", f"{whose} has no replica", remedy))
    return [*found, _memory(f"Redis: memory of {which}" if which else "Redis: memory", info, config, held)]


def _memory(what: str, info: dict[str, Any], config: RunConfig, held: int) -> Finding:
    limit = int(info.get("maxmemory", 0)) or int(info.get("total_system_memory", 0))
    used = int(info.get("used_memory", 0))
    tokens = config.slots * config.sampling.group_size * (config.sampling.max_tokens + config.data.max_prompt_tokens)
    needed = tokens * PAYLOAD_BYTES * (held / SHARDS if in_cluster(info) else 1)
    used_of = f"{used / GIBIBYTE:.2f} of {limit / GIBIBYTE:.2f} GiB used"
    detail = f"{used_of}; the run's groups in flight need up to {needed / GIBIBYTE:.2f} GiB"
    if limit and used + needed > TYPICAL_SHARE * limit:
        remedy = "raise its maxmemory, or lower admission.prompts_per_step, admission.max_staleness or sampling.max_tokens"
        return fault(what, detail, remedy)
    return ok(what, detail)


async def _users(config: RunConfig, url: str) -> AsyncIterator[Finding]:
    """Check that the users whose passwords are stored here can log in."""
    if not holds_users(config):
        remedy = "create one per kind of service with grpo acl (docs/security.md)"
        yield note("Redis: users", "all services share one user", remedy)
        return
    let_in = []
    if not (here := users_here(config)):
        yield fault(
            "Redis: users",
            f"redis.password_file = {config.redis.password_file!r} contains no password",
            "mount one, or run grpo acl",
        )
    for kind in here:
        try:
            store = await Store.connect(url, config.run.name, redis_login(config, kind))
            await store.run.state()
            await store.close()
            let_in.append(kind)
        except (StoreError, ConfigError) as error:
            yield told(f"Redis: user {kind}", error)
    if let_in:
        yield ok("Redis: users", f"can log in: {', '.join(let_in)}")
