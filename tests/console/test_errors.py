"""Every command ends with one line that says what is wrong, and no traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.console import __main__ as console
from services.console.__main__ import main
from services.console.errors import EXIT_FAILED
from services.runtime.atomic_folders import FolderError


def test_what_the_system_refuses_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.touch()
    assert main(["acl", "small", "--users", str(file / "users")]) == EXIT_FAILED
    assert capsys.readouterr().err == f"error: [Errno 20] Not a directory: '{file / 'users'}'\n"


def test_a_folder_that_cannot_be_written_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def full() -> None:
        raise FolderError("cannot write x: no space\nleft")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(console, "quicken", full)
        assert main(["version"]) == EXIT_FAILED
    assert capsys.readouterr().err == "error: cannot write x: no space left\n"
