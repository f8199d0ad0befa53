"""The run folder: which run it belongs to, what may be deleted, and which process holds its lock."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from services.config import digest, load_resolved
from services.console import lock as locks
from services.console.errors import ConsoleError
from services.console.lock import FolderLock, InUse
from services.console.run.folder import RunFolder, check_redis, resolve
from tests.support.console import ROOT
from tests.support.harness import small_config


def test_a_resolved_configuration_identifies_the_same_run(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    folder = RunFolder.of(config)
    resolved = resolve(config, folder, "redis://127.0.0.1:1/0", "/secret")
    folder.write(resolved)
    assert load_resolved(folder.config) == resolved
    assert folder.check(resolve(config, folder, "redis://elsewhere:2/0"))
    assert digest(resolved) == digest(resolve(config, folder))
    open_door = config.model_copy(update={"api": config.api.model_copy(update={"token_file": ""})})
    assert resolve(open_door, folder).api.token_file == str(folder.token.resolve())
    assert stat.S_IMODE(folder.token.stat().st_mode) == 0o600


def test_a_different_run_of_the_same_name_is_rejected(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    folder = RunFolder.of(config)
    folder.write(resolve(config, folder))
    other = resolve(small_config(tmp_path, None, "sampling.group_size=8", "run.seed=3"), folder)
    with pytest.raises(ConsoleError, match=r"run.seed is 0 there and 3 here; sampling.group_size is 4 there and 8 here.*--fresh"):
        folder.check(other)
    folder.config.write_text("[run]\nsteps = 'many'\n")
    with pytest.raises(ConsoleError, match=r"cannot read.*--fresh"):
        folder.check(other)


def test_only_run_folders_are_deleted(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    folder = RunFolder.of(config)
    folder.path.mkdir(parents=True)
    (folder.path / "thesis.tex").write_text("years of work")
    with pytest.raises(ConsoleError, match=r"thesis\.tex"):
        folder.clear()
    folder.write(resolve(config, folder))
    (folder.path / "elsewhere").symlink_to(tmp_path)
    (folder.path / "lock").touch()
    folder.clear()
    assert [entry.name for entry in folder.path.iterdir()] == ["lock"]
    assert (tmp_path / "run.toml").exists(), "a symbolic link was followed"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("redis.password_file=secret", r"redis\.password_file = 'secret' has no effect without redis\.url, .* or remove the key"),
        ("redis.ca_file=ca.pem", r"redis\.ca_file = 'ca\.pem' has no effect without redis\.url"),
    ],
)
def test_keys_without_effect_for_the_kind_of_redis_are_rejected(tmp_path: Path, override: str, message: str) -> None:
    config = small_config(tmp_path, None, override)
    (found,) = check_redis(config, "")
    assert re.match(message, f"{found.detail}: {found.remedy}")
    assert list(check_redis(config, "rediss://h:1")) == []


def test_a_folder_is_locked_by_one_console_and_its_children(tmp_path: Path) -> None:
    with FolderLock(tmp_path) as lock:
        taker = (
            "import sys; from pathlib import Path; from services.console.lock import *\nwith FolderLock(Path(sys.argv[1])): pass"
        )
        refused = subprocess.run(
            [sys.executable, "-c", taker, str(tmp_path)], capture_output=True, text=True, cwd=ROOT, check=False
        )
        assert f"InUse: {tmp_path} is in use by process {os.getpid()}" in refused.stderr
        child = subprocess.Popen(["sleep", "60"], pass_fds=(lock.fd,))
        (tmp_path / "lock").write_text("99999999\n")  # as if the console had died
    with (
        pytest.raises(InUse, match=rf"process {child.pid} \(left behind when process 99999999 died\)"),
        FolderLock(tmp_path),
    ):
        pass
    messages: list[str] = []
    with (tmp_path / "lock").open() as waits, subprocess.Popen(["sleep", "60"], pass_fds=(waits.fileno(),)) as other:
        with FolderLock(tmp_path, 0.2, say=messages.append):
            assert child.wait(10) == -signal.SIGKILL
        assert other.poll() is None, "it has the file open, but not the lock"
        other.kill()
    assert messages == [f"killing process {child.pid} (left behind when process 99999999 died): still there after 0.2 s"]


def test_a_start_that_is_refused_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "a"
    with pytest.raises(ConsoleError), FolderLock(folder):
        raise ConsoleError("there is no such run")
    assert not folder.exists()
    first, second = FolderLock(folder), FolderLock(folder)
    first.open()
    assert first.take()
    second.open()
    folder.joinpath("lock").unlink()
    folder.rmdir()
    os.close(first.fd)  # as if the first start had been refused while the second waits
    assert not second.take()
    assert second.take(), "of a file that others find"
    assert os.fstat(second.fd).st_nlink == 1
    os.close(second.fd)


def test_no_process_is_killed_after_the_lock_changes_hands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with FolderLock(tmp_path) as dead:
        child = subprocess.Popen(["sleep", "60"], pass_fds=(dead.fd,))
        (tmp_path / "lock").write_text("99999999\n")
    listed = locks.holders

    def taken(path: Path) -> list[int]:
        left = listed(path)
        (tmp_path / "lock").write_text(f"{child.pid}\n")  # a console now holds the lock
        return left

    monkeypatch.setattr(locks, "holders", taken)
    with pytest.raises(InUse, match=f"in use by process {child.pid}$"), FolderLock(tmp_path, 0.2):
        pass
    assert child.poll() is None
    child.kill()
    child.wait()
