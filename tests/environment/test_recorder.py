"""Recorded tokens are exact: those marked as sampled are the policy's output, and they follow the policy's input."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from services.environment.recording.recorder import Recorder
from services.groups.generated import Generated, GenerationFailed
from services.protocol import codec
from services.protocol.messages import Span
from services.protocol.payloads import Turn
from tests.environment.support.conversations import Program, exact_turns
from tests.environment.support.templates import FAMILIES, Family, chat_of

TURNS = 100


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_trained_ids_equal_sampled_ids(family: Family):
    exact = extended = turns = 0
    for seed in range(TURNS // 20):
        program = Program(family, random.Random(f"{family.name} {seed}"))
        for _ in range(20):
            program.turn()
        recorder = program.recorder
        exact += exact_turns(program.prompt, recorder.segments(), recorder.turns, program.policy.asked)
        turns += len(recorder.turns)
        extended += len(recorder.turns) - len(recorder.segments())
        turns_again = [codec.decode(codec.encode(turn), Turn) for turn in recorder.turns]
        restored = Recorder.restored(program.chat, program.prompt, turns_again)
        assert restored.plan(program.messages, program.tools) == recorder.plan(program.messages, program.tools)
        assert codec.encode(restored.turns) == codec.encode(recorder.turns)
    assert exact == turns == TURNS
    rewrites_every_reply = family.name in ("deepseek", "qwen3_no_thinking")
    assert (extended == 0) == rewrites_every_reply


CHATML, QWEN3 = FAMILIES[:2]
ASKED = [{"role": "user", "content": "How many?"}]
MORE = {"role": "user", "content": "And now?"}


def sampled(family: Family, text: str, finish: str = "stop", version: int = 0) -> Generated:
    """Return a text as if the policy had sampled it."""
    ids = np.array(chat_of(family).encode(text), np.int32)
    return Generated(
        ids, np.full(len(ids), -1, np.float32), [Span(version, 0, len(ids))], "length" if finish == "length" else "stop"
    )


def recorder_of(family: Family, prompt: list[dict[str, Any]]) -> Recorder:
    chat = chat_of(family)
    return Recorder(chat, chat.encode(chat.render(prompt)))


def test_a_first_call_with_the_groups_prompt_needs_no_context():
    recorder = recorder_of(CHATML, ASKED)
    recorder.record(recorder.plan(ASKED), sampled(CHATML, "Four.<|im_end|>"))
    recorder.record(recorder.plan([*ASKED, MORE]), sampled(CHATML, "Five.<|im_end|>"))
    first, second = recorder.segments()
    assert len(first.context) == 0
    assert second.context.tolist() == chat_of(CHATML).encode(chat_of(CHATML).render([*ASKED, MORE]))


def test_tokens_between_turns_belong_to_the_next_version():
    recorder = recorder_of(CHATML, ASKED)
    reply = recorder.record(recorder.plan(ASKED), sampled(CHATML, "Four.<|im_end|>", version=3))
    recorder.record(recorder.plan([*ASKED, reply, MORE]), sampled(CHATML, "Five.<|im_end|>", version=4))
    (segment,) = recorder.segments()
    ((start, end),) = segment.completion.tool_spans
    chat = chat_of(CHATML)
    assert chat.decode(segment.completion.tokens[:start].tolist()) == "Four.<|im_end|>"
    assert chat.decode(segment.completion.tokens[start:end].tolist()) == (
        "\n<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert segment.completion.spans == [Span(3, 0, start), Span(4, start, len(segment.completion.tokens))]
    assert not segment.completion.logprobs[start:end].any()


def test_a_truncated_reply_is_closed_by_the_template():
    recorder = recorder_of(CHATML, ASKED)
    reply = recorder.record(recorder.plan(ASKED), sampled(CHATML, "Fo", "length"))
    call = recorder.plan([*ASKED, reply, MORE])
    assert chat_of(CHATML).decode(call.tokens[call.kept :]).startswith("<|im_end|>\n<|im_start|>user")


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("finish", ["stop", "length"])
def test_the_policy_does_not_read_what_a_request_has_cut(family: Family, finish: str):
    """ReAct agents end replies at `Observation:`, after which a policy that was not stopped there makes up a result."""
    chat, recorder = chat_of(family), recorder_of(family, ASKED)
    text = "Action: look\nObservation: I made this up" + (family.ends[0] if finish == "stop" else "")
    reply = recorder.record(recorder.plan(ASKED), sampled(family, text, finish), own_stop=["Observation:"])
    conversation = [*ASKED, reply, {"role": "user", "content": "Observation: real"}]
    for each in recorder, Recorder.restored(chat, chat.encode(chat.render(ASKED)), recorder.turns):
        call = each.plan(conversation)
        assert (call.kept, call.segment, call.base) == (0, 1, 0)
        assert "made this up" not in chat.decode(call.tokens)


def test_a_reply_that_a_stop_string_of_the_run_ends_is_continued():
    """The engine has stopped there, too, so there is nothing that the program did not see."""
    recorder = recorder_of(CHATML, ASKED)
    reply = recorder.record(recorder.plan(ASKED), sampled(CHATML, "Four.\nStop", "length"), ["\nStop"], ["not in it"])
    assert reply["content"] == "Four."
    assert recorder.plan([*ASKED, reply, MORE]).kept > 0


def test_a_branch_keeps_the_tokens_before_it():
    recorder = recorder_of(CHATML, ASKED)
    reply = recorder.record(recorder.plan(ASKED), sampled(CHATML, "Four.<|im_end|>"))
    recorder.record(recorder.plan([*ASKED, reply, MORE]), sampled(CHATML, "Five.<|im_end|>"))
    branch = recorder.plan([*ASKED, reply, {"role": "user", "content": "Another?"}])
    assert branch.segment == 1
    assert branch.tokens[: branch.kept] == recorder.plan(ASKED).tokens + recorder.turns[0].tokens.tolist()


def test_two_calls_at_once_do_not_share_a_segment():
    recorder = recorder_of(CHATML, ASKED)
    reply = recorder.record(recorder.plan(ASKED), sampled(CHATML, "Four.<|im_end|>"))
    calls = [recorder.plan([*ASKED, reply, {"role": "user", "content": text}]) for text in ("a", "b")]
    assert [call.segment for call in calls] == [0, 0]
    for call in calls:
        recorder.record(call, sampled(CHATML, "So.<|im_end|>"))
    assert [turn.segment for turn in recorder.turns] == [0, 0, 1]
    assert recorder.segments()[1].context.tolist() == calls[1].tokens


def test_reasoning_that_the_template_drops_opens_a_segment():
    recorder = recorder_of(QWEN3, ASKED)
    reply = recorder.record(recorder.plan(ASKED), sampled(QWEN3, "<think>\nhm\n</think>\n\nFour.<|im_end|>"))
    assert recorder.plan([*ASKED, reply, {"role": "tool", "content": "4"}]).segment == 0
    call = recorder.plan([*ASKED, reply, MORE])
    assert call.segment == 1
    assert "hm" not in chat_of(QWEN3).decode(call.tokens)


def test_zero_tokens_are_not_a_turn():
    recorder = recorder_of(CHATML, ASKED)
    empty = Generated(np.zeros(0, np.int32), np.zeros(0, np.float32), [], "length")
    with pytest.raises(GenerationFailed, match="sampled no tokens"):
        recorder.record(recorder.plan(ASKED), empty)
    assert recorder.turns == []
