"""A custom class as an environment: one object takes part in each rollout (docs/environments.md).

The class may define, each sync or async: `tools`, a list of its methods' names, which an object may replace in `__init__`,
`start` or `restore`; `start(row)`, which returns further messages or nothing; `turn(message)`, which returns a text, messages,
or None to end the rollout; `score()`, a number or a dict of numbers; `close()`; `snapshot()` and `restore(state)`, between
which there is JSON.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, cast

from services.environment.programs.tools import Callee, ToolSet, answered, methods_of, shortened
from services.verifiers.numeric import MOST_PARTS, MOST_SCORE, PART, number_of

CLOSE_LIMIT_S = 30.0
SHOWN_CHARACTERS = 200
"""How much of an invalid reply its error shows."""
LOST = "The result of this call is unknown: the machine that made it was lost."


class BadReply(Exception):
    """A program returned something that is not a reply."""


class LoadedProgram:
    """An instance of a custom class in one rollout, with tools from elsewhere."""

    def __init__(self, made: Any = None, sets: Sequence[ToolSet] = (), timeout_s: float = float("inf")) -> None:
        """`made`: the object; None: the rollout ends with the first reply that calls no tool, and has no score.

        `timeout_s` is the time limit of a reply.
        """
        self._made, self._sets, self._timeout_s = made, list(sets), timeout_s
        self._tools: dict[str, Callee] = {}

    async def start(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Begin with a data row; return further messages and the descriptions of the tools."""
        said = await self._maybe("start", row)
        return {**await self._reply(_messages(said) or []), "tools": self._found_tools()}

    async def turn(self, message: dict[str, Any]) -> dict[str, Any]:
        """Reply to the policy's message; `messages` is None if the rollout has ended."""
        if error := message.get("error"):
            return await self._reply([{"role": "user", "content": f"Error: {error}"}])
        if message.get("tool_calls"):
            return await self._reply(await answered(message, self._tools, self._timeout_s))
        return await self._reply(_messages(await self._maybe("turn", message)))

    async def unknown(self, message: dict[str, Any]) -> dict[str, Any]:
        """Reply to the policy's message when its tools may have run already, with results that are lost."""
        calls = message.get("tool_calls") or ()
        if not calls:  # no tool has run
            return await self.turn(message)
        said = [{"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": LOST} for call in calls]
        return await self._reply(said)

    async def score(self, _: Any = None) -> dict[str, float] | None:
        """Return the score as `score` and its parts, or None if the class scores nothing."""
        if not hasattr(self._made, "score"):
            return None
        return scores_of(await self._maybe("score"))

    async def restore(self, state: Any) -> list[dict[str, Any]]:
        """Go back to a snapshot; return the descriptions of the tools."""
        for number, each in enumerate(self._sets):
            each.restore(state["sets"][number])
        await self._maybe("restore", state["own"] if self._sets else state)
        return self._found_tools()

    async def close(self, _: Any = None) -> None:
        """End: first the tools, then the object, whose own method may take `CLOSE_LIMIT_S`."""
        try:
            for each in self._sets:
                await each.close()
        finally:
            async with asyncio.timeout(CLOSE_LIMIT_S):
                await self._maybe("close")

    def _found_tools(self) -> list[dict[str, Any]]:
        """Take the current tools, the object's first, and return their descriptions."""
        own = methods_of(self._made, getattr(self._made, "tools", ()))
        listed: list[Callee] = [*own.values(), *(tool for each in self._sets for tool in each.tools)]
        self._tools = {tool.name: tool for tool in listed}
        if len(self._tools) < len(listed):
            names = [tool.name for tool in listed]
            twice = next(name for name in names if names.count(name) > 1)
            raise BadReply(f"two tools are called {twice!r}: rename one, or do not list it")
        return [tool.described for tool in self._tools.values()]

    async def _reply(self, messages: list[dict[str, Any]] | None) -> dict[str, Any]:
        return {"messages": messages, "snapshot": await self._snapshot()}

    async def _snapshot(self) -> Any:
        """Return the state of the object and of the other tools; None: it cannot be restored."""
        if self._made is not None and not hasattr(self._made, "restore"):
            return None
        own = await self._maybe("snapshot")
        if not self._sets or (own is None and self._made is not None):
            return own
        kept = [each.snapshot() for each in self._sets]
        return None if any(each is None for each in kept) else {"own": own, "sets": kept}

    async def _maybe(self, name: str, *given: Any) -> Any:
        """Call a method of the object, if it has one of this name."""
        method = getattr(self._made, name, None)
        if method is None:
            return None
        said = method(*given)
        return await said if inspect.isawaitable(said) else said


def scores_of(said: Any) -> dict[str, float] | None:
    """Return a reward as `score` and its parts; None means that there is none. Raises `BadReply`."""
    if said is None:
        return None
    given = cast("dict[str, Any]", said) if isinstance(said, dict) else {"score": said}
    found = {str(name): number for name, value in given.items() if (number := number_of(value)) is not None}
    if found.keys() != given.keys() or "score" not in found or not all(abs(number) <= MOST_SCORE for number in found.values()):
        raise BadReply(
            f"the reward {_shown(said)} is not valid: give a finite number of at most {MOST_SCORE:g}, or a dict of them with the "
            "key 'score'"
        )
    if len(found) > 1 + MOST_PARTS or not all(map(PART.fullmatch, found)):
        raise BadReply(
            f"the reward {_shown(said)} is not valid: give at most {MOST_PARTS} parts, named by up to 40 letters, digits, _ and -"
        )
    return found


def _messages(said: Any) -> list[dict[str, Any]] | None:
    if said is None:
        return None
    if isinstance(said, str):
        return [{"role": "user", "content": said}]
    listed = cast("list[Any]", [said] if isinstance(said, dict) else said if isinstance(said, list) else [None])
    if not all(isinstance(each, dict) and "role" in each for each in listed):
        raise BadReply(f"{_shown(said)} is not a reply: return a text, a list of messages with `role` and `content`, or None")
    return cast("list[dict[str, Any]]", listed)


def _shown(said: Any) -> str:
    """Return the beginning of what a program returned."""
    return shortened(repr(said), SHOWN_CHARACTERS)
