"""`python -m tests.gpu [--dry] [--json] [--out FOLDER]`: everything that one GPU can test, in order of value.

Each stage runs in a separate process under a time limit. `results.json` in the output folder is written after every stage, so
that measurements survive a stop at any point. With `--resume`, stages that it has, and that did not fail, are not run again. Exit
code 1 if a stage failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.gpu.stages import STAGES, Stage

ROOT = Path(__file__).parents[2]
LAST_LINES = 12  # lines kept of a failed stage's output
SUMMARY = {"mfu_16k": ("step_16k", "mfu"), "loss_error": ("losses", "worst_error"), "nccl": ("collective", "nccl")}
"""Figures that the summary repeats: their stage and name."""


def run_stage(stage: Stage, folder: Path, dry: bool, left_s: float) -> dict[str, Any]:
    """Run a stage in a separate process. Return its figures, or `failure`."""
    command = [sys.executable, "-m", "tests.gpu.stage", stage.name, str(folder), *(["--dry"] if dry else [])]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))  # packages may lie in a folder
    environ = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environ.pop("TORCH_COMPILE_DISABLE", None)  # FlexAttention needs it
    if dry:
        environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    started, limit = time.monotonic(), min(stage.limit_s, left_s)
    with (folder / f"{stage.name}.log").open("w+") as log:
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=log, text=True, timeout=limit, check=False
            )
        except subprocess.TimeoutExpired:
            return {"failure": f"took longer than {limit:.0f} s", "seconds": round(limit, 1)}
        log.seek(0)
        said = (log.read() + done.stdout).splitlines()
    seconds = round(time.monotonic() - started, 1)
    if done.returncode:
        return {"failure": f"exit code {done.returncode}: " + "\n".join(said[-LAST_LINES:]), "seconds": seconds}
    return {**json.loads(done.stdout.splitlines()[-1]), "seconds": seconds}


def earlier(results: Path, dry: bool) -> dict[str, dict[str, Any]]:
    """Return the stages of an earlier command of the same kind that did not fail."""
    if not results.exists():
        return {}
    held = json.loads(results.read_text())
    return {name: figures for name, figures in held["figures"].items() if held["dry"] == dry and "failure" not in figures}


def summary(found: dict[str, dict[str, Any]], dry: bool) -> dict[str, Any]:
    """Return the last line of the output."""
    repeated = {name: found.get(stage, {}).get(key) for name, (stage, key) in SUMMARY.items()}
    failed = [name for name, figures in found.items() if "failure" in figures]
    return {"dry": dry, "stages": len(found), "failed": len(failed), "failed_stages": failed, **repeated, "figures": found}


def main() -> int:
    """Run the stages; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dry", action="store_true", help="toy sizes, on the CPU")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ROOT / "build" / "gpu")), help="output folder")
    parser.add_argument("--only", nargs="*", default=[], help="names of stages")
    parser.add_argument("--resume", action="store_true", help="keep the results in the output folder, except failures")
    parser.add_argument("--limit-s", type=float, default=1200.0, help="seconds for all stages together")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    results, begun = options.out / "results.json", time.monotonic()
    found = earlier(results, options.dry) if options.resume else {}
    with tempfile.TemporaryDirectory(prefix="grpo-gpu-") as place:
        for stage in STAGES:
            left_s = options.limit_s - (time.monotonic() - begun)
            if (options.only and stage.name not in options.only) or stage.name in found or left_s < 10:
                continue
            figures = found[stage.name] = run_stage(stage, Path(place), options.dry, left_s)
            print(f"{stage.name:16} {json.dumps(figures)}", file=sys.stderr, flush=True)
            written = results.with_suffix(".new")
            written.write_text(json.dumps(summary(found, options.dry), indent=2))
            written.replace(results)
    result = summary(found, options.dry)
    print(json.dumps(result, indent=2) if options.json else f"{len(found)} stages, {result['failed']} failed: {results}")
    return 1 if result["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
