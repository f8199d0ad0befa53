"""The interface between the endpoints and their rollouts."""

from __future__ import annotations

from typing import Any, Protocol

from services.environment.chat.format import ChatFormat
from services.environment.door.resends import AskedTurns
from services.environment.door.turns import Overrides, TurnReply
from services.rollouts.generated import SamplingParameters


class OpenRollout(Protocol):
    """A rollout that accepts turns."""

    @property
    def asked(self) -> AskedTurns:
        """Return the turns that resent requests may ask for."""
        ...

    @property
    def chat(self) -> ChatFormat:
        """Return the chat format of its model."""
        ...

    @property
    def sampling(self) -> SamplingParameters:
        """Return the sampling of the run, which no request changes."""
        ...

    async def complete(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], overrides: Overrides) -> TurnReply:
        """Record and return the policy's reply. Raises `BadMessages`, `RequestRefused`, `GenerationFailed` and `TurnLost`."""
        ...


class Rollouts(Protocol):
    """The rollouts of a pod."""

    @property
    def model(self) -> str:
        """Return the name under which the policy is listed."""
        ...

    def rollout(self, key: str) -> OpenRollout | None:
        """Return the rollout that an API key names; None: there is none. Raises `RolloutOver`."""
        ...
