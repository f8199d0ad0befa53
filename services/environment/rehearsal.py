"""Rehearses an environment that drives itself, before a run: a rollout with a data row at a door as in a run, in which the
policy's reply to everything is the row's answer.

Guarantees: the program meets the endpoints, limits and checks of a run; nothing is stored, and no generator is needed.
"""

from __future__ import annotations

import asyncio
from typing import Literal

import numpy as np

from services.chat.format import ChatFormat
from services.chat.tokenizers import tokenizer_folder
from services.config import RunConfig
from services.config.environments import EnvironmentConfig
from services.environment.agent import run_agent
from services.environment.endpoints import Door
from services.environment.programs.process import ProgramProcess
from services.environment.rollout import FinishedRollout, LiveRollout, Manner, RolloutPlace
from services.groups.generated import Generated, SamplingParameters
from services.protocol.messages import Span, Ticket
from services.runtime.tracing import TraceRecorder
from services.verifiers.base import Job

NAME = "rehearsal"
WITHOUT_ANSWER = "ok"  # the policy's reply if the row has no answer


async def rehearse(config: RunConfig, environment: EnvironmentConfig, process: ProgramProcess, job: Job) -> FinishedRollout:
    """Run a rollout of the row in `job`, with its completion as the policy's reply. Raises `ProgramFailed`."""
    chat = ChatFormat(tokenizer_folder(config.model.path), config.data)
    ticket = Ticket(NAME, 0, 0, 0, 0, [], job.answer, 1, job.source, row=job.row)
    live = LiveRollout(
        RolloutPlace(ticket, environment.name, 0, 0, NAME),
        Manner.of(config, None),
        chat,
        ScriptedPolicy(chat, job.completions[0] or WITHOUT_ANSWER),
        [],
        environment.max_turns,
        _kept,
        TraceRecorder(),
    )
    door = Door(config.model.path)
    serving = asyncio.ensure_future(door.serve())
    await asyncio.sleep(0)  # in which it begins to listen
    try:
        return await run_agent(live, process, door, environment.timeout_s)
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


class ScriptedPolicy:
    """Gives the same reply in every turn, after its reasoning if the model begins with one."""

    def __init__(self, chat: ChatFormat, text: str) -> None:
        self._chat, self._text = chat, text

    async def sample(
        self, request_id: str, tokens: list[int], seed: int, sampling: SamplingParameters, rollout: str, version: int | None
    ) -> Generated:
        """Return the text as sampled tokens, at most `sampling.max_tokens` of them."""
        reasoned = "</think>" if self._chat.opens_thinking(self._chat.decode(tokens)) else ""
        whole = self._chat.encode_after(-1, reasoned + self._text)
        said = np.asarray(whole[: sampling.max_tokens], np.int32)
        finish: Literal["stop", "length"] = "stop" if len(said) == len(whole) else "length"
        return Generated(said, np.zeros(len(said), np.float32), [Span(0, 0, len(said))], finish)


async def _kept(at: int, record: bytes) -> bool:
    return True
