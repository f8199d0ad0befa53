"""The verifier `judge`: a language model behind an OpenAI-compatible endpoint is asked for a verdict.

Guarantees: a score is the mean of at least half of the requested votes; a vote without a readable score, with one outside the
range, or whose reply was cut off or filtered, does not count, and is never a zero. Judges get what completions reply after their
reasoning, and what counts of a judge is what it replies after its own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from services.chat.messages import text_of
from services.chat.reply import reply_of
from services.config.verifiers import JudgeConfig
from services.verifiers.connection import ServiceConnection, Silence
from services.verifiers.numeric import MOST_SCORE
from services.verifiers.results import NOTE_BYTES, BadResult, Verdict, read_results, shown
from services.verifiers.template import PromptTemplate, question_of
from services.verifiers.together import together

READ_CHARACTERS = 32 * 1024
"""Length of the end of a reply that the pattern searches: far longer than verdicts, and short enough for slow patterns."""
NOTE_CHARACTERS = NOTE_BYTES // 8
"""Maximum number of characters kept of all votes on a completion: JSON takes up to six bytes for one."""


COMPLETE = (None, "stop", "end_turn", "eos", "stop_sequence")
"""Why a reply ended that says everything it was going to say."""
_GOES_ON = re.compile(r"\d|\.\d|,\d{3}|[eE][-+]?\d")
"""What follows a number of which a pattern found only a part."""


class ChatMessage(msgspec.Struct):
    """A model's reply."""

    content: str | list[dict[str, Any]] | None = None


class ChatChoice(msgspec.Struct):
    """One reply of a model."""

    message: ChatMessage
    finish_reason: str | None = None


class ChatReply(msgspec.Struct):
    """The used parts of a reply of `/chat/completions`."""

    choices: list[ChatChoice]


class Vote(msgspec.Struct):
    """One verdict of a judge."""

    text: str
    scores: list[float]
    fault: str = ""
    """Why it has no scores."""


class JudgeVerifier:
    """Asks a model for the scores of completions or groups."""

    def __init__(self, name: str, config: JudgeConfig, connection: ServiceConnection) -> None:
        """Raises ValueError for a template that cannot be used."""
        self._config, self._connection = config, connection
        self._url = config.url.rstrip("/") + "/chat/completions"
        self._templates = [(each["role"], PromptTemplate(each["content"], config.scope)) for each in config.messages]
        self._verdict = re.compile(config.verdict)

    async def score(self, fields: Mapping[str, Any], silence: Silence) -> Verdict:
        """Return the verdict on a group of n completions. Raises `VerifierFailure`, and ValueError with the reason."""
        completions: Sequence[str] = fields["replies"]
        variables = {"question": question_of(fields["prompt"]), **{name: fields[name] for name in ("prompt", "answer", "row")}}
        if self._config.scope == "group":
            scores, note = await self._ask({**variables, "completions": completions}, len(completions), silence)
            return read_results(
                [{"score": score, **(note if i == 0 else {})} for i, score in enumerate(scores)], len(completions)
            )
        asked = await together([self._ask({**variables, "completion": text}, 1, silence) for text in completions])
        return read_results([{"score": scores[0], **note} for scores, note in asked], len(completions))

    async def _ask(self, variables: Mapping[str, Any], count: int, silence: Silence) -> tuple[list[float], dict[str, Any]]:
        """Return `count` scores, each the mean of the votes that can be read, and the part of the votes to keep."""
        messages = [{"role": role, "content": template.render(variables)} for role, template in self._templates]
        wanted = self._config.votes
        votes = await together([self._vote(self._body(messages, i), count, silence) for i in range(wanted)])
        good = [vote.scores for vote in votes if not vote.fault]
        if 2 * len(good) < wanted or not good:
            fault = next(vote.fault for vote in votes if vote.fault)
            raise BadResult(f"{len(good)} of {wanted} votes can be read, fewer than half: {fault}")
        share = NOTE_CHARACTERS // wanted
        return [_mean(column) for column in zip(*good, strict=True)], {"votes": [vote.text[-share:] for vote in votes]}

    def _body(self, messages: list[dict[str, str]], vote: int) -> bytes:
        """Return the request for one vote. Votes differ in their seed."""
        config = self._config
        body: dict[str, Any] = {"model": config.model, "messages": messages}
        if config.json_schema:
            schema = {"name": "verdict", "strict": True, "schema": config.json_schema}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        body |= config.request
        if config.votes > 1:
            body["seed"] = int(body.get("seed", 0)) + vote
        return msgspec.json.encode(body)

    async def _vote(self, body: bytes, count: int, silence: Silence) -> Vote:
        answer = await self._connection.ask(self._url, body, silence)
        try:
            choices = msgspec.json.decode(answer, type=ChatReply).choices
        except (ValueError, RecursionError) as error:
            raise BadResult(f"answered with something other than a chat completion: {error}") from None
        if not choices:
            raise BadResult("answered with a chat completion without choices")
        text, reason = text_of("choices[0].message", choices[0].message.content), choices[0].finish_reason
        if reason not in COMPLETE:
            remedy = ": raise request.max_tokens" if reason == "length" else ""
            return Vote(text, [], f"the reply ended early (finish_reason is {reason}{remedy})")
        try:
            return Vote(text, self._read(reply_of(text), count))
        except ValueError as error:
            return Vote(text, [], f"{error} in {shown(text[-READ_CHARACTERS:])}")

    def _read(self, text: str, count: int) -> list[float]:
        """Return the scores in a reply. Raises ValueError."""
        scores = self._from_json(text) if self._config.json_schema else self._from_text(text, count)
        if len(scores) != count:
            raise ValueError(f"{len(scores)} scores for {count} completions")
        low, high = self._config.bounds or (-MOST_SCORE, MOST_SCORE)
        for score in scores:
            if not (math.isfinite(score) and low <= score <= high):
                raise ValueError(f"score {score:g}, which is outside [{low:g}, {high:g}],")
        return scores

    def _from_json(self, text: str) -> list[float]:
        key = "scores" if self._config.scope == "group" else "score"
        try:
            found = msgspec.json.decode(text, type=dict[str, Any])
            return msgspec.convert(found[key] if key == "scores" else [found[key]], list[float])
        except KeyError:
            raise ValueError(f"no {key!r}") from None
        except (msgspec.DecodeError, RecursionError) as error:
            raise ValueError(f"{error}") from None

    def _from_text(self, text: str, count: int) -> list[float]:
        text = text[-READ_CHARACTERS:]
        found = list(self._verdict.finditer(text))
        if not found:
            raise ValueError("no match of `verdict`")
        for match in found[-count:]:
            if _GOES_ON.match(text, match.end(1)):
                raise ValueError(f"`verdict` matches only a part of the number {text[match.start(1) : match.end(1) + 8]!r}")
        return [float(match[1] or "nan") for match in found[-count:]]


def _mean(votes: Sequence[float]) -> float:
    """Return the mean of votes, which rounding does not carry beyond them: a bound of the range is a valid vote."""
    return min(max(sum(votes) / len(votes), min(votes)), max(votes))
