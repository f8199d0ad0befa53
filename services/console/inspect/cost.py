"""Implements `grpo cost`: how a run's device time was spent, from its folder alone."""

from __future__ import annotations

from services.console.errors import EXIT_CONFIG, EXIT_OK, ConsoleError
from services.console.paths import existing
from services.console.printable import columns, print_json

HOUR_S = 3600.0


def cost(run: str, price: float, as_json: bool) -> int:
    """Print the account of a run, with `price` of a device-hour, 0: none."""
    from services.operations.cost import FILE, cost_of
    from services.runtime.atomic_folders import FolderError

    folder = existing(run)
    try:
        found = cost_of(folder.path)
    except FolderError as error:
        raise ConsoleError(str(error), EXIT_CONFIG) from None
    if found is None:
        raise ConsoleError(
            f"{folder.path} has no {FILE}, which the tracker writes; the tracker runs unless samples.keep is 0 and no "
            "tracker is configured",
            EXIT_CONFIG,
        )
    total = found.total
    if as_json:
        print_json({
            "device_seconds": found.spent, "total": total, "price_per_hour": price, "cost": total / HOUR_S * price,
            "trainer": found.trainer, "generator": found.generator, "pods": found.pods, "tokens": found.tokens,
            "solved_prompts": found.solved, "per": {what: total / count for what, count in found.yields.items()},
            "note": found.note,
        })  # fmt: skip
        return EXIT_OK
    rows = [("spent on", "device-hours", "share", *(("cost",) if price else ()))]
    for name, seconds in [*sorted(found.spent.items(), key=lambda one: -one[1]), ("total", total)]:
        share = f"{seconds / total:.1%}" if total else "–"
        rows.append((name, f"{seconds / HOUR_S:,.3f}", share, *((f"{_money(seconds, price)}",) if price else ())))
    print(columns(rows, right=(1, 2, 3)))
    print()
    for what, count in found.yields.items():
        seconds = total / count
        print(f"{what}: {_money(seconds, price) if price else f'{seconds / HOUR_S:,.4g} device-hours'}")
    if not found.tokens:
        print("generation time is not broken down by outcome, because there is no sample log (samples.keep)")
    if found.note:
        print(found.note)
    return EXIT_OK


def _money(seconds: float, price: float) -> str:
    return f"{seconds / HOUR_S * price:,.4g}"
