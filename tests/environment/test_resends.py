"""Requests that an SDK resends after its timeout or a lost connection get the original turn."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import httpx2
import pytest

from services.environment.door import resends
from services.environment.endpoints import make_door
from tests.environment.support.rollouts import ScriptedRollout, ScriptedRollouts, served
from tests.environment.support.templates import FAMILIES
from tests.support.harness import wait_until
from tests.support.lazily import Lazily

anthropic = Lazily("anthropic")
openai = Lazily("openai")

USER = {"role": "user", "content": "How many?"}
ASK: dict[str, Any] = {"model": "any", "messages": [USER], "max_tokens": 50}
LIMIT_S = 0.3
"""The client's timeout, which the policy exceeds."""


@pytest.fixture
def rollout() -> ScriptedRollout:
    """Return a rollout of a non-thinking model."""
    return ScriptedRollout(FAMILIES[0], "resends")


@pytest.fixture
def url(rollout: ScriptedRollout) -> Iterator[str]:
    """Yield the door of a pod with that rollout."""
    with served(ScriptedRollouts({"key": rollout})) as url:
        yield url


def chat(url: str, client: Any) -> str:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="key", http_client=client, timeout=LIMIT_S, max_retries=9) as sdk:
        return sdk.chat.completions.create(**ASK).choices[0].message.content or ""


def streamed(url: str, client: Any) -> str:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="key", http_client=client, timeout=LIMIT_S, max_retries=9) as sdk:
        chunks = sdk.chat.completions.create(**ASK, stream=True)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def messages(url: str, client: Any) -> str:
    with anthropic.Anthropic(base_url=url, api_key="key", http_client=client, timeout=LIMIT_S, max_retries=9) as sdk:
        return sdk.messages.create(**ASK).content[0].text


@pytest.mark.parametrize(("ask", "http"), [(chat, httpx), (streamed, httpx), (messages, httpx2)])
def test_an_sdk_that_times_out_gets_the_turn_in_progress(
    ask: Callable[[str, Any], str], http: Any, url: str, rollout: ScriptedRollout
):
    rollout.said += ["Four.", "Five."]
    rollout.answers.clear()
    sent: list[str] = []

    def note(request: Any) -> None:
        sent.append(request.headers[resends.RETRIES])
        if len(sent) == 3:
            rollout.answers.set()

    with http.Client(event_hooks={"request": [note]}) as client:
        assert ask(url, client) == "Four."
    assert sent[:3] == ["0", "1", "2"]
    assert len(rollout.recorder.turns) == 1


@pytest.mark.parametrize(("ask", "http"), [(chat, httpx), (messages, httpx2)])
def test_a_lost_reply_is_resent(ask: Callable[[str, Any], str], http: Any, url: str, rollout: ScriptedRollout):
    rollout.said += ["Four.", "Five."]
    read: list[Any] = []

    def lose(response: Any) -> None:
        read.append(response.read())
        if len(read) == 1:
            raise http.ReadError("the connection was reset")

    with http.Client(event_hooks={"response": [lose]}) as client:
        assert ask(url, client) == "Four."
    assert len(read) == 2
    assert len(rollout.recorder.turns) == 1
    with http.Client() as client:
        assert ask(url, client) == "Five.", "a new request gets its own turn"
    assert len(rollout.recorder.turns) == 2


def test_equal_concurrent_resends_get_a_turn_each(url: str, rollout: ScriptedRollout):
    said = [f"{number}." for number in range(4)]
    rollout.said += said
    rollout.answers.clear()
    resent = threading.Semaphore(0)

    def note(request: httpx.Request) -> None:
        if request.headers[resends.RETRIES] == "1":
            resent.release()

    def one(_: int) -> str:
        with httpx.Client(event_hooks={"request": [note]}) as client:
            return chat(url, client)

    with ThreadPoolExecutor(len(said)) as threads:
        replies = threads.map(one, range(len(said)))
        for _ in said:
            assert resent.acquire(timeout=20)
        rollout.answers.set()
        assert sorted(replies) == said
    assert len(rollout.recorder.turns) == len(said)


def test_a_resend_matches_the_request_whose_client_left(url: str, rollout: ScriptedRollout):
    rollout.said += ["First.", "Second."]
    request = httpx.Request("POST", f"{url}/v1/chat/completions", json=ASK, headers={"authorization": "Bearer key"})
    with httpx.Client() as client:
        assert "First." in client.send(request).text
        rollout.answers.clear()
        rollout.begun.clear()
        lines = [b"POST /v1/chat/completions HTTP/1.1", *(name + b": " + value for name, value in request.headers.raw), b"", b""]
        with socket.create_connection((request.url.host, request.url.port or 80)) as connection:
            connection.sendall(b"\r\n".join(lines) + request.content)
            assert rollout.begun.wait(20)
        rollout.answers.set()
        request.headers[resends.RETRIES] = "1"
        assert "Second." in client.send(request).text
    assert len(rollout.recorder.turns) == 2


def test_turns_kept_for_resends_are_bounded(url: str, rollout: ScriptedRollout, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(resends, "KEPT_TURNS", 3)
    with httpx.Client(headers={"authorization": "Bearer key"}) as client:
        for _ in range(5):
            client.post(f"{url}/v1/chat/completions", json=ASK).raise_for_status()
        rollout.broken = True
        assert client.post(f"{url}/v1/chat/completions", json=ASK).status_code == 503
    assert len(rollout.asked._turns) == 3  # pyright: ignore[reportPrivateUsage]


async def test_a_request_under_way_when_its_rollout_ends_is_refused(rollout: ScriptedRollout):
    """If it were cancelled instead, the server would log a traceback."""
    rollout.answers.clear()
    door = httpx.ASGITransport(make_door(ScriptedRollouts({"key": rollout})))
    async with httpx.AsyncClient(transport=door, base_url="http://door", headers={"authorization": "Bearer key"}) as client:
        asking = asyncio.create_task(client.post("/v1/chat/completions", json=ASK))
        await wait_until(rollout.begun.is_set)
        await rollout.asked.close()
        reply = await asking
    assert (reply.status_code, reply.json()["error"]["message"]) == (410, "the rollout has ended")


async def test_a_request_whose_body_arrives_after_the_end_of_its_rollout_begins_no_turn(rollout: ScriptedRollout):
    ended = asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        yield b""
        await rollout.asked.close()
        ended.set()
        yield json.dumps(ASK).encode()

    door = httpx.ASGITransport(make_door(ScriptedRollouts({"key": rollout})))
    async with httpx.AsyncClient(transport=door, base_url="http://door", headers={"authorization": "Bearer key"}) as client:
        reply = await client.post("/v1/chat/completions", content=body())
    assert ended.is_set()
    assert (reply.status_code, reply.json()["error"]["message"]) == (410, "the rollout has ended")
    assert not rollout.begun.is_set()
