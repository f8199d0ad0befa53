"""One rollout: the policy's turns and the environment's replies, each committed before the next begins.

Guarantees: a turn is committed before its tools run, and their replies before the policy reads them, so nothing is sampled twice
and no tool call is made twice; after the loss of its pod a rollout resumes where it stopped if its environment can be restored,
and otherwise starts again, with the same seed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import time
from collections.abc import Awaitable, Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from services.chat.format import ChatFormat
from services.config import RunConfig
from services.environment.door.resends import AskedTurns
from services.environment.door.turns import RUN, ContextFull, Overrides, RolloutOver, TurnLost, TurnReply, Usage
from services.environment.generators import limited
from services.environment.recording.recorder import Call, Recorder, TooLong
from services.environment.records import EnvironmentReply, Record, pack_record
from services.groups.generated import Generated, SamplingParameters, Segment
from services.protocol.errors import StoreError
from services.protocol.messages import Ticket
from services.protocol.payloads import Turn
from services.runtime.tracing import TraceRecorder, gen_ai


class LeaseLost(TurnLost):
    """Another pod holds the ticket now."""

    def __init__(self) -> None:
        super().__init__("another pod has claimed its ticket")


@dataclass(frozen=True)
class RolloutPlace:
    """Identifies a rollout."""

    ticket: Ticket
    environment: str
    sample: int
    restarts: int
    name: str  # unique among those of all pods and attempts

    def seed(self, turn: int) -> int:
        """Return the seed of a turn: the first one has that of a single completion."""
        own = self.ticket.seed + self.sample
        if turn == 0:
            return own
        return int.from_bytes(hashlib.blake2b(f"{own}.{turn}".encode(), digest_size=4).digest(), "little") >> 1


@dataclass(frozen=True)
class FinishedRollout:
    """The outcome of a rollout."""

    segments: list[Segment]
    answer: str  # what the policy said last
    answer_tokens: list[int]  # the tokens of that reply
    finish: str  # of that reply: stop | length
    scores: dict[str, float] | None  # `score` and its parts; None: the environment does not score
    truncated: bool
    turns: int
    environment_s: float  # that the environment took
    policy_s: float  # for which it waited for the policy
    tool_calls: int
    malformed_calls: int  # turns whose tool calls could not be parsed; the policy got the reason


@dataclass(frozen=True)
class Manner:
    """How a rollout calls the policy."""

    sampling: SamplingParameters
    context: int
    """Maximum number of tokens of a conversation, including the completion that ends it."""
    version: int | None = None
    """The policy version to evaluate; None: the one that is published at the time."""

    @classmethod
    def of(cls, config: RunConfig, version: int | None) -> Manner:
        """Return how a rollout calls the policy to evaluate `version`, or to be trained on (None): its segments then fit into
        rows.
        """
        longest = config.model.max_tokens
        context = min(longest, config.trainer.row_tokens) if version is None else longest
        return cls(SamplingParameters.of(config, version), context, version)


class TurnSampler(Protocol):
    """What samples the policy's turns."""

    async def sample(
        self, request_id: str, tokens: list[int], seed: int, sampling: SamplingParameters, rollout: str, version: int | None
    ) -> Generated:
        """Return the completion of `tokens` in a turn of a rollout. Raises `GenerationFailed`."""
        ...


class LiveRollout:
    """A running rollout: its records, and its calls of the policy."""

    def __init__(
        self,
        place: RolloutPlace,
        manner: Manner,
        chat: ChatFormat,
        fleet: TurnSampler,
        records: list[Record],
        max_turns: int,
        commit: Callable[[int, bytes], Awaitable[bool]],
        tracing: TraceRecorder,
    ) -> None:
        """`commit` appends a record at a place and returns False if another pod holds the ticket."""
        self.place, self._fleet, self._commit, self._max_turns = place, fleet, commit, max_turns
        self._records = records
        self.chat, self.sampling = chat, manner.sampling
        self._context, self._version = manner.context, manner.version
        self.recorder = Recorder.restored(chat, place.ticket.prompt, [record for record in records if isinstance(record, Turn)])
        self.asked = AskedTurns()
        self._began, self._read = time.monotonic(), 0  # tokens that the policy has read
        self.truncated = False
        self.lost: LeaseLost | StoreError | None = None  # why it cannot continue here
        self._asked = len(self.recorder.turns)  # turns begun
        self._committing = asyncio.Lock()
        self._calls, self._calls_began, self._policy_s = 0, 0.0, 0.0  # under way, since when any has been, time before that
        self._tracing, self._idle_since = tracing, time.monotonic()  # since when no call has been under way
        self.environment_s = sum(record.seconds for record in records if isinstance(record, EnvironmentReply))

    @property
    def records(self) -> list[Record]:
        """The history so far."""
        return self._records

    @property
    def policy_s(self) -> float:
        """Time for which at least one call has waited for a turn of the policy, until it was committed."""
        return self._policy_s + (time.monotonic() - self._calls_began if self._calls else 0.0)

    @contextlib.contextmanager
    def _waiting_for_policy(self) -> Generator[None]:
        if not self._calls:
            self._calls_began = time.monotonic()
        self._calls += 1
        try:
            yield
        finally:
            if self._calls == 1:
                self._policy_s, self._idle_since = self.policy_s, time.monotonic()
            self._calls -= 1

    async def complete(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], overrides: Overrides = RUN
    ) -> TurnReply:
        """Return the policy's reply to a conversation, committed.

        Raises `BadMessages`, `RolloutOver`, `ContextFull`, `LeaseLost`, `StoreError`, `GenerationFailed`.
        """
        try:
            call = self.recorder.plan(messages, tools, self._context)
        except TooLong as error:
            self.truncated = True
            raise ContextFull(str(error)) from None
        return await self._turn(call, overrides)

    async def _turn(self, call: Call, overrides: Overrides) -> TurnReply:
        turn = self._asked
        if turn >= self._max_turns:
            self.truncated = True
            raise RolloutOver(f"the rollout has had {turn} turns, the most that max_turns allows")
        room = self._context - len(call.tokens)
        if room < 1:
            self.truncated = True
            raise ContextFull(f"{len(call.tokens)} tokens leave no room for more within {self._context}")
        self._asked += 1
        self._read += len(call.tokens)
        sampling = limited(self.sampling, min(room, overrides.max_tokens or room))
        began = time.monotonic()
        waited_s = 0.0 if self._calls else began - self._idle_since
        with self._waiting_for_policy():
            generated = await self._fleet.sample(
                f"{self.place.name}.{turn}",
                call.tokens,
                self.place.seed(turn),
                sampling,
                self.place.name,
                self._version,
            )
            async with self._committing:
                message = self.recorder.record(
                    call, generated, self.sampling.stop, overrides.stop, waited_s, time.monotonic() - began
                )
                await self.append(self.recorder.turns[-1])
        if self.place.ticket.trace:
            limits, read = (sampling.temperature, sampling.max_tokens), len(call.tokens)
            told = gen_ai.inference("chat", *limits, read, len(generated.tokens), [generated.finish])
            told["gen_ai.conversation.id"] = self.place.name
            self._trace("turn", began, told)
        if generated.finish == "length" and len(generated.tokens) >= min(room, self.sampling.max_tokens):
            self.truncated = True  # not at a lower limit, which the request itself set
        return TurnReply(message, generated, Usage(len(call.tokens), len(generated.tokens)))

    async def append(self, record: Record) -> None:
        """Commit a record. Raises `LeaseLost` and `StoreError`, after which the rollout cannot continue here."""
        try:
            if not await self._commit(len(self._records), pack_record(record)):
                raise LeaseLost
        except (LeaseLost, StoreError) as error:
            self.lost = error
            raise
        self._records.append(record)
        if isinstance(record, EnvironmentReply):
            self.environment_s += record.seconds
            if self.place.ticket.trace:
                calls = json.loads(self.recorder.turns[-1].reply).get("tool_calls") or () if self.recorder.turns else ()
                self._trace("environment", time.monotonic() - record.seconds, gen_ai.tools(calls, self.place.name))

    def _trace(self, name: str, began: float, told: Mapping[str, gen_ai.Attribute]) -> None:
        """Record a span of the group's trace."""
        place = self.place
        self._tracing.record(name, place.ticket.trace, began, None, told, sample=place.sample, restarts=place.restarts)

    def finished(self, scores: dict[str, float] | None) -> FinishedRollout:
        """Return the outcome."""
        read, sampled = self._read, sum(len(turn.tokens) for turn in self.recorder.turns)
        self._trace("rollout", self._began, gen_ai.agent(self.place.environment, self.place.name, read, sampled))
        said, last = [json.loads(turn.reply) for turn in self.recorder.turns], self.recorder.turns[-1]
        return FinishedRollout(
            self.recorder.segments(),
            said[-1].get("content") or "",
            last.tokens.tolist(),
            last.finish,
            scores,
            self.truncated,
            len(said),
            self.environment_s,
            sum(turn.sampled_s for turn in self.recorder.turns),
            sum(len(each.get("tool_calls") or ()) for each in said),
            sum("error" in each for each in said),
        )
