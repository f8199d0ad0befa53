"""The example reward service, started as in its docstring and called by the verifier `http`."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.reward_server import server
from services.config import load
from services.runtime.process_tools import free_port
from services.verifiers.base import VerifierFailure
from tests.verifiers.remote.asking import asking, group

TOKEN = "example-token"


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield the address of a server that requires a token."""
    monkeypatch.setenv("REWARDS_TOKEN", TOKEN)
    port = free_port()
    command = [sys.executable, "-m", "uvicorn", "examples.reward_server.server:app", "--port", str(port), "--log-level", "error"]
    with subprocess.Popen(command) as process:
        yield f"http://127.0.0.1:{port}/score"
        process.kill()


def test_the_documented_command_has_a_valid_configuration() -> None:
    [command] = [line for line in (server.__doc__ or "").splitlines() if "grpo run" in line]
    file, *overrides = shlex.split(command.partition("grpo run ")[2])
    config = load(Path(__file__).parents[2] / file, overrides, environ={})
    assert [(each.kind, getattr(each, "url", "")) for each in config.verifiers] == [("http", "http://127.0.0.1:8080/score")]


async def test_groups_are_scored_during_startup_with_the_token_only(url: str) -> None:
    job = group("2 + 2 = 4", "It is 5.", "4, I think", "no number")
    job.finish[2] = "length"
    async with asking("http", url, token="env:REWARDS_TOKEN", range=[0, 1]) as pool:
        verdict = (await pool.score(job))["http"]
    assert verdict.scores == [1.0, 0.1, 0.9, 0.1]
    assert verdict.parts == {"right": [1.0, 0.0, 1.0, 0.0], "finished": [1.0, 1.0, 0.0, 1.0]}
    async with asking("http", url) as pool:
        with pytest.raises(VerifierFailure, match=r"answered 401: .*the bearer token is missing or wrong"):
            await pool.score(job)
