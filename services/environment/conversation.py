"""Drives a rollout in an environment that is a custom class: its start, its turns, its score."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from services.environment.door.turns import ContextFull, RolloutOver
from services.environment.programs.process import ProgramFailed, ProgramProcess, row_for
from services.environment.records import EnvironmentReply, Record, reply_of
from services.environment.rollout import FinishedRollout, LiveRollout

CUT_OFF = "length"
"""The finish of a turn at its limit of tokens, which ends the rollout: no reply of the environment follows it."""


def restorable(records: Sequence[Record]) -> bool:
    """Return whether a rollout can be continued from its records: its last reply has the environment's state."""
    replies = [record for record in records if isinstance(record, EnvironmentReply)]
    return bool(replies) and bool(replies[-1].snapshot)


async def converse(live: LiveRollout, process: ProgramProcess, prompt: list[dict[str, Any]]) -> FinishedRollout:
    """Run a rollout to its end, from where its records leave off. Raises `ProgramFailed`, `LeaseLost`, `GenerationFailed`."""
    name = live.place.name
    try:
        messages, tools = await _begin(live, process, prompt)
        try:
            while messages is not None:
                reply = await live.complete(messages, tools)
                message = reply.message
                if reply.generated.finish == CUT_OFF:
                    live.truncated = True
                    break
                added = await _reply(live, process, "turn", message)
                messages = None if added is None else [*messages, said(message), *added]
        except (RolloutOver, ContextFull):  # at a limit, which marks it as truncated
            pass
        if not live.recorder.turns:
            raise ProgramFailed(
                "the rollout ended before the policy's first turn: the prompt leaves no room, or start() ended it"
            )
        scores = (await process.do(name, "score")).value
        return live.finished(scores)
    finally:
        process.drop(name)


async def _begin(
    live: LiveRollout, process: ProgramProcess, prompt: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]] | None, list[dict[str, Any]]]:
    """Start the environment, or restore it; return the conversation to continue and the tools."""
    name = live.place.name
    if not live.records:
        done = await process.do(name, "start", row_for(live.place.ticket.row, live.place.ticket.answer))
        messages, tools = done.value["messages"], done.value["tools"]
        await live.append(reply_of(messages, done.value.get("snapshot"), done.seconds, tools))
        return [*prompt, *messages], tools
    conversation: list[dict[str, Any]] | None = list(prompt)
    tools: list[dict[str, Any]] = []
    state = ""
    for record in live.records:
        if isinstance(record, EnvironmentReply):
            added, state = json.loads(record.messages), record.snapshot or state
            tools = json.loads(record.tools) if record.tools else tools
            conversation = None if added is None else [*(conversation or []), *added]
        else:
            conversation = [*(conversation or []), said(json.loads(record.reply))]
    await process.do(name, "restore", json.loads(state))
    last = live.records[-1]
    if isinstance(last, EnvironmentReply):
        return conversation, tools
    if last.finish == CUT_OFF:
        live.truncated, conversation = True, None
    elif conversation is not None:  # its tools may have run
        added = await _reply(live, process, "unknown", json.loads(last.reply))
        conversation = None if added is None else [*conversation, *added]
    return conversation, tools


async def _reply(live: LiveRollout, process: ProgramProcess, do: str, message: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Return the environment's reply to the policy, committed; None if the rollout has ended."""
    done = await process.do(live.place.name, do, message)
    await live.append(reply_of(done.value["messages"], done.value["snapshot"], done.seconds))
    return done.value["messages"]


def said(message: dict[str, Any]) -> dict[str, Any]:
    """Return the policy's message as part of a conversation."""
    return {name: value for name, value in message.items() if name != "error"}
