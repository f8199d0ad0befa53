"""Every finished group is logged once, whatever happens to the tracker, and training never waits for it."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry

from services.config import RunConfig, to_toml
from services.console.run.redis_server import RedisServer
from services.operations.samples.folder import SAMPLES, SampleFolder
from services.operations.samples.outcomes import sampled_tokens
from services.operations.samples.search import Search
from services.protocol.logprob_gaps import LogprobGaps
from services.runtime.loops import Loop
from services.store import Store
from services.store.samples import is_sampled
from services.store.snapshot_format import Snapshot
from services.tracker import ended, sample_log
from services.tracker.metrics import TrackerMetrics
from services.tracker.sample_log import SampleLog
from services.tracker.writer import PartWriter
from services.trainer.step.logprob_gaps import codes
from tests.support.flow import Team, buffer, claim, issue, prepare, settle, start, submit
from tests.support.harness import small_config, wait_until


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_log, "POLL_S", 0.02)
    monkeypatch.setattr(sample_log, "LONGEST_S", 0.02)
    monkeypatch.setattr(ended, "BATCH", 3)


async def trained(store: Store, team: Team, step: int, groups: int = 2) -> list[str]:
    """Train one step of new groups."""
    names = await buffer(store, team, groups, oldest=step)
    await prepare(store, team, step, names)
    await store.steps.commit(team.trainer, step)
    await store.steps.publish(team.trainer, step + 1)
    return names


async def covered(store: Store, team: Team, step: int) -> int:
    """Cover a step by a checkpoint; return the number of retired steps."""
    await store.steps.checkpointed(team.trainer, step)
    return await store.steps.retire()


async def dropped(store: Store, team: Team, action: str, version: int) -> str:
    await issue(store, team, 1)
    [one] = await claim(store, "g", 1, version)
    assert await submit(store, "g", one, version)
    await settle(store, team, action)
    return one.ticket_id


def config_of(folder: Path, server: RedisServer | None = None, *overrides: str) -> RunConfig:
    return small_config(folder, server, "samples.keep=100000", *overrides)


async def follow_once(store: Store, config: RunConfig, folder: Path) -> CollectorRegistry:
    """Log everything available with a tracker that is stopped at once; return its metrics."""
    stopping, registry = asyncio.Event(), CollectorRegistry()
    stopping.set()
    made = SampleLog(config, store, folder, stopping, TrackerMetrics(registry))
    await made.follow(Loop("samples", made.follow, 60))
    assert made.done.is_set()
    return registry


def logged(folder: Path, where: str = "") -> list[dict[str, Any]]:
    return Search.of(folder / SAMPLES).find(where, limit=10_000).rows


def outcomes(folder: Path, where: str = "") -> Counter[tuple[str, str, int]]:
    return Counter((row["group"], row["outcome"], row["step"]) for row in logged(folder, where))


async def test_every_finished_group_is_logged_with_its_completions(store: Store, quick: None, tmp_path: Path) -> None:
    config = config_of(tmp_path)
    team = await start(store, slots=64)
    await follow_once(store, config, tmp_path)  # takes the lease
    one, two = await trained(store, team, 0)
    three = await dropped(store, team, "filtered:zero", 1)
    await issue(store, team, 1)
    [four] = await claim(store, "g", 1, 1)
    await store.tickets.fail("g", four, "the engine refused it", 1)
    await follow_once(store, config, tmp_path)
    assert outcomes(tmp_path) == {
        (one, "trained", 0): 4,
        (two, "trained", 0): 4,
        (three, "filtered", 1): 4,
        (four.ticket_id, "failed", 1): 1,
    }
    [row] = logged(tmp_path, f"group == '{one}' and sample == 1")
    assert (row["reward"], row["scores"], row["length"], row["oldest"], row["advantage"]) == (
        1.0,
        {"exact": 1.0},
        2,
        0,
        pytest.approx(1.0),
    )
    assert row["logprobs"] == [-1.0, -1.0]
    assert len(row["tokens"]) == 2
    [row] = logged(tmp_path, "outcome == 'failed'")
    assert (row["sample"], row["reason"], row["prompt_tokens"]) == (None, "the engine refused it", 3)
    [row] = logged(tmp_path, "outcome == 'filtered' and sample == 0")
    assert row["reason"] == "zero"
    assert len(row["tokens"]) == 2, "its tokens were kept until logged"
    assert await store.samples.waiting(10) == []
    assert await covered(store, team, 0) == 1


def gaps_of(payload: str, value: float) -> LogprobGaps:
    """Return a gap for each token of the four completions of a group."""
    code = codes([torch.full((8,), value)]).numpy().tobytes()
    return LogprobGaps([payload] * 4, [0, 1, 2, 3], [2] * 4, code)


async def test_the_trainers_gaps_are_logged_with_the_tokens(
    store: Store, quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step waits for outstanding gaps up to a limit; gaps of other payloads and damaged ones are ignored."""
    config = config_of(tmp_path)
    team = await start(store, slots=64)
    await follow_once(store, config, tmp_path)
    names = [await trained(store, team, step, 1) for step in range(4)]
    payloads = [record.payload for [name] in names for record in (await store.inspection.group_records([name])).values()]
    await store.samples.send_gaps(0, 0, gaps_of(payloads[0], 0.5))
    await store.samples.send_gaps(1, 0, gaps_of("0-1.99", 0.5))  # belong to a step before a restore
    await store.client.set(store.keys.logprob_gaps(2, 0), b"damaged", ex=60)
    real, late = store.samples.gaps, asyncio.Event()

    async def gaps(step: int, ranks: int) -> Any:
        found = await real(step, ranks)
        if step == 3 and not late.is_set():
            late.set()
            await store.samples.send_gaps(3, 0, gaps_of(payloads[3], -0.25))
        return found

    monkeypatch.setattr(store.samples, "gaps", gaps)
    monkeypatch.setattr(ended, "GAPS_POLL_S", 0.01)
    await follow_once(store, config, tmp_path)
    found = {row["step"]: row for row in logged(tmp_path, "sample == 2")}
    assert found[0]["gaps"] == pytest.approx([0.5, 0.5], rel=0.05)
    assert found[1]["gaps"] is found[2]["gaps"] is found[2]["gap_mean"] is None
    assert found[3]["gaps"] == pytest.approx([-0.25, -0.25], rel=0.05)
    assert found[3]["gap_max"] == pytest.approx(0.25, rel=0.05)
    ttl_s = await store.client.ttl(store.keys.logprob_gaps(3, 0))
    assert 0 < ttl_s <= 300


async def test_a_tracker_killed_at_any_point_logs_nothing_twice(
    store: Store, quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unhandled error kills it before and after every acknowledgement and every file."""
    config, chance = config_of(tmp_path), random.Random(5)
    team = await start(store, slots=64)
    await follow_once(store, config, tmp_path)
    expected = Counter[tuple[str, str, int]]()

    class Killed(BaseException):
        pass

    def dying(function: Any) -> Any:
        async def call(*args: Any, **named: Any) -> Any:
            if chance.random() < 0.3:
                raise Killed
            result = await function(*args, **named)
            if chance.random() < 0.3:
                raise Killed
            return result

        return call

    real_write, real_log = PartWriter.write, store.samples.log

    def write(self: PartWriter, *args: Any) -> Any:
        if chance.random() < 0.3:
            (self.folder.path / ".part-half").write_bytes(b"half")
            raise Killed
        part = real_write(self, *args)
        if chance.random() < 0.3:
            raise Killed
        return part

    deaths = 0
    for step in range(8):
        for name in await trained(store, team, step):
            expected[name, "trained", step] = 4
        expected[await dropped(store, team, "stale", step + 1), "stale", step + 1] = 4
        with monkeypatch.context() as patched:
            patched.setattr(PartWriter, "write", write)
            patched.setattr(store.samples, "log", dying(real_log))
            for _ in range(3):
                try:
                    await follow_once(store, config, tmp_path)
                except Killed:
                    deaths += 1
        await covered(store, team, step)
    await follow_once(store, config, tmp_path)
    assert deaths > 5
    assert outcomes(tmp_path) == expected
    assert await store.samples.missed() == {}


async def test_undone_steps_are_replaced_after_a_restore(store: Store, quick: None, tmp_path: Path) -> None:
    config = config_of(tmp_path)
    team = await start(store, slots=64)
    await follow_once(store, config, tmp_path)
    before = [await trained(store, team, step, 1) for step in range(3)]
    await follow_once(store, config, tmp_path)
    run = store.keys.run
    state = await store.run.state()
    assert state is not None
    await store.client.hset(
        run, mapping={"incarnation": state.incarnation + 9, "committed_step": 0, "prepared_step": 0, "retired_step": 0}
    )
    await store.client.delete(store.keys.step(1), store.keys.step(2))
    again = await trained(store, team, 1, 1)
    await follow_once(store, config, tmp_path)
    assert outcomes(tmp_path) == {(before[0][0], "trained", 0): 4, (again[0], "trained", 1): 4}
    assert outcomes(tmp_path, "undone").keys() == {(before[1][0], "trained", 1), (before[2][0], "trained", 2)}


async def test_a_share_is_logged_and_steps_without_samples_are_done(store: Store, quick: None, tmp_path: Path) -> None:
    config = config_of(tmp_path, None, "samples.share=0.3")
    team = await start(store, slots=64)
    await follow_once(store, config, tmp_path)
    names = [name for step in range(6) for name in await trained(store, team, step)]
    await follow_once(store, config, tmp_path)
    assert {group for group, _, _ in outcomes(tmp_path)} == {name for name in names if is_sampled(name, 0.3)}
    assert await covered(store, team, 5) == 6
    assert {part.position.share for part in SampleFolder(tmp_path / SAMPLES).refresh()} == {0.3}


async def test_a_log_that_starts_late_reports_missed_groups(store: Store, quick: None, tmp_path: Path) -> None:
    team = await start(store, slots=64)
    for step in range(3):
        await trained(store, team, step)
    assert await covered(store, team, 1) == 2
    await follow_once(store, config_of(tmp_path), tmp_path)
    assert {step for _, _, step in outcomes(tmp_path)} == {2}
    assert SampleFolder(tmp_path / SAMPLES).status().first_step == 2


async def test_missed_groups_are_recorded_in_the_folder(store: Store, quick: None, tmp_path: Path) -> None:
    team = await start(store, slots=64)
    await store.samples.log(1, -1, 1.0, 0.0)
    await dropped(store, team, "filtered:zero", 0)
    metrics = await follow_once(store, config_of(tmp_path), tmp_path)
    assert SampleFolder(tmp_path / SAMPLES).status().missed == {"filtered": 1}
    assert metrics.get_sample_value("grpo_tracker_missed_groups") == 1


async def test_counts_survive_the_loss_of_redis(store: Store, quick: None, tmp_path: Path) -> None:
    team = await start(store, slots=64)
    await store.samples.log(1, -1, 1.0, 0.0)
    await dropped(store, team, "filtered:zero", 0)
    await follow_once(store, config_of(tmp_path), tmp_path)
    await store.client.delete(store.keys.samples_state)
    metrics = await follow_once(store, config_of(tmp_path), tmp_path)
    assert SampleFolder(tmp_path / SAMPLES).status().missed == {"filtered": 1}
    assert metrics.get_sample_value("grpo_tracker_missed_groups") == 1


async def test_a_restarted_tracker_counts_missed_groups_once(store: Store, quick: None, tmp_path: Path) -> None:
    """They are missed after the loss of Redis, whose count starts again."""
    team, config = await start(store, slots=64), config_of(tmp_path)
    await store.samples.log(1, -1, 1.0, 0.0)
    for _ in range(2):
        await dropped(store, team, "filtered:zero", 0)
    await follow_once(store, config, tmp_path)
    await store.client.delete(store.keys.samples_state)
    await follow_once(store, config, tmp_path)
    await store.client.hset(store.keys.samples_state, "until_ms", "0")  # type: ignore[misc]
    await dropped(store, team, "filtered:zero", 0)
    for _ in range(2):
        metrics = await follow_once(store, config, tmp_path)
        assert SampleFolder(tmp_path / SAMPLES).status().missed == {"filtered": 3}
        assert metrics.get_sample_value("grpo_tracker_missed_groups") == 3


async def test_a_rarely_written_log_misses_no_step(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first file, the next is due after a million seconds or once enough steps are waiting."""
    for name, value in {"POLL_S": 0.01, "SHARE": 1e-12, "LONGEST_S": 1e6, "WAITING_BYTES": 1 << 60}.items():
        monkeypatch.setattr(sample_log, name, value)
    team, stopping, steps = await start(store, slots=256), asyncio.Event(), 33
    made = SampleLog(config_of(tmp_path), store, tmp_path, stopping, TrackerMetrics(CollectorRegistry()))
    following = asyncio.create_task(made.follow(Loop("samples", made.follow, 60)))
    await wait_until(lambda: store.client.hexists(store.keys.samples_state, "share"))
    for step in range(steps):
        await trained(store, team, step)
        await wait_until(lambda step=step: step - made._position.step < 2 * sample_log.WAITING_STEPS)
        if step % 11 == 10:
            await covered(store, team, step)
    stopping.set()
    await following
    assert await store.samples.missed() == {}
    assert {step for _, _, step in outcomes(tmp_path)} == set(range(steps))
    assert len(SampleFolder(tmp_path / SAMPLES).refresh()) <= steps / sample_log.WAITING_STEPS + 3


async def test_a_repeatedly_killed_process_logs_every_group_once(store: Store, server: RedisServer, tmp_path: Path) -> None:
    """Real processes are killed with SIGKILL while groups finish."""
    config = config_of(tmp_path, server, f"run.name={store.keys.name}")
    folder = tmp_path / store.keys.name
    folder.mkdir(exist_ok=True)
    path = folder / "config.toml"
    path.write_text(to_toml(config))
    command = [sys.executable, "-m", "services.tracker", "--config", str(path), "--name", "tracker-0"]
    team = await start(store, slots=64)
    expected = Counter[tuple[str, str, int]]()
    chance, step = random.Random(3), 0

    def begin() -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    for round_ in range(3):
        process = begin()
        try:
            if round_ == 0:
                await wait_until(lambda: store.client.hexists(store.keys.samples_state, "share"))
            parts = len(list((folder / SAMPLES).glob("part*")))
            for _ in range(3):
                for name in await trained(store, team, step):
                    expected[name, "trained", step] = 4
                step += 1
                expected[await dropped(store, team, "stale", step), "stale", step] = 4
                await covered(store, team, step - 1)
            if round_:
                await wait_until(lambda parts=parts: len(list((folder / SAMPLES).glob("part*"))) > parts)
            await asyncio.sleep(chance.random() * 0.05)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
    await follow_once(store, config, folder)
    assert outcomes(folder) == expected
    assert await store.samples.missed() == {}


@pytest.mark.parametrize("restores", [1, 2])
async def test_restores_without_a_tracker_undo_what_was_logged(store: Store, quick: None, tmp_path: Path, restores: int) -> None:
    """The tracker returns once the retrained steps are retired, or after another restore."""
    config, snapshot = config_of(tmp_path), tmp_path / "snapshot"
    team = await start(store, slots=64)
    await follow_once(store, config, tmp_path)
    first = await trained(store, team, 0, 1)
    await store.snapshots.save(team.trainer, 0, snapshot, payloads=True)
    before = {step: await trained(store, team, step, 1) for step in (1, 2)}
    await follow_once(store, config, tmp_path)
    again = dict[int, list[str]]()
    for last in (0, 2)[:restores]:
        trainer = await store.run.attach_trainer()
        await store.restores.restore(trainer, Snapshot(snapshot), True, lambda: None)
        leader = await store.run.lead(f"after {last}", 60.0)
        assert leader is not None
        team = Team(leader, trainer)
        await store.steps.publish(trainer, last + 1)
        await store.client.hset(store.keys.samples_state, "until_ms", 0)  # the tracker's lease has expired
        again |= {step: await trained(store, team, step, 1) for step in (last + 1, last + 2)}
        await store.snapshots.save(trainer, last + 2, snapshot, payloads=True)
        again[last + 3] = await trained(store, team, last + 3, 1)
        assert await covered(store, team, last + 2) == 2
    await follow_once(store, config, tmp_path)
    newest = max(again)
    assert outcomes(tmp_path).keys() == {(first[0], "trained", 0), (again[newest][0], "trained", newest)}
    assert outcomes(tmp_path, "undone").keys() == {(names[0], "trained", step) for step, names in before.items()}


async def test_groups_that_a_restore_brings_back_are_logged_again(store: Store, quick: None, tmp_path: Path) -> None:
    config = config_of(tmp_path)
    team = await start(store, slots=64)
    await follow_once(store, config, tmp_path)
    await trained(store, team, 0, 1)
    [name] = await buffer(store, team, 1, oldest=1)
    await store.snapshots.save(team.trainer, 0, tmp_path / "snapshot", payloads=True)
    await prepare(store, team, 1, [name])
    await store.steps.commit(team.trainer, 1)
    await follow_once(store, config, tmp_path)
    assert outcomes(tmp_path)[name, "trained", 1] == 4
    await store.steps.publish(team.trainer, 2)
    await trained(store, team, 2, 3)
    trainer = await store.run.attach_trainer()
    await store.restores.restore(trainer, Snapshot(tmp_path / "snapshot"), True, lambda: None)
    leader = await store.run.lead("after", 60.0)
    assert leader is not None
    await prepare(store, Team(leader, trainer), 1, [name])
    await store.steps.commit(trainer, 1)
    metrics = await follow_once(store, config, tmp_path)
    assert metrics.get_sample_value("grpo_tracker_missed_groups") == 3, "step 2 was deleted unread"
    assert SampleFolder(tmp_path / SAMPLES).status().missed == {"trained": 3}
    assert outcomes(tmp_path)[name, "trained", 1] == 4
    assert outcomes(tmp_path, "undone") == {(name, "trained", 1): 4}


def damage(part: Path) -> None:
    """Overwrite the columns of a file but not its footer, so that the damage goes unnoticed until the file is read."""
    body = part.read_bytes()
    part.write_bytes(body[:4] + bytes(len(body) - 8000) + body[-7996:])


async def test_a_log_continues_after_a_file_whose_columns_are_damaged(store: Store, quick: None, tmp_path: Path) -> None:
    config = config_of(tmp_path)
    team = await start(store, slots=64)
    await follow_once(store, config, tmp_path)
    groups = await trained(store, team, 0)
    await follow_once(store, config, tmp_path)
    [part] = (tmp_path / SAMPLES).glob("part-*.parquet")
    damage(part)
    await follow_once(store, config, tmp_path)
    assert (tmp_path / SAMPLES / f"damaged-{part.name}").exists()
    assert outcomes(tmp_path) == {(group, "trained", 0): 4 for group in groups}, "Redis still has them"


async def test_a_damaged_file_is_not_merged(store: Store, quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(tmp_path)
    team = await start(store, slots=64)
    await follow_once(store, config, tmp_path)
    for step in range(2):
        groups = await trained(store, team, step)
        await follow_once(store, config, tmp_path)
    monkeypatch.setattr("services.tracker.writer.MERGED", 2)
    writer = PartWriter(tmp_path / SAMPLES, 1000)
    first, second = (part.path for part in writer.folder.parts)
    damage(first)
    read = Search.of(tmp_path / SAMPLES)
    assert {row["group"] for row in read.find().rows} == set(groups), "readers leave it out, too"
    assert read.folder.damaged.keys() == {first.name}
    assert "missing or damaged" in sampled_tokens(tmp_path, {0: 0.0, 1: 0.0}).missing
    writer.tidy()
    assert sorted(path.name for path in (tmp_path / SAMPLES).glob("*part-*")) == [f"damaged-{first.name}", second.name]
    assert outcomes(tmp_path) == {(group, "trained", 1): 4 for group in groups}
