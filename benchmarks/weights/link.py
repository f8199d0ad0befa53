"""The link's part of benchmarks/weights: real rounds with a generator behind 100 Mbit/s and 80 ms.

The trainer's side, Redis and an S3 server are near; the generator reaches Redis and S3 only over the link. It follows rounds with
an engine that holds what it received, and joins late once. As in the trainer, a version is sent once the previous one is
published, while the next step runs: here, a sleep as long as a training step.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.slow_link import SlowLink
from benchmarks.weights.engine import distinct
from services.console.run.redis_server import RedisServer
from services.weights.rounds.delivery import Delivery
from tests.support.rounds_world import World, open_world
from tests.support.servers.s3_server import BUCKET, S3Server

BITS_PER_S, ROUND_TRIP_S, ROUNDS = 100e6, 0.08, 5


def link(folder: Path, model: Any, step_s: float, samples: dict[str, list[float]]) -> None:
    """Measure rounds over loopback, then over the link."""
    server = S3Server(folder / "s3")
    os.environ |= server.environment
    try:
        near = _rounds(folder / "near", model, server.port, None, step_s)
        with SlowLink(BITS_PER_S, ROUND_TRIP_S) as slow:
            far = _rounds(folder / "far", model, server.port, slow, step_s)
    finally:
        server.stop()
    samples["near_round_s"], samples["slow_round_s"] = near[1], far[1]
    samples["slow_join_s"] = [far[0]]
    samples["slow_link_ratio"] = [a / b for a, b in zip(near[2], far[2], strict=True)]


def _rounds(folder: Path, model: Any, port: int, slow: SlowLink | None, step_s: float) -> tuple[float, list[float], list[float]]:
    """Return the seconds of the first round, which sends all weights, of the other rounds, and of each step."""
    folder.mkdir(parents=True)
    redis = RedisServer(folder)
    redis.start()
    place = f"sync.folder=s3://{BUCKET}/{folder.name}"
    limits = ("sync.deadline_s=300",)
    try:
        os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{port}"
        with open_world(folder, redis, "sync.backend=store", place, *limits, model=model) as world:
            if slow is not None:
                _behind(world, redis, port, slow)
            world.member("generator")
            join_s, rounds, steps = world.train(0).total_s, list[float](), list[float]()
            delivery = Delivery(world.rounds, lambda: None)
            for version in range(1, ROUNDS + 1):
                began = time.monotonic()
                time.sleep(step_s)
                with torch.no_grad():
                    for weight in distinct(model):
                        weight *= torch.where(torch.rand(weight.shape) < 0.02, 1.01, 1.0).to(weight.dtype)
                if report := delivery.finish():
                    rounds.append(report.total_s)
                world.commit(version)
                delivery.begin(version, lambda: False)
                steps.append(time.monotonic() - began)
            if report := delivery.finish():
                rounds.append(report.total_s)
            delivery.close()
            assert len(rounds) == ROUNDS
            assert all(torch.equal(world.engines["generator"].weights[n], w) for n, w in model.named_parameters())
            return join_s, rounds, steps
    finally:
        redis.stop()


def _behind(world: World, redis: RedisServer, port: int, slow: SlowLink) -> None:
    """Have the generators of `world` use Redis and S3 over the link; the trainer's side has opened its connections already."""
    from services.store import Store

    os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{slow.port_to(port)}"
    host = redis.url.rpartition(":")[0]
    far = f"{host}:{slow.port_to(int(redis.url.rpartition(':')[2].partition('/')[0]))}"
    world.store = world.portal.call(Store.connect(far, "rounds", redis.password))
