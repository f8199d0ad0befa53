"""Weights through a folder: a reader gets exactly what was written, or nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from services.weights.checksums import WeightChanged, checksums
from services.weights.collective import Deadline, TensorMeta, WeightManifest, plan_buckets
from services.weights.shared_folder import Inbox, Outbox

WEIGHTS = {
    "a": torch.arange(12, dtype=torch.float32).view(3, 4),
    "b": torch.randn(5).to(torch.bfloat16),
    "empty": torch.empty(0, 3),
    "c": torch.randn(40),
}


def manifest(verified: bool = True) -> WeightManifest:
    metas = [TensorMeta(name, str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in WEIGHTS.items()]
    return plan_buckets(metas, 128, verified)


def send(outbox: Outbox, of: WeightManifest, add: float = 0.0, wrong_sums: bool = False) -> dict[str, torch.Tensor]:
    """Write one transfer; return its weights."""
    sent = {name: tensor + add for name, tensor in WEIGHTS.items()}
    outbox.begin()
    for i, bucket in enumerate(of.buckets):
        buffer = torch.zeros(bucket.nbytes, dtype=torch.uint8)
        for name, view in bucket.views(buffer):
            view.copy_(sent[name])
        outbox.put(i, bucket, buffer)
    if of.verified:
        outbox.put_checksums(checksums(sent.values()) + wrong_sums)
    return sent


@pytest.fixture
def outbox(tmp_path: Path) -> Outbox:
    return Outbox(tmp_path / "weights")


@pytest.mark.parametrize("verified", [True, False])
def test_every_transfer_of_a_group_replaces_the_previous_one(outbox: Outbox, tmp_path: Path, verified: bool) -> None:
    given = manifest(verified)
    assert len(given.buckets) == 2
    inbox = Inbox(tmp_path / "weights" / outbox.open(given))
    for add in (0.0, 1.0, 2.0):
        sent = send(outbox, given, add)
        taken = dict(inbox.take(Deadline(10)))
        assert list(taken) == list(sent)
        assert all(torch.equal(taken[name], sent[name]) for name in sent)
    files = [path for path in (tmp_path / "weights").rglob("*") if path.is_file()]
    assert len(files) == len(given.buckets) + 1 + verified
    outbox.close()
    assert not list((tmp_path / "weights").iterdir())


def test_a_new_group_removes_leftovers_of_a_killed_sender(outbox: Outbox, tmp_path: Path) -> None:
    left = outbox.open(manifest())
    send(outbox, manifest())
    folder = Outbox(tmp_path / "weights").open(manifest())
    assert [path.name for path in (tmp_path / "weights").iterdir()] == [folder]
    with pytest.raises(RuntimeError, match=r"put sync\.folder on a volume that trainer and generators share"):
        Inbox(tmp_path / "weights" / left)


def test_corrupted_weights_are_named(outbox: Outbox, tmp_path: Path) -> None:
    inbox = Inbox(tmp_path / "weights" / outbox.open(manifest()))
    send(outbox, manifest(), wrong_sums=True)
    with pytest.raises(WeightChanged, match="of a differ from"):
        inbox.take(Deadline(10))


def test_a_missing_or_incomplete_transfer_is_rejected(outbox: Outbox, tmp_path: Path) -> None:
    folder = tmp_path / "weights" / outbox.open(manifest())
    inbox = Inbox(folder)
    with pytest.raises(RuntimeError, match=r"cannot read .*0\.0\.safetensors"):
        inbox.take(Deadline(10))
    for transfer, (spoil, why) in enumerate(
        [
            (lambda path: path.write_bytes(path.read_bytes()[:-5]), "cannot read"),
            (lambda path: path.write_bytes(b"\xff" * 64), "cannot read"),
            (lambda path: save_file({"a": torch.zeros(4, 3)}, path), r"does not hold a as float32 \[3, 4\]"),
            (lambda path: save_file({"z": torch.zeros(3, 4)}, path), r"does not hold a as float32 \[3, 4\]"),
        ]
    ):
        while outbox._transfer <= transfer:
            send(outbox, manifest())
        spoil(folder / f"{transfer + 1}.0.safetensors")
        with pytest.raises(RuntimeError, match=why):
            inbox.take(Deadline(10))


def test_a_late_reader_times_out(outbox: Outbox, tmp_path: Path) -> None:
    inbox = Inbox(tmp_path / "weights" / outbox.open(manifest()))
    send(outbox, manifest())
    with pytest.raises(TimeoutError):
        inbox.take(Deadline(-1))


def test_what_is_not_of_a_group_stays(outbox: Outbox, tmp_path: Path) -> None:
    """`sync.folder` may turn out to be a volume that contains other things."""
    for name in ("models", "0123456789abcdef.bak", "0123456789ABCDEF"):
        (tmp_path / "weights" / name).mkdir(parents=True)
    (tmp_path / "weights" / "models" / "weights.safetensors").write_bytes(b"mine")
    (tmp_path / "weights" / "fedcba9876543210").mkdir()
    folder = outbox.open(manifest())
    left = {path.name for path in (tmp_path / "weights").iterdir()}
    assert left == {"models", "0123456789abcdef.bak", "0123456789ABCDEF", folder}
    assert (tmp_path / "weights" / "models" / "weights.safetensors").read_bytes() == b"mine"
