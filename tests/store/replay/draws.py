"""Make many draws at once, for tests of probabilities.

100,000 draws on the real path would take minutes. So the library is loaded again under another name, with an extra function
that calls the product's draw in a loop. The variates also come from the product, from services/groups/replay_weights.py.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from services.groups import replay_weights as replay
from services.store import Store
from services.store.functions import library
from tests.store.replay.tables import Entry, fill
from tests.support import flow

DRAW_MANY = """
do
register('draw_many', {'wanted', POSITIVE, 'variates', TEXT}, function(prefix, args)
  local t, k, at, drawn = open_table(prefix), tonumber(args[1]), 1, {}
  while at <= #args[2] do
    local groups, variates = FIRST[t.sampler](t, k), {}
    for i = 1, #groups do variates[i], at = struct.unpack('<d', args[2], at) end
    ring_clocks(t, groups, variates)
    for _, group in ipairs(groups) do drawn[#drawn + 1] = group end
  end
  close_table(t)
  return table.concat(drawn, ' ')
end)
end
"""
TOGETHER = 10_000  # draws in one call, about 0.1 s


@dataclass
class Bench:
    """A table, and a way to make many draws from it."""

    store: Store
    team: flow.Team
    name: str
    used: int = 0

    async def draws(self, count: int, k: int = 1) -> np.ndarray:
        """Return the indices [count / k, k] of the groups drawn, in steps of k."""
        drawn: list[bytes] = []
        while len(drawn) < count:
            n = min(count - len(drawn), TOGETHER // k * k)
            variates = [replay.exponential(7, "draws", self.used + i) for i in range(n)]
            self.used += n
            packed = struct.pack(f"<{n}d", *variates)
            drawn += (await self.store.client.fcall(f"{self.name}_draw_many", 1, self.store.keys.prefix, k, packed)).split()
        return np.array([int(name[2:]) for name in drawn]).reshape(-1, k)

    async def insert(self, weights: Sequence[float] | np.ndarray) -> None:
        """Insert groups 0-0, 0-1, … with these weights."""
        chances = np.random.default_rng(3).exponential(size=len(weights))
        await fill(self.store, self.team, [Entry(float(w), float(v)) for w, v in zip(weights, chances, strict=True)])

    async def reweigh(self, weights: Sequence[float] | np.ndarray) -> None:
        """Set new weights for all groups."""
        await self.store.replay.reweigh(self.team.trainer, {f"0-{i}": float(w) for i, w in enumerate(weights)})


def loaded_as() -> tuple[str, str]:
    """Return the name and code of the library with `draw_many`."""
    name, code = library()
    own = f"{name}_test"
    return own, code.replace(f"name={name}", f"name={own}").replace(f"'{name}'", f"'{own}'") + DRAW_MANY


def pearson(counts: np.ndarray, expected: np.ndarray) -> tuple[float, int]:
    """Return Pearson's statistic and its degrees of freedom; cells with few expected draws are merged."""
    small = expected < 10
    if small.any():
        counts = np.append(counts[~small], counts[small].sum())
        expected = np.append(expected[~small], expected[small].sum())
    return float(((counts - expected) ** 2 / expected).sum()), len(expected) - 1
