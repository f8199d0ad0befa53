"""Writes TensorBoard's event files in its own record format, without TensorFlow.

Guarantees: when `write` returns, the records are in the file; every opening begins a new file, which TensorBoard reads after the
earlier ones.
"""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.histogram_pb2 import HistogramProto
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from services.groups.histograms import Bins, edges, separated


class EventFiles:
    """A folder for `tensorboard --logdir`."""

    durable = True
    """Whether written records survive this process at once, or only after `close`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}"  # TensorBoard reads files in name order
        self._records = RecordWriter(path.open("wb"))
        self._records.write(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())

    def write(self, steps: Sequence[dict[str, float]], rounds: Sequence[dict[str, float]]) -> None:
        """Write one event per record, at its step or at the evaluated policy version, with all metrics and histograms."""
        for number, records in (("step", steps), ("eval/version", rounds)):
            for record in records:
                scalars, histograms = separated(record)
                values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items() if name != number]
                values += [Summary.Value(tag=name, histo=_histogram(name, bins)) for name, bins in histograms.items()]
                event = Event(
                    wall_time=record.get("time_s", time.time()), step=int(record[number]), summary=Summary(value=values)
                )
                self._records.write(event.SerializeToString())
        self._records.flush()

    def close(self) -> None:
        """Close the file."""
        self._records.close()


def _histogram(name: str, bins: Bins) -> HistogramProto:
    """Return a histogram in TensorBoard's form: upper bounds and counts; its sums use the middles of the bins."""
    limits, counts = edges(name.split("/")[1], bins)
    middles = [(low + high) / 2 for low, high in itertools.pairwise(limits)]
    return HistogramProto(
        min=limits[0],
        max=limits[-1],
        num=sum(counts),
        sum=sum(count * middle for count, middle in zip(counts, middles, strict=True)),
        sum_squares=sum(count * middle**2 for count, middle in zip(counts, middles, strict=True)),
        bucket_limit=limits,
        bucket=[0.0, *counts],
    )
