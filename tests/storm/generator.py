"""A generator in a storm: the real endpoint with an engine that calls tools. It follows published versions without weights.

`python -m tests.storm.generator CONFIG NAME LOG`. The number in its text names the turn, and depends on the tokens before it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from typing import Any

import numpy as np

from services.chat.tokenizers import load_tokenizer, tokenizer_folder
from services.config import RunConfig
from services.config.load import load_resolved
from services.generator.api import add_routes
from services.generator.loop import GeneratorLoop
from services.generator.metrics import GeneratorMetrics
from services.http.entry import open_service
from services.runtime.loops import Loop
from tests.storm.programs import note
from tests.support.scripted import ScriptedEngine

CALLS = 0.7  # share of the turns that call the tool
END = "<|im_end|>"


class CallingEngine(ScriptedEngine):
    """Samples tool calls, or text that ends the rollout."""

    def __init__(self, log: str) -> None:
        super().__init__()
        self._log = log

    async def start(self, config: RunConfig) -> None:
        await super().start(config)
        self.tokenizer = load_tokenizer(tokenizer_folder(config.model.path))

    def script(self, prompt: list[int], seed: int, max_tokens: int) -> list[int]:
        number = turn_number(prompt, seed)
        calls = number % 1000 < 1000 * CALLS
        call = {"name": "look", "arguments": {"n": number}}
        text = f"<tool_call>{json.dumps(call)}</tool_call>" if calls else f"done {number}"
        ids = self.tokenizer.encode(text + END, add_special_tokens=False).ids
        assert len(ids) < max_tokens, "the engine's replies do not fit"
        return ids

    async def generate(self, request_id: str, prompt: list[int], seed: int, *rest: Any, **others: Any) -> Any:
        note(self._log, "sampled", turn_number(prompt, seed))
        return await super().generate(request_id, prompt, seed, *rest, **others)


def turn_number(prompt: list[int], seed: int) -> int:
    """Return the number of the turn sampled after a context."""
    key = hashlib.blake2b(np.array([seed, *prompt], np.int64).tobytes(), digest_size=7).digest()
    return int.from_bytes(key, "little")


async def serve(config: RunConfig, name: str, log: str) -> None:
    """Serve until stopped."""
    async with open_service("generator", config, name) as service:
        engine = CallingEngine(log)
        await engine.start(config)
        tokenizer: Any = range(engine.tokenizer.get_vocab_size())  # only its length is used
        nobody: Any = None  # the scoring: this pod only serves turns
        add_routes(service, GeneratorLoop(service, engine, tokenizer, nobody, GeneratorMetrics(service.registry)))

        async def follow(loop: Loop) -> None:
            while not service.stopping.is_set():
                loop.progress()
                if (state := service.view.state) is not None:
                    engine.version = state.published_version
                    service.say(phase="ready", version=engine.version, world=1, trainer_fence=state.published_by)
                await service.notifications.wait("version", "control", timeout=0.5)

        await service.run(follow)


if __name__ == "__main__":
    asyncio.run(serve(load_resolved(sys.argv[1]), *sys.argv[2:]))
