"""Rollouts with a scripted policy behind a real door."""

from __future__ import annotations

import asyncio
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn

from services.chat.format import ChatFormat
from services.environment.door.resends import AskedTurns
from services.environment.door.turns import ContextFull, Overrides, RolloutOver, TurnReply, Usage
from services.environment.endpoints import make_door
from services.environment.recording.recorder import Call, Recorder
from services.groups.generated import GenerationFailed, SamplingParameters
from tests.environment.support.conversations import ScriptedPolicy
from tests.environment.support.templates import Family, chat_of


@dataclass
class ScriptedRollout:
    """A rollout whose scripted policy replies like a model of its family."""

    family: Family
    seed: str
    said: list[str] = field(default_factory=list)
    """Texts for the policy to return first, in order."""
    sampling: SamplingParameters = field(default_factory=lambda: SamplingParameters(4096))
    broken: bool = False
    cut: bool = False
    """Whether these texts end at the length limit."""
    answers: threading.Event = field(default_factory=threading.Event)
    """Clear it to hold back the policy's replies."""
    begun: threading.Event = field(default_factory=threading.Event)
    """Set when a turn has begun."""

    def __post_init__(self) -> None:
        self.policy = ScriptedPolicy(self.family, random.Random(self.seed), self.said)
        self.recorder = Recorder(self.chat, [])
        self.asked = AskedTurns()
        self.answers.set()
        self.overrides: list[Overrides] = []
        self.sampling_s = self.sampling_cpu_s = 0.0  # spent by the policy

    @property
    def chat(self) -> ChatFormat:
        """Return the chat format of its model."""
        return chat_of(self.family)

    async def complete(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], overrides: Overrides) -> TurnReply:
        """Return the scripted reply to a conversation."""
        return await self._answer(self.recorder.plan(messages, tools), bool(tools), overrides)

    async def _answer(self, call: Call, tools: bool, overrides: Overrides) -> TurnReply:
        if len(call.tokens) > 100_000:
            raise ContextFull(f"the conversation has {len(call.tokens)} tokens")
        self.overrides.append(overrides)
        if self.broken:
            raise GenerationFailed("the engine is gone")
        self.begun.set()
        while not self.answers.is_set():  # another thread sets it
            await asyncio.sleep(0.01)
        begun, cpu_begun = time.perf_counter(), time.thread_time()
        generated = self.policy.sample(call.tokens, tools, cut=self.cut)
        self.sampling_s += time.perf_counter() - begun
        self.sampling_cpu_s += time.thread_time() - cpu_begun
        message = self.recorder.record(call, generated, own_stop=overrides.stop)
        return TurnReply(message, generated, Usage(len(call.tokens), len(generated.tokens)))


@dataclass
class ScriptedRollouts:
    """Rollouts by key; the rollout with the key `over` has ended."""

    rollouts: dict[str, ScriptedRollout]
    model: str = "org/tiny"

    def rollout(self, key: str) -> ScriptedRollout | None:
        """Return the rollout with this key."""
        if key == "over":
            raise RolloutOver("the rollout has reached its limit of 3 turns")
        return self.rollouts.get(key)


@contextmanager
def served(rollouts: ScriptedRollouts) -> Iterator[str]:
    """Serve a door on the loopback interface in a separate thread; yield its URL."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        config = uvicorn.Config(make_door(rollouts), log_level="warning", lifespan="off", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(10)
