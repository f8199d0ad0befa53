"""The names of runs in a Redis that several runs share."""

from __future__ import annotations

from services.config import RunConfig, digest
from services.console.errors import EXIT_CONFIG, ConsoleError
from services.store import Store
from services.store.connection.client import Login


async def claim_name(config: RunConfig, url: str, login: Login, fresh: bool) -> None:
    """Check that the run's name in a shared Redis is this run's or free; with --fresh, free it. Raise `ConsoleError`."""
    name = config.run.name
    store = await Store.connect(url, name, login)
    try:
        if fresh:
            alive = ", ".join(sorted(status.name for status in await store.fleet.members(config.fleet.ttl_s)))
            if alive:
                raise ConsoleError(
                    f"run {name!r} in Redis at {url} was not deleted: {alive} sent a heartbeat in the last "
                    f"{config.fleet.ttl_s:g} s; stop them first",
                    EXIT_CONFIG,
                )
            await store.restores.delete_run(config.redis.payload_shards)
        if config.redis.payload_shards:
            await store.payloads.check_shards(config.redis.payload_shards)
        state = await store.run.state()
        if state is not None and state.config != digest(config):
            raise ConsoleError(
                f"Redis at {url} contains a run {name!r} with another configuration; choose another run.name, or delete it "
                "with --fresh",
                EXIT_CONFIG,
            )
    finally:
        await store.close()
