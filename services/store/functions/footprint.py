"""The commands that a Redis Function sends and the keys that it touches, read from its code. Pure.

Guarantees: every command and key in a function, or in a helper that it may call, is named; a key composed of a part and a
variable is named by its part and `*`; a key counts as written unless every command it appears in only reads. Redis checks a
function against the permissions of its caller, so this is what the caller must be allowed to do (services/store/acl.py).
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from services.store.functions import FILES, SHARED

_BLOCK = re.compile(r"^(?:local function (\w+)|local (\w+)(?:, \w+)* =|register(?:_leader|_trainer)?\('(\w+)')")
_COMMAND = re.compile(r"(?:redis\.call\(|call_over\(\w+, )'([A-Z]+)'(?:, '([A-Z]+)')?")
_KEY = re.compile(r"'(:[a-z:]+)'( \.\.)?")
_READ = re.compile(r"redis\.call\('([A-Z]+)', prefix \.\. '(:[a-z:]+)'( \.\.)?")
_READING = re.compile(
    "EXISTS|GET|GETBIT|HEXISTS|HGET|HGETALL|HLEN|HMGET|LRANGE|TTL|XLEN|XPENDING|XRANGE|XREVRANGE|ZCARD|ZCOUNT|ZRANGE|"
    "ZRANGEBYSCORE|ZREVRANGE|ZSCORE"
)
_WORD = re.compile(r"\w+")
_CONTAINERS = ("XGROUP",)  # commands whose first argument selects a subcommand


@dataclass(frozen=True)
class Footprint:
    """What a function does; commands as an access list writes them."""

    commands: frozenset[str]
    writes: frozenset[str]
    """Keys below the run's prefix, `:run` or `:step:*`."""
    reads: frozenset[str]
    """Keys that it reads and never writes."""


@cache
def footprints() -> dict[str, Footprint]:
    """Return the footprint of every function of the library, by name."""
    folder = files("services.store.functions")
    shared: dict[str, str] = {}
    for name in SHARED:
        shared |= _blocks((folder / f"{name}.lua").read_text())
    found: dict[str, Footprint] = {}
    for name in FILES:
        blocks = shared | _blocks((folder / f"{name}.lua").read_text())
        found |= {block[1:]: _footprint(blocks, block) for block in blocks if block.startswith("@")}
    return found


def _blocks(code: str) -> dict[str, str]:
    """Return the parts of a file by the names that others use; registered functions as `@<name>`."""
    blocks: dict[str, str] = {}
    current = ""
    for line in code.splitlines():
        if line.startswith("--"):
            continue
        if begins := _BLOCK.match(line):
            helper, constant, registered = begins.groups()
            current = f"@{registered}" if registered else helper or constant
            blocks[current] = ""
        if current:
            blocks[current] += line.partition(" -- ")[0] + "\n"
    return blocks


def _footprint(blocks: dict[str, str], start: str) -> Footprint:
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting += [word for word in _WORD.findall(blocks[name]) if word in blocks]
    text = "\n".join(blocks[name] for name in sorted(seen))
    commands = {_command(*match.groups()) for match in _COMMAND.finditer(text)}
    everywhere = Counter(_key(*match.groups()) for match in _KEY.finditer(text))
    reading = Counter(_key(name, joined) for command, name, joined in _READ.findall(text) if _READING.fullmatch(command))
    reads = {key for key in everywhere if everywhere[key] == reading[key]}
    return Footprint(frozenset(commands), frozenset(everywhere.keys() - reads), frozenset(reads))


def _command(name: str, first: str | None) -> str:
    return f"{name}|{first}".lower() if name in _CONTAINERS and first else name.lower()


def _key(name: str, joined: str | None) -> str:
    return f"{name}*" if joined or name.endswith(":") else name
