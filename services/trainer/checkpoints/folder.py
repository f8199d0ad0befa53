"""Writes and loads checkpoints (services/runtime/checkpoints.py describes the layout).

Guarantees: a checkpoint exists completely or not at all; `latest` never names an incomplete one; a failure to write or read is
the same `CheckpointError` on every rank and leaves older checkpoints intact; a superseded trainer that is still running leaves
its successor's files alone. It checks right before it renames the folder, points `latest` to it and deletes others. No file
system makes check and action atomic, so a trainer paused between the two still performs that one action. All ranks see the same
`root`.

Waits for: the other ranks in `save`, `load` and `restore`, see `policy` for who unblocks them; in `restore`, for the folder that
`latest` names, for up to `APPEARS_S`.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.runtime import atomic_folders
from services.runtime.atomic_folders import FileRecord, FolderError, FolderManifest
from services.runtime.checkpoints import LAYOUT, NO_STEP, CheckpointError, CheckpointFolder, DamagedCheckpoint, Saved, surplus
from services.trainer import ranks
from services.trainer.ranks import World
from services.trainer.state.archive import StateError
from services.trainer.step.policy import Policy

__all__ = ["CheckpointError", "Checkpoints", "Saved"]

STATE = "trainer"
"""Folder inside a checkpoint with the policy's state; files that others add in `save` are stored next to it."""

APPEARS_S = 60.0
"""How long NFS may not show what another machine has written: `acdirmax` of Linux."""


@dataclass(frozen=True)
class CheckpointWriter:
    """The trainer that writes."""

    fence: int = 0
    """Its fencing number. Its unfinished folders carry it, and it deletes unfinished folders of older trainers only."""
    superseded: Callable[[], str] = lambda: ""
    """Returns why it must not touch completed checkpoints, because another trainer writes here now; or an empty string."""
    incarnation: int = 0
    """The run's, which its checkpoints record."""
    began: int = NO_STEP
    """First step of this incarnation, if a restore began it."""

    def abandoned(self, saved: Saved) -> str:
        """Return why a checkpoint does not belong to the run's history, or an empty string.

        One that records no incarnation is an old version's and is not checked.
        """
        written = saved.manifest.facts.get("incarnation", self.incarnation)
        if saved.step < self.began or written >= self.incarnation:
            return ""
        return (
            f"{saved.folder} belongs to a history that was abandoned when the run was restored to step {self.began - 1}; "
            f"to return to it, use grpo restore {saved.step}"
        )


class Checkpoints(CheckpointFolder):
    """The checkpoints in one folder. Keeps the `keep` most recently written ones."""

    def __init__(self, root: Path, keep: int) -> None:
        super().__init__(root, APPEARS_S)
        self.keep = keep
        self.owner = CheckpointWriter()
        """Set on rank 0, which tells the other ranks."""
        self.progress: Callable[[], None] = lambda: None
        """Reports liveness; set on rank 0."""

    def save(self, policy: Policy, step: int, beside: Callable[[Path], None] | None = None) -> Saved:
        """Write the checkpoint of `step`, point `latest` to it and delete checkpoints beyond `keep`. Collective.

        On rank 0, `beside` receives the folder while it is being written, to add files to it. An existing checkpoint of the same
        step is replaced. On failure the partial checkpoint is deleted and every rank raises `CheckpointError`.
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
        """Load a checkpoint's state into a policy that has not trained. Collective."""
        ranks.agree(_unfit(policy, saved), CheckpointError)
        try:
            policy.load(saved.folder / STATE)
        except StateError as error:
            raise CheckpointError(f"{saved.folder} cannot be restored: {error}") from error
        policy.learning_rate.continue_from(saved.manifest.facts.get("learning_rate", {}))

    def restore(self, policy: Policy, step: int | None = None) -> Saved | None:
        """Load the checkpoint of `step`, or by default the latest undamaged one, if any. Collective; rank 0 chooses.

        Raises `CheckpointError` on every rank.
        """
        saved = self._choose(policy.world, step)
        if saved is not None:
            self.load(policy, saved)
        if saved is not None and step is not None:  # a trainer that dies before its next save must return here
            ranks.agree(self.owner.superseded() or self.point_to(saved) if policy.world.rank == 0 else "", CheckpointError)
        return saved

    def _choose(self, world: World, step: int | None) -> Saved | None:
        """Return rank 0's choice. All ranks verify the checkpoints that it proposes. Collective."""

        def verify(saved: Saved) -> None:
            ranks.from_rank_0((saved, None))
            self._verify(saved, world)

        chosen: Saved | None = None
        problem: str | None = None
        if world.rank == 0:
            try:
                chosen = self.latest(verify, self.owner.abandoned) if step is None else self.at(step, verify)
            except CheckpointError as error:
                problem = str(error)
            ranks.from_rank_0((chosen, problem or ""))
        while world.rank and problem is None:
            chosen, problem = ranks.from_rank_0(None)
            if chosen is not None and problem is None:
                with contextlib.suppress(CheckpointError):  # rank 0 raises it, too, and decides
                    self._verify(chosen, world)
        if problem:
            raise CheckpointError(problem)
        return chosen

    def _verify(self, saved: Saved, world: World) -> None:
        """Compare every byte with the manifest: a file per rank at a time, so that none waits longer than for that. Collective.

        Raises the same `DamagedCheckpoint`, or `CheckpointError` if it cannot be read now, on every rank.
        """
        sizes = {name: record.size_bytes for name, record in saved.manifest.files.items()}
        names = sorted(sizes, key=lambda name: sizes[name], reverse=True)  # files that take equally long at the same time
        for first in range(world.rank, len(names) + world.rank, world.size):
            faults = [fault for fault in ranks.gather(_fault(saved, names[first : first + 1], world.rank)) if fault is not None]
            if faults:
                raise min(faults, key=lambda fault: isinstance(fault, DamagedCheckpoint))
            self.progress()

    def try_out(self, rank: int) -> None:
        """Write and delete a file, so that a read-only folder is reported before anything is trained. Collective."""
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

    def point_to(self, saved: Saved) -> str:
        """Make `latest` name a checkpoint. Returns why that failed, or an empty string. Not collective."""
        try:
            atomic_folders.replace(self.root / "latest", saved.folder.name.encode())
        except FolderError as error:
            return str(error)
        return ""

    def _save(self, policy: Policy, step: int, final: Path, partial: Path, beside: Callable[[Path], None] | None) -> Saved:
        rank, size = policy.world.rank, policy.world.size
        problem, mine = self._begin(final, beside) if rank == 0 else ("", [])
        ranks.agree(problem, CheckpointError)
        shared = (partial / STATE).is_dir()
        ranks.agree(
            "" if shared else f"{partial} does not exist on this rank: mount one shared volume at run.dir", CheckpointError
        )
        try:
            mine += [f"{STATE}/{name}" for name in policy.save(partial / STATE)]
        except StateError as error:
            raise CheckpointError(str(error)) from error
        written = ranks.from_rank_0({"step": step, "time_s": time.time(), "incarnation": self.owner.incarnation})
        names = sorted(name for of_rank in ranks.gather(mine) for name in of_rank)
        written["learning_rate"] = policy.learning_rate.state
        manifest = FolderManifest(self._records(partial, names[rank::size]), facts_of(policy) | written)
        ranks.agree(self._finish(partial, final, manifest) if rank == 0 else "", CheckpointError)
        return Saved(final, step, manifest)

    def _begin(self, final: Path, beside: Callable[[Path], None] | None) -> tuple[str, list[str]]:
        """Create the unfinished folder with the files of `beside`. Returns why that failed, or "", and their names."""
        for path in self.root.glob(f"step-*{atomic_folders.PARTIAL}"):  # left by a crash: they only take space
            if atomic_folders.owner_of(path) <= self.owner.fence:
                atomic_folders.discard(path)
        try:
            partial = atomic_folders.begin(final, self.owner.fence)
            if beside is not None:
                beside(partial)
            names = atomic_folders.files(partial)
            (partial / STATE).mkdir()
        except FolderError as error:
            return str(error), []
        except OSError as error:
            return atomic_folders.explain(final, error), []
        return "", names

    def _records(self, partial: Path, names: list[str]) -> dict[str, FileRecord]:
        """Compute sizes and hashes of all files; this rank reads those of `names`."""
        problem, mine = "", {}
        try:
            mine = atomic_folders.records(partial, names)
        except FileNotFoundError as error:
            problem = (
                f"{error.filename}, which another rank wrote, does not exist on this rank: mount one shared volume at run.dir"
            )
        except OSError as error:
            problem = f"cannot read back {error.filename or partial}: {error.strerror}"
        ranks.agree(problem, CheckpointError)
        return {name: record for part in ranks.gather(mine) for name, record in part.items()}

    def _finish(self, partial: Path, final: Path, manifest: FolderManifest) -> str:
        superseded = self.owner.superseded
        try:
            atomic_folders.finish(partial, final, manifest, superseded)
        except FolderError as error:
            return str(error)
        step, before = manifest.facts["step"], self.named_step()
        if problem := superseded() or self.point_to(Saved(final, step, manifest)):
            return problem
        written = self.written()
        atomic_folders.remove(written[one] for one in surplus(written, step, self.keep, before) if not superseded())
        return ""


def _fault(saved: Saved, names: list[str], rank: int) -> CheckpointError | None:
    """Return why these files of a checkpoint cannot be loaded."""
    try:
        if not (saved.folder / atomic_folders.MANIFEST).exists():
            return CheckpointError(f"{saved.folder} does not exist on rank {rank}: mount one shared volume at run.dir")
        saved.verify(names)
    except CheckpointError as error:
        return error
    except OSError as error:
        return CheckpointError(f"{saved.folder} cannot be read: {error.strerror}; make it readable")
    return None


def facts_of(policy: Policy) -> dict[str, Any]:
    """Return the facts of this policy that a checkpoint records and that a loading policy must compare."""
    return {
        "layout": LAYOUT,
        "run": policy.config.run.name,
        "ranks": policy.world.size,
        "zero_stage": policy.zero_stage,
        "dtype": policy.config.model.dtype,
        "model": policy.config.model.path,
        "parameters": parameters_digest(policy.module),
    }


def parameters_digest(module: Any) -> str:
    """Return a digest of the names and shapes of a model's parameters."""
    parameters = sorted((name, tuple(getattr(one, "ds_shape", one.shape))) for name, one in module.named_parameters())
    return hashlib.sha256(repr(parameters).encode()).hexdigest()[:16]


def _unfit(policy: Policy, saved: Saved) -> str:
    """Return why a checkpoint does not fit this policy, or an empty string. Ranks and ZeRO stage may differ."""
    facts, now = saved.manifest.facts, facts_of(policy)
    if saved.refusal:
        return saved.refusal
    if facts["run"] != now["run"]:
        return f"{saved.folder} belongs to run {facts['run']!r}, not {now['run']!r}: to start from its weights, use its export"
    if facts["parameters"] != now["parameters"]:
        return (
            f"{saved.folder} was written with model.path = {facts['model']!r}; its parameters do not match model.path = "
            f"{now['model']!r} with this [lora]: set them back, or start a new run from its export"
        )
    if facts["dtype"] != now["dtype"]:
        return (
            f"{saved.folder} was written with model.dtype = {facts['dtype']!r}, but this run has {now['dtype']!r}: "
            "set model.dtype back, or start a new run from its export"
        )
    return ""
