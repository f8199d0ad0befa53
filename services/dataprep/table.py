"""The leader's picture of the replay table: what Redis holds, without asking for it at every decision.

Guarantees: equal to the table in Redis as long as one leader applies its own settlements and plans to both; a new leader,
and one that got no answer, reads it anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from services.dataprep.admission import Ready
from services.protocol.messages import Header
from services.protocol.store import BufferedGroup


class Table:
    """Groups ready to be drawn, by name."""

    def __init__(self, groups: Iterable[BufferedGroup], max_uses: int) -> None:
        self._groups = {group.group: group for group in groups}
        self._max_uses = max_uses

    def __len__(self) -> int:
        return len(self._groups)

    def __getitem__(self, group: str) -> BufferedGroup:
        return self._groups[group]

    @property
    def uses_left(self) -> list[int]:
        """Uses that each group may still take, oldest ticket first."""
        return [self._max_uses - group.uses for group in sorted(self._groups.values(), key=lambda group: group.header.seq)]

    def ready(self) -> list[Ready]:
        """As admission sees them."""
        return [Ready(name, group.header.seq, min(group.header.oldest)) for name, group in self._groups.items()]

    def insert(self, header: Header) -> None:
        """A settled group."""
        self._groups[header.ticket] = BufferedGroup(header.ticket, 0, header)

    def drop(self, groups: Sequence[str]) -> None:
        """Groups left unused."""
        for name in groups:
            del self._groups[name]

    def draw(self, groups: Sequence[str]) -> None:
        """Groups were used once more."""
        for name in groups:
            group = self._groups.pop(name)
            if group.uses + 1 < self._max_uses:
                self._groups[name] = BufferedGroup(name, group.uses + 1, group.header)
