"""The command that resumes a run, where it continues, and whether it can have the configured number of steps."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from services.config import RunConfig
from services.config.secrets import holds_secret
from services.console.errors import EXIT_CONFIG, ConsoleError
from services.console.options import who
from services.console.run.changes import changes, in_words, record, take_back
from services.console.run.folder import RunFolder
from services.http.credentials import redis_password
from services.operations.control import reason
from services.operations.inspection.deadletters import requeue
from services.runtime.checkpoints import CheckpointFolder
from services.store import Store
from services.store.client import Login, masked


async def next_step(config: RunConfig, login: Login, folder: RunFolder, restore: int | None) -> int:
    """Return the step with which the run continues. `restore`: step of the checkpoint that --resume requests.

    Raise `ConsoleError` if run.steps is less than the steps that are trained by then.
    """
    store = await Store.connect(config.redis.url, config.run.name, login)
    try:
        state = await store.run.state()
    finally:
        await store.close()
    if restore is None and state is not None:  # requested by grpo restore, or interrupted
        restore = next((step for step in (state.restore, state.restoring) if step >= 0), None)
    # If its Redis has lost the run, its latest checkpoint counts.
    known = trained_by_files(folder) if state is None else state.committed_step + 1
    trained = known if restore is None else restore + 1
    check_steps(config, trained, restore)
    return trained


def check_steps(config: RunConfig, trained: int, restore: int | None = None) -> None:
    """Raise `ConsoleError` if run.steps is less than `trained`. `restore`: the checkpoint up to which that is."""
    if config.run.steps < trained:
        what = "the run has trained" if restore is None else f"up to checkpoint {restore} the run has trained"
        raise ConsoleError(f"run.steps = {config.run.steps}, but {what} {trained}: raise it", EXIT_CONFIG)


def trained_by_files(folder: RunFolder) -> int:
    """Return how many steps the run has trained, by its latest checkpoint."""
    checkpoints = CheckpointFolder(folder.checkpoints)
    steps = [saved.step for saved in checkpoints.complete()]
    named = checkpoints.named().removeprefix("step-")
    if named.isdigit() and int(named) in steps:
        return int(named) + 1
    return max(steps, default=-1) + 1


async def requeue_failed(store: Store, restore: int | None) -> int:
    """Resume a run that paused itself because prompts kept failing, and requeue those that failed in a row. Return how many.

    Earlier ones failed one by one, and probably would again: waiting together, they would pause the run as soon as it resumed.
    A run that is restored to a checkpoint (`restore`) goes back to before they failed, or issues them again.
    """
    state = await store.run.state()
    if state is None or not state.failing:
        return 0
    restored = restore is not None or max(state.restore, state.restoring) >= 0
    count = 0 if restored or state.ended else len((await requeue(store, await store.dead_letters.in_a_row())).requeued)
    await store.run.resume("dataprep", reason("grpo run", who()))
    return count


def again(argv: Sequence[str]) -> list[str]:
    """Return the arguments that resume a run: without --fresh and --resume, which were for its start, and without secrets."""
    words, given = list[str](), iter(argv)
    for word in given:
        if word == "--resume":
            next(given, "")
        elif word != "--fresh" and not word.startswith("--resume="):
            key, equals, _ = word.partition("=")
            words.append(f"{key}=SECRET" if equals and holds_secret(key) else masked(word))
    return words


def written(config: RunConfig, folder: RunFolder, before: RunConfig | None, restore: int | None, login: Login) -> RunConfig:
    """Write the configuration into the run's folder, and record how it differs from that `before`, if the run is resumed.

    Raise `ConsoleError`, and write nothing, if the run is beyond its last step.
    """
    if before is None:
        return folder.write(config)
    begins = asyncio.run(next_step(config, login, folder, restore))
    take_back(folder.changes, before)
    if changed := changes(before, config):
        record(folder.changes, begins, changed)
        print(f"changed from step {begins} on: {in_words(changed)}", flush=True)
        if "run.steps" in changed and config.optimizer.schedule != "constant" and config.run.steps > before.run.steps:
            print(
                "the learning rate never rises after its warm-up: it stays as it is until the "
                f"{config.optimizer.schedule} schedule over {config.run.steps} steps falls below it",
                flush=True,
            )
    return folder.write(config)


def administrator(config: RunConfig, password: str = "") -> Login:
    """Return the login that loads the functions and deletes old data, which none of the run's own users may do."""
    return Login(password or redis_password(config) or "", ca_file=config.redis.ca_file)
