"""The live screen, drawn into a string."""

from __future__ import annotations

import io
import itertools
import json
import types
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from services.console.display.plain import PlainDisplay, WarningsTail
from services.console.display.screen import ScreenDisplay
from services.operations import figures
from services.operations.observe import Member, Poll
from services.protocol.messages import PodStatus
from services.store import RunState

STATE = RunState(100, 96, 70, 200, 12, 12, 11, -1, "dataprep-0", {"trainer": "lunch"}, "", "", "data", "config")
POD = PodStatus("generator", "generator-0", "b00t", "here", 1, "", "ready", 12, 1, {"tokens_per_s": 4321.0})


def drawn(screen: ScreenDisplay) -> str:
    console = Console(file=io.StringIO(), width=120, record=True)
    console.print(screen.render())
    return console.export_text()


def screen_of(folder: Path) -> ScreenDisplay:
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    return ScreenDisplay("demo", 100, [], folder, console)


def test_unknown_values_are_shown_as_dashes(tmp_path: Path) -> None:
    text = drawn(screen_of(tmp_path))
    assert "0/100 steps" in text
    assert "–" in text


def test_a_busy_run_is_shown_in_full(tmp_path: Path) -> None:
    screen = screen_of(tmp_path)
    (tmp_path / "generator-0.log").write_text(
        json.dumps({"event": "verifier timed out", "level": "warning", "error": "5 s"}) + "\n"
        + json.dumps({"event": "Triton is not installed", "level": "warning", "logger": "vllm.platforms.cpu"}) + "\n"
        + json.dumps({"event": "EngineCore failed", "level": "error", "logger": "vllm.v1.engine.core"}) + "\n"
        + json.dumps({"event": "claimed", "level": "info"}) + "\nTraceback: not JSON\n" + '{"event": "half'
    )  # fmt: skip
    step = {"step": 11, "time_s": 60.0, figures.REWARD: 0.431, figures.LAG_MEAN: 0.8, figures.LAG_MAX: 2.0, figures.STEP_S: 2.14}
    with screen:
        screen.steps([{"step": 10, "time_s": 58.0}, step])
        screen.event("trainer-0 was killed by signal 9; restarting trainer in 0.5 s")
        screen.draw(Poll(0.0, STATE, [Member(POD, 4.2)]), {"trainer": 3.0})
        text = drawn(screen)
    for expected in (
        "12/100 steps", "2:56 left", "paused: trainer by lunch",
        "0.431", "0.80 / 2", "2.1 s", "70/96", "generator-0", "ready", "4,321",
        "4.2 s ago", "restarts in 3 s", "killed by signal 9", "generator-0: verifier timed out: 5 s",
        "generator-0: EngineCore failed",
    ):  # fmt: skip
        assert expected in text, expected
    assert "claimed" not in text
    assert "Triton" not in text


def test_the_reason_why_pods_wait_is_shown(tmp_path: Path) -> None:
    screen, away = screen_of(tmp_path), "waiting for verifier 'judge' at http://judge: connection refused, for 12 s\x1b[2J"
    pods = [msgspec.structs.replace(POD, name=f"generator-{i}", waiting=away) for i in range(5)]
    with screen:
        screen.draw(Poll(0.0, STATE, [Member(pod, 0.1) for pod in pods]), {})
        text = drawn(screen)
    assert "generator-0: waiting for verifier 'judge' at http://judge: connection refused, for 12 s\\e[2J" in text
    assert text.count("waiting for verifier") == 3
    assert "and 2 more generators" in text
    assert text.count("ready, waiting") == 5


def test_the_tail_reads_only_appended_whole_lines(tmp_path: Path) -> None:
    log = tmp_path / "trainer-0.log"
    log.write_text(json.dumps({"event": "old", "level": "error"}) + "\n")
    tail = WarningsTail(tmp_path)
    assert tail.poll() == []
    line = json.dumps({"event": "new", "level": "error"})
    with log.open("a") as file:
        file.write(line[:10])
        file.flush()
        assert tail.poll() == []
        file.write(line[10:] + "\n")
    assert tail.poll() == ["trainer-0: new"]
    assert tail.poll() == []


def test_plain_lines_repeat_no_kind_of_warning_within_a_minute(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count(0.0, 45.0)
    monkeypatch.setattr("services.console.display.plain.time", types.SimpleNamespace(monotonic=lambda: next(clock)))
    plain = PlainDisplay(100, tmp_path)

    def warned(*errors: str) -> list[str]:
        with (tmp_path / "environment-0.log").open("a") as file:
            file.writelines(
                json.dumps({"event": "rollout failed", "level": "warning", "error": error}) + "\n" for error in errors
            )
        plain.draw(Poll(0.0, STATE, []), {})
        return capsys.readouterr().out.splitlines()

    assert warned("first", "second", "third") == ["! environment-0: rollout failed: first"]
    assert warned("fourth") == []
    assert warned("fifth") == ["! environment-0: rollout failed: fifth (3 more like this)"]
