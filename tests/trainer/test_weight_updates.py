"""The trainer's updates of the fleet's weights: their order, their publication and their figures."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from services.console.run.redis_server import RedisServer
from services.store import Store
from services.trainer.metrics import TrainerMetrics
from services.trainer.weight_updates import WeightUpdates
from services.weights.outcomes import SyncReport
from services.weights.sender import SendFailed
from tests.support.rounds_world import World, open_world
from tests.trainer.checkpoints.test_recovery import lose, trained


def updates_of(world: World, recovery: Any, ending: Callable[[], bool], say: Callable[..., None]) -> WeightUpdates:
    """Return the updates of a world's trainer with a single rank."""
    service: Any = SimpleNamespace(config=world.config, store=world.store, notifications=world.rounds.notifications)
    worker: Any = SimpleNamespace(sender=world.sender)
    commands: Any = SimpleNamespace(lead=lambda name, version: world.sender.send(), keep_waiting=lambda: None)
    metrics = TrainerMetrics(CollectorRegistry())
    return WeightUpdates(service, world.portal, world.fence, worker, commands, recovery, metrics, lambda: None, ending, say)


def test_a_version_is_published_before_the_next_one_is_sent(tmp_path: Path, server: RedisServer) -> None:
    published, said = list[int](), list[dict[str, object]]()
    recovery = SimpleNamespace(published=published.append)
    with open_world(tmp_path, server) as world:
        world.member("a")
        updates = updates_of(world, recovery, lambda: False, lambda **changes: said.append(changes))
        updates.send(0)
        updates.catch_up()
        assert published == [], "it is not awaited"
        world.commit(1)
        updates.send(1)
        assert published == [0]
        updates.finish()
        updates.finish_if_delivered()
        assert (published, world.versions()) == ([0, 1], {"a": 1})
        assert updates.spent_s > 0
        world.member("late")
        updates.catch_up()
        assert world.versions() == {"a": 1, "late": 1}
        figures = updates.measured()
        assert (figures["fleet/generators"], figures["sync/attempts"]) == (1.0, 1.0), "of the last round for the whole fleet"
        assert {"phase": "syncing", "version": 1} in said
        updates.close()


@pytest.mark.parametrize("delta", [1.0, 0.0])
def test_figures_are_of_the_last_round_that_ended(delta: float) -> None:
    said = list[object]()
    sent = {"bytes": 10.0, "share": 0.25, "changed": 0.5, "delta": delta}
    updates: Any = SimpleNamespace(
        spent_s=0.125, _delivered=SyncReport(4, 1, ("generator-0:boot",), 1, 2.0, 0.5), _sender=SimpleNamespace(sent=sent),
        _say=lambda **changes: said.append(changes),
    )  # fmt: skip
    updates._sent = WeightUpdates._sent.__get__(updates)
    figures = WeightUpdates.measured(updates)
    assert (figures["time/sync_s"], figures["time/transfer_s"], figures["fleet/generators"]) == (0.125, 0.5, 1.0)
    assert {name: value for name, value in figures.items() if name.startswith("sync/")} == {
        "sync/attempts": 1.0, "sync/bytes": 10.0, "sync/share": 0.25, "sync/changed": 0.5, "sync/delta": delta,
    }  # fmt: skip
    assert said == [{"weights": sent}]


def test_other_ranks_get_their_next_command_after_a_failed_broadcast() -> None:
    commanded = list[str]()

    def lead(name: str, version: int) -> None:
        commanded.append(f"{name} {version}")
        raise SendFailed("the network is gone")

    commands = SimpleNamespace(lead=lead, keep_waiting=lambda: commanded.append("wait"))
    updates: Any = SimpleNamespace(_commands=commands, _version=3)
    with pytest.raises(SendFailed):
        WeightUpdates._broadcast(updates)
    assert commanded == ["send 3", "wait"]


async def test_a_publication_waits_for_a_commit_that_redis_lost(store: Store, tmp_path: Path) -> None:
    """A server restarts without its last second of writes while generators apply the weights."""
    trainer, team = await trained(store, tmp_path, 2)
    await lose(store, committed_step=0, published_version=1)
    updates: Any = SimpleNamespace(_call=trainer.recovery.call, _store=store, _fence=team.trainer)
    await asyncio.to_thread(WeightUpdates._publish, updates, SyncReport(2, 1, ("generator-0:boot",), 1, 2.0, 0.5))
    assert (await store.run.state()).published_version == 1  # type: ignore[union-attr]
    state = await trainer.stay_in_step(1)
    assert state.committed_step == 1
    assert (await store.run.state()).published_version == 2  # type: ignore[union-attr]
