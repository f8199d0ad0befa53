"""A whole run on the device with `grpo run`: Redis, dataprep, a trainer and a generator based on `transformers`."""

from __future__ import annotations

import json
import subprocess
import sys

from services.config import to_toml
from tests.gpu.bench import Bench, Figures
from tests.support.harness import save_model_folder, small_config

STEPS = 4


def whole_run(bench: Bench) -> Figures:
    """Train some steps and account for every ticket."""
    folder = bench.folder / "whole"
    folder.mkdir()
    save_model_folder(folder / "model")
    config = small_config(
        folder, None, "run.name=whole", f"run.steps={STEPS}", "generator.count=1", "checkpoint.every_steps=2",
        'generator.engine="tests.gpu.transformers_engine:TransformersEngine"', "sampling.max_tokens=8",
        "sync.backend=gloo",  # the engine has no NCCL, which a trainer with a GPU of its own would choose
        'api.token_file=""', 'redis.password_file=""', 'verifiers=[{kind="regex", pattern="[0-4]"}]',
    )  # fmt: skip
    path = folder / "whole.toml"
    path.write_text(to_toml(config))
    command = [sys.executable, "-m", "services.console", "run", str(path), "--no-screen"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-2000:]
    summary = json.loads((folder / "whole" / "summary.json").read_text())
    assert summary["steps"] == STEPS
    return {name: summary[name] for name in ("steps", "lost", "doubled", "max_lag")}
