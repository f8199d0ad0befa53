"""Where the members of a broadcast group meet: the sender's TCP store, whose manifest says what every transfer sends.

Guarantees: every wait has a limit; the sender knows which ranks have arrived before it waits for any of them.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from datetime import timedelta

import msgspec
from torch._C._distributed_c10d import Store, TCPStore  # typed, unlike torch.distributed

from services.weights.buckets import WeightManifest

_MANIFEST = "manifest"
_ARRIVED = "arrived/"


def open_store(host: str, timeout_s: float) -> TCPStore:
    """Open the sender's store, which listens on a free port (`store.port`).

    It listens only on `host` if that is an address of this machine, otherwise on all addresses.
    """
    with socket.socket() as listener:
        address = own_address(host)
        listener.bind((address or "0.0.0.0", 0))
        listener.listen(socket.SOMAXCONN)
        port = listener.getsockname()[1]
        return TCPStore(
            address or "127.0.0.1",
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
            master_listen_fd=listener.detach(),
        )


def join_store(host: str, port: int, timeout_s: float) -> TCPStore:
    """Connect a receiver to the sender's store."""
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


def arrive(store: Store, rank: int) -> None:
    """Receiver: announce this rank before it waits for the others."""
    store.set(f"{_ARRIVED}{rank}", "1")


def absent(store: Store, ranks: Iterable[int]) -> list[int]:
    """Sender: return those of `ranks` that have not arrived."""
    return [rank for rank in ranks if not store.check([f"{_ARRIVED}{rank}"])]


def publish_manifest(store: Store, manifest: WeightManifest) -> None:
    """Sender: publish what every transfer of this group will send."""
    store.set(_MANIFEST, msgspec.json.encode(manifest).decode())


def read_manifest(store: Store) -> WeightManifest:
    """Receiver: read the sender's manifest, waiting for it up to the store's timeout."""
    return msgspec.json.decode(store.get(_MANIFEST), type=WeightManifest)


def own_address(host: str) -> str | None:
    """Return the IPv4 address of `host` if it belongs to this machine; None for a name that leads elsewhere, e.g. to a
    Service.
    """
    try:
        address = socket.gethostbyname(host)
        with socket.socket() as probe:
            probe.bind((address, 0))
    except OSError:
        return None
    return address


def address_towards(host: str, port: int) -> str | None:
    """Return the address of this machine from which packets to `host` leave, or None if there is no route."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))  # a datagram socket sends nothing here
            return probe.getsockname()[0]
    except OSError:
        return None
