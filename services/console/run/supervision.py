"""Decides whether to restart a dead service or to end the run. Pure: it maps exit codes and times to a decision.

Guarantees: if a restart may help, the service restarts after a growing delay. If it cannot help (configuration, Redis), the run
ends immediately. Several deaths in a row without progress also end the run, and fewer if they are all of the same error, so no
run crashes in an endless loop.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from services.console.errors import EXIT_CONFIG, EXIT_FAILED, EXIT_OK, EXIT_REDIS

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 8.0
LATER_S = 60.0  # delay before restarting a child that is not essential to the run
DEATHS_IN_A_ROW = 5  # enough to survive a passing fault, few enough to give up within a minute or two
ALIKE_AT_START, ALIKE = 2, 3  # deaths of the same error, before the service ever worked and later: it will not pass
LONG_LIFE_S = 60.0  # a service that lived longer did not die of its start


@dataclass(frozen=True)
class Start:
    """Restart the child after a pause."""

    pause_s: float


@dataclass(frozen=True)
class GiveUp:
    """End the run. `code` is the exit code of `grpo`."""

    reason: str
    code: int


@dataclass(frozen=True)
class Ended:
    """The child has ended and is not restarted."""


Decision = Start | GiveUp | Ended


@dataclass(frozen=True)
class Record:
    """A child's deaths: how many in a row, the step committed at the last one, and its cause without numbers."""

    deaths: int = 0
    committed_step: int = -1
    cause: str = ""
    alike: int = 0
    """How many in a row, since the last committed step, were of this cause."""


def decide(
    child: str,
    record: Record,
    codes: Sequence[int | None],
    *,
    lived_s: float,
    committed_step: int,
    over: bool,
    redis_served: bool,
    cause: str = "",
    worked: bool = True,
    drained: bool = False,
) -> tuple[Decision, Record]:
    """Decide what to do about a child some of whose pods have exited.

    `codes`: exit codes, None for a pod that still runs, negative for a signal. `over`: the run has finished, so nothing is
    restarted. `redis_served`: Redis is the run's own, or the console has already read the run from it. An exit because of Redis
    then does not mean a wrong address but a passing fault: Redis restarted or did not respond for a few seconds. `cause`: its
    error, if known. `worked`: it got beyond loading since it was started. `drained`: it exited because that was requested.
    """
    if over:
        return Ended(), record
    if final := verdicts(codes, redis_served):
        return GiveUp(f"{child} cannot run", final[0]), record
    if drained:
        return Start(FIRST_PAUSE_S), record
    stepped = committed_step > record.committed_step
    deaths = 1 if stepped or lived_s > LONG_LIFE_S else record.deaths + 1
    kind = "" if EXIT_REDIS in codes else re.sub(r"\d+", "#", cause)
    alike = record.alike + 1 if kind == record.cause and not stepped else 1
    record = Record(deaths, committed_step, kind, alike if kind else 0)
    if kind and alike >= (ALIKE if worked else ALIKE_AT_START):
        return GiveUp(f"{child} died of the same error {alike} times in a row", EXIT_FAILED), record
    if deaths > DEATHS_IN_A_ROW:
        return GiveUp(f"{child} died {deaths} times in a row without completing a step", EXIT_FAILED), record
    return Start(min(FIRST_PAUSE_S * 2 ** (deaths - 1), LONGEST_PAUSE_S)), record


def verdicts(codes: Sequence[int | None], redis_served: bool) -> list[int]:
    """Return the exit codes by which a service says that a restart would not help."""
    return [code for code in codes if code == EXIT_CONFIG or (code == EXIT_REDIS and not redis_served)]


def account(codes: Sequence[int | None], drained: bool = False) -> str:
    """Describe how a child ended: how the first of its pods that ended did. `drained` as of `decide`."""
    code = next(code for code in codes if code is not None)
    if code == EXIT_OK:
        return "drained and exited" if drained else "exited before the run finished"
    return f"was killed by signal {-code}" if code < 0 else f"failed with exit code {code}"
