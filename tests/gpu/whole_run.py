"""A whole run on the device with `grpo run`: Redis, dataprep, a trainer and a generator based on `transformers`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from services.config import to_toml
from tests.gpu.bench import Bench, Figures
from tests.support.harness import save_model_folder, small_config

STEPS = 4
LIMIT_S = 160.0  # for the run; the first kernels on a GPU take seconds to load
STOP_S = 20.0  # for its services to stop; their last lines tell what they were waiting for


def whole_run(bench: Bench) -> Figures:
    """Train a few steps and account for every ticket."""
    folder = bench.folder / "whole"
    folder.mkdir()
    save_model_folder(folder / "model")
    config = small_config(
        folder, None, "run.name=whole", f"run.steps={STEPS}", "generator.count=1", "checkpoint.every_steps=2",
        'generator.engine="tests.gpu.transformers_engine:TransformersEngine"', "sampling.max_tokens=8",
        "sync.backend=gloo",  # the engine has no NCCL, which a trainer with its own GPU would choose
        "fleet.ttl_s=60",  # the engine computes in the event loop, also while CUDA starts
        'api.token_file=""', 'redis.password_file=""', 'verifiers=[{kind="regex", pattern="[0-4]"}]',
    )  # fmt: skip
    path = folder / "whole.toml"
    path.write_text(to_toml(config))
    command = [sys.executable, "-m", "services.console.commands", "run", str(path), "--no-screen"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        try:
            output, _ = run.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            run.terminate()
            output, _ = run.communicate(timeout=STOP_S)
    assert run.returncode == 0, output[-2000:] + _last_lines(folder)
    summary = json.loads((folder / "whole" / "summary.json").read_text())
    assert summary["steps"] == STEPS
    return {name: summary[name] for name in ("steps", "lost", "doubled", "max_lag")}


def _last_lines(folder: Path) -> str:
    """Return the end of each service's log."""
    logs = sorted(folder.rglob("*.log"))
    return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-1500:]}" for log in logs)
