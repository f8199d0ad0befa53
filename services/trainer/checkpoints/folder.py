"""Writing and taking up checkpoints (services/runtime/checkpoints.py says what lies where).

Guarantees: a checkpoint exists whole or not at all; `latest` never names one that is not complete; a failure to write or
read is one `CheckpointError` on every rank and leaves older checkpoints as they were; a trainer that was superseded and goes on
late leaves alone what its successor writes. It asks right before it names the folder, points `latest` to it and deletes others:
one that is stopped between question and deed, which no file system makes one, still does that one deed. All ranks see the same
`root`.

Waits for: the other ranks in `save`, `load` and `restore`; see `policy` for who unblocks them.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.runtime import atomic_folders
from services.runtime.atomic_folders import FileRecord, FolderError, FolderManifest
from services.runtime.checkpoints import LAYOUT, CheckpointError, CheckpointFolder, Saved, surplus
from services.trainer import ranks
from services.trainer.state.files import StateError
from services.trainer.step.policy import Policy

__all__ = ["CheckpointError", "Checkpoints", "Saved"]

STATE = "trainer"
"""Folder inside a checkpoint with the policy's state; what others write with `save` lies beside it."""


@dataclass(frozen=True)
class CheckpointWriter:
    """The trainer that writes."""

    fence: int = 0
    """Its fencing number; its half-written folders bear it, and it deletes those of older trainers only."""
    superseded: Callable[[], str] = lambda: ""
    """Why it may not touch what is complete, as another trainer writes here now; or empty."""


class Checkpoints(CheckpointFolder):
    """The checkpoints in one folder, of which the `keep` that were written last are kept."""

    def __init__(self, root: Path, keep: int) -> None:
        super().__init__(root)
        self.keep = keep
        self.owner = CheckpointWriter()
        """Of rank 0; the other ranks are told."""

    def save(self, policy: Policy, step: int, beside: Callable[[Path], None] | None = None) -> Saved:
        """Write the checkpoint of `step`, point `latest` to it and delete what exceeds `keep`. Collective.

        On rank 0 `beside` is given the folder while it is being written, for further files in it. A complete checkpoint of
        the same step is replaced. Raises `CheckpointError` on every rank; what was written until then is deleted.
        """
        final = self.root / f"step-{step:08d}"
        partial = atomic_folders.unfinished(final, ranks.from_rank_0(self.owner.fence))
        rank = policy.world.rank
        try:
            return self._save(policy, step, final, partial, beside)
        except CheckpointError as error:
            if rank == 0:
                atomic_folders.discard(partial)  # it may be what fills the disk
            raise CheckpointError(f"checkpoint of step {step} was not written: {error}") from error

    def load(self, policy: Policy, saved: Saved) -> None:
        """Put a checkpoint's state into a policy that has not trained. Collective."""
        ranks.agree(_unfit(policy, saved), CheckpointError)
        try:
            policy.load(saved.folder / STATE)
        except StateError as error:
            raise CheckpointError(f"{saved.folder} cannot be restored: {error}") from error

    def restore(self, policy: Policy, step: int | None = None) -> Saved | None:
        """Load the checkpoint of `step`, else the latest undamaged one, if there is one. Collective; rank 0 chooses.

        Raises `CheckpointError` on every rank.
        """
        chosen, problem = None, ""
        if policy.world.rank == 0:
            try:
                chosen = self.latest() if step is None else self.at(step)
            except CheckpointError as error:
                problem = str(error)
        saved: Saved | None
        saved, problem = ranks.from_rank_0((chosen, problem))
        if problem:
            raise CheckpointError(problem)
        if saved is not None:
            self.load(policy, saved)
        if saved is not None and step is not None:  # a trainer that dies before it saves again is to come back here
            ranks.agree(self.owner.superseded() or self._point_to(saved) if policy.world.rank == 0 else "", CheckpointError)
        return saved

    def try_out(self, rank: int) -> None:
        """Write and delete a file, so that a folder that cannot be written is told before anything is trained. Collective."""
        problem, probe = "", self.root / f"rank-{rank}{atomic_folders.PARTIAL}"
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            atomic_folders.write(probe, b"writable")
            probe.unlink()
        except FolderError as error:
            problem = str(error)
        except OSError as error:
            problem = atomic_folders.explain(self.root, error)
        ranks.agree(problem, CheckpointError)

    def _point_to(self, saved: Saved) -> str:
        try:
            atomic_folders.replace(self.root / "latest", saved.folder.name.encode())
        except FolderError as error:
            return str(error)
        return ""

    def _save(self, policy: Policy, step: int, final: Path, partial: Path, beside: Callable[[Path], None] | None) -> Saved:
        rank, size = policy.world.rank, policy.world.size
        ranks.agree(self._begin(final, beside) if rank == 0 else "", CheckpointError)
        shared = (partial / STATE).is_dir()
        ranks.agree("" if shared else f"{partial} is not there: mount one shared volume at run.dir", CheckpointError)
        try:
            policy.save(partial / STATE)
        except StateError as error:
            raise CheckpointError(str(error)) from error
        manifest = FolderManifest(
            self._records(partial, rank, size), facts_of(policy) | ranks.from_rank_0({"step": step, "time_s": time.time()})
        )
        ranks.agree(self._finish(partial, final, manifest) if rank == 0 else "", CheckpointError)
        return Saved(final, step, manifest)

    def _begin(self, final: Path, beside: Callable[[Path], None] | None) -> str:
        for path in self.root.glob(f"step-*{atomic_folders.PARTIAL}"):  # left by a crash: they only take space
            if atomic_folders.owner_of(path) <= self.owner.fence:
                atomic_folders.discard(path)
        try:
            partial = atomic_folders.begin(final, self.owner.fence)
            if beside is not None:
                beside(partial)
            (partial / STATE).mkdir()
        except FolderError as error:
            return str(error)
        except OSError as error:
            return atomic_folders.explain(final, error)
        return ""

    def _records(self, partial: Path, rank: int, size: int) -> dict[str, FileRecord]:
        """Sizes and hashes of all files; each rank reads its share."""
        problem, mine = "", {}
        try:
            mine = atomic_folders.digests(partial, rank, size)
        except OSError as error:
            problem = f"{partial} cannot be read back: {error.strerror}"
        ranks.agree(problem, CheckpointError)
        return {name: record for part in ranks.gather(mine) for name, record in part.items()}

    def _finish(self, partial: Path, final: Path, manifest: FolderManifest) -> str:
        missing = [rank for rank in range(manifest.facts["ranks"]) if f"{STATE}/random-{rank}.pt" not in manifest.files]
        if missing:
            return f"{partial} lacks the files of ranks {missing}: mount one shared volume at run.dir"
        superseded = self.owner.superseded
        try:
            atomic_folders.finish(partial, final, manifest, superseded)
        except FolderError as error:
            return str(error)
        if problem := superseded() or self._point_to(Saved(final, manifest.facts["step"], manifest)):
            return problem
        written = self.written()
        atomic_folders.remove(written[step] for step in surplus(written, manifest.facts["step"], self.keep) if not superseded())
        return ""


def facts_of(policy: Policy) -> dict[str, Any]:
    """What a checkpoint of this policy says of itself, and a policy that takes it up has to compare."""
    parameters = sorted((name, tuple(getattr(one, "ds_shape", one.shape))) for name, one in policy.module.named_parameters())
    return {
        "layout": LAYOUT,
        "run": policy.config.run.name,
        "ranks": policy.world.size,
        "zero_stage": policy.zero_stage,
        "dtype": policy.config.model.dtype,
        "model": policy.config.model.path,
        "parameters": hashlib.sha256(repr(parameters).encode()).hexdigest()[:16],
    }


def _unfit(policy: Policy, saved: Saved) -> str:
    """Why a checkpoint is not for this policy, or empty. Ranks and ZeRO stage may differ."""
    facts, now = saved.manifest.facts, facts_of(policy)
    if saved.refusal:
        return saved.refusal
    if facts["run"] != now["run"]:
        return f"{saved.folder} is of run {facts['run']!r}, this is run {now['run']!r}: to begin from its weights, use its export"
    if facts["parameters"] != now["parameters"]:
        return (
            f"{saved.folder} is of another model, {facts['model']!r}, whose parameters are not those of model.path = "
            f"{now['model']!r} with this [lora]: set them back, or start a new run from its export"
        )
    if facts["dtype"] != now["dtype"]:
        return (
            f"{saved.folder} was written with model.dtype = {facts['dtype']!r}, this run has {now['dtype']!r}: "
            "set model.dtype back, or start a new run from its export"
        )
    return ""
