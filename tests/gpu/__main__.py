"""`python -m tests.gpu [--dry] [--json] [--out FOLDER]`: everything that one GPU can test, most valuable first.

Each stage runs in a separate process with a time limit. `results.json` in the output folder is written after every stage, so that
measurements survive a stop at any point. With `--resume`, only stages that it lacks or that failed are run. A stage begins only
if its time limit fits into `--limit-s`; the others are listed under `left`. Exits with code 1 if a stage failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.gpu.stages import STAGES, Stage

ROOT = Path(__file__).parents[2]
LAST_LINES = 12  # of a failed stage's output, kept in its figures
LOG_BYTES = 200_000  # of a stage's output, kept in logs.txt
SUMMARY = {"mfu_16k": ("step_16k", "mfu"), "loss_error": ("losses", "worst_error"), "nccl": ("collective", "nccl")}
"""Figures repeated in the summary: the name of their stage, or a prefix of several names, of which the largest figure counts."""


def run_stage(stage: Stage, folder: Path, log: Path, dry: bool) -> dict[str, Any]:
    """Run a stage in a separate process, whose other output goes to `log`. Return its figures, or `failure`."""
    given = [stage.function, str(stage.limit_s), str(folder), *(["--dry"] if dry else [])]
    command = [sys.executable, "-m", "tests.gpu.stage", *given]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))  # packages may be installed in a folder
    environ = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environ.pop("TORCH_COMPILE_DISABLE", None)  # `trainer.compile` needs it
    if dry:
        environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    started, figures = time.monotonic(), folder / f"{stage.name}.json"
    with (
        log.open("w") as errors,
        figures.open("w") as output,  # not a pipe, which would stay open as long as processes that the stage leaves behind
        subprocess.Popen(command, cwd=ROOT, env=environ, stdout=output, stderr=errors, start_new_session=True) as process,
    ):
        try:
            code = process.wait(stage.limit_s)
            how = f"exit code {code}" if code else ""
        except subprocess.TimeoutExpired:
            how = f"took longer than {stage.limit_s:.0f} s"
        finally:  # processes that the stage started must not keep the GPU from the next one
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    seconds, printed = round(time.monotonic() - started, 1), figures.read_text(errors="replace").splitlines()
    if how:
        lines = log.read_text(errors="replace").splitlines() + printed
        return {"failure": f"{how}: " + "\n".join(lines[-LAST_LINES:]), "seconds": seconds}
    return {**json.loads(printed[-1]), "seconds": seconds}


def earlier(results: Path, dry: bool) -> dict[str, dict[str, Any]]:
    """Return the figures of an earlier command of the same kind."""
    held = json.loads(results.read_text()) if results.exists() else {"dry": dry, "figures": {}}
    return held["figures"] if held["dry"] == dry else {}


def summary(found: dict[str, dict[str, Any]], dry: bool, left: list[str]) -> dict[str, Any]:
    """Return the last line of the output."""
    repeated = {name: _largest(found, *place) for name, place in SUMMARY.items()}
    failed = [name for name, figures in found.items() if "failure" in figures]
    return {
        "dry": dry, "stages": len(found), "failed": len(failed), "failed_stages": failed, "left": left, **repeated,
        "figures": found,
    }  # fmt: skip


def _largest(found: dict[str, dict[str, Any]], start: str, key: str) -> float | None:
    """Return the largest figure of the stages whose names begin with `start`."""
    values = [figures.get(key) for name, figures in found.items() if name.startswith(start)]
    return max((value for value in values if value is not None), default=None)


def deliver(out: Path, found: dict[str, dict[str, Any]], dry: bool, left: list[str]) -> dict[str, Any]:
    """Write `results.json` and `logs.txt`, and copy them and traces to the folder that `$OUT` names. Return the summary."""
    result = summary(found, dry, left)
    written = out / "results.new"
    written.write_text(json.dumps(result, indent=2))
    written.replace(out / "results.json")
    logs = [f"=== {log.stem}\n" + log.read_text(errors="replace")[-LOG_BYTES:] for log in sorted(out.glob("*.log"))]
    (out / "logs.txt").write_text("\n".join(logs))
    if (given := os.environ.get("OUT")) and Path(given).resolve() != out.resolve():
        for path in (out / "results.json", out / "logs.txt", *out.glob("*.json.gz")):
            shutil.copy(path, given)
    return result


def main() -> int:
    """Run the stages; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dry", action="store_true", help="toy sizes, on the CPU")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu", help="output folder")
    parser.add_argument("--only", nargs="*", default=[], help="names of stages")
    parser.add_argument("--resume", action="store_true", help="leave out stages that have succeeded, by the output folder")
    parser.add_argument("--limit-s", type=float, default=1800.0, help="seconds for all stages together")
    options = parser.parse_args()
    out, begun = options.out, time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    found = earlier(out / "results.json", options.dry) if options.resume else {}
    done = {name for name, figures in found.items() if "failure" not in figures}
    left: list[str] = []
    with tempfile.TemporaryDirectory(prefix="grpo-gpu-", ignore_cleanup_errors=True) as place:
        for stage in sorted(STAGES, key=lambda stage: stage.name in found):  # stages that failed earlier run last
            if (options.only and stage.name not in options.only) or stage.name in done:
                continue
            if begun + options.limit_s < time.monotonic() + stage.limit_s:
                left.append(stage.name)
                continue
            found.pop(stage.name, None)
            figures = found[stage.name] = run_stage(stage, Path(place), out / f"{stage.name}.log", options.dry)
            print(f"{stage.name:16} {json.dumps(figures)}", file=sys.stderr, flush=True)
            for trace in Path(place).glob("*.json.gz"):
                shutil.move(trace, out / trace.name)
            deliver(out, found, options.dry, left)
    result = deliver(out, found, options.dry, left)
    print(json.dumps(result, indent=2) if options.json else f"{len(found)} stages, {result['failed']} failed: {out}")
    return 1 if result["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
