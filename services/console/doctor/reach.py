"""`grpo doctor --listen` here and `--reach HOST:PORT` there: checks that two machines can run a weight sync.

Guarantees: it ends, whatever the network or a driver does; it leaves nothing running; every failure comes with a remedy.
"""

from __future__ import annotations

import json
import queue
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import IO, Any

from services.config import RunConfig
from services.console.doctor import Finding, fault, ok
from services.console.errors import EXIT_CONFIG, ConsoleError

WAIT_S = 300.0  # for the other machine to connect: time to log in there and type the command
START_S = 120.0  # to import torch from a cold disk
REMEDIES = {
    "torch": "install it: pip install 'grpo[trainer]', or run the check in a trainer or generator pod",
    "meeting": "on the listening machine set sync.host to an address that the other can reach, and allow TCP on all ports "
    "from 1024: every weight sync uses a different one",
    "gloo": "allow TCP in both directions on all ports from 1024; with several networks, the one of sync.host is used",
    "nccl": "set NCCL_SOCKET_IFNAME to the interface that leads to the other machine (ip route get ADDRESS); without InfiniBand "
    "set NCCL_IB_DISABLE=1; NCCL_DEBUG=INFO prints details; give each process its own GPU with CUDA_VISIBLE_DEVICES",
}
"""Remedies by part of the check."""


def place_of(text: str) -> tuple[str, int]:
    """Parse the HOST:PORT of `--reach`. Raise `ConsoleError` when it is invalid."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ConsoleError(f"--reach {text}: give HOST:PORT, as grpo doctor --listen prints it", EXIT_CONFIG)
    return host.strip("[]"), int(port)


def check(config: RunConfig, reach: str, wait_s: float = WAIT_S) -> Iterator[Finding]:
    """Listen, or connect to a listener; yield a finding for every part tried. The address to reach is printed to stderr."""
    host, port = place_of(reach) if reach else (config.sync.host or socket.gethostname(), 0)
    limit_s = config.sync.join_deadline_s
    command = [sys.executable, "-m", "services.console.doctor.meeting", "reach" if reach else "listen", host, str(port)]
    with (
        tempfile.TemporaryFile("w+", errors="replace") as errors,
        subprocess.Popen([*command, str(wait_s), str(limit_s)], stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        try:
            yield from _follow(process, errors, START_S + limit_s, 2 * limit_s, wait_s)
        finally:
            process.kill()


def _follow(process: subprocess.Popen[str], errors: IO[str], first_s: float, limit_s: float, wait_s: float) -> Iterator[Finding]:
    assert process.stdout is not None
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_read, args=(process.stdout, lines), daemon=True).start()
    part, within_s = "meeting", first_s
    while True:
        try:
            line = lines.get(timeout=within_s)
        except queue.Empty:
            yield fault(f"network: {part}", f"not finished within {within_s:g} s", REMEDIES[part])
            return
        if line is None:
            break
        told: dict[str, Any] = json.loads(line)
        if told["part"] == "listening":
            print(f"on the other machine: grpo doctor FILE --reach {told['detail']}", file=sys.stderr, flush=True)
            within_s = wait_s + limit_s
            continue
        if not told["ok"]:
            yield fault(f"network: {told['part']}", told["detail"], REMEDIES[told["part"]])
            return
        yield ok(f"network: {told['part']}", told["detail"])
        part, within_s = "gloo" if told["part"] == "meeting" else "nccl", limit_s
    if process.wait() != 0:  # it died: torch is not installed, or a driver crashed it
        errors.seek(0)
        said = errors.read().strip().splitlines()[-1:] or ["no output"]
        missing = "No module named" in said[0]
        died = f"the check process exited with code {process.returncode}: {said[0]}"
        yield fault("torch" if missing else f"network: {part}", died, REMEDIES["torch" if missing else part])


def _read(stream: IO[str], lines: queue.Queue[str | None]) -> None:
    for line in stream:
        if line.startswith("{"):
            lines.put(line)
    lines.put(None)
