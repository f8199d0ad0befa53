"""The account of a run: how the device-seconds of its trainer and generators were spent. Pure except for reading and writing.

Guarantees: for every pod the seconds of all activities, including those between the death of a process and the start of the next,
are the time from the start of the first to the last sign of life; a restarted observer continues where the last one ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from services.protocol.messages import PodStatus
from services.runtime import atomic_folders
from services.runtime.activity import DEVICES, PREFIX

FILE = "account.json"
DOWN = "down"
"""Time between the death of a process and the start of its successor."""
ENDING = "ending"
"""Time between the last heartbeat of a process that exited cleanly and its end."""
GENERATED = "generating"
ALIVE_BEATS = 3
"""A process whose last heartbeat is at most this many intervals old counts as alive."""


class PodAccount(msgspec.Struct):
    """The account of one pod, through all of its processes."""

    kind: str
    devices: int
    boot: str
    """The current process, or the last one."""
    beat_s: float
    """When its last heartbeat was sent, Unix seconds by the observer's clock."""
    heard_s: float
    """When it was last known to be alive."""
    current: dict[str, float]
    """Activity -> seconds of the current process."""
    doing: str = ""
    """Activity that had the most of the time between the last two heartbeats."""
    before: dict[str, float] = {}
    """The same of earlier processes with as many devices, with `down`."""
    apart: dict[str, float] = {}
    """Activity -> device-seconds of earlier processes with another number of devices."""
    left: bool = False
    """Whether it exited cleanly: the time until it is restarted then counts for no pod."""

    def seconds(self) -> dict[str, float]:
        """Return the seconds by activity, for which the pod held `devices`."""
        names = [*self.current, *(name for name in self.before if name not in self.current)]
        return {name: self.current.get(name, 0.0) + self.before.get(name, 0.0) for name in names}

    def device_seconds(self) -> dict[str, float]:
        """Return the device-seconds by activity, through all of its processes."""
        total = {name: seconds * self.devices for name, seconds in self.seconds().items()}
        return total | {name: total.get(name, 0.0) + seconds for name, seconds in self.apart.items()}


class Account(msgspec.Struct):
    """The account of a run."""

    pods: dict[str, PodAccount] = {}

    def device_seconds(self, kind: str = "") -> dict[str, float]:
        """Return device-seconds by activity, of all pods or those of a kind."""
        total = dict[str, float]()
        for pod in self.pods.values():
            for name, seconds in pod.device_seconds().items() if kind in ("", pod.kind) else ():
                total[name] = total.get(name, 0.0) + seconds
        return total

    def observe(self, heard: Iterable[tuple[PodStatus, float]], now_s: float, beat_s: float) -> None:
        """Record the live pods, each with the age of its last heartbeat, sent every `beat_s`."""
        present = set[str]()
        for status, age_s in sorted(heard, key=lambda one: -one[1]):
            devices = int(status.gauges.get(DEVICES, 0))
            if devices <= 0:
                continue
            present.add(f"{status.name}:{status.boot}")
            spent = {name.removeprefix(PREFIX): value for name, value in status.gauges.items() if name.startswith(PREFIX)}
            alive_s = age_s if age_s < ALIVE_BEATS * beat_s else 0.0
            self._hear(status, devices, spent, now_s - age_s, alive_s)
        for name, pod in self.pods.items():
            if f"{name}:{pod.boot}" not in present and now_s - pod.heard_s < ALIVE_BEATS * beat_s:
                pod.left = True  # a killed one stays in the fleet until its heartbeat expires

    def stop(self) -> None:
        """Record that the run stops: pods that are not heard again have left, and were not killed."""
        for pod in self.pods.values():
            pod.left = True

    def lives_on(self, name: str, boot: str, now_s: float) -> None:
        """Record that a process that left the fleet still runs."""
        pod = self.pods.get(name)
        if pod is not None and pod.boot == boot and pod.left and now_s > pod.heard_s:
            pod.current[ENDING] = pod.current.get(ENDING, 0.0) + now_s - pod.heard_s
            pod.heard_s = now_s

    def _hear(self, status: PodStatus, devices: int, spent: dict[str, float], beat_s: float, alive_s: float) -> None:
        """Record a heartbeat, sent every `beat_s`, after which the process lived for at least another `alive_s`."""
        pod = self.pods.get(status.name)
        began_s, heard_s = beat_s - sum(spent.values()), beat_s + alive_s
        if pod is None:
            pod = self.pods[status.name] = PodAccount(status.kind, devices, status.boot, beat_s, heard_s, {})
        elif pod.boot != status.boot:
            if beat_s < pod.beat_s:
                return  # an earlier process, which has not expired yet
            pod.before, down_s = pod.seconds(), began_s - pod.heard_s
            if down_s < 0:  # it died before it was last assumed to be alive
                pod.before[pod.doing] = max(0.0, pod.before.get(pod.doing, 0.0) + down_s)
            elif not pod.left:
                pod.before[DOWN] = pod.before.get(DOWN, 0.0) + down_s
            pod.current = {}
            if pod.devices != devices:
                pod.apart, pod.before = pod.device_seconds(), {}
        grown = {name: seconds - pod.current.get(name, 0.0) for name, seconds in spent.items()}
        pod.doing = max(grown, key=lambda name: grown[name], default=pod.doing)
        pod.kind, pod.devices, pod.boot, pod.beat_s, pod.heard_s, pod.left = (
            status.kind,
            devices,
            status.boot,
            beat_s,
            heard_s,
            False,
        )
        pod.current = spent | {pod.doing: spent.get(pod.doing, 0.0) + alive_s}


def read(folder: Path) -> Account:
    """Return the account in a run's folder, empty if there is none. Raises `FolderError` if it cannot be read."""
    path = folder / FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=Account)
    except FileNotFoundError:
        return Account()
    except (OSError, msgspec.MsgspecError) as error:
        raise atomic_folders.FolderError(f"the account {path} cannot be read: {error}") from None


def write(folder: Path, account: Account) -> None:
    """Write the account into a run's folder. Raises `FolderError`."""
    atomic_folders.replace(folder / FILE, msgspec.json.format(msgspec.json.encode(account)))


def by_outcome(account: Account, tokens: Mapping[str, float]) -> dict[str, float]:
    """Return device-seconds by outcome; their sum is that of all activities.

    `tokens`: outcome -> sampled tokens of the groups with that outcome. The seconds of generation and scoring are divided by
    them. Those of training are `trained`.
    """
    spent = account.device_seconds()
    made = spent.pop(GENERATED, 0.0) + spent.pop("scoring", 0.0)
    total = sum(tokens.values())
    found = {"trained": spent.pop("training", 0.0)}
    for outcome, count in tokens.items() if total else ():
        found[outcome] = found.get(outcome, 0.0) + made * count / total
    if not total:
        found["generated"] = made
    return found | spent
