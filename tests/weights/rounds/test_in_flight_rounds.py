"""Completions in progress continue through weight-sync rounds, with the version of each token."""

from __future__ import annotations

from pathlib import Path

from services.console.run.redis_server import RedisServer
from services.protocol.messages import Header
from tests.support.harness import ticket, wait_until
from tests.support.rounds_world import World, open_world

ROUNDS, TICKETS = 3, 3  # rounds, and tickets issued before each
SLOW = ("generator.engine_options.token_s=0.02", "sampling.max_tokens=64", "model.max_tokens=4096")


def test_completions_have_tokens_of_several_versions(tmp_path: Path, server: RedisServer) -> None:
    with open_world(tmp_path, server, *SLOW) as world:
        world.member("a")
        world.train(0)
        fence = world.portal.call(world.store.run.lead("test", 60))
        assert fence is not None
        for number in range(ROUNDS):
            first = number * TICKETS
            given = [ticket(first + i) for i in range(TICKETS)]
            assert world.portal.call(world.store.tickets.issue(fence, first, given)) == TICKETS
            world.portal.call(wait_until(lambda: sampling(world)))
            assert len(world.train(number + 1).members) == 1
        assert any(one.oldest != one.newest for one in finished(world, fence))


def sampling(world: World) -> bool:
    """Return whether a completion has begun, and probably is not about to end."""
    return any(4 <= len(made.tokens) <= 8 for made in world.engines["a"].snapshot().values())


def finished(world: World, fence: int) -> list[Header]:
    """Wait until all tickets are finished, and return their groups."""

    async def there() -> bool:
        return (await world.store.run.audit())["headers"] == ROUNDS * TICKETS

    world.portal.call(wait_until(there))
    items = world.portal.call(world.store.replay.read_headers(fence, 100))
    return [item.header for item in items if item.header is not None]
