"""Turns of the policy as the endpoints see them: requests, replies, and reasons for refusals."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from services.groups.generated import Generated


class RequestRefused(Exception):
    """A request that is not served, with the HTTP status, a code and a line for the program that made it."""

    def __init__(self, message: str, status: int = 400, code: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status, self.code = status, code


class RolloutOver(RequestRefused):
    """The rollout has ended, or reached a limit: there are no further turns."""

    def __init__(self, message: str) -> None:
        super().__init__(message, 410, "rollout_over")


class ContextFull(RequestRefused):
    """The conversation leaves no room for a sampled token."""

    def __init__(self, message: str) -> None:
        super().__init__(message, 400, "context_length_exceeded")


class TurnLost(Exception):
    """A turn could not be committed: the rollout ends here, and is continued or restarted elsewhere."""


class Overrides(NamedTuple):
    """The sampling parameters that a request may set."""

    max_tokens: int | None = None  # None: as many as the rollout has left
    stop: tuple[str, ...] = ()  # besides the run's


RUN = Overrides()


class Usage(NamedTuple):
    """Tokens of a turn."""

    prompt_tokens: int
    completion_tokens: int


class TurnReply(NamedTuple):
    """A turn of the policy."""

    message: dict[str, Any]  # as `Recorder.record` returns it
    generated: Generated
    usage: Usage


@dataclass(frozen=True, slots=True)
class Question:
    """A request to the policy, whichever endpoint it came through."""

    messages: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])  # in OpenAI's form
    tools: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])  # in OpenAI's form
    overrides: Overrides = RUN
    stream: bool = False
    usage: bool = False  # whether a stream ends with the usage
    logprobs: bool = False
    ignored: tuple[str, ...] = ()  # fields that are taken as hints and not enforced
    echo: dict[str, Any] = field(default_factory=dict[str, Any])  # fields that the reply repeats
