"""Real DeepSpeed ranks save and resume: bitwise equal, all or nothing, and every failure is raised on every rank."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from services.runtime import atomic_folders
from services.runtime.atomic_folders import FileRecord, FolderError, FolderManifest
from services.runtime.checkpoints import LAYOUT
from services.trainer.checkpoints.folder import CheckpointError, Checkpoints, Saved
from tests.support.models.lone_rank import LoneRank
from tests.support.models.rank_worker import Job, launch
from tests.support.models.tiny_model import VOCABULARY, make_model, make_payloads, make_samples

pytestmark = pytest.mark.timeout(400)

LAYOUTS: dict[int, list[Any]] = {
    1: [[[[[0, 1, 2], [3]]]], [[[[4, 5]]], [[[6], [7]]]], [[[[0, 7], [1, 6]]], [[[2, 3, 4, 5]]]]],
    2: [[[[[0, 1], [2]], [[3]]]], [[[[4]], [[5]]], [[[6]], [[7]]]], [[[[0, 7]], [[1, 6]]], [[[2, 3]], [[4], [5]]]]],
}
STAGES = [(1, 0), (2, 0), (2, 2), (2, 3)]


@pytest.fixture(scope="module")
def tied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tied"), tied=True)


@pytest.fixture(scope="module")
def results(tiny_model: Path, tied_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Any, list[Any]]]:
    """Return the results of every job, one per rank."""
    folder = tmp_path_factory.mktemp("checkpoints")
    payloads = make_payloads(groups=2, size=4)
    samples = make_samples(payloads)

    def resume(size: int, stage: int) -> Job:
        sections = {
            "trainer": {"row_tokens": 128, "zero_stage": stage, "deterministic": True},
            "reference": {"alpha": 0.3},
            "optimizer": {"learning_rate": 1e-3, "schedule": "cosine", "warmup_steps": 1},
            "run": {"steps": 4},
        }
        arguments = {"model": tiny_model, "sections": sections, "payloads": payloads, "samples": samples}
        return "resume", arguments | {"layouts": LAYOUTS[size], "root": folder / f"resume-{size}-{stage}"}

    def export(stage: int) -> Job:
        sections = {"trainer": {"row_tokens": 128, "zero_stage": stage}, "loss": {"kl_beta": 0.0}}
        return "export", {"model": tied_model, "sections": sections, "folder": folder / f"export-{stage}"}

    jobs: dict[int, dict[Any, Job]] = {size: {} for size in LAYOUTS}
    for size, stage in STAGES:
        jobs[size][size, stage] = resume(size, stage)
    jobs[2] |= {"export 0": export(0), "export 3": export(3)}
    jobs[2]["failures"] = ("failures", {"model": tiny_model, "root": folder})
    found: dict[Any, list[Any]] = {"folder": [folder]}
    for size, named in jobs.items():
        found |= dict(zip(named, launch(size, list(named.values()), folder / f"ranks-{size}"), strict=True))
    yield found
    subprocess.run(["umount", "--lazy", folder / "small"], capture_output=True, check=False)  # mounted by `failures`


@pytest.mark.slow
@pytest.mark.parametrize("which", STAGES)
def test_resumed_equals_uninterrupted_bitwise(which: tuple[int, int], results: dict[Any, list[Any]]) -> None:
    for result in results[which]:
        weights, reference, random, python = result["uninterrupted"]
        again, reference_again, random_again, python_again = result["resumed"]
        assert all(torch.equal(again[name], value) for name, value in weights.items())
        assert all(torch.equal(reference_again[name], value) for name, value in reference.items())
        assert any(not torch.equal(reference[name], value) for name, value in weights.items())
        assert torch.equal(random, random_again)
        assert python == python_again
        first, second = ({k: v for k, v in one.items() if not k.startswith("time/")} for one in result["metrics"])
        assert first == second
        assert result["saved"] == result["found"]
        assert result["saved"].step == 1
        assert result["saved"].read("snapshot") == b"of dataprep"
        assert result["saved"].manifest.facts["zero_stage"] == which[1]
        assert result["rate"]["lowest"] == pytest.approx(0.1 + 0.45 * 1.5), "the cosine's third after one step of warm-up"
        files = {f"trainer/{kind}-{rank}.pt" for kind in ("state", "random", "reference") for rank in range(which[0])}
        assert set(result["saved"].manifest.files) == {"snapshot", *files}


@pytest.mark.slow
def test_latest_skips_damaged_checkpoints(
    results: dict[Any, list[Any]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved: Saved = results[1, 0][0]["saved"]
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.latest() is None
    for step in (1, 2):
        shutil.copytree(saved.folder, tmp_path / f"step-{step:08d}")
    (tmp_path / "latest").write_text("step-00000002")
    (tmp_path / "step-00000003.partial").mkdir()
    newest = checkpoints.latest()
    assert newest is not None
    assert newest.step == 2
    victim = next(newest.folder.rglob("state-*.pt"))
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    assert checkpoints.passed_over == ""
    older = checkpoints.latest()
    assert str(newest.folder) in checkpoints.passed_over
    assert older is not None
    assert older.step == 1
    assert "differs from the SHA-256" in caplog.text
    (older.folder / atomic_folders.MANIFEST).write_text("{}")
    with pytest.raises(CheckpointError, match=r"can be loaded: .*state-0\.pt differs .*; .*is damaged.*another run"):
        checkpoints.latest()


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
def test_export_loads_with_transformers(stage: int, results: dict[Any, list[Any]]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = results["folder"][0] / f"export-{stage}"
    manifest = atomic_folders.read_manifest(folder)
    atomic_folders.verify(folder, manifest)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(manifest.files)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config._attn_implementation != "packed"
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for name, value in results[f"export {stage}"][0].items():
        assert torch.equal(model.state_dict()[name], value), name
    assert len(AutoTokenizer.from_pretrained(folder)) == VOCABULARY
    assert not list(folder.parent.glob("*.partial"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("failure", "message"),
    [
        ("not a folder", "checkpoint of step 1 was not written: rank 0: .*Not a directory; free space or make it writable"),
        ("cannot begin", "File exists; free space or make it writable"),
        ("beside", "checkpoint of step 4 was not written: rank 0: .*none/snapshot cannot be written: No such file"),
        ("too large", "rank 1: .*state-1.pt cannot be written: File too large; free space there, raise the limit, or lower"),
        ("newer", "was written by a newer version of this program .checkpoint layout 99, this one reads 2.: use that version"),
        ("older", "was written by an older version of this program .checkpoint layout 1"),
        ("other run", "belongs to run 'b', not 'run': to start from its weights, use its export"),
        ("other model", "its parameters do not match model.path"),
        ("other type", "was written with model.dtype = 'bfloat16', but this run has 'float32': set model.dtype back"),
        ("file gone", "state-1.pt cannot be read: No such file or directory; restore the file, or delete"),
        ("half-written", "the checkpoint of step 7 in .* was never finished: .*complete checkpoints: 3"),
        ("no such step", "the checkpoint of step 1 in .* does not exist; complete checkpoints: 2, 3"),
        ("part of it", r"cannot be restored: rank 0: .*state-\*.pt: .* elements of .* are missing"),
        ("other ranks", "trainer.ranks = 3, but 2 trainer ranks were started"),
        ("unequal rows", r"rank 1: step 0 has 1 rows per rank, but there are 0 rows"),
    ],
)
def test_failures_are_raised_on_every_rank(failure: str, message: str, results: dict[Any, list[Any]]) -> None:
    for messages in results["failures"]:
        assert re.search(message, messages[failure]), messages[failure]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("failure", "message"),
    [
        ("disk full", "checkpoint of step 2 was not written: .*No space left on device; free space there, .*checkpoint.keep"),
        ("read-only", "Read-only file system; make it writable for this user, or set run.dir"),
        ("read-only at the start", "Read-only file system; make it writable for this user, or set run.dir"),
    ],
)
def test_errors_of_a_real_disk_are_reported(failure: str, message: str, results: dict[Any, list[Any]]) -> None:
    if why := results["failures"][0]["mounted"] or results["failures"][0]["read-only mounted"]:
        pytest.skip(f"nothing can be mounted here: {why}")
    for messages in results["failures"]:
        assert re.search(message, messages[failure]), messages[failure]
        assert messages["found"] == "1"
    assert results["failures"][0]["left on the full disk"] == "latest,step-00000001"


@pytest.mark.slow
def test_only_the_newest_are_kept_and_failures_change_nothing(results: dict[Any, list[Any]]) -> None:
    assert results["failures"][0]["left"] == "latest,step-00000002,step-00000003"


@pytest.mark.slow
def test_latest_stays_at_a_restored_step(results: dict[Any, list[Any]]) -> None:
    assert results["failures"][0]["named"] == "step-00000002"
    good = Checkpoints(results["folder"][0] / "good", keep=2)
    assert ([saved.step for saved in good.complete()], good.named()) == ([2, 3], "step-00000003")


@pytest.mark.slow
def test_every_file_is_recorded_whatever_a_rank_lists(results: dict[Any, list[Any]]) -> None:
    """NFS may not list yet what ranks on other machines have written."""
    expected = ",".join(sorted(f"trainer/{kind}-{rank}.pt" for kind in ("state", "random") for rank in range(2)))
    assert {messages["recorded"] for messages in results["failures"]} == {expected}


@pytest.mark.slow
def test_ranks_share_the_verification(results: dict[Any, list[Any]]) -> None:
    """Together they read every file once; rank 0 reports progress after each; what one finds counts for all."""
    first, second = results["failures"]
    shares = [messages["hashed"].split(",") for messages in (first, second)]
    assert [len(share) for share in shares] == [2, 2]
    assert {name for share in shares for name in share} == {f"{k}-{rank}.pt" for k in ("state", "random") for rank in range(2)}
    assert first["progressed"] == "[1, 2]"
    assert first["fell back"] == second["fell back"] == "to 2"
    assert "differs from the SHA-256" in first["passed over"]
    for messages in (first, second):
        assert "cannot be read: Input/output error; make it readable" in messages["one cannot read"]


def test_a_file_that_vanished_fails_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on another rank that has a disk of its own at run.dir."""
    policy: Any = LoneRank(monkeypatch)
    checkpoints = policy.checkpoints(tmp_path, 7, [7])
    policy.meanwhile = lambda: (tmp_path / "step-00000003.7.partial" / "snapshot").unlink()
    with pytest.raises(CheckpointError, match=r"snapshot, which another rank wrote, does not exist on this rank: mount one"):
        checkpoints.save(policy, 3, lambda folder: atomic_folders.write(folder / "snapshot", b""))
    assert not list(tmp_path.iterdir())


def test_a_superseded_trainer_leaves_newer_checkpoints_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy: Any = LoneRank(monkeypatch)
    newest = [7]
    old, new = (policy.checkpoints(tmp_path, fence, newest) for fence in (7, 8))
    crashed = [atomic_folders.begin(tmp_path / "step-00000001", owner) for owner in (0, 6)]
    old.save(policy, 3)
    assert not any(path.exists() for path in crashed)
    newest[0] = 8
    half = atomic_folders.begin(tmp_path / "step-00000007", 8)
    atomic_folders.write(half / "file", b"of its successor")
    with pytest.raises(CheckpointError, match="checkpoint of step 7 was not written: rank 0: superseded"):
        old.save(policy, 7)
    assert (half / "file").exists()

    def wakes() -> None:
        with pytest.raises(CheckpointError, match="superseded"):
            old.save(stale, 7)

    stale: Any = LoneRank(monkeypatch)
    policy.meanwhile = wakes
    new.save(policy, 7)
    new.save(stale, 11)
    with pytest.raises(CheckpointError, match="superseded"):
        old.save(stale, 7)
    with pytest.raises(CheckpointError, match="superseded"):
        old.restore(stale, 7)
    assert (new.named(), [one.step for one in new.complete()]) == ("step-00000011", [7, 11])
    assert not new.unfinished()


def test_checkpoints_from_before_a_restore_are_deleted_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This includes steps that the run has since passed: a trainer must not fall back to an abandoned history."""
    policy: Any = LoneRank(monkeypatch)
    checkpoints = policy.checkpoints(tmp_path, 7, [7])
    checkpoints.save(policy, 3)
    checkpoints.save(policy, 5)
    checkpoints.restore(policy, 3)
    checkpoints.save(policy, 7)
    assert [one.step for one in checkpoints.complete()] == [3, 7]


@pytest.mark.parametrize(
    ("synced", "nth", "refused"),
    [("step-00000007.7.partial", 1, True), ("", 1, True), ("", 2, False)],
    ids=["before-it-is-named", "before-latest-names-it", "before-others-are-deleted"],
)
def test_a_trainer_checks_its_fence_again_after_slow_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, synced: str, nth: int, refused: bool
) -> None:
    """Its successor saves steps 7 and 11 while it waits for the disk."""
    policy: Any = LoneRank(monkeypatch)
    newest = [7]
    old, new = (policy.checkpoints(tmp_path, fence, newest) for fence in (7, 8))
    old.keep = 1
    old.save(policy, 3)
    waits: list[Path] = []
    force = atomic_folders.sync

    def sleep(path: Path) -> None:
        force(path)
        waits.append(path)
        if newest[0] == 7 and path == tmp_path / synced and waits.count(path) == nth:
            newest[0] = 8
            new.save(policy, 7)
            new.save(policy, 11)

    monkeypatch.setattr(atomic_folders, "sync", sleep)
    with pytest.raises(CheckpointError, match="superseded") if refused else contextlib.nullcontext():
        old.save(policy, 7)
    assert newest == [8]
    assert (new.named(), [one.step for one in new.complete()]) == ("step-00000011", [7, 11])


def test_listing_needs_no_pointer_and_ignores_other_files(tmp_path: Path) -> None:
    for name in ("step-00000012", "step-00000003"):
        partial = atomic_folders.begin(tmp_path / name)
        atomic_folders.write(partial / "snapshot", name.encode())
        atomic_folders.finish(
            partial,
            tmp_path / name,
            FolderManifest(atomic_folders.records(partial), {"layout": LAYOUT}),
        )
    (tmp_path / "step-abc").mkdir()
    (tmp_path / "step-00000009").mkdir()
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert [saved.step for saved in checkpoints.complete()] == [3, 12]
    latest = checkpoints.latest()
    assert latest is not None
    assert latest.read("snapshot") == b"step-00000012"
    assert latest.size_bytes == len("step-00000012")
    with pytest.raises(CheckpointError, match=r"cannot read .*absent"):
        latest.read("absent")


def test_a_file_missing_from_the_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FolderError, match="cannot be read: No such file"):
        atomic_folders.verify(tmp_path, FolderManifest({"gone": FileRecord(1, "")}, {}))
