"""What `grpo fork`, which creates a run from a checkpoint, copies, changes and rejects."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.config import RunConfig, digest, load, load_resolved
from services.console.commands.__main__ import main
from services.console.run.folder import RunFolder
from services.runtime import atomic_folders
from services.runtime.atomic_folders import FolderManifest
from services.runtime.checkpoints import LAYOUT, SNAPSHOT, CheckpointFolder
from services.store.snapshot_format import LAYOUT as SNAPSHOT_LAYOUT
from services.store.snapshot_format import Groups, Head, Snapshot, SnapshotGroup, Writer
from tests.support.harness import small_config

GROUP = Groups([SnapshotGroup("0-7", 7, {"header": b"h"}, b"tokens", 1.0)])


def checkpoint(config: RunConfig, step: int) -> None:
    """Write a checkpoint as the trainer does, with one group saved with its tokens."""
    final = RunFolder.of(config).checkpoints / f"step-{step:08d}"
    partial = atomic_folders.begin(final)
    (partial / "trainer").mkdir()
    atomic_folders.write(partial / "trainer" / "state-0.pt", b"weights")
    run = {"config": digest(config), "dataset": "d", "steps": "4", "cursor": "9"}
    writer = Writer(partial / SNAPSHOT)
    writer.add(
        Head(
            layout=SNAPSHOT_LAYOUT, step=step, run=run, ledger={}, outstanding={"0-8": 8}, requeued=[], evaluating=False,
            order={}, table={}, gaps={}, trained={}, plans={}, departed=[], whole=True,
        )
    )  # fmt: skip
    writer.add(GROUP)
    writer.close()
    facts = {"step": step, "layout": LAYOUT, "ranks": 1, "zero_stage": 0, "time_s": 1e9 + step, "run": config.run.name}
    atomic_folders.finish(partial, final, FolderManifest(atomic_folders.records(partial), facts))
    atomic_folders.replace(final.parent / "latest", final.name.encode())


@pytest.fixture
def old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """Return a run's folder with the checkpoints of steps 1 and 3 and the records of five steps, followed by a torn one."""
    monkeypatch.chdir(tmp_path)
    config = small_config(tmp_path)
    folder = RunFolder.of(config)
    config = folder.write(config)
    for step in (1, 3):
        checkpoint(config, step)
    folder.metrics.write_text(
        "".join(json.dumps({"step": step, "kl": 0.5}) + "\n" for step in range(5)) + '{"epoch": 1}\n{"step": null}\n{"st'
    )
    return folder


def forked(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["fork", "small", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture(autouse=True)
def runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look up runs by name in the working folder, where `small_config` puts them."""
    monkeypatch.setattr("services.console.paths.RUNS", Path("."))


def test_the_new_run_owns_the_checkpoint(old: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    output = forked(capsys, "--at", "1", "run.name=other", "optimizer.learning_rate=3e-5", "sampling.group_size=2")
    new = RunFolder(Path(output["folder"]))
    config = load_resolved(new.config)
    assert (config.run.name, config.optimizer.learning_rate, config.sampling.group_size) == ("other", 3e-5, 2)
    assert new.holds(load(output["file"], environ={})), "`grpo run` of the file resumes in the folder"
    saved = CheckpointFolder(new.checkpoints).latest()
    assert saved is not None
    assert (saved.step, saved.manifest.facts["run"], saved.read("trainer/state-0.pt")) == (1, "other", b"weights")
    snapshot = Snapshot(saved.folder / SNAPSHOT)
    assert snapshot.head.run == {"config": digest(config), "dataset": "d", "steps": "4", "cursor": "9"}
    assert (snapshot.head.outstanding, list(snapshot.pieces())) == ({"0-8": 8}, [GROUP])
    assert not snapshot.head.whole, "groups of the old settings are generated again"
    assert [msgspec.json.decode(line)["step"] for line in new.metrics.read_bytes().splitlines()] == [0, 1]
    (line,) = map(msgspec.json.decode, new.changes.read_bytes().splitlines())
    assert (line["step"], line["forked_from"]) == (2, "small")
    assert line["changes"] == {"optimizer.learning_rate": [1e-6, 3e-5], "sampling.group_size": [4, 2]}


@pytest.mark.parametrize("parent", ["2024", "true", "a 'b' \"c\""])
def test_the_folder_of_runs_may_have_any_name(old: RunFolder, parent: str) -> None:
    Path(parent).mkdir()
    old.path.rename(Path(parent) / "small")
    assert main(["fork", f"{parent}/small", "--at", "1", "run.name=other"]) == 0
    assert (Path(parent) / "other" / "config.toml").exists()


def test_a_fork_that_was_killed_can_be_repeated(
    old: RunFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    arguments = ("--at", "1", "run.name=other", "run.steps=9")
    with monkeypatch.context() as patched:
        patched.setattr(RunFolder, "write", killed)
        assert main(["fork", "small", *arguments]) == 130
    new = RunFolder(Path(forked(capsys, *arguments)["folder"]))
    assert load_resolved(new.config).run.steps == 9
    (line,) = map(msgspec.json.decode, new.changes.read_bytes().splitlines())
    assert line["changes"] == {"run.steps": [4, 9]}
    assert main(["fork", "small", *arguments]) != 0, "the run exists now"


@pytest.mark.parametrize(
    ("before", "arguments", "loss"),
    [
        (["loss.policy=gspo"], ["loss.policy=dapo"], (0.2, 0.272, "token")),
        (["loss.policy=dapo"], ["loss.policy=gspo"], (3e-4, 4e-4, "sequence")),
        (["loss.policy=gspo"], ['loss.policy="dapo"', "loss.clip_low=0.0003"], (3e-4, 0.272, "token")),
        (["loss.policy=gspo", "loss.clip_high=5e-4"], ["loss.policy=dapo"], (0.2, 5e-4, "token")),
        (["loss.policy=gspo"], ["loss.policy=gspo"], (3e-4, 4e-4, "sequence")),
        (["loss.policy=gspo"], ["loss.policy=dapo", "loss.policy=cispo"], (0.2, 0.272, "token")),
    ],
)
def test_a_changed_loss_gets_its_own_defaults(
    tmp_path: Path,
    old: RunFolder,
    before: list[str],
    arguments: list[str],
    loss: tuple[float, float, str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The run's file has every key, even those at their defaults."""
    config = small_config(tmp_path, None, *before)
    old.write(config)
    checkpoint(config, 3)
    new = load(forked(capsys, *arguments)["file"], environ={}).loss
    assert (new.clip_low, new.clip_high, new.denominator) == loss


def test_the_new_run_has_an_address_of_its_own_unless_it_is_given_one(
    tmp_path: Path, old: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small_config(tmp_path, None, "web.port=8001", "api.port=8002", "api.host=0.0.0.0")
    old.write(config)
    away = load(forked(capsys)["file"], environ={})
    assert (away.web.port, away.api.port, away.api.host, away.api.token_file) == (0, 0, "0.0.0.0", "")
    (old.redis / "password").parent.mkdir()
    (old.redis / "password").write_text("of the old run")
    given = ("web.port=8001", "api.certificate_file=tls.pem", "redis.url=redis://here:1/0")
    own = load(forked(capsys, "run.name=other", *given)["file"], environ={})
    assert (own.web.port, own.api.port, own.api.certificate_file) == (8001, 0, "tls.pem")
    assert (own.redis.url, own.redis.password_file) == ("redis://here:1/0", "")


def test_another_server_does_not_get_the_password_of_the_old_one(
    tmp_path: Path, old: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    given = "redis.url=rediss://there:1/0", "redis.password_file=secret", "redis.ca_file=ca.pem"
    config = small_config(tmp_path, None, *given)
    old.write(config)
    checkpoint(config, 3)
    same = load(forked(capsys)["file"], environ={}).redis
    assert (same.url, same.password_file, same.ca_file) == (
        "rediss://there:1/0",
        config.redis.password_file,
        config.redis.ca_file,
    )
    other = load(forked(capsys, "run.name=other", "redis.url=rediss://here:1/0")["file"], environ={}).redis
    assert (other.url, other.password_file, other.ca_file) == ("rediss://here:1/0", "", "")
    asked = "redis.url=rediss://here:1/0", "redis.password_file=here"
    assert load(forked(capsys, "run.name=more", *asked)["file"], environ={}).redis.password_file.endswith("here")


TOOLS = """
class One:
    tools = ["add"]

    def add(self, a: int) -> int:
        "Add."
        return a

class Same(One):
    pass

class Other:
    tools = ["subtract"]

    def subtract(self, a: int) -> int:
        "Subtract."
        return a
"""


def test_an_environment_with_other_tools_is_rejected(tmp_path: Path, old: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tools.py").write_text(TOOLS)

    def environment(name: str) -> str:
        return f'environments=[{{name="adder", kind="python", function="{tmp_path / "tools.py"}:{name}"}}]'

    source = f'data.sources=[{{kind="jsonl", path="{tmp_path / "data.jsonl"}", environment="adder"}}]'
    config = small_config(tmp_path, None, source, environment("One"))
    config = old.write(config)
    checkpoint(config, 3)
    assert main(["fork", "small", environment("Other")]) == 2
    assert "the tools of source 'main' would be subtract instead of add; they are part of the prompts" in capsys.readouterr().err
    assert load(forked(capsys, environment("Same"))["file"], environ={}).environments[0].function.endswith(":Same")


def test_the_latest_checkpoint_is_the_default(old: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    output = forked(capsys)
    assert (output["run"], output["step"], output["file"]) == ("small-at-3", 3, "small-at-3.toml")
    assert main(["fork", "small"]) == 2
    assert "already exists: give the new run another name with run.name=NAME" in capsys.readouterr().err


def test_a_fork_may_leave_out_the_reference_policy(tmp_path: Path, old: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    config = small_config(tmp_path, None, "loss.kl_beta=0.1", "reference.alpha=0.1")
    old.write(config)
    new = load(forked(capsys, "loss.kl_beta=0", "reference.alpha=0", "run.steps=9")["file"], environ={})
    assert (new.loss.kl_beta, new.reference.alpha) == (0.0, 0.0)


def test_a_run_without_a_checkpoint_is_named(old: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(old.checkpoints)
    assert main(["fork", "small"]) == 2
    assert capsys.readouterr().err == "error: small/checkpoints has no checkpoint: write one with grpo checkpoint\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model.dtype=bfloat16"], "command line: model.dtype = 'bfloat16' cannot differ from 'float32' in a fork, since"),
        (
            ["data.curriculum=in_order"],
            "data.curriculum = 'in_order' cannot differ from '' in a fork, since the checkpoint continues the order",
        ),
        (["run.seed=3"], "run.seed = 3 cannot differ from 0 in a fork"),
        (["replay.capacity=50"], "replay.capacity = 50 cannot differ from 100000 in a fork"),
        (['verifiers=[{kind="python", function="m:f"}]'], "need other fields of the rows of source 'main'"),
        (["run.steps=3"], "command line: run.steps = 3, but up to step 3 the run has trained 4: raise it"),
        (["reference.alpha=0.1", "loss.kl_beta=0.1"], "reference.alpha = 0.1 cannot differ from 0.0 in a fork"),
        (["--at", "2"], "--at 2: the checkpoint of step 2 in"),
        (["loss.policy=ppo"], "loss.policy = 'ppo': must be one of grpo, dapo"),
        (["run.stepz=2"], "run.stepz = 2 is not a known key; did you mean 'steps'?"),
    ],
)
def test_changes_that_break_the_checkpoint_are_rejected(
    old: RunFolder, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(old.path.parent.iterdir())
    assert main(["fork", "small", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert sorted(old.path.parent.iterdir()) == before, "nothing is left behind"
