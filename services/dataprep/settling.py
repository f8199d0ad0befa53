"""What becomes of a finished group. Pure."""

from __future__ import annotations

import math

from services.dataprep.admission import is_stale
from services.protocol.config import RunConfig
from services.protocol.messages import Header
from services.protocol.store import HeaderEntry, Settlement


def settle(item: HeaderEntry, next_step: int, config: RunConfig) -> Settlement:
    """Insert a group, drop it as stale, or bury a header that cannot be right, with the reason."""
    header = item.header
    if header is None:
        return Settlement(item, f"failed:corrupt header: {item.fault}")
    if fault := _fault(header, config):
        return Settlement(item, f"failed:{fault}")
    oldest = min(header.oldest)
    action = "stale" if is_stale(next_step, oldest, config.admission.max_staleness) else "insert"
    return Settlement(item, action, header.seq, oldest)


def _fault(header: Header, config: RunConfig) -> str:
    n = config.sampling.group_size
    columns = {
        "lengths": header.lengths, "rewards": header.rewards, "truncated": header.truncated,
        "oldest": header.oldest, "newest": header.newest, **{f"scores of {k}": v for k, v in header.scores.items()},
    }  # fmt: skip
    for name, column in columns.items():
        if len(column) != n:
            return f"header has {len(column)} {name}, sampling.group_size is {n}"
    if not all(map(math.isfinite, header.rewards)):
        return f"rewards are not finite: {header.rewards}"
    if min(header.lengths) < 1 or max(header.lengths) > config.sampling.max_tokens:
        return f"lengths {header.lengths} are outside 1..{config.sampling.max_tokens}"
    if not 1 <= header.prompt_tokens <= config.data.max_prompt_tokens:
        return f"prompt of {header.prompt_tokens} tokens is outside 1..{config.data.max_prompt_tokens}"
    if min(header.oldest) < 0 or any(new < old for old, new in zip(header.oldest, header.newest, strict=True)):
        return f"policy versions {header.oldest}..{header.newest} cannot be"
    return ""
