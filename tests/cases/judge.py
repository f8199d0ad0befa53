"""Cases of `judge.jsonl`: replies of a judge's endpoint, one a vote."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from services.protocol.messages import Row
from services.verifiers.base import Job
from services.verifiers.connection import ServiceConnection, Silence
from services.verifiers.judge import JudgeVerifier
from services.verifiers.results import fault_of
from tests.support.verifiers import verifier


class Endpoint:
    """A connection that gives prepared replies, the same to all completions."""

    def __init__(self, replies: Sequence[dict[str, Any]]) -> None:
        self._replies, self._asked = replies, 0

    async def ask(self, url: str, body: bytes, silence: Silence) -> bytes:
        """Return the next reply."""
        reply = self._replies[self._asked % len(self._replies)]
        self._asked += 1
        message = {"role": "assistant", "content": reply["text"]}
        return json.dumps({"choices": [{"index": 0, "message": message, "finish_reason": reply["finish_reason"]}]}).encode()


def attempt(case: dict[str, Any], folder: Path, scratch: Path) -> tuple[Any, bool]:
    """Return the scores of the verifier `judge`, or why the attempt fails."""
    config = cast("Any", verifier("judge", url="http://127.0.0.1/v1", model="m", prompt="?", **case["settings"]))
    count = case["completions"]
    row = msgspec.json.encode(Row([{"role": "user", "content": "?"}], {})).decode()
    fields = Job("main", ["a reply"] * count, "", row).fields(cast("Any", None))
    made = JudgeVerifier("judge", config, cast("ServiceConnection", Endpoint(case["replies"])))
    try:
        verdict = asyncio.run(made.score(fields, Silence()))
    except ValueError as error:
        return f"{type(error).__name__}: {error}", case["right"] == "no vote"
    found = fault_of(verdict, count, config.bounds) or verdict.scores
    return found, found == case["right"]
