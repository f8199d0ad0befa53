"""What can go wrong, and the sequence of faults of a seed. Pure.

Guarantees: the same seed, number, kinds and shape of the run give the same sequence; kinds are dealt like cards, so their counts
differ by at most one.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

VERBS = {
    "kill": ("generator", "dataprep", "trainer", "console", "redis", "environment"),  # SIGKILL
    "stop": ("generator", "dataprep", "trainer", "console", "redis", "environment"),  # SIGSTOP, then SIGCONT after a while
    "term": ("generator", "dataprep", "trainer", "console", "redis", "environment"),  # SIGTERM
    "drop": ("generator", "dataprep", "trainer"),  # CLIENT KILL of all connections of a pod
    "cut": ("generator", "dataprep", "trainer"),  # no traffic between a pod and Redis for a while
    "lose": ("generator", "dataprep", "trainer"),  # a call takes effect, but its reply is lost with the connection
    "pause": ("redis",),  # CLIENT PAUSE
    "twin": ("trainer",),  # the trainer is stopped, another one replaces it, and then it wakes
    "restore": ("run",),  # `grpo restore` to the latest checkpoint, while the run trains
    "break": ("reward",),  # every reward fails until the run pauses itself; meanwhile a dataprep is killed
}
"""Verb -> kinds of victims."""

KINDS = tuple(f"{verb}-{target}" for verb, targets in VERBS.items() for target in targets)
ENDS = ("kill", "term", "twin")
"""Verbs after which the victim is a new process."""
CALLS = {
    "generator": (
        "claim", "submit", "renew", "beat", "acknowledge", "round_of", "save_partial", "release", "leave",
    ),
    "dataprep": (
        "issue", "settle", "prepare", "sweep_and_peek", "lead", "read_headers", "beat", "create", "step_down", "leave",
    ),
    "trainer": (
        "commit", "publish", "record", "checkpointed", "round", "retire", "beat", "members", "snapshot_begin", "snapshot_end",
        "attach_trainer", "desire", "leave",
    ),
}  # fmt: skip
"""Functions whose reply may be lost."""
AT_THE_START = ("create", "attach_trainer", "desire")
"""Functions that a pod calls when it starts: it is killed while it awaits the reply."""
AT_THE_END = ("save_partial", "release", "step_down", "leave")
"""Functions that a pod calls when it exits: it is terminated."""
ELSEWHERE = {
    "audit": "reads",
    "snapshot_hold": "only while a copy takes seconds",
    "reweigh": "only with priorities of the trainer",
    "rescale": "only with priorities by recency",
    "pass_over": "only where all groups of a step are filtered",
    "pause_failing": "only where prompt after prompt fails",
    "fail": "only where a verifier fails",
    "discard_damaged": "only where a payload is damaged",
    "issue_again": "only after a restore",
    "restore_begin": "only in a restore",
    "restore_write": "only in a restore",
    "restore_delete": "only in a restore",
    "restore_end": "only in a restore",
    "requeue": "only by people",
    "commit_turn": "only with environments",
    "restart_rollout": "only with environments",
    "set_steps": "only where a run is attached to again",
    "log_samples": "only with a tracker",
    **dict.fromkeys(
        (
            "eval_open", "eval_skip", "eval_volunteer", "eval_resign", "eval_look", "eval_close",
        ),
        "only in runs that evaluate",
    ),
}  # fmt: skip
"""Functions that the runs under test do not call, and when they are called. tests/repeats loses their replies."""

TRAINER = ("training", "syncing", "saving", "waiting for data")
ROUND = ("gather", "join", "pause", "transfer")
RECOVERY = ("starting", "loading", "catching up", "unsynced", "standby", "syncing")
LONGEST_STOP_S, LONGEST_PAUSE_S = 14.0, 4.0  # a client of Redis gives up after some 9 s
LONGEST_DELAY_S = 2.0
HURRIED = 0.15  # share of faults applied while the run is still recovering from the previous one


@dataclass(frozen=True)
class Shape:
    """The pods of a run."""

    generators: int
    ranks: int
    environments: int = 0
    breakable: bool = False
    """Whether its rewards can be made to fail."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """Return the kinds that apply to the run: a second trainer is one process, so it cannot replace two ranks."""
        absent = {"twin-trainer"} if self.ranks > 1 else set[str]()
        absent |= set() if self.environments else {f"{verb}-environment" for verb in VERBS}
        absent |= set() if self.breakable else {"break-reward"}
        return tuple(kind for kind in KINDS if kind not in absent)


@dataclass(frozen=True)
class Fault:
    """One fault of the sequence."""

    number: int
    kind: str
    victim: str
    """Pod, `leader`, `standby`, `console`, `redis`, `run` or `reward`."""
    delay_s: float
    """Seconds to wait before the fault; with a phase, counted from when it is observed."""
    phase: str
    """`<who> <phase>` to wait for, where who is a pod or `round`; empty if there is none."""
    duration_s: float
    """Duration of a stop, cut or pause."""
    call: str
    """The function whose reply is lost, for `lose`."""
    hurried: bool
    """Whether it is applied before the run is steady after the previous fault."""

    @property
    def verb(self) -> str:
        """What is done."""
        return self.kind.partition("-")[0]

    @property
    def target(self) -> str:
        """The kind of its victim."""
        return self.kind.partition("-")[2]

    def __str__(self) -> str:
        words = [f"{self.number}:", self.verb, self.victim]
        words += [f"for {self.duration_s:.1f} s"] if self.duration_s else []
        words += [f"reply of {self.call}"] if self.call else []
        words += [f"at {self.phase!r}"] if self.phase else []
        return " ".join([*words, f"after {self.delay_s:.2f} s", *(["hurried"] if self.hurried else [])])

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


def chosen(names: str, shape: Shape) -> tuple[str, ...]:
    """Return the kinds in a comma-separated list of kinds or verbs; all if it is empty. Raises `ValueError`."""
    if not names:
        return shape.kinds
    wanted = [name.strip() for name in names.split(",")]
    for name in wanted:
        if not any(name in (kind, kind.partition("-")[0]) for kind in shape.kinds):
            raise ValueError(f"--kinds: {name!r} is no kind of fault here; there are: {', '.join(shape.kinds)}")
    return tuple(kind for kind in shape.kinds if kind in wanted or kind.partition("-")[0] in wanted)


def sequence(seed: int, count: int, kinds: Sequence[str], shape: Shape) -> Iterator[Fault]:
    """Return the faults of a seed, in order."""
    dice = random.Random(seed)
    deck: list[str] = []
    for number in range(count):
        if not deck:
            deck = list(kinds)
            dice.shuffle(deck)
        yield _fault(dice, number, deck.pop(), shape)


def _fault(dice: random.Random, number: int, kind: str, shape: Shape) -> Fault:
    # Every fault makes the same number of draws, so that a change to one does not affect later ones.
    verb, _, target = kind.partition("-")
    which, late, share, long, hurry, call, moment = (dice.random() for _ in range(7))
    hurried = number > 0 and hurry < HURRIED and verb != "twin"
    phase = _phase(moment, shape, hurried) if late < 0.5 or hurried else ""
    durations = {"stop": LONGEST_STOP_S, "cut": LONGEST_STOP_S, "pause": LONGEST_PAUSE_S}
    return Fault(
        number=number,
        kind=kind,
        victim=_victim(which, target, shape),
        delay_s=round(share * (0.05 if phase else LONGEST_DELAY_S), 3),
        phase=phase,
        duration_s=round(0.2 + long * (durations[verb] - 0.2), 2) if verb in durations else 0.0,
        call=_pick(call, CALLS[target]) if verb == "lose" else "",
        hurried=hurried,
    )


def _victim(roll: float, target: str, shape: Shape) -> str:
    match target:
        case "generator":
            return f"generator-{int(roll * shape.generators)}"
        case "trainer":
            return f"trainer-{int(roll * shape.ranks)}"
        case "environment":
            return f"environment-{int(roll * shape.environments)}"
        case "dataprep":
            return "leader" if roll < 0.75 else "standby"
        case _:
            return target


def _phase(roll: float, shape: Shape, hurried: bool) -> str:
    if hurried:
        pods = ["trainer-0", "dataprep-0", *(f"generator-{i}" for i in range(shape.generators))]
        return _pick(roll, [f"{pod} {phase}" for phase in RECOVERY for pod in pods if _says(pod, phase)])
    return _pick(roll, [*(f"trainer-0 {phase}" for phase in TRAINER), *(f"round {phase}" for phase in ROUND)])


def _says(pod: str, phase: str) -> bool:
    """Return whether a pod of this kind is ever in the phase."""
    only = {"catching up": "trainer", "syncing": "trainer", "unsynced": "generator", "standby": "dataprep"}
    return (
        phase == "starting" or (phase == "loading" and not pod.startswith("dataprep")) or only.get(phase) == pod.partition("-")[0]
    )


def _pick(roll: float, of: Sequence[str]) -> str:
    return of[int(roll * len(of))]
