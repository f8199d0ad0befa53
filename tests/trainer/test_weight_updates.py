"""The trainer's updates of the fleet's weights: their order, their publication and their figures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry

from services.console.run.redis_server import RedisServer
from services.trainer.metrics import TrainerMetrics
from services.trainer.weight_updates import WeightUpdates
from services.weights.transport import SendFailed
from tests.support.rounds_world import World, open_world


def updates_of(
    world: World,
    recovery: Any,
    ending: Callable[[], bool],
    say: Callable[..., None],
    lead: Callable[..., object] | None = None,
) -> WeightUpdates:
    """Return the updates of a world's trainer with a single rank. `lead` replaces the commands to its ranks."""
    service: Any = SimpleNamespace(config=world.config, store=world.store, notifications=world.rounds.notifications)
    worker: Any = SimpleNamespace(sender=world.sender)
    send = lead or (lambda name, given: world.sender.send(*given))
    commands: Any = SimpleNamespace(lead=send, keep_waiting=lambda: send("wait", ()) if lead else None)
    recovery.fence, recovery.worker, recovery.commands = world.fence, worker, commands
    metrics = TrainerMetrics(CollectorRegistry())
    return WeightUpdates(service, world.portal, recovery, metrics, lambda: None, ending, say)


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


def test_a_version_is_published_only_with_the_commit_of_its_step(tmp_path: Path, server: RedisServer) -> None:
    published = list[int]()
    with open_world(tmp_path, server) as world:
        world.member("a")
        updates = updates_of(world, SimpleNamespace(published=published.append), lambda: False, lambda **_: None)
        updates.send(0)
        updates.send(1)  # Redis has lost the commit of step 0
        updates.finish()
        state = world.portal.call(world.store.run.state())
        assert state is not None
        assert state.published_version == 0
        assert (published, world.versions()) == ([0, 1], {"a": 1}), "the trainer's recovery repeats the commit and this"
        updates.close()


def test_figures_are_of_the_last_round_that_ended(tmp_path: Path, server: RedisServer) -> None:
    said = list[dict[str, object]]()
    with open_world(tmp_path, server, "sync.backend=store", f"sync.folder={tmp_path}/volume") as world:
        world.member("a")
        recovery = SimpleNamespace(published=lambda version: None)
        updates = updates_of(world, recovery, lambda: False, lambda **changes: said.append(changes))
        assert updates.measured() == {"time/sync_s": 0.0, "fleet/generators": 0.0}
        updates.send(0)
        updates.finish()
        figures = updates.measured()
        assert {name for name in figures if name.startswith("sync/")} == {
            f"sync/{name}" for name in ("attempts", "bytes", "share", "changed", "delta")
        }
        assert (figures["sync/delta"], figures["sync/share"], figures["fleet/generators"]) == (0.0, 1.0, 1.0)
        assert {"weights": world.sender.stats} in said
        updates.close()


def test_other_ranks_get_their_next_command_after_a_failed_broadcast(tmp_path: Path, server: RedisServer) -> None:
    commanded = list[str]()
    with open_world(tmp_path, server) as world:
        world.member("a")

        def lead(name: str, given: tuple[int, int, bool]) -> None:
            commanded.append(name)
            if len(commanded) == 1:
                raise SendFailed("the network is gone")
            if name == "send":
                world.sender.send(*given)

        recovery = SimpleNamespace(published=lambda version: None)
        updates = updates_of(world, recovery, lambda: False, lambda **_: None, lead)
        updates.send(0)
        updates.finish()
        updates.close()
        assert commanded == ["send", "wait", "send"]
        assert world.versions() == {"a": 0}
