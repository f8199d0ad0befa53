"""`python -m tests.newcomer`: make every mistake and check its message, then go from an empty folder to a learning curve.

The exit code is 1 if a mistake is not found before anything starts, or if its message lacks the key, location, value or remedy.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from tests.newcomer.journey import travel
from tests.newcomer.mistakes import figures, survey


def main(argv: list[str] | None = None) -> int:
    """Run the survey and the journey and print both; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.newcomer", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one line of JSON at the end")
    parser.add_argument("--installed", action="store_true", help="use this environment instead of installing one")
    parser.add_argument("--no-journey", action="store_true", help="only make the mistakes")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="only these mistakes")
    given = parser.parse_args(argv)
    answers = survey(given.only)
    for one in answers:
        if not one.found or one.unnamed:
            lacks = f"does not name its {', '.join(one.unnamed)}" if one.found else "was not found before it was started"
            print(f"{one.mistake.name} {lacks}:\n  {one.output.strip()[-1500:]}", file=sys.stderr)
    result = figures(answers)
    if not given.no_journey:
        with tempfile.TemporaryDirectory(prefix="grpo-journey-") as place:
            journey = travel(Path(place), install=not given.installed)
        result |= {"minutes_to_curve": round(journey.minutes, 2), "launches": journey.launches, "curve_steps": journey.curve}
        result |= {f"{what.replace(' ', '_')}_s": seconds for what, seconds in journey.seconds.items()}
    print(json.dumps(result) if given.json else "\n".join(f"{name:18} {value}" for name, value in result.items()))
    return 0 if result["mistakes"] == result["found"] == result["named"] else 1


if __name__ == "__main__":
    sys.exit(main())
