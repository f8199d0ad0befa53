"""Whether the segments of a header fit together. Pure."""

from __future__ import annotations

from services.protocol.messages import Header


def segment_fault(header: Header, n: int) -> str:
    """Return what is wrong with the segments of a header of n rollouts (columns, owners, tool tokens, contexts), or empty."""
    segments = len(header.rollout) or n
    columns = {
        "lengths": header.lengths, "oldest": header.oldest, "newest": header.newest, "tool_tokens": header.tool_tokens,
        **{name: column for name in ("context_tokens", "contexts") if (column := getattr(header, name))},
    }  # fmt: skip
    for name, column in columns.items():
        if len(column) != segments:
            return f"the header has {len(column)} {name}, but {n} rollouts of {segments} segments"
    if sorted({*header.owners}) != list(range(n)) or header.owners != sorted(header.owners):
        return f"segments belong to rollouts {header.owners}, which must ascend from 0 to {n - 1} without gaps"
    if any(not 0 <= tool <= length for tool, length in zip(header.tool_tokens, header.lengths, strict=True)):
        return f"tool tokens {header.tool_tokens} do not fit into lengths {header.lengths}"
    return _context_fault(header)


def _context_fault(header: Header) -> str:
    """Return what is wrong with the contexts of a header, or empty. Equal numbers have equal lengths; only the prompt has 0."""
    own = header.context_tokens or [0] * len(header.lengths)
    sizes = {0: 0}
    for number, tokens in zip(header.context_numbers, own, strict=True):
        if not 0 <= number <= len(sizes) or sizes.setdefault(number, tokens) != tokens or (tokens > 0) != (number > 0):
            return f"contexts {header.context_numbers} of {own} tokens are impossible"
    return ""
