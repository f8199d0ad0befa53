"""`/v1/messages` through the anthropic SDK, with only the base URL changed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.environment.support.conversations import exact_turns
from tests.environment.support.rollouts import ScriptedRollout, ScriptedRollouts, served
from tests.environment.support.templates import FAMILIES
from tests.support.lazily import Lazily

anthropic = Lazily("anthropic")

QWEN3 = FAMILIES[1]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'
TOOL = {"name": "add", "description": "Add.", "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
ASK = {"model": "any", "max_tokens": 50, "messages": [{"role": "user", "content": "How many?"}]}


@pytest.fixture
def rollout() -> ScriptedRollout:
    """Return a rollout of a thinking model."""
    return ScriptedRollout(QWEN3, "messages")


@pytest.fixture
def client(rollout: ScriptedRollout) -> Iterator[Any]:
    """Yield the SDK's client, connected to a pod with that rollout."""
    with served(ScriptedRollouts({"key": rollout})) as url, anthropic.Anthropic(base_url=url, api_key="key") as client:
        yield client


def test_a_conversation_with_tools_is_one_segment(client: Any, rollout: ScriptedRollout):
    rollout.said += [f"<think>\nhm\n</think>\n\nI add.\n{CALL}{CALL}", "Four."]
    first = client.messages.create(**ASK, system="Be brief.", tools=[TOOL])
    assert first.stop_reason == "tool_use"
    thought, text, *calls = first.content
    assert (thought.thinking, text.text) == ("hm", "I add.")
    assert [(call.name, call.input) for call in calls] == [("add", {"a": 2})] * 2
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "4"} for call in calls]
    messages = [*ASK["messages"], {"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    second = client.messages.create(**ASK | {"messages": messages}, system="Be brief.", tools=[TOOL])
    assert (second.stop_reason, second.content[0].text) == ("end_turn", "Four.")
    recorder = rollout.recorder
    assert len(recorder.segments()) == 1
    assert exact_turns([], recorder.segments(), recorder.turns, rollout.policy.asked) == 2
    assert second.usage.input_tokens == len(rollout.policy.asked[1].given)
    assert rollout.overrides[0].max_tokens == 50


def test_a_stream_delivers_the_same_message(client: Any, rollout: ScriptedRollout):
    rollout.said += [f"<think>\nhm\n</think>\n\nI add.{CALL}"]
    with client.messages.stream(**ASK, tools=[TOOL]) as stream:
        text = "".join(stream.text_stream)
        message = stream.get_final_message()
    assert text == "I add."
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
    assert message.content[2].input == {"a": 2}
    assert message.usage.output_tokens == len(rollout.policy.asked[0].sampled)
    assert json.loads(rollout.recorder.turns[0].reply)["tool_calls"][0]["id"] == message.content[2].id


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"extra_body": {"stop_token_ids": [1]}}, "stop_token_ids = [1] is not supported"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "only tools of your own"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "the model reads text only"),
        ({"max_tokens": -1}, "max_tokens = -1"),
    ],
)
def test_unsupported_fields_are_rejected_by_name(client: Any, fields: dict[str, Any], reason: str):
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(**ASK | fields)
    assert reason in caught.value.body["error"]["message"]
    assert caught.value.body["error"]["type"] == "invalid_request_error"


def test_keys_are_checked_and_models_listed(client: Any):
    assert [model.id for model in client.models.list()] == ["org/tiny"]
    with pytest.raises(anthropic.AuthenticationError):
        client.with_options(api_key="another").messages.create(**ASK)
    with pytest.raises(anthropic.APIStatusError) as caught:
        client.with_options(api_key="over").messages.create(**ASK)
    assert caught.value.status_code == 410
