"""Which headers of rollouts with segments are inserted, and which become dead letters."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.config import RunConfig
from services.dataprep.planning.plan import Layout, PlanGroup, plan_step
from services.dataprep.planning.step import segments_of
from services.dataprep.replay.settling import settle
from services.protocol.messages import Header
from services.store import HeaderEntry
from tests.support.models.tiny_model import make_config

GROUP_SIZE, MAX_TOKENS = 4, 100
OWNERS = [0, 0, 1, 2, 3, 3]
S = len(OWNERS)


@functools.cache
def _config(min_group_size: int = 0) -> RunConfig:
    sampling = {"group_size": GROUP_SIZE, "min_group_size": min_group_size, "max_tokens": 8}
    environment = {"kind": "python", "name": "tools", "function": "anywhere:Tools"}
    return make_config(
        Path("unused"), sampling=sampling, model={"max_tokens": MAX_TOKENS}, environments=[environment],
        data={"sources": [
            {"kind": "jsonl", "path": "unused.jsonl", "name": "turns", "environment": "tools"},
            {"kind": "jsonl", "path": "unused.jsonl", "name": "plain"},
        ], "max_prompt_tokens": 10},
    )  # fmt: skip


def _header(**fields: Any) -> Header:
    """Return four rollouts with six segments: the second has its own context, and the last two share another."""
    given = {
        "ticket": "0-1", "seq": 0, "epoch": 0, "index": 1, "payload": "0-1.1", "payload_bytes": 100, "prompt_tokens": 5,
        "lengths": [60, 2, 3, 4, 5, 6], "rewards": [0.0, 1.0, 0.5, 1.0], "scores": {"tools": [0.0, 1.0, 0.5, 1.0]},
        "truncated": [False] * 4, "oldest": [0] * S, "newest": [1] * S, "generator": "e", "generate_s": 0.1, "score_s": 0.1,
        "source": "turns", "tool_tokens": [10, 0, 0, 0, 5, 0], "rollout": OWNERS, "context_tokens": [0, 30, 0, 0, 7, 7],
        "contexts": [0, 1, 0, 0, 2, 2], "turns": [3, 1, 1, 2], "tool_s": [0.5, 0.0, 0.0, 2.0],
        "tool_calls": [2, 0, 0, 1], "malformed_calls": [1, 0, 0, 0],
    }  # fmt: skip
    return Header(**{**given, **fields})


def _action(header: Header, config: RunConfig) -> str:
    return settle(HeaderEntry("1-0", header.ticket, header.payload, b"", header), 1, config).action


def test_rollouts_of_several_segments_are_trained_on() -> None:
    assert _action(_header(), _config()) == "insert"
    assert _action(_header(turns=[], tool_s=[], tool_calls=[], malformed_calls=[]), _config()) == "insert"
    assert _action(_header(lengths=[95, 70, 3, 4, 5, 6]), _config()) == "insert"  # 5 + 95 and 30 + 70


def test_invalid_segments_are_dead_lettered() -> None:
    shape = "not every column of the header has 4 rollouts or 6 segments"
    invalid: list[tuple[dict[str, Any], str]] = [
        ({"rollout": []}, shape),
        ({"oldest": [0] * 4}, shape),
        ({"contexts": [0, 1, 0]}, shape),
        ({"turns": [1, 1, 1]}, shape),
        ({"tool_calls": [2, 0, 0]}, shape),
        ({"truncated": [False] * 6}, shape),
        ({"scores": {"tools": [0.0] * 3}}, shape),
        ({"lengths": [124, 2, 3, 4, 5, 6]}, r"segments of \[129, 32, 8, 9, 12, 13\] tokens .* trainer.row_tokens = 128"),
        ({"lengths": [0, 2, 3, 4, 5, 6], "tool_tokens": [0] * S}, "with contexts are empty"),
    ]
    for fields, message in invalid:
        assert re.match(f"failed:.*{message}", _action(_header(**fields), _config())), fields


def _without_the_last() -> Header:
    return _header(
        rewards=[0.0, 1.0, 0.5], scores={}, truncated=[False] * 3, turns=[], tool_s=[], tool_calls=[], malformed_calls=[],
        rollout=OWNERS[:4], lengths=[60, 2, 3, 4], oldest=[0] * 4, newest=[1] * 4, tool_tokens=[0] * 4, context_tokens=[],
        contexts=[],
    )  # fmt: skip


def test_a_group_may_lack_rollouts_down_to_the_minimum_size() -> None:
    assert _action(_without_the_last(), _config(3)) == "insert"
    assert _action(_without_the_last(), _config()) == "failed:the header has 3 rewards, but sampling.group_size is 4"
    few = _action(_without_the_last(), _config(4))
    assert few == "failed:the header has 3 rewards, but sampling.group_size is 4"
    one = msgspec.structs.replace(_header(), rewards=[1.0])
    assert "of which sampling.min_group_size requires 3" in _action(one, _config(3))


@given(
    st.lists(st.integers(1, 3), min_size=GROUP_SIZE, max_size=GROUP_SIZE),
    st.lists(st.integers(0, 3), min_size=12, max_size=12),
    st.lists(st.integers(1, 5), min_size=3, max_size=3),
    st.lists(st.integers(0, 9), min_size=12, max_size=12),
)
def test_inserted_groups_can_be_planned(counts: list[int], drawn: list[int], sizes: list[int], lengths: list[int]) -> None:
    """Rollouts have `counts` segments in contexts of these `sizes`, which are numbered by occurrence; 0 is the prompt."""
    owners = [rollout for rollout, count in enumerate(counts) for _ in range(count)]
    s = len(owners)
    places = {0: 0, **{number: place for place, number in enumerate(dict.fromkeys(n for n in drawn[:s] if n), 1)}}
    header = _header(
        rollout=owners, contexts=[places[number] for number in drawn[:s]], lengths=lengths[:s], oldest=[0] * s, newest=[0] * s,
        context_tokens=[sizes[number - 1] if number else 0 for number in drawn[:s]], tool_tokens=[0] * s,
    )  # fmt: skip
    assert (_action(header, _config()) == "insert") == (min(lengths[:s]) > 0)
    if not min(lengths[:s]):
        return
    group = PlanGroup(
        "0-1", "0-1.1", header.prompt_tokens, np.asarray(header.lengths), np.zeros(GROUP_SIZE), np.ones(GROUP_SIZE, bool),
        np.asarray(header.tool_tokens), segments=segments_of(header),
    )  # fmt: skip
    _, (rank,) = plan_step(0, [group], Layout(1, MAX_TOKENS))
    found = {sample.index: (sample.rollout, sample.tokens) for row in rank.rows for sample in row}
    whole = [size + length for size, length in zip(header.context_sizes, header.lengths, strict=True)]
    assert found == dict(enumerate(zip(header.owners, whole, strict=True)))
