"""A finished run frees its GPUs once, and a resumed or new run of the release gets its pods back."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from msgspec.structs import replace

from services.console.run.redis_server import RedisServer
from services.scaler.workload import ClusterError, KubernetesApi
from services.store import Store
from tests.kubernetes.support.api_server import ApiServer
from tests.kubernetes.support.scaler import SETTINGS, following


@pytest_asyncio.fixture
async def another(store: Store, server: RedisServer) -> AsyncIterator[Store]:
    """Yield another run on the same server."""
    another = await Store.connect(server.url, f"{store.keys.name}-next", server.password)
    yield another
    await another.restores.delete_run()
    await another.close()


async def test_a_finished_run_frees_its_gpus_once_and_gets_them_back(
    cluster: tuple[ApiServer, KubernetesApi], store: Store, server: RedisServer, tmp_path: Path
) -> None:
    api, kubernetes = cluster
    await store.run.create("config", "data", 4, 8)
    async with following(store, server, tmp_path, kubernetes) as follower:
        await follower.once(await store.run.state())
        api.scale(5)
        await follower.once(await store.run.state())
        await store.run.finish("4 steps trained")
        await follower.once(await store.run.state())
        assert (api.replicas, api.trainer.replicas) == (0, 0)
        api.trainer.set(1)  # an operator starts a pod to inspect checkpoints
        await follower.once(await store.run.state())
        assert api.trainer.replicas == 1
        api.trainer.set(0)
        await store.run.request_restore(2)
        await follower.once(await store.run.state())
        assert (api.replicas, api.trainer.replicas) == (5, 2)
        state = await store.run.state()
        assert state is not None
        assert (state.scale.wanted, state.scale.object) == (5, api.generators.uid)


async def test_the_next_run_of_a_release_gets_its_numbers_back(
    cluster: tuple[ApiServer, KubernetesApi], store: Store, another: Store, server: RedisServer, tmp_path: Path
) -> None:
    """The finished run's pods were removed by the scaler, not by an operator."""
    api, kubernetes = cluster
    settings = replace(SETTINGS, judge="demo-judge", judge_replicas=2)
    numbers = lambda: (api.replicas, api.trainer.replicas, api.judge.replicas)  # noqa: E731
    await store.run.create("config", "data", 4, 8)
    async with following(store, server, tmp_path, kubernetes, settings) as follower:
        await follower.once(await store.run.state())
        await store.run.finish("4 steps trained")
        await follower.once(await store.run.state())
        assert numbers() == (0, 0, 0)
    async with following(another, server, tmp_path / "next", kubernetes, settings) as follower:
        await follower.once(None)
        assert numbers() == (3, 2, 2), "they load while dataprep reads the prompts"
        await another.run.create("config", "data", 4, 8)
        await follower.once(await another.run.state())
        for each in (api.generators, api.trainer, api.judge):
            each.set(0)  # an operator pauses the run
        for _ in range(2):
            await follower.once(await another.run.state())
        assert numbers() == (0, 0, 0)


async def test_the_next_run_gets_its_numbers_back_if_it_exists_before_the_scaler_looks(
    cluster: tuple[ApiServer, KubernetesApi], store: Store, another: Store, server: RedisServer, tmp_path: Path
) -> None:
    api, kubernetes = cluster
    await store.run.create("config", "data", 4, 8)
    await store.run.finish("4 steps trained")
    async with following(store, server, tmp_path, kubernetes) as follower:
        await follower.once(await store.run.state())
    await another.run.create("config", "data", 4, 8)
    async with following(another, server, tmp_path / "next", kubernetes) as follower:
        for _ in range(2):
            await follower.once(await another.run.state())
            assert (api.replicas, api.trainer.replicas) == (3, 2)
        await another.run.finish("4 steps trained")
        await follower.once(await another.run.state())
        assert (api.replicas, api.trainer.replicas) == (0, 0)


async def test_an_operators_pause_lasts_in_the_next_run(
    cluster: tuple[ApiServer, KubernetesApi], store: Store, another: Store, server: RedisServer, tmp_path: Path
) -> None:
    api, kubernetes = cluster
    await store.run.create("config", "data", 4, 8)
    async with following(store, server, tmp_path, kubernetes) as follower:
        await follower.once(await store.run.state())
    api.scale(0)
    api.trainer.set(0)
    async with following(another, server, tmp_path / "next", kubernetes) as follower:
        await follower.once(None)
        await another.run.create("config", "data", 4, 8)
        await follower.once(await another.run.state())
    assert (api.replicas, api.trainer.replicas) == (0, 0)


async def test_a_finished_run_that_is_reinstalled_frees_its_gpus_again(
    cluster: tuple[ApiServer, KubernetesApi], store: Store, server: RedisServer, tmp_path: Path
) -> None:
    api, kubernetes = cluster
    await store.run.create("config", "data", 4, 8)
    await store.run.finish("4 steps trained")
    for _ in range(2):
        assert (api.replicas, api.trainer.replicas) == (1, 1)
        async with following(store, server, tmp_path, kubernetes) as follower:
            await follower.once(await store.run.state())
            assert (api.replicas, api.trainer.replicas) == (0, 0)
            api.trainer.set(1)  # an operator starts a pod to inspect checkpoints
            await follower.once(await store.run.state())
            assert (api.replicas, api.trainer.replicas) == (0, 1)
            api.recreate()  # one object, as an upgrade after `kubectl delete` does
            await follower.once(await store.run.state())
            assert (api.replicas, api.trainer.replicas) == (0, 1)
        api.reinstall()


@pytest.mark.parametrize("calls", range(1, 6))
async def test_a_scaler_that_dies_while_it_empties_continues(
    calls: int, cluster: tuple[ApiServer, KubernetesApi], store: Store, server: RedisServer, tmp_path: Path
) -> None:
    """Whatever it had done: the pods end once, and a resumed run gets them back."""
    api, kubernetes = cluster
    await store.run.create("config", "data", 4, 8)
    for resumed in (False, True):
        async with following(store, server, tmp_path, kubernetes) as follower:
            await follower.once(await store.run.state())
            assert (api.replicas, api.trainer.replicas) == (3, 2)
            await store.run.finish("4 steps trained")
            api.patches_left = calls
            with contextlib.suppress(ClusterError):
                await follower.once(await store.run.state())
            api.patches_left = None
        async with following(store, server, tmp_path, kubernetes) as follower:
            if not resumed:
                await follower.once(await store.run.state())
                assert (api.replicas, api.trainer.replicas) == (0, 0)
            await store.run.request_restore(2)
            await follower.once(await store.run.state())
            assert (api.replicas, api.trainer.replicas) == (3, 2)
            await store.client.hdel(store.keys.run, "restore")  # type: ignore[misc]


async def test_keep_and_autoscaling_leave_replicas_alone(
    cluster: tuple[ApiServer, KubernetesApi], store: Store, server: RedisServer, tmp_path: Path
) -> None:
    api, kubernetes = cluster
    api.scale(4)
    await store.run.create("config", "data", 4, 8)
    await store.run.finish("4 steps trained")
    async with following(store, server, tmp_path, kubernetes, replace(SETTINGS, keep=True)) as follower:
        await follower.once(await store.run.state())
        assert (api.replicas, api.trainer.replicas) == (4, 1)
    async with following(store, server, tmp_path, kubernetes, replace(SETTINGS, deployment="")) as follower:
        await follower.once(await store.run.state())
        assert (api.replicas, api.trainer.replicas) == (4, 0)
        await store.run.request_restore(2)
        for _ in range(2):
            await follower.once(await store.run.state())
        state = await store.run.state()
        assert state is not None
        assert (api.trainer.replicas, state.scale.object) == (2, None)


async def test_the_judge_is_scaled_to_zero_with_the_others(
    cluster: tuple[ApiServer, KubernetesApi], store: Store, server: RedisServer, tmp_path: Path
) -> None:
    api, kubernetes = cluster
    settings = replace(SETTINGS, judge="demo-judge", judge_replicas=2)
    async with following(store, server, tmp_path, kubernetes, settings) as follower:
        await follower.once(None)
        assert api.judge.replicas == 2, "it loads while dataprep reads the prompts"
        await store.run.create("config", "data", 4, 8)
        for paused in (0, 0, 5):
            api.judge.set(paused)
            await follower.once(await store.run.state())
            assert api.judge.replicas == (2 if paused else 0)
        await store.run.finish("4 steps trained")
        await follower.once(await store.run.state())
        assert (api.replicas, api.trainer.replicas, api.judge.replicas) == (0, 0, 0)
        api.judge.set(1)  # an operator starts a pod
        await follower.once(await store.run.state())
        assert api.judge.replicas == 1
        api.judge.set(0)
        await store.run.request_restore(2)
        await follower.once(await store.run.state())
        assert (api.replicas, api.trainer.replicas, api.judge.replicas) == (3, 2, 2)
    paths = (api.generators.path, api.trainer.path, api.judge.path, api.config_map)
    assert api.calls == {(verb, path) for verb in ("get", "patch") for path in paths}


async def test_the_judge_of_autoscaled_generators_stays_only_with_keep(
    cluster: tuple[ApiServer, KubernetesApi], store: Store, server: RedisServer, tmp_path: Path
) -> None:
    api, kubernetes = cluster
    settings = replace(SETTINGS, deployment="", judge="demo-judge", judge_replicas=2, keep=True)
    await store.run.create("config", "data", 4, 8)
    async with following(store, server, tmp_path, kubernetes, settings) as follower:
        await follower.once(await store.run.state())
        await store.run.finish("4 steps trained")
        await follower.once(await store.run.state())
        assert api.judge.replicas == 2
    async with following(store, server, tmp_path, kubernetes, replace(settings, keep=False)) as follower:
        await follower.once(await store.run.state())
        assert (api.trainer.replicas, api.judge.replicas) == (0, 0)
        await store.run.request_restore(2)
        await follower.once(await store.run.state())
        assert (api.trainer.replicas, api.judge.replicas) == (2, 2)
    assert api.generators.path not in {path for _, path in api.calls}
