"""Which settings may change when a run is resumed, and how the changes are recorded."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from services.config import RunConfig, digest, load_resolved
from services.console.errors import ConsoleError
from services.console.run import resumption
from services.console.run.folder import RunFolder
from services.console.run.redis_server import RedisServer
from services.console.run.resumption import changes, in_words, next_step, record, take_back
from services.store import Store
from tests.console.commands.test_fork import checkpoint
from tests.support.console import config_file, grpo
from tests.support.harness import small_config


@pytest.mark.parametrize("override", ["run.steps=9", "filters.zero_std=true", "optimizer.schedule=linear"])
def test_settings_that_do_not_define_a_run_may_change(tmp_path: Path, override: str) -> None:
    before = small_config(tmp_path)
    folder = RunFolder.of(before)
    folder.write(before)
    now = small_config(tmp_path, None, override)
    assert folder.check(now)
    assert digest(now) == digest(before)
    assert list(changes(before, now)) == [override.partition("=")[0]]


@pytest.mark.parametrize("override", ["run.seed=9", "sampling.group_size=2", "loss.policy=gspo", "admission.max_staleness=0"])
def test_settings_that_define_a_run_may_not_change(tmp_path: Path, override: str) -> None:
    folder = RunFolder.of(small_config(tmp_path))
    folder.write(small_config(tmp_path))
    with pytest.raises(ConsoleError, match=override.partition("=")[0]):
        folder.check(small_config(tmp_path, None, override))


def test_changes_are_recorded_with_their_first_step(tmp_path: Path) -> None:
    before, now = small_config(tmp_path), small_config(tmp_path, None, "run.steps=9", "filters.zero_std=true")
    found = changes(before, now)
    assert in_words(found) == "filters.zero_std from False to True, run.steps from 4 to 9"
    assert changes(now, now) == {}
    file = RunFolder.of(now).changes
    file.parent.mkdir()
    for step in (4, 7):
        record(file, step, found)
    lines = [msgspec.json.decode(line) for line in file.read_bytes().splitlines()]
    assert [line["step"] for line in lines] == [4, 7]
    assert lines[0]["changes"] == {"filters.zero_std": [False, True], "run.steps": [4, 9]}


def test_a_change_that_a_killed_start_did_not_make_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start records its changes before it makes them, so the next start has the whole history, whenever it is killed."""
    before, now = small_config(tmp_path), small_config(tmp_path, None, "run.steps=9")
    last = small_config(tmp_path, None, "run.steps=12", "optimizer.betas=[0.8, 0.9]")
    folder = RunFolder.of(before)
    folder.write(before)

    def lines() -> list[dict[str, object]]:
        return [msgspec.json.decode(line)["changes"] for line in folder.changes.read_bytes().splitlines()]

    monkeypatch.setattr(resumption, "next_step", _third_step)
    with monkeypatch.context() as killed:
        killed.setattr(RunFolder, "write", _kill)
        with pytest.raises(KeyboardInterrupt):
            resumption.written(now, folder, before, None, "")
    assert lines() == [{"run.steps": [4, 9]}], "the start was killed before the run had them"
    resumption.written(last, folder, before, None, "")
    made = [{"optimizer.betas": [[0.9, 0.95], [0.8, 0.9]], "run.steps": [4, 12]}]
    assert lines() == made
    with folder.changes.open("ab") as file:
        file.write(b'{"step": 7, "cha')
    for _ in range(2):
        take_back(folder.changes, last)
        assert lines() == made


def test_an_entry_that_a_killed_start_added_or_removed_is_taken_back(tmp_path: Path) -> None:
    def evaluating(*names: str) -> RunConfig:
        sources = ", ".join(f"{{kind='jsonl', name='{name}', path='{name}.jsonl'}}" for name in names)
        return small_config(tmp_path, None, "generator.count=2", "evaluation.every_steps=1", f"evaluation.sources=[{sources}]")

    one, two, file = evaluating("a"), evaluating("a", "b"), tmp_path / "changes.jsonl"
    for before, now in ((one, two), (two, one)):
        record(file, 3, changes(before, now))
        take_back(file, now)
        assert file.read_bytes(), "the run has them"
        take_back(file, before)
        assert not file.read_bytes()


async def _third_step(*_: object) -> int:
    return 3


def _kill(*_: object) -> None:
    raise KeyboardInterrupt


async def test_run_steps_must_cover_the_steps_already_trained(tmp_path: Path, server: RedisServer, store: Store) -> None:
    """A run continues after the checkpoint to restore, after the last step in Redis, or after the latest checkpoint."""
    config = small_config(tmp_path, server, f"run.name={store.keys.name}", "run.steps=45")
    folder, password = RunFolder.of(config), server.password
    assert await next_step(config, password, folder, None) == 0
    for step in (20, 50):
        checkpoint(config, step)
    with pytest.raises(ConsoleError, match=r"run\.steps = 45, but the run has trained 51: raise it"):
        await next_step(config, password, folder, None)
    (folder.checkpoints / "latest").write_text("step-00000020")
    assert await next_step(config, password, folder, None) == 21, "the run was restored"
    await store.run.create(digest(config), "data", 60, config.slots)
    await store.client.hset(store.keys.run, "committed_step", 59)
    with pytest.raises(ConsoleError, match="but the run has trained 60"):
        await next_step(config, password, folder, None)
    assert await next_step(config, password, folder, 40) == 41
    await store.run.request_restore(44)
    assert await next_step(config, password, folder, None) == 45
    await store.run.request_restore(50)
    with pytest.raises(ConsoleError, match=r"run\.steps = 45, but up to checkpoint 50 the run has trained 51: raise it"):
        await next_step(config, password, folder, None)


def test_without_redis_changes_are_recorded_or_rejected(tmp_path: Path) -> None:
    config, file = small_config(tmp_path), config_file(tmp_path)
    folder = RunFolder.of(config)
    folder.write(config)
    checkpoint(config, 2)
    kept = folder.config.read_bytes()
    less = grpo("run", file, "run.steps=2", "filters.zero_std=true")
    assert (less.returncode, "run.steps = 2, but the run has trained 3" in less.stderr) == (2, True)
    assert (folder.config.read_bytes(), folder.changes.exists()) == (kept, False)
    more = grpo("run", file, "run.steps=5")
    assert more.returncode == 0, more.stderr
    assert "changed from step 3 on: run.steps from 4 to 5" in more.stdout
    (line,) = map(msgspec.json.decode, folder.changes.read_bytes().splitlines())
    assert (line["step"], line["changes"]) == (3, {"run.steps": [4, 5]})
    assert load_resolved(folder.config).run.steps == 5
