"""Every command ends with one line that says what is wrong, and no traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.console.commands import __main__ as console
from services.console.commands.__main__ import main
from services.console.commands.steer import run_and_ids
from services.console.errors import EXIT_FAILED, EXIT_STOPPED, ConsoleError
from services.runtime.atomic_folders import FolderError
from tests.support.console import LIMIT_S, ROOT, environment, state_of, wait_until


def test_what_the_system_refuses_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.touch()
    assert main(["acl", "small", "--users", str(file / "users")]) == EXIT_FAILED
    assert capsys.readouterr().err == f"error: [Errno 20] Not a directory: '{file / 'users'}'\n"


def test_a_folder_that_cannot_be_written_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def full() -> None:
        raise FolderError("cannot write x: no space\nleft")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(console, "with_waits", lambda _: full())
        assert main(["version"]) == EXIT_FAILED
    assert capsys.readouterr().err == "error: cannot write x: no space left\n"


@pytest.mark.parametrize("key", [b"\x03", b"\x04"], ids=["Ctrl-C", "Ctrl-D"])
def test_a_question_can_be_left(key: bytes, tmp_path: Path) -> None:
    """On a terminal of its own."""
    console, terminal = os.openpty()
    command = [sys.executable, "-m", "services.console.commands", "init"]
    process = subprocess.Popen(
        command, preexec_fn=lambda: os.login_tty(terminal), env=environment(PYTHONPATH=str(ROOT)), cwd=tmp_path
    )
    os.close(terminal)
    shown = b""
    while b"Model: " not in shown:
        shown += os.read(console, 4096)
    # Python loses a signal that arrives after the question is shown and before it waits for the answer.
    wait_until(lambda: state_of(process.pid) == "S", "waiting for the answer")
    os.write(console, key)
    assert process.wait(LIMIT_S) == EXIT_STOPPED
    os.close(console)


def test_an_error_cannot_control_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    def refused() -> None:
        raise ConsoleError("the run was stopped: \x1b[2Jhello")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(console, "with_waits", lambda _: refused())
        assert main(["version"]) == EXIT_FAILED
    assert capsys.readouterr().err == "error: the run was stopped: \\e[2Jhello\n"


def test_a_run_may_be_named_like_a_month() -> None:
    assert run_and_ids(["2024-11", "1790000000000-0"]) == ("2024-11", ["1790000000000-0"])
