"""The endpoints of every kind of service on real sockets, for one run that contains something of every kind."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from fastapi import FastAPI

from services.console.run.redis_server import RedisServer
from services.generator.api import add_routes as add_generator
from services.generator.loop import GeneratorLoop
from services.generator.metrics import GeneratorMetrics
from services.http.api import serve
from services.http.credentials import ApiTokens
from services.http.endpoints import add_checkpoint_routes as add_trainer
from services.http.endpoints import add_run_routes as add_dataprep
from services.protocol.messages import PodStatus
from services.runtime.service import Service
from services.store import Store
from services.web.serving import add_console
from tests.support import flow
from tests.support.harness import PlainTokenizer, save_tokenizer_folder, small_config
from tests.support.rounds_world import AnyVerifier
from tests.support.scripted import ScriptedEngine

KINDS = ("generator", "dataprep", "trainer", "tracker", "web")
ENDLESS = "/v1/console/live"  # an event stream: a response that does not end
TOKENS = ApiTokens("operate-token", "read-token")


def add_routes(service: Service) -> None:
    """Add the routes of the service's kind; a tracker has none."""
    match service.kind:
        case "generator":
            given = (ScriptedEngine(), PlainTokenizer(), AnyVerifier(), GeneratorMetrics(service.registry))
            add_generator(service, GeneratorLoop(service, *given))  # type: ignore[arg-type]
        case "dataprep":
            add_dataprep(service)
        case "trainer":
            add_trainer(service)
        case "web":
            add_console(service)


async def fill(store: Store) -> None:
    """Put groups everywhere: issued, claimed, settled, planned, trained and dead-lettered."""
    team = await flow.start(store, steps=100, slots=40)
    await flow.buffer(store, team, 6)
    await flow.prepare(store, team, 0, ["0-0", "0-1"])
    await store.steps.commit(team.trainer, 0)
    await store.monitor.record({"step": 0.0, "reward/train/mean": 0.5})
    await flow.issue(store, team, 4)
    (claim,) = await flow.claim(store, "g", 1)
    await store.tickets.fail("g", claim, "verifier broke", max_attempts=1)


@contextlib.asynccontextmanager
async def endpoints(folder: Path, server: RedisServer, run: str) -> AsyncIterator[dict[str, tuple[str, FastAPI]]]:
    """Yield addresses and apps by kind of service."""
    config = small_config(folder, server, f"run.name={run}")
    save_tokenizer_folder(folder / "model")
    async with contextlib.AsyncExitStack() as stack:
        found = {}
        for kind in KINDS:
            store = await Store.connect(server.url, run, server.password)
            stack.push_async_callback(store.close)
            if kind == KINDS[0]:
                await fill(store)
                stack.push_async_callback(store.restores.delete_run)
            status = PodStatus(kind, f"{kind}-0", "b00t", "here", 1, "", "ready", 0, 1, {"tokens_per_s": 1.5})
            service = Service(kind, config, store, status)
            url = await stack.enter_async_context(serve(service, TOKENS))
            add_routes(service)
            found[kind] = url, service.app
        yield found
