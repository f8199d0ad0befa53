"""Stages of a bundle that are repeated with the settings of a run that was resumed with others."""

from __future__ import annotations

from pathlib import Path

from services.console.bundles import stages
from services.dataprep.planning.step import make_step
from services.dataprep.replay.generated_statistics import GeneratedStats
from services.operations.bundles.format import Bundle, Origin, RecordedGroup, RecordedStep
from services.protocol import codec
from services.store import BufferedGroup, Store
from services.store.records import SweptTable
from tests.support import flow
from tests.support.harness import small_config


async def test_a_step_that_was_planned_for_shorter_rows_is_packed_again_as_it_was(store: Store, tmp_path: Path) -> None:
    config, resumed = (small_config(tmp_path, None, f"trainer.row_tokens={tokens}") for tokens in (48, 256))
    team = await flow.start(store)
    await flow.issue(store, team, 4)
    headers = [flow.header(claim, lengths=[12, 9, 7, 3]) for claim in await flow.claim(store, "g", 4)]
    drawn = [BufferedGroup(header.ticket, 0, header) for header in headers]
    swept = SweptTable(0, 4, 0, -1, 4, 0, 0, {0: 4}, (), ())
    plan, ranks = make_step(0, drawn, swept, GeneratedStats(["main"]), config)
    step = RecordedStep(codec.encode(plan), [codec.encode(rank) for rank in ranks], None)
    groups = {header.payload: RecordedGroup(codec.encode(header), b"", None, "") for header in headers}
    bundle = Bundle("small", 0, 0.0, "", "", {}, Origin(), [step], groups, {}, {})
    compared = list(stages.packed(bundle, resumed))
    assert len(compared) > 20
    assert [one for one in compared if one.differs(0.0)] == []
