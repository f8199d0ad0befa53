"""`python -m tests.sync_faults`: hit a member in every weight-sync round.

Exits with code 1, the violation and its seed.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
import tempfile
import time
from pathlib import Path

from services.runtime import logs
from tests.sync_faults.faults import NEED_NETWORKS, chosen, sequence
from tests.sync_faults.network import UNSHARE, leave_network, permitted

INSIDE = "--inside"


def main(argv: list[str]) -> int:
    """Run a campaign; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.sync_faults", description=__doc__)
    parser.add_argument("--rounds", type=int, default=10, help="rounds in which a member is hit; those in between are extra")
    parser.add_argument("--seed", type=int, default=0, help="of the sequence of faults")
    parser.add_argument("--kinds", default="", help="comma-separated kinds or verbs; default: all that can be done here")
    parser.add_argument("--members", type=int, default=4)
    parser.add_argument("--deadline-s", type=float, default=3.0, help="sync.deadline_s")
    parser.add_argument("--backend", choices=("gloo", "store"), default="gloo", help="sync.backend; a store is a folder")
    parser.add_argument("--folder", type=Path, help="keep everything here; default: a temporary folder")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument(INSIDE, action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    networks = options.inside or permitted()
    if networks and not options.inside:
        if os.geteuid() != 0:
            os.execvp(UNSHARE[0], [*UNSHARE, sys.executable, "-m", "tests.sync_faults", INSIDE, *argv])
        leave_network()
    if not networks:
        print(f"no networks can be made here: without {', '.join(NEED_NETWORKS)}", file=sys.stderr)
    names = [f"generator-{i}" for i in range(options.members)]
    try:
        kinds = chosen(options.kinds, networks)
    except ValueError as error:
        parser.error(str(error))

    from tests.sync_faults.campaign import Outcome, open_campaign
    from tests.sync_faults.report import result, table

    folder = (options.folder or Path(tempfile.mkdtemp(prefix="sync-faults-"))).resolve()
    logs.configure("sync-faults", "trainer")
    started = time.monotonic()

    def tell(text: str) -> None:
        print(f"{time.monotonic() - started:7.1f} {text}", file=sys.stderr, flush=True)

    outcome = Outcome()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # either signal stops everything
    try:
        way = (f"sync.backend={options.backend}",)
        if options.backend == "store":
            way = (*way, f"sync.folder={folder / 'versions'}")
        with open_campaign(folder, names, networks, options.deadline_s, outcome, way) as campaign:
            campaign.run(sequence(options.seed, options.rounds, kinds, names), tell)
    except KeyboardInterrupt:
        outcome.violations.append("interrupted")
    found = result(outcome, seed=options.seed, members=options.members, deadline_s=options.deadline_s)
    found["wall_s"] = round(time.monotonic() - started, 1)
    print(json.dumps(found, indent=2) if options.json else table(found), flush=True)
    if outcome.violations:
        again = shlex.join(["python", "-m", "tests.sync_faults", *(given for given in argv if given != INSIDE)])
        print(f"violated: {outcome.violations[0]} (logs in {folder}; again: {again})", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
