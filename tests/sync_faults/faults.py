"""What can happen to a member in a round, and the sequence of faults of a seed. Pure.

Guarantees: the same seed, number, kinds and members give the same sequence; kinds and phases are dealt like cards, and every kind
meets every phase once in `len(kinds) * len(PHASES)` faults.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

PHASES = ("gather", "join", "pause", "transfer", "applied")
"""When a fault strikes: as the phase opens, but `transfer` in mid-broadcast and `applied` once the victim acknowledges."""
LASTING = ("stop", "cut-trainer", "cut-redis", "cut-all")
"""SIGSTOP; no traffic to the trainer, to Redis, or to anyone. Each is applied for less and for more than a round's deadlines."""
KINDS = ("kill", *(f"{verb}-{length}" for verb in LASTING for length in ("short", "long")))
NEED_NETWORKS = ("cut-trainer", "cut-all")
"""Verbs that need a separate network for every member."""


@dataclass(frozen=True)
class Fault:
    """One fault of the sequence."""

    number: int
    kind: str
    phase: str
    victim: str

    @property
    def verb(self) -> str:
        """What is done."""
        return self.kind.removesuffix("-short").removesuffix("-long")

    def __str__(self) -> str:
        return f"{self.number}: {self.kind} {self.victim} at {self.phase}"


def possible(networks: bool) -> tuple[str, ...]:
    """Return the kinds that are possible on this machine."""
    return tuple(kind for kind in KINDS if networks or not kind.startswith(NEED_NETWORKS))


def chosen(names: str, networks: bool) -> tuple[str, ...]:
    """Return the kinds in a comma-separated list of kinds or verbs; all if it is empty. Raises `ValueError`."""
    kinds, wanted = possible(networks), [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        if not any(kind == name or kind.startswith(f"{name}-") for kind in kinds):
            raise ValueError(f"--kinds: {name!r} is no kind of fault here; there are: {', '.join(kinds)}")
    return tuple(kind for kind in kinds if not wanted or any(kind == name or kind.startswith(f"{name}-") for name in wanted))


def sequence(seed: int, count: int, kinds: Sequence[str], members: Sequence[str]) -> Iterator[Fault]:
    """Return the faults of a seed, in order."""
    dice = random.Random(seed)
    kinds, phases = dice.sample(kinds, len(kinds)), dice.sample(PHASES, len(PHASES))
    again = math.lcm(len(kinds), len(phases))  # from here on, pairs would repeat
    for number in range(count):
        phase = phases[(number + number // again) % len(phases)]
        yield Fault(number, kinds[number % len(kinds)], phase, dice.choice(members))
