"""The network between the trainer's side and the members: a namespace per member, a bridge between them, and ways to cut it.

Guarantees: a cut is silent, as when packets are dropped, and ends no connection. Everything disappears with the campaign's
processes. Needs iproute2 and util-linux, and either root or permission to create user namespaces.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from services.runtime.process_tools import die_with_parent

TRAINER, REDIS = "10.77.0.1", "10.77.0.2"
NOBODY = "02:00:00:00:00:fe"  # an unused hardware address
START_LIMIT_S = 30.0
CLONE_NEWNET = 0x40000000  # linux/sched.h
_libc = ctypes.CDLL(None, use_errno=True)
UNSHARE = ("unshare", "--net", *(() if os.geteuid() == 0 else ("--user", "--map-root-user")))
"""Runs a command in a separate network, with full rights in it."""


def permitted() -> bool:
    """Return whether networks can be created here."""
    if not all(shutil.which(program) for program in ("unshare", "nsenter", "ip")):
        return False
    trial = "ip link add name trial type bridge && ip link add name one type veth peer name two"
    return subprocess.run([*UNSHARE, "sh", "-c", trial], capture_output=True, check=False).returncode == 0


def leave_network() -> None:
    """Do what `UNSHARE` does, for this process, which runs as root and has one thread."""
    if _libc.unshare(CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "no network of its own can be made")


class Loopback:
    """Stands in for networks: everything is at 127.0.0.1."""

    trainer = redis = "127.0.0.1"

    def add(self, member: str) -> None:
        """Do nothing: there is nothing to create."""

    def join(self, member: str) -> Callable[[], None]:
        """Return the `preexec_fn` of a member's process, which has no network to join."""
        return die_with_parent

    def close(self) -> None:
        """Do nothing: there is nothing to stop."""


class Networks:
    """Members in separate network namespaces (`UNSHARE`)."""

    trainer, redis = TRAINER, REDIS

    def __init__(self) -> None:
        self._holders: dict[str, subprocess.Popen[bytes]] = {}
        _ip("link", "set", "lo", "up")
        _ip("link", "add", "bridge", "type", "bridge")
        for address in (TRAINER, REDIS):
            _ip("address", "add", f"{address}/24", "dev", "bridge")
        _ip("link", "set", "bridge", "up")

    def add(self, member: str) -> None:
        """Create a member's network, which outlives the member's processes."""
        number = len(self._holders)
        holder = subprocess.Popen(["unshare", "--net", "sleep", "infinity"], preexec_fn=die_with_parent)
        self._holders[member] = holder
        deadline = time.monotonic() + START_LIMIT_S
        while _network_of(holder.pid) == _network_of(os.getpid()):
            assert time.monotonic() < deadline, "unshare created no network"
            time.sleep(0.01)
        _ip("link", "add", f"to-{member}", "type", "veth", "peer", "name", "eth", "netns", str(holder.pid))
        _ip("link", "set", f"to-{member}", "master", "bridge", "up")
        self._ip_of(member, "address", "add", f"10.77.0.{10 + number}/24", "dev", "eth")
        for link in ("lo", "eth"):
            self._ip_of(member, "link", "set", link, "up")

    def join(self, member: str) -> Callable[[], None]:
        """Return the `preexec_fn` of a member's process, which joins the member's network."""
        return partial(_join, self._holders[member].pid)

    def cut_trainer(self, member: str) -> None:
        """Block the traffic between the member and the trainer, and nothing else."""
        self._ip_of(member, "neighbour", "replace", TRAINER, "lladdr", NOBODY, "nud", "permanent", "dev", "eth")

    def mend_trainer(self, member: str) -> None:
        """Undo `cut_trainer`."""
        self._ip_of(member, "neighbour", "delete", TRAINER, "dev", "eth")

    def cut_all(self, member: str) -> None:
        """Block all of the member's traffic, as if its cable were unplugged."""
        _ip("link", "set", f"to-{member}", "down")

    def mend_all(self, member: str) -> None:
        """Undo `cut_all`."""
        _ip("link", "set", f"to-{member}", "up")

    def close(self) -> None:
        """Stop the processes that hold the networks."""
        for holder in self._holders.values():
            holder.kill()
            holder.wait()

    def _ip_of(self, member: str, *arguments: str) -> None:
        inside = ("nsenter", f"--net=/proc/{self._holders[member].pid}/ns/net")
        subprocess.run([*inside, "ip", *arguments], check=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def _join(holder: int) -> None:
    die_with_parent()
    with Path("/proc", str(holder), "ns", "net").open() as network:
        if _libc.setns(network.fileno(), 0):
            raise OSError(ctypes.get_errno(), "a member cannot join its network")


def _network_of(pid: int) -> str:
    return os.readlink(Path("/proc", str(pid), "ns", "net"))
