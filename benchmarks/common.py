"""What all benchmarks share: the machine in words, medians with their spread, and one JSON object as the last line."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def machine() -> dict[str, Any]:
    """Where the figures were taken: they mean little without it, and ratios of one run more than figures of two."""
    return {
        "cpu": _first("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(int((_first("/proc/meminfo", "MemTotal") or "0").split()[0]) / 2**20, 1),
        "load": [round(load, 2) for load in os.getloadavg()],
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def _first(path: str, field: str) -> str:
    """The first value of a field in a file of `field : value` lines; empty when there is none."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), "")


def report(subject: Mapping[str, Any], samples: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Print, as the last line, what was measured: the median of every figure, and [smallest, largest] under `spread`."""
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
    """Four significant digits: more would be noise."""
    return float(f"{value:.4g}")
