"""Metrics of generated data, against hand-computed numbers and against numpy over all headers at once."""

from __future__ import annotations

import tracemalloc

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.dataprep.replay.generated_statistics import DRIFT_STEPS, GeneratedStats
from services.groups.group_statistics import trained
from services.protocol.messages import Header
from tests.support.documented import undocumented

ONE = ["main"]
TWO = ["gsm8k", "code"]


def _header(
    rewards: list[float], lengths: list[int] | None = None, *, source: str = "main", tools: list[int] | None = None,
    truncated: list[bool] | None = None, scores: dict[str, list[float]] | None = None,
    solved: list[bool] | None = None,
) -> Header:  # fmt: skip
    n = len(rewards)
    return Header(
        ticket="0-1", seq=1, epoch=0, index=1, payload="0-1.1", payload_bytes=99, prompt_tokens=3,
        lengths=lengths or [10] * n, rewards=rewards, scores={"exact": rewards} if scores is None else scores,
        truncated=truncated or [False] * n, oldest=[0] * n, newest=[0] * n, generator="g", generate_s=1.0, score_s=0.1,
        source=source, tool_tokens=tools or [0] * n, solved=[reward >= 1 for reward in rewards] if solved is None else solved,
    )  # fmt: skip


def _take(stats: GeneratedStats, trained: list[Header]) -> dict[str, float]:
    record = stats.record(trained)
    assert stats.record(trained) == record, "reading changes nothing"
    stats.next_step(trained)
    return record


def _seen(headers: list[Header], sources: list[str] = ONE) -> dict[str, float]:
    stats = GeneratedStats(sources)
    for header in headers:
        stats.add(header)
    return _take(stats, headers)


def test_metrics_match_hand_computed_values() -> None:
    first = _header([1.0, 0.0], [4, 8], tools=[1, 2], truncated=[False, True])
    second = _header([1.0, 1.0], [6, 2])
    record = _seen([first, second])
    assert (record["reward/gen/mean"], record["reward/gen/exact"], record["reward/gen/zero_std_share"]) == (0.75, 0.75, 0.5)
    assert record["reward/gen/std"] == pytest.approx(np.std([1, 0, 1, 1]))
    assert [record[f"length/gen/{stat}"] for stat in ("mean", "min", "max", "stop_share")] == [5, 2, 8, 0.75]
    assert record["tokens/gen/tool_share"] == 3 / 20
    assert record["tokens/gen/total"] == 20
    assert record["length/drift"] == 1


def test_rollouts_in_environments_are_averaged_over_alone() -> None:
    """Completions of sources without an environment have no turns and do not count."""
    calls = {"turns": [3, 1], "tool_s": [0.5, 1.0], "tool_calls": [4, 1], "malformed_calls": [0, 1]}
    several = msgspec.structs.replace(_header([1.0, 0.0], [4, 8, 2]), rollout=[0, 1, 1], oldest=[0] * 3, newest=[0] * 3, **calls)
    record = _seen([several, msgspec.structs.replace(_header([0.0, 1.0]), turns=[2, 2]), _header([1.0, 0.0])])
    assert (record["turns/gen/mean"], record["turns/gen/max"], record["environment_s/gen/mean"]) == (2.0, 3, 1.5 / 4)
    assert (record["tool_calls/gen/mean"], record["malformed_calls/gen/mean"]) == (5 / 4, 1 / 4)
    assert record["segments/gen/mean"] == 7 / 6
    plain = _seen([_header([1.0, 0.0])])
    assert not [name for name in plain if name.startswith(("turns/", "environment_s/", "tool_calls/", "malformed_calls/"))]


def test_lengths_are_split_by_outcome_and_zero_std_by_kind() -> None:
    several = msgspec.structs.replace(_header([1.0, 0.0], [4, 8, 2]), rollout=[0, 1, 1], oldest=[0] * 3, newest=[0] * 3)
    equal = [_header([0.5, 0.5], solved=[]), _header([0.5, 0.5], [1, 5], solved=[False, True])]
    record = _seen([several, _header([0.0, 0.0], [20, 30]), _header([1.0, 1.0], [6, 8]), *equal])
    assert (record["length/gen/solved"], record["length/gen/unsolved"]) == ((4 + 6 + 8 + 5) / 4, (8 + 2 + 20 + 30 + 1) / 5)
    assert [record[f"zero_std/gen/{kind}"] for kind in ("zero", "solved", "nonzero")] == [0.2, 0.2, 0.4]
    assert record["reward/gen/zero_std_share"] == 0.8
    assert "length/gen/unsolved" not in _seen([_header([1.0, 2.0])]), "a mean of no values is omitted"
    assert not {"length/gen/solved", "length/gen/unsolved"} & _seen([_header([1.0, 2.0], solved=[])]).keys()


@pytest.mark.parametrize(
    ("rewards", "bin"),
    [
        ([0, 0, 0, 0], "0"), ([1, 0, 0, 0], "0_25"), ([1, 1, 0, 0], "25_50"), ([1, 1, 1, 0], "50_75"),
        ([1, 1, 1, 1, 0], "75_100"), ([1, 1, 1, 1], "100"),
    ],
)  # fmt: skip
def test_every_group_falls_into_one_solve_rate_bin(rewards: list[float], bin: str) -> None:
    record = _seen([_header(rewards)])
    assert {name: value for name, value in record.items() if name.startswith("solve_rate/") and value} == {
        f"solve_rate/gen/{bin}": 1
    }


def test_groups_without_a_verdict_have_no_solve_rate() -> None:
    assert not any(name.startswith("solve_rate/") for name in _seen([_header([3.5, -1.0], solved=[])]))
    assert _seen([_header([3.5, -1.0], solved=[]), _header([1, 1])])["solve_rate/gen/100"] == 1


def test_several_sources_get_separate_metrics() -> None:
    headers = [
        _header([1.0, 1.0], [4, 4], source="gsm8k"),
        _header([2.0, 1.0], [8, 8], source="code", scores={"tests": [1.0, 0.0]}, solved=[True, False]),
    ]
    record = _seen(headers, TWO)
    assert [record[f"reward/gen{source}/mean"] for source in ("", "/gsm8k", "/code")] == [1.25, 1.0, 1.5]
    assert [record[f"length/gen{source}/mean"] for source in ("", "/gsm8k", "/code")] == [6, 4, 8]
    assert (record["solve_rate/gen/gsm8k/100"], record["solve_rate/gen/code/25_50"]) == (1, 1)
    assert (record["reward/gen/gsm8k/exact"], record["reward/gen/code/tests"]) == (1.0, 0.5)
    assert not {"reward/gen/exact", "reward/gen/tests"} & record.keys(), "no verifier scored both groups"
    assert not any("main" in name for name in _seen([_header([1.0])])), "a single source has no separate keys"


def test_dropped_groups_are_counted_by_reason_until_the_next_step() -> None:
    stats = GeneratedStats(ONE)
    for outcome in ("filtered:zero", "filtered:zero", "filtered:solved", "stale", "failed:rewards are not finite: [nan]"):
        stats.drop(outcome)
    counts = {name: n for name, n in _take(stats, []).items() if name.startswith("filtered/")}
    assert counts == {
        f"filtered/{reason}/count": n
        for reason, n in {"zero": 2, "solved": 1, "nonzero": 0, "all_truncated": 0, "stale": 1, "failed": 1}.items()
    }
    assert not any(n for name, n in _take(stats, []).items() if name.startswith("filtered/"))


def test_drift_shows_dropped_long_groups_and_decays() -> None:
    stats = GeneratedStats(ONE)
    short, long = _header([1.0, 0.0], [10, 10]), _header([1.0, 0.0], [30, 30])
    assert "length/drift" not in _take(stats, [short]), "nothing was generated to compare with"
    for _ in range(2 * DRIFT_STEPS):
        stats.add(short)
        stats.add(long)
        biased = _take(stats, [short])["length/drift"]
    assert biased == 0.5
    for _ in range(DRIFT_STEPS):
        stats.add(short)
        stats.add(long)
        fair = _take(stats, [short, long])["length/drift"]
    assert fair == 1


def test_memory_does_not_grow_with_arrivals() -> None:
    stats, headers = GeneratedStats(TWO), [_header([float(i), 0.0], source="code") for i in range(200)]
    for header in headers:
        stats.add(header)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for header in headers * 20:
        stats.add(header)
        stats.drop("stale")
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < 10_000  # bytes, for 4,000 headers


numbers = st.floats(-1e6, 1e6)
groups = st.lists(
    st.lists(st.tuples(numbers, st.integers(1, 50), st.booleans()), min_size=1, max_size=5).map(
        lambda rows: _header([r for r, _, _ in rows], [n for _, n, _ in rows], truncated=[t for _, _, t in rows])
    ),
    min_size=1,
    max_size=8,
)


@given(groups)
def test_running_sums_equal_numpy_over_all_headers(headers: list[Header]) -> None:
    record = _seen(headers)
    rewards = np.concatenate([header.rewards for header in headers])
    lengths = np.concatenate([header.lengths for header in headers])
    assert record["reward/gen/mean"] == pytest.approx(rewards.mean(), abs=1e-6)
    assert record["reward/gen/std"] == pytest.approx(rewards.std(), rel=1e-6, abs=0.1)
    assert record["length/gen/mean"] == pytest.approx(lengths.mean())
    assert (record["length/gen/min"], record["length/gen/max"]) == (lengths.min(), lengths.max())
    assert record["length/gen/stop_share"] == pytest.approx(1 - np.concatenate([h.truncated for h in headers]).mean())
    assert sum(value for name, value in record.items() if name.startswith("solve_rate/")) == pytest.approx(1)


def test_rewards_are_per_rollout_and_lengths_per_segment() -> None:
    owners = {"rollout": [0, 0, 0, 1], "oldest": [1, 2, 3, 3], "newest": [1, 3, 3, 3], "tool_tokens": [0, 2, 0, 0]}
    header = msgspec.structs.replace(_header([1.0, 0.0], [2, 4, 6, 8], truncated=[True, False]), **owners)
    record = _seen([header]) | trained([header], 3, [0], ONE)
    assert (record["reward/gen/mean"], record["reward/gen/std"], record["solve_rate/gen/25_50"]) == (0.5, 0.5, 1.0)
    assert (record["length/gen/mean"], record["length/gen/min"], record["length/gen/max"]) == (5.0, 2.0, 8.0)
    assert (record["length/gen/stop_share"], record["tokens/gen/tool_share"]) == (0.5, 0.1)
    assert [record[f"staleness/trained/{stat}"] for stat in ("mean", "max", "mixed_share")] == [(2 * 2 + 4) / 20, 2, 0.25]
    assert record["staleness/trained/off_policy_share"] == (2 + 4) / 20
    assert record["staleness/trained/p99"] == pytest.approx(1.97)  # 0, 0, 1, 2: interpolated between the last two


def test_a_small_spread_around_a_large_mean_stays_precise() -> None:
    assert _seen([_header([1e8 + 0.25, 1e8 - 0.25])])["reward/gen/std"] == 0.25
    assert _seen([_header([0.1] * 7), _header([0.1] * 7)])["reward/gen/std"] == 0


def test_uses_and_importance_weights_of_a_step() -> None:
    headers = [_header([1.0, 0.0])] * 4
    record = trained(headers, 1, [0, 2, 1, 0], ONE, [0.5, 1.0, 0.75, 0.75])
    assert (record["replay/train/uses_mean"], record["replay/train/replayed_share"]) == (0.75, 0.5)
    assert (record["replay/train/weight_min"], record["replay/train/weight_mean"]) == (0.5, 0.75)
    assert record["staleness/trained/mean"] == 1
    assert "replay/train/weight_min" not in trained(headers, 1, [0] * 4, ONE)


def test_scores_missing_from_some_groups_are_omitted() -> None:
    record = _seen([_header([1.0, 0.0]), _header([1.0, 0.0], scores={"other": [0.0, 0.0]})])
    assert not {"reward/gen/exact", "reward/gen/other"} & record.keys()


def test_every_key_is_documented() -> None:
    headers = [_header([1.0, 0.0], source=name) for name in TWO]
    record = _seen(headers, TWO) | trained(headers, 0, [0, 1], TWO, [1.0, 0.5])
    assert len(record) > 80
    assert not undocumented(record)
    assert undocumented({"reward/gen/mean", "reward/gen", "no/such/key"}) == {"reward/gen", "no/such/key"}
