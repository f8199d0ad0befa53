"""Supervised training of the tiny model on moves, and the mean reward that they earn before the run."""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import Qwen3ForCausalLM

from examples.arithmetic.model import complete, make_model, save_model
from examples.arithmetic.teaching import LEARNING_RATE, Lesson, batches, learn
from examples.arithmetic.tokenizer import END, SPECIAL, save_tokenizer, train_tokenizer
from examples.tools.calculator import Calculator
from examples.tools.moves import CHAT_TEMPLATE, TOOL, TOOLS, Move, moves, question
from services.chat.format import ChatFormat, message_of
from services.chat.messages import normalised
from services.config import RunConfig
from services.environment.programs.loaded import LoadedProgram

VOCABULARY = 400  # upper limit: 7 special tokens, 256 bytes and the merges, which shorten a call's text around its numbers
HELD_OUT = 200  # questions


def teach(config: RunConfig, folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Fill `folder` with model and tokenizer; return its mean reward and the share of questions that it calls a tool for."""
    model, _, given = begin(moves, VOCABULARY, config, folder, options)
    judge = Player(config, folder, options.seed)
    learn(model, given, options.steps, LEARNING_RATE, judge)
    measured = {"reward_temperature_1": judge(model), "tool_calls": judge.calls}
    save_model(model, folder)
    return measured


def begin(
    moves: Callable[[random.Random], list[Move]], vocabulary: int, config: RunConfig, folder: Path, options: argparse.Namespace
) -> tuple[Qwen3ForCausalLM, Tokenizer, Iterator[list[Lesson]]]:
    """Save the tokenizer of an example's moves in `folder`; return an untrained model, the tokenizer, and batches of lessons."""
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    shuffle = random.Random(options.seed)
    shown = [move for _ in range(options.conversations) for move in moves(shuffle)]
    tokenizer = train_tokenizer((move.context + move.completion for move in shown), (*SPECIAL, TOOL, TOOLS), vocabulary)
    save_tokenizer(tokenizer, folder, config.model.max_tokens, CHAT_TEMPLATE)
    lessons = [Lesson(tokenizer.encode(move.context).ids, tokenizer.encode(move.completion + END).ids) for move in shown]
    return make_model(tokenizer.get_vocab_size(), config.model.max_tokens), tokenizer, batches(lessons, shuffle)


class Player:
    """Plays rollouts of held-out questions at temperature 1, as the run does, for their mean reward."""

    def __init__(self, config: RunConfig, folder: Path, seed: int) -> None:
        self._chat = ChatFormat(folder, config.data)
        self._turns, self._max_tokens, self._seed = config.environments[0].max_turns, config.sampling.max_tokens, seed
        shuffle = random.Random(f"held out {seed}")
        self._asked = [question(shuffle) for _ in range(HELD_OUT)]
        self.calls = 0.0
        """Share of the questions for which a tool was called, in the last rollouts."""

    def __call__(self, model: Qwen3ForCausalLM) -> float:
        """Return the mean reward of one rollout for each question."""
        generator = torch.Generator().manual_seed(self._seed)
        reward = asyncio.run(self._play(model.eval(), generator))
        model.train()
        return reward

    async def _play(self, model: Qwen3ForCausalLM, generator: torch.Generator) -> float:
        programs = [LoadedProgram(Calculator()) for _ in self._asked]
        tools = [(await one.start({"answer": str(a * b)}))["tools"] for one, (a, b) in zip(programs, self._asked, strict=True)]
        talks: list[list[dict[str, Any]]] = [[{"role": "user", "content": f"Calculate {a} * {b}."}] for a, b in self._asked]
        running, called = list(range(len(talks))), 0
        for turn in range(self._turns):
            prompts = [self._chat.encode(self._chat.render(normalised(talks[i]), tools[i])) for i in running]
            said = complete(model, prompts, self._max_tokens, generator) if prompts else []
            ended: set[int] = set()
            for i, ids in zip(running, said, strict=True):
                parsed = self._chat.parse(self._chat.decode(ids), tools[i])
                message = message_of(parsed, [str(turn)] * len(parsed.calls))
                called += bool(parsed.calls) and turn == 0
                reply = (await programs[i].turn(message))["messages"]
                talks[i] += [message, *(reply or [])]
                if reply is None:
                    ended.add(i)
            running = [i for i in running if i not in ended]
        self.calls = called / len(talks)
        scores = [await one.score() for one in programs]
        return sum(score["score"] for score in scores if score) / len(scores)
