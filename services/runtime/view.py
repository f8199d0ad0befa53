"""A process's view of the run's state: at most a second old, and refreshed immediately after a notification.

Waits for: notifications of changes to the run, or one second. Unblocks: tasks that wait for `view.changed`; when a pause begins
or ends, it notifies waiters for `pause` in this process.
"""

from __future__ import annotations

import asyncio

from services.runtime.loops import Loop
from services.runtime.notifications import Notifications
from services.store import RunState, Store

REFRESH_S = 1.0


class RunView:
    """Holds the last known `RunState`. Decisions that must not race are made by the Redis Functions, not here."""

    def __init__(self, store: Store, notifications: Notifications, role: str) -> None:
        self.store = store
        self.notifications = notifications
        self.role = role
        self.state: RunState | None = None
        self.changed = asyncio.Condition()

    @property
    def paused(self) -> bool:
        """Return whether this role is asked to pause."""
        return self.state is not None and self.role in self.state.paused

    @property
    def ended(self) -> bool:
        """Return whether the run is over."""
        return self.state is not None and bool(self.state.finished)

    async def refresh(self) -> RunState | None:
        """Read the state now."""
        state, before = await self.store.run.state(), self.paused
        async with self.changed:
            self.state = state
            self.changed.notify_all()
        if self.paused != before:
            self.notifications.notify("pause")
        return state

    async def follow(self, loop: Loop) -> None:
        """Keep the view up to date (a supervised loop)."""
        while True:
            await self.refresh()
            loop.progress()
            await self.notifications.wait("control", "version", timeout=REFRESH_S)

    async def created(self) -> RunState:
        """Wait until the run exists, which dataprep creates."""
        async with self.changed:
            await self.changed.wait_for(lambda: self.state is not None)
        assert self.state is not None
        return self.state
