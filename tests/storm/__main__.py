"""`python -m tests.storm --kills 1000`: kill pods at random and count the effects.

Exits with code 1 if anything was lost, duplicated, run or sampled twice, or leaked.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path

from tests.storm.kills import storm
from tests.support.preloading import starter


def main(argv: list[str] | None = None) -> int:
    """Run the storm; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.storm", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    starter.start("light")
    folder = Path(tempfile.mkdtemp(prefix="storm-")) / "run"
    try:
        found = asyncio.run(storm(folder, options.kills, options.seed))
    finally:
        starter.stop()
    facts = {"kills": dict(found.kills), "turns": found.turns, "groups": found.groups, "seconds": round(found.seconds, 1)}
    print(json.dumps({**facts, **found.harm, "faults": found.faults[:20]}), flush=True)
    if any(found.harm.values()) or found.faults:
        print(f"logs in {folder}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
