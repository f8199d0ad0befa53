"""What a verifier's process can do after it has dropped its privileges, tested from inside it on the real kernel."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import threading
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path

import pytest

from services.confined.worker import worker_environment

KNOWN = platform.machine() in ("x86_64", "aarch64")

INSIDE = """
import fcntl, json, os, resource, socket, subprocess, sys, threading
from pathlib import Path
from services.confined.confine import confine, limit_resources

scratch, outside = map(Path, sys.argv[1:])
limit_resources(4 << 30)
mine, _ = socket.socketpair()
waiting, go = threading.Event(), threading.Event()
refused_in_thread = []
def try_in_thread():
    go.wait()
    refused_in_thread.append(refused(socket.socket))
def refused(what, *args):
    try:
        what(*args)
        return False
    except OSError:
        return True
thread = threading.Thread(target=try_in_thread)
thread.start()
held = confine(scratch)
go.set()
thread.join()
(scratch / "note").write_text("mine")
print(json.dumps({
    "held": held,
    "network": refused(socket.socket), "in a thread that was there before": refused_in_thread == [True],
    "unix sockets": refused(socket.socket, socket.AF_UNIX),
    "programs": refused(subprocess.run, ["true"]), "signals": refused(os.kill, os.getppid(), 0),
    "signals of files": refused(fcntl.fcntl, mine, fcntl.F_SETOWN, os.getppid()) and refused(fcntl.fcntl, mine, 10, 12),
    "limits of others": refused(resource.prlimit, os.getppid(), resource.RLIMIT_NOFILE, (64, 64)),
    "own limits": resource.prlimit(0, resource.RLIMIT_NOFILE, (64, 64)) is not None,
    "priorities": refused(os.setpriority, os.PRIO_PROCESS, os.getppid(), 5),
    "processors of others": refused(os.sched_setaffinity, os.getppid(), {0}),
    "files elsewhere": refused((outside / "note").write_text, "not mine"), "deleting": refused((outside / "there").unlink),
    "reading": (outside / "there").read_text() == "there", "own file": (scratch / "note").read_text() == "mine",
    "large files": refused((scratch / "large").write_bytes, bytes(2 ** 25)),
    "new threads": threading.Thread(target=int).start() is None,
}))
"""


@pytest.mark.skipif(not KNOWN, reason="no list of its system calls")
def test_dropped_privileges_are_denied(tmp_path: Path) -> None:
    scratch, outside = tmp_path / "scratch", tmp_path / "outside"
    scratch.mkdir()
    outside.mkdir()
    (outside / "there").write_text("there")
    code = "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n" + INSIDE
    done = subprocess.run(
        [sys.executable, "-c", code, str(scratch), str(outside)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    held = found.pop("held")
    if "files" not in held:  # the kernel lacks landlock, or it is disabled
        for name in ("files elsewhere", "deleting"):
            found.pop(name)
    if "calls" not in held:
        pytest.skip("this kernel has no seccomp filters")
    assert {name for name, given_up in found.items() if not given_up} == set()


def test_a_worker_inherits_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = ("GRPO_API_TOKEN", "GRPO_REDIS_PASSWORD", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN")
    for name in secrets:
        monkeypatch.setenv(name, "hunter2")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    environment = os.fsencode("\0".join(f"{name}={value}" for name, value in worker_environment(tmp_path, ()).items()))
    assert b"hunter2" not in environment
    assert b"TOKENIZERS_PARALLELISM" in environment


def test_a_worker_reaches_the_loopback_interface_past_any_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "cluster.local")
    ask = (
        "import asyncio, httpx, sys\n"
        "async def own_client() -> None:\n"
        "    async with httpx.AsyncClient() as client:\n"
        "        print((await client.get(sys.argv[1])).status_code)\n"
        "asyncio.run(own_client())"
    )
    with HTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        command = [sys.executable, "-c", ask, f"http://127.0.0.1:{server.server_port}/"]
        environment = worker_environment(tmp_path, ())
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=tmp_path)
        server.shutdown()
    assert done.stdout == "200\n", done.stderr
    assert environment["NO_PROXY"] == environment["no_proxy"] == "cluster.local,127.0.0.1,localhost,::1"
