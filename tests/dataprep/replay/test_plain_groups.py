"""What becomes of finished single-turn groups on either side of what is valid, filtered or stale."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any

import pytest

from services.config import RunConfig
from services.dataprep.replay.settling import settle
from services.protocol.messages import Header
from services.store import HeaderEntry, Settlement
from tests.support.models.tiny_model import make_config

STEP, STALENESS, LONGEST, PROMPT = 9, 2, 8, 10


@functools.cache
def _config(sections: str = "{}") -> RunConfig:
    given = {
        "sampling": {"group_size": 4, "max_tokens": LONGEST}, "admission": {"max_staleness": STALENESS},
        "data": {"sources": [{"kind": "jsonl", "path": "unused.jsonl", "name": "sums"}], "max_prompt_tokens": PROMPT},
    }  # fmt: skip
    return make_config(Path("unused"), **(given | json.loads(sections)))


def _settled(config: dict[str, Any] | None = None, **fields: Any) -> Settlement:
    rewards = fields.get("rewards", [0.0, 1.0, 0.0, 1.0])
    given = {
        "ticket": "0-1", "seq": 0, "epoch": 0, "index": 1, "payload": "0-1.1", "payload_bytes": 100, "prompt_tokens": 5,
        "lengths": [3, 4, 5, 6], "rewards": rewards, "scores": {"math": rewards}, "truncated": [False] * 4, "oldest": [8] * 4,
        "newest": [9] * 4, "generator": "g", "generate_s": 0.1, "score_s": 0.1, "source": "sums", "tool_tokens": [0] * 4,
        "solved": [reward == 1 for reward in rewards],
    }  # fmt: skip
    header = Header(**{**given, **fields})
    return settle(HeaderEntry("1-0", header.ticket, header.payload, b"", header), STEP, _config(json.dumps(config or {})))


@pytest.mark.parametrize(
    "fields",
    [
        {"lengths": [1, LONGEST, 1, LONGEST]},
        {"prompt_tokens": 1},
        {"prompt_tokens": PROMPT},
        {"oldest": [STEP] * 4, "newest": [STEP] * 4},
        {"oldest": [STEP - STALENESS] * 4},
        {"scores": {"math": [0.0, 1.0, 0.0, 1.0], "math.part": [-1e6, 5.0, 0.0, 2.0]}},
        {"truncated": [True] * 4},
        {"rewards": [1.0] * 4},
    ],
)
def test_groups_at_the_bounds_are_inserted(fields: dict[str, Any]) -> None:
    assert _settled(**fields).action == "insert"


def test_groups_beyond_the_bounds_are_dead_lettered() -> None:
    beyond: list[tuple[dict[str, Any], str]] = [
        ({"lengths": [0, 4, 5, 6]}, "segments of [5, 9, 10, 11] tokens with contexts are empty, or longer"),
        ({"lengths": [3, 4, 5, 124]}, "segments of [8, 9, 10, 129] tokens with contexts are empty, or longer"),
        ({"oldest": [-1, 8, 8, 8]}, "policy versions [-1, 8, 8, 8]..[9, 9, 9, 9] are impossible at step 9"),
        ({"newest": [9, 9, 9, 10]}, "policy versions [8, 8, 8, 8]..[9, 9, 9, 10] are impossible at step 9"),
        ({"oldest": [9] * 4, "newest": [9, 9, 9, 8]}, "policy versions [9, 9, 9, 9]..[9, 9, 9, 8] are impossible at step 9"),
        ({"source": "other"}, "no prompt source is called 'other'"),
        ({"index": 2}, "epoch 0 and row 2 are impossible"),
        ({"rewards": [0.0, 1.0, 0.0, 1e300], "scores": {}}, "rewards [0.0, 1.0, 0.0, 1e+300] are not numbers of at most 1e+12"),
        ({"rewards": [0.0, 1.0, 0.0, math.nan], "scores": {}}, "rewards [0.0, 1.0, 0.0, nan] are not numbers of at most 1e+12"),
    ]
    actions = {reason: _settled(**fields).action for fields, reason in beyond}
    assert [reason for reason, action in actions.items() if not action.startswith(f"failed:{reason}")] == []


def test_a_group_older_than_the_bound_is_stale() -> None:
    late = _settled(oldest=[STEP - STALENESS - 1, 9, 9, 9])
    assert (late.action, late.oldest) == ("stale", STEP - STALENESS - 1)


ZERO_STD, MASKED = {"filters": {"zero_std": True}}, {"advantage": {"mask_truncated": True}}


@pytest.mark.parametrize(
    ("config", "fields", "action"),
    [
        (ZERO_STD, {"rewards": [1.0] * 4}, "filtered:solved"),
        (ZERO_STD, {"rewards": [0.0] * 4}, "filtered:zero"),
        (ZERO_STD, {"rewards": [0.5] * 4}, "filtered:nonzero"),
        (ZERO_STD, {"rewards": [1.0] * 4, "oldest": [0] * 4}, "filtered:solved"),  # not stale, because the filters come first
        (ZERO_STD, {}, "insert"),
        (ZERO_STD, {"truncated": [True] * 4}, "insert"),
        (MASKED, {"truncated": [True] * 4}, "filtered:all_truncated"),
        (MASKED, {"truncated": [True, True, True, False]}, "insert"),
        (MASKED, {"rewards": [1.0] * 4}, "insert"),
    ],
)
def test_filters_drop_only_what_they_name(config: dict[str, Any], fields: dict[str, Any], action: str) -> None:
    assert _settled(config, **fields).action == action


def test_pass_rates_are_kept_only_for_what_uses_them() -> None:
    solved = {"rewards": [0.0, 1.0, 1.0, 1.0]}
    assert _settled(**solved).rate is None
    assert _settled({"filters": {"exclude_pass_rate": 0.9}}, **solved).rate == (1, 0.75, 0.9)
    assert _settled({"filters": {"exclude_pass_rate": 0.9} | ZERO_STD["filters"]}, rewards=[1.0] * 4).rate == (1, 1.0, 0.9)
    assert _settled({"filters": {"exclude_pass_rate": 0.9}}, **solved, solved=[]).rate is None


def test_only_priorities_give_groups_weights_of_their_own() -> None:
    assert _settled().weight == 1.0
    assert _settled({"replay": {"priority": "reward", "sampler": "prioritized"}}).weight == pytest.approx(2.0)
