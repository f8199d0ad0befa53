"""Messages between pod and worker: msgpack frames over a socket pair (services/confined/frames.py)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

TOOL_SHARE = 0.05
"""Share of `timeout_s` that one call of a tool may take."""


def as_json(value: Any) -> str:
    """Return the JSON of what programs receive and return: msgpack has no integers beyond 64 bits.

    Raises TypeError, ValueError, RecursionError.
    """
    return json.dumps(value, ensure_ascii=False, default=msgspec.to_builtins)


class ProgramSetup(msgspec.Struct, array_like=True):
    """First frame to a worker: the part of its environment's configuration that it needs."""

    kind: str  # python | agent | mcp | verifiers
    function: str = ""
    options: dict[str, Any] = {}
    command: list[str] = []  # of an agent that is a separate program, or of an MCP server
    url: str = ""  # of an MCP server
    shared: bool = False  # whether rollouts share a session with it
    token: str = ""  # where its bearer token is
    tools: list[str] = []  # built-in
    timeout_s: float = 600.0  # for one reply
    environment: str = ""  # name of an environment of the library verifiers
    max_turns: int = 16  # after which that environment ends the rollout itself

    @property
    def tool_limit_s(self) -> float:
        """Return the time limit of a call of a built-in or MCP tool."""
        return TOOL_SHARE * self.timeout_s


def setup_of(environment: Mapping[str, Any]) -> ProgramSetup:
    """Return the part that a worker needs of an environment's configuration, given as a dict."""
    fields = {name: environment[name] for name in ProgramSetup.__struct_fields__ if name in environment}
    setup = ProgramSetup(**fields, environment=environment["name"])
    program: list[str] | str = environment.get("run") or environment.get("server") or ""
    if isinstance(program, list):
        setup.command = program
    elif setup.kind == "agent":
        setup.function = program
    else:
        setup.url = program
    return setup


class Started(msgspec.Struct, array_like=True):
    """First frame of a worker: it is ready, or the reason why it cannot be."""

    error: str = ""


class ProgramStep(msgspec.Struct, array_like=True):
    """A step for a rollout's program to perform."""

    id: int
    rollout: str
    do: str  # start | turn | unknown | score | restore | run | rows | stop | close
    given: str = "null"  # JSON


class StepDone(msgspec.Struct, array_like=True):
    """Its result."""

    id: int
    value: Any = None  # JSON on its way
    error: str = ""
    seconds: float = 0.0  # that its code took
