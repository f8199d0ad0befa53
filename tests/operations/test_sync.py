"""`inspect_sync` distinguishes unknown from zero bytes, as reported by generators and the trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.console.display.answers import answer
from services.console.display.text import show
from services.console.run.redis_server import RedisServer
from services.generator.metrics import GeneratorMetrics
from services.operations.inspection.sync import inspect_sync
from services.protocol.messages import PodStatus
from services.runtime.service import Service
from services.store import Store
from services.weights.rounds.member import WeightFollower
from tests.support.harness import small_config


class Engine:
    """The part of an engine that a follower reads after new weights have arrived."""

    def __init__(self, fetched_bytes: int | None) -> None:
        self.fetched_bytes = fetched_bytes


@pytest.mark.parametrize(("fetched_bytes", "shown"), [(None, "–"), (0, "0"), (12_345, "12,345")])
async def test_bytes_fetched_by_a_generator_are_shown(
    store: Store,
    server: RedisServer,
    tmp_path: Path,
    fetched_bytes: int | None,
    shown: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    status = PodStatus("generator", "generator-0", "boot", "here", 1, "", "ready", 2, 1, {})
    service = Service("generator", small_config(tmp_path, server, f"run.name={store.keys.name}"), store, status)
    engine: Any = Engine(fetched_bytes)
    WeightFollower(service, engine, GeneratorMetrics(service.registry))._say_held(3, 1)
    await store.fleet.beat(service.status, 60.0)
    found = await inspect_sync(store, 60.0)
    assert [(member.version, member.bytes) for member in found.members] == [(3, fetched_bytes)]
    assert service.registry.get_sample_value("grpo_generator_fetched_weights_bytes_total") == (fetched_bytes or 0)
    show(answer(found))
    lines = capsys.readouterr().out.splitlines()
    (row,) = [line.split() for line in lines if line.startswith("generator-0")]
    assert (row[2:4], shown in row) == (["3", "0"], fetched_bytes is not None)


async def test_bytes_sent_by_the_trainer_are_shown(store: Store) -> None:
    trainer = PodStatus("trainer", "trainer-0", "boot", "here", 1, "", "training", 2, 0, {})
    assert (await inspect_sync(store, 60.0)).sent_bytes is None
    for delta, encoding in ((1.0, "delta"), (0.0, "anchor")):
        sent = {"bytes": 10.0, "share": 0.25, "changed": 0.5, "delta": delta}
        await store.fleet.beat(msgspec.structs.replace(trainer, weights=sent), 60.0)
        found = await inspect_sync(store, 60.0)
        assert (found.sent_bytes, found.sent_share, found.changed_share, found.encoding) == (10, 0.25, 0.5, encoding)
