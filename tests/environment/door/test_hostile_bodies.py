"""Whatever the body of a request, the door responds with a reply or a 4xx error, and its records are exact."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.environment.support.conversations import TOOL, exact_turns
from tests.environment.support.rollouts import ScriptedRollout, ScriptedRollouts, served
from tests.environment.support.templates import FAMILIES

TEXT = st.text(st.characters(), max_size=8)  # including surrogates
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
KINDS = st.sampled_from(
    [
        "text", "input_text", "output_text", "thinking", "tool_use", "tool_result", "message", "function_call",
        "function_call_output", "reasoning", "function",
    ]
)  # fmt: skip
ROLES = st.sampled_from(["system", "developer", "user", "assistant", "tool"])
FUNCTION = st.fixed_dictionaries({}, optional={"name": TEXT | VALUES, "arguments": TEXT | VALUES, "parameters": VALUES})
PART = st.fixed_dictionaries(
    {},
    optional={
        "type": KINDS, "text": TEXT | VALUES, "thinking": TEXT, "id": TEXT, "call_id": TEXT, "tool_use_id": TEXT, "name": TEXT,
        "input": VALUES, "content": TEXT | VALUES, "output": TEXT | VALUES, "arguments": TEXT | VALUES, "function": FUNCTION,
    },
)  # fmt: skip
MESSAGE = st.fixed_dictionaries(
    {"role": ROLES | VALUES},
    optional={
        "type": KINDS, "content": TEXT | st.lists(PART, max_size=3) | VALUES, "tool_calls": st.lists(PART, max_size=2) | VALUES,
        "reasoning_content": TEXT | VALUES, "tool_call_id": TEXT | VALUES, "name": TEXT | VALUES,
    },
)  # fmt: skip
TOOLS = st.just([TOOL]) | st.just([TOOL["function"] | {"type": "function"}]) | st.lists(PART, max_size=2) | VALUES
MESSAGES = st.lists(MESSAGE, max_size=4) | VALUES
OPTIONS = (
    "model", "stream", "stream_options", "logprobs", "stop", "stop_sequences", "max_tokens", "tool_choice", "n", "system",
    "temperature", "instructions", "metadata", "include", "text", "response_format",
)  # fmt: skip
BODIES = st.fixed_dictionaries(
    {"messages": MESSAGES, "input": TEXT | MESSAGES},
    optional={**dict.fromkeys(OPTIONS, VALUES), "tools": TOOLS},
)
PATHS = ("/v1/chat/completions", "/v1/messages", "/v1/responses")


@pytest.fixture(scope="module")
def rollouts() -> Iterator[ScriptedRollouts]:
    """Yield a rollout for each of a few templates. At the end, check that all of their records are exact."""
    rollouts = ScriptedRollouts({family.name: ScriptedRollout(family, family.name) for family in FAMILIES[:6]})
    yield rollouts
    for rollout in rollouts.rollouts.values():
        turns, segments = rollout.recorder.turns, rollout.recorder.segments()
        assert exact_turns([], segments, turns, rollout.policy.asked) == len(turns)


@pytest.fixture(scope="module")
def client(rollouts: ScriptedRollouts) -> Iterator[httpx.Client]:
    """Yield a client that is connected to their door."""
    with served(rollouts) as url, httpx.Client(base_url=url) as client:
        yield client


def answered(client: httpx.Client, path: str, body: bytes, key: str) -> int:
    reply = client.post(path, content=body, headers={"authorization": f"Bearer {key}"})
    if reply.status_code == 200:
        assert reply.headers["content-type"].startswith("text/event-stream") or json.loads(reply.content)["id"]
    else:
        assert 400 <= reply.status_code < 500, (body, reply.text)
        error = json.loads(reply.content)["error"]
        assert error["message"]
        assert "\n" not in error["message"]
    return reply.status_code


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(body=BODIES, family=st.sampled_from([family.name for family in FAMILIES[:6]]))
def test_any_json_body_is_answered(client: httpx.Client, path: str, body: dict[str, Any], family: str):
    assert answered(client, path, json.dumps(body).encode(), family) < 500


def test_a_body_that_is_not_an_object_is_rejected(client: httpx.Client):
    bodies = (b"", b"[]", b"{", b"\xff", b'"\\ud800"', b"[" * 100_000, b'{"a":' * 100_000, b'{"messages": 1e999}', b"NaN")
    asked = [(path, body) for path in PATHS for body in bodies]
    assert [(path, body[:20]) for path, body in asked if answered(client, path, body, "chatml") != 400] == []


def test_deep_nesting_within_a_body_is_answered(client: httpx.Client):
    for depth in (100, 500, 900, 5_000):
        nested = b'{"a":' * depth + b"1" + b"}" * depth
        tool = b'{"type": "function", "function": {"name": "f", "parameters": ' + nested + b"}}"
        body = b'{"messages": [{"role": "user", "content": "a"}], "tools": [' + tool + b"]}"
        assert answered(client, "/v1/chat/completions", body, "chatml") in (200, 400)


def test_valid_bodies_get_a_reply(client: httpx.Client):
    asked = ({"messages": [{"role": "user", "content": "Hi."}]},) * 2 + ({"input": "Hi."},)
    for path, body in zip(PATHS, asked, strict=True):
        body |= {"max_tokens": 5, "model": "any", "unheard_of": {}}
        assert answered(client, path, json.dumps(body).encode(), "chatml") == 200
