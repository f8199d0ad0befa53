"""Cases of `door.jsonl`: fields of a request to an agents' endpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from services.environment.door import anthropic_messages, chat_completions, responses
from services.environment.door.fields import overruled
from services.environment.door.turns import Question, RequestRefused
from services.groups.generated import SamplingParameters

READERS = {"chat": chat_completions.read, "anthropic": anthropic_messages.read, "responses": responses.read}


def attempt(case: dict[str, Any], folder: Path, scratch: Path) -> tuple[Any, bool]:
    """Return what becomes of a request: refused, or a turn with the fields that are named as ignored."""
    read, right = READERS[case["dialect"]], case["right"]
    plain: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "model": "m"}
    if case["dialect"] == "responses":
        plain = {"input": "Hi", "model": "m"}
    elif case["dialect"] == "anthropic":
        plain["max_tokens"] = 5
    try:
        question = read({**plain, **case["fields"]})
    except RequestRefused as error:
        return f"refused: {error}", "refused" in right
    named = overruled({**plain, **case["fields"]}, SamplingParameters(max_tokens=16), question.ignored)
    found = f"turn; {named or 'nothing'} named"
    if right.startswith("refused or named") or "named" in right:
        return found, any(name.partition(".")[0] in named for name in case["fields"])
    if "honoured" in right:
        return found, question != _but(read(plain), question)
    return found, right.startswith("a turn")


def _but(plain: Question, question: Question) -> Question:
    """Return what the request would be without the field, whatever else differs by itself."""
    return plain if plain != question else question
