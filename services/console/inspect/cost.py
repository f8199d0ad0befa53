"""Implements `grpo cost`: what a run's devices spent their time on, from its folder alone."""

from __future__ import annotations

from typing import Any

from services.console.errors import EXIT_CONFIG, EXIT_OK, ConsoleError
from services.console.inspect.compare import records_of
from services.console.paths import existing
from services.console.printable import columns, print_json

HOUR_S = 3600.0
TENTH = 10  # reward at begin and end: means over a tenth of the steps
REWARD = "reward/gen/mean"


def cost(run: str, price: float, as_json: bool) -> int:
    """Print the account of a run, with `price` of a device-hour, 0: none."""
    from services.operations import account
    from services.operations.account import by_outcome

    folder = existing(run)
    found = account.read(folder.path)
    if not found.pods:
        raise ConsoleError(
            f"{folder.path} has no {account.FILE}: the tracker keeps it, which runs unless samples.keep is 0 and no tracker is "
            "configured",
            EXIT_CONFIG,
        )
    tokens, solved = _tokens(folder.path)
    spent = {name: seconds for name, seconds in by_outcome(found, tokens).items() if seconds >= 0.005}
    total = sum(spent.values())
    rewards = [record[REWARD] for record in records_of(folder.metrics, "step").values() if record.get(REWARD) is not None]
    yields = _yields(tokens.get("trained", 0.0), solved, rewards)
    if as_json:
        print_json({
            "device_seconds": spent, "total": total, "price_per_hour": price, "cost": total / HOUR_S * price,
            "trainer": found.device_seconds("trainer"), "generator": found.device_seconds("generator"),
            "pods": {name: pod.seconds() | {"devices": pod.devices} for name, pod in found.pods.items()},
            "tokens": tokens, "solved_prompts": solved,
            "per": {what: total / count for what, count in yields.items()},
        })  # fmt: skip
        return EXIT_OK
    rows = [("spent on", "device-hours", "share", *(("cost",) if price else ()))]
    for name, seconds in [*sorted(spent.items(), key=lambda one: -one[1]), ("total", total)]:
        rows.append(
            (name, f"{seconds / HOUR_S:,.3f}", f"{seconds / total:.1%}", *((f"{_money(seconds, price)}",) if price else ()))
        )
    print(columns(rows, right=(1, 2, 3)))
    print()
    for what, count in yields.items():
        seconds = total / count
        print(f"{what}: {_money(seconds, price) if price else f'{seconds / HOUR_S:,.4g} device-hours'}")
    if not tokens:
        print("the seconds of generation are not divided by outcome: there is no sample log (samples.keep)")
    return EXIT_OK


def _tokens(path: Any) -> tuple[dict[str, float], int]:
    try:
        from services.operations.samples.outcomes import sampled_tokens
    except ImportError:
        return {}, 0
    found = sampled_tokens(path)
    return found.by_outcome, found.solved


def _yields(trained: float, solved: int, rewards: list[float]) -> dict[str, float]:
    """Return what the run has given, by what one of it is called; only what it has given any of."""
    tenth = max(1, len(rewards) // TENTH)
    gained = sum(rewards[-tenth:]) / tenth - sum(rewards[:tenth]) / tenth if len(rewards) > 1 else 0.0
    found = {"a million trained tokens": trained / 1e6, "a solved prompt": float(solved), "a point of mean reward gained": gained}
    return {what: count for what, count in found.items() if count > 0}


def _money(seconds: float, price: float) -> str:
    return f"{seconds / HOUR_S * price:,.4g}"
