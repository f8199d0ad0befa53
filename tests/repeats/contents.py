"""The contents of a run in Redis, to compare before and after a call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.store import Store

CLOCKS = {"clock_ms", "leader_until_ms", "frozen_until_ms"}
"""Fields of the run's hash that contain times."""
BEATS = ("fleet", "fleet:claimers")
"""Sorted sets with times as scores."""
EVERYTHING = """
local read = {
  hash = function(key) return redis.call('HGETALL', key) end,
  zset = function(key) return redis.call('ZRANGE', key, 0, -1, 'WITHSCORES') end,
  list = function(key) return redis.call('LRANGE', key, 0, -1) end,
  stream = function(key) return redis.call('XRANGE', key, '-', '+') end,
  string = function(key) return redis.call('GET', key) end,
}
local found = {}
for _, key in ipairs(redis.call('KEYS', '*')) do
  if string.sub(key, 1, #ARGV[1]) == ARGV[1] then
    local kind, pending = redis.call('TYPE', key).ok, {}
    local groups = kind == 'stream' and redis.call('XINFO', 'GROUPS', key) or {}
    for _, group in ipairs(groups) do
      for _, entry in ipairs(redis.call('XPENDING', key, group[2], '-', '+', 1000)) do pending[#pending + 1] = entry end
    end
    found[#found + 1] = {key, kind, read[kind](key), pending}
  end
end
return found
"""
Contents = Mapping[str, Any]


async def contents(store: Store) -> Contents:
    """Return every key of the run with its value, without times; a stream's pending entries are `<stream>:pending`."""
    prefix = f"{store.keys.prefix}:"
    found: dict[str, Any] = {}
    for key, kind, value, pending in await store.client.eval(EVERYTHING, 0, prefix):
        name = key.decode().removeprefix(prefix)
        match kind:
            case b"hash":
                fields = dict(zip(value[::2], value[1::2], strict=True))
                found[name] = {field: of for field, of in fields.items() if name != "run" or field.decode() not in CLOCKS}
            case b"zset" if name in BEATS:
                found[name] = sorted(value[::2])
            case b"stream":
                found[name], found[f"{name}:pending"] = value, [entry[:2] for entry in pending]
            case _:
                found[name] = value
    return found


def changed(before: Contents, after: Contents) -> set[str]:
    """Return the names of changed keys, or `<key>.<field>` for hashes."""
    different: set[str] = set()
    for name in before.keys() | after.keys():
        was, now = before.get(name), after.get(name)
        if was == now:
            continue
        if isinstance(was or {}, dict) and isinstance(now or {}, dict):
            was, now = was or {}, now or {}
            fields = {field for field in was.keys() | now.keys() if was.get(field) != now.get(field)}
            different |= {f"{name}.{field.decode()}" for field in fields}
        else:
            different.add(name)
    return different
