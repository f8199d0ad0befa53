"""A process's view of the run's state: at most a second old, and refreshed at once after a notification.

Waits for: notifications of changes to the run, or one second. Unblocks: whoever waits for `view.changed`; when a pause begins,
changes or ends, it notifies those in this process that wait for `pause`.
"""

from __future__ import annotations

import asyncio

from services.runtime.loops import Loop
from services.runtime.notifications import Notifications
from services.store import RunState, Store
from services.store.records import PauseMode

REFRESH_S = 1.0


class RunView:
    """The last known `RunState`. Decisions that must not race are made by the Redis Functions, not here."""

    def __init__(self, store: Store, notifications: Notifications, role: str) -> None:
        self.store = store
        self.notifications = notifications
        self.role = role
        self.state: RunState | None = None
        self.changed = asyncio.Condition()

    @property
    def paused(self) -> bool:
        """Whether this role is asked to pause."""
        return self.state is not None and self.role in self.state.paused

    @property
    def pause_mode(self) -> PauseMode | None:
        """How this role is asked to pause; None: it is not."""
        return None if self.state is None else self.state.pause_modes.get(self.role)

    @property
    def ended(self) -> bool:
        """Whether the run is over."""
        return self.state is not None and bool(self.state.finished)

    async def refresh(self) -> RunState | None:
        """Read the state now."""
        state, before = await self.store.run.state(), self.pause_mode
        async with self.changed:
            self.state = state
            self.changed.notify_all()
        if self.pause_mode != before:
            self.notifications.notify("pause")
        return state

    async def follow(self, loop: Loop) -> None:
        """The loop that keeps the view fresh."""
        while True:
            await self.refresh()
            loop.progress()
            await self.notifications.wait("control", "version", timeout=REFRESH_S)

    async def created(self) -> RunState:
        """Wait until the run exists, which dataprep sees to."""
        async with self.changed:
            await self.changed.wait_for(lambda: self.state is not None)
        assert self.state is not None
        return self.state
