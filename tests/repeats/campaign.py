"""Whole runs with every call repeated, compared with one without repeats."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from services.console.run.redis_server import RedisServer
from services.store import Store
from services.store.functions.footprint import footprints
from tests.repeats.repeater import Journal, Repeater
from tests.repeats.whole_run import ACTORS, RunOutcome, WholeRun

LATE = (1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233)
"""Numbers of calls after which a call is repeated: early repeats meet the state that it changed, late ones later states."""


@dataclass(frozen=True)
class RepeatsFound:
    """Effects of repeats."""

    functions: list[str]
    harmless: list[str]
    harms: dict[str, str]
    calls: int
    repeats: int


async def one_run(server: RedisServer, name: str, journal: Journal, at_the_end: bool = False) -> RunOutcome:
    """Execute a whole run whose calls go into `journal`. `at_the_end`: repeat each call after the run."""
    plain, stores = await Store.connect(server.url, name, server.password), dict[str, Store]()
    for actor in ACTORS:
        connection = await Repeater.connect(server.url, name, server.password)
        connection.journal, connection.watched = journal, plain
        stores[actor] = Store(connection)
    try:
        with tempfile.TemporaryDirectory() as folder:
            run = WholeRun(stores, Path(folder))
            outcome = await run.run()
        if at_the_end:
            for call in list(journal.calls):
                await call[0].again(call, "at the end")
        return outcome
    finally:
        for store in stores.values():
            await store.close()
        await plain.restores.delete_run()
        await plain.close()


async def campaign(server: RedisServer, late: tuple[int, ...] = LATE) -> RepeatsFound:
    """Run without repeats, with each call repeated immediately, with each repeated at the end, and once for each of `late`."""
    calm = Journal()
    expected = await one_run(server, "calm", calm)
    journals = [Journal(at_once=True), Journal(), *(Journal(late=(delay,)) for delay in late)]
    harms: dict[str, str] = {}
    for number, journal in enumerate(journals):
        outcome = await one_run(server, f"repeats-{number}", journal, at_the_end=number == 1)
        for name, harm in journal.harms.items():
            harms.setdefault(name, harm)
        if outcome != expected:
            what = "at once" if journal.at_once else f"after {journal.late} others"
            harms.setdefault("the whole run", f"repeats {what} changed its outcome: {outcome}, not {expected}")
    functions = sorted(footprints())
    again = {name: [journal.repeated.get(name, 0) for journal in journals] for name in functions}
    for name in functions:
        if not all(again[name][:2]):
            harms.setdefault(name, "was not called by the whole run")
    return RepeatsFound(
        functions, [name for name in functions if name not in harms], harms, len(calm.calls),
        sum(count for counts in again.values() for count in counts),
    )  # fmt: skip
