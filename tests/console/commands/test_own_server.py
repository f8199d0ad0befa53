"""Readers of a stopped run share its Redis server until a starting run takes over. Real processes, real Redis."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from services.config import digest
from services.console.commands.__main__ import main
from services.console.commands.own_server import reading
from services.console.errors import EXIT_REDIS, ConsoleError
from services.console.lock import FolderLock, holder
from services.console.run.folder import RunFolder
from services.console.run.redis_server import start_server
from services.store import Store
from tests.support.console import ROOT, wait_until
from tests.support.harness import small_config

READER = """
import asyncio, sys; from pathlib import Path
from services.console.run.folder import RunFolder
from services.console.commands.own_server import reading
async def read():
    async with reading(RunFolder(Path(sys.argv[1])), lambda _: None) as found:
        print(found.url, flush=True); sys.stdin.read()
asyncio.run(read())
"""


@pytest.fixture
def stopped(tmp_path: Path) -> RunFolder:
    """Create a run that has trained nothing and is not running; return its folder."""
    config = small_config(tmp_path)
    folder = RunFolder.of(config)
    folder.write(config)
    server = start_server(folder.redis, folder.path.name)

    async def create() -> None:
        store = await Store.connect(server.url, config.run.name, server.password)
        await store.run.create(digest(config), "data", config.run.steps, config.slots)
        await store.close()

    asyncio.run(create())
    server.stop()
    return folder


def reader(folder: RunFolder) -> subprocess.Popen[str]:
    """Start another process that reads the run until its input ends."""
    return subprocess.Popen(
        [sys.executable, "-c", READER, str(folder.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )


def process(*command: str, keeps: int = 0) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, pass_fds=(keeps,))


async def test_readers_share_a_server_until_the_last_one_exits(stopped: RunFolder) -> None:
    first = reader(stopped)
    assert first.stdout is not None
    assert first.stdin is not None
    url = first.stdout.readline()
    async with reading(stopped, print) as found:
        assert found.url == url.strip()
        first.stdin.close()  # it is done with its own server
        await asyncio.sleep(0.5)
        assert first.poll() is None, "it stays until the others are done"
        store = await Store.connect(found.url, stopped.settings.run.name, (stopped.redis / "password").read_text().strip())
        assert await store.run.state() is not None
        await store.close()
    first.wait()
    first.stdout.close()
    assert holder(stopped.path) is None


async def test_the_port_of_an_earlier_server_is_not_taken_for_that_of_the_next(stopped: RunFolder) -> None:
    """A process writes into the lock shortly after it takes it. Until then, the file has the line of the previous holder."""
    ended = process("true")
    ended.wait()
    (stopped.path / "lock").write_text(f"{ended.pid} readers 1\n")
    with (stopped.path / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        threading.Timer(0.5, lambda: fcntl.flock(lock, fcntl.LOCK_UN)).start()
        async with reading(stopped, print) as found:
            assert found.url != "redis://127.0.0.1:1/0"


def test_concurrent_commands_see_the_run(stopped: RunFolder) -> None:
    def status(_: int) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "services.console.commands", "status", str(stopped.path)]
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)

    with ThreadPoolExecutor(4) as pool:
        for done in pool.map(status, range(4)):
            assert (done.returncode, "error" in done.stderr) == (0, False)
            assert "0/4 steps  stopped" in done.stdout
    wait_until(lambda: holder(stopped.path) is None, "the end of the server")


async def test_a_starting_run_takes_the_folder_from_readers(stopped: RunFolder) -> None:
    async with reading(stopped, print) as found:
        with FolderLock(stopped.path, 60.0):
            now = holder(stopped.path)
        assert found.holder.readers
        assert now is not None
        assert (now.pid, now.readers) == (os.getpid(), False)


@pytest.mark.parametrize(
    ("verb", "sig", "code"), [("web", signal.SIGINT, 0), ("web", signal.SIGTERM, 0), ("status", signal.SIGINT, 130)]
)
def test_a_wait_for_the_server_can_be_interrupted(stopped: RunFolder, verb: str, sig: signal.Signals, code: int) -> None:
    command = [sys.executable, "-m", "services.console.commands", verb, str(stopped.path)]
    with (
        FolderLock(stopped.path),  # as if the run were starting
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT) as waiting,
    ):
        assert waiting.stderr is not None
        assert waiting.stderr.readline().startswith("waiting up to 60 s for the Redis server of")
        waiting.send_signal(sig)
        assert waiting.wait(20) == code, "it did not wait to the end"


def test_the_rest_of_a_replaced_line_names_no_readers(tmp_path: Path) -> None:
    with FolderLock(tmp_path) as lock:
        os.pwrite(lock.fd, b"12345\nreaders 6379\n", 0)  # a run has replaced `12399 readers 6379` and not truncated it yet
        found = holder(tmp_path)
    assert found is not None
    assert (found.pid, found.readers) == (12345, False)


async def test_leftovers_of_a_killed_run_are_named_and_awaited(stopped: RunFolder) -> None:
    messages: list[str] = []
    with FolderLock(stopped.path) as lock:
        left = process("sleep", "60", keeps=lock.fd)
        (stopped.path / "lock").write_text("99999999\n")  # as if the console had been killed
    with ThreadPoolExecutor(1) as pool:
        wait = pool.submit(lambda: wait_until(lambda: messages, "a word on the wait") and left.send_signal(signal.SIGKILL))
        async with reading(stopped, messages.append) as found:
            assert found.holder.readers
        wait.result()
    left.wait()
    assert messages == [f"waiting up to 60 s for process {left.pid} (left behind when process 99999999 died) to exit"]


def test_a_run_whose_folder_may_not_be_written_is_shown_from_it(stopped: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    (stopped.path / "readers").mkdir()  # which cannot be opened, like the file in a folder of another user
    assert main(["status", str(stopped.path)]) == EXIT_REDIS, "it has trained nothing"
    assert f"error: the Redis server of {stopped.path} cannot be used: [Errno 21]" in capsys.readouterr().err
    stopped.metrics.write_text('{"step": 0}\n')
    assert main(["status", str(stopped.path)]) == 0
    shown = capsys.readouterr()
    assert "1/4 steps  stopped" in shown.out
    assert "cannot be used: [Errno 21]" in shown.err


def test_smoke_does_not_wait_for_a_stopped_run_without_a_state(stopped: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(stopped.redis / "appendonlydir")
    assert main(["smoke", str(stopped.path), "--wait", "20"]) == 1
    assert "is stopped: start it with grpo run" in capsys.readouterr().err


async def test_a_server_that_cannot_start_is_reported_with_its_log(stopped: RunFolder) -> None:
    for part in (stopped.redis / "appendonlydir").iterdir():
        part.write_bytes(b"no commands\n" * 9)
    with pytest.raises(ConsoleError, match=f"did not start in {stopped.redis}"):
        async with reading(stopped, print):
            pass
