"""dm-reverb's side of benchmarks/replay.py: a server process and a client process, both in Reverb's own virtual environment.

    python benchmarks/against_reverb/peer.py            answers each JSON line on standard input with one JSON line
    python benchmarks/against_reverb/peer.py serve      runs the server: prints its port, stops when standard input closes

Requests: `{"do": "payloads", "folder": …}` reads the payloads to write, `fill`, `sample` and `latency` measure,
`{"do": "reset", "table": …}` empties a table. Tables: `uniform` and `prioritized` (exponent 1), remover fifo, MinSize(1).
A group is one item: its payload as one uint8 column, chunk length 1. Server and client are two processes, as on our side:
within one process, Reverb passes items by pointer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import numpy as np
import reverb  # pyright: ignore[reportMissingImports]

MOST_ITEMS = 10**6
BATCH = 64


def serve() -> None:
    """Run the server until standard input ends."""
    samplers = {"uniform": reverb.selectors.Uniform(), "prioritized": reverb.selectors.Prioritized(1.0)}
    tables = [
        reverb.Table(name, sampler, reverb.selectors.Fifo(), MOST_ITEMS, reverb.rate_limiters.MinSize(1))
        for name, sampler in samplers.items()
    ]
    server = reverb.Server(tables, port=None)
    print(f"port {server.port}", flush=True)
    sys.stdin.read()
    server.stop()


class Peer:
    """The client, and the ways of using it that are compared."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, __file__, "serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._server.stdout is not None
        port = next(line.split()[1] for line in self._server.stdout if line.startswith("port "))
        self.address = f"localhost:{port}"
        self.client = reverb.Client(self.address)
        self.payloads: list[np.ndarray] = []

    def read_payloads(self, folder: str) -> int:
        """Read the files of a folder as payloads; return their number."""
        self.payloads = [np.frombuffer(path.read_bytes(), np.uint8) for path in sorted(Path(folder).iterdir())]
        return len(self.payloads)

    def fill(self, table: str, count: int, way: str, setting: int) -> float:
        """Insert `count` groups, all acknowledged at the end; return the seconds."""
        ways: dict[str, Callable[[str, int, int], None]] = {
            "writer": self._writer, "trajectory_writer": self._trajectory_writer, "insert": self._insert,
        }  # fmt: skip
        started = time.perf_counter()
        ways[way](table, count, setting)
        return time.perf_counter() - started

    def _writer(self, table: str, count: int, in_flight: int) -> None:
        with self.client.writer(max_sequence_length=1, chunk_length=1, max_in_flight_items=in_flight) as writer:
            for i in range(count):
                writer.append([self.payloads[i % len(self.payloads)]])
                writer.create_item(table, 1, priority(i))

    def _trajectory_writer(self, table: str, count: int, in_flight: int) -> None:
        with self.client.trajectory_writer(num_keep_alive_refs=1) as writer:
            for i in range(count):
                writer.append({"payload": self.payloads[i % len(self.payloads)]})
                if i == 0:
                    writer.configure(("payload",), num_keep_alive_refs=1, max_chunk_length=1)
                writer.create_item(table, priority(i), {"payload": writer.history["payload"][-1:]})
                if i % in_flight == in_flight - 1:
                    writer.flush(in_flight)
            writer.flush()

    def _insert(self, table: str, count: int, threads: int) -> None:
        """Insert with `client.insert`, which returns when the group is stored, in several threads."""

        def work(first: int) -> None:
            client = reverb.Client(self.address)
            for i in range(first, count, threads):
                client.insert([self.payloads[i % len(self.payloads)]], {table: priority(i)})

        workers = [threading.Thread(target=work, args=(first,)) for first in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    def _stream(self, table: str, way: str, workers: int, in_flight: int, most: int = -1) -> Iterator[tuple[int, Any]]:
        """Yield (number of groups, sample) from a stream."""
        import tensorflow as tf  # pyright: ignore[reportMissingModuleSource]

        if way == "client":
            for sample in self.client.sample(table, num_samples=most if most > 0 else 10**9):
                yield 1, sample
            return
        dataset = reverb.TrajectoryDataset(
            server_address=self.address, table=table, dtypes=[tf.uint8], shapes=[tf.TensorShape([1, self.payloads[0].size])],
            max_in_flight_samples_per_worker=in_flight, num_workers_per_iterator=workers, max_samples=most,
        )  # fmt: skip
        for sample in dataset.batch(BATCH) if way == "batches" else dataset:
            yield BATCH if way == "batches" else 1, sample

    def sample(self, table: str, count: int, way: str, workers: int, in_flight: int) -> float:
        """Return the seconds per `count` groups of a stream that has started."""
        stream = self._stream(table, way, workers, in_flight)
        next(stream)
        got, started = 0, time.perf_counter()
        while got < count:
            got += next(stream)[0]
        return (time.perf_counter() - started) * count / got

    def latency(self, table: str, draws: int, way: str) -> float:
        """Return the median seconds of one on-demand draw of `BATCH` groups with their payloads."""
        taken = []
        for _ in range(draws):
            started = time.perf_counter()
            assert sum(count for count, _ in self._stream(table, way, 1, BATCH, BATCH)) == BATCH
            taken.append(time.perf_counter() - started)
        return float(np.median(taken))

    def reset(self, table: str) -> None:
        """Empty a table."""
        self.client.reset(table)

    def close(self) -> None:
        """Stop the server."""
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()


def priority(i: int) -> float:
    """Return the priority of the i-th group, between 0.5 and 1.5."""
    return 0.5 + (i * 0.6180339887) % 1.0


def main() -> None:
    """Answer requests until there are no more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # TensorFlow prints to standard output
    peer = Peer()
    calls: dict[str, Callable[..., Any]] = {
        "payloads": peer.read_payloads, "fill": peer.fill, "sample": peer.sample, "latency": peer.latency, "reset": peer.reset,
    }  # fmt: skip
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(calls[request.pop("do")](**request)), file=answers, flush=True)
    peer.close()


if __name__ == "__main__":
    serve() if sys.argv[1:] == ["serve"] else main()
