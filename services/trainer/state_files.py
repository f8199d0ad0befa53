"""How state reaches the disk.

Guarantees: what `DurableFiles` reports as written is on the disk; a failed write is remembered instead of raised, because
a rank that leaves DeepSpeed's collective save half-way would leave the others waiting in it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine


class StateError(RuntimeError):
    """State could not be written or read: the message names the file and the reason."""


class DurableFiles(TorchCheckpointEngine):
    """DeepSpeed's file writer; `problem` is the first failure since it was last cleared, or empty."""

    def __init__(self) -> None:
        super().__init__()
        self.problem = ""

    def save(self, state_dict: Any, path: str) -> None:
        """Write and force to disk, or set `problem`."""
        if self.problem:
            return
        try:
            with open(path, "wb") as file:
                torch.save(state_dict, file)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            self.problem = f"{path} cannot be written: {error.strerror}"
        except RuntimeError as error:  # torch's archive writer, after a write that the disk refused
            self.problem = f"{path} cannot be written: {error}"


def read_state(path: Path) -> tuple[Any, str]:
    """Tensors and plain values of a file, or None and what is wrong with it."""
    try:
        return torch.load(path, weights_only=True), ""
    except OSError as error:
        return None, f"{path} cannot be read: {error.strerror}"
    except (RuntimeError, EOFError, ValueError) as error:
        return None, f"{path} is damaged: {error}"
