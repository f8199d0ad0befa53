"""What the model is shown before the run: programs that print the product, programs that do not, and reports of what came back.

The run has to discover which programs are worth writing, and that a guess is not.
"""

from __future__ import annotations

import json
import random

from examples.arithmetic.tokenizer import ASSISTANT, END, USER
from examples.tools.moves import TOOL, TOOLS, Move, question

OFFERED = f"{TOOLS}python(code){END}"
SYNTAX_ERROR = """  File "<code>", line 1
    {}
         ^
SyntaxError: '(' was never closed"""
NAME_ERROR = """Traceback (most recent call last):
  File "<code>", line 1, in <module>
    {}
           ^
NameError: name 'x' is not defined"""


def question_context(a: int, b: int) -> str:
    """Return the conversation up to the model's first turn."""
    return f"{OFFERED}{USER}Calculate {a} * {b}.{END}{ASSISTANT}"


def call(program: str) -> str:
    """Return the turn that runs a program."""
    return f"<tool_call>{json.dumps({'name': 'python', 'arguments': {'code': program}})}</tool_call>"


def result_context(a: int, b: int, program: str, reply: str) -> str:
    """Return the conversation up to the model's second turn."""
    return f"{question_context(a, b)}{call(program)}{END}{TOOL}{reply}{END}{ASSISTANT}"


def printing(a: int, b: int) -> list[str]:
    """Return the programs that print the product; the value of the last expression is printed too."""
    return [f"print({a} * {b})", f"{a} * {b}"]


def replies(a: int, b: int) -> dict[str, str]:
    """Return all programs that are shown, and what comes back from each."""
    unclosed, unnamed = f"print({a} * {b}", f"print(x * {b})"
    useless = {f"print({a} + {b})": str(a + b), f"x = {a} * {b}": ""}
    wrong = {unclosed: SYNTAX_ERROR.format(unclosed), unnamed: NAME_ERROR.format(unnamed)}
    return dict.fromkeys(printing(a, b), str(a * b)) | useless | wrong


def moves(shuffle: random.Random) -> list[Move]:
    """Return the moves of one conversation: a program is run and its result reported, or a number is the answer."""
    a, b = question(shuffle)
    guess = f"= {shuffle.randrange(10 ** shuffle.randrange(3, 5), 100_000)}"
    if shuffle.random() < 0.25:
        return [Move(question_context(a, b), guess)]
    program, reply = shuffle.choice([*replies(a, b).items()])
    report = f"= {reply}" if reply.isdigit() else guess
    return [Move(question_context(a, b), call(program)), Move(result_context(a, b, program, reply), report)]
