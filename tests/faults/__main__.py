"""`python -m tests.faults`: break real runs at random and audit them.

Exits with code 1, the first violation and its seed, or with 2 if there is no result because a run never became steady.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shlex
import signal
import sys
import tempfile
import time
from math import inf
from pathlib import Path

from services.config import load
from tests.faults.campaign import Outcome, campaign
from tests.faults.kinds import chosen, sequence
from tests.faults.mutants import MUTANTS, ROOT, copy_code
from tests.faults.report import result, table
from tests.faults.run_under_test import PROFILES, Setting
from tests.support.preloading import starter


def main(argv: list[str] | None = None) -> int:
    """Run a campaign; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--faults", type=int, default=20, help="how many to apply")
    parser.add_argument("--seed", type=int, default=0, help="of the sequence of faults")
    parser.add_argument("--kinds", default="", help="comma-separated kinds or verbs; default: all")
    parser.add_argument(
        "--profile",
        choices=PROFILES,
        default="fifo",
        help="kind of run: replay fifo or prioritized, two ranks, rollouts of several turns, two ranks with mini-batches, many "
        "groups without a gradient and evaluation rounds, or prompts that fail",
    )
    parser.add_argument("--engine", choices=("scripted", "vllm"), default="scripted")
    parser.add_argument("--appendfsync", choices=("always", "everysec"), default="always")
    parser.add_argument("--mutant", choices=MUTANTS, default="", help="run code in which this guard is removed")
    parser.add_argument(
        "--in-place", action="store_true", help="run the tree itself and no copy of it: nobody may change it meanwhile"
    )
    parser.add_argument(
        "--preloaded", action="store_true", help="fork the run's processes with their libraries imported; needs --in-place"
    )
    parser.add_argument("--steps", type=int, default=150, help="of each run; faults that are left go to the next")
    parser.add_argument("--generators", type=int, default=3)
    parser.add_argument("--token-s", type=float, default=0.06, help="seconds the scripted engine takes for a token")
    parser.add_argument("--minutes", type=float, default=inf, help="no fault comes later, the last run comes to its end")
    parser.add_argument("--folder", type=Path, help="keep everything here; default: a temporary folder")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    options = parser.parse_args(argv)
    if options.in_place and options.mutant:
        parser.error("--mutant changes the code, and --in-place runs the tree itself")
    if options.preloaded and not options.in_place:
        parser.error("--preloaded forks what has imported the tree itself: add --in-place")

    folder = options.folder or Path(tempfile.mkdtemp(prefix="faults-"))
    code = ROOT if options.in_place else folder / "code"
    if not options.in_place:
        copy_code(code, options.mutant)
    setting = Setting(
        folder.resolve(), code.resolve(), options.profile, options.engine, options.steps, options.generators, options.token_s,
        options.appendfsync,
    )  # fmt: skip
    with contextlib.redirect_stdout(sys.stderr):  # what libraries print on import is not part of the result
        config = load(setting.write("shape"), environ={})
    shape = setting.shape(config)
    try:
        kinds = chosen(options.kinds, shape)
    except ValueError as error:
        parser.error(str(error))
    started = time.monotonic()

    def tell(text: str) -> None:
        print(f"{time.monotonic() - started:7.1f} {text}", file=sys.stderr, flush=True)

    if options.preloaded:
        starter.start("heavy")
    outcome, faults = Outcome(), sequence(options.seed, options.faults, kinds, shape)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # either signal stops everything
    try:
        asyncio.run(campaign(setting, faults, tell, outcome, 60 * options.minutes))
    except KeyboardInterrupt:
        outcome.violations.append("interrupted: the last run is not judged")
    finally:
        if options.preloaded:
            starter.stop()
    facts = {name: getattr(options, name) for name in ("seed", "profile", "engine", "appendfsync", "mutant")}
    found = result(outcome, **facts, kinds=list(kinds))
    print(json.dumps(found, indent=2) if options.json else table(found), flush=True)
    if outcome.violations:
        again = shlex.join(["python", "-m", "tests.faults", *(argv if argv is not None else sys.argv[1:])])
        print(f"violated: {outcome.violations[0]} (seed {options.seed}; logs in {folder}; again: {again})", file=sys.stderr)
        return 1
    if outcome.inconclusive:
        print(f"inconclusive: {outcome.inconclusive} (logs in {folder})", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
