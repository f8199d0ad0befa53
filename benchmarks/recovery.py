"""Recovery: from a kill -9 to a steady run, for each kind of process.

    python benchmarks/recovery.py --json

`python -m tests.faults` (docs/faults.md) kills each kind of process `--each` times in a real run with scripted engines:
generator, leading dataprep (it has a standby), trainer, Redis, and the `grpo run` command, which takes all others with it and is
rerun. `<kind>.recovery_s` is the time until every pod has sent a heartbeat, what was killed is a new process, and another step is
committed. The run then finishes and is audited. `astray` counts tickets lost, doubled, skipped, leaked or dropped. If the final
weights are not bit-identical to those of a run without faults, the benchmark fails. The last line is one JSON object.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import count
from pathlib import Path

if __name__ == "__main__":  # `python benchmarks/recovery.py` from the repository's root
    sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.common import arguments, report
from services.runtime.process_tools import die_with_parent
from tests.faults.kinds import Shape, chosen, sequence

ROOT = Path(__file__).parent.parent
ASTRAY = ("lost", "doubled", "skipped", "leaked", "dropped")


def seed_for(kinds: Sequence[str], faults: int, shape: Shape) -> int:
    """Return the first seed whose faults each have their own recovery, none hurried, and never hit the standby dataprep."""
    for seed in count():
        found = list(sequence(seed, faults, kinds, shape))
        if not any(fault.hurried or fault.victim == "standby" for fault in found):
            return seed
    raise AssertionError("unreachable")


def main() -> int:
    """Parse the command line and run."""
    parser = arguments(__doc__)
    parser.add_argument("--each", type=int, default=2, help="faults of each kind")
    parser.add_argument("--generators", type=int, default=2)
    parser.add_argument("--steps", type=int, default=70, help="steps of a run; remaining faults go to another run")
    options = parser.parse_args()
    shape = Shape(options.generators, 1)
    kinds = chosen("kill", shape)
    faults = options.each * len(kinds)
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "tests.faults", "--json", "--kinds", "kill", "--faults", str(faults),
            "--seed", str(seed_for(kinds, faults, shape)), "--generators", str(options.generators), "--steps", str(options.steps),
            "--folder", folder,
        ]  # fmt: skip
        done = subprocess.run(
            command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if options.json else None,
            text=True,
            check=False,
            preexec_fn=die_with_parent,
        )
    if done.returncode:
        raise SystemExit((done.stderr or done.stdout).strip().splitlines()[-1])
    found = json.loads(done.stdout)
    samples = {f"{kind.partition('-')[2]}.recovery_s": of["all_s"] for kind, of in found["recovery_s"].items()}
    samples["astray"] = [sum(found[name] for name in ASTRAY)]
    report({"benchmark": "recovery", "runs": found["runs"], "steps": found["steps"], "audits": found["audits"]}, samples)
    return 0


if __name__ == "__main__":
    sys.exit(main())
