"""Read the files of trackers, with the trackers' own readers where available."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

BLOCK = 32768  # block size of W&B's file, a LevelDB log after a header of 7 bytes


def read_tensorboard(folder: Path) -> dict[str, dict[int, float]]:
    """Return scalars by name and step, as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def read_wandb(folder: Path) -> list[dict[str, Any]]:
    """Return the logged rows of every offline run under `folder`, in order."""
    from wandb.proto import wandb_internal_pb2

    rows = []
    for path in sorted(folder.rglob("*.wandb")):
        for data in _log_records(path.read_bytes()):
            record = wandb_internal_pb2.Record.FromString(data)
            if record.WhichOneof("record_type") == "history":
                names = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
                rows.append({name: value for name, value in names.items() if not name.startswith("_")})
    return rows


def _log_records(data: bytes) -> list[bytes]:
    assert data.startswith(b":W&B")
    records, at, begun = [], 7, b""
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:  # the rest of the block is too small for a header
            at += BLOCK - at % BLOCK
            continue
        _crc, length, kind = struct.unpack("<IHB", data[at : at + 7])
        begun += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last piece of one
            records.append(begun)
            begun = b""
    return records
