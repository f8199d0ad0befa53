"""`/v1/chat/completions` through the openai SDK, with only the base URL changed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from services.groups.generated import SamplingParameters
from tests.environment.support.conversations import TOOL, exact_turns
from tests.environment.support.rollouts import ScriptedRollout, ScriptedRollouts, served
from tests.environment.support.templates import FAMILIES
from tests.support.lazily import Lazily

openai = Lazily("openai")

CHATML, QWEN3 = FAMILIES[:2]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'
IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
USER = {"role": "user", "content": "How many?"}


@pytest.fixture
def rollout() -> ScriptedRollout:
    """Return a rollout of a thinking model."""
    return ScriptedRollout(QWEN3, "door")


@pytest.fixture
def url(rollout: ScriptedRollout) -> Iterator[str]:
    """Yield the door of a pod with that rollout."""
    with served(ScriptedRollouts({"key": rollout})) as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator[Any]:
    """Return the SDK's client, with retries enabled."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="key", max_retries=2) as client:
        yield client


def test_a_conversation_with_a_tool_is_one_segment(client: Any, rollout: ScriptedRollout):
    rollout.said += [f"<think>\nhm\n</think>\n\nI add.\n{CALL}", "<think>\nso\n</think>\n\nFour."]
    first = client.chat.completions.create(model="any", messages=[USER], tools=[TOOL])
    assert first.choices[0].finish_reason == "tool_calls"
    message = first.choices[0].message
    assert (message.content, message.reasoning_content) == ("I add.", "hm")
    assert json.loads(message.tool_calls[0].function.arguments) == {"a": 2}
    answer = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "4"}
    second = client.chat.completions.create(model="any", messages=[USER, message.model_dump(), answer], tools=[TOOL])
    assert (second.choices[0].finish_reason, second.choices[0].message.content) == ("stop", "Four.")
    recorder = rollout.recorder
    assert len(recorder.segments()) == 1
    assert exact_turns([], recorder.segments(), recorder.turns, rollout.policy.asked) == 2
    assert second.usage.prompt_tokens == len(rollout.policy.asked[1].given)
    assert second.usage.completion_tokens == len(rollout.policy.asked[1].sampled)


def test_a_stream_delivers_the_same_message(client: Any, rollout: ScriptedRollout):
    rollout.said += [f"One.{CALL}{CALL}"]
    ask = {"model": "any", "messages": [USER], "tools": [TOOL]}
    with client.chat.completions.stream(**ask, stream_options={"include_usage": True}) as stream:
        streamed = stream.get_final_completion()
    message = streamed.choices[0].message
    assert message.content == "One."
    assert [call.function.name for call in message.tool_calls] == ["add", "add"]
    assert streamed.usage.completion_tokens == len(rollout.policy.asked[0].sampled)
    assert [call.id for call in message.tool_calls] == [
        call["id"] for call in json.loads(rollout.recorder.turns[0].reply)["tool_calls"]
    ]


def test_logprobs_match_the_sampled_tokens(client: Any, rollout: ScriptedRollout):
    rollout.said += ["Four."]
    choice = client.chat.completions.create(model="any", messages=[USER], logprobs=True).choices[0]
    assert "".join(token.token for token in choice.logprobs.content) == "Four.<|im_end|>"
    assert [token.logprob for token in choice.logprobs.content] == rollout.recorder.turns[0].logprobs.tolist()


def test_stop_and_limit_are_applied_and_a_malformed_call_is_text(client: Any, rollout: ScriptedRollout):
    rollout.said += ["a STOP b", '<tool_call>{"name": add}</tool_call>']
    ask = {"model": "any", "messages": [USER]}
    reply = client.chat.completions.create(**ask, stop="STOP", max_tokens=7)
    assert reply.choices[0].message.content == "a "
    assert (rollout.overrides[0].max_tokens, rollout.overrides[0].stop) == (7, ("STOP",))
    reply = client.chat.completions.create(**ask, tools=[TOOL])
    assert reply.choices[0].message.tool_calls is None
    assert reply.choices[0].message.content == '<tool_call>{"name": add}</tool_call>'
    assert "error" not in reply.choices[0].message.model_dump()
    assert "not valid JSON" in json.loads(rollout.recorder.turns[1].reply)["error"]


def test_the_runs_sampling_wins_and_is_reported(client: Any, rollout: ScriptedRollout):
    rollout.sampling = SamplingParameters(64, temperature=0.7)
    ask = client.chat.completions.with_raw_response.create
    reply = ask(model="any", messages=[USER], temperature=0.2, top_p=1.0, extra_body={"unheard_of": 1})
    assert reply.headers["x-grpo-sampling"] == "temperature=0.7, unheard_of=ignored"
    assert "x-grpo-sampling" not in ask(model="any", messages=[USER], temperature=0.7).headers
    assert ask(model="any", messages=[USER], tool_choice="required").headers["x-grpo-sampling"] == "tool_choice=auto"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"n": 2}, "n = 2 is not supported"),
        ({"extra_body": {"stop_token_ids": [1]}}, "stop_token_ids"),
        ({"logprobs": True, "top_logprobs": 3}, "top_logprobs = 3"),
        ({"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}, "chat_template_kwargs"),
        ({"max_tokens": 0}, "max_tokens = 0 must be an integer of at least 1"),
        ({"messages": []}, "messages must be a non-empty list"),
        ({"messages": [IMAGE]}, "the model reads text only"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_unsupported_fields_are_rejected_by_name(client: Any, fields: dict[str, Any], reason: str):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{"model": "any", "messages": [USER], **fields})
    assert reason in caught.value.message
    assert caught.value.type == "invalid_request_error"


def test_api_keys_identify_rollouts(client: Any, url: str, rollout: ScriptedRollout):
    ask = {"model": "any", "messages": [USER]}
    with openai.OpenAI(base_url=f"{url}/v1", api_key="another") as other, pytest.raises(openai.AuthenticationError):
        other.chat.completions.create(**ask)
    with openai.OpenAI(base_url=f"{url}/v1", api_key="over") as over, pytest.raises(openai.APIStatusError) as caught:
        over.chat.completions.create(**ask)
    assert (caught.value.status_code, caught.value.code) == (410, "rollout_over")
    assert [model.id for model in client.models.list()] == ["org/tiny"]
    assert client.models.retrieve("org/tiny").id == "org/tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")
    assert httpx.get(f"{url}/v1/models").status_code == 401
    assert httpx.get(f"{url}/nowhere").json()["error"]["type"] == "not_found_error"


def test_a_failed_policy_is_not_retried_by_the_client(client: Any, rollout: ScriptedRollout):
    rollout.broken = True
    with pytest.raises(openai.InternalServerError) as caught:
        client.chat.completions.create(model="any", messages=[USER])
    assert caught.value.status_code == 503
    assert len(rollout.overrides) == 1
