"""Computes the report of a complete evaluation round. Pure.

Guarantees: a result that does not answer its whole ticket, with the round's version alone, is never part of a report.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from services.config.evaluation import ALL
from services.groups.records import mixed
from services.protocol import codec
from services.protocol.messages import Header, Ticket


class Unfit(Exception):
    """A result that cannot be reported. The message says why."""


@dataclass(frozen=True)
class Result:
    """The n rollouts of one prompt."""

    source: str
    rewards: list[float]
    correct: int
    lengths: list[int]  # of all segments of a rollout together
    truncated: list[bool]


def read_result(ticket: Ticket, body: bytes) -> Result:
    """Decode the result of a ticket. Raises `Unfit` if it is corrupt or does not answer the ticket."""
    try:
        header = codec.decode(body, Header)
    except codec.CorruptMessage as error:
        raise Unfit(f"the result of {ticket.id} is corrupt: {error}") from None
    n = ticket.group_size
    columns = (header.rewards, header.solved, header.truncated)
    if header.ticket != ticket.id or any(len(column) != n for column in columns):
        raise Unfit(f"the result of {ticket.id} names ticket {header.ticket} or does not have {n} rollouts in every column")
    assert ticket.version is not None
    if fault := mixed(header, ticket.version):
        raise Unfit(f"the result of {ticket.id} was {fault}")
    lengths = [0] * n
    for rollout, tokens in zip(header.owners, header.lengths, strict=True):
        lengths[rollout] += tokens
    return Result(ticket.source, header.rewards, sum(header.solved), lengths, header.truncated)


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Return 1 - C(n - c, k) / C(n, k): the chance that k of the n completions, drawn without replacement, contain a correct one.

    Computed as a product of ratios, which cannot overflow (Chen et al. 2021, appendix A).
    """
    if n - correct < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - correct + 1, n + 1))


def report(results: Sequence[Result], ks: Sequence[int]) -> dict[str, float]:
    """Return the metrics of each source and of `all`: means over prompts for pass@k, over rollouts for the rest."""
    by_source: dict[str, list[Result]] = {}
    for result in results:
        by_source.setdefault(result.source, []).append(result)
    record: dict[str, float] = {}
    for name, group in (*sorted(by_source.items()), (ALL, list(results))):
        for k in sorted(ks):
            record[f"eval/{name}/pass@{k}"] = float(np.mean([pass_at_k(len(r.rewards), r.correct, k) for r in group]))
        columns: dict[str, Callable[[Result], Sequence[float]]] = {
            "reward": lambda r: r.rewards,
            "length": lambda r: r.lengths,
            "truncated": lambda r: r.truncated,
        }
        for column, values in columns.items():
            record[f"eval/{name}/{column}"] = float(np.mean(np.concatenate([values(r) for r in group])))
        record[f"eval/{name}/prompts"] = float(len(group))
    return record


def read_results(tickets: Sequence[Ticket], bodies: Mapping[str, bytes]) -> list[Result]:
    """Decode the results of all tickets. Raises `Unfit` if one is missing or unfit."""
    missing = [ticket.id for ticket in tickets if ticket.id not in bodies]
    if missing or len(bodies) != len(tickets):
        raise Unfit(f"{len(bodies)} results for {len(tickets)} tickets; missing: {', '.join(missing[:3]) or 'none'}")
    return [read_result(ticket, bodies[ticket.id]) for ticket in tickets]
