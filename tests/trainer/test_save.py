"""The pre-stop hook of a trainer pod requests a checkpoint, and returns immediately if none can be written."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from services.config import RunConfig, to_toml
from services.console.run.redis_server import RedisServer
from services.protocol.messages import PodStatus
from services.runtime.child_processes import ChildService, ServicePlan
from services.store import Store
from tests.support.harness import small_config, wait_until
from tests.trainer.test_node import loading_rank, started

TTL_S = 60.0
AT_ONCE_S = 60.0  # generous for a busy machine; a real wait takes minutes


@pytest.fixture
def config(store: Store, server: RedisServer, tmp_path: Path) -> RunConfig:
    config = small_config(tmp_path, server, f"run.name={store.keys.name}", f"fleet.ttl_s={TTL_S}")
    (tmp_path / "resolved.toml").write_text(to_toml(config))
    return config


def save(folder: Path, module: str = "services.trainer.save", *words: str) -> subprocess.CompletedProcess[str]:
    """Run the hook, or another module, to completion."""
    environ = {**os.environ, "GRPO_CONFIG": str(folder / "resolved.toml"), "GRPO_POD": "trainer-1"}
    return subprocess.run(
        [sys.executable, "-m", module, *words], env=environ, capture_output=True, text=True, timeout=100, check=False
    )


async def refuses(folder: Path, why: str) -> None:
    """Check that the hook returns immediately, without an error and without requesting a checkpoint."""
    began = time.monotonic()
    done = await asyncio.to_thread(save, folder)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{why}\n", "")
    assert time.monotonic() - began < AT_ONCE_S


def trainer(phase: str, boot: str = "one") -> PodStatus:
    return PodStatus("trainer", "trainer-0", boot, "here", 1, "", phase, 3, 0, {})


async def train(store: Store, committed: int = 3) -> int:
    """Create a run with a trainer and steps that no checkpoint covers; return the trainer's fence."""
    await store.run.create("config", "data", 9, 8)
    await store.client.hset(store.keys.run, "committed_step", committed)  # type: ignore[misc]
    await store.fleet.beat(trainer("training"), TTL_S)
    return await store.run.attach_trainer()


async def request(store: Store) -> str:
    """Return the open request for a checkpoint, or an empty string."""
    state = await store.run.state()
    assert state is not None
    return state.checkpoint


async def test_a_run_with_nothing_to_write_is_not_awaited(config: RunConfig, store: Store, tmp_path: Path) -> None:
    await refuses(tmp_path, "nothing to write: the run does not exist yet")
    usual = await asyncio.to_thread(save, tmp_path, "services.console.commands", "checkpoint", "--wait")
    assert usual.returncode == 2, "`grpo checkpoint` reports that there is no run"
    assert "does not exist in its Redis" in usual.stderr
    await store.fleet.beat(trainer("loading"), TTL_S)
    early = await asyncio.to_thread(save, tmp_path, "services.console.commands", "checkpoint", "--wait")
    assert (early.returncode, "is starting: try again in a few seconds" in early.stderr) == (2, True)
    fence = await train(store, committed=-1)
    await refuses(tmp_path, "nothing to write: every trained step is in a checkpoint")
    await store.client.hset(store.keys.run, "committed_step", 3)  # type: ignore[misc]
    await store.run.finish("trained 4 of 4 steps", fence)
    await refuses(tmp_path, "nothing to write: the run has finished: trained 4 of 4 steps")


async def test_a_missing_trainer_is_not_awaited(config: RunConfig, store: Store, tmp_path: Path) -> None:
    await train(store)
    await store.fleet.leave(trainer("training"))
    await refuses(tmp_path, "nothing can be written: no trainer is running")
    assert not await request(store)


async def test_a_loading_trainer_is_not_awaited(config: RunConfig, store: Store, tmp_path: Path) -> None:
    """The trainer is a real rank 0, started after a killed one whose heartbeat has not expired."""
    await train(store)
    ranks = ChildService(ServicePlan("trainer", (loading_rank(0, ""),)), tmp_path)
    try:
        await started(ranks, tmp_path, config)

        async def loading() -> bool:
            return any(status.name == "trainer-0" and status.phase == "loading" for status in await store.fleet.members(TTL_S))

        await wait_until(loading)
        await refuses(tmp_path, "nothing can be written: the trainer is loading")
    finally:
        ranks.kill()
    assert not await request(store)


async def write(store: Store, fence: int) -> None:
    await store.steps.checkpointed(fence, 3)


async def fail(store: Store, fence: int) -> None:
    await store.run.checkpoint_failed("step 3, attempt 1: the disk is full", fence)


async def leave(store: Store, fence: int) -> None:
    await store.fleet.leave(trainer("training"))


async def restart(store: Store, fence: int) -> None:
    await store.fleet.beat(trainer("loading", "two"), TTL_S)


@pytest.mark.parametrize(
    ("ends", "code", "told"),
    [
        (write, 0, "checkpoint of step 3 written\n"),
        (fail, 1, "error: step 3, attempt 1: the disk is full\n"),
        (leave, 0, "nothing can be written: no trainer is running\n"),
        (restart, 0, "nothing can be written: the trainer is loading\n"),
    ],
)
async def test_a_working_trainer_is_asked_and_awaited(
    ends: Callable[[Store, int], Awaitable[None]], code: int, told: str, config: RunConfig, store: Store, tmp_path: Path
) -> None:
    fence = await train(store)
    saving = asyncio.create_task(asyncio.to_thread(save, tmp_path))
    await wait_until(lambda: request(store))
    assert (await request(store)).endswith(" trainer-1: a trainer pod is terminating")
    finished, _ = await asyncio.wait([saving], timeout=1.0)
    assert not finished, "the hook waits for the trainer"
    await ends(store, fence)
    done = await saving
    assert done.returncode == code, done.stderr
    assert done.stdout + done.stderr == told or (ends is write and "every trained step is in a checkpoint" in done.stdout)


def test_an_unreachable_redis_is_reported_on_one_line(tmp_path: Path) -> None:
    (tmp_path / "resolved.toml").write_text(to_toml(small_config(tmp_path, None, "redis.url=redis://127.0.0.1:1/0")))
    done = save(tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (3, 1)
    assert "127.0.0.1:1" in done.stderr
