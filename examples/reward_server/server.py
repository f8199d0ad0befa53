"""A reward service for `kind = "http"`: scores come over HTTP, from any machine and any program.

    uvicorn examples.reward_server.server:app --port 8080
    grpo run examples/arithmetic/config.toml 'verifiers=[{kind="http", url="http://127.0.0.1:8080/score"}]' \
        generator.verifier_workers=2

If the variable REWARDS_TOKEN is set, requests need it as a bearer token: set the verifier's `token` to "env:REWARDS_TOKEN".
"""

import hmac
import os
import re
from typing import Annotated, Any

from fastapi import FastAPI, Header, HTTPException
from pydantic import BaseModel

TOKEN = os.environ.get("REWARDS_TOKEN", "")
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")

app = FastAPI(title="Rewards")


class FinishedText(BaseModel):
    """A completion, and whether it ended by itself (`stop`) or was cut off (`length`)."""

    text: str
    finish: str


class ScoreBody(BaseModel):
    """All completions of one prompt. A request also has the fields `verifier`, `source`, `prompt` and `row`."""

    answer: str
    completions: list[FinishedText]


@app.post("/score")
async def score(group: ScoreBody, authorization: Annotated[str, Header()] = "") -> dict[str, Any]:
    """Return the scores of a group, in the order of its completions."""
    if TOKEN and not hmac.compare_digest(authorization.encode(), f"Bearer {TOKEN}".encode()):
        raise HTTPException(401, "the bearer token is missing or wrong")
    return {"scores": [scored(completion, group.answer) for completion in group.completions]}


def scored(completion: FinishedText, answer: str) -> dict[str, float]:
    """Return 0.9 if the last number is the answer, plus 0.1 if the completion was not cut off, with both parts."""
    numbers = NUMBER.findall(completion.text)
    right, finished = float(numbers[-1:] == [answer]), float(completion.finish == "stop")
    return {"score": 0.9 * right + 0.1 * finished, "right": right, "finished": finished}
