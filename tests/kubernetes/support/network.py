"""A network for rendered pods on this machine: a namespace per pod, on a bridge, and a hosts file with the names of Services."""

from __future__ import annotations

import shutil
import subprocess
import threading
import uuid
from pathlib import Path

HOSTS = Path("/etc/netns")  # `ip netns exec` mounts the files of /etc/netns/NAME over those of /etc


def reason_against() -> str:
    """Return why this machine cannot create it, or an empty string."""
    if missing := [name for name in ("ip", "unshare", "nsenter", "setpriv", "mount") if shutil.which(name) is None]:
        return f"{', '.join(missing)} not found"
    name = f"grpo-{uuid.uuid4().hex[:6]}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"no network namespaces here: {made.stderr.strip()}"
    bridged = subprocess.run(["ip", "link", "add", name, "type", "bridge"], capture_output=True, text=True, check=False)
    mounted = subprocess.run(["unshare", "-m", "true"], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "link", "del", name], capture_output=True, check=False)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return (bridged.stderr + mounted.stderr).strip()


def free_subnet() -> str:
    """Return the first three numbers of a /24 that no interface uses, including those left by killed tests."""
    taken = subprocess.run(["ip", "-4", "addr"], check=True, capture_output=True, text=True).stdout
    return next(subnet for subnet in (f"10.213.{number}" for number in range(256)) if f" {subnet}." not in taken)


class Network:
    """A /24 behind a bridge, whose first address is this machine's."""

    def __init__(self) -> None:
        self.name = f"grpo-{uuid.uuid4().hex[:6]}"
        self._subnet = free_subnet()
        self.gateway = f"{self._subnet}.1"
        self._made: list[str] = []
        self._names: dict[str, str] = {}
        self._own: dict[str, str] = {}
        self._adding = threading.Lock()  # both the controllers and tests add pods
        _ip("link", "add", self.name, "type", "bridge")
        _ip("link", "set", self.name, "addrgenmode", "none")  # a browser aborts loading when the machine gets an address
        _ip("addr", "add", f"{self.gateway}/24", "dev", self.name)
        _ip("link", "set", self.name, "up")

    def add(self, pod: str) -> tuple[str, str]:
        """Create a namespace for a pod, with its own name; return its address."""
        with self._adding:
            return self._add(pod)

    def _add(self, pod: str) -> tuple[str, str]:
        number = len(self._made) + 2
        space, address = f"{self.name}-{number}", f"{self._subnet}.{number}"
        outer, inner = f"g{self.name[-6:]}{number}", f"i{self.name[-6:]}{number}"
        _ip("netns", "add", space)
        self._made.append(space)
        _ip("link", "add", outer, "type", "veth", "peer", "name", inner, "netns", space)
        _ip("link", "set", outer, "addrgenmode", "none")
        _ip("link", "set", outer, "master", self.name, "up")
        for command in (
            ("link", "set", "lo", "up"),
            ("link", "set", inner, "name", "eth0"),
            ("addr", "add", f"{address}/24", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
            ("route", "add", "default", "via", self.gateway),
        ):
            _ip("-n", space, *command)
        folder = HOSTS / space
        folder.mkdir(parents=True, exist_ok=True)
        self._own[space] = f"{address} {pod}"
        self._write(folder)
        return space, address

    def call(self, name: str, address: str) -> None:
        """Resolve a name to an address in every namespace."""
        with self._adding:
            self._names[name] = address
            for space in self._made:
                self._write(HOSTS / space)

    def _write(self, folder: Path) -> None:
        lines = ["127.0.0.1 localhost", self._own[folder.name], *(f"{address} {name}" for name, address in self._names.items())]
        (folder / "hosts").write_text("\n".join(lines) + "\n")  # in place, as it is mounted
        (folder / "resolv.conf").write_text("")

    def close(self) -> None:
        """Remove everything."""
        for space in self._made:
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)
            shutil.rmtree(HOSTS / space, ignore_errors=True)
        subprocess.run(["ip", "link", "del", self.name], capture_output=True, check=False)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
