"""The verifier `http`: one request for the scores of a group, to a custom service.

The two messages below are its interface; docs/rewards.md has their JSON schema.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from services.config.verifiers import HttpConfig
from services.verifiers.connection import ServiceConnection, Silence
from services.verifiers.results import BadResult, Verdict, read_results


def _text(description: str) -> msgspec.Meta:
    return msgspec.Meta(description=description)


class CompletionText(msgspec.Struct):
    """A finished completion."""

    text: str
    finish: Annotated[str, _text("`stop`, or `length` if it reached the maximum number of tokens")]
    reply: Annotated[str, _text("what the text says after its reasoning; empty if it was cut off in it")]


class ScoreRequest(msgspec.Struct):
    """A group of completions of one prompt."""

    verifier: Annotated[str, _text("name of the verifier in the configuration")]
    source: Annotated[str, _text("name of the prompt source")]
    prompt: Annotated[list[dict[str, Any]], _text("the prompt as chat messages")]
    answer: Annotated[Any, _text("gold answer of the data row; an empty string if it has none")]
    row: Annotated[dict[str, Any], _text("columns of the data row")]
    completions: list[CompletionText]


ScoreAndMore = Annotated[
    dict[str, Any],
    msgspec.Meta(
        description="a score, and anything else to store with the completion",
        extra_json_schema={"required": ["score"], "properties": {"score": {"type": "number"}}},
    ),
]


class ScoreReply(msgspec.Struct):
    """The scores of a group."""

    scores: Annotated[list[float | ScoreAndMore], _text("one for each completion, in the same order")]


class HttpVerifier:
    """Asks a service for the scores of groups."""

    def __init__(self, name: str, config: HttpConfig, connection: ServiceConnection) -> None:
        self._name, self._url, self._connection = name, config.url, connection

    async def score(self, fields: Mapping[str, Any], silence: Silence) -> Verdict:
        """Return the verdict on a group of n completions. Raises `VerifierFailure`, and ValueError with the reason."""
        columns = (fields[name] for name in ("completions", "finish", "replies"))
        completions = [CompletionText(*each) for each in zip(*columns, strict=True)]
        request = ScoreRequest(self._name, fields["source"], fields["prompt"], fields["answer"], fields["row"], completions)
        answer = await self._connection.ask(self._url, msgspec.json.encode(request), silence)
        try:
            reply = msgspec.json.decode(answer, type=ScoreReply)
        except (ValueError, RecursionError) as error:
            raise BadResult(f'answered with something other than {{"scores": […]}}: {error}') from None
        return read_results(reply.scores, len(completions))


def interface() -> dict[str, Any]:
    """Return the JSON schema of request and reply."""
    _, components = msgspec.json.schema_components([ScoreRequest, ScoreReply], ref_template="#/$defs/{name}")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$defs": components}
