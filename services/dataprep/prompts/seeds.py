"""Random numbers derived from names: the same on every machine and in every process, without any state to save."""

from __future__ import annotations

import hashlib


def drawn(bits: int, *names: object) -> int:
    """Return a number of `bits` bits, a multiple of 8, that depends only on the names."""
    digest = hashlib.blake2b("/".join(map(str, names)).encode(), digest_size=bits // 8).digest()
    return int.from_bytes(digest, "little")


def ticket_seed(run_seed: int, epoch: int, row: int) -> int:
    """Return the seed of a ticket, 48 bits. The same prompt gets different samples in every epoch and run, repeatably."""
    return drawn(48, run_seed, epoch, row)
