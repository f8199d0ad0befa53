"""What the audit reports as lost, duplicated or inconsistent, for hand-made counts and for a real run."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from services.console.display.answers import audit_table
from services.operations.inspection.ledger import assess, audit
from services.store import Store
from tests.support.flow import buffer, prepare, start

COUNTS = {
    "tickets": 3, "headers": 2, "outstanding": 5, "buffered": 4, "prepared": 2, "requeued": 0, "reissue": 0,
    "unpublished": 6, "slots_used": 15,
    "ledger:issued": 30, "ledger:trained": 10, "ledger:stale": 1, "ledger:evicted": 2, "ledger:failed": 3,
    "ledger:filtered:zero_std": 2, "ledger:filtered:solved": 1, "ledger:refused_submits": 7, "ledger:syncs": 9,
}  # fmt: skip


def test_a_sound_run_has_the_hand_computed_totals() -> None:
    """30 = 3 + 2 + 4 + 2 in places, 10 + 1 + 2 + 3 + 2 + 1 in outcomes; 15 slots = 5 outstanding + 4 buffered + 6 unpublished."""
    report = assess("by-hand", COUNTS)
    assert (report.issued, report.lost, report.doubled, report.slots_expected) == (30, 0, 0, 15)
    assert (report.ok, report.slots_ok, report.messages, report.refused_submits) == (True, True, (), 7)
    assert report.outcomes["filtered:zero_std"] == 2
    assert json.loads(json.dumps(report.as_dict()))["ok"] is True


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ledger:trained": 9}, "1 of 30 issued tickets are lost"),
        ({"ledger:trained": 12}, "2 more groups exist than the 30 issued"),
        ({"ledger:doubled": 1}, "1 prompts were trained twice in one epoch"),
        ({"slots_used": 16}, "16 slots are in use for 15 tickets in flight"),
        ({"outstanding": 6, "slots_used": 16}, "there are 5 entries for 6 tickets issued and not settled"),
        ({"ledger:unknown_headers": 1}, "1 messages belong to tickets that were never issued"),
    ],
)
def test_every_kind_of_problem_is_reported_on_one_line(change: dict[str, int], message: str) -> None:
    report = assess("by-hand", COUNTS | change)
    assert not report.ok
    assert len(report.messages) == 1
    assert message in report.messages[0]
    with (console := Console(width=200)).capture() as shown:
        console.print(audit_table(report))
    assert message in shown.get()


async def test_a_run_in_progress_is_consistent(store: Store) -> None:
    team = await start(store)
    await buffer(store, team, 4)
    await prepare(store, team, 0, ["0-0", "0-1"])
    await store.steps.commit(team.trainer, 0)
    await prepare(store, team, 1, ["0-2"])
    report = await audit(store)
    assert report.ok, report.messages
    assert report.places == {"tickets": 0, "headers": 0, "buffered": 1, "prepared": 1, "requeued": 0, "reissue": 0}
    assert (report.outcomes["trained"], report.slots_used) == (2, 4)
    await store.client.hincrby(store.keys.ledger, "trained", -1)  # type: ignore[misc]
    assert (await audit(store)).lost == 1
