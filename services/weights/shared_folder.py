"""Weights from one sender to many receivers through a folder that all of them see, for fleets without a common network.

Guarantees: a file under its final name is complete; what is read is what the manifest says, tensor for tensor, or `RuntimeError`;
files hold only tensors, and reading one runs none of its code. Each group has its own folder below the run's, created and removed
by the sender (`Outbox`); a transfer is a series of safetensors files, one per bucket, and checksums if the manifest is
`verified`. A receiver is notified of a transfer when it is complete, and does not look for files earlier: on NFS, a file that was
looked up too early may stay hidden for as long as the client trusts its cache.
Imports torch; of `runtime` only this module, `checksums` and `collective` do.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file

from services.weights.checksums import check, checksums
from services.weights.collective import Bucket, Deadline, WeightManifest
from services.weights.versions.broadcast import Heading, adopt, apply
from services.weights.versions.mirror import WeightMirror

_GROUP = re.compile("[0-9a-f]{16}")
"""Names of the folders of groups."""
_MANIFEST = "manifest.json"
_SUMS = "checksums"
_HEADING, _PAYLOAD = "heading", "payload"


class Outbox:
    """The sender's side: one folder per group, which holds one transfer at a time."""

    def __init__(self, root: Path) -> None:
        """`root` is the run's: groups that were left in it are removed when one is opened. What is not of a group stays."""
        self._root = root
        self._folder: Path | None = None
        self._transfer = -1

    def open(self, manifest: WeightManifest) -> str:
        """Open a group. Returns the name of its folder below `root`. Raises `OSError`."""
        self._root.mkdir(parents=True, exist_ok=True)
        for path in self._root.iterdir():
            if _GROUP.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)
        folder = self._root / secrets.token_hex(8)
        folder.mkdir()
        (folder / _MANIFEST).write_bytes(msgspec.json.encode(manifest))
        self._folder, self._transfer = folder, -1
        return folder.name

    def begin(self) -> None:
        """Begin the next transfer, which removes the previous one: nobody reads it at this point."""
        for path in self._group.glob("*.safetensors"):
            path.unlink()
        self._transfer += 1

    def put(self, number: int, bucket: Bucket, buffer: torch.Tensor) -> None:
        """Add a bucket, whose tensors are in `buffer` (uint8, host memory)."""
        self._save(str(number), dict(bucket.views(buffer)))

    def put_heading(self, heading: Heading, payload: torch.Tensor | None = None) -> None:
        """Add the heading, with the payload of a delta ([nbytes] uint8)."""
        self._save(_HEADING, {_HEADING: heading.encoded()} | ({} if payload is None else {_PAYLOAD: payload}))

    def put_checksums(self, sums: torch.Tensor) -> None:
        """Add the checksums of all tensors, [tensors, 2] int64."""
        self._save(_SUMS, {_SUMS: sums})

    def close(self) -> None:
        """Remove the group's folder, if any."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._folder = None

    @property
    def _group(self) -> Path:
        if self._folder is None:
            raise RuntimeError("no group is open")
        return self._folder

    def _save(self, name: str, tensors: dict[str, torch.Tensor]) -> None:
        final = _file(self._group, self._transfer, name)
        partial = final.with_suffix(".partial")
        save_file(tensors, partial)
        with partial.open("rb") as file:  # a volume may report a failed write only now
            os.fsync(file.fileno())
        partial.rename(final)


class Inbox:
    """A receiver's side of one group; takes every transfer of the group, one after the other."""

    def __init__(self, folder: Path) -> None:
        """Open the group's folder. Raises `RuntimeError` if this machine does not see it."""
        self._folder, self._transfer = folder, -1
        try:
            self._manifest = msgspec.json.decode((self._folder / _MANIFEST).read_bytes(), type=WeightManifest)
        except (OSError, msgspec.MsgspecError) as error:
            raise RuntimeError(
                f"cannot read {folder} here ({error}): put sync.folder on a volume that trainer and generators share"
            ) from None

    def take(self, deadline: Deadline, mirror: WeightMirror | None = None) -> list[tuple[str, torch.Tensor]]:
        """Read the next transfer into memory; a delta is applied to `mirror`, which groups with `deltas` need.

        Raises `RuntimeError` or `TimeoutError` if it is missing or differs from the manifest, and `WeightChanged`.
        """
        self._transfer += 1
        if mirror is None or not self._manifest.deltas:
            return self._take_whole(deadline)
        found = self._load(_HEADING)
        heading = Heading.decoded(found.get(_HEADING, torch.empty(0)), self._manifest)
        if heading.is_delta:
            payload = found.get(_PAYLOAD)
            if payload is None or payload.dtype != torch.uint8 or payload.shape != (heading.nbytes,):
                raise RuntimeError(f"a delta in {self._folder} does not have the {heading.nbytes} bytes that it announces")
            return apply(mirror, heading, payload)
        mirror.forget()
        weights = self._take_whole(deadline)
        adopt(mirror, heading, self._manifest, weights)
        return weights

    def _take_whole(self, deadline: Deadline) -> list[tuple[str, torch.Tensor]]:
        weights: list[tuple[str, torch.Tensor]] = []
        held: list[torch.Tensor] = []
        for i, bucket in enumerate(self._manifest.buckets):
            deadline.left  # noqa: B018  raises when there is none
            found = self._load(str(i))
            for meta in bucket.tensors:
                tensor = found.get(meta.name)
                if tensor is None or list(tensor.shape) != meta.shape or str(tensor.dtype) != f"torch.{meta.dtype}":
                    raise RuntimeError(f"bucket {i} in {self._folder} does not hold {meta.name} as {meta.dtype} {meta.shape}")
                weights.append((meta.name, tensor))
            if self._manifest.verified:
                held.append(checksums(found[meta.name] for meta in bucket.tensors))
        if self._manifest.verified:
            sent = self._load(_SUMS).get(_SUMS)
            if sent is None or sent.dtype != torch.int64 or sent.shape != (len(weights), 2):
                raise RuntimeError(f"the checksums in {self._folder} do not match its {len(weights)} tensors")
            check([name for name, _ in weights], held, sent)
        return self._manifest.with_aliases(weights)

    def _load(self, name: str) -> dict[str, torch.Tensor]:
        path = _file(self._folder, self._transfer, name)
        try:
            return load(path.read_bytes())  # not mapped: the sender may remove the file at any time
        except (OSError, SafetensorError) as error:
            raise RuntimeError(f"cannot read {path}: {error}") from None


def _file(folder: Path, transfer: int, name: str) -> Path:
    return folder / f"{transfer}.{name}.safetensors"
