"""Checkpoints of a run: `<root>/step-00000012/`, the state after training step 12, and the pointer `<root>/latest`.

Guarantees: a checkpoint exists whole or not at all; `latest` never names one that is not complete; a failure to write or
read is one `CheckpointError` on every rank and leaves older checkpoints as they were. All ranks see the same `root`.

Waits for: the other ranks in `save`, `load` and `restore`; see `policy` for who unblocks them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from services.trainer import folders, ranks
from services.trainer.folders import FileRecord, FolderError, Manifest
from services.trainer.policy import Policy
from services.trainer.state_files import StateError

logger = logging.getLogger(__name__)

STATE = "trainer"
"""Folder inside a checkpoint with the policy's state; files given to `save` lie beside it."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read: the message names the path, the reason and the remedy."""


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint."""

    folder: Path
    step: int  # the last training step in its weights, which are version step + 1
    manifest: Manifest

    @property
    def size_bytes(self) -> int:
        """Bytes of all its files."""
        return sum(record.size_bytes for record in self.manifest.files.values())

    def read(self, name: str) -> bytes:
        """A file that was given to `Checkpoints.save`. Raises `CheckpointError`."""
        try:
            return (self.folder / name).read_bytes()
        except OSError as error:
            raise CheckpointError(f"{self.folder / name} cannot be read: {error.strerror}") from error


class Checkpoints:
    """The checkpoints in one folder, of which the newest `keep` are kept."""

    def __init__(self, root: Path, keep: int) -> None:
        self.root, self.keep = root, keep

    def complete(self) -> list[Saved]:
        """Complete checkpoints, oldest first; their files are not read."""
        found = []
        for folder in sorted(self.root.glob("step-*")):
            number = folder.name.removeprefix("step-")
            if number.isdigit() and (folder / folders.MANIFEST).exists():
                try:
                    found.append(Saved(folder, int(number), folders.read_manifest(folder)))
                except FolderError as error:
                    logger.warning("checkpoint ignored: %s", error)
        return sorted(found, key=lambda saved: saved.step)

    def latest(self) -> Saved | None:
        """The checkpoint that `latest` names, or else the newest, that is undamaged: every byte is compared."""
        saved = self.complete()
        named = self._pointer()
        for candidate in sorted(saved, key=lambda one: (one.folder.name == named, one.step), reverse=True):
            try:
                folders.verify(candidate.folder, candidate.manifest)
                return candidate
            except FolderError as error:
                logger.warning("checkpoint skipped: %s", error)
        return None

    def save(self, policy: Policy, step: int, files: Mapping[str, bytes]) -> Saved:
        """Write the checkpoint of `step`, point `latest` to it and delete what exceeds `keep`. Collective.

        `files` (name -> content, rank 0's count) are stored beside the policy's state. A complete checkpoint of the same
        step is replaced.
        """
        final = self.root / f"step-{step:08d}"
        partial = final.with_name(final.name + folders.PARTIAL)
        rank, size = policy.world.rank, policy.world.size
        ranks.agree(self._begin(final, files) if rank == 0 else "", CheckpointError)
        shared = (partial / STATE).is_dir()
        ranks.agree("" if shared else f"{partial} is not there: mount one shared volume at run.dir", CheckpointError)
        try:
            policy.save(partial / STATE)
        except StateError as error:
            raise CheckpointError(f"checkpoint of step {step} was not written: {error}; free space under {self.root}") from error
        records = self._records(partial, rank, size)
        facts = {"step": step, "ranks": size, "zero_stage": policy.zero_stage, "dtype": policy.config.model.dtype}
        manifest = Manifest(records, facts)
        ranks.agree(self._finish(partial, final, manifest) if rank == 0 else "", CheckpointError)
        return Saved(final, step, manifest)

    def load(self, policy: Policy, saved: Saved) -> None:
        """Put a checkpoint's state into a policy that has not trained. Collective."""
        facts = saved.manifest.facts
        now = {"ranks": policy.world.size, "zero_stage": policy.zero_stage, "dtype": policy.config.model.dtype}
        keys = {"ranks": "trainer.ranks", "zero_stage": "trainer.zero_stage", "dtype": "model.dtype"}
        for name, value in now.items():
            if facts.get(name) != value:
                raise CheckpointError(
                    f"{saved.folder} was written with {keys[name]} = {facts.get(name)!r}, this run has {value!r}: "
                    f"set {keys[name]} back, or start a new run from its export"
                )
        try:
            policy.load(saved.folder / STATE)
        except StateError as error:
            raise CheckpointError(f"{saved.folder} cannot be restored: {error}") from error

    def restore(self, policy: Policy) -> Saved | None:
        """Load the latest undamaged checkpoint, if there is one. Collective; rank 0 chooses."""
        chosen = self.latest() if policy.world.rank == 0 else None
        saved: Saved | None = ranks.from_rank_0(chosen)
        if saved is not None:
            self.load(policy, saved)
        return saved

    def _pointer(self) -> str:
        try:
            return (self.root / "latest").read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            return ""

    def _begin(self, final: Path, files: Mapping[str, bytes]) -> str:
        try:
            partial = folders.begin(final)
            for name, data in files.items():
                folders.write(partial / name, data)
            (partial / STATE).mkdir()
        except FolderError as error:
            return str(error)
        except OSError as error:
            return folders.explain(final, error)
        return ""

    def _records(self, partial: Path, rank: int, size: int) -> dict[str, FileRecord]:
        """Sizes and hashes of all files; each rank reads its share."""
        problem, mine = "", {}
        try:
            mine = folders.digests(partial, rank, size)
        except OSError as error:
            problem = f"{partial} cannot be read back: {error.strerror}"
        ranks.agree(problem, CheckpointError)
        return {name: record for part in ranks.gather(mine) for name, record in part.items()}

    def _finish(self, partial: Path, final: Path, manifest: Manifest) -> str:
        missing = [rank for rank in range(manifest.facts["ranks"]) if f"{STATE}/random-{rank}.pt" not in manifest.files]
        if missing:
            return f"{partial} lacks the files of ranks {missing}: mount one shared volume at run.dir"
        try:
            folders.finish(partial, final, manifest)
            folders.replace(self.root / "latest", final.name.encode())
        except FolderError as error:
            return str(error)
        folders.remove(saved.folder for saved in self.complete()[: -self.keep])
        return ""
