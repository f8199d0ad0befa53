"""One side of the late join of benchmarks/weights, in a process of its own, as a generator that starts is one.

    python -m benchmarks.weights.late read|join FOLDER VERSION EXPECTED

Prints the seconds of a plain read of all files in FOLDER, or of an empty receiver that takes VERSION from them, and fails if the
receiver's tensors are not those of the file EXPECTED. The cache of the disk is dropped first.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

from services.weights.collective import Deadline
from services.weights.versions.mirror import WeightMirror
from services.weights.versions.reader import VersionReader

ROOT = Path(__file__).parent.parent.parent
USED_BYTES = 16 << 30


def seconds(side: str, folder: Path, version: int, expected: Path) -> float:
    """Measure a side in a process that has done nothing else."""
    words = [sys.executable, "-m", "benchmarks.weights.late", side, str(folder), str(version), str(expected)]
    return float(subprocess.run(words, check=True, capture_output=True, text=True, cwd=ROOT).stdout)


def use_memory() -> None:
    """Use most of the memory that is free, up to `USED_BYTES`, in a process that ends."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    code = f"from services.weights.collective import huge_pages; huge_pages({min(USED_BYTES, free // 2)})[::4096] = 1"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def _files(folder: Path) -> list[Path]:
    """Have the next read of the files in a folder come from the disk, and return them; they were synced."""
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
