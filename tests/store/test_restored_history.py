"""What a restore makes of the run's history: its records of steps, and its evaluation rounds."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.store import Store, facet
from services.store.snapshot_format import Snapshot
from tests.store.test_evaluation import TTL_S, open_round, round_keys
from tests.support import flow


async def trained(store: Store, steps: int) -> flow.Team:
    """Start a run and train these steps, with weights that are published after each."""
    team = await flow.start(store)
    for step in range(steps):
        await flow.buffer(store, team, 1, step)
        (group,) = await flow.oldest_groups(store, 1)
        await flow.prepare(store, team, step, [group.group])
        assert await store.steps.commit(team.trainer, step)
        assert await store.steps.publish(team.trainer, step + 1)
    return team


async def restore(store: Store, path: Path) -> str:
    trainer = await store.run.attach_trainer()
    return await store.restores.restore(trainer, Snapshot(path), True, lambda: None)


@pytest.mark.parametrize("version", [0, 1])
async def test_a_round_whose_version_is_not_published_again_is_abandoned(store: Store, tmp_path: Path, version: int) -> None:
    store, team = store, await trained(store, 2)
    await open_round(store, team, version)
    await store.snapshots.save(team.trainer, 1, tmp_path / "s", payloads=True)
    why = f"version {version}: the run was restored to step 1, whose weights are newer"
    for _ in range(2):  # also if the restore is repeated
        assert await restore(store, tmp_path / "s") == why
        state = await store.evaluation.state(TTL_S)
        assert (state.dealt_with, state.abandoned, state.round) == (version, why, None)
        assert await round_keys(store) == []
        audit = await store.run.audit()
        assert (audit["ledger:evaluations_abandoned"], audit.get("ledger:evaluations", 0)) == (1, 0)


async def test_a_round_that_was_reported_after_the_checkpoint_is_not_abandoned(store: Store, tmp_path: Path) -> None:
    store, team = store, await trained(store, 2)
    await open_round(store, team, 1)
    await store.snapshots.save(team.trainer, 1, tmp_path / "s", payloads=True)
    assert await store.evaluation.report(team.leader, 1, {"eval/version": 1.0})
    assert await restore(store, tmp_path / "s") == ""
    audit = await store.run.audit()
    assert (audit["ledger:evaluations"], audit.get("ledger:evaluations_abandoned", 0)) == (1, 0)
    state = await store.evaluation.state(TTL_S)
    assert (state.dealt_with, state.abandoned) == (1, "")


async def test_a_round_whose_version_is_published_again_is_held_again(store: Store, tmp_path: Path) -> None:
    store, team = store, await trained(store, 2)
    await open_round(store, team, 2)
    await store.snapshots.save(team.trainer, 1, tmp_path / "s", payloads=True)
    assert await restore(store, tmp_path / "s") == ""
    state = await store.evaluation.state(TTL_S)
    assert (state.dealt_with, state.abandoned, state.round) == (1, "", None)
    assert "ledger:evaluations_abandoned" not in await store.run.audit()


UNREADABLE = [
    {"m": "no JSON"}, {"m": b"\xff"}, {"m": "[1]"}, {"m": "{}"}, {"m": "null"}, {"m": '{"step": null, "eval/version": null}'},
    {"m": '{"step": "nine", "eval/version": [9]}'}, {"other": "{}"},
]  # fmt: skip


async def test_entries_of_the_history_that_cannot_be_read_stay(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, team = store, await trained(store, 1)
    await store.snapshots.save(team.trainer, 0, tmp_path / "s", payloads=True)
    for stream, key in ((store.keys.metrics, "step"), (store.keys.evaluations, "eval/version")):
        for number, fields in enumerate(UNREADABLE):
            await store.client.xadd(stream, fields)  # type: ignore[arg-type]
            await store.client.xadd(stream, {"m": f'{{"{key}": {number}.0}}'})
    monkeypatch.setattr(facet, "TOGETHER", 3)
    shown = list[str]()
    trainer = await store.run.attach_trainer()
    await store.restores.restore(trainer, Snapshot(tmp_path / "s"), True, lambda: shown.append("alive"))
    for stream, readable in ((store.keys.metrics, 1), (store.keys.evaluations, 2)):
        fields = [fields for _, fields in await store.client.xrange(stream)]
        assert len(fields) == len(UNREADABLE) + readable
    assert len(shown) > 2 * len(UNREADABLE) * 2 / 3
