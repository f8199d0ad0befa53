"""`python -m tests.mutants`: remove each guard of the Redis Functions in turn. Exits with code 1 if no test notices one.

It takes minutes; test_mutants.py runs a small part of it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

from tests.mutants.campaign import campaign
from tests.mutants.explained import EXPLAINED
from tests.mutants.guards import guards


def main() -> int:
    """Run the campaign; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--only", default="", help="only guards whose name contains this")
    parser.add_argument("--skip", type=int, default=0, help="guards to leave out at the start: those of an earlier campaign")
    parser.add_argument("--workers", type=int, default=2, help="guards tried at the same time")
    options = parser.parse_args()
    started = time.monotonic()

    def tell(text: str) -> None:
        print(f"{time.monotonic() - started:7.1f} {text}", file=sys.stderr, flush=True)

    chosen = [guard for guard in guards() if options.only in guard.name][options.skip :]
    found = campaign(chosen, options.workers, tell)
    stale = sorted(EXPLAINED.keys() - {guard.name for guard in guards()})
    result = {
        "guards": found.guards, "killed": len(found.killed), "survivors": found.survivors,
        "survivors_unexplained": len(found.unexplained), "explained_but_gone": stale,
    }  # fmt: skip
    print(json.dumps(result, indent=2) if options.json else f"{len(found.killed)} of {found.guards} guards are noticed")
    for name in found.unexplained:
        print(f"nothing notices that this guard is gone: {name}", file=sys.stderr)
    return 1 if found.unexplained or stale else 0


if __name__ == "__main__":
    sys.exit(main())
