"""`/v1/responses` and `/v1/completions` through the openai SDK."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from services.environment.recording.recorder import Recorder
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


@pytest.mark.parametrize("as_ids", [False, True], ids=["text", "ids"])
def test_a_completion_continues_the_previous_tokens(client: Any, rollout: ScriptedRollout, as_ids: bool):
    chat = rollout.chat
    rollout.cut = True
    rollout.said += ["the answer", " is four"]
    prompt = chat.encode_plain("Once") if as_ids else "Once"
    first = client.completions.create(model="any", prompt=prompt, max_tokens=5, logprobs=1)
    assert first.choices[0].text == "the answer"
    assert "".join(first.choices[0].logprobs.tokens) == "the answer"
    sampled = rollout.policy.asked[0].sampled
    longer = [*prompt, *sampled, *chat.encode_plain(" user")] if as_ids else "Oncethe answer user"
    second = client.completions.create(model="any", prompt=longer)
    assert second.choices[0].text == " is four"
    recorder = rollout.recorder
    assert rollout.policy.asked[1].given == [*chat.encode_plain("Once"), *sampled, *chat.encode_plain(" user")]
    assert len(recorder.segments()) == 1
    assert exact_turns([], recorder.segments(), recorder.turns, rollout.policy.asked) == 2
    restored = Recorder.restored(chat, [], recorder.turns)
    assert restored.plan_text("Once more") == recorder.plan_text("Once more")
    assert restored.plan_text(longer) == recorder.plan_text(longer)


def test_a_completion_can_be_streamed(client: Any, rollout: ScriptedRollout):
    rollout.said += ["the answer"]
    chunks = list(client.completions.create(model="any", prompt="Once", stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == "the answer"
    assert chunks[-1].usage.completion_tokens == len(rollout.policy.asked[0].sampled)


@pytest.mark.parametrize("prompt", [[], [-1], [10**6], ["a", "b"], [[1], [2]], {"a": 1}, "", [1.5]])
def test_invalid_prompts_are_rejected(client: Any, prompt: Any):
    with pytest.raises(openai.BadRequestError, match="prompt must be"):
        client.completions.create(model="any", prompt=prompt)
