"""A rollout that another pod takes over after any of its records ends as if it had not been interrupted."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from services.chat.format import ChatFormat
from services.config.environments import PythonEnvironment
from services.environment.conversation import converse, restorable
from services.environment.records import Record, unpack_records
from services.environment.rollout import FinishedRollout, LiveRollout, Manner, RolloutPlace
from services.groups.generated import Generated, SamplingParameters
from services.protocol.messages import Span
from services.runtime.tracing import OtlpTracing, TraceRecorder, gen_ai
from tests.environment.programs.test_programs import PROGRAMS, process
from tests.environment.support.templates import FAMILIES, chat_of
from tests.support.harness import small_config, ticket, wait_until
from tests.support.servers.collector import collecting

TURNS = 4


@dataclass
class Policy:
    """A deterministic policy: its first replies are the texts `said`, and the turn `cut` is truncated."""

    chat: ChatFormat
    cut: int = -1
    said: tuple[str, ...] = ()
    asked: list[int] = field(default_factory=list)

    async def sample(
        self, request: str, tokens: list[int], seed: int, sampling: SamplingParameters, rollout: str, version: int | None
    ) -> Generated:
        """Return the scripted text, or a word that depends only on the conversation and the seed."""
        turn = int(request.rsplit(".", 1)[1])
        self.asked.append(turn)
        own = hashlib.blake2b(np.array([seed, *tokens], np.int64).tobytes(), digest_size=4).hexdigest()
        text = self.said[turn] if turn < len(self.said) else own
        ids = np.array(self.chat.encode_after(-1, text), np.int32)
        ids = ids[: sampling.max_tokens] if turn == self.cut else ids
        finish = "length" if turn == self.cut else "stop"
        return Generated(ids, np.full(len(ids), -0.5, np.float32), [Span(0, 0, len(ids))], finish)


def rollout(
    policy: Policy, records: list[bytes], max_turns: int, tracing: TraceRecorder | None = None
) -> tuple[LiveRollout, list[bytes]]:
    """Return a rollout that resumes from records, and the list of records that its commits extend."""
    committed = list(records)

    async def commit(at: int, record: bytes) -> bool:
        assert at == len(committed)
        committed.append(record)
        return True

    tracing = tracing or TraceRecorder()
    given = ticket(0, row='{"messages": [], "columns": {}}', trace=tracing.begin())
    place = RolloutPlace(given, "echo", 0, 0, "0-0.0.0")
    begun: list[Record] = unpack_records(records)
    live = LiveRollout(
        place, Manner(SamplingParameters(16), 4096), policy.chat, cast(Any, policy), begun, max_turns, commit, tracing
    )
    return live, committed


def compared(done: FinishedRollout) -> tuple[Any, ...]:
    """Return the parts of a finished rollout that do not depend on time."""
    sampled = [segment.completion.tokens.tolist() for segment in done.segments]
    return sampled, done.answer, done.scores, done.truncated, done.turns, done.finish


@pytest.mark.parametrize(
    ("cut", "max_turns", "truncated"),
    [(-1, 10, False), (0, 10, True), (2, 10, True), (-1, 3, True)],
    ids=["whole", "cut at once", "cut later", "out of turns"],
)
async def test_a_rollout_taken_over_ends_as_if_uninterrupted(cut: int, max_turns: int, truncated: bool) -> None:
    chat, prompt = chat_of(FAMILIES[0]), [{"role": "user", "content": "say 0"}]
    echo = PythonEnvironment(name="echo", kind="python", function=f"{PROGRAMS}:Echo", options={"turns": TURNS})
    async with process(echo) as program:
        whole, records = rollout(Policy(chat, cut), [], max_turns)
        expected = compared(await converse(whole, program, prompt))
        assert (expected[3], expected[5]) == (truncated, "stop" if cut < 0 else "length")
        for kept in range(1, len(records) + 1):
            policy = Policy(chat, cut)
            taken, committed = rollout(policy, records[:kept], max_turns)
            assert restorable(unpack_records(records[:kept]))
            already = len(taken.recorder.turns)
            assert compared(await converse(taken, program, prompt)) == expected
            assert len(committed) == len(records), "no more turns than without the loss"
            assert policy.asked == list(range(already, expected[4])), "sampled turns are not sampled again"


async def test_tool_calls_are_counted_and_those_that_cannot_be_parsed() -> None:
    """A turn may call several tools; a malformed call counts separately and calls none."""
    call = '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'
    policy = Policy(chat_of(FAMILIES[0]), said=(call + call, "<tool_call>{", call))
    echo = PythonEnvironment(name="echo", kind="python", function=f"{PROGRAMS}:Echo", options={"turns": 1})
    async with process(echo) as program:
        done = await converse(rollout(policy, [], 10)[0], program, [{"role": "user", "content": "say 0"}])
    assert (done.turns, done.tool_calls, done.malformed_calls) == (4, 3, 1)


async def test_traces_follow_the_conventions_for_generative_ai(tmp_path: Path) -> None:
    chat, prompt = chat_of(FAMILIES[0]), [{"role": "user", "content": "say 0"}]
    echo = PythonEnvironment(name="echo", kind="python", function=f"{PROGRAMS}:Echo", options={"turns": TURNS})
    with collecting() as collector:
        config = small_config(tmp_path, None, f"tracing.endpoint={collector.url}")
        tracing = OtlpTracing(config, "environment", "environment-0")
        async with process(echo) as program:
            live, _ = rollout(Policy(chat), [], 10, tracing)
            done = await converse(live, program, prompt)
        await wait_until(lambda: any(span.name == "rollout" for span in collector.spans), 60)
        tracing.close()
    turns = [span.attributes for span in collector.spans if span.name == "turn"]
    [whole] = [span.attributes for span in collector.spans if span.name == "rollout"]
    assert len(turns) == done.turns
    for turn in turns:
        assert (turn["gen_ai.operation.name"], turn["gen_ai.request.model"]) == ("chat", config.model.path)
        assert turn["gen_ai.conversation.id"] == whole["gen_ai.conversation.id"]
        assert [each.string_value for each in turn["gen_ai.response.finish_reasons"].values] == ["stop"]
    assert (whole["gen_ai.operation.name"], whole["gen_ai.agent.name"]) == ("invoke_agent", "echo")
    for usage in ("gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens"):
        assert whole[usage] == sum(turn[usage] for turn in turns) > 0


def test_tool_results_follow_the_conventions() -> None:
    call = {"id": "call-1", "function": {"name": "add", "arguments": "{}"}}
    assert gen_ai.tools([], "0.0") == {}
    one, two = gen_ai.tools([call], "0.0"), gen_ai.tools([call, call], "0.0")
    assert (one["gen_ai.operation.name"], one["gen_ai.tool.name"], one["gen_ai.tool.call.id"]) == (
        "execute_tool",
        "add",
        "call-1",
    )
    assert two == {"gen_ai.operation.name": "execute_tool", "gen_ai.conversation.id": "0.0"}
