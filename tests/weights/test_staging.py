"""Receiving in a thread during generation: a fetch that has been abandoned does not disturb a later one."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import pytest

from services.weights.checksums import WeightChanged


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # importing vLLM warns
@pytest.mark.parametrize("error", [RuntimeError("the connection was closed"), WeightChanged("w")], ids=["broken", "changed"])
def test_an_abandoned_transfer_leaves_the_next_group_alone(error: Exception) -> None:
    from services.weights.receivers.gloo import StagingEngine

    fail = threading.Event()

    class Engine(StagingEngine):
        def __init__(self) -> None:  # no model, and no worker around it
            self.changed = ""

        def take(self, connection: Any, deadline: Any, version: int) -> Any:
            if connection == "the first group":
                assert fail.wait(20)
                raise error
            return [("w", version)]

        def group(self, name: str) -> None:
            self._joining = Future()
            self._joining.set_result(name)

    engine = Engine()
    engine.group("the first group")
    engine.stage(20, 1)
    abandoned = engine._staging
    engine.group("the next group")
    engine.stage(20, 2)
    fail.set()
    assert abandoned is not None
    assert abandoned.exception(20) is error
    assert engine._staging is not None
    assert engine._staging.result(20) == [("w", 2)]
    assert (engine.join_state(), engine.changed) == ("joined", "")
