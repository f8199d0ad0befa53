"""metrics.jsonl, summary.json and formatted numbers."""

from __future__ import annotations

import contextlib
import json
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.console.run import summary
from services.console.run.mirror import Mirror
from services.console.run.summary import Concluded, in_words, summarise
from services.operations import figures
from services.operations.history import EVALUATED
from services.operations.inspection.ledger import PLACES, AuditReport, assess
from services.operations.observe import BATCH, RunFeed
from services.store import RunState, Store
from tests.support import flow
from tests.support.harness import small_config

STATE = RunState(4, 16, 3, 40, 3, 3, 2, -1, "dataprep-0", {}, "", "", "data", "config")


def row(step: int, time_s: float, **values: float) -> dict[str, float]:
    return {"step": step, "time_s": time_s, **values}


def audited(**ledger: int) -> AuditReport:
    empty = dict.fromkeys((*PLACES, "slots_used", "outstanding", "unpublished"), 0)
    return assess("small", empty | {f"ledger:{name}": count for name, count in ledger.items()})


def test_each_step_is_mirrored_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = Mirror(path)
    assert [r["step"] for r in first.add([{"step": 0.0, "x": 1.5}, {"step": 1.0}, {"step": 1.0, "x": 2.0}])] == [0, 1]
    with path.open("a") as torn:
        torn.write('{"step":2,"x"')
    second = Mirror(path)
    assert second.rows == {0: {"step": 0, "x": 1.5}, 1: {"step": 1}}
    assert [r["step"] for r in second.add([{"step": 1.0}, {"step": 2.0}])] == [2]
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"step": 0, "x": 1.5}, {"step": 1}, {"step": 2}]


def test_records_wait_for_space_on_a_full_disk(tmp_path: Path) -> None:
    """A full disk stores only the part of a record that fits; further records after it would make the file unreadable."""
    path = tmp_path / "metrics.jsonl"
    mirror = Mirror(path)
    mirror.add([{"step": 0.0}])
    with full_after(15):
        assert mirror.add([{"step": 1.0}]) == [{"step": 1}]
        assert path.stat().st_size == 15, "a part of the record"
        assert mirror.fault == f"{path} cannot be written: File too large"
        assert mirror.add([{"step": 1.0}, {"step": 2.0}]) == [{"step": 2}]
        assert Mirror(path).rows == {0: {"step": 0}}, "as if the console had been killed now"
        assert path.stat().st_size == 11
    assert mirror.add([]) == []
    assert mirror.fault == ""
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 1, 2]


@pytest.mark.parametrize("empty", [False, True])
def test_a_file_that_somebody_deleted_or_emptied_is_written_again(empty: bool, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    mirror = Mirror(path)
    mirror.add([{"step": 0.0}])
    if empty:
        path.write_bytes(b"")
    else:
        path.unlink()
    mirror.add([{"step": 1.0}])
    assert Mirror(path).rows == {0: {"step": 0}, 1: {"step": 1}}


def test_a_full_disk_undoes_no_restore(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    mirror = Mirror(path)
    mirror.add([{"step": step, "x": 1.0} for step in range(3)])
    with full_after(15):
        mirror.add([{"step": 1, "x": 2.0, "run/incarnation": 17.0}])
        assert mirror.fault
    mirror.add([{"step": 2, "x": 2.0, "run/incarnation": 17.0}])
    assert [json.loads(line)["x"] for line in path.read_text().splitlines()] == [1.0, 2.0, 2.0]


@contextlib.contextmanager
def full_after(limit: int) -> Iterator[None]:
    """Let no file grow beyond `limit` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_steps_recorded_after_a_restore_replace_earlier_ones(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    mirror = Mirror(path)
    mirror.add([{"step": step, "x": 1.0} for step in range(6)])
    back = {"run/incarnation": 17.0}
    assert [r["step"] for r in mirror.add([{"step": 3, "x": 2.0, **back}, {"step": 3, "x": 3.0, **back}])] == [3]
    mirror = Mirror(path)
    assert {step: row["x"] for step, row in mirror.rows.items()} == {0: 1.0, 1: 1.0, 2: 1.0, 3: 2.0}
    assert mirror.add([{"step": 3, "x": 4.0, **back}, {"step": 4, "x": 2.0, **back}]) == [{"step": 4, "x": 2.0, **back}]
    mirror.add([{"step": 6, "x": 3.0, "run/incarnation": 18.0}])
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 1, 2, 3, 4, 6]


def test_a_restore_removes_evaluations_of_undone_steps(tmp_path: Path) -> None:
    def mirrors() -> tuple[Mirror, Mirror]:
        return Mirror(tmp_path / "metrics.jsonl"), Mirror(tmp_path / "evaluations.jsonl", EVALUATED)

    def versions() -> list[int]:
        return [json.loads(line)[EVALUATED] for line in (tmp_path / "evaluations.jsonl").read_text().splitlines()]

    first, back, again = ({"run/incarnation": life} for life in (16.0, 17.0, 18.0))
    steps, rounds = mirrors()
    steps.add([{"step": step, **first} for step in range(9)])
    rounds.add([{EVALUATED: version, **first} for version in (0, 3, 4, 6, 9)])
    rounds.outlive(steps)
    assert versions() == [0, 3, 4, 6, 9]
    rounds.add([{EVALUATED: 4, **back}])  # a round may complete before the step that produced its version is recorded
    steps.add([{"step": 3, **back}])
    rounds.outlive(steps)
    assert versions() == [0, 3, 4]
    rounds.add([{EVALUATED: 6, **back}])
    steps.add([{"step": 4, **back}, {"step": 5, **back}, {"step": 5, **again}])
    # as if killed before it removed the round of version 6
    steps, rounds = mirrors()
    rounds.outlive(steps)
    assert versions() == [0, 3, 4]
    steps.add([{"step": 0, "run/incarnation": 19.0}])
    rounds.outlive(steps)
    assert versions() == [0]


async def test_an_observer_counts_failed_prompts_like_the_summary(store: Store) -> None:
    observer = RunFeed(store, ttl_s=5.0)
    await observer.poll()
    assert observer.last.failed == 0
    await store.client.xadd(store.keys.deadletter, {"reason": "a header that belongs to no ticket"})
    team = await flow.start(store)
    await flow.issue(store, team, 2)
    for claim, reason in zip(await flow.claim(store, "generator-0", 2), ("first", "second"), strict=True):
        assert await store.tickets.fail("generator-0", claim, reason, 1)
    await observer.poll()
    assert (observer.last.failed, observer.last.last_failure) == (2, "second")


def test_a_summary_says_how_many_prompts_failed(tmp_path: Path) -> None:
    failed = audited(issued=18, failed=18)
    found = summarise(small_config(tmp_path), [], STATE, failed, Concluded("finished", 1.0, {}))
    assert in_words(found)[-1] == "18 prompts failed and will not be trained on (see grpo inspect deadletter)"


async def test_an_observer_passes_on_every_entry_once(store: Store) -> None:
    for step in range(BATCH + 5):
        await store.monitor.record({"step": float(step)})
    observer = RunFeed(store, ttl_s=5.0)
    polls = [poll async for poll in observer.poll_to_end()]
    assert [len(poll.records) for poll in polls] == [BATCH, 5]
    await store.monitor.record({"step": BATCH + 5.0})
    poll = await observer.poll()
    assert poll is not None
    assert poll.records == [{"step": BATCH + 5.0}]
    assert (poll.state, poll.finished, poll.committed_step) == (None, "", -1)


def test_a_summary_matches_hand_computed_values(tmp_path: Path) -> None:
    config = small_config(tmp_path, None, "run.seed=7", "admission.max_staleness=2")
    rows = [
        row(step, 10.0 + 2 * step, **{figures.REWARD: float(step), figures.LAG_MAX: float(step % 3), figures.TRAINED: 100.0})
        for step in range(12)
    ]
    rows[5].pop(figures.REWARD)
    rows[3]["fleet/generators"] = 2.0
    found = summarise(config, rows, STATE, audited(issued=9, trained=4, stale=5), Concluded("finished", 30.0, {"trainer": 1}))
    assert found["reward_first"] == pytest.approx((0 + 1 + 2 + 3 + 4) / 5)  # of 11 steps, less than a half each
    assert found["reward_last"] == pytest.approx((7 + 8 + 9 + 10 + 11) / 5)
    expected = {
        "run": "small", "seed": 7, "steps": 3, "lost": 0, "doubled": 0, "max_lag": 2.0, "max_staleness": 2, "stale_dropped": 5,
        "generators": 2, "syncs": 4, "tokens_per_s_generated": None, "tokens_per_s_trained": 100.0, "wall_s": 30.0,
        "restarts": {"trainer": 1}, "status": "finished",
    }  # fmt: skip
    assert expected.items() <= found.items()
    assert found["audit"]["issued"] == 9
    summary.write(tmp_path / "summary.json", found)
    assert summary.read(tmp_path / "summary.json") == found
    assert "largest lag 2 of 2, 0 tickets lost, 0 duplicated, 5 dropped as stale" in in_words(found)[1]


def test_a_run_that_never_started_has_a_summary(tmp_path: Path) -> None:
    found = summarise(small_config(tmp_path), [], None, None, Concluded("failed", 1.0, {}))
    assert (found["steps"], found["reward_first"], found["max_lag"], found["lost"]) == (0, None, None, None)
    assert in_words(found)[1] == "tickets not audited"
    assert summary.read(tmp_path / "nothing.json") == {}


def test_rates_are_weighted_by_time_with_long_pauses_capped() -> None:
    rows = [row(0, 0.0, r=999.0), row(1, 1.0, r=10.0), row(2, 4.0, r=30.0)]
    assert figures.average_rate(rows, "r") == pytest.approx((1 * 10 + 3 * 30) / 4)
    steady = [row(i, float(i), r=10.0) for i in range(11)]
    night = [*steady, row(11, 40_000.0, r=1.0)]
    assert figures.average_rate(night, "r") == pytest.approx((10 * 10 + 10 * 1) / 20)
    fast = [row(0, 0.0, r=999.0), row(1, 0.5, r=10.0), row(2, 0.75, r=40.0), row(3, 1.0), row(4, 0.5, r=1e6)]
    assert figures.average_rate(fast, "r") == pytest.approx((0.5 * 10 + 0.25 * 40) / 0.75), "a clock that was set back counts 0"
    assert figures.average_rate([row(step, 7.0, r=float(step)) for step in range(4)], "r") == 3.0
    assert figures.average_rate([rows[0], {"step": 1.0, "r": 7.0}, rows[2]], "r") == 30.0, "a damaged record has no time"
    assert figures.average_rate(rows[:1], "r") == 999.0
    assert figures.average_rate([], "r") is None


def test_numbers_are_formatted_for_people() -> None:
    assert [figures.duration(s) for s in (None, 4.21, 10.0, 42.0, 187.0)] == ["–", "4.2 s", "10 s", "42 s", "3:07"]
    assert [figures.duration(s) for s in (7387.0, 3600.0)] == ["2:03:07", "1:00:00"]
    rows = [row(step, 3.0 * step) for step in range(5)]
    assert figures.left_s(rows, 10) == pytest.approx(15.0)
    assert figures.left_s(rows, 5) == 0.0
    assert figures.left_s([*rows, {"step": 5.0}], 10) == pytest.approx(12.0)
    assert figures.left_s(rows[:1], 10) is None
    line = figures.step_line(row(4, 12.0, **{figures.REWARD: 0.25, figures.GENERATED: 1234.5}), 10, 15.0)
    assert line.startswith("step 4 (5/10)  reward 0.250  lag – (max –)  generated 1,234 tok/s  trained – tok/s")
    assert line.endswith("took –  left 15 s")
    evaluated = {"eval/version": 6.0, "eval/all/pass@1": 0.5, "eval/gsm8k/pass@1": 0.25, "eval/gsm8k/pass@4": 1.0, "step": 6.0}
    line = figures.evaluation_line(evaluated | {"eval/wall_s": 61.0})
    assert line == "evaluation of version 6: gsm8k pass@1 0.250  gsm8k pass@4 1.000  took 1:01"
    assert [figures.prompts_failed(count).partition(" failed")[0] for count in (1, 2, 1000)] == [
        "1 prompt", "2 prompts", "1,000 prompts",
    ]  # fmt: skip


def test_the_time_left_is_estimated_from_the_last_twenty_steps() -> None:
    spans = [20.0] * 9 + [5.0] + [3.0] * 19
    rows = [row(step, sum(spans[:step])) for step in range(30)]
    assert figures.left_s(rows, 40) == pytest.approx((5 + 19 * 3) / 20 * 10)


def test_a_pause_hardly_changes_the_estimate_of_the_time_left() -> None:
    rows = [row(step, 3.0 * step + (40_000.0 if step > 12 else 0.0)) for step in range(20)]
    left = figures.left_s(rows, 120)
    assert left is not None
    assert 300 <= left <= 500
