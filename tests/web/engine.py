"""A scripted engine with readable completions: sums, which are correct more often with newer weights."""

from __future__ import annotations

import random
from pathlib import Path

from services.config import RunConfig
from tests.support.scripted import ScriptedEngine

LEARNT = 100  # policy version from which nearly all answers are correct


class SumsEngine(ScriptedEngine):
    """Answers questions such as `What is 12 + 7?`."""

    async def start(self, config: RunConfig) -> None:
        from tokenizers import Tokenizer

        await super().start(config)
        self._tokenizer = Tokenizer.from_file(str(Path(config.model.path) / "tokenizer.json"))

    def script(self, prompt: list[int], seed: int, max_tokens: int) -> list[int]:
        chance = random.Random(seed)
        a, b = (int(word.strip("?")) for word in self._tokenizer.decode(prompt).split() if word.strip("?").isdigit())
        right = chance.random() < 0.25 + 0.7 * min(max(self.version, 0) / LEARNT, 1.0)
        answer = a + b if right else a + b + chance.choice((-10, -2, -1, 1, 3, 10))
        first = chance.choice(("", f"Add {a} and {b}.\n", "I count on.\n", f"{b} more than {a}:\n"))
        return self._tokenizer.encode(f"{first}{a} + {b} = {answer}").ids[:max_tokens]
