"""A connection that repeats every function call: immediately, as after a lost reply, and late, after later calls.

Guarantees: the caller gets the reply or the error of the repeated call, as after a lost reply. A change by a repeat is
noted, unless `MAY_CHANGE` allows the function to make it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from services.protocol.errors import StoreError
from services.store.connection import Connection
from services.store.functions import library
from tests.repeats.contents import Contents, changed, contents

MAY_CHANGE = {
    "eval_volunteer": (r"eval:volunteers.*|eval:round\.started_ms", "volunteers until it asks again"),
    "eval_resign": (r"eval:volunteers.*", "ceases to volunteer until it asks again"),
    "step_down": (r"run\.leader", "gives up what a late call took; a process steps down when it ends"),
    "lead": (r"run\.leader(_fence)?", "leads, until its lease expires"),
    "beat": (r"fleet.*", "lives, until its heartbeat is too old"),
    "leave": (r"fleet.*|tickets:pending", "is gone until its next heartbeat"),
    "read_headers": (r"headers:pending", "reads more: the leader reads unsettled headers again"),
    "submit": (r"ledger\.refused_submits|payload:.*", "is refused, and counted as that"),
    "save_partial": (r"partial:.*", "saves older tokens; the rest is generated again"),
    "retire": (r"step:.*|group:.*|payload:.*|run\.retired_step", "retires the next step that is due"),
    "log_samples": (r"samples:state\.until_ms", "renews the sample log's lease"),
    "record": (r"metrics", "records a step again; readers take the first record"),
    "rescale": (r"replay:.*", "goes on with the rescaling that was begun"),
    "sweep_and_peek": (r"run\.frozen_by", "finds that the lease of a snapshot has expired"),
}  # fmt: skip
"""Function -> what a repeat may change, and why that is harmless: it only renews leases, or does the next unit of work."""


@dataclass
class Journal:
    """Calls and effects of repeats, for all actors of a run."""

    at_once: bool = False
    late: Sequence[int] = ()
    """Number of later calls after which each call is repeated."""
    calls: list[tuple[Repeater, tuple[tuple[Any, ...], ...], str]] = field(default_factory=list)
    repeated: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    harms: dict[str, str] = field(default_factory=dict)
    """Function -> what its first harmful repeat changed."""

    def note(self, name: str, before: Contents, after: Contents, when: str) -> None:
        """Compare the contents before and after a repeat."""
        self.repeated[name] += 1
        allowed = MAY_CHANGE.get(name, ("", ""))[0]
        if harm := sorted(what for what in changed(before, after) if not re.fullmatch(allowed, what)):
            self.harms.setdefault(name, f"{when} changed {', '.join(harm[:8])}")


class Repeater(Connection):
    """A connection of one actor, whose calls go into `journal` and are repeated accordingly."""

    journal: Journal
    watched: Any
    """A store with a plain connection."""

    async def send(self, *commands: tuple[Any, ...]) -> list[Any]:
        """Send commands. Function calls are sent twice, together with the earlier ones that are due."""
        names = [name for command in commands if (name := called(command))]
        if not names:
            return await super().send(*commands)
        journal = self.journal
        journal.calls.append((self, commands, names[-1]))
        try:
            replies: list[Any] | Exception = await super().send(*commands)
        except StoreError as error:
            replies = error
        if journal.at_once:
            replies = await self.again(journal.calls[-1], "at once")
        for delay in journal.late:
            if len(journal.calls) > delay:
                earlier = journal.calls[-1 - delay]
                await earlier[0].again(earlier, f"after {delay} others")
        if isinstance(replies, Exception):
            raise replies
        return replies

    async def again(self, call: tuple[Repeater, tuple[tuple[Any, ...], ...], str], when: str) -> list[Any] | Exception:
        """Repeat a call; return its reply or error."""
        _, commands, name = call
        before = await contents(self.watched)
        try:
            return await super().send(*commands)
        except StoreError as error:
            return error
        finally:
            self.journal.note(name, before, await contents(self.watched), when)


def called(command: Sequence[Any]) -> str:
    """Return the function of the library that a command calls, or an empty string."""
    prefix = f"{library()[0]}_"
    return command[1].removeprefix(prefix) if command[0] == "FCALL" and command[1].startswith(prefix) else ""
