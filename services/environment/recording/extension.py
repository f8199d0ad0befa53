"""Computes what a conversation adds to the tokens of a segment. Pure.

Guarantees: the text returned is what the chat template puts after the recorded reply, no more and no less; no text is returned if
the template now renders anything before it, or the reply itself, differently from what the policy read and sampled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from services.chat.format import ChatFormat, Parsed, message_of
from services.chat.messages import canonical, normalised

ENDS_TRIED = 8
"""Places in a rendering that are tried as the end of the reply, which may contain the text that ends replies."""


class Reply(NamedTuple):
    """A recorded reply of the assistant."""

    message: dict[str, Any]  # normalised
    body: str  # the text sampled, without its end-of-sequence token
    end: str  # the text of that token; empty: it was not sampled
    thinking: bool  # whether it begins within the reasoning


def extension(
    chat: ChatFormat,
    before: str,
    history: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    reply: Reply,
    text: str,
) -> str | None:
    """Return the text to append after a reply's tokens, or None if `text` rewrites what precedes it.

    `before` is the rendering of `history` that the reply was sampled after, `text` the rendering of a conversation that begins
    with `history` and the reply.
    """
    if not text.startswith(before):
        return None
    rest = text[len(before) :]
    for end, sampled in _ends(chat, history, tools, reply):
        appended_from = len(end) if sampled else 0
        for at in _ends_of_reply(rest, reply.body, end):
            if rest[:at] == reply.body or _says(chat.parse(rest[:at], tools, thinking=reply.thinking), reply.message):
                return rest[at + appended_from :]
    return None


def _ends(
    chat: ChatFormat, history: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], reply: Reply
) -> Iterator[tuple[str, bool]]:
    """Yield the texts that may end the reply, and whether the policy has sampled them."""
    if reply.end:
        yield reply.end, True
    closing = chat.closing(history, tools)
    if closing is not None:
        yield closing, False


def _ends_of_reply(rest: str, body: str, end: str) -> Iterator[int]:
    """Yield places where a rendered reply may end: after the text as it was sampled, then before each `end`."""
    if rest.startswith(body) and rest.startswith(end, len(body)):
        yield len(body)
    at = rest.find(end) if end else -1
    for _ in range(ENDS_TRIED):
        if at < 0:
            return
        yield at
        at = rest.find(end, at + len(end))


def _says(parsed: Parsed, message: Mapping[str, Any]) -> bool:
    """Return whether a rendered reply has the contents of the recorded one, including its reasoning."""
    said = message_of(parsed, [""] * len(parsed.calls))
    same = canonical(normalised([said])[0]) == canonical(message)
    return same and parsed.reasoning.strip() == message.get("reasoning_content", "").strip()
