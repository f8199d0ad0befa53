"""What all verifiers share: the group to score, its scores, and how scores combine into rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from services.chat.reply import reply_of
from services.config.data import ReasoningGymSource, Source
from services.config.verifiers import VerifierConfig, named
from services.groups.generated import TicketFailed
from services.protocol.entries import decode_entry
from services.protocol.messages import Row

SOLVED_TOLERANCE = 1e-8
"""A score may be this far below a threshold, since scores are sums of floats."""


class VerifierFailure(TicketFailed):
    """A verifier could not score a group. This is not a score of zero."""

    cause = "verifier"

    def __init__(self, reason: str, final: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.final = reason, final


class Overtime(BaseException):
    """A call took too long. It is no `Exception`, so that no library takes it for one of its own."""


class Job(msgspec.Struct, array_like=True):
    """A group of n finished completions to score."""

    source: str
    completions: list[str]  # [n]
    answer: str  # of the ticket
    row: str = ""  # of the ticket
    finish: list[str] = []  # [n] stop | length
    tokens: list[list[int]] = []  # [n] token ids; empty unless a verifier requests them

    @property
    def replies(self) -> list[str]:
        """The replies [n] of the completions, which is what they say after their reasoning (services/chat/reply.py)."""
        return [reply_of(text) for text in self.completions]

    def fields(self, source: Source) -> dict[str, Any]:
        """Return the fields that a custom verifier may request. Raises `msgspec.DecodeError` or ValueError for a damaged
        ticket."""
        row = msgspec.json.decode(self.row, type=Row) if self.row else Row([], {})
        answer = self.answer
        if isinstance(source, ReasoningGymSource):
            given = decode_entry(self.answer).get("answer")
            answer = "" if given is None else given  # some tasks have none
        return {
            "prompt": row.messages,
            "answer": answer,
            "row": row.columns,
            "source": self.source,
            "completions": self.completions,
            "replies": self.replies,
            "finish": self.finish,
            "tokens": self.tokens,
        }


class Setup(msgspec.Struct, array_like=True):
    """First frame to a worker: what `model_dump(mode="json")` returns for verifiers and sources, and its permissions."""

    verifiers: list[tuple[str, dict[str, Any]]]  # name, configuration
    sources: list[dict[str, Any]]
    network: bool = False
    memory_bytes: int = 0  # of address space; 0: no limit
    prints: bool = False  # whether what verifiers print is shown
    max_tokens: int = 0  # of a completion


class Hello(msgspec.Struct, array_like=True):
    """First frame of a worker: it is ready, or the reason why it cannot be."""

    error: str = ""
    needs: dict[str, list[str]] = {}  # source -> fields of a group that its verifiers request


@dataclass(frozen=True)
class Scores:
    """The scores of a group of n completions."""

    scores: dict[str, list[float]]
    """Verifier, or verifier.part -> [n]."""
    notes: list[str]
    """[n] JSON: verifier -> its notes besides the score. Empty: there are none."""


def combine(scores: Mapping[str, Sequence[float]], verifiers: Sequence[VerifierConfig]) -> list[float]:
    """Return the rewards [n]: the weighted sum of the scores in `scores`."""
    columns = [[verifier.weight * score for score in scores[name]] for name, verifier in named(verifiers) if name in scores]
    return [sum(row) for row in zip(*columns, strict=True)]


def solved(scores: Mapping[str, Sequence[float]], thresholds: Mapping[str, float]) -> list[bool]:
    """Return which completions [n] reach every threshold, or [] without thresholds."""
    columns = [[score >= threshold - SOLVED_TOLERANCE for score in scores[name]] for name, threshold in thresholds.items()]
    return [all(row) for row in zip(*columns, strict=True)]
