"""The Redis users of a run, one per kind of service: the permissions of each, and the access list that grants them. Pure.

Guarantees: a user may call the functions that its service calls, may send the commands of those functions and touch their keys
(Redis checks a function against the permissions of its caller), and may read what its service reads; nothing else, and no other
run. A function that was not granted fails at its first command that is not allowed, because Redis has no permissions on single
functions. Only users that may load functions can change them: `default` of our own server, dataprep and the trainer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from services.protocol.keys import Keys, user_name
from services.store.functions.footprint import footprints

_CONNECTING = ("auth", "hello", "ping", "select", "client|setname", "info", "time", "fcall", "cluster|slots")
_LISTENING = ("subscribe", "unsubscribe", "publish")
_NOTIFICATIONS = ":notifications"  # names channels, not keys
_TOGETHER = ("multi", "exec", "discard")
_LOADING = ("function|load",)
_LOOKING = (
    "get", "mget", "hget", "hmget", "hgetall", "zrange", "zscore", "zmscore", "zcard", "hlen", "getbit",
    "xrange", "xrevrange", "xlen", "xpending",
)  # fmt: skip
"""Functions that inspection calls (store/inspection.py, store/deadletters.py)."""
_COPYING = (*_LOOKING, "scan", "hscan", "lrange")
_RESTORING = ("hset", "rpush", "set", "xadd", "xdel", "zadd")
"""Commands that `restore_write` may be given."""
_WAYS = {"reads": "%R~", "writes": "~"}
_POD = ("beat", "leave", "members", "desire")
"""Functions of every service: its heartbeat, and the requests to its endpoints."""


@dataclass(frozen=True)
class Grant:
    """Permissions of one kind of service: functions of the library, additional commands, and keys below the run's prefix."""

    functions: tuple[str, ...]
    commands: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    """Keys read by its own commands; those of functions are found in their code."""
    writes: tuple[str, ...] = ()
    everything: bool = field(default=False, kw_only=True)
    """Whether it writes every key of the run, as a restore to a checkpoint requires."""
    pod: bool = field(default=True, kw_only=True)
    """Whether it is a pod of the run, with everything that every pod does."""
    shards: Literal["", "reads", "writes"] = field(default="", kw_only=True)
    """Access to payloads in shards (store/payloads.py)."""


GRANTS: dict[str, Grant] = {
    "generator": Grant(
        (
            "claim", "renew", "release", "fail", "submit", "save_partial", "acknowledge", "round_of", "eval_volunteer",
            "eval_resign",
        ),
        ("hgetall", "get", "set", "zadd"), reads=(":run",), writes=(":payload:*", ":partial:*"), shards="writes",
    ),
    "environment": Grant(
        ("claim", "renew", "release", "fail", "submit", "commit_turn", "restart_rollout"),
        ("hgetall", "get", "set", "zadd"), reads=(":run", ":turns:*"), writes=(":payload:*",), shards="writes",
    ),
    "dataprep": Grant(
        (
            "create", "set_steps", "lead", "step_down", "issue", "issue_again", "read_headers", "settle", "sweep_and_peek",
            "rescale", "pass_over", "prepare", "pause_failing", "audit", "requeue", "eval_open", "eval_skip",
            "eval_look", "eval_close",
        ),
        (*_LOOKING, *_LOADING, "unlink", "zrem"), reads=(":*",), shards="writes",
    ),
    "trainer": Grant(
        (
            "attach_trainer", "commit", "discard_damaged", "publish", "checkpointed", "retire", "reweigh", "record", "round",
            "audit", "eval_look", "snapshot_begin", "snapshot_hold", "snapshot_end", "restore_begin", "restore_write",
            "restore_delete", "restore_end",
        ),
        (*_COPYING, *_RESTORING, *_LOADING, "zrem"), everything=True, shards="writes",
    ),
    "tracker": Grant(
        ("log_samples",), ("hgetall", "hmget", "mget", "xrange", "xrevrange"),
        reads=(":run", ":metrics", ":evaluations", ":step:*", ":group:*", ":payload:*", ":logprob_gaps:*"), shards="reads",
    ),
    "console": Grant(("audit", "requeue", "eval_look"), _LOOKING, reads=(":*",), shards="reads"),
    "web": Grant(("audit", "requeue", "eval_look"), _LOOKING, reads=(":*",), shards="reads"),
    "scaler": Grant((), ("hgetall",), reads=(":run",)),
    "autoscaler": Grant((), ("xinfo|groups",), reads=(":run", ":tickets"), pod=False),
}  # fmt: skip
"""Grants by kind of service. `console` watches and controls a run from outside: `grpo status`, `inspect`, `pause`. `autoscaler`
is a cluster's (KEDA), which counts unclaimed tickets.
"""


def rules(run: str, kind: str) -> list[str]:
    """Return that user's permissions in the format of `ACL SETUSER`: commands, keys and channels, without a password."""
    grant, keys = GRANTS[kind], Keys(run)
    prints = [footprints()[name] for name in (*(_POD if grant.pod else ()), *grant.functions)]
    commands = {*_CONNECTING, *_LISTENING, *_TOGETHER, *grant.commands, "hgetall"}.union(*(each.commands for each in prints))
    writes = {":*"} if grant.everything else set(grant.writes).union(*(each.writes for each in prints))
    writes = {key for key in writes if not key.startswith(_NOTIFICATIONS)}
    reads = set[str]() if grant.everything else set(grant.reads).union(*(each.reads for each in prints)) - writes
    return [
        "resetchannels",
        f"&{keys.notifications('*')}",
        "resetkeys",
        f"~{keys.prefix}",
        *(f"~{keys.prefix}{key}" for key in sorted(writes)),
        *(f"%R~{keys.prefix}{key}" for key in sorted(reads)),
        *([f"{_WAYS[grant.shards]}{Keys(f'{run}/*').prefix}*"] if grant.shards else []),
        "-@all",
        *(f"+{command}" for command in sorted(commands)),
    ]


def users(run: str, passwords: Mapping[str, str]) -> list[str]:
    """Return a line of an access list for each kind of service in `passwords`; it contains only their digests."""
    return [
        " ".join(("user", user_name(run, kind), "reset", "on", f"#{digest(password)}", *rules(run, kind)))
        for kind, password in passwords.items()
    ]


def access_list(run: str, administrator: str, passwords: Mapping[str, str]) -> str:
    """Return a server's whole access list: the default user, who may do everything with the password `administrator`, and the
    run's users.
    """
    everything = f"user default reset on #{digest(administrator)} ~* &* +@all"
    return "".join(f"{line}\n" for line in (everything, *users(run, passwords)))


def digest(password: str) -> str:
    """Return a password as an access list stores it: SHA-256, in hexadecimal."""
    return hashlib.sha256(password.encode()).hexdigest()
