"""The clock of a training step: a GPU, played by a fake, is not waited for before the seconds are read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from services.trainer.step.metrics import Clock


@dataclass
class Gpu:
    """Runs kernels one after the other, later than they are launched."""

    busy_until_ms: float = 0.0
    waits: list[str] = field(default_factory=list[str])

    def launch(self, takes_ms: float) -> None:
        self.busy_until_ms += takes_ms


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    made = Gpu()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            self.at_ms, self.over = -1.0, False

        def record(self, stream: Any) -> None:
            assert stream == "current"
            self.at_ms = made.busy_until_ms

        def synchronize(self) -> None:
            made.waits.append("event")
            self.over = True

        def elapsed_time(self, end: Event) -> float:
            assert end.over, "an event that has not happened has no time"
            return end.at_ms - self.at_ms

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "current")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: made.waits.append("device"))
    return made


def test_phases_on_a_gpu_take_as_long_as_their_kernels_and_wait_for_nothing(gpu: Gpu) -> None:
    clock = Clock(torch.device("cuda", 0))
    for forward, backward in ((100.0, 200.0), (50.0, 75.0)):
        with clock.phase("forward"):
            gpu.launch(forward)
        gpu.launch(1000.0)  # outside of any phase
        with clock.phase("backward"):
            gpu.launch(backward)
    assert gpu.waits == []
    assert clock.seconds == pytest.approx({"forward": 0.150, "backward": 0.275})
    assert set(gpu.waits) == {"event"}
    assert clock.seconds == pytest.approx({"forward": 0.150, "backward": 0.275}), "reading does not change them"


def test_phases_on_a_cpu_take_as_long_as_their_code(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter((10.0, 11.5, 20.0, 20.25))
    monkeypatch.setattr("services.trainer.step.metrics.time.perf_counter", lambda: next(now))
    clock = Clock(torch.device("cpu"))
    for _ in range(2):
        with clock.phase("forward"):
            pass
    assert clock.seconds == {"forward": 1.75}
