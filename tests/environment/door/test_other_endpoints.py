"""`/v1/responses` through the openai SDK."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.environment.support.conversations import exact_turns
from tests.environment.support.rollouts import ScriptedRollout, ScriptedRollouts, served
from tests.environment.support.templates import FAMILIES
from tests.support.lazily import Lazily

openai = Lazily("openai")

QWEN3 = FAMILIES[1]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'
TOOL = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}


@pytest.fixture
def rollout() -> ScriptedRollout:
    """Return a rollout of a thinking model."""
    return ScriptedRollout(QWEN3, "responses")


@pytest.fixture
def client(rollout: ScriptedRollout) -> Iterator[Any]:
    """Yield the SDK's client, connected to a pod with that rollout."""
    with served(ScriptedRollouts({"key": rollout})) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="key") as client:
        yield client


def test_responses_with_a_tool_are_one_segment(client: Any, rollout: ScriptedRollout):
    rollout.said += [f"<think>\nhm\n</think>\n\nI add.\n{CALL}", "Four."]
    ask = {"model": "any", "instructions": "Be brief.", "tools": [TOOL]}
    first = client.responses.create(input="How many?", **ask)
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
    assert first.output_text == "I add."
    call = first.output[2]
    history = [{"role": "user", "content": "How many?"}, *(item.model_dump() for item in first.output)]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "4"}
    second = client.responses.create(input=[*history, output], **ask)
    assert (second.status, second.output_text) == ("completed", "Four.")
    recorder = rollout.recorder
    assert len(recorder.segments()) == 1
    assert exact_turns([], recorder.segments(), recorder.turns, rollout.policy.asked) == 2
    assert second.usage.output_tokens == len(rollout.policy.asked[1].sampled)


def test_a_streamed_response_delivers_the_same(client: Any, rollout: ScriptedRollout):
    rollout.said += [f"I add.{CALL}"]
    with client.responses.stream(model="any", input="How many?", tools=[TOOL]) as stream:
        kinds = [event.type for event in stream]
        response = stream.get_final_response()
    assert response.output_text == "I add."
    assert response.output[1].arguments == '{"a": 2}'
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"


def test_responses_are_stateless(client: Any):
    with pytest.raises(openai.BadRequestError, match="previous_response_id = 'x' is not supported"):
        client.responses.create(model="any", input="How many?", previous_response_id="x")
