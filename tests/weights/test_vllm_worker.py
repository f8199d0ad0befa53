"""Receiving in a thread during generation: a fetch that has been abandoned does not disturb a later one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from services.weights.checksums import WeightChanged


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # importing vLLM warns
@pytest.mark.parametrize("error", [RuntimeError("the connection was closed"), WeightChanged("w")], ids=["broken", "changed"])
def test_an_abandoned_transfer_leaves_the_next_group_alone(error: Exception) -> None:
    from services.weights.transport import Receiver
    from services.weights.vllm_worker import JoinInfo, TransferEngine

    fail, ended = threading.Event(), threading.Event()

    class Fetching(Receiver):
        def connect(self, address: Any, rank: int) -> str:
            return address.host

        def take(self, connection: str, version: int, deadline: Any) -> Any:
            if connection == "the first group":
                assert fail.wait(20)
                ended.set()
                raise error
            return [("w", version)]

    class Engine(TransferEngine):
        def __init__(self) -> None:  # no model, and no worker around it
            self.receiver, self.changed, self.whole = Fetching(torch.device("cpu")), "", True
            self.parallel_config: Any = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)
            self._joining = self._staging = None

        def group(self, name: str) -> None:
            self.init_transfer_engine(JoinInfo(name, 0, 1, 2, 0, 20))
            until(lambda: self.state()["join"] == "done")

    engine = Engine()
    engine.group("the first group")
    engine.stage(1, 20)
    engine.group("the next group")
    engine.stage(2, 20)
    fail.set()
    assert ended.wait(20)
    until(lambda: engine.state()["stage"] == "done")
    time.sleep(0.1)  # what the abandoned thread still does
    assert (engine.state()["join"], engine.changed) == ("done", "")


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
