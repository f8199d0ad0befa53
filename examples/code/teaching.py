"""Supervised training of the tiny model on moves, and the share of questions that it then answers with a program."""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import Qwen3ForCausalLM

from examples.arithmetic.model import complete, save_model
from examples.arithmetic.teaching import LEARNING_RATE, learn
from examples.code.moves import call, moves, printing, question_context, result_context
from examples.tools.moves import question
from examples.tools.teaching import begin
from services.config import RunConfig

VOCABULARY = 460  # upper limit: 7 special tokens, 256 bytes and the merges, which shorten the text around numbers
HELD_OUT = 200  # questions


def teach(config: RunConfig, folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Fill `folder` with model and tokenizer; return the model's mean reward."""
    model, tokenizer, given = begin(moves, VOCABULARY, config, folder, options)

    def judge(model: Qwen3ForCausalLM) -> float:
        return _reward(model, tokenizer, config.sampling.max_tokens, options.seed)

    learn(model, given, options.steps, LEARNING_RATE, judge)
    save_model(model, folder)
    return {"reward_temperature_1": judge(model)}


def _reward(model: Qwen3ForCausalLM, tokenizer: Tokenizer, max_tokens: int, seed: int) -> float:
    """Return the share of held-out questions for which a program prints the product, which is then reported."""
    shuffle, generator = random.Random(f"held out {seed}"), torch.Generator().manual_seed(seed)
    questions = [question(shuffle) for _ in range(HELD_OUT)]

    def completed(contexts: list[str]) -> list[str]:
        prompts = [ids.ids for ids in tokenizer.encode_batch(contexts)]
        return tokenizer.decode_batch(complete(model.eval(), prompts, max_tokens, generator))

    written = zip(questions, completed([question_context(a, b) for a, b in questions]), strict=True)
    right = [(a, b, program) for (a, b), reply in written for program in printing(a, b) if reply == call(program)]
    reports = completed([result_context(a, b, program, str(a * b)) for a, b, program in right])
    model.train()
    return sum(report == f"= {a * b}" for (a, b, _), report in zip(right, reports, strict=True)) / HELD_OUT
