"""The cost of a run: how the device-seconds of its trainer and generators were spent, and per unit of its output.

Guarantees: every process that holds devices is counted from its start to its last heartbeat, and until the next one of its pod
if it was killed. Reads only the run's folder, into which the tracker writes what heartbeats report.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from services.operations.history import INCARNATION, STEP, history_of
from services.protocol.messages import PodStatus
from services.runtime import atomic_folders
from services.runtime.activity import DEVICES, PREFIX

if TYPE_CHECKING:
    from services.operations.samples.outcomes import SampledTokens

FILE = "account.json"
DOWN = "down"
"""Time between the last heartbeat of a killed process and the start of its successor."""
GENERATED = "generating"
REWARD = "reward/gen/mean"
TENTH = 10  # reward at begin and end: means over a tenth of the steps
NEGLIGIBLE_S = 0.005
TRAINED, SOLVED, GAINED = "a million trained tokens", "a solved prompt", "a point of mean reward gained"
LEFT_OUT = "no prices per trained token and solved prompt, because the sample log is not complete"


class ProcessTime(msgspec.Struct):
    """The time of one process, according to its last heartbeat."""

    pod: str
    kind: str
    devices: int
    heard_s: float
    """When that heartbeat was sent, Unix seconds by the observer's clock."""
    seconds: dict[str, float]
    """Activity -> seconds since the process started."""
    left: bool = False
    """Whether it exited cleanly: the time until its pod starts again then counts for nobody."""

    @property
    def began_s(self) -> float:
        """Return when it started, Unix seconds."""
        return self.heard_s - sum(self.seconds.values())


class Account(msgspec.Struct):
    """The account of a run."""

    processes: dict[str, ProcessTime] = {}
    """`<pod>:<boot>` -> its time."""

    def observe(self, heard: Iterable[tuple[PodStatus, float]], now_s: float, leaving_s: float) -> None:
        """Record the pods of the fleet, each with the age of its last heartbeat.

        A killed pod stays in the fleet for longer than `leaving_s` after its last heartbeat; one that exits leaves it at once.
        """
        present = set[str]()
        for status, age_s in heard:
            if devices := int(status.gauges.get(DEVICES, 0)):
                spent = {name.removeprefix(PREFIX): value for name, value in status.gauges.items() if name.startswith(PREFIX)}
                key = f"{status.name}:{status.boot}"
                self.processes[key] = ProcessTime(status.name, status.kind, devices, now_s - age_s, spent)
                present.add(key)
        for key, process in self.processes.items():
            process.left = process.left or (key not in present and now_s - process.heard_s < leaving_s)

    def stop(self) -> None:
        """Record that the run stops: pods that are not heard again have left, and were not killed."""
        for process in self.processes.values():
            process.left = True

    def pods(self) -> dict[str, dict[str, float]]:
        """Return for each pod its device-seconds by activity."""
        found, last = dict[str, dict[str, float]](), dict[str, ProcessTime]()
        for process in sorted(self.processes.values(), key=lambda each: each.began_s):
            spent, before = found.setdefault(process.pod, {}), last.get(process.pod)
            if before is not None and not before.left and process.began_s > before.heard_s:
                spent[DOWN] = spent.get(DOWN, 0.0) + (process.began_s - before.heard_s) * before.devices
            for name, seconds in process.seconds.items():
                spent[name] = spent.get(name, 0.0) + seconds * process.devices
            last[process.pod] = process
        return found

    def device_seconds(self, kind: str = "") -> dict[str, float]:
        """Return device-seconds by activity, of all pods or those of a kind."""
        kinds, total = {process.pod: process.kind for process in self.processes.values()}, dict[str, float]()
        for pod, spent in self.pods().items():
            for name, seconds in spent.items() if kind in ("", kinds[pod]) else ():
                total[name] = total.get(name, 0.0) + seconds
        return total

    def by_outcome(self, tokens: Mapping[str, float]) -> dict[str, float]:
        """Return device-seconds by outcome; their sum is that of all activities.

        `tokens`: outcome -> sampled tokens of the groups with that outcome. The seconds of generation and scoring are divided by
        them. Those of training are `trained`.
        """
        spent = self.device_seconds()
        made = spent.pop(GENERATED, 0.0) + spent.pop("scoring", 0.0)
        total = sum(tokens.values())
        found = {"trained": spent.pop("training", 0.0)}
        for outcome, count in tokens.items() if total else ():
            found[outcome] = found.get(outcome, 0.0) + made * count / total
        if not total:
            found["generated"] = made
        return found | spent


def read_account(folder: Path) -> Account:
    """Return the account in a run's folder, empty if there is none. Raises `FolderError` if it cannot be read."""
    path = folder / FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=Account)
    except FileNotFoundError:
        return Account()
    except (OSError, msgspec.MsgspecError) as error:
        raise atomic_folders.FolderError(f"the account {path} cannot be read: {error}") from error


def write_account(folder: Path, account: Account) -> None:
    """Write the account into a run's folder. Raises `FolderError`."""
    atomic_folders.replace(folder / FILE, msgspec.json.encode(account))


@dataclass(frozen=True)
class Cost:
    """Where the devices' time went."""

    spent: dict[str, float]
    """Outcome or activity -> device-seconds, without negligible ones."""
    trainer: dict[str, float]
    """Activity -> device-seconds of the trainer."""
    generator: dict[str, float]
    """Activity -> device-seconds of the generators."""
    pods: dict[str, dict[str, float]]
    """Pod -> activity -> device-seconds."""
    tokens: dict[str, float]
    """Outcome -> sampled tokens of the groups that ended so; empty without a sample log."""
    solved: int
    """Solved prompts."""
    yields: dict[str, float]
    """The run's output, by unit; units of which it has produced none, or an unknown amount, are left out."""
    note: str = ""
    """Which units are left out because the sample log is not complete, and why; empty: none."""

    @property
    def total(self) -> float:
        """Return the device-seconds of everything."""
        return sum(self.spent.values())


def cost_of(folder: Path) -> Cost | None:
    """Return the cost of the run in `folder`; None if it has no account. Raises `FolderError` if that cannot be read."""
    account = read_account(folder)
    if not account.processes:
        return None
    steps = history_of(folder / "metrics.jsonl", STEP, lambda record: (record.get(INCARNATION, 0.0), record.get(REWARD)))
    log = _logged(folder, {step: incarnation for step, (incarnation, _) in steps.rows.items()})
    tokens, solved, missing = (log.by_outcome, log.solved, log.missing) if log else (dict[str, float](), 0, "")
    known = [reward for _, (_, reward) in sorted(steps.rows.items()) if reward is not None]
    return Cost(
        spent={name: seconds for name, seconds in account.by_outcome(tokens).items() if seconds >= NEGLIGIBLE_S},
        trainer=account.device_seconds("trainer"),
        generator=account.device_seconds("generator"),
        pods=account.pods(),
        tokens=tokens,
        solved=solved,
        yields=_yields(log, known),
        note=f"{LEFT_OUT}: {missing}" if missing else "",
    )


def _logged(folder: Path, steps: Mapping[int, float]) -> SampledTokens | None:
    if not (folder / "samples").is_dir():
        return None
    try:
        from services.operations.samples.outcomes import sampled_tokens
    except ImportError:  # duckdb or pyarrow is not installed
        return None
    return sampled_tokens(folder, steps)


def _yields(log: SampledTokens | None, rewards: list[float]) -> dict[str, float]:
    tenth = max(1, len(rewards) // TENTH)
    gained = sum(rewards[-tenth:]) / tenth - sum(rewards[:tenth]) / tenth if len(rewards) > 1 else 0.0
    found = {GAINED: gained}
    if log and not log.missing:
        found = {TRAINED: log.by_outcome.get("trained", 0.0) / 1e6, SOLVED: float(log.solved)} | found
    return {what: count for what, count in found.items() if count > 0}
