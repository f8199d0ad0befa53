"""Finished groups and the replay table (functions/replay.lua, functions/replay_table.lua)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from services.protocol import codec
from services.protocol.messages import Header
from services.store.batching import pieces
from services.store.facet import Facet, named, ordinal
from services.store.records import BufferedGroup, HeaderEntry, PassRate, Settlement, SweptTable, read_header

REWEIGHED_TOGETHER = 250  # groups in one call: a millisecond of the server's time
SETTLED_TOGETHER = 64  # headers in one call, likewise


class ReplayTable(Facet):
    """Settles headers into the replay table, and reads and changes the table."""

    async def read_headers(self, fence: int, count: int) -> list[HeaderEntry]:
        """Return headers that are not settled, oldest first."""
        reply = await self._redis.call("read_headers", fence, count)
        return [read_header(reply[i], reply[i + 1]) for i in range(0, len(reply), 2)]

    async def settle(self, fence: int, settlements: Sequence[Settlement]) -> int:
        """Settle headers, some in one call; a full table evicts first. Returns how many were not settled before."""
        calls: list[tuple[Any, ...]] = []
        for piece in pieces(settlements, SETTLED_TOGETHER) if settlements else [()]:  # also without any: it may raise `Fenced`
            args: list[Any] = []
            for s in piece:
                kept = ("", "", "") if s.rate is None else (s.rate[0], float(s.rate[1]), float(s.rate[2]))
                args += (s.item.entry, s.item.ticket, s.item.payload, s.action, s.oldest, s.item.body)
                args += (float(s.weight), float(s.variate), *kept)
            calls.append(self._redis.function("settle", fence, *args))
        return sum(map(int, await self._redis.send(*calls)))

    async def sweep_and_peek(self, fence: int, oldest_fresh: int, wanted: int, gaps_passed: int = 0) -> SweptTable:
        """Drop groups with a version below `oldest_fresh` as stale, then peek.

        Returns the `wanted` first groups by the sampler, and the filtered ones beyond the first `gaps_passed`, at most as many as
        there are slots.
        """
        stale = 0
        while True:  # a call drops at most a few hundred
            counts, uses, gaps, first = await self._redis.call("sweep_and_peek", fence, max(oldest_fresh, 0), wanted, gaps_passed)
            sizes = {name: int(count) for name, count in named(counts).items()}
            stale += sizes["stale"]
            if not sizes["stale"]:
                break
        ahead = [(first[i].decode(), int(first[i + 1]), float(first[i + 2])) for i in range(0, len(first), 3)]
        return SweptTable(
            **{**sizes, "stale": stale},
            uses={int(uses[i]): int(uses[i + 1]) for i in range(0, len(uses), 2)},
            gaps=tuple(map(int, gaps)),
            first=tuple((group, seq) for group, seq, _ in ahead),
            weights={group: weight for group, _, weight in ahead},
        )

    async def groups(self, names: Sequence[str]) -> list[BufferedGroup]:
        """Return groups of the table by name, in that order, omitting those that are missing."""
        if not names:
            return []
        rows = await self._redis.send(*[("HMGET", self._keys.group(name), "uses", "header") for name in names])
        return [
            BufferedGroup(name, int(uses), codec.decode(header, Header))
            for name, (uses, header) in zip(names, rows, strict=True)
            if header is not None
        ]

    async def reweigh(self, fence: int, weights: Mapping[str, float]) -> int:
        """Give groups new weights, 0..1e9, from the trainer. Skips groups that have left the table.

        Returns how many were still there.
        """
        pairs = [(group, float(weight)) for group, weight in weights.items()]
        calls = [self._redis.function("reweigh", fence, ordinal(), *chain(*piece)) for piece in pieces(pairs, REWEIGHED_TOGETHER)]
        return sum(map(int, await self._redis.send(*calls))) if calls else 0

    async def rescale(self, fence: int, base: int, new_base: int, factor: float) -> int:
        """Multiply all weights by `factor`, once, when weights by recency become relative to `new_base`. Returns how many.

        If another leader began to rescale, that is completed instead, so the new base may differ: read it again.
        """
        scaled, going = 0, 1
        while going:  # a call rescales a few hundred
            groups, going = await self._redis.call("rescale", fence, base, new_base, float(factor))
            scaled += int(groups)
        return scaled

    async def recency_base(self) -> int:
        """Return the policy version that weights by recency are relative to."""
        return int(await self._redis.ask(self._redis.client.hget(self._keys.replay_state, "base")) or 0)

    async def pass_over(self, fence: int, gaps_until: int) -> None:
        """Forget filtered groups up to an issue sequence: their step had nothing to train on."""
        await self._redis.call("pass_over", fence, ordinal(), gaps_until)

    async def rates(self) -> dict[int, PassRate]:
        """Return the settled group that counts for each dataset row, if pass rates are kept."""
        raw = await self._redis.ask(self._redis.client.hgetall(self._keys.rates))
        parted = ((int(row), value.split(b" ")) for row, value in raw.items())
        return {row: PassRate(int(seq), float(rate)) for row, (seq, rate, _) in parted}
