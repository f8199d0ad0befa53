"""Whether recorded steps replay bit-equal, and whether the account of device time is complete, with and without faults.

    python -m benchmarks.replaying --json

Each run trains a tiny model on scripted completions, in another configuration: ranks, ZeRO stages, adapters, dtypes, replay. Some
steps of each are recorded while it runs, the last at a checkpoint, and every stage is replayed. `replay_equal` is the share of
bundles whose score, settle, pack and train stages all equal what was recorded. In the runs with faults, a generator or the
trainer is killed. `account_closes` is, for each run, the relative difference between the sum of the account and the
device-seconds measured from outside, from the kernel's start and end times of each pod's processes. `record_share` is the time
that the run's Redis spends on recording a step, over the time of the step; recording costs the run nothing else. `--account`
measures the account alone, in the runs with faults.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # `python benchmarks/replaying.py` from the repository's root
    sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.common import arguments, report, run
from services.config import load_resolved
from services.console.bundles.record import POLL_S
from services.console.run.redis_server import RedisServer
from services.operations.bundles.gathering import Judged, StepReader
from services.operations.cost import read_account
from services.store import Store
from tests.runs.test_run import write_run
from tests.support import flow
from tests.support.harness import save_model_folder

CONSOLE = (sys.executable, "-m", "services.console")
STAGES = ("score", "settle", "pack", "train")
RUNS: dict[str, tuple[str, ...]] = {
    "plain": ("trainer.deterministic=true",),
    "ranks": ("trainer.ranks=2", "trainer.zero_stage=1", "trainer.deterministic=false"),
    "sharded": ("trainer.ranks=2", "trainer.zero_stage=3", "trainer.deterministic=false", "model.dtype=bfloat16"),
    "adapters": ("lora.rank=4", "loss.kl_beta=0.1"),
    "replayed": ("replay.max_uses=2", "replay.sampler=prioritized", "replay.capacity=64", "trainer.mini_batches=2"),
}
KILLED = {"plain": "generator-0", "ranks": "trainer-0", "replayed": "generator-0"}
"""Run -> the pod that is killed after its third step."""
STEPS, LONG, EVERY = 12, 24, 4  # steps of a run, of one with faults, and between checkpoints
RECORDED = (2, 6, 9, 11, 15, 19)  # if the run has them; a step that ends before its recorder looks leaves no bundle
LOOK_S = 0.02
RECORDINGS = 50  # of the same step, to measure the time that Redis spends on them
FORKED_S = 2.0  # a new process may show its parent's command line for this long


class Outside:
    """Measures the device-seconds of a run by the kernel: from the start of a pod's first process to the end of its last."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.lives = folder, dict[str, list[float]]()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def _look(self) -> None:
        known = dict[int, str]()
        while not self._over.wait(LOOK_S):
            now = time.clock_gettime(time.CLOCK_BOOTTIME)
            for proc in Path("/proc").glob("[0-9]*"):
                pid = int(proc.name)
                began = 0.0 if known.get(pid) == "" else _started(proc)
                if began and (pid not in known):
                    pod = self._pod(proc)
                    if pod or now - began > FORKED_S:
                        known[pid] = pod
                if began and known.get(pid):
                    life = self.lives.setdefault(known[pid], [began, now])
                    life[0], life[1] = min(life[0], began), now

    def _pod(self, proc: Path) -> str:
        try:
            words = (proc / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            return ""
        kinds = ("services.generator", "services.trainer")
        if not any(word in kinds for word in words) or not any(str(self.folder) in word for word in words):
            return ""
        return words[words.index("--name") + 1] if "--name" in words else ""

    def end(self) -> dict[str, float]:
        """Stop looking and return the seconds of each pod."""
        self._over.set()
        self._thread.join()
        return {pod: end - began for pod, (began, end) in self.lives.items()}


def _started(proc: Path) -> float:
    try:
        fields = (proc / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return 0.0 if fields[0] == "Z" else int(fields[19]) / os.sysconf("SC_CLK_TCK")


def console(*words: str) -> dict[str, Any]:
    """Run a command of the console with --json."""
    done = subprocess.run([*CONSOLE, *words, "--json"], capture_output=True, text=True, check=False)
    return json.loads(done.stdout) if done.stdout.strip() else {"error": done.stderr.strip()}


def one_run(folder: Path, name: str, overrides: tuple[str, ...], recorded: tuple[int, ...], say: Any) -> dict[str, Any]:
    """Run one configuration, record its steps, and kill a pod if it is in `KILLED`; return the results."""
    steps = LONG if name in KILLED else STEPS
    recorded = tuple(step for step in recorded if step < steps)
    path = write_run(
        folder, name, f"run.steps={steps}", f"checkpoint.every_steps={EVERY}", "checkpoint.keep=20",
        "samples.keep=100000", "generator.count=1", "generator.engine_options.token_s=0.2", "filters.exclude_pass_rate=0",
        *overrides,
    )  # fmt: skip
    outside = Outside(folder / name)
    command = [*CONSOLE, "run", str(path), "--no-screen"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
    recorders = []
    while not (folder / name / "metrics.jsonl").exists() and process.poll() is None:
        time.sleep(0.1)
    bundles = [folder / f"{name}-{step}.bundle" for step in recorded]
    for step, out in zip(recorded, bundles, strict=True):
        words = [*CONSOLE, "record", str(step), str(folder / name), "--out", str(out), "--wait", "300"]
        if len(recorders) == 2:
            recorders[0].wait()  # two at a time
        recorders.append(subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
    if pod := KILLED.get(name):
        while _steps(folder / name) < 4 and process.poll() is None:
            time.sleep(0.1)
        kill(folder / name, pod)
    process.wait()
    for recorder in recorders:
        recorder.wait()
    seen = outside.end()
    found = read_account(folder / name)
    devices = {each.pod: each.devices for each in found.processes.values()}
    truth = sum(seconds * devices[pod] for pod, seconds in seen.items() if pod in devices)
    total = sum(found.device_seconds().values())
    records = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    results = {
        str(out.name): {stage: console("replay-step", str(out), "--stage", stage) for stage in STAGES}
        for out in bundles
        if out.exists()
    }
    say(f"{name}: exit {process.returncode}, account {total:.1f} s of {truth:.1f} s, {len(results)} bundles")
    say(f"{name}: unequal {unequal_of(results)}")
    return {
        "closes": abs(total - truth) / truth, "step_s": statistics.median(record["time/step_s"] for record in records),
        "results": results, "sizes": [out.stat().st_size for out in bundles if out.exists()],
    }  # fmt: skip


def unequal_of(results: dict[str, Any]) -> dict[str, Any]:
    """Return the stages that did not replay equal, by bundle, with the first difference or the error."""
    found = dict[str, Any]()
    for bundle, stages in results.items():
        if different := {stage: answer for stage, answer in stages.items() if answer.get("different", 1)}:
            found[bundle] = {stage: answer.get("first") or answer.get("error") for stage, answer in different.items()}
    return found


def _steps(folder: Path) -> int:
    return len((folder / "metrics.jsonl").read_text().splitlines())


def kill(folder: Path, pod: str) -> None:
    """Kill a pod's process."""
    for proc in Path("/proc").glob("[0-9]*"):
        try:
            words = (proc / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if pod in words and "--name" in words and any(str(folder) in word for word in words):
            os.kill(int(proc.name), signal.SIGKILL)


async def recorder_s(folder: Path, groups: int, step_s: float) -> float:
    """Return Redis' seconds for recording a step of `groups` groups: waiting for it, reading it, waiting for its end."""
    server = RedisServer(folder)
    server.start()
    store = await Store.connect(server.url, "recorder", server.password)
    try:
        team = await flow.start(store, slots=groups)
        assert await flow.issue(store, team, groups) == groups
        claims = await flow.claim(store, "g", groups)
        for one in claims:
            assert await flow.submit(store, "g", one)
        await flow.settle(store, team)
        plan, ranks = flow.plan(0, [one.ticket_id for one in claims], [one.payload for one in claims])
        await store.steps.prepare(team.leader, plan, ranks, 0, [1.0] * groups)
        await store.client.execute_command("CONFIG", "RESETSTAT")
        for _ in range(RECORDINGS):
            reader = StepReader(store, lambda *_: Judged("", ""))
            await reader.read_ahead(0, 0, 1)
            await reader.gather(0, 0)
            for _ in range(round(step_s / POLL_S)):
                await store.run.state()
        stats = await store.client.info("commandstats")
        return sum(each["usec"] for name, each in stats.items() if not name.startswith("cmdstat_config")) / RECORDINGS / 1e6
    finally:
        await store.close()
        server.stop()


async def measure(options: argparse.Namespace, folder: Path) -> object:
    """Run all configurations one after another, and report."""
    say = (lambda text: None) if options.json else print
    save_model_folder(folder / "model")
    chosen = {name: RUNS[name] for name in (options.only.split(",") if options.only else KILLED if options.account else RUNS)}
    recorded = () if options.account else RECORDED
    found = {name: one_run(folder, name, overrides, recorded, say) for name, overrides in chosen.items()}
    shares = list[float]()
    for name, each in found.items():
        groups = load_resolved(folder / name / "config.toml").admission.prompts_per_step
        shares.append(await recorder_s(folder / f"{name}-recorder", groups, each["step_s"]) / each["step_s"])
    total = sum(len(each["results"]) for each in found.values())
    unequal = {bundle: why for each in found.values() for bundle, why in unequal_of(each["results"]).items()}
    equal = total - len(unequal)
    closes = [each["closes"] for each in found.values()]
    replayed = {"bundles": total, "replay_equal": equal / max(1, total), "unequal": unequal}
    return report(
        {"configurations": len(found), "account_closes_worst": max(closes), **({} if options.account else replayed)},
        {
            "account_closes": closes, "record_share": shares, "step_s": [each["step_s"] for each in found.values()],
            **({} if options.account else {"bundle_bytes": [size for each in found.values() for size in each["sizes"]]}),
        },
    )  # fmt: skip


def main() -> int:
    """Parse the command line and measure."""
    parser = arguments(__doc__)
    parser.add_argument("--account", action="store_true", help="only the account, on the runs with faults")
    parser.add_argument("--only", default="", help=f"configurations to run, separated by commas: {', '.join(RUNS)}")
    return run(measure, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
