"""One side of the late join of benchmarks/weights, in its own process, like a generator that starts.

    python -m benchmarks.weights.late read|join FOLDER VERSION EXPECTED

Prints the seconds of a plain read of all files in FOLDER, or of an empty receiver that takes VERSION from them. Fails if the
receiver's tensors differ from those in the file EXPECTED. The files are first dropped from the page cache.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

from services.weights.deadline import Deadline
from services.weights.versions.mirror import WeightMirror
from services.weights.versions.reader import VersionReader

ROOT = Path(__file__).parent.parent.parent
USED_BYTES = 16 << 30


def seconds(side: str, folder: Path, version: int, expected: Path) -> float:
    """Measure one side in a fresh process; return the seconds."""
    words = [sys.executable, "-m", "benchmarks.weights.late", side, str(folder), str(version), str(expected)]
    return float(subprocess.run(words, check=True, capture_output=True, text=True, cwd=ROOT).stdout)


def use_memory() -> None:
    """Use half of the free memory, up to `USED_BYTES`, in a process that then ends."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    code = f"from services.weights.buckets import huge_pages; huge_pages({min(USED_BYTES, free // 2)})[::4096] = 1"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def _files(folder: Path) -> list[Path]:
    """Drop the files in a folder, which are synced, from the page cache, and return them."""
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in found:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return found


def main() -> None:
    """Measure one side."""
    side, folder, version, expected = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    files = _files(folder)
    began = time.perf_counter()
    if side == "read":
        for path in files:
            path.read_bytes()
        print(time.perf_counter() - began)
        return
    held = VersionReader(str(folder), WeightMirror()).take(Deadline(600), version)
    print(time.perf_counter() - began)
    right = load_file(expected)
    assert all(torch.equal(right[name], tensor) for name, tensor in held if name in right)


if __name__ == "__main__":
    main()
