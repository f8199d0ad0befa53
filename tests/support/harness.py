"""A small run for tests: a data file, a configuration and tickets."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from services.config import RunConfig, load
from services.console.run.redis_server import RedisServer
from services.protocol.messages import Ticket
from services.store import Store


def _put(path: Path, text: str) -> None:
    """Write a file atomically, as another of pytest-xdist's workers may be reading it."""
    if path.exists() and path.read_text() == text:
        return
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_text(text)
    fresh.replace(path)


def small_config(folder: Path, server: RedisServer | None = None, *overrides: str, prompts: int = 40) -> RunConfig:
    """Return a configuration of a run with the scripted engine: two-digit questions, `exact` verifier, eight groups per step."""
    (folder / "model").mkdir(parents=True, exist_ok=True)
    data, token, password, config = (folder / name for name in ("data.jsonl", "token", "password", "run.toml"))
    _put(data, "".join(json.dumps({"prompt": f"say {i}", "answer": str(i)}) + "\n" for i in range(prompts)))
    _put(token, "test-token")
    _put(password, server.password if server else "")
    _put(
        config,
        f"""
        [run]
        name = "small"
        steps = 4
        dir = "{folder}"
        [redis]
        url = "{server.url if server else ""}"
        password_file = "{password if server else ""}"
        [model]
        path = "{folder / "model"}"
        dtype = "float32"
        max_tokens = 64
        [data]
        sources = [{{ kind = "jsonl", path = "{data}" }}]
        max_prompt_tokens = 24
        chat_template = false
        [[verifiers]]
        kind = "exact"
        [sampling]
        group_size = 4
        max_tokens = 16
        [generator]
        engine = "tests.support.scripted:ScriptedEngine"
        max_num_seqs = 32  # at most 16 tickets of 4 completions at a time
        [admission]
        prompts_per_step = 8
        [trainer]
        row_tokens = 256
        [api]
        token_file = "{token}"
        [fleet]
        ttl_s = 3.0
        [samples]
        keep = 0  # most tests use no tracker
        """,
    )
    return load(config, overrides, environ={})


def ticket(seq: int, prompt: list[int] | None = None, **fields: Any) -> Ticket:
    """Return the ticket of row `seq` of epoch 0."""
    given = {
        "id": f"0-{seq}",
        "seq": seq,
        "epoch": 0,
        "index": seq,
        "source": "main",
        "seed": 1000 * seq,
        "answer": str(seq),
        "group_size": 4,
    }
    return Ticket(**{**given, "prompt": [5, 6, 7 + seq % 10] if prompt is None else prompt, **fields})


async def buried(store: Store) -> list[tuple[str, str]]:
    """Return the ticket and the reason of every dead letter, newest first."""
    return [(letter.ticket, letter.reason) for letter in await store.dead_letters.page()]


class PlainTokenizer:
    """A tokenizer whose text consists of the token ids."""

    def __len__(self) -> int:
        return 128

    def convert_tokens_to_ids(self, token: str) -> None:
        """Return None: it has no special tokens."""

    def batch_decode(self, sequences: list[list[int]], skip_special_tokens: bool) -> list[str]:
        return [" ".join(map(str, tokens)) for tokens in sequences]


def save_model_folder(folder: Path) -> None:
    """Save a two-layer model with random weights, and a tiny tokenizer, at the `model.path` of `small_config`."""
    import torch

    from examples.arithmetic.model import make_model, save_model

    save_tokenizer_folder(folder)
    torch.manual_seed(0)
    save_model(make_model(320, 64, layers=2), folder)


def save_tokenizer_folder(folder: Path) -> None:
    """Save a tiny tokenizer without a model."""
    from examples.arithmetic.tokenizer import save_tokenizer, train_tokenizer

    folder.mkdir(parents=True, exist_ok=True)
    save_tokenizer(train_tokenizer(f"say {i}" for i in range(100)), folder, 64)


async def wait_until(true: Callable[[], Any], limit_s: float = 60.0) -> None:
    """Wait until `true()` returns a true value, or an awaitable of one."""
    async with asyncio.timeout(limit_s):
        while True:
            value = true()
            if asyncio.iscoroutine(value):
                value = await value
            if value:
                return
            await asyncio.sleep(0.02)
