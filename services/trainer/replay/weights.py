"""Weights and optimizer state of a checkpoint, as safetensors for bundles and as digests by parameter.

`python -m services.trainer.replay.weights convert FOLDER OUT | digests FOLDER`: FOLDER is the trainer's part of a checkpoint.

Guarantees: what `restore` writes from the files of `convert` is what the checkpoint had, bit for bit; a file that was not written
by `convert` raises `StateError`.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from services.trainer.state.archive import Archive, Piece
from services.trainer.state.files import StateError, read_state, write_state
from services.trainer.state.partitions import WEIGHTS
from services.trainer.step.policy import RANDOM, STATE

RECORDS = "records"


class StateRecord(msgspec.Struct, frozen=True):
    """A record of a state file without its tensors."""

    pieces: list[tuple[str, int, int, int]]
    kinds: list[str]
    step: int


def convert(folder: Path, out: Path) -> list[Path]:
    """Write every state file of a checkpoint, except those of random generators, as safetensors. Raises `StateError`."""
    out.mkdir(parents=True, exist_ok=True)
    written = list[Path]()
    for file in sorted(folder.glob("*.pt")):
        if file.stem.startswith(f"{RANDOM}-"):
            continue
        records, tensors = list[StateRecord](), dict[str, torch.Tensor]()
        for number, record in enumerate(read_state(file)):
            records.append(StateRecord(record["pieces"], sorted(record["tensors"]), record["step"]))
            tensors |= {f"{number}.{kind}": tensor.contiguous() for kind, tensor in record["tensors"].items()}
        path = out / f"{file.stem}.safetensors"
        try:
            save_file(tensors, path, metadata={RECORDS: msgspec.json.encode(records).decode()})
        except SafetensorError as error:
            raise StateError(f"{path} cannot be written: {error}") from None
        written.append(path)
    return written


def restore(folder: Path) -> None:
    """Write the state files of a checkpoint next to their safetensors in `folder`. Raises `StateError`."""
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, "pt") as file:
                records = msgspec.json.decode((file.metadata() or {}).get(RECORDS, "").encode(), type=list[StateRecord])
                state = [
                    {
                        "pieces": record.pieces, "step": record.step,
                        "tensors": {kind: file.get_tensor(f"{number}.{kind}") for kind in record.kinds},
                    }
                    for number, record in enumerate(records)
                ]  # fmt: skip
        except (SafetensorError, msgspec.MsgspecError, OSError) as error:
            raise StateError(f"{path} is not a state of a bundle: {error}") from None
        for record in state:
            for name, first, count, offset in record["pieces"]:
                if min(first, count, offset) < 0 or any(offset + count > len(tensor) for tensor in record["tensors"].values()):
                    raise StateError(f"{path} is not a state of a bundle: its piece of {name} is not in it")
        write_state(path.with_suffix(".pt"), state)


def digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of the float32 weights of every trained parameter, by its name in the model. Raises `StateError`."""
    saved, sizes = Archive(folder, STATE), dict[str, int]()
    for file in sorted(folder.glob(f"{STATE}-*.pt")):
        for record in read_state(file):
            for name, first, count, _ in record["pieces"]:
                sizes[name] = max(sizes.get(name, 0), first + count)
    found = dict[str, str]()
    for name, size in sorted(sizes.items()):
        flat = torch.empty(size, dtype=torch.float32)
        saved.copy(WEIGHTS, Piece(name, 0, size, 0), flat)
        found[name] = hashlib.sha256(flat.numpy().tobytes()).hexdigest()
    return found


def main(argv: list[str] | None = None) -> int:
    """Convert a checkpoint, or print its digests as JSON. Return the exit code."""
    what, folder, *out = sys.argv[1:] if argv is None else argv
    try:
        done: Any = digests(Path(folder)) if what == "digests" else list(map(str, convert(Path(folder), Path(out[0]))))
    except StateError as error:
        print("error:", error, file=sys.stderr, flush=True)
        return 1
    print(json.dumps(done), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
