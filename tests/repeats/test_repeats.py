"""Every function may be called again after a lost reply, immediately or late, without a second effect."""

from __future__ import annotations

import pytest

from services.console.run.redis_server import RedisServer
from services.store import Store
from services.store.functions.footprint import footprints
from tests.repeats import contents
from tests.repeats.campaign import campaign, one_run
from tests.repeats.repeater import MAY_CHANGE, Journal
from tests.support import flow


@pytest.mark.slow
async def test_no_call_of_a_whole_run_has_a_second_effect(server: RedisServer) -> None:
    found = await campaign(server, late=(21,))
    assert found.harms == {}
    assert found.harmless == found.functions == sorted(footprints())
    assert found.repeats > 2 * found.calls


async def test_a_second_effect_is_detected(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repeated `retire` retires the next step, which is harmful unless declared in MAY_CHANGE."""
    monkeypatch.delitem(MAY_CHANGE, "retire")
    journal = Journal(at_once=True)
    await one_run(server, "noticed", journal)
    assert journal.harms.keys() == {"retire"}
    assert "run.retired_step" in journal.harms["retire"]


async def test_contents_include_every_change(store: Store) -> None:
    team = await flow.start(store)
    before = await contents.contents(store)
    await flow.issue(store, team, 1)
    after = await contents.contents(store)
    assert contents.changed(before, after) == {
        "ledger.issued", "order.state", "outstanding", "run.cursor", "run.slots_used", "tickets",
    }  # fmt: skip
    await flow.claim(store, "g")
    assert "tickets:pending" in contents.changed(after, await contents.contents(store))


def test_may_change_refers_to_existing_functions() -> None:
    assert MAY_CHANGE.keys() <= footprints().keys()
    assert all(why for _, why in MAY_CHANGE.values())
