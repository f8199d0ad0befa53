"""Repeats the stages loss and train of a bundle on CPUs, with as many trainer processes as the run had ranks.

Waits for: those processes. They end with this one.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from services.config import RunConfig, to_toml
from services.console.bundles.stages import Compared
from services.console.errors import ConsoleError
from services.console.printable import printable
from services.console.run.plan import common_environment
from services.operations.bundles import format as bundles
from services.operations.bundles.format import Bundle, BundleFile
from services.protocol import codec
from services.protocol.messages import RankPlan, StepPlan
from services.runtime import atomic_folders
from services.runtime.atomic_folders import FolderError, FolderManifest
from services.runtime.child_processes import ChildService, ProcessPlan, ServicePlan, rank_environment

POLL_S = 0.1
OF_TRAINING = ("gradient/", "learning_rate/")
"""Metrics that need the gradient or the optimizer; those of the loss need neither."""
CLOCKS = "time/"


class Given(msgspec.Struct):
    """`ReplayResult` of the trainer."""

    metrics: list[dict[str, float | None]]
    weights: dict[str, str]


def trained(file: BundleFile, config: RunConfig, loss_only: bool, save: Path | None, against: Path | None) -> Iterator[Compared]:
    """Train the steps of a bundle again. `save`: where to write logprobs by token; `against`: such a file to compare with.

    Raises `ConsoleError` if the trainer fails.
    """
    bundle = file.bundle
    with tempfile.TemporaryDirectory(prefix="grpo-replay-") as folder:
        work = Path(folder)
        _prepare(file, config, work)
        _run(file.path, config, work)
        given = msgspec.json.decode((work / "results.json").read_bytes(), type=Given)
        tensors = _tensors(work, config.trainer.ranks)
        if save is not None:
            _write(save, tensors)
    for step, now in zip(bundle.steps, given.metrics, strict=True):
        number = codec.decode(step.plan, StepPlan).step
        for name in sorted(step.record or {}):
            if name in now and not name.startswith((CLOCKS, *OF_TRAINING) if loss_only else CLOCKS):
                assert step.record is not None
                yield Compared(f"{name} of step {number}", step.record[name], now[name])
    if against is not None:
        yield from _compared(_read(against), tensors, bundle)
    if not loss_only:
        for name, digest in bundle.weights.items():
            yield Compared(f"SHA-256 of weights {name} after step {bundle.step}", digest, given.weights.get(name))


def _prepare(file: BundleFile, config: RunConfig, work: Path) -> None:
    """Write the ranks' input: configuration, model, state. Raises `ConsoleError`.

    Settings that need a GPU are replaced, since the ranks see none.
    """
    bundle, model = file.bundle, Path(config.model.path)
    if file.has(bundles.MODEL):
        model = file.unpack(bundles.MODEL, work)
    elif bundle.model:
        _verify(model, bundle, "model.path")
    if bundle.origin.step >= 0:
        if file.has(bundles.STATE):
            file.unpack(bundles.STATE, work)
        else:
            _verify(Path(bundle.origin.folder), bundle, f"the checkpoint of step {bundle.origin.step}")
    trainer = {"compile": False}
    changes = {"run": {"dir": str(work)}, "model": {"path": str(model)}, "trainer": trainer}
    placed = config.model_copy(update={name: getattr(config, name).model_copy(update=keys) for name, keys in changes.items()})
    (work / "config.toml").write_text(to_toml(placed), encoding="utf-8")


def _verify(folder: Path, bundle: Bundle, what: str) -> None:
    files = bundle.model if what == "model.path" else bundle.origin.files
    try:
        atomic_folders.verify(folder, FolderManifest(files, {}))
    except FolderError as error:
        raise ConsoleError(
            f"{what} is not the one that was recorded: {printable(error)}; the bundle only refers to these "
            "weights: replay it where they are, or record it with --weights"
        ) from None


def _run(path: Path, config: RunConfig, work: Path) -> None:
    ranks = config.trainer.ranks
    pods = tuple(
        ProcessPlan(
            f"rank-{rank}", (sys.executable, "-m", "services.trainer.replay", str(path.absolute()), str(work)),
            {**rank_environment(rank, rank, ranks, "127.0.0.1"), "CUDA_VISIBLE_DEVICES": ""},
        )
        for rank in range(ranks)
    )  # fmt: skip
    child = ChildService(ServicePlan("replay", pods, collective=True), work / "logs")
    child.start({**common_environment(os.environ, config, []), "HF_HUB_OFFLINE": "1"})
    try:
        while child.alive and not any(child.codes):
            time.sleep(POLL_S)
        if any(child.codes):
            logs = [(work / "logs" / f"rank-{rank}.log").read_text(errors="replace") for rank in range(ranks)]
            lines = [line for log in logs for line in log.splitlines() if line.startswith("error: ")]
            last = [log.strip().splitlines()[-1] for log in logs if log.strip()]
            raise ConsoleError(f"the trainer failed: {printable((lines or last or ['no output'])[0].removeprefix('error: '))}")
    finally:
        child.kill()


def _tensors(work: Path, ranks: int) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    return {
        f"rank-{rank}/{name}": value
        for rank in range(ranks)
        for name, value in sorted(load_file(work / f"rank-{rank}.safetensors").items())
    }


def _write(path: Path, tensors: dict[str, np.ndarray]) -> None:
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    try:
        save_file(tensors, path)
    except (OSError, SafetensorError) as error:
        raise ConsoleError(f"--save {path}: {error}") from None


def _read(path: Path) -> dict[str, np.ndarray]:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ConsoleError(f"--against {path} cannot be read: {error}; grpo replay-step --save writes one") from None


def _compared(was: dict[str, np.ndarray], now: dict[str, np.ndarray], bundle: Bundle) -> Iterator[Compared]:
    """Compare tensors by token, rank by rank and row by row."""
    plans = [codec.decode(rank, RankPlan) for rank in bundle.steps[-1].ranks]
    yield Compared("tensors of the last step", sorted(was), sorted(now))
    for name in sorted(was.keys() & now.keys()):
        rank, row, tensor = name.split("/")
        number = int(row.removeprefix("row-"))
        of = plans[min(int(rank.removeprefix("rank-")), len(plans) - 1)].rows
        groups = sorted({sample.payload.rpartition(".")[0] for sample in of[number]}) if number < len(of) else []
        where = f"{tensor} of {rank.replace('-', ' ')}, row {number} (groups {', '.join(groups)})"
        old, new = was[name], now[name]
        yield Compared(f"tokens of {where}", list(old.shape), list(new.shape))
        if old.shape == new.shape and old.dtype == new.dtype:
            unequal = np.flatnonzero(~((old == new) | (np.isnan(old) & np.isnan(new))))
            for token in unequal.tolist():
                yield Compared(f"token {token} of {where}", _plain(old[token]), _plain(new[token]))


def _plain(value: Any) -> Any:
    return value.item()
