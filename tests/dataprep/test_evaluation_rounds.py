"""The leader's handling of evaluation rounds, on a real Redis."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry

from services.dataprep.evaluation_rounds import EvaluationRounds
from services.dataprep.metrics import EvaluationMetrics
from services.dataprep.prompts.catalogue import Prompt
from services.dataprep.prompts.order import SourceSpan
from services.protocol.errors import Busy
from services.runtime.tracing import TraceRecorder
from services.store import Store
from tests.support.flow import start
from tests.support.harness import small_config


class Rows:
    """The prompts of a fake evaluation source."""

    spans = (SourceSpan("easy", 1.0, 0, 3),)

    def prompt(self, row: int) -> Prompt:
        return Prompt([5, 6, 20 + row], str(row), "")


async def test_rounds_that_a_snapshot_kept_from_being_skipped_are_counted(store: Store, tmp_path: Path) -> None:
    config = small_config(
        tmp_path, None, "generator.count=3", "evaluation.every_steps=2", "run.steps=6", "evaluation.samples=2",
        "evaluation.sources=[{kind='jsonl', name='easy', path='none.jsonl'}]",
    )  # fmt: skip
    team = await start(store, slots=64)
    await store.client.hset(store.keys.run, mapping={"prepared_step": 5, "committed_step": 4, "published_version": 5})  # type: ignore[misc]
    state = await store.run.state()
    assert state is not None
    metrics = EvaluationMetrics(CollectorRegistry())
    rounds = EvaluationRounds(config, store, cast("Any", Rows()), metrics, TraceRecorder())
    assert not await rounds.tend(team.leader, state), "nothing is open"
    await store.connection.call("snapshot_begin", team.trainer, 1, 60_000)
    with pytest.raises(Busy):
        await rounds.tend(team.leader, state)
    await store.connection.call("snapshot_end", team.trainer, 1)
    while await rounds.tend(team.leader, state):
        pass
    found = (await store.evaluation.state(60)).round
    assert found is not None
    assert found.version == 6
    ledger = await store.client.hget(store.keys.ledger, "evaluations_skipped")  # type: ignore[misc]
    assert ledger == b"3", "those of versions 0, 2 and 4"


async def test_a_round_is_abandoned_when_the_run_is_resumed_without_evaluation(store: Store, tmp_path: Path) -> None:
    given = ("evaluation.every_steps=2", "evaluation.sources=[{kind='jsonl', name='easy', path='none.jsonl'}]")
    before, now = (small_config(tmp_path, None, "generator.count=2", *overrides) for overrides in (given, ()))
    team = await start(store, slots=64)
    state = await store.run.state()
    assert state is not None
    rows, metrics = cast("Any", Rows()), EvaluationMetrics(CollectorRegistry())
    rounds = EvaluationRounds(before, store, rows, metrics, TraceRecorder())
    assert [await rounds.tend(team.leader, state) for _ in range(2)] == [False, True]
    assert (await store.evaluation.state(60)).round is not None
    without = EvaluationRounds(now, store, None, metrics, TraceRecorder())
    assert await without.tend(team.leader, state)
    found = await store.evaluation.state(60)
    assert (found.round, found.abandoned) == (None, "version 0: evaluation.every_steps is 0 now")
    assert not await without.tend(team.leader, state)
