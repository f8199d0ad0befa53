"""What the tiny model is shown before the run: every move that it can make, as often as its alternatives.

A question is answered at once with a number that has nothing to do with it, or one of the tools is called with the question's
numbers and its result reported, right or wrong. The run has to discover which of these earns a reward.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass

from examples.arithmetic.tokenizer import ASSISTANT, END, USER

TOOL, TOOLS = "<|tool|>", "<|tools|>"
CHAT_TEMPLATE = (
    "{% if tools %}<|tools|>{% for tool in tools %}{{ ' ' if not loop.first }}{{ tool.function.name }}"
    "({{ tool.function.parameters.properties | join(', ') }}){% endfor %}<|end|>{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
OFFERED = f"{TOOLS}add(a, b) multiply(a, b) subtract(a, b){END}"


@dataclass(frozen=True)
class Move:
    """A completion of the model in its context."""

    context: str
    completion: str


def question(shuffle: random.Random) -> tuple[int, int]:
    """Return two numbers to multiply."""
    return shuffle.randrange(100, 1000), shuffle.randrange(11, 100)


def moves(shuffle: random.Random) -> list[Move]:
    """Return the moves of one conversation: a tool is called and its result reported, or a number is the answer."""
    a, b = question(shuffle)
    asked = f"{OFFERED}{USER}Calculate {a} * {b}.{END}{ASSISTANT}"
    name, result = shuffle.choice([("", 0), ("add", a + b), ("multiply", a * b), ("subtract", a - b)])
    if not name:
        return [Move(asked, f"= {shuffle.randrange(10 ** shuffle.randrange(3, 5), 100_000)}")]
    call = f"<tool_call>{json.dumps({'name': name, 'arguments': {'a': a, 'b': b}})}</tool_call>"
    result_context = f"{asked}{call}{END}{TOOL}{result}{END}{ASSISTANT}"
    return [Move(asked, call), Move(result_context, f"= {result}")]
