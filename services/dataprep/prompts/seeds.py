"""Numbers that are drawn by name: the same on every machine and in every process, with no state to save."""

from __future__ import annotations

import hashlib


def drawn(bits: int, *names: object) -> int:
    """A number of so many bits, a multiple of 8, that depends on the names alone."""
    digest = hashlib.blake2b("/".join(map(str, names)).encode(), digest_size=bits // 8).digest()
    return int.from_bytes(digest, "little")


def ticket_seed(run_seed: int, epoch: int, row: int) -> int:
    """Seed of a ticket, 48 bits: the same prompt gets other samples in another epoch or run, the same ones in the same."""
    return drawn(48, run_seed, epoch, row)
