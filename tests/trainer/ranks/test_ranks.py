"""How ranks find their device and their backend."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from services.trainer.ranks import World


def test_ranks_with_gpus_meet_over_nccl_and_do_not_ask_which_kernels_can_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """To answer, DeepSpeed would start compilers, which takes seconds."""
    met: list[Any] = []
    ops: dict[str, Any] = {}
    fake = SimpleNamespace(ops=SimpleNamespace(), init_distributed=lambda backend, **_: met.append(backend))
    monkeypatch.setitem(sys.modules, "deepspeed", fake)  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", met.append)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
    World(rank=3, size=4, local_rank=1).join(60.0)
    assert met == [torch.device("cuda", 1), "nccl"]
    assert (os.environ["RANK"], os.environ["LOCAL_RANK"]) == ("3", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    fake.ops.__compatible_ops__ = ops
    World().join(60.0)
    assert (met[-1], ops) == ("gloo", {"deepspeed_shm_comm": False})
