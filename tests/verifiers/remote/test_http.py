"""The verifier `http` with a misbehaving service: each group gets scores, or a failure with a reason, but never zeros."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import msgspec
import pytest

from services.config import ConfigError
from services.verifiers.base import VerifierFailure
from services.verifiers.connection import Silence
from services.verifiers.http import interface
from tests.support.harness import small_config, wait_until
from tests.verifiers.remote.asking import asking, group
from tests.verifiers.remote.flaky_server import FlakyServer

TEXTS = ("a", "bbb")
SCORES = [1 / 2, 1 / 4]
SECRET = "s3cr3t'token"


async def test_a_group_is_one_request_with_all_fields_of_its_prompt(service: FlakyServer) -> None:
    async with asking("http", f"{service.url}/score", name="mine") as pool:
        verdicts = await pool.score(group(*TEXTS))
    assert verdicts["mine"].scores == SCORES
    (request,) = service.requests
    assert request["path"] == "/score"
    assert request["authorization"] == ""
    assert request["body"] == {
        "verifier": "mine",
        "source": "main",
        "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}],
        "answer": "4",
        "row": {"level": 3, "topic": "sums"},
        "completions": [{"text": "a", "finish": "stop", "reply": "a"}, {"text": "bbb", "finish": "stop", "reply": "bbb"}],
    }


async def test_extra_numbers_are_parts_and_all_fields_are_kept(service: FlakyServer) -> None:
    service.behave('raw:{"scores": [{"score": 2, "format": 1, "why": "short"}, {"score": -1.5, "format": 0}], "seconds": 3}')
    async with asking("http", service.url) as pool:
        verdict = (await pool.score(group(*TEXTS)))["http"]
    assert verdict.scores == [2.0, -1.5]
    assert verdict.parts == {"format": [1.0, 0.0]}
    assert json.loads(verdict.notes[0]) == {"format": 1, "why": "short"}


@pytest.mark.parametrize(
    "first", [("status:500:oops",), ("status:503", "status:408"), ("close",), ("hang",), ("retry:x", "retry:0")]
)
async def test_a_failing_service_is_retried(service: FlakyServer, first: tuple[str, ...]) -> None:
    service.behave(*first)
    async with asking("http", service.url, timeout_s=4.0 if "hang" in first else 20.0) as pool:
        assert (await pool.score(group(*TEXTS)))["http"].scores == SCORES
    assert len(service.requests) == len(first) + 1


async def test_retry_after_is_respected(service: FlakyServer) -> None:
    service.behave("retry:1")
    async with asking("http", service.url) as pool:
        first = asyncio.create_task(pool.score(group(*TEXTS)))
        await wait_until(lambda: pool._connections["http"]._silence.failures)
        others = [pool.score(group(*TEXTS)) for _ in range(3)]
        for verdicts in await asyncio.gather(first, *others):
            assert verdicts["http"].scores == SCORES
    requests = service.requests
    assert len(requests) == 5
    assert min(request["at"] for request in requests[1:]) - requests[0]["at"] >= 0.95


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        ("status:422:no such field", r"answered 422: 'no such field'"),
        ("status:404", r"answered 404"),
        ("status:401", r"answered 401"),
        ("redirect:/elsewhere", r"answered 307"),
        ("raw:", r"something other than .* truncated"),
        ("raw:<html>", r"something other than .* malformed"),
        ("raw:[0, 0]", r"Expected `object`, got `array`"),
        ("raw:" + "[" * 100_000, r"something other than"),
        ('raw:{"scores": [{"a":' + "[" * 100_000, r"maximum recursion depth"),
        ('raw:{"scores": [1]}', r"1 results for 2 completions"),
        ('raw:{"scores": [1, null]}', r"scores\[1\]"),
        ('raw:{"scores": [1, "2"]}', r"scores\[1\]"),
        ('raw:{"scores": [1, NaN]}', r"malformed"),
        ('raw:{"scores": [1, 1e999]}', r"out of range"),
        ('raw:{"scores": [1, {"reward": 2}]}', r"without the key 'score'"),
        ('raw:{"scores": [1, 11]}', r"score 11 is outside its range \[-10, 10\]"),
        ("endless", r"answered with more than 16777216 bytes"),
        ("zip", r"answered with a compressed body"),
    ],
)
async def test_an_invalid_response_fails_the_group_with_the_reason(service: FlakyServer, behaviour: str, reason: str) -> None:
    service.behave(behaviour)
    async with asking("http", service.url, range=[-10, 10]) as pool:
        with pytest.raises(VerifierFailure, match=f"^verifier 'http'.*{reason}") as caught:
            await pool.score(group(*TEXTS))
        assert not caught.value.final
        assert len(str(caught.value)) < 500
        assert (await pool.score(group(*TEXTS)))["http"].scores == SCORES
    assert len(service.requests) == 2


async def test_a_response_that_is_not_http_is_a_failure() -> None:
    async def garble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}]}")
        writer.write(b"\x00\xff nonsense\r\n\r\n")
        writer.close()
        await writer.wait_closed()

    listening = await asyncio.start_server(garble, "127.0.0.1")
    port = listening.sockets[0].getsockname()[1]
    async with listening, asking("http", f"http://127.0.0.1:{port}", give_up_s=0.1) as pool:
        with pytest.raises(VerifierFailure, match=r"illegal status line") as caught:
            await pool.score(group(*TEXTS))
        assert caught.value.final


async def test_a_group_fails_after_give_up_s_without_an_answer(service: FlakyServer) -> None:
    service.behave(*["status:500:broken"] * 100)
    started = time.monotonic()
    async with asking("http", service.url, give_up_s=1.0) as pool:
        with pytest.raises(VerifierFailure, match=r"answered 500: 'broken'; no answer for 1 s$") as caught:
            await pool.score(group(*TEXTS))
        assert caught.value.final
        assert 1.0 <= time.monotonic() - started < 10.0
        assert len(service.requests) >= 3
        assert pool.waiting == "", "no request is waiting"


async def test_a_group_does_not_wait_longer_than_give_up_s_for_the_pause_of_another(service: FlakyServer) -> None:
    service.behave(*["retry:3600"] * 100)
    async with asking("http", service.url, give_up_s=3.0) as pool:
        first = asyncio.create_task(pool.score(group(*TEXTS)))
        await wait_until(lambda: pool._connections["http"]._silence.failures)
        connection = pool._connections["http"]
        connection._not_before = time.monotonic() + 3600  # as another group with more time left sets it
        started = time.monotonic()
        with pytest.raises(VerifierFailure, match="no answer for 3 s"):
            await first
        assert time.monotonic() - started < 30


async def test_a_group_survives_a_restart_of_the_service(service: FlakyServer) -> None:
    service.behave("die")
    async with asking("http", f"{service.url}/score?key={SECRET}") as pool:
        scoring = asyncio.create_task(pool.score(group(*TEXTS)))
        await wait_until(lambda: pool.waiting)
        assert pool.waiting.startswith(f"waiting for verifier 'http' at {service.url}/score: connection refused, for ")
        assert not scoring.done()
        await asyncio.to_thread(service.start)
        assert (await scoring)["http"].scores == SCORES
        assert pool.waiting == ""


async def test_concurrent_requests_are_limited(service: FlakyServer) -> None:
    service.behave(*["slow:1"] * 2, *["slow:0.1"] * 6)  # long enough for the first two to overlap on a busy machine
    async with asking("http", service.url, most_requests=2) as pool:
        await asyncio.gather(*(pool.score(group(*TEXTS)) for _ in range(8)))
    assert len(service.requests) == 8
    assert service.most == 2


async def test_a_cancelled_group_sends_no_more_requests(service: FlakyServer) -> None:
    service.behave(*["status:500"] * 1000)
    async with asking("http", service.url) as pool:
        scoring = asyncio.create_task(pool.score(group(*TEXTS)))
        await wait_until(lambda: "answered 500" in pool.waiting)
        scoring.cancel()
        with pytest.raises(asyncio.CancelledError):
            await scoring
        assert pool.waiting == ""
        service.behave()
        await pool.score(group(*TEXTS))
    assert len(service.requests) == 1


async def test_a_rejected_token_is_reloaded(service: FlakyServer, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{SECRET}\n")
    service.behave(f"unless:{SECRET}", "unless:new", "unless:new", "unless:other")
    async with asking("http", service.url, token=f"file:{file}") as pool:
        assert (await pool.score(group(*TEXTS)))["http"].scores == SCORES
        file.write_text("new")
        assert (await pool.score(group(*TEXTS)))["http"].scores == SCORES
        with pytest.raises(VerifierFailure, match=r"answered 401: 'who\?'"):
            await pool.score(group(*TEXTS))
    assert [request["authorization"] for request in service.requests] == [f"Bearer {SECRET}"] * 2 + ["Bearer new"] * 2


async def test_the_token_is_redacted_everywhere(service: FlakyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWARD_TOKEN", SECRET)
    service.behave("echo:400", *["echo:500"] * 4)
    async with asking("http", service.url, token="env:REWARD_TOKEN") as pool:
        with pytest.raises(VerifierFailure, match=r"answered 400: 'no: Bearer \*\*\*'"):
            await pool.score(group(*TEXTS))
        scoring = asyncio.create_task(pool.score(group(*TEXTS)))
        await wait_until(lambda: pool.waiting or scoring.done())
        assert SECRET not in pool.waiting
        await scoring


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"token": "env:NO_SUCH_TOKEN"}, "token = env:NO_SUCH_TOKEN: the environment variable is not set or empty"),
        ({"token": "file:/no/such/token"}, r"token = file:/no/such/token: the file cannot be read \(No such file"),
        ({"token": "file:/dev/null"}, "token = file:/dev/null: the file is empty"),
        ({"token": "file:/proc/self/cmdline"}, "token = .*characters that a header cannot contain"),
    ],
)
async def test_a_missing_token_is_detected_at_start(settings: dict[str, str], reason: str) -> None:
    with pytest.raises(VerifierFailure, match=f"^verifier 'http': {reason}"):
        async with asking("http", "http://127.0.0.1:1", **settings):
            pass


async def test_an_unusable_url_is_detected_at_start() -> None:
    with pytest.raises(VerifierFailure, match=r"^verifier 'http': url is not valid"):
        async with asking("http", "http://host:port/"):
            pass


def test_urls_must_not_contain_passwords(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"verifiers\.0\.url contains a user name or password: remove them") as caught:
        small_config(tmp_path, None, f'verifiers=[{{kind="http", url="http://user:{SECRET}@host/score"}}]')
    assert SECRET not in str(caught.value)


def test_only_one_location_of_the_token_may_be_set(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'must be "env:NAME"'):
        small_config(tmp_path, None, 'verifiers=[{kind="http", url="http://host", token="A"}]')


async def test_texts_with_surrogates_are_sent(service: FlakyServer) -> None:
    async with asking("http", service.url) as pool:
        assert (await pool.score(group("\ud800", "né")))["http"].scores == [1 / 2, 1 / 3]


async def test_a_damaged_row_fails_the_group(service: FlakyServer) -> None:
    job = group(*TEXTS)
    job.row = "{"
    async with asking("http", service.url) as pool:
        with pytest.raises(VerifierFailure, match="row or answer cannot be read"):
            await pool.score(job)
    assert service.requests == []


async def test_other_sources_are_not_scored(service: FlakyServer) -> None:
    async with asking("http", service.url, sources=["other"]) as pool:
        assert await pool.score(group(*TEXTS)) == {}
    assert service.requests == []


def test_waiting_before_the_last_answer_is_not_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("services.verifiers.connection.time.monotonic", lambda: now[0])
    silence = Silence()
    now[0] = 50.0
    silence.answered()
    now[0] = 60.0
    silence.failed(started=0.0)
    assert silence.length_s == 10.0
    now[0] = 70.0
    silence.failed(started=65.0)
    assert (silence.length_s, silence.failures) == (20.0, 2)
    silence.answered()
    assert (silence.length_s, silence.failures) == (0.0, 0)


def test_the_interface_is_documented() -> None:
    page = (Path(__file__).parents[3] / "docs" / "rewards.md").read_text()
    blocks = [part.partition("```")[0] for part in page.partition("## A service")[2].partition("\n## ")[0].split("```json\n")[1:]]
    assert interface() in [msgspec.json.decode(block) for block in blocks]
