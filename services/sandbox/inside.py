"""What runs inside a sandbox for each call: the code, in a process whose descendants end with it. Imports only the standard
library.

The service sends this file and those that it imports into the pod (execution.py), so an image needs nothing but Python 3.9.

Guarantees: a call with the same number runs once, however often it is requested: later requests wait for the same result. The
call continues if the connection ends, and ends within its time limit, with all of its processes. Whatever the code does to
these processes and files, it does only to its own rollout.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import io
import json
import os
import resource
import select
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from services.verifiers.sandbox import folder, guard, scratch, script

BEGUN = b"+"
KILLED, UNMADE = "the process that ran it was killed", "the call ended before its code began"
POLL_S = 0.02
LOOK_S = 0.25  # between checks of how full the folder is
FILE_BYTES = 16 << 20  # size of a file, as for code in a confined process


def main(task: dict[str, Any]) -> None:
    """Begin a call, or attach to it; print its result as JSON."""
    home = Path(os.environ["HOME"])
    (home / "calls").mkdir(exist_ok=True)
    begun, result = home / "calls" / f"{task['call']}.begun", home / "calls" / f"{task['call']}.json"
    held = _begin(begun)
    if held is not None:
        with contextlib.suppress(FileNotFoundError):
            (home / "calls" / f"{task['call'] - 1}.json").unlink()  # its caller has received it
        if not os.fork():
            _detach(held)
            _supervise(task, home, result, held)
        os.close(held)
    sys.stdout.write(_awaited(begun, result))
    sys.stdout.flush()


def _begin(place: Path) -> int | None:
    """Return a descriptor whose lock is held as long as the call is running, or None if it was started before."""
    own = place.with_suffix(f".{os.getpid()}")
    held = os.open(own, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(held, fcntl.LOCK_EX)
    try:
        os.link(own, place)  # with its lock, so that nobody sees it unlocked
    except FileExistsError:
        os.close(held)
        return None
    finally:
        os.unlink(own)
    return held


def _detach(held: int) -> None:
    """Leave the session and the streams of the call, so that the call and this process can end independently."""
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    _close_all_but(0, 1, 2, held)
    ctypes.CDLL(None).prctl(guard.PR_SET_CHILD_SUBREAPER, 1)


def _close_all_but(*kept: int) -> None:
    """Close descriptors. The limit of their number may be a billion, which `os.closerange` would count up to."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            with contextlib.suppress(OSError):
                os.close(int(name))


def _supervise(task: dict[str, Any], home: Path, result: Path, held: int) -> None:
    """Run the code to its end, and write the result."""
    try:
        found = _run(task, home, held)
    except BaseException:  # such as a folder that an earlier call has made unusable
        found = {"ended": f"the call could not be made: {traceback.format_exc(limit=-1)[-500:]}"}
    try:
        written = result.with_suffix(".part")
        written.write_text(json.dumps(found))
        written.rename(result)
    finally:
        os._exit(0)


def _run(task: dict[str, Any], home: Path, held: int) -> dict[str, Any]:
    work = home / "work"
    work.mkdir(exist_ok=True)
    if task["files"]:
        folder.unpack(work, task["files"])
    reading, writing = os.pipe()
    os.write(held, BEGUN)
    child = os.fork()
    if not child:
        _become(task, work, writing)
    os.close(writing)
    output, fault, status = _watched(task, work, child, reading)
    guard.kill_descendants()
    if folder.over(work, task["folder_bytes"], task["folder_entries"]):
        fault = "full"
        scratch.remove(work)
    if os.WIFSIGNALED(status) and not fault:
        fault = _signal_name(os.WTERMSIG(status))
    files = folder.packed(work) if work.exists() else {}
    return {"output": output.decode(errors="replace"), "fault": fault, "files": files}


def _signal_name(number: int) -> str:
    return next((each.name for each in signal.Signals if each == number), f"signal {number}")  # most real-time signals have none


def _become(task: dict[str, Any], work: Path, writing: int) -> None:
    """Run the code in this process, with its output into `writing`."""
    try:
        for stream in (1, 2):
            os.dup2(writing, stream)
        _close_all_but(0, 1, 2)
        os.chdir(work)
        os.environ.update({"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}, TMPDIR=str(work), LANG="C.UTF-8")
        memory = task["memory_mib"] << 20
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        sys.stdout, sys.stderr = _text(1), _text(2)
        sys.argv = [""]
        script.run(task["code"])
    except SystemExit as ending:
        if ending.code is not None and not isinstance(ending.code, int):
            print(ending.code, file=sys.stderr)
    finally:
        for step in (threading._shutdown, atexit._run_exitfuncs, gc.collect, sys.stdout.flush, sys.stderr.flush):  # type: ignore[attr-defined]
            with contextlib.suppress(BaseException):  # as at the end of an interpreter: files that the code left open are written
                step()
        os._exit(0)  # the exit status is not reported


def _text(stream: int) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BufferedWriter(io.FileIO(stream, "w", closefd=False)), "utf-8", "replace")


def _watched(task: dict[str, Any], work: Path, child: int, reading: int) -> tuple[bytes, str, int]:
    """Return the beginning of the code's output, why it was killed, and its exit status."""
    deadline, look = time.monotonic() + task["limit_s"], 0.0
    kept, size, fault, status, over = bytearray(), 0, "", 0, False
    while True:
        now = time.monotonic()
        if not over and now > deadline:
            fault = "slow"
        elif not over and size > task["output_bytes"]:
            fault = "loud"
        elif not over and now > look:
            look = now + LOOK_S
            fault = "full" if folder.over(work, task["folder_bytes"], task["folder_entries"]) else ""
        if fault and not over:
            os.kill(child, signal.SIGKILL)
        if not over and (ended := os.waitpid(child, 0 if fault else os.WNOHANG))[0]:
            status, over = ended[1], True
        ready, _, _ = select.select([reading], [], [], 0 if over else POLL_S)
        data = os.read(reading, 1 << 16) if ready else b""
        size += len(data)
        kept += data[: max(0, task["kept_bytes"] - len(kept))]
        if over and (not data or size > task["output_bytes"]):
            return bytes(kept), fault or ("loud" if size > task["output_bytes"] else ""), status
        if ready and not data:  # the code has closed its output
            time.sleep(POLL_S)


def _awaited(begun: Path, result: Path) -> str:
    """Return the result as soon as there is one; a call whose process was killed has none."""
    with open(begun, "rb") as place:
        while True:
            gone = _unlocked(place.fileno())
            with contextlib.suppress(FileNotFoundError):
                return result.read_text()
            if gone:
                place.seek(0)
                return json.dumps({"ended": KILLED} if place.read() else {"lost": UNMADE})
            time.sleep(POLL_S)


def _unlocked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return True
