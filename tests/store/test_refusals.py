"""Calls that a function rejects or ignores completely: incomplete, late, or made by a superseded leader."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from services.protocol.errors import Fenced, OutOfOrder, StoreError
from services.protocol.messages import PodStatus
from services.store import HeaderEntry, Settlement, Store
from services.store.records import PassRate, TableRules
from tests.support import flow
from tests.support.flow import buffer, claim, issue, prepare, settle, start, submit
from tests.support.harness import ticket


async def dump(store: Store) -> dict[bytes, bytes | None]:
    """Return all keys and their serialized values."""
    return {key: await store.client.dump(key) for key in sorted(await store.client.keys("*"))}


async def refused(store: Store, why: str, *call: Any) -> None:
    """Check that a call is rejected for this reason and changes nothing."""
    before = await dump(store)
    with pytest.raises(StoreError, match=why):
        await store.connection.call(*call)
    assert await dump(store) == before


async def test_a_wrong_number_of_arguments_is_rejected(store: Store) -> None:
    team = await start(store)
    await buffer(store, team, 1)
    await prepare(store, team, 0, ["0-0"])
    await refused(store, "3 arguments for commit, more than it has", "commit", team.trainer, 0, "more")
    await refused(store, "1 arguments for commit: step is missing", "commit", team.trainer)
    await refused(store, "arguments for settle: ticket is missing", "settle", team.leader, "1-1")
    assert await store.connection.call("settle", team.leader) == 0, "no groups are a valid number of groups"


@pytest.mark.parametrize("row", [("x", "0.5", "1"), ("7", "1.5", "1"), ("7", "0.5", "2"), ("7", "0.5", "x")])
async def test_a_batch_with_an_invalid_pass_rate_is_rejected(store: Store, row: tuple[str, ...]) -> None:
    team = await start(store)
    await issue(store, team, 1)
    (held,) = await claim(store, "g")
    await submit(store, "g", held)
    (item,) = await store.replay.read_headers(team.leader, 1)
    args = (item.entry, item.ticket, item.payload, "insert", 0, item.body, 1.0, 1.0, *row)
    await refused(store, "INVALID row", "settle", team.leader, *args)


async def test_a_dropped_group_needs_no_valid_weight(store: Store) -> None:
    team = await start(store)
    await issue(store, team, 1)
    (held,) = await claim(store, "g")
    await submit(store, "g", held)
    (item,) = await store.replay.read_headers(team.leader, 1)
    assert await store.replay.settle(team.leader, [Settlement(item, "stale", weight=float("nan"))]) == 1


@pytest.mark.parametrize("solved", list(itertools.product([False, True], repeat=3)))
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
async def test_pass_rates_do_not_depend_on_the_order_of_settling(
    store: Store, solved: tuple[bool, ...], order: tuple[int, ...]
) -> None:
    """Of a row's groups, the first issued that is solved counts; if none is, the last issued."""
    team = await start(store)
    await issue(store, team, 3)
    items: dict[str, HeaderEntry] = {}
    for held in await claim(store, "g", 3):
        await submit(store, "g", held)
    for item in await store.replay.read_headers(team.leader, 3):
        items[item.ticket] = item
    rates = [(i + 1) / 10 + 0.5 * solved[i] for i in range(3)]
    for i in order:
        rate = (7, rates[i], 0.5)
        assert await store.replay.settle(team.leader, [Settlement(items[f"0-{i}"], "insert", rate=rate)]) == 1
    counts = solved.index(True) if any(solved) else 2
    (held,) = (await store.client.hgetall(f"{store.keys.prefix}:rates")).values()  # type: ignore[misc]
    assert held.decode().split() == [str(counts), str(rates[counts]), str(int(solved[counts]))]


async def test_reweighing_a_table_without_weights_changes_nothing(store: Store) -> None:
    team = await start(store)
    await buffer(store, team, 2)
    before = await dump(store)
    assert await store.replay.reweigh(team.trainer, {"0-0": 5.0}) == 0
    assert await dump(store) == before


async def test_a_superseded_leader_cannot_rescale_or_reissue(store: Store) -> None:
    team = await start(store, table=TableRules("prioritized"))
    await buffer(store, team, 2)
    await issue(store, team, 1)
    assert await store.run.lead("leader-1:boot", 60.0) is None, "the first one leads"
    await store.run.step_down("leader-0:boot")
    assert await store.run.lead("leader-1:boot", 60.0)
    before = await dump(store)
    with pytest.raises(Fenced):
        await store.replay.rescale(team.leader, 0, 1, 2.0)
    with pytest.raises(Fenced):
        await store.tickets.issue_again(team.leader, [ticket(2)])
    assert await dump(store) == before


async def test_a_malformed_ticket_name_is_rejected(store: Store) -> None:
    team = await start(store)
    with pytest.raises(StoreError, match="INVALID ticket nonsense is not of the form <epoch>-<row>"):
        await store.tickets.issue(team.leader, 0, [ticket(0), ticket(1, id="nonsense")])
    assert await store.tickets.issue(team.leader, 0, [ticket(0)]) == 1


async def test_a_step_needs_the_next_groups_and_a_variate_each(store: Store) -> None:
    team = await start(store, table=TableRules("prioritized"))
    await buffer(store, team, 4)
    names = [name for name, _ in (await store.replay.sweep_and_peek(team.leader, 0, 4)).first]
    args = (team.leader, 0, 0, " ".join(names[:2]), "1.0", -1, b"plan")
    await refused(store, "INVALID 1 variates for 2 groups", "prepare", *args)
    with pytest.raises(OutOfOrder, match="rings before those that were drawn"):
        await prepare(store, team, 0, [names[3]])
    await prepare(store, team, 0, names[:2])


async def test_departed_groups_are_retired_with_one_step(store: Store) -> None:
    team = await start(store, table=TableRules(max_uses=2))
    await buffer(store, team, 3)
    await prepare(store, team, 0, ["0-1"])
    assert (await store.replay.sweep_and_peek(team.leader, 1, 1)).stale == 3
    await prepare(store, team, 1, [])
    assert await store.client.exists(f"{store.keys.prefix}:departed") == 0
    await prepare(store, team, 2, [])
    departed = [await store.client.hget(store.keys.step(step), "departed") for step in (1, 2)]  # type: ignore[misc]
    assert departed == [b"0-1", b""]


async def test_the_last_epoch_is_the_highest_one_trained(store: Store) -> None:
    team = await start(store)
    assert await store.tickets.issue(team.leader, 0, [ticket(0), ticket(1, id="2-1", epoch=2)]) == 2
    for held in await claim(store, "g", 2):
        assert await submit(store, "g", held)
    await settle(store, team)
    await prepare(store, team, 0, ["2-1", "0-0"])
    await store.steps.commit(team.trainer, 0)
    assert await store.client.hget(store.keys.run, "last_epoch") == b"2"  # type: ignore[misc]


@pytest.mark.parametrize(
    "plans",
    [("x", b"plan", 0), (0, b"plan", "x"), (0, b"plan", 2, b"rank"), (0, b"plan")],
    ids=["no step", "no number of ranks", "a rank short", "cut off"],
)
async def test_incomplete_plans_of_damaged_groups_are_rejected(store: Store, plans: tuple[Any, ...]) -> None:
    team = await start(store)
    await buffer(store, team, 2)
    await prepare(store, team, 0, ["0-0", "0-1"])
    args = ("discard_damaged", team.trainer, 0, 0, 1, "0-1", "it is damaged", *plans)
    await refused(store, "INVALID", *args)
    await refused(store, "INVALID groups or plans: they are incomplete", *args[:5])


async def test_groups_in_no_step_are_not_discarded(store: Store) -> None:
    team = await start(store)
    await buffer(store, team, 3)
    await prepare(store, team, 0, ["0-0", "0-1"])
    before = await dump(store)
    assert await store.steps.discard_damaged(team.trainer, 0, 0, {"0-2": "?"}, [flow.plan(0, ["0-0"])]) == 0
    assert await dump(store) == before
    why = {"0-1": "it is damaged", "0-2": "?"}
    assert await store.steps.discard_damaged(team.trainer, 0, 0, why, [flow.plan(0, ["0-0"])]) == 1
    assert [letter.ticket for letter in await store.dead_letters.page()] == ["0-1"]


async def test_a_failed_ticket_deletes_its_turns_and_claim(store: Store) -> None:
    team = await start(store)
    assert await store.tickets.issue(team.leader, 0, [ticket(0)], environments={"main"}) == 1
    (held,) = await claim(store, "e", rollouts=True)
    assert await store.tickets.commit_turn("e", held, flow.first_turn(), b"turn", 60)
    assert await store.client.exists(store.keys.turns("0-0")) == 1
    assert await store.tickets.fail("e", held, "a test", 1)
    assert await store.client.exists(store.keys.turns("0-0")) == 0
    stream = f"{store.keys.prefix}:tickets:rollouts"
    assert (await store.client.xpending(stream, "environments"))["pending"] == 0


async def test_a_new_trainer_takes_over_only_the_published_version(store: Store) -> None:
    team = await start(store)
    await buffer(store, team, 1)
    await prepare(store, team, 0, ["0-0"])
    await store.steps.commit(team.trainer, 0)
    await store.steps.publish(team.trainer, 1)
    newer = await store.run.attach_trainer()
    assert not await store.steps.publish(newer, 0)
    assert await flow.trainer_fence(store) == team.trainer, "generators hold what the previous one published"
    assert not await store.steps.publish(newer, 1)
    assert await flow.trainer_fence(store) == newer


async def test_only_a_full_id_of_an_issued_ticket_is_requeued(store: Store) -> None:
    team = await start(store)
    fields = {"ticket": "1234567890-0", "outcome": "failed", "reason": "a test", "body": b""}
    foreign = (await store.client.xadd(store.keys.deadletter, fields)).decode()  # type: ignore[arg-type]
    (answer,) = await store.dead_letters.requeue([foreign])
    assert "not of the form <epoch>-<row>" in answer.refusal
    await issue(store, team, 1)
    (held,) = await claim(store, "g")
    assert await store.tickets.fail("g", held, "a test", 1)
    (letter,) = [letter for letter in await store.dead_letters.page() if letter.ticket == "0-0"]
    for given in (letter.id.partition("-")[0], "no id"):
        (answer,) = await store.dead_letters.requeue([given])
        assert "no such dead letter" in answer.refusal
    (answer,) = await store.dead_letters.requeue([letter.id])
    assert answer.refusal == ""
    assert await store.client.zscore(f"{store.keys.prefix}:drops:order", "0-0") is None


async def test_a_pod_that_leaves_is_forgotten_everywhere(store: Store) -> None:
    team = await start(store)
    pod = PodStatus("generator", "g", "boot", "here", 1, "", "ready", 0, 1, {})
    await store.fleet.beat(pod, 60.0)
    await issue(store, team, 1)
    await claim(store, "g")
    assert await store.client.hexists(f"{store.keys.prefix}:claimed", "g")  # type: ignore[misc]
    await store.fleet.leave(pod)
    left = [key for key in await dump(store) if key.rpartition(b":")[2] in (b"claimers", b"claimed", b"status", b"fleet")]
    assert left == []


async def test_an_audit_before_the_first_publication_counts_tickets(store: Store) -> None:
    fence = await store.run.create("config", "data", 4, 8) and await store.run.lead("d", 60)
    assert fence is not None
    assert await store.tickets.issue(fence, 0, [ticket(0)]) == 1
    counted = await store.run.audit()
    assert (counted["tickets"], counted["prepared"], counted["unpublished"]) == (1, 0, 0)


async def test_a_solved_row_is_judged_by_the_present_bound(store: Store) -> None:
    team = await start(store)
    await issue(store, team, 2)
    for held in await claim(store, "g", 2):
        await submit(store, "g", held)
    first, second = await store.replay.read_headers(team.leader, 2)
    assert await store.replay.settle(team.leader, [Settlement(first, "insert", rate=(7, 0.6, 0.5))]) == 1
    assert await store.replay.settle(team.leader, [Settlement(second, "insert", rate=(7, 1.0, 0.9))]) == 1
    assert await store.replay.rates() == {7: PassRate(1, 1.0)}, "0.6 no longer excludes the row"
