"""Cases of the trainer's loop that a whole run meets only by chance."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from services.console.run.redis_server import RedisServer
from services.trainer.loop import TrainLoop
from services.trainer.recovery import Recovery
from services.trainer.saving import Saving
from services.trainer.step.policy import Trained
from services.trainer.throughput import Throughput
from services.weights.rounds.leader import Stopped
from tests.support.harness import wait_until
from tests.support.rounds_world import World, open_world
from tests.trainer.test_weight_updates import updates_of


class Interrupted(TrainLoop):
    """A loop that is stopped while the weights of step 4 are sent; every call to Redis succeeds."""

    def __init__(self) -> None:
        plan = SimpleNamespace(step=4, stats={"tokens/gen/total": 7.0}, total_tokens=9, traces=[])
        self.step, self.fence, self.recorded = 3, 1, []
        self._comparison: Any = SimpleNamespace(check=lambda step, stats, metrics: None)
        self.commands: Any = SimpleNamespace(lead=lambda name, step: (plan, Trained({"loss/train/sum": 0.5}, {})))
        self.store: Any = SimpleNamespace(monitor=SimpleNamespace(record=self.recorded.append))
        self.metrics: Any = SimpleNamespace(
            observe=lambda plan, record: None, record_s=SimpleNamespace(observe=lambda seconds: None)
        )
        self.call: Any = lambda done: done
        self.recovery: Any = SimpleNamespace(commit=lambda plan: None)
        self.saving: Any = SimpleNamespace(failed=0)
        self._throughput = Throughput(0.0)
        self._incarnation = 0
        self._waited_s = 0.25
        self.updates: Any = SimpleNamespace(send=_stopped, measured=lambda: {"time/sync_s": self.updates.spent_s}, spent_s=3.0)

    def _say(self, **changes: object) -> None:
        pass


def _stopped(version: int) -> None:
    raise Stopped


def test_a_committed_step_is_recorded_even_if_stopped_in_its_sync() -> None:
    loop = Interrupted()
    with pytest.raises(Stopped):
        loop._train_next()
    assert loop.step == 4
    (record,) = loop.recorded
    assert (record["step"], record["loss/train/sum"]) == (4, 0.5)
    assert record["time/step_s"] >= record["time/train_s"]
    assert (record["time/wait_s"], loop._waited_s) == (0.25, 0.0), "the next record begins at zero"
    assert record["time/sync_s"] == 0.0, "what was spent before the step does not count"


def test_a_step_is_trained_and_committed_before_its_weights_are_sent() -> None:
    loop, order = Interrupted(), list[str]()
    lead = loop.commands.lead
    loop.commands.lead = lambda name, step: order.append(name) or lead(name, step)
    loop.recovery.commit = lambda plan: order.append("commit")
    loop.updates.send = lambda version: order.append(f"send {version}")
    loop.saving.save_if_due = lambda step: None
    loop._train_next()
    assert order == ["train", "commit", "send 5"]


class Syncing(TrainLoop):
    """A loop that has trained step 1 of a world and sends its weights; ranks write every checkpoint."""

    def __init__(self, world: World) -> None:
        world.commit(1)
        world.portal.call(world.store.steps.publish(world.fence, 1))
        world.commit(2)
        self.config, self.store, self.call, self.fence, self.step = world.config, world.store, world.portal.call, world.fence, 1
        self.service: Any = SimpleNamespace(kind="trainer")
        self.told: dict[str, object] = {}
        worker: Any = SimpleNamespace(checkpoints=SimpleNamespace())
        commands: Any = SimpleNamespace(lead=lambda name, step: "")
        self.recovery = Recovery(self.config, self.store, self.fence, worker, commands, self.call, lambda: None)
        self.saving = Saving(self.config, self.store, self.fence, commands, self.recovery, self.call, self._say)
        self.updates = updates_of(world, self.recovery, self._ending, self._say)

    def _say(self, **changes: object) -> None:
        self.told |= changes

    def wait_for(self, **told: object) -> None:
        """Wait until the fleet has been told this."""
        self.call(wait_until(lambda: self.told | told == self.told))

    def wait_for_checkpoint(self) -> None:
        """Wait until step 1 is in a checkpoint."""

        async def saved() -> bool:
            return (await self.store.run.state()).checkpointed_step == 1  # type: ignore[union-attr]

        self.call(wait_until(saved))


@contextmanager
def syncing(folder: Path, server: RedisServer, every_steps: int) -> Iterator[tuple[World, Syncing]]:
    """Yield a world without generators and a loop that waits for one; then add one."""
    with open_world(folder, server, f"checkpoint.every_steps={every_steps}") as world, ThreadPoolExecutor(1) as thread:
        loop = Syncing(world)
        sync = thread.submit(loop.updates.send, 2)
        try:
            yield world, loop
        finally:
            world.member("a")
            sync.result(30)
            loop.updates.finish()
            loop.updates.close()
        assert world.versions() == {"a": 2}
        assert loop.told["paused"] == "", "only between two steps can the trainer say whether it is paused"


def test_requests_and_pauses_are_obeyed_without_a_generator(tmp_path: Path, server: RedisServer) -> None:
    with syncing(tmp_path, server, every_steps=3) as (world, loop):
        loop.wait_for(phase="syncing")
        world.portal.call(world.store.run.request_checkpoint("a test"))
        loop.wait_for_checkpoint()
        world.portal.call(world.store.run.pause("trainer", "a test"))
        loop.wait_for(phase="paused", paused="keep")
        world.portal.call(world.store.run.resume("trainer"))
        loop.wait_for(phase="syncing", paused="")
        world.portal.call(world.store.run.pause("trainer", "a test"))
        loop.wait_for(phase="paused", paused="keep")


def test_a_due_checkpoint_is_written_without_a_generator(tmp_path: Path, server: RedisServer) -> None:
    with syncing(tmp_path, server, every_steps=2) as (_, loop):
        loop.wait_for_checkpoint()
