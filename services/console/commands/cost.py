"""The command `grpo cost`: how a run's device time was spent, from its folder alone."""

from __future__ import annotations

from typing import Annotated

import typer

from services.console.display.text import show, table
from services.console.errors import EXIT_CONFIG, EXIT_OK, ConsoleError
from services.console.options import Json, Run
from services.console.paths import existing
from services.console.printable import print_json
from services.operations.cost import FILE, cost_of
from services.runtime.atomic_folders import FolderError

HOUR_S = 3600.0


def cost(
    run: Run = "",
    price: Annotated[float, typer.Option(min=0, help="Price of a device-hour, to print costs.")] = 0.0,
    as_json: Json = False,
) -> int:
    """Show how a run's device time was spent.

    Time is divided by outcome: trained, filtered, stale, idle, loading, syncing and more. The command reads the run's folder and
    needs no server. A device is a GPU, or on a machine without GPUs a process.
    """
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
        print_json(
            {
                "device_seconds": found.spent,
                "total": total,
                "price_per_hour": price,
                "cost": total / HOUR_S * price,
                "trainer": found.trainer,
                "generator": found.generator,
                "pods": found.pods,
                "tokens": found.tokens,
                "solved_prompts": found.solved,
                "per": {what: total / count for what, count in found.yields.items()},
                "note": found.note,
            }
        )
        return EXIT_OK
    numbers = ("device-hours", "share", *(("cost",) if price else ()))
    rows = table("spent on", *numbers, right=numbers)
    for name, seconds in [*sorted(found.spent.items(), key=lambda one: -one[1]), ("total", total)]:
        share = f"{seconds / total:.1%}" if total else "–"
        rows.add_row(name, f"{seconds / HOUR_S:,.3f}", share, *((_money(seconds, price),) if price else ()))
    show(rows, "")
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
