"""Reverb's side of benchmarks/replay.py: install dm-reverb, find its fastest settings, and have its process measure."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

Way = TypeVar("Way")

REVERB = "dm-reverb[tensorflow]==0.14.*"
PEER = Path(__file__).parent.parent.parent / "build" / "reverb"
BATCH = 64  # groups per draw
INSERTS = [("writer", 64), ("writer", 256), ("trajectory_writer", 64), ("trajectory_writer", 256)]
EACH_INSERTS = [("insert", 1), ("insert", 16)]
EACH_SAMPLES = [("client", 1, 64), ("one_by_one", 1, 64), ("one_by_one", 2, 64), ("one_by_one", 4, 64)]
SAMPLES = [("batches", 1, 64), ("batches", 2, 64), ("batches", 2, 256), ("batches", 4, 64)]
DRAWS = ["client", "batches"]


class Reverb:
    """Reverb's side, in a separate process (benchmarks/against_reverb/peer.py)."""

    def __init__(self) -> None:
        self._log = PEER.with_name("reverb.log")
        program = [str(_peer_python()), str(Path(__file__).with_name("peer.py"))]
        with self._log.open("w") as errors:
            self._process = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True)
        self.settings: dict[str, dict[str, str]] = {}  # payload size -> the fastest settings
        self._best: dict[str, tuple[Any, ...]] = {}

    def ask(self, do: str, **request: Any) -> Any:
        """Send a request and return its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": do, **request}) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"Reverb's client exited during {do!r}: see {self._log}")
        return json.loads(answer)

    def close(self) -> None:
        """Stop client and server."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def tune(self, size: int, payloads: Sequence[bytes], folder: Path) -> None:
        """Hand over the payloads, and find the fastest way to do each operation with them."""
        folder.mkdir()
        for i, payload in enumerate(payloads):
            (folder / f"{i:03}").write_bytes(payload)
        self.ask("payloads", folder=str(folder))
        count = max(min(40_000_000 // size, 5000), 200)
        few = max(count // 5, 100)
        self._fill("uniform", count, "writer", 64)  # warms up
        best: dict[str, tuple[Any, ...]] = {
            "insert": _fastest(INSERTS, lambda way: self._fill("uniform", count, *way)),
            "insert_each": _fastest(EACH_INSERTS, lambda way: self._fill("uniform", few, *way)),
        }
        self._fill("uniform", count, "writer", 64, keep=True)
        best["sample"] = _fastest(SAMPLES, lambda way: self._sample("uniform", count, way))
        best["sample_each"] = _fastest(EACH_SAMPLES, lambda way: self._sample("uniform", few, way))
        best["draw"] = _fastest([(way,) for way in DRAWS], lambda way: self.ask("latency", table="uniform", draws=5, way=way[0]))
        self.ask("reset", table="uniform")
        self._best = best
        self.settings[f"{size // 1000}KB"] = {name: " ".join(map(str, way)) for name, way in best.items()}

    def _fill(self, table: str, count: int, way: str, setting: int, keep: bool = False) -> float:
        wall_s = self.ask("fill", table=table, count=count, way=way, setting=setting)
        if not keep:
            self.ask("reset", table=table)
        return wall_s

    def _sample(self, table: str, count: int, way: tuple[Any, ...]) -> float:
        return self.ask("sample", table=table, count=count, way=way[0], workers=way[1], in_flight=way[2])

    def measure(self, size: int, groups: int, samples: int, sampler: str, draws: int) -> dict[str, float]:
        """Return the seconds of each operation on one filled table, done the fastest way."""
        few = max(min(groups, 1000, 40_000_000 // size), 100)
        each_s = self._fill(sampler, few, *self._best["insert_each"]) * groups / few
        insert_s = self._fill(sampler, groups, *self._best["insert"], keep=True)
        some = max(samples // 5, BATCH)
        found = {
            "insert_s": insert_s,
            "insert_each_s": each_s,
            "draw_s": self.ask("latency", table=sampler, draws=draws, way=self._best["draw"][0]),
            "sample_s": self._sample(sampler, samples, self._best["sample"]),
            "sample_each_s": self._sample(sampler, some, self._best["sample_each"]) * samples / some,
        }
        self.ask("reset", table=sampler)
        return found


def _fastest(ways: Sequence[Way], measure: Callable[[Way], float]) -> Way:
    return min(ways, key=measure)


def _peer_python() -> Path:
    """Return the Python of Reverb's virtual environment, which the first call creates."""
    python, done = PEER / "bin" / "python", PEER / ".installed"
    if not done.exists():
        print(f"installing {REVERB} into {PEER}", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(PEER)], check=True)
        pip = subprocess.run([str(python), "-m", "pip", "install", "-q", REVERB], capture_output=True, text=True)
        if pip.returncode:
            raise SystemExit(
                f"cannot install {REVERB} for Python {sys.version.split()[0]}; it has wheels up to 3.11: {pip.stderr[-500:]}"
            )
        done.touch()
    return python
