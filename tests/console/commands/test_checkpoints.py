"""`grpo checkpoints` lists the checkpoints in a run's folder, and `grpo checkpoint` requests one."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from services.config import digest, to_toml
from services.console.commands.__main__ import main
from services.console.run.redis_server import RedisServer
from services.operations.inspection.checkpoints import kept_until
from services.runtime import atomic_folders
from services.runtime.checkpoints import LAYOUT, CheckpointError, CheckpointFolder
from services.store import Store
from tests.support.checkpoints import write_checkpoint
from tests.support.harness import small_config


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a run's folder with the checkpoints of steps 3 and 7 and an incomplete one."""
    config = small_config(tmp_path, None, "run.steps=20", "checkpoint.every_steps=4", "checkpoint.keep=2")
    folder = tmp_path / "small"
    folder.mkdir()
    (folder / "config.toml").write_text(to_toml(config))
    for step in (3, 7):
        write_checkpoint(folder / "checkpoints", step)
    (atomic_folders.begin(folder / "checkpoints" / "step-00000011") / "state").write_bytes(b"half")
    return folder


def _listed(run: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, dict[int, dict[str, Any]]]:
    code = main(["checkpoints", str(run), "--json", *options])
    return code, {one["step"]: one for one in json.loads(capsys.readouterr().out)["checkpoints"]}


def test_checkpoints_are_listed_with_their_state(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = _listed(run, capsys)
    assert code == 0
    assert {step: (one["complete"], one["latest"], one["kept_until"]) for step, one in found.items()} == {
        3: (True, False, 11),
        7: (True, True, 15),
        11: (False, False, None),
    }
    assert (found[7]["bytes"], found[7]["ranks"], found[7]["zero_stage"], found[7]["written_s"]) == (100, 2, 3, 1e9 + 7)
    assert "left half-written" in found[11]["problem"]
    assert main(["checkpoints", str(run)]) == 0
    table = " ".join(capsys.readouterr().out.split())
    assert "keep 2" in table
    assert "7 yes yes 100 2001-09-09 " in table


def test_a_run_without_checkpoints_says_so(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(run / "checkpoints")
    assert main(["checkpoints", str(run)]) == 0
    assert capsys.readouterr().out == f"no checkpoints in {run}/checkpoints; the trainer writes one every 4 steps\n"


def test_files_may_be_deleted_while_they_are_listed(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer deletes files that an earlier start left half-written."""
    (left,) = (run / "checkpoints").glob("step-00000011.*")
    (left / "more").write_bytes(b"half")
    stat = Path.stat

    def deleting(path: Path, **options: Any) -> os.stat_result:
        found = stat(path, **options)
        if path.parent == left:
            for name in ("state", "more"):
                (left / name).unlink(missing_ok=True)
        return found

    monkeypatch.setattr(Path, "stat", deleting)
    assert main(["checkpoints", str(run), "--json"]) == 0
    assert list(left.iterdir()) == []


def test_only_verify_detects_damage(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "checkpoints" / "step-00000003" / "state").write_bytes(b"y" * 100)
    assert _listed(run, capsys)[0] == 0
    code, found = _listed(run, capsys, "--verify")
    assert code == 1
    assert "differs from the SHA-256" in found[3]["problem"]
    assert found[7]["problem"] == ""


def test_a_checkpoint_of_a_newer_version_is_listed_not_skipped(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(run / "checkpoints", 9, layout=LAYOUT + 1)
    code, found = _listed(run, capsys)
    assert (code, found[9]["latest"]) == (1, True)
    assert "written by a newer version" in found[9]["problem"]
    with pytest.raises(CheckpointError, match="written by a newer version of this program"):
        CheckpointFolder(run / "checkpoints").latest()
    with pytest.raises(CheckpointError, match="written by a newer version of this program"):
        CheckpointFolder(run / "checkpoints").at(9)


def test_a_missing_or_incomplete_step_is_named(run: Path) -> None:
    found = CheckpointFolder(run / "checkpoints")
    assert found.at(3).read("state") == b"x" * 100
    with pytest.raises(CheckpointError, match=r"step 5 in .* does not exist; complete checkpoints: 3, 7"):
        found.at(5)
    with pytest.raises(CheckpointError, match=r"step 11 in .* was never finished: it has no manifest\.json"):
        found.at(11)
    (run / "checkpoints" / "step-00000003" / "state").unlink()
    with pytest.raises(CheckpointError, match=r"No such file or directory; restore the file, or delete"):
        found.at(3)


def test_kept_until_matches_hand_computed_values() -> None:
    saving = {"steps": 20, "every_steps": 4, "keep": 3}
    assert kept_until([1, 3, 7], 7, **saving) == {1: 11, 3: 15, 7: 19}
    assert kept_until([3, 7, 8], 8, **saving) == {3: 11, 7: 15, 8: 19}
    assert kept_until([7, 11, 15], 15, **saving) == {7: 19}
    assert kept_until([11, 15, 19], 19, **saving) == {}
    assert kept_until([], -1, **saving) == {}


def test_kept_until_after_a_restore() -> None:
    """Step 7's checkpoint is next and may be a rewrite. Those of later, undone steps are deleted first, although written last."""
    saving = {"steps": 24, "every_steps": 4, "keep": 3}
    assert kept_until([3, 11, 15], 3, **saving) == {11: 7, 15: 11, 3: 15}
    assert kept_until([3, 7, 11], 3, **saving) == {7: 7, 11: 11, 3: 15}
    assert kept_until([11, 15, 19, 3], 3, **saving) == {11: 7, 15: 7, 19: 11, 3: 15}


def test_a_restored_run_lists_when_checkpoints_are_deleted(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    atomic_folders.replace(run / "checkpoints" / "latest", b"step-00000003")
    _, found = _listed(run, capsys)
    assert {step: one["kept_until"] for step, one in found.items() if one["complete"]} == {3: 11, 7: 7}


def test_a_missing_run_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoints", str(tmp_path / "none")]) == 2
    assert "no run" in capsys.readouterr().err


def test_a_checkpoint_can_be_requested(server: RedisServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import asyncio

    config = small_config(tmp_path, server, "run.name=asked")
    folder = tmp_path / "asked"
    folder.mkdir()
    (folder / "config.toml").write_text(to_toml(config))

    async def with_store(act: Any) -> Any:
        store = await Store.connect(server.url, "asked", server.password)
        try:
            return await act(store)
        finally:
            await store.close()

    async def fail_soon(store: Store) -> int:
        """Fail like a trainer that cannot write while the command waits; return the command's exit code."""
        waiting = asyncio.create_task(asyncio.to_thread(main, ["checkpoint", str(folder), "--wait"]))
        while not waiting.done():
            await store.run.checkpoint_failed(f"step 0, attempt {time.time()}: disk full")
            await asyncio.sleep(0.05)
        return await waiting

    async def write_soon(store: Store) -> int:
        async def requested() -> str:
            state = await store.run.state()
            assert state is not None
            return state.checkpoint

        before = await requested()
        waiting = asyncio.create_task(asyncio.to_thread(main, ["checkpoint", str(folder), "--wait"]))
        while await requested() == before:
            await asyncio.sleep(0.02)
        await store.steps.checkpointed(await store.run.attach_trainer(), 0)
        return await waiting

    asyncio.run(with_store(lambda store: store.run.create(digest(config), "dataset", config.run.steps, config.slots)))
    try:
        assert main(["checkpoint", str(folder)]) == 0
        assert "checkpoint requested, of step 0 or the step in training" in capsys.readouterr().out
        assert asyncio.run(with_store(fail_soon)) == 1
        assert "disk full" in capsys.readouterr().err
        assert asyncio.run(with_store(write_soon)) == 0
        assert main(["checkpoint", str(folder)]) == 0
        assert capsys.readouterr().out.splitlines() == ["run asked: checkpoint of step 0 written"] * 2
    finally:
        asyncio.run(with_store(lambda store: store.restores.delete_run()))
