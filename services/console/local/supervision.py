"""When a dead service is started again, and when the run is given up. Pure: codes and times come in, a decision goes out.

Guarantees: a death that a restart may mend is followed by a start after a growing pause; one that it cannot (configuration,
Redis) ends the run at once; deaths in a row without progress end it too, so no run crashes in a circle for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.console.errors import EXIT_CONFIG, EXIT_FAILED, EXIT_OK, EXIT_REDIS

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 8.0
LATER_S = 60.0  # until a child is tried again that the run can do without
DEATHS_IN_A_ROW = 5  # enough for a passing fault, few enough to tell within a minute or two
FINAL = (EXIT_CONFIG, EXIT_REDIS)  # a service that ends with these says that a restart would not help
LONG_LIFE_S = 60.0  # who lived so long was not killed by its start


@dataclass(frozen=True)
class Start:
    """Start the child again after a pause."""

    pause_s: float


@dataclass(frozen=True)
class GiveUp:
    """End the run; `code` is the exit code of `grpo`."""

    reason: str
    code: int


@dataclass(frozen=True)
class Ended:
    """The child has come to its end and stays there."""


Decision = Start | GiveUp | Ended


@dataclass(frozen=True)
class Record:
    """What is remembered of a child's deaths: how many in a row, and the step committed at the last of them."""

    deaths: int = 0
    committed_step: int = -1


def decide(
    child: str,
    record: Record,
    codes: Sequence[int | None],
    *,
    lived_s: float,
    committed_step: int,
    over: bool,
    redis_served: bool,
) -> tuple[Decision, Record]:
    """What to do about a child some of whose pods ended.

    `codes`: exit codes, None for a pod that still ran, negative for a signal. `over`: the run is finished, so nobody is
    started again. `redis_served`: this Redis is our own, or has shown the console the run, so that an exit for want of it is no
    verdict on its address but a passing fault: it was restarted, or did not answer for a few seconds.
    """
    if over:
        return Ended(), record
    verdicts = [code for code in codes if code == EXIT_CONFIG or (code == EXIT_REDIS and not redis_served)]
    if verdicts:
        return GiveUp(f"{child} cannot run", verdicts[0]), record
    progressed = committed_step > record.committed_step or lived_s > LONG_LIFE_S
    deaths = 1 if progressed else record.deaths + 1
    record = Record(deaths, committed_step)
    if deaths > DEATHS_IN_A_ROW:
        return GiveUp(f"{child} died {deaths} times in a row without a step in between", EXIT_FAILED), record
    return Start(min(FIRST_PAUSE_S * 2 ** (deaths - 1), LONGEST_PAUSE_S)), record


def account(codes: Sequence[int | None]) -> str:
    """How a child's pods ended, in words: of a child of many, the first that did."""
    code = next(code for code in codes if code is not None)
    if code == EXIT_OK:
        return "ended before the run did"
    return f"was killed by signal {-code}" if code < 0 else f"failed with exit code {code}"
