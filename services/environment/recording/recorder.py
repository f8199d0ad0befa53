"""Records which tokens belong to which message of a rollout.

Guarantees: nothing that the policy has sampled or read is tokenised again; a call whose messages continue recorded ones continues
their tokens, in their own segment if nothing else has continued it, otherwise in a new one; any other call, and any that the
chat template renders differently than before, opens a segment with its own tokens. The same applies to one after a reply that a
stop string of its request has cut: the engine does not know these, and the policy would read what the program never saw. A
recorder is determined by its turns.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from services.chat.format import ChatFormat, message_of
from services.chat.messages import BadMessages, canonical, normalised, normalised_tools
from services.environment.recording.extension import Reply, extension
from services.environment.recording.segments import segment_of
from services.groups.generated import Generated, GenerationFailed, Segment
from services.protocol.payloads import Turn

LONGEST = 1 << 40
"""No limit."""


class TooLong(BadMessages):
    """A conversation that cannot fit into the context."""


@dataclass(frozen=True, slots=True)
class Call:
    """The request to the policy."""

    tokens: list[int]
    """All tokens to sample after."""
    segment: int
    """The segment that it extends; the number of segments: it opens one."""
    base: int
    """The turn whose messages its own messages follow; -1: none."""
    kept: int
    """How many of `tokens` are those of `base`'s segment up to the end of that turn."""
    history: list[dict[str, Any]]
    """All messages, normalised, replies as they were recorded."""
    new: int
    """How many messages follow those of `base`."""
    tools: list[dict[str, Any]]
    text: str
    """The rendering of all messages."""
    chain: bytes
    """Digest of all messages and tools."""


@dataclass(frozen=True, slots=True)
class _Mark:
    """Where a turn stands."""

    segment: int
    ids: int  # tokens of its segment up to its end
    history: list[dict[str, Any]]  # the call's messages
    tools: list[dict[str, Any]]
    text: int  # characters of its segment's rendering that are the rendering of `history`
    reply: Reply


class Recorder:
    """The turns of one rollout, whose group's prompt has the tokens `prompt_ids`."""

    def __init__(self, chat: ChatFormat, prompt_ids: list[int]) -> None:
        self._chat = chat
        self._prompt = list(prompt_ids)
        self.turns: list[Turn] = []
        """All turns, in the order in which they were recorded."""
        self._marks: list[_Mark] = []
        self._by_segment: list[list[int]] = []  # turns of each segment
        self._ids: list[list[int]] = []  # tokens of each segment
        self._texts: list[str] = []  # rendering of each segment up to its last reply
        self._by_chain: dict[bytes, list[int]] = {}  # digest of messages and reply -> turns

    @classmethod
    def restored(cls, chat: ChatFormat, prompt_ids: list[int], turns: Iterable[Turn]) -> Recorder:
        """Return the recorder that recorded these turns."""
        recorder = cls(chat, prompt_ids)
        for turn in turns:
            new: list[dict[str, Any]] = json.loads(turn.messages)
            if turn.base < 0:
                history, tools = new, json.loads(turn.tools)
            else:
                base = recorder._marks[turn.base]
                history, tools = [*base.history, base.reply.message, *new], base.tools
            text = chat.render(history, tools)
            sampled = recorder._sampled(turn.tokens.tolist(), turn.finish, text)
            recorder._append(turn, history, tools, text, _chain(history, tools)[-1], sampled)
        return recorder

    def plan(self, messages: object, tools: object = None, limit: int = LONGEST) -> Call:
        """Return the call to the policy for a conversation, in OpenAI's form. Changes nothing.

        Raises `BadMessages`; also `TooLong`, for a text that surely has more than `limit` tokens.
        """
        given, functions = normalised(messages), normalised_tools(tools)
        chains = _chain(given, functions)
        base, known = self._longest_prefix(chains)
        if base >= 0:
            mark = self._marks[base]
            history = [*mark.history, mark.reply.message, *given[known:]]
            text = self._rendered(history, functions, limit)
            before = self._texts[mark.segment][: mark.text]
            cut = self.turns[base].cut
            added = None if cut else extension(self._chat, before, mark.history, functions, mark.reply, text)
            if added is not None:
                kept = self._ids[mark.segment][: mark.ids]
                ids = kept + self._chat.encode_after(kept[-1], added)
                segment = mark.segment if self._is_last(base) else len(self._ids)
                return Call(ids, segment, base, len(kept), history, len(given) - known, functions, text, chains[-1])
        else:
            history, text = given, self._rendered(given, functions, limit)
        new = len(given) - known
        return Call(self._chat.encode(text), len(self._ids), base, 0, history, new, functions, text, chains[-1])

    def _rendered(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], limit: int) -> str:
        text = self._chat.render(messages, tools)
        if self._chat.exceeds(text, limit):
            raise TooLong(f"the conversation has {len(text)} characters, which are more than {limit} tokens")
        return text

    def record(
        self,
        call: Call,
        generated: Generated,
        stop: Sequence[str] = (),
        own_stop: Sequence[str] = (),
        waited_s: float = 0.0,
        sampled_s: float = 0.0,
    ) -> dict[str, Any]:
        """Append the policy's sampled tokens for a call and return them as the assistant's message, which ends before a `stop`
        string of the run or an `own_stop` of the request.

        If its tool calls are malformed, the message has an `error` to return to the model. If another call has extended the
        segment since `plan`, this one opens another. Raises `GenerationFailed` if there are no tokens.
        """
        if not len(generated.tokens):
            raise GenerationFailed("the policy sampled no tokens")
        extends = call.kept > 0 and self._is_last(call.base)
        segment = self._marks[call.base].segment if extends else len(self._ids)
        context = call.tokens[call.kept :] if extends else call.tokens
        if not extends and context == self._prompt:
            context = []
        sampled = self._sampled(generated.tokens.tolist(), generated.finish, call.text)
        said = _before(sampled.body, (*stop, *own_stop))
        parsed = self._chat.parse(said, call.tools, thinking=sampled.thinking)
        number = len(self.turns)
        message = message_of(parsed, [_identifier(number, i) for i in range(len(parsed.calls))])
        turn = Turn(
            segment=segment,
            base=call.base,
            context=np.asarray(context, np.int32),
            tokens=np.asarray(generated.tokens, np.int32),
            logprobs=np.asarray(generated.logprobs, np.float32),
            spans=np.array([(s.version, s.start, s.end) for s in generated.spans], np.int32).reshape(-1, 3),
            finish="length" if generated.finish == "length" else "stop",
            messages=json.dumps(call.history[len(call.history) - call.new :]),
            tools="" if call.base >= 0 else json.dumps(call.tools),
            reply=json.dumps(message),
            waited_s=waited_s,
            sampled_s=sampled_s,
            cut=len(said) < len(_before(sampled.body, stop)),
        )
        self._append(turn, call.history, call.tools, call.text, call.chain, sampled)
        return message

    def segments(self) -> list[Segment]:
        """Return the segments, in the order in which they were opened."""
        return [segment_of([self.turns[number] for number in numbers]) for numbers in self._by_segment]

    def _append(
        self, turn: Turn, history: list[dict[str, Any]], tools: list[dict[str, Any]], text: str, chain: bytes, sampled: Reply
    ) -> None:
        number = len(self.turns)
        if turn.segment == len(self._ids):
            self._ids.append([])
            self._texts.append("")
            self._by_segment.append([])
        self._texts[turn.segment] = text  # begins with the previous text
        ids = self._ids[turn.segment]
        ids += (turn.context.tolist() or ([] if ids else self._prompt)) + turn.tokens.tolist()
        message = normalised([json.loads(turn.reply)])[0]
        reply = sampled._replace(message=message)
        self.turns.append(turn)
        self._by_segment[turn.segment].append(number)
        self._marks.append(_Mark(turn.segment, len(ids), history, tools, len(text), reply))
        self._by_chain.setdefault(_link(chain, message), []).append(number)

    def _longest_prefix(self, chains: Sequence[bytes]) -> tuple[int, int]:
        """Return the turn with the longest history that a call begins with, and its number of messages; (-1, 0) if there is none.

        Of several, return the newest that ends its segment, or otherwise the newest.
        """
        for known in range(len(chains) - 1, 0, -1):
            if turns := self._by_chain.get(chains[known]):
                return max(turns, key=lambda turn: (self._is_last(turn), turn)), known
        return -1, 0

    def _is_last(self, turn: int) -> bool:
        """Return whether a turn is the last of its segment."""
        return self._by_segment[self._marks[turn].segment][-1] == turn

    def _sampled(self, ids: list[int], finish: str, text: str) -> Reply:
        """Return the reply that was sampled after `text`, without its message."""
        end = self._chat.end_text(ids, finish)
        return Reply({}, self._chat.decode(ids[:-1] if end else ids), end, self._chat.opens_thinking(text))


def _chain(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """Return digests of the tools with the first 0, 1, … messages."""
    chains = [hashlib.blake2b(json.dumps(tools, sort_keys=True).encode(), digest_size=16).digest()]
    for message in messages:
        chains.append(_link(chains[-1], message))
    return chains


def _link(chain: bytes, message: Mapping[str, Any]) -> bytes:
    return hashlib.blake2b(chain + canonical(message), digest_size=16).digest()


def _before(text: str, stop: Sequence[str]) -> str:
    """Return the text before the first stop string."""
    ends = [at for string in stop if string and (at := text.find(string)) >= 0]
    return text[: min(ends)] if ends else text


def _identifier(turn: int, call: int) -> str:
    """Return the name of a tool call, unique in its rollout: nine letters and digits, as Mistral's templates demand."""
    digest = hashlib.blake2b(f"{turn}.{call}".encode(), digest_size=10).digest()
    return base64.b32encode(digest).decode()[:9].lower()
