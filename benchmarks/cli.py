"""CPU time of the `grpo` commands that need no torch, each in its own process.

    python -m benchmarks.cli --json

Every command is called several times beside a run whose Redis answers; `stop` is called once. The figures are the CPU time of the
process and of the children that it waited for. `cpu_ms_p90` is the 90th percentile over commands, the median of all rounds. Left
out are `run`, `web` and `smoke`, which run until they are stopped or something happens; `doctor` and `export`, which load torch;
and `fork`, `restore` and `drain`, which need a run that trains. The floor is a Python process that imports only the libraries
that every command imports. Modules are compiled beforehand, as in an installed package. The last line is one JSON
object.
"""

from __future__ import annotations

import asyncio
import compileall
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":  # `python benchmarks/cli.py` from the repository's root
    sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.common import arguments, report
from services.config import digest
from services.console.run.folder import RunFolder, resolve
from services.console.run.redis_server import RedisServer
from services.operations.cost import Account, ProcessTime, write_account
from services.protocol.messages import PodStatus
from services.store import Store
from tests.newcomer.world import make_model
from tests.operations.samples.made import made_row, write_log
from tests.support.harness import small_config

ROOT = Path(__file__).parent.parent
STAYS_S = 3600.0
VERBS = {
    "help": "--help",
    "run --help": "run --help",
    "version": "version",
    "init": "init fresh-{n}.toml --model model --data data.jsonl",
    "ls": "ls .",
    "logs": "logs small",
    "status": "status small",
    "compare": "compare small small",
    "cost": "cost small",
    "samples": "samples small",
    "audit": "audit small",
    "pause": "pause small",
    "resume": "resume small",
    "scale": "scale 2 small",
    "checkpoint": "checkpoint small",
    "checkpoints": "checkpoints small",
    "inspect buffer": "inspect buffer small",
    "inspect ledger": "inspect ledger small",
    "inspect deadletter": "inspect deadletter small",
    "inspect sync": "inspect sync small",
    "config": "config run.toml",
    "config --explain": "config --explain",
    "score": "score run.toml",
    "acl": "acl small --users users",
    "stop": "stop small --yes",
}
"""The commands to measure, in an order in which each works after the previous ones."""
FLOOR = "import httpx, pydantic, redis.asyncio, rich.console, typer"


async def begin(folder: Path, server: RedisServer) -> None:
    """Create a run with a pod and a step in its Redis, and its folder."""
    make_model(folder / "model")
    config = small_config(folder, server, f"fleet.ttl_s={STAYS_S}")
    run = RunFolder.of(config)
    config = resolve(config, run, server.url, str(folder / "password"))
    run.write(config)
    run.metrics.write_text('{"step": 0, "reward/train/mean": 0.5}\n')
    (run.logs / "trainer-0.log").write_text("a line\n" * 100)
    write_account(run.path, Account({"trainer-0:b": ProcessTime("trainer-0", "trainer", 1, 60.0, {"training": 60.0})}))
    write_log(run.path / "samples", [made_row(number) for number in range(40)])
    store = await Store.connect(server.url, config.run.name, server.password)
    await store.run.create(digest(config), "data", config.run.steps, config.slots)
    await store.fleet.beat(PodStatus("trainer", "trainer-0", "b", "here", os.getpid(), "", "training", 0, 0, {}), STAYS_S)
    await store.monitor.record({"step": 0.0, "reward/train/mean": 0.5})
    await store.close()


def cpu_ms(words: str, folder: Path) -> float:
    """Return the CPU time of a command. Raises `RuntimeError` if it fails."""
    return _cpu_ms(["-m", "services.console.commands", *words.split()], folder)


def _cpu_ms(words: Sequence[str], folder: Path) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)} exited with {done.returncode}: {done.stderr.strip()}")
    return 1000 * (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def main() -> int:
    """Measure every command."""
    parser = arguments(__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="calls of each command")
    options = parser.parse_args()
    taken: dict[str, list[float]] = {}
    compileall.compile_dir(str(ROOT / "services"), quiet=1)
    with tempfile.TemporaryDirectory(prefix="grpo-cli-") as place:
        folder = Path(place)
        server = RedisServer(folder / "redis")
        server.start()
        try:
            asyncio.run(begin(folder, server))
            (folder / "runs").symlink_to(".")  # where names of runs are looked up
            floor = [_cpu_ms(["-c", FLOOR], folder) for _ in range(options.repeats)]
            for verb, words in VERBS.items():
                taken[verb] = [cpu_ms(words.format(n=n), folder) for n in range(1 if verb == "stop" else options.repeats)]
                if not options.json:
                    print(f"{verb:20} {statistics.median(taken[verb]):6.0f} ms", flush=True)
        finally:
            server.stop()
    calls = [sorted(values[min(n, len(values) - 1)] for values in taken.values()) for n in range(options.repeats)]
    over = {
        "cpu_ms_p90": [statistics.quantiles(each, n=10, method="inclusive")[-1] for each in calls],
        "cpu_ms_p50": [statistics.median(each) for each in calls],
        "floor_ms": floor,
    }
    report({"benchmark": "cli", "verbs": len(taken)}, over | {f"{verb}_ms": values for verb, values in taken.items()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
