"""Processes forked from the template have the caller's environment, none of its connections, and end with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from tests.support.console import wait_until

PROGRAM = """
import os, socket, sys, time
from services.generator.engines import template

def report(path, end):
    files = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    text = f"{os.environ['LATER']} {os.environ['INODE'] in ''.join(files)} {os.getpid()}"
    with open(path, "w") as file:
        file.write(text)
    while not os.path.exists(end):
        time.sleep(0.02)

if __name__ == "__main__":
    template._fork()
    taken = socket.create_server(("127.0.0.1", 0))
    os.environ.update(LATER="set afterwards", INODE=str(os.fstat(taken.fileno()).st_ino))
    process = template.TemplateContext().Process(target=report, args=sys.argv[1:])
    process.start()
    process.join()
    print(process.exitcode, flush=True)
"""


def program(tmp_path: Path, end: Path) -> list[str]:
    """Return the command of a program whose process exits once the file `end` exists."""
    (tmp_path / "program.py").write_text(PROGRAM)
    return [sys.executable, str(tmp_path / "program.py"), str(tmp_path / "said"), str(end)]


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent.parent)}


def test_a_process_has_its_callers_environment_and_no_connection(tmp_path: Path) -> None:
    done = subprocess.run(program(tmp_path, tmp_path), env=environment(), capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "0\n"
    assert (tmp_path / "said").read_text().startswith("set afterwards False ")


def test_the_template_exits_with_its_owner(tmp_path: Path) -> None:
    end = tmp_path / "end"
    with subprocess.Popen(program(tmp_path, end), env=environment(), stdout=subprocess.DEVNULL) as owner:
        try:
            wait_until(lambda: (tmp_path / "said").exists() and (tmp_path / "said").read_text())
            forked = psutil.Process(owner.pid).children(recursive=True)
            assert int((tmp_path / "said").read_text().split()[-1]) in [process.pid for process in forked]
            owner.send_signal(signal.SIGKILL)
        finally:
            end.touch()
    psutil.wait_procs(forked, timeout=60)
    assert not [process for process in forked if process.is_running()]
