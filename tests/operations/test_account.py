"""A run's account balances: every second of every pod is accounted for, whatever is killed."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.config import to_toml
from services.console.commands.__main__ import main
from services.console.errors import ConsoleError
from services.console.run.folder import RunFolder
from services.operations.cost import Account, cost_of, read_account, write_account
from services.operations.samples.columns import SCHEMA
from services.operations.samples.folder import LogPosition, LogStatus, SampleFolder
from services.operations.samples.outcomes import sampled_tokens
from services.protocol.messages import PodStatus
from services.runtime.activity import ACTIVITIES, Activity, process_age_s
from services.tracker.writer import MERGED, PartWriter
from tests.operations.samples.made import columns_of, made_row
from tests.support.harness import small_config


def status(name: str, boot: str, devices: int = 1, **seconds: float) -> PodStatus:
    gauges = {"devices": float(devices)} | {f"seconds/{activity}": spent for activity, spent in seconds.items()}
    kind = name.partition("-")[0]
    return PodStatus(kind=kind, name=name, boot=boot, host="", pid=1, url="", phase="", version=0, world=0, gauges=gauges)


def test_only_killed_pods_have_downtime() -> None:
    found = Account()
    found.observe([(status("generator-0", "a", 2, loading=5.0, generating=10.5), 0.0)], 100.0, 3.0)
    old, new = status("generator-0", "a", 2, loading=5.0, generating=10.5), status("generator-0", "b", 2, loading=3.0)
    found.observe([(old, 8.0), (new, 0.0)], 108.0, 3.0)  # the killed pod has not expired yet
    assert found.pods() == {"generator-0": {"loading": 16.0, "generating": 21.0, "down": 10.0}}
    found.observe([], 108.5, 3.0)
    found.observe([(status("generator-0", "c", 2, loading=1.0), 0.0)], 200.0, 3.0)
    assert found.pods()["generator-0"] == {"loading": 18.0, "generating": 21.0, "down": 10.0}, "it had left before"
    assert found.device_seconds("trainer") == {}


def test_a_stop_that_outlasts_the_tracker_is_no_downtime() -> None:
    found = Account()
    found.observe([(status("trainer-0", "a", loading=5.0, training=95.0), 0.0)], 100.0, 3.0)
    found.stop()
    found.observe([(status("trainer-0", "a", loading=5.0, training=97.0), 0.0)], 102.0, 3.0)
    assert not found.processes["trainer-0:a"].left, "only the tracker was restarted"
    found.stop()
    found.observe([(status("trainer-0", "b", loading=3.0), 0.0)], 36_000.0, 3.0)
    assert found.pods() == {"trainer-0": {"loading": 8.0, "training": 97.0}}


def test_each_process_counts_with_its_own_devices() -> None:
    """A run may be resumed with more ranks, which does not change what its earlier processes have spent."""
    found = Account()
    found.observe([(status("trainer-0", "a", 1, training=100.0), 0.0)], 100.0, 3.0)
    found.observe([(status("trainer-0", "b", 4, training=10.0), 0.0)], 120.0, 3.0)
    assert found.device_seconds() == found.device_seconds("trainer") == {"training": 140.0, "down": 10.0}
    assert found.device_seconds("generator") == {}


lives = st.lists(st.tuples(st.floats(0.5, 50), st.floats(0.0, 20), st.sampled_from(ACTIVITIES)), min_size=1, max_size=6)


@given(lives=lives, restarts=st.sets(st.integers(0, 5)))
def test_the_account_balances(
    lives: list[tuple[float, float, str]], restarts: set[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A pod runs, is killed and restarts after a while; its observer is sometimes restarted."""
    folder = tmp_path_factory.mktemp("account")
    found, now, stale = Account(), 1000.0, list[tuple[PodStatus, float]]()
    for number, (lived_s, down_s, activity) in enumerate(lives):
        now += down_s if number else 0.0
        for part in (0.3, 1.0):
            beat_s = now + part * lived_s
            spent = dict.fromkeys(("loading", activity), part * lived_s / len({"loading", activity}))
            new = status("trainer-0", str(number), 3, **spent)
            found.observe([*((old, beat_s - at_s) for old, at_s in stale), (new, 0.0)], beat_s, 3.0)
        now += lived_s
        stale.append((new, now))
        if number in restarts:
            write_account(folder, found)
            found = read_account(folder)
    total = sum(found.device_seconds().values())
    assert total == pytest.approx(3 * (now - 1000.0))
    assert sum(found.by_outcome({"trained": 30.0, "stale": 10.0}).values()) == pytest.approx(total)
    generated = found.device_seconds().get("generating", 0.0) + found.device_seconds().get("scoring", 0.0)
    assert found.by_outcome({})["generated"] == pytest.approx(generated)


CLOCK_S = 0.1  # the clocks of processes agree to this precision


def test_a_process_is_counted_from_its_start() -> None:
    before_s, activity = process_age_s(), Activity()
    assert activity.gauges() == {}, "it has no devices"
    activity.devices = 2
    activity.enter("idle")
    loaded_s = process_age_s()
    time.sleep(0.05)
    looked_s, spent, after_s = process_age_s(), activity.spent(), process_age_s()
    assert before_s - CLOCK_S <= spent["loading"] <= loaded_s + CLOCK_S
    assert spent["idle"] >= 0.05
    assert looked_s - CLOCK_S <= sum(spent.values()) <= after_s + CLOCK_S
    assert activity.gauges().keys() == {"devices", "seconds/loading", "seconds/idle"}


def test_the_cost_of_a_run_that_has_just_begun_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunFolder.of(small_config(tmp_path)).path
    run.mkdir()
    (run / "config.toml").write_text(to_toml(small_config(tmp_path)))
    found = Account()
    found.observe([(status("trainer-0", "a", loading=0.001), 0.0)], 100.0, 1.0)
    write_account(run, found)
    assert main(["cost", str(run)]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["total", "0.000", "–"]


def test_the_cost_of_a_run_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "paid"
    run.mkdir()
    (run / "config.toml").write_text(to_toml(small_config(tmp_path, None, "run.name=paid")))
    assert main(["cost", str(run)]) == 2
    assert "has no account.json" in capsys.readouterr().err
    found = Account()
    pods = [
        status("trainer-0", "a", 2, loading=600.0, training=1800.0),
        status("generator-0", "b", generating=3600.0, idle=1200.0),
    ]
    found.observe([(pod, 0.0) for pod in pods], 1e9, 1.0)
    write_account(run, found)
    row = dict.fromkeys(SCHEMA.names) | {"sample": 0, "incarnation": 1, "tool_tokens": 10, "notes": ""}
    once = row | {"payload": "0-1.1", "step": 1, "outcome": "trained", "reason": "", "length": 310, "solved": True}
    rows = [
        once,
        once | {"incarnation": 2},  # after a restore
        once | {"step": 2},  # replayed
        row | {"payload": "0-2.1", "step": 1, "outcome": "filtered", "reason": "zero", "length": 110, "solved": False},
    ]
    PartWriter(run / "samples", 1000).write(columns_of(rows), LogPosition(1, 5, share=1.0))
    (run / "metrics.jsonl").write_text("".join(json.dumps({"step": i, "reward/gen/mean": 0.1 * i}) + "\n" for i in range(6)))
    assert sampled_tokens(run, {}).by_outcome == {"trained": 300.0, "filtered: zero": 100.0}
    assert main(["cost", str(run), "--json", "--price", "2"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["device_seconds"] == {"trained": 2 * 1800 + 2700, "filtered: zero": 900, "loading": 1200, "idle": 1200}
    assert facts["total"] == sum(facts["device_seconds"].values()) == 9600
    assert facts["cost"] == pytest.approx(9600 / 3600 * 2)
    assert facts["per"]["a solved prompt"] == 9600
    assert facts["per"]["a point of mean reward gained"] == pytest.approx(9600 / 0.5)
    assert main(["cost", str(run), "--price", "2"]) == 0
    table = " ".join(capsys.readouterr().out.split())
    assert "total 2.667 100.0% 5.333" in table
    assert "a solved prompt: 5.333" in table


def test_a_partially_sampled_log_is_scaled_for_unit_prices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.toml").write_text(to_toml(small_config(tmp_path, None)))
    found = Account()
    found.observe([(status("trainer-0", "a", training=3600.0), 0.0)], 1e9, 1.0)
    write_account(tmp_path, found)
    writer = PartWriter(tmp_path / "samples", 8)
    writer.write(columns_of([made_row(i, length=100) for i in range(4)]), LogPosition(1, 0, share=0.25))
    assert cost_of_tokens(tmp_path) == ({"trained": 1600.0}, 4)
    writer.write(columns_of([made_row(4 + i, length=100) for i in range(4)]), LogPosition(1, 1, share=1.0))
    assert cost_of_tokens(tmp_path) == ({"trained": 2000.0}, 5), "resumed with a different share"

    writer.note(LogStatus(first_step=3))
    changes = tmp_path / "changes.jsonl"
    assert note_of(tmp_path).endswith("the log begins at step 3")
    changes.write_text('{"step": 3, "changes": {}}\n')
    assert note_of(tmp_path).endswith("the log begins at step 3")
    changes.write_text('{"step": 3, "forked_from": "runs/old", "changes": {}}\n')
    assert cost_of_tokens(tmp_path) == ({"trained": 2000.0}, 5), "the run itself starts there"

    writer.note(LogStatus({"stale": 2, "filtered": 1}))
    assert note_of(tmp_path).endswith("not complete: 3 groups were missed because the tracker was behind or not running")
    writer.note(LogStatus())
    writer.write(columns_of([made_row(8 + i, length=100) for i in range(4)]), LogPosition(1, 1, share=1.0))
    writer.tidy()
    assert note_of(tmp_path).endswith("not complete: the oldest completions were deleted (samples.keep)")
    assert main(["cost", str(tmp_path)]) == 0
    assert note_of(tmp_path) in capsys.readouterr().out


def test_unit_prices_need_a_complete_log(tmp_path: Path) -> None:
    writer = begun(tmp_path)
    writer.write(columns_of([made_row(i, length=100) for i in range(4)]), LogPosition(1, 9, share=1.0))
    trained(tmp_path, range(60))
    assert cost_of_tokens(tmp_path) == ({"trained": 400.0}, 1), "the log may lag behind a running run"
    (tmp_path / "condition.json").write_text('{"condition": {"word": "running", "detail": ""}, "at": 1.0}')
    assert cost_of_tokens(tmp_path) == ({"trained": 400.0}, 1)
    trained(tmp_path, range(61))
    assert note_of(tmp_path).endswith("not complete: the sample log ends at step 9, the run at step 60")
    trained(tmp_path, range(14))
    assert cost_of_tokens(tmp_path) == ({"trained": 400.0}, 1)
    os.utime(tmp_path / "metrics.jsonl", (1e9, 1e9))
    assert note_of(tmp_path).endswith("the sample log ends at step 9, the run at step 13"), "the run is not running"
    trained(tmp_path, range(14))
    (tmp_path / "condition.json").write_text('{"condition": {"word": "finished", "detail": ""}, "at": 1.0}')
    assert note_of(tmp_path).endswith("the sample log ends at step 9, the run at step 13")
    trained(tmp_path, range(13))
    assert cost_of_tokens(tmp_path) == ({"trained": 400.0}, 1), "the last steps may have had no group to log"
    trained(tmp_path, range(4, 9), incarnation=2)
    assert note_of(tmp_path).endswith("the sample log ends at step 3, the run at step 8"), "restored, and not logged since"
    writer.write(columns_of([made_row(4 + i, length=100) for i in range(4)]), LogPosition(2, 8, share=0.25))
    trained(tmp_path, range(21))
    assert cost_of_tokens(tmp_path) == ({"trained": 2000.0}, 5), "of a share, more steps have no group"
    trained(tmp_path, range(22))
    assert note_of(tmp_path).endswith("the sample log ends at step 8, the run at step 21")
    assert sampled_tokens(begun(tmp_path / "empty").folder.path.parent, dict.fromkeys(range(51), 1.0)).missing == (
        "the sample log is empty, the run at step 50"
    )


def test_an_unreadable_configuration_cannot_be_resumed(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    folder = RunFolder.of(config)
    folder.path.mkdir(parents=True)
    folder.config.write_text("[run]\nsteps = 'many'\n")
    with pytest.raises(ConsoleError, match=r"cannot read .*; choose another run\.name or delete it with --fresh$") as refused:
        folder.check(config)
    assert "grpo fork" not in str(refused.value)


def begun(folder: Path, *overrides: str) -> PartWriter:
    """Start a run with an account; return the writer of its log."""
    folder.mkdir(exist_ok=True)
    (folder / "config.toml").write_text(to_toml(small_config(folder, None, *overrides)))
    found = Account()
    found.observe([(status("trainer-0", "a", training=3600.0), 0.0)], 1e9, 1.0)
    write_account(folder, found)
    return PartWriter(folder / "samples", 1000)


def trained(folder: Path, steps: Iterable[int], incarnation: int = 0) -> None:
    """Write the records of these steps."""
    records = [{"step": step} | ({"run/incarnation": float(incarnation)} if incarnation else {}) for step in steps]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def cost_of_tokens(folder: Path) -> tuple[dict[str, float], int]:
    """Return the tokens and solved prompts that unit prices are divided by, for a complete log."""
    cost = cost_of(folder)
    assert cost is not None
    assert not cost.note
    assert cost.yields == {"a million trained tokens": cost.tokens["trained"] / 1e6, "a solved prompt": cost.solved}
    return cost.tokens, cost.solved


def note_of(folder: Path) -> str:
    """Return why unit prices are omitted."""
    cost = cost_of(folder)
    assert cost is not None
    assert cost.tokens
    assert not cost.yields
    return cost.note


def test_files_of_different_shares_are_not_merged(tmp_path: Path) -> None:
    writer = PartWriter(tmp_path, 10**6)
    for i in range(MERGED + 1):
        writer.write(columns_of([made_row(i)]), LogPosition(1, i, share=1.0 if i else 0.5))
        writer.tidy()
    assert [(part.rows, part.position.share) for part in SampleFolder(tmp_path).refresh()] == [(1, 0.5), (MERGED, 1.0)]
