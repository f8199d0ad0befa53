"""Which members take patches: each rank says so in the rendezvous of its group, and the sender asks before it encodes one."""

from __future__ import annotations

from collections.abc import Iterable

from torch._C._distributed_c10d import Store

_PATCHABLE = "patchable/"


def declare_patchable(store: Store, rank: int, able: bool) -> None:
    """Receiver: say whether this rank takes patches. Raises `RuntimeError` if the sender is gone."""
    store.set(f"{_PATCHABLE}{rank}", "1" if able else "0")


def unpatchable(store: Store, ranks: Iterable[int]) -> list[int]:
    """Sender: return those of `ranks` that have not said that they take patches."""
    keys = {rank: f"{_PATCHABLE}{rank}" for rank in ranks}
    return [rank for rank, key in keys.items() if not store.check([key]) or store.get(key) != b"1"]
