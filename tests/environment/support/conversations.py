"""Programs that converse with a policy in every way that matters to a recorder, and an audit of the recordings.

The policy's tokens deliberately differ from the tokenisation of its text: the text is cut at random places before encoding.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from services.environment.recording.recorder import Recorder
from services.groups.generated import Generated, Segment
from services.protocol.messages import Span
from services.protocol.payloads import Turn
from tests.environment.support.templates import Family, chat_of

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "note": {"type": "string"}}},
    },
}
WORDS = ("the", "answer", " 12", "é", "\n", "  ", "<", "tool", "🙂", "{", "}", "ans", "wer", "|im", "Z")


@dataclass
class Asked:
    """The input and output tokens of one call of the policy."""

    given: list[int]
    sampled: list[int]


@dataclass
class ScriptedPolicy:
    """Samples texts from a seed, in the format of a model of the family."""

    family: Family
    rng: random.Random
    said: list[str] = field(default_factory=list)
    """Texts to return first, in order."""
    asked: list[Asked] = field(default_factory=list)
    version: int = 0

    def sample(self, tokens: list[int], tools: bool, cut: bool = False) -> Generated:
        """Return what the policy samples after `tokens`."""
        scripted = bool(self.said)
        body = self.said.pop(0) if scripted else self._text(tools, self.family.name == "deepseek")
        ids = self._tokens(body)
        end = self.rng.choice(self.family.ends)
        if not scripted and self.rng.random() < 0.15:
            ids, cut = ids[: self.rng.randrange(1, len(ids) + 1)], True
        elif not cut:
            ids = [*ids, *self._tokens(end, whole=True)]
        self.asked.append(Asked(list(tokens), ids))
        self.version += self.rng.random() < 0.3
        middle = self.rng.randrange(len(ids))
        first = [Span(self.version, 0, middle)] if middle else []
        spans = [*first, Span(self.version + (middle > 0), middle, len(ids))]
        self.version += middle > 0
        logprobs = -np.arange(1, len(ids) + 1, dtype=np.float32)
        return Generated(np.array(ids, np.int32), logprobs, spans, "length" if cut else "stop")

    def _tokens(self, text: str, whole: bool = False) -> list[int]:
        chat = chat_of(self.family)
        if whole:
            return chat.encode(text)
        ids: list[int] = []
        while text:
            cut = self.rng.randrange(1, 6)
            ids += chat._tokenizer.encode(text[:cut], add_special_tokens=False).ids
            text = text[cut:]
        return ids

    def words(self) -> str:
        """Return a few random words, sometimes with odd characters, and perhaps with leading white space."""
        return "".join(self.rng.choice(WORDS) for _ in range(self.rng.randrange(1, 8))) + "w"

    def _text(self, tools: bool, opened: bool) -> str:
        text = ""
        if self.family.thinks and self.family.name != "qwen3_no_thinking" and self.rng.random() < 0.8:
            text = ("" if opened else "<think>\n") + self.words() + "\n</think>\n\n"
        if not tools or self.rng.random() < 0.3:
            return text + self.words()
        spoken = self.words() if self.rng.random() < 0.3 and self.family.notation not in ("llama3_json", "pythonic") else ""
        call = self._call(self.rng.randrange(100), self.words().strip())
        return text + spoken + (call[:-3] if self.rng.random() < 0.1 else call)

    def _call(self, a: int, note: str) -> str:
        arguments = json.dumps({"a": a, "note": note}, separators=self.rng.choice([(",", ":"), (", ", ": ")]))
        match self.family.notation:
            case "hermes":
                return f'\n<tool_call>\n{{"name":"add","arguments":{arguments}}}\n</tool_call>'
            case "llama3_json":
                return f'{{"name": "add", "parameters": {arguments}}}'
            case "mistral":
                return f'[TOOL_CALLS] [{{"name": "add", "arguments": {arguments}}}]'
            case "deepseek":
                return (
                    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n"
                    f"```json\n{arguments}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
                )
            case "glm4":
                return f"<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>{a}</arg_value>\n</tool_call>"
            case "qwen3_coder":
                return f"\n<tool_call>\n<function=add>\n<parameter=a>\n{a}\n</parameter>\n</function>\n</tool_call>"
            case _:
                return f"[add(a={a}, note={json.dumps(note)})]"


@dataclass
class Program:
    """A program that uses the policy through a recorder, with random tools, questions, compaction, branches and sub-agents."""

    family: Family
    rng: random.Random

    def __post_init__(self) -> None:
        self.chat = chat_of(self.family)
        self.policy = ScriptedPolicy(self.family, self.rng)
        self.tools = [TOOL] if self.family.tools and self.rng.random() < 0.8 else []
        system = [{"role": "system", "content": "Be brief."}] if self.family.system and self.rng.random() < 0.5 else []
        self.start: list[dict[str, Any]] = [*system, {"role": "user", "content": self.policy.words()}]
        self.prompt = self.chat.encode(self.chat.render(self.start, self.tools))
        self.recorder = Recorder(self.chat, self.prompt)
        self.messages = list(self.start)
        self.past: list[list[dict[str, Any]]] = []

    def turn(self) -> None:
        """Ask the policy once, and continue the conversation with its reply."""
        call = self.recorder.plan(self.messages, self.tools)
        added = self.chat.decode(call.tokens[call.kept :])
        assert self.family.strip or call.text.endswith(added), "what is appended differs from the template"
        reply = self.recorder.record(call, self.policy.sample(call.tokens, bool(self.tools)))
        self.messages = [*self.messages, self._echoed(reply)]
        self.past.append(list(self.messages))
        self._continue(reply)

    def _echoed(self, reply: dict[str, Any]) -> dict[str, Any]:
        """Return the reply as a program might pass it back: with other JSON formatting, or without the reasoning."""
        echoed = {key: value for key, value in json.loads(json.dumps(reply)).items() if key != "error"}
        if self.rng.random() < 0.5:
            echoed.pop("reasoning_content", None)
        for call in echoed.get("tool_calls", []):
            function = call["function"]
            if self.rng.random() < 0.5:
                function["arguments"] = json.dumps(json.loads(function["arguments"]), indent=1, sort_keys=True)
        return echoed

    def _continue(self, reply: dict[str, Any]) -> None:
        chance = self.rng.random()
        if reply.get("tool_calls"):
            self.messages += [
                {"role": "tool", "tool_call_id": call["id"], "content": self.policy.words()} for call in reply["tool_calls"]
            ]
        elif chance < 0.1:  # compaction
            self.messages = [*self.start[:-1], {"role": "user", "content": "Summary: " + self.policy.words()}]
        elif chance < 0.2:  # a branch from an earlier turn
            self.messages = [*self.rng.choice(self.past), {"role": "user", "content": self.policy.words()}]
            if "tool_calls" in self.messages[-2]:
                self.messages = list(self.start)
        elif chance < 0.3:  # a sub-agent
            self.messages = [{"role": "user", "content": "You are another. " + self.policy.words()}]
        elif chance < 0.35:  # a fresh attempt
            self.messages = list(self.start)
        else:
            self.messages = [*self.messages, {"role": "user", "content": self.policy.words()}]


def exact_turns(prompt: list[int], segments: list[Segment], turns: list[Turn], asked: list[Asked]) -> int:
    """Count the turns whose recorded token ids are the policy's input followed by the ids that it sampled."""
    exact = 0
    reached = [0] * len(segments)
    for turn, call in zip(turns, asked, strict=True):
        segment = segments[turn.segment]
        completion = segment.completion
        context = segment.context.tolist() or prompt
        ids = context + completion.tokens.tolist()
        start = len(call.given)
        end = start + len(call.sampled)
        trained = np.ones(len(completion.tokens), bool)
        for first, last in completion.tool_spans:
            trained[first:last] = False
        here = trained[start - len(context) : end - len(context)]
        between = trained[max(reached[turn.segment], len(context)) - len(context) : start - len(context)]
        exact += ids[:start] == call.given and ids[start:end] == call.sampled and bool(here.all()) and not between.any()
        reached[turn.segment] = end
    begun = [len(segment.context) or len(prompt) for segment in segments]
    whole = all(end == length + len(s.completion.tokens) for end, length, s in zip(reached, begun, segments, strict=True))
    return exact if whole else 0
