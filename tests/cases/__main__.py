"""`python -m tests.cases FOLDER [--json]`: try every case of a folder. Exits with code 1 unless all are right.

`--only TEXT` tries those whose kind or id contains it. Without `--json` each failing case is printed with what is wanted and
what is found.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from tests.cases.runner import Outcome, outcomes, summary


def main() -> int:
    """Try the cases; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.cases", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder of *.jsonl files")
    parser.add_argument("--json", action="store_true", help="print the counts as JSON")
    parser.add_argument("--only", default="", help="only cases whose kind or id contains this")
    options = parser.parse_args()
    found = [outcome for outcome in outcomes(options.folder, options.only) if options.json or _told(outcome)]
    counts = summary(found)
    if options.json:
        print(json.dumps(counts, indent=2))
    else:
        print(f"{counts['right']} of {counts['cases']} cases are right")
    return 0 if counts["right"] == counts["cases"] else 1


def _told(outcome: Outcome) -> bool:
    """Print a failing case; return True."""
    if not outcome.right:
        case = outcome.case
        given = {name: value for name, value in case.items() if name not in ("id", "kind", "right", "why", "today", "fails")}
        print(f"{case['id']} ({case['kind']}): {json.dumps(given, ensure_ascii=False)[:400]}")
        print(f"    wanted {case['right']!r}\n    found  {outcome.found!r}", flush=True)
    return True


if __name__ == "__main__":
    sys.exit(main())
