"""Replaying the stages of a bundle after the run has been resumed with other settings."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from services.config import RunConfig
from services.console.bundles import stages
from services.console.run import changes
from services.dataprep.planning.step import make_step
from services.dataprep.replay.generated_statistics import GeneratedStats
from services.operations.bundles.format import Bundle, BundleError, Origin, RecordedGroup, RecordedStep
from services.protocol import codec
from services.protocol.messages import RankPlan, StepPlan
from services.runtime.atomic_folders import FileRecord
from services.store import BufferedGroup, Store
from services.store.records import SweptTable
from services.trainer.step.discard_damaged import without
from tests.support import flow
from tests.support.harness import small_config


async def recorded(store: Store, config: RunConfig, rewards: list[float] | None = None) -> Bundle:
    """Return a bundle of a step of four groups, planned with this configuration."""
    team = await flow.start(store)
    await flow.issue(store, team, 4)
    fields = {"rewards": rewards, "scores": {"exact": rewards}} if rewards else {}
    headers = [flow.header(claim, lengths=[12, 9, 7, 3], **fields) for claim in await flow.claim(store, "g", 4)]
    drawn = [BufferedGroup(header.ticket, 0, header) for header in headers]
    swept = SweptTable(0, 4, 0, -1, 4, 0, 0, {0: 4}, (), ())
    plan, ranks = make_step(0, drawn, swept, GeneratedStats(["main"]), config)
    step = RecordedStep(codec.encode(plan), [codec.encode(rank) for rank in ranks], None)
    groups = {header.payload: RecordedGroup(codec.encode(header), b"", None, "") for header in headers}
    return Bundle("small", 0, 0.0, "", "", {}, Origin(), [step], groups, {}, {})


async def test_a_step_that_was_planned_for_shorter_rows_is_packed_again_as_it_was(store: Store, tmp_path: Path) -> None:
    config, resumed = (small_config(tmp_path, None, f"trainer.row_tokens={tokens}") for tokens in (48, 256))
    compared = [one for one in stages.packed(await recorded(store, config), resumed) if isinstance(one, stages.Compared)]
    assert len(compared) > 20
    assert [one for one in compared if one.differs(0.0)] == []


async def test_groups_that_earlier_filters_inserted_do_not_differ(store: Store, tmp_path: Path) -> None:
    before, resumed = (small_config(tmp_path, None, f"filters.zero_std={value}") for value in ("false", "true"))
    bundle = await recorded(store, before, [1.0] * 4)
    differ = [one for one in stages.settled(bundle, resumed) if isinstance(one, stages.Compared) and one.differs(0.0)]
    assert {one.now for one in differ} == {"filtered:nonzero"}, "nothing says that the run was resumed with another filter"
    (tmp_path / "changes.jsonl").write_text(
        '{"step": 3, "time_s": 1.0, "forked_from": "runs/old", "changes": {"filters.exclude_pass_rate": [0.5, 0.9]}}\n'
        '{"step": 5, "time_s": 2.0, "changes": {"filters.zero_std": [false, true], "run.steps": [4, 9]}}\n'
        '{"step": 7, "cha'  # torn by a kill
    )
    earlier = changes.earlier(tmp_path / "changes.jsonl", "filters.")
    assert earlier == {"filters.zero_std": [False]}
    found = list(stages.settled(msgspec.structs.replace(bundle, earlier=earlier), resumed))
    assert [one for one in found if isinstance(one, stages.Compared) and one.differs(0.0)] == []
    notes = [one for one in found if isinstance(one, str)]
    assert len(notes) == 4
    assert "left out, filters.zero_std had another value before the run was resumed" in notes[0]


async def test_a_step_that_lost_a_damaged_group_is_not_packed_again(store: Store, tmp_path: Path) -> None:
    config = small_config(tmp_path)
    bundle = await recorded(store, config)
    plan, ranks = codec.decode(bundle.steps[0].plan, StepPlan), [codec.decode(each, RankPlan) for each in bundle.steps[0].ranks]
    plan, ranks = without(plan, ranks, {plan.groups[0]}, config.loss)
    step = RecordedStep(codec.encode(plan), [codec.encode(rank) for rank in ranks], None)
    (note,) = stages.packed(msgspec.structs.replace(bundle, steps=[step]), config)
    assert note == "step 0: left out, it lost 1 damaged group after it was planned, without which it cannot be planned again"


async def test_scores_need_the_model_where_the_bundle_only_refers_to_it(tmp_path: Path) -> None:
    config = small_config(tmp_path, None, "model.path=build/elsewhere", 'verifiers=[{kind = "exact"}]')
    record = FileRecord(1, 64 * "0")
    bundle = Bundle("small", 0, 0.0, "", "", {}, Origin(), [], {}, {}, {"tokenizer.json": record})
    with pytest.raises(BundleError, match=r"^model\.path = 'build/elsewhere' is no folder here.* or record it with --weights$"):
        async for _ in stages.score(bundle, config, run_code=False):
            pass


async def test_scores_need_the_code_that_the_bundle_only_names(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def score(completion):\n    return 1.0\n")
    function = f'verifiers=[{{kind = "python", function = "{tmp_path / "own.py"}:score"}}]'
    config = small_config(tmp_path, None, function)
    (tmp_path / "own.py").unlink()
    bundle = Bundle("small", 0, 0.0, "", "", {}, Origin(), [], {}, {}, {})
    with pytest.raises(BundleError, match=r"^verifier 'python': the bundle does not contain its code, .*own\.py here"):
        async for _ in stages.score(bundle, config, run_code=True):
            pass
