"""Trackers get every record once and in order, even if they or their process fail, and nothing waits for them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from services.config import ConfigError, RunConfig, digest, to_toml
from services.console.run.redis_server import RedisServer
from services.operations import observe
from services.operations.history import Cursor
from services.protocol.errors import StoreError
from services.runtime import tracking
from services.runtime.loops import Loop, end_tasks
from services.store import Store
from services.tracker import follower
from services.tracker.event_files import EventFiles
from services.tracker.follower import Follower, Record, backlog
from services.tracker.metrics import TrackerMetrics
from tests.support.harness import small_config, wait_until
from tests.support.preloading.starter import PLAIN
from tests.tracker.readers import read_tensorboard, read_wandb


def record(step: int) -> Record:
    return {"step": float(step), "time_s": 1e9 + step, "reward/train/mean": step / 8}


def evaluated(version: int) -> Record:
    return {"eval/version": float(version), "eval/main/pass@1": 0.5}


async def add_round(store: Store, version: int) -> None:
    await store.client.xadd(store.keys.evaluations, {"m": msgspec.json.encode(evaluated(version))})


class Recorder:
    """A tracker that records, fails a given number of times, and can be slow."""

    durable = True

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.rounds: list[int] = []
        self.failures, self.slow_s, self.opened, self.closed = 0, 0.0, 0, 0
        self.free = threading.Event()
        self.free.set()

    def open(self, name: str, config: RunConfig, folder: Path, identity: str) -> Recorder:
        self.opened += 1
        return self

    def write(self, steps: Sequence[Record], rounds: Sequence[Record]) -> None:
        time.sleep(self.slow_s)
        self.free.wait(60)
        if self.failures:
            self.failures -= 1
            raise RuntimeError("the tracker's own trouble")
        self.steps += [int(one["step"]) for one in steps]
        self.rounds += [int(one["eval/version"]) for one in rounds]

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(follower, "open_tracker", recorder.open)
    monkeypatch.setattr(follower, "POLL_S", 0.02)
    monkeypatch.setattr(follower, "RETRY_S", 0.02)
    for module in (follower, observe):
        monkeypatch.setattr(module, "BATCH", 3)
    return recorder


def following(store: Store, folder: Path) -> tuple[Follower, asyncio.Event, asyncio.Task[None]]:
    stopping = asyncio.Event()
    made = Follower(
        "wandb",
        small_config(folder, None, "tracking.wandb=project"),
        store,
        folder / "tracking",
        stopping,
        TrackerMetrics(CollectorRegistry()),
    )
    return made, stopping, asyncio.create_task(made.follow(Loop("wandb", made.follow, 60)))


async def test_every_record_reaches_the_tracker_once_and_in_order(store: Store, recorder: Recorder, tmp_path: Path) -> None:
    for step in (0, 1, 0, 1, 2, 3, 4):  # a killed trainer trains and records steps again
        await store.monitor.record(record(step))
    await add_round(store, 0)
    made, stopping, task = following(store, tmp_path)
    await wait_until(lambda: recorder.steps == [0, 1, 2, 3, 4])
    for step in (4, 5):
        await store.monitor.record(record(step))
    await add_round(store, 4)
    stopping.set()  # records up to here still arrive
    await task
    assert made.done.is_set()
    assert recorder.steps == list(range(6))
    assert recorder.rounds == [0, 4]
    assert (recorder.opened, recorder.closed) == (1, 1)


async def test_a_restored_run_is_recorded_again(store: Store, recorder: Recorder, tmp_path: Path) -> None:
    for step in range(5):
        await store.monitor.record(record(step))
    await add_round(store, 4)
    _, stopping, task = following(store, tmp_path)
    await wait_until(lambda: (recorder.steps, recorder.rounds) == ([0, 1, 2, 3, 4], [4]))
    for step in (2, 3, 3):
        await store.monitor.record(record(step) | {"run/incarnation": 17.0})
    await wait_until(lambda: recorder.steps[5:] == [2, 3])
    await store.client.xadd(store.keys.evaluations, {"m": msgspec.json.encode(evaluated(2) | {"run/incarnation": 17.0})})
    await wait_until(lambda: recorder.rounds == [4, 2])
    await store.monitor.record(record(4) | {"run/incarnation": 17.0})
    stopping.set()
    await task
    assert recorder.steps[5:] == [2, 3, 4]


def test_the_backlog_after_a_restore_counts_from_its_checkpoint() -> None:
    first, second, third = ({"step": 9, "run/incarnation": life} for life in (0.0, 17.0, 23.0))
    assert backlog(first, Cursor(4, 0.0), {}) == 5
    assert backlog(second, Cursor(4, 0.0), {17: 2}) == 8
    assert backlog(third, Cursor(4, 0.0), {17: 2, 23: 7}) == 8, "of both restores it has nothing"
    assert backlog(third, Cursor(3, 17.0), {17: 2, 23: 7}) == 6
    assert backlog({}, Cursor(), {}) == 0


async def test_a_new_process_continues_where_the_last_one_stopped(store: Store, recorder: Recorder, tmp_path: Path) -> None:
    for step in range(4):
        await store.monitor.record(record(step))
    _, _, task = following(store, tmp_path)
    await wait_until(lambda: recorder.steps == [0, 1, 2, 3])
    await end_tasks([task])
    await store.monitor.record(record(4))
    _, stopping, task = following(store, tmp_path)
    stopping.set()
    await task
    assert recorder.steps == [0, 1, 2, 3, 4]


async def test_a_damaged_position_costs_only_records_that_come_twice(store: Store, recorder: Recorder, tmp_path: Path) -> None:
    """The file is damaged as if the machine had lost power while it was written."""
    (tmp_path / "tracking").mkdir()
    (tmp_path / "tracking" / "wandb.json").write_bytes(b"")
    await store.monitor.record(record(0))
    made, stopping, task = following(store, tmp_path)
    await wait_until(lambda: recorder.steps == [0])
    stopping.set()
    await task
    assert made.done.is_set()


async def test_undurable_records_are_sent_again_after_a_restart(store: Store, recorder: Recorder, tmp_path: Path) -> None:
    recorder.durable = False
    for step in range(4):
        await store.monitor.record(record(step))
    _, _, task = following(store, tmp_path)
    await wait_until(lambda: recorder.steps == [0, 1, 2, 3])
    await end_tasks([task])
    recorder.steps = []
    for _ in range(2):
        await store.monitor.record(record(4))
        _, stopping, task = following(store, tmp_path)
        stopping.set()
        await task
        assert recorder.steps == [0, 1, 2, 3, 4]  # closed cleanly, so the last process has nothing to do


async def test_an_outage_of_redis_repeats_nothing(
    store: Store, recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The outage restarts the loop while the tracker is still open."""
    recorder.durable, stopping, failures, read = False, asyncio.Event(), list[str](), store.monitor.metrics
    made = Follower(
        "wandb", small_config(tmp_path, None, "tracking.wandb=project"), store, tmp_path / "tracking", stopping,
        TrackerMetrics(CollectorRegistry()),
    )  # fmt: skip

    async def failing(after: str, count: int) -> list[tuple[str, Record]]:
        if len(failures) < 2:
            failures.append(after)
            raise StoreError("Redis cannot be reached")
        return await read(after, count)

    for step in range(4):
        await store.monitor.record(record(step))
    task = asyncio.create_task(Loop("wandb", made.follow, 60).supervise())
    await wait_until(lambda: recorder.steps == [0, 1, 2, 3])
    monkeypatch.setattr(store.monitor, "metrics", failing)
    await wait_until(lambda: len(failures) == 2)
    await store.monitor.record(record(4))
    stopping.set()
    await task
    assert recorder.steps == [0, 1, 2, 3, 4]


async def test_an_outage_of_the_volume_loses_nothing(
    store: Store, recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tracker loses what it does not have durably, and its position cannot be read when the loop restarts."""
    recorder.durable, stopping, read, unread = False, asyncio.Event(), Path.read_bytes, list[Path]()
    made = Follower(
        "wandb", small_config(tmp_path, None, "tracking.wandb=project"), store, tmp_path / "tracking", stopping,
        TrackerMetrics(CollectorRegistry()),
    )  # fmt: skip

    def unreadable(path: Path) -> bytes:
        if path.parent == tmp_path / "tracking" and len(unread) < 2:
            unread.append(path)
            raise OSError(5, "Input/output error")
        return read(path)

    def gone() -> None:
        recorder.steps = []
        raise OSError(5, "Input/output error")

    for step in range(3):
        await store.monitor.record(record(step))
    task = asyncio.create_task(Loop("wandb", made.follow, 60).supervise())
    await wait_until(lambda: recorder.steps == [0, 1, 2])
    with monkeypatch.context() as outage:
        outage.setattr(Path, "read_bytes", unreadable)
        outage.setattr(recorder, "close", gone)
        recorder.failures = 1
        await store.monitor.record(record(3))
        await wait_until(lambda: len(unread) == 2)
        outage.setattr(recorder, "close", lambda: None)
    await wait_until(lambda: 3 in recorder.steps)
    stopping.set()
    await task
    assert recorder.steps == [0, 1, 2, 3]


async def test_a_failing_tracker_is_logged_once_and_retried(store: Store, recorder: Recorder, tmp_path: Path) -> None:
    recorder.failures = 5
    await store.monitor.record(record(0))
    with capture_logs() as logs:
        _, stopping, task = following(store, tmp_path)
        await wait_until(lambda: recorder.steps == [0])
        stopping.set()
        await task
    assert [log["event"] for log in logs] == ["tracker failed, retrying", "tracker works again"]
    assert recorder.opened == 6


async def test_a_broken_tracker_ends_with_the_run_and_keeps_records(store: Store, recorder: Recorder, tmp_path: Path) -> None:
    recorder.failures = 10**9
    await store.monitor.record(record(0))
    _, stopping, task = following(store, tmp_path)
    await wait_until(lambda: recorder.opened > 2)
    stopping.set()
    await asyncio.wait_for(task, 30)
    recorder.failures = 0
    _, stopping, task = following(store, tmp_path)
    stopping.set()
    await task
    assert recorder.steps == [0]


async def test_a_slow_tracker_blocks_nothing(store: Store, recorder: Recorder, tmp_path: Path) -> None:
    recorder.free.clear()
    await store.monitor.record(record(0))
    _, stopping, task = following(store, tmp_path)
    await wait_until(lambda: recorder.opened)
    async with asyncio.timeout(30):
        for step in range(1, 20):
            await store.monitor.record(record(step))
            await asyncio.sleep(0)
    assert recorder.steps == []
    recorder.free.set()
    await wait_until(lambda: recorder.steps == list(range(20)))
    stopping.set()
    await task


def test_event_files_are_read_by_tensorboard(tmp_path: Path) -> None:
    for steps in ((0, 1), (2,)):  # two processes
        files = EventFiles(tmp_path)
        files.write([record(step) for step in steps], [evaluated(step) for step in steps])
        files.close()
    torn = EventFiles(tmp_path)  # a third was killed while writing a record
    torn.write([record(3)], [])
    newest = max(tmp_path.iterdir())
    newest.write_bytes(newest.read_bytes()[:-5])
    torn.close()
    seen = read_tensorboard(tmp_path)
    assert seen["reward/train/mean"] == {0: 0, 1: 0.125, 2: 0.25}
    assert seen["eval/main/pass@1"] == {0: 0.5, 1: 0.5, 2: 0.5}
    assert seen["time_s"][2] == pytest.approx(1e9 + 2)


def test_a_tracker_that_cannot_work_is_rejected_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = small_config(tmp_path, None, "tracking.tensorboard=true", "tracking.wandb=project")
    assert both.tracking.trackers == ("tensorboard", "wandb")
    tracking.check_tracking(both, {})
    home = tmp_path / "netrc"
    online = {"NETRC": str(home), "WANDB_MODE": "online"}
    with pytest.raises(ConfigError, match="needs a key: set WANDB_API_KEY"):
        tracking.check_tracking(both, online)
    tracking.check_tracking(both, online | {"WANDB_API_KEY": "k"})
    tracking.check_tracking(small_config(tmp_path, None, "tracking.tensorboard=true"), online)
    home.write_text("machine api.wandb.ai login user password k\n")
    home.chmod(0o600)
    tracking.check_tracking(both, online)
    with pytest.raises(ConfigError, match=r"tracking\.wandb = 'a b'"):
        small_config(tmp_path, None, "tracking.wandb=a b")
    monkeypatch.setattr(tracking.importlib.util, "find_spec", lambda name: None)
    tracking.check_tracking(small_config(tmp_path), {})
    with pytest.raises(
        ConfigError, match=r"tracking\.tensorboard = True needs the package tensorboard.*pip install 'grpo\[tracking\]'"
    ):
        tracking.check_tracking(both, {})


def test_trackers_do_not_change_the_digest(tmp_path: Path) -> None:
    assert digest(small_config(tmp_path)) == digest(small_config(tmp_path, None, "tracking.tensorboard=true"))


class Pod:
    """A tracker process."""

    def __init__(self, config: Path, log: Path) -> None:
        environ = os.environ | {
            "PYTHONWARNINGS": "error",
            "WANDB_MODE": "offline",
            "WANDB__SERVICE_WAIT": "120",  # W&B's process starts slowly on a busy machine
            "GRPO_API_TOKEN": "t",
            "HOME": str(log.parent),
            PLAIN: "1",  # imports in a new process, so that their warnings are errors, too
        }
        command = [sys.executable, "-m", "services.tracker", "--config", str(config), "--name", "tracker-0"]
        self.log = log
        with log.open("ab") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out, env=environ)

    def until(self, true: Callable[[], object]) -> None:
        deadline = time.monotonic() + 150
        while not true():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)


@pytest.mark.timeout(360)
def test_both_trackers_survive_a_kill_without_loss(server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SERVICE", f"3-{os.getpid()}-unix-{tmp_path}")  # as in a process that uses W&B and starts a run
    name = f"t-{uuid.uuid4().hex[:12]}"
    config = small_config(tmp_path, server, f"run.name={name}", "tracking.tensorboard=true", "tracking.wandb=project")
    path, folder = tmp_path / "resolved.toml", tmp_path / name / "tracking"
    path.write_text(to_toml(config))

    def position(tracker: str) -> int:
        found = folder / f"{tracker}.json"
        return msgspec.json.decode(found.read_bytes())["steps"]["number"] if found.exists() else -1

    def begun() -> bool:
        return position("tensorboard") == 2 and bool(list(folder.glob("wandb/offline-run-*/*.wandb")))

    async def in_redis(*records: Record, end: bool = False) -> None:
        store = await Store.connect(server.url, name, server.password)
        await store.run.create(digest(config), "data", 6, 8)
        for one in records:
            await store.monitor.record(one)
        if end:
            await add_round(store, 6)
            await store.run.finish("trained 6 of 6 steps")
        await store.close()

    async def delete() -> None:
        store = await Store.connect(server.url, name, server.password)
        await store.restores.delete_run()
        await store.close()

    pod = Pod(path, tmp_path / "log")
    try:
        asyncio.run(in_redis(*map(record, range(3))))
        pod.until(begun)
        pod.process.send_signal(signal.SIGKILL)
        pod.process.wait()
        asyncio.run(in_redis(*map(record, (3, 4))))
        pod = Pod(path, tmp_path / "log")
        asyncio.run(in_redis(record(5), end=True))
        assert pod.process.wait(150) == 0, pod.log.read_text()
    finally:
        pod.process.kill()
        pod.process.wait()
        asyncio.run(delete())
    seen = read_tensorboard(folder / "tensorboard")
    assert seen["reward/train/mean"] == {step: step / 8 for step in range(6)}
    assert seen["eval/main/pass@1"] == {6: 0.5}
    assert position("tensorboard") == position("wandb") == 5, pod.log.read_text()
    rows = read_wandb(folder / "wandb")  # rows that the first process lost are in the second's file
    assert {row["step"]: row["reward/train/mean"] for row in rows if "reward/train/mean" in row} == {s: s / 8 for s in range(6)}
    assert [row["eval/version"] for row in rows if "eval/version" in row] == [6]
    assert len({path.stem.split("-")[3] for path in (folder / "wandb").glob("offline-run-*")}) == 1  # one identity
    commands = [
        line["command"] for line in map(json.loads, pod.log.read_text().splitlines()) if "wandb sync" in line.get("command", "")
    ]
    assert [set(map(Path, command.split()[4:])) for command in commands] == [set((folder / "wandb").glob("offline-run-*"))]
