"""Cases of the trainer's loop that a whole run meets only by chance."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from services.console.run.redis_server import RedisServer
from services.protocol.messages import PodStatus, StepPlan
from services.runtime.service import Service
from services.trainer.loop import TrainLoop
from services.trainer.metrics import TrainerMetrics
from services.trainer.step.policy import Trained
from services.weights.rounds.leader import Stopped
from tests.support.harness import wait_until
from tests.support.rounds_world import World, open_world

PLAN = StepPlan(4, [], [], 1, 1, [1], [1.0], 1, 9, {"tokens/gen/total": 7.0})


def loop_of(world: World, lead: Callable[[str, Any], object]) -> TrainLoop:
    """Return the loop of a trainer of this world, whose ranks do what `lead` does."""

    async def service() -> Service:
        return Service("trainer", world.config, world.store, PodStatus("trainer", "t", "b", "h", 1, "", "starting", -1, 0, {}))

    opened = world.portal.call(service())
    opened.notifications = world.rounds.notifications
    policy = SimpleNamespace(peak_tflops=0.0)
    worker: Any = SimpleNamespace(sender=world.sender, checkpoints=SimpleNamespace(), policy=policy, close=lambda: None)
    commands: Any = SimpleNamespace(lead=lead, keep_waiting=lambda: None, dismiss=lambda: None)
    return TrainLoop(opened, world.portal, worker, commands, TrainerMetrics(opened.registry), lambda: None)


class Steps:
    """Stands in for the checkpoints and the fleet of a trainer at step 3 with a plan of step 4, stopped in its sync."""

    def __init__(self) -> None:
        self.order, self.recorded = list[str](), list[dict[str, float]]()
        self.state = SimpleNamespace(
            incarnation=0, prepared_step=4, committed_step=3, stopping="", paused={}, checkpoint=""
        )  # fmt: skip
        self.spent_s = 3.0

    def lead(self, name: str, step: int) -> object:
        self.order.append(name)
        return PLAN, Trained({"loss/train/sum": 0.5}, {})

    def send(self, version: int) -> None:
        self.order.append(f"send {version}")
        if version == 5:
            raise Stopped

    def put_into(self, loop: TrainLoop) -> None:
        """Replace what the loop calls between the steps."""
        nothing: Any = lambda *_: None  # noqa: E731
        loop.recovery = SimpleNamespace(  # type: ignore[assignment]
            take_up=lambda: (3, self.state), stay_in_step=lambda step: self.state,
            commit=lambda plan: self.order.append("commit"), trained=nothing,
        )  # fmt: skip
        loop.saving = SimpleNamespace(  # type: ignore[assignment]
            failed=0, last=3, save=nothing, save_if_due=nothing, save_if_requested=nothing, save_if_redis_is_nearly_full=nothing
        )
        loop.updates = SimpleNamespace(  # type: ignore[assignment]
            send=self.send, finish=nothing, finish_if_delivered=nothing, catch_up=nothing, close=nothing, spent_s=3.0,
            measured=lambda: {"time/sync_s": loop.updates.spent_s},
        )  # fmt: skip
        loop.store = SimpleNamespace(monitor=SimpleNamespace(record=self.recorded.append))  # type: ignore[assignment]
        loop.call = lambda done: done  # type: ignore[method-assign]


def test_a_step_is_committed_before_it_is_sent_and_recorded_if_stopped_meanwhile(tmp_path: Path, server: RedisServer) -> None:
    with open_world(tmp_path, server, "run.steps=9") as world:
        steps = Steps()
        loop = loop_of(world, steps.lead)
        steps.put_into(loop)
        loop.run()
    assert steps.order == ["send 4", "train", "commit", "send 5"]
    assert loop.step == 4
    (record,) = steps.recorded
    assert (record["step"], record["loss/train/sum"]) == (4, 0.5)
    assert record["time/step_s"] >= record["time/train_s"] > 0
    assert record["time/sync_s"] == 0.0, "what was spent before the step does not count"


@contextmanager
def syncing(folder: Path, server: RedisServer, every_steps: int) -> Iterator[tuple[World, TrainLoop]]:
    """Yield a world without generators and a loop that has trained step 1 and waits for one; then add one."""
    with open_world(folder, server, f"checkpoint.every_steps={every_steps}") as world, ThreadPoolExecutor(1) as thread:
        world.commit(1)
        world.portal.call(world.store.steps.publish(world.fence, 1))
        world.commit(2)
        loop = loop_of(world, lambda name, given: world.sender.send(*given) if name == "send" else "")
        loop.step = 1
        sync = thread.submit(loop.updates.send, 2)
        try:
            yield world, loop
        finally:
            world.member("a")
            sync.result(30)
            loop.updates.finish()
            loop.updates.close()
        assert world.versions() == {"a": 2}
        world.portal.call(wait_until(lambda: not loop.service.status.paused))  # only between steps can it be paused


def say(world: World, loop: TrainLoop, **told: object) -> None:
    """Wait until the loop has told the fleet this."""
    world.portal.call(wait_until(lambda: all(getattr(loop.service.status, name) == value for name, value in told.items())))


def checkpointed(world: World) -> None:
    """Wait until step 1 is in a checkpoint."""

    async def saved() -> bool:
        return (await world.store.run.state()).checkpointed_step == 1  # type: ignore[union-attr]

    world.portal.call(wait_until(saved))


def test_requests_and_pauses_are_obeyed_without_a_generator(tmp_path: Path, server: RedisServer) -> None:
    with syncing(tmp_path, server, every_steps=3) as (world, loop):
        say(world, loop, phase="syncing")
        world.portal.call(world.store.run.request_checkpoint("a test"))
        checkpointed(world)
        world.portal.call(world.store.run.pause("trainer", "a test"))
        say(world, loop, phase="paused", paused=True)
        world.portal.call(world.store.run.resume("trainer"))
        say(world, loop, phase="syncing", paused=False)
        world.portal.call(world.store.run.pause("trainer", "a test"))
        say(world, loop, phase="paused", paused=True)


def test_a_due_checkpoint_is_written_without_a_generator(tmp_path: Path, server: RedisServer) -> None:
    with syncing(tmp_path, server, every_steps=2) as (world, _):
        checkpointed(world)
