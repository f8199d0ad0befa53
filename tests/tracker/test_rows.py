"""A row has the data of a rollout's header and payload, or whatever is readable if they are damaged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from services.groups.advantages import Kind
from services.operations.inspection.text import TextReader
from services.operations.samples.columns import SCHEMA
from services.operations.samples.folder import LogPosition
from services.operations.samples.search import Search
from services.protocol import codec
from services.protocol.messages import Header, Ticket
from services.protocol.payloads import Payload
from services.tracker.rows import EndedGroup, Gaps, LoggedRows, column
from services.tracker.writer import PartWriter
from tests.support.harness import ticket

HEADER = Header(
    "0-0", 5, 0, 0, "0-0.7", 100, 2, [2, 3, 1], [1.0, 0.0], {"exact": [1.0, 0.0]}, [False, True], [0, 1, 2], [0, 2, 2],
    "g", 0.1, 0.2, "main", [1, 0, 0], solved=[True, False], rollout=[0, 0, 1], context_tokens=[0, 4, 0], contexts=[0, 1, 0],
    turns=[3, 1], tool_s=[0.5, 0.0], tool_calls=[2, 0], malformed_calls=[0, 1],
)  # fmt: skip
PAYLOAD = Payload(
    np.array([1, 2], np.int32), np.array([2, 3, 1], np.int32), np.arange(6, dtype=np.int32), -np.arange(6, dtype=np.float32) / 3,
    np.zeros((0, 4), np.int32), notes=["", "too long"], rollout=np.array([0, 0, 1], np.int32),
    context_lengths=np.array([0, 4, 0], np.int32), context=np.array([7, 8, 9, 7], np.int32),
)  # fmt: skip


def group(header: bytes | Header, outcome: str = "filtered:zero") -> EndedGroup:
    return EndedGroup("0-0", 3, outcome, 1, header, "0-0.7")


def rows_of(one: EndedGroup, payload: Payload | None, kind: Kind, gaps: Gaps | None = None) -> list[dict[str, Any]]:
    rows = LoggedRows(TextReader(None), kind, 5.0)
    rows.add(one, payload, gaps)
    columns = {name: column(name, values).to_pylist() for name, values in rows.columns().items()}
    assert set(columns) == set(SCHEMA.names)
    return [{name: values[i] for name, values in columns.items()} for i in range(len(rows))]


def test_segments_and_tool_tokens_are_in_the_row() -> None:
    first, second = rows_of(group(codec.encode(HEADER)), PAYLOAD, "centered")
    assert (first["length"], first["tool_tokens"], first["turns"], first["oldest"], first["newest"]) == (5, 1, 3, 0, 2)
    assert [(each["tool_calls"], each["malformed_calls"]) for each in (first, second)] == [(2, 0), (0, 1)]
    assert [segment["length"] for segment in first["segments"]] == [2, 3]
    assert [segment["context_tokens"] for segment in first["segments"]] == [2, 4]
    assert list(first["tokens"]) == [0, 1, 2, 3, 4]
    assert first["logprobs"] == pytest.approx(-np.arange(5) / 3, rel=1e-3)
    assert (second["length"], second["segments"], list(second["tokens"]), second["notes"]) == (1, None, [5], "too long")
    assert (second["reward"], second["advantage"], second["truncated"], second["solved"]) == (0.0, -0.5, True, False)
    assert (first["outcome"], first["reason"], first["payload"]) == ("filtered", "zero", "0-0.7")


def test_gaps_belong_to_sampled_tokens() -> None:
    payload = msgspec.structs.replace(PAYLOAD, tool_spans=np.array([[1, 0, 1]], np.int32))
    gaps = {("0-0.7", 0): np.array([0.5, np.nan], np.float32), ("0-0.7", 1): np.array([-2.0, 0.5], np.float32)}
    first, second = rows_of(group(HEADER), payload, "centered", gaps)
    assert first["gaps"] == pytest.approx([0.5, np.nan, np.nan, -2.0, 0.5], nan_ok=True)
    assert (first["gap_mean"], first["gap_max"]) == (1.0, 2.0)
    assert (second["gaps"], second["gap_mean"], second["gap_max"]) == (None, None, None), "its segment has no gaps"


def test_gaps_of_another_length_are_omitted() -> None:
    gaps = {("0-0.7", place): np.ones(4, np.float32) for place in range(3)}
    assert [row["gaps"] for row in rows_of(group(HEADER), PAYLOAD, "centered", gaps)] == [None, None]


@pytest.mark.parametrize("body", [b"no header", codec.encode(HEADER)[:40], b""])
def test_a_damaged_header_leaves_a_row_with_the_reason(body: bytes) -> None:
    [row] = rows_of(group(body, "failed:corrupt header"), PAYLOAD, "rloo")
    assert (row["group"], row["outcome"], row["reason"], row["reward"]) == ("0-0", "failed", "corrupt header", None)


def test_tokens_that_do_not_match_the_header_are_omitted() -> None:
    other = Payload(PAYLOAD.prompt, PAYLOAD.lengths[:2], PAYLOAD.tokens, PAYLOAD.logprobs, PAYLOAD.spans)
    cut = Payload(PAYLOAD.prompt, PAYLOAD.lengths, PAYLOAD.tokens[:3], PAYLOAD.logprobs[:3], PAYLOAD.spans)
    for payload in (other, cut, None):
        rows = rows_of(group(HEADER), payload, "standard")
        assert [(row["reward"], row["tokens"]) for row in rows] == [(1.0, None), (0.0, None)]
    torn = msgspec.structs.replace(HEADER, oldest=[0], newest=[0])
    assert [row["reward"] for row in rows_of(group(torn), PAYLOAD, "standard")] == [1.0, 0.0]


def test_a_ticket_that_failed_in_generation_keeps_its_prompt() -> None:
    made: Ticket = ticket(0)
    [row] = rows_of(group(codec.encode(made), "failed:refused"), None, "standard")
    assert (row["source"], row["prompt_tokens"], row["seq"], row["sample"]) == ("main", len(made.prompt), 0, None)


def test_a_value_that_does_not_fit_its_column_is_null(tmp_path: Path) -> None:
    huge = msgspec.structs.replace(HEADER, prompt_tokens=2**40, generator="\ud800")
    rows = LoggedRows(TextReader(None), "standard", 5.0)
    for header in (huge, HEADER):
        rows.add(group(header), None)
    PartWriter(tmp_path, 100).write(rows.columns(), LogPosition())
    found = Search.of(tmp_path).find(reverse=True).rows
    assert [(row["reward"], row["prompt_tokens"], row["generator"]) for row in found] == [
        (1.0, None, None), (0.0, None, None), (1.0, 2, "g"), (0.0, 2, "g"),
    ]  # fmt: skip


def test_interleaved_segments_keep_only_the_figures() -> None:
    mixed = msgspec.structs.replace(HEADER, rollout=[0, 1, 0])
    rows = rows_of(group(mixed), PAYLOAD, "standard")
    assert [(row["reward"], row["length"], row["tokens"]) for row in rows] == [(1.0, 3, None), (0.0, 3, None)]


def test_rollouts_without_tokens_have_no_gaps() -> None:
    header = msgspec.structs.replace(HEADER, lengths=[0, 3, 0, 1], rewards=[1.0] * 4, rollout=[], contexts=[], context_tokens=[])
    payload = msgspec.structs.replace(
        PAYLOAD, lengths=np.array(header.lengths, np.int32), tokens=PAYLOAD.tokens[:4], logprobs=PAYLOAD.logprobs[:4],
        rollout=PAYLOAD.rollout[:0], context_lengths=PAYLOAD.rollout[:0],
    )  # fmt: skip
    gaps = {("0-0.7", 1): np.array([1.0, -3.0, 2.0], np.float32)}
    rows = rows_of(group(header), payload, "standard", gaps)
    assert [(row["gap_mean"], row["gap_max"]) for row in rows] == [(None, None), (2.0, 3.0), (None, None), (None, None)]
    assert [row["tokens"] for row in rows] == [[], [0, 1, 2], [], [3]]


def test_batched_groups_have_the_same_rows_as_alone() -> None:
    """A file's columns are built together: groups of other sizes, or without tokens, gaps or header, must not shift them."""
    plain = msgspec.structs.replace(
        HEADER, lengths=[2, 3, 1], rewards=[1.0, 0.0, 0.5], scores={"exact": [1.0, 0.0, 0.5], "form": [0.0, 1.0]}, rollout=[],
        contexts=[], context_tokens=[], turns=[], tool_s=[], tool_calls=[], malformed_calls=[], solved=[], truncated=[False] * 3,
    )  # fmt: skip
    flat = msgspec.structs.replace(PAYLOAD, rollout=PAYLOAD.rollout[:0], context_lengths=PAYLOAD.rollout[:0], notes=[])
    fewer = msgspec.structs.replace(plain, rewards=[1.0, 3.0])  # fewer than its completions
    gaps = {("0-0.7", place): np.full(size, 0.5, np.float32) for place, size in enumerate((2, 3, 1))}
    added: list[tuple[bytes | Header, Payload | None, Gaps | None]] = [
        (HEADER, PAYLOAD, gaps), (plain, None, gaps), (fewer, flat, gaps), (codec.encode(ticket(0)), None, None),
        (b"damaged", None, None),
        (plain, flat, {}), (plain, flat, {("0-0.7", 1): np.array([0.1, np.nan, 0.2], np.float32)}),
        (msgspec.structs.replace(plain, rewards=[]), flat, gaps), (HEADER, PAYLOAD, None), (plain, flat, gaps),
        (msgspec.structs.replace(plain, rewards=[1.0, np.inf, 0.0]), flat, gaps),
    ]  # fmt: skip
    rows = LoggedRows(TextReader(None), "standard", 5.0)
    for header, payload, known in added:
        rows.add(group(header), payload, known)
    together = [column(name, values).to_pylist() for name, values in rows.columns().items()]
    alone = [row for header, payload, known in added for row in rows_of(group(header), payload, "standard", known)]
    np.testing.assert_equal([dict(zip(rows.columns(), row, strict=True)) for row in zip(*together, strict=True)], alone)
    assert [row["scores"] for row in alone[2:5]] == [
        [("exact", 1.0), ("form", 0.0)], [("exact", 0.0), ("form", 1.0)], [("exact", 0.5)],
    ]  # fmt: skip
    assert [row["advantage"] for row in alone[-3:]] == [None] * 3, "a reward is not finite"


@pytest.mark.parametrize(
    "damage",
    [
        {"lengths": np.array([7, -2, 1], np.int32)}, {"lengths": np.array([[2], [3], [1]], np.int32)},
        {"logprobs": np.zeros(5, np.float32)}, {"logprobs": np.zeros(6, np.int32)}, {"tokens": np.zeros(6, np.float32)},
        {"tokens": np.zeros((6, 1), np.int32)},
    ],
)  # fmt: skip
def test_a_damaged_payload_affects_only_its_own_rows(damage: dict[str, np.ndarray]) -> None:
    rows = LoggedRows(TextReader(None), "standard", 5.0)
    rows.add(group(HEADER), msgspec.structs.replace(PAYLOAD, **damage))
    rows.add(group(HEADER), PAYLOAD)
    columns = rows.columns()
    assert column("tokens", columns["tokens"]).to_pylist() == [None, None, [0, 1, 2, 3, 4], [5]]
    assert [len(each or ()) for each in column("logprobs", columns["logprobs"]).to_pylist()] == [0, 0, 5, 1]
    assert column("reward", columns["reward"]).to_pylist() == [1.0, 0.0, 1.0, 0.0]


def test_a_segment_of_no_rollout_keeps_only_the_figures() -> None:
    before = msgspec.structs.replace(HEADER, rollout=[-1, 0, 1])
    assert [(row["reward"], row["tokens"]) for row in rows_of(group(before), PAYLOAD, "standard")] == [(1.0, None), (0.0, None)]
