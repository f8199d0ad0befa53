"""Supervised training of the tiny model, in two lessons.

First it learns to answer step by step. Then, for a sixth of the steps, it sees both ways to answer, mostly at a glance,
which is short and nearly always wrong for a model of this size. It ends up able to work a sum out, but seldom does so.
GRPO has to discover that it pays.

Guarantees: the same seed, examples and thread count give the same weights; rewards are measured on questions that were not
taught, at temperature 1 as in the run, and graded by the task's own scorer.
"""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import Qwen3ForCausalLM

from examples.arithmetic.model import complete, make_model, save_model
from examples.arithmetic.tokenizer import END, PAD_ID, render, save_tokenizer, train_tokenizer
from examples.arithmetic.worked import Example, make_examples, make_task
from services.config import RunConfig
from services.config.data import ReasoningGymSource
from services.config.verifiers import ReasoningGymConfig

BATCH = 32  # reached the same reward in 0.7 of the time of 64
LEARNING_RATE = 2e-3  # with 4e-3 some seeds did not learn the task
BOTH_WAYS_LEARNING_RATE = 1e-3
WARMUP_STEPS = 50
DECAY_SHARE = 0.4  # share of a lesson's steps, at its end, over which the learning rate falls to 0
BOTH_WAYS_SHARE = 1 / 6  # share of all steps
STEP_BY_STEP_SHARE = 0.3  # share of the answers in the second lesson
MEASURE_EVERY = 100  # steps


@dataclass(frozen=True)
class Lesson:
    """A tokenised worked example. The completion ends with the end token."""

    prompt: list[int]
    completion: list[int]


def teach(config: RunConfig, source: ReasoningGymSource, folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Fill `folder` with the model and its tokenizer, and return mean rewards on held-out questions."""
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    held_out, worked = make_examples(source, options.held_out, options.examples, options.seed)
    tokenizer = train_tokenizer(text for example in worked for text in (example.question, example.step_by_step))
    model = make_model(tokenizer.get_vocab_size(), config.model.max_tokens)
    size = sum(weight.numel() for weight in model.parameters())
    print(f"{len(worked):,} worked examples, {size / 1e6:.2f} M parameters, threads: {options.threads}", flush=True)
    judge = Judge(config, source, tokenizer, held_out, options.seed)
    shuffle = random.Random(options.seed)
    both_ways = round(options.steps * BOTH_WAYS_SHARE)
    print("step by step:", flush=True)
    learn(model, batches(_lessons(tokenizer, worked, 1.0, shuffle), shuffle), options.steps - both_ways, LEARNING_RATE, judge)
    print("both ways, mostly at a glance:", flush=True)
    lessons = _lessons(tokenizer, worked, STEP_BY_STEP_SHARE, shuffle)
    learn(model, batches(lessons, shuffle), both_ways, BOTH_WAYS_LEARNING_RATE, judge)
    measured = {"reward_temperature_1": judge(model), "reward_greedy": judge(model, greedy=True)}
    print(f"held-out mean reward {measured['reward_temperature_1']:.3f} at temperature 1, {measured['reward_greedy']:.3f} greedy")
    save_model(model, folder)
    save_tokenizer(tokenizer, folder, config.model.max_tokens)
    return measured


def to_lesson(tokenizer: Tokenizer, question: str, completion: str) -> Lesson:
    """Encode the prompt as the chat template renders it, and the completion with the end token."""
    return Lesson(tokenizer.encode(render(question)).ids, tokenizer.encode(completion + END).ids)


class Judge:
    """Measures the mean reward on held-out questions, as the run's verifier scores it."""

    def __init__(
        self, config: RunConfig, source: ReasoningGymSource, tokenizer: Tokenizer, held_out: Sequence[Example], seed: int
    ) -> None:
        self._task = make_task(source, 1, 0)
        verifier = config.verifiers[0]
        assert isinstance(verifier, ReasoningGymConfig), "the example scores with the task's own scorer"
        self._answer = re.compile(verifier.extract)
        self._max_tokens, self._seed = config.sampling.max_tokens, seed
        self._tokenizer, self._held_out = tokenizer, held_out
        self._prompts = [tokenizer.encode(render(example.question)).ids for example in held_out]

    def __call__(self, model: Qwen3ForCausalLM, greedy: bool = False) -> float:
        """Return the task's mean score over the questions, one completion each."""
        generator = None if greedy else torch.Generator().manual_seed(self._seed)
        completions = self._tokenizer.decode_batch(complete(model.eval(), self._prompts, self._max_tokens, generator))
        model.train()
        return sum(map(self._score, completions, self._held_out)) / len(self._held_out)

    def _score(self, completion: str, example: Example) -> float:
        found = self._answer.findall(completion)
        return float(self._task.score_answer(found[-1] if found else None, example.entry))


def _lessons(tokenizer: Tokenizer, examples: Sequence[Example], share: float, shuffle: random.Random) -> list[Lesson]:
    """Return one lesson per example; a `share` of them step by step."""
    return [
        to_lesson(tokenizer, example.question, example.step_by_step if shuffle.random() < share else example.at_a_glance)
        for example in examples
    ]


def learn(
    model: Qwen3ForCausalLM, given: Iterator[list[Lesson]], steps: int, learning_rate: float,
    judge: Callable[[Qwen3ForCausalLM], float],
) -> None:  # fmt: skip
    """Train with AdamW for `steps` steps: linear warm-up, constant, linear decay."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * min(1.0, step / WARMUP_STEPS, (steps - step + 1) / (DECAY_SHARE * steps))
        loss = _loss(model, next(given))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % MEASURE_EVERY == 0 or step == steps:
            print(f"  step {step:4d}  loss {loss.item():.3f}  held-out mean reward {judge(model):.3f}", flush=True)


def batches(lessons: Sequence[Lesson], shuffle: random.Random) -> Iterator[list[Lesson]]:
    """Yield batches endlessly, each of prompts of similar length to limit padding; both ways to answer stay mixed."""
    while True:
        order = list(lessons)
        shuffle.shuffle(order)
        found = []
        for start in range(0, len(order), 20 * BATCH):
            near = sorted(order[start : start + 20 * BATCH], key=lambda lesson: len(lesson.prompt))
            found += [near[i : i + BATCH] for i in range(0, len(near), BATCH)]
        shuffle.shuffle(found)
        yield from found


def _loss(model: Qwen3ForCausalLM, batch: Sequence[Lesson]) -> torch.Tensor:
    """Return the mean cross entropy of the completion tokens. Padding is on the right, where causal attention ignores it."""
    longest = max(len(lesson.prompt) + len(lesson.completion) for lesson in batch)
    tokens = torch.full((len(batch), longest), PAD_ID)
    targets = torch.full((len(batch), longest), -100)  # -100: the index that cross_entropy ignores
    for row, lesson in enumerate(batch):
        start, stop = len(lesson.prompt), len(lesson.prompt) + len(lesson.completion)
        tokens[row, :stop] = torch.tensor(lesson.prompt + lesson.completion)
        targets[row, start:stop] = torch.tensor(lesson.completion)
    logits: Any = model(input_ids=tokens[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten())
