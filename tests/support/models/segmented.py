"""Groups whose rollouts have several segments, some with their own contexts, as an environment submits them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from services.dataprep.planning.plan import PlanGroup
from services.dataprep.planning.step import segments_of
from services.groups.generated import Generated, Segment
from services.groups.records import make_header, pack_payload
from services.protocol import codec
from services.protocol.messages import Header, Span
from services.protocol.payloads import Payload
from tests.support.harness import ticket

VOCABULARY = 96
PROMPT = [3, 1, 4]
CONTEXTS = ([], [], PROMPT, [3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8])
"""Contexts of segments: none, one equal to the prompt, one that extends it, and others."""

Drawn = tuple[int, list[tuple[int, bool]]]
"""A segment: an index into `CONTEXTS`, and its tokens, each with whether a tool wrote it."""

tokens = st.lists(st.tuples(st.integers(0, VOCABULARY - 1), st.booleans()), min_size=1, max_size=8)
rollouts = st.lists(st.tuples(st.integers(0, len(CONTEXTS) - 1), tokens), min_size=1, max_size=4)
groups = st.lists(st.lists(rollouts, min_size=2, max_size=4), min_size=1, max_size=3)


def segment(context: Sequence[int], drawn: Sequence[tuple[int, bool]], version: int = 0) -> Segment:
    """Return a segment with these tokens and distinct logprobs."""
    size = len(drawn)
    logprobs = -1 - np.arange(size, dtype=np.float32) / 8
    tools = tuple((place, place + 1) for place, (_, tool) in enumerate(drawn) if tool)
    ids = np.array([token for token, _ in drawn], np.int32)
    return Segment(Generated(ids, logprobs, [Span(version, 0, size)], "stop", tools), np.array(context, np.int32))


@dataclass(frozen=True)
class Made:
    """A group and everything derived from it."""

    name: str  # name of its payload
    rollouts: list[list[Segment]]
    header: Header
    payload: Payload

    @property
    def segments(self) -> list[tuple[int, Segment]]:
        """Every segment with its rollout, in the payload's order."""
        return [(number, each) for number, rollout in enumerate(self.rollouts) for each in rollout]

    def plan_group(self, masked: Sequence[int] = ()) -> PlanGroup:
        """Return the group as planning sees it: rollout i has advantage i + 0.5, and rollouts in `masked` are not trained on."""
        n = len(self.rollouts)
        return PlanGroup(
            self.header.ticket, self.name, self.header.prompt_tokens, np.asarray(self.header.lengths), np.arange(n) + 0.5,
            ~np.isin(np.arange(n), masked), np.asarray(self.header.tool_tokens), segments=segments_of(self.header),
        )  # fmt: skip


def make(number: int, drawn: Sequence[Sequence[Drawn]]) -> Made:
    """Make group `number` through the functions that generators and environments call."""
    given = [[segment(CONTEXTS[context], of) for context, of in rollout] for rollout in drawn]
    one, n = ticket(number, PROMPT, group_size=len(given)), len(given)
    name, payload = f"{one.id}.1", pack_payload(one, given)
    header = make_header(
        one, given, {}, [0.0] * n, [], payload=name, payload_bytes=len(payload), generator="e", generate_s=1, score_s=0
    )
    return Made(name, given, header, codec.decode(payload, Payload))
