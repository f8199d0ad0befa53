"""How weights travel from the trainer's rank 0: over a gloo or an NCCL group, or through a folder.

Guarantees: a transport is opened, connected and used by rank 0 only; every wait has a limit; errors are those of `FAILURES`, and
after one the transport must be opened again. Weights arrive bucket by bucket, each whole only until the next is requested.
"""

from __future__ import annotations

import torch

from services.config import RunConfig
from services.weights.transports.base import FAILURES, Transport
from services.weights.transports.filesystem import FolderTransport
from services.weights.transports.gloo import GlooTransport

__all__ = ["FAILURES", "Transport", "make_transport"]


def make_transport(config: RunConfig, fleeting: bool) -> Transport:
    """Return the transport of `sync.backend`; `auto` is NCCL if there is a GPU. `fleeting`: as in `Transport`."""
    backend = config.sync.backend
    if backend == "auto":
        backend = "nccl" if torch.cuda.is_available() else "gloo"
    if backend == "nccl":
        from services.weights.transports.nccl import NcclTransport

        return NcclTransport(config, fleeting)
    return {"gloo": GlooTransport, "filesystem": FolderTransport}[backend](config, fleeting)
