"""Follow a group from its ticket to its trained step, one hand-over at a time. Read the tests in this folder in order."""

from __future__ import annotations

from services.operations.inspection.ledger import audit
from services.protocol.messages import Ticket
from services.store import Settlement, Store
from tests.support.flow import TTL_S, header, payload_bytes, plan


async def test_a_group_lives_in_exactly_one_place_at_a_time(store: Store) -> None:
    """Dataprep issues, a generator claims and submits, dataprep settles and prepares, the trainer commits and publishes.

    After each hand-over the audit finds the ticket in one place. Its slot is held until the weights it trained are published.
    """

    async def where() -> tuple[list[str], int]:
        report = await audit(store)
        assert report.ok, report.messages
        return [name for name, count in (report.places | report.outcomes).items() if count], report.slots_used

    await store.run.create(config="digest of the configuration", dataset="digest of the data", steps=1, slots=2)
    leader, trainer = await store.run.lead("dataprep-0", lease_s=10), await store.run.attach_trainer()
    assert leader is not None
    await store.steps.publish(trainer, 0)  # the fleet holds version 0, so tickets can be claimed from now on

    ticket = Ticket("0-7", seq=0, epoch=0, index=7, seed=1, prompt=[5, 6], answer="42", group_size=4, source="main")
    assert await store.tickets.issue(leader, 0, [ticket]) == 1
    assert await where() == (["tickets"], 1)

    _, (claim,) = await store.tickets.claim("generator-0", version=0, trainer_fence=trainer, lease_s=10, count=8)
    assert claim.ticket == ticket
    assert await where() == (["tickets"], 1)  # leased, but still in the stream, because the generator may die

    assert await store.tickets.submit("generator-0", claim, header(claim), payload_bytes(claim), TTL_S)
    assert await where() == (["headers"], 1)  # only the header moves on; the tokens stay under a separate key

    (entry,) = await store.replay.read_headers(leader, count=10)
    assert entry.header is not None
    await store.replay.settle(leader, [Settlement(entry, "insert", min(entry.header.oldest))])
    assert await where() == (["buffered"], 1)

    await store.steps.prepare(leader, *plan(0, ["0-7"], [claim.payload]))
    assert await where() == (["prepared"], 1)

    rank = await store.steps.rank_plan(step=0, rank=0)
    payloads = await store.steps.payloads([sample.payload for row in rank.rows for sample in row])
    assert payloads[claim.payload].lengths.tolist() == [2, 2, 2, 2]
    await store.steps.commit(trainer, 0)
    assert await where() == (["trained"], 1)

    await store.steps.publish(trainer, 1)
    assert await where() == (["trained"], 0)


async def test_the_plan_and_its_tokens_stay_until_a_checkpoint(store: Store) -> None:
    """A restarted trainer loads its last checkpoint and finds the plans since then, so it trains on the same batches again."""
    await test_a_group_lives_in_exactly_one_place_at_a_time(store)
    assert await store.steps.plan(0) is not None
    trainer = await store.run.attach_trainer()
    await store.steps.checkpointed(trainer, 0)
    assert await store.steps.retire() == 1
    assert await store.steps.plan(0) is None
