"""What happens between two polls is announced once."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from services.console.display.announcer import Announcer
from services.operations.condition import Condition
from services.operations.observe import Member, Poll
from services.protocol.messages import PodStatus
from services.store import RunState

STATE = RunState(4, 16, 3, 40, -1, -1, -1, -1, "dataprep-0", {}, "", "", "data", "config")


class FakeDisplay:
    """A display that records messages."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.phases: list[str] = []
        self.loading = self.phases.append
        self.event = self.events.append

    def steps(self, rows: Sequence[Mapping[str, float]]) -> None: ...
    def draw(self, poll: Poll, waiting: Mapping[str, float]) -> None: ...


def poll(at: float, phases: Mapping[str, str], **changes: Any) -> Poll:
    pods = [PodStatus(name.partition("-")[0], name, "b", "here", 1, "", phase, -1, 1, {}) for name, phase in phases.items()]
    return Poll(at, replace(STATE, **changes), [Member(pod, 0.1) for pod in pods])


def test_loading_phases_are_reported_together_with_times() -> None:
    display = FakeDisplay()
    announcer = Announcer(display, lambda _: None)
    announcer.started(["generator-0", "generator-1"], 100.0)
    for at, phases in (
        (101.0, {"generator-0": "starting"}), (103.0, {"generator-0": "loading", "generator-1": "loading"}),
        (104.0, {"generator-0": "loading", "generator-1": "loading"}),
        (120.0, {"generator-0": "ready", "generator-1": "loading"}),
        (121.0, {"generator-0": "unsynced", "generator-1": "draining"}),
    ):  # fmt: skip
        announcer.announce(poll(at, phases))
    assert display.phases == [
        "generator-0: starting, 1.0 s after its start", "generator-0, generator-1: loading the model, 3.0 s after its start",
        "generator-0: ready, 20 s after its start", "generator-1: ready, 21 s after its start",
    ]  # fmt: skip
    assert announcer.worked(["generator-0"])
    announcer.started(["generator-0"], 200.0)
    assert not announcer.worked(["generator-0"])
    announcer.announce(Poll(200.05, STATE, poll(0, {"generator-0": "ready"}).members))  # a heartbeat of the previous process
    assert not announcer.worked(["generator-0"])


def test_failed_prompts_are_reported_first_at_once_and_then_whenever_their_number_doubles() -> None:
    display = FakeDisplay()
    announcer = Announcer(display, lambda _: None)
    for count in (0, 1, 1, 2, 3, 5, 0, 1):
        announcer.announce(Poll(1.0, STATE, failed=count, last_failure=f"reason {count}"))
    assert [event.split()[0] for event in display.events] == ["1", "2", "5", "1"]
    assert display.events[0] == "1 prompt failed and will not be trained on (see grpo inspect deadletter): reason 1"


def test_a_pause_and_its_end_are_reported_with_who_and_why() -> None:
    display, noted = FakeDisplay(), list[Condition]()
    announcer = Announcer(display, noted.append)
    announcer.announce(poll(1.0, {}))
    for at in (2.0, 3.0):
        announcer.announce(poll(at, {}, paused={"trainer": "ada: lunch"}))
    announcer.announce(poll(4.0, {}))
    announcer.announce(poll(5.0, {}, paused={"trainer": "ada: lunch"}))
    announcer.announce(poll(6.0, {}, last_resume="bob: back \x1b", last_resume_at=1.8e9))
    first, second, third, last = display.events
    assert (first, second, third) == ("paused: trainer by ada: lunch", "running again", first)
    assert re.fullmatch(r"running again, resumed by bob: back \\e, 2027-01-1\d \d\d:\d\d", last), last
    assert [found.word for found in noted] == ["running", "paused", "running", "paused", "running"]


def test_a_requested_drain_is_reported_once_with_who_and_why() -> None:
    display = FakeDisplay()
    announcer = Announcer(display, lambda _: None)
    for at, boot in ((1.0, "b"), (2.0, "b"), (3.0, "c")):
        pod = PodStatus("generator", "generator-0", boot, "here", 1, "", "draining", 0, 1, {}, draining="ada: a new \x1b driver")
        announcer.announce(Poll(at, STATE, [Member(pod, 0.1)]))
    assert display.events == ["generator-0 drains: ada: a new \\e driver"] * 2, "once for each process"
    announcer.announce(poll(4.0, {"generator-0": "draining"}))
    assert len(display.events) == 2, "nobody requested it"


def test_a_pause_that_ends_the_run_is_not_reported_before_its_end() -> None:
    display, noted = FakeDisplay(), list[Condition]()
    announcer = Announcer(display, noted.append)
    announcer.announce(poll(1.0, {}, paused={"dataprep": "grpo: prompts keep failing: 16 in a row"}))
    assert (display.events, [found.word for found in noted]) == ([], ["paused"])


def test_how_the_trainer_resumed_is_reported_once() -> None:
    display = FakeDisplay()
    announcer = Announcer(display, lambda _: None)
    for at in (1.0, 2.0):
        announcer.announce(poll(at, {}, resumed="resumed from checkpoint 20; a later checkpoint was skipped: it is damaged"))
    assert display.events == ["trainer: resumed from checkpoint 20; a later checkpoint was skipped: it is damaged"]
