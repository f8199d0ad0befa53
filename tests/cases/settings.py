"""Cases of `settings.jsonl` that can be tried as inputs, by kind; procedures.py lists the others."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
from transformers import PreTrainedTokenizerFast

from services.chat.format import family_of
from services.chat.reply import completion_texts
from services.chat.templates import ChatTemplate
from services.config import ConfigError, load
from services.config.data import FileSource
from services.config.secrets import without_secrets
from services.groups.advantages import advantages
from services.groups.group_statistics import constant_kind
from services.protocol.messages import Header
from services.verifiers.base import Job
from services.verifiers.loaded import LoadedVerifier
from services.verifiers.pool import VerifierPool
from tests.environment.support.templates import FAMILIES, save_family
from tests.support.verifiers import verifier

SOURCE = FileSource(kind="jsonl", path="/unused")
FAR_BELOW_ONE = 0.1


def attempt(case: dict[str, Any], folder: Path, scratch: Path) -> tuple[Any, bool]:
    """Try a case as its kind is tried."""
    way = WAYS.get(case["kind"])
    return way(case, folder, scratch) if way else ("not tried: a procedure without a test", False)


def _clock(case: dict[str, Any], folder: Path, scratch: Path) -> tuple[Any, bool]:
    given = case["input"]
    save_family(FAMILIES[0], scratch)
    template = ChatTemplate(scratch, given.get("options", {}), (folder / given["template"]).read_text())
    found = [template.render(given["messages"]) for _ in range(2)]
    return found[0], found[0] == found[1] and (
        case["right"] in found[0] if case["right"].startswith("Today") else "Today is" in found[0]
    )


def _notation(case: dict[str, Any], folder: Path, scratch: Path) -> tuple[Any, bool]:
    try:
        found = family_of((folder / case["input"]["template"]).read_text())
    except ConfigError as error:
        return str(error), True
    return f"{found or 'no notation'} is assumed", not found


def _reasoning(case: dict[str, Any], folder: Path, scratch: Path) -> tuple[Any, bool]:
    given = case["input"]
    special = ("<think>", "</think>") if "tokenizer" in given else ()
    family = replace(FAMILIES[0], special=(*FAMILIES[0].special, *special))
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(save_family(family, scratch) / "tokenizer.json"))
    prompt = "Hi"
    if "template" in given:
        template = ChatTemplate(scratch, {}, (folder / given["template"]).read_text())
        prompt = template.render([{"role": "user", "content": "Hi"}])
    sampled = given.get("completion") or given["completion_tokens"]
    encoded = [tokenizer.encode(text, add_special_tokens=False) for text in (prompt, sampled)]
    texts = completion_texts(tokenizer, encoded[0], [encoded[1]])
    settings = {"pattern": given["pattern"]} if "pattern" in given else {}
    made = LoadedVerifier(verifier(given["verifier"], **settings), SOURCE)
    found = made.score(Job("main", texts, given["answer"], finish=[given.get("finish", "stop")]), asyncio.run).scores[0]
    return found, found == float(str(case["right"]).partition(",")[0])


def _rewards(case: dict[str, Any], folder: Path, scratch: Path) -> tuple[Any, bool]:
    given, right = case["input"], case["right"]
    if "filters" in given:
        kind = constant_kind(_header(given["rewards"]))
        return kind or "no group without differences", bool(kind)
    found = advantages(given["rewards"], given["advantage"])
    if "or far below" in right:
        return found.tolist(), bool((np.abs(found) < FAR_BELOW_ONE).all())
    return found.tolist(), bool(np.allclose(found, [float(number) for number in right.split(",")], atol=1e-3))


def _header(rewards: list[float]) -> Header:
    count = len(rewards)
    return Header(
        ticket="0-0", seq=0, epoch=0, index=0, payload="", payload_bytes=0, prompt_tokens=1, lengths=[1] * count, rewards=rewards,
        scores={}, truncated=[False] * count, oldest=[0] * count, newest=[0] * count, generator="g", generate_s=0.0, score_s=0.0,
        source="main", tool_tokens=[0] * count,
    )  # fmt: skip


def _slow(case: dict[str, Any], folder: Path, scratch: Path) -> tuple[Any, bool]:
    given = case["input"]

    async def scores() -> list[float]:
        pool = VerifierPool([("it", verifier(given["verifier"], timeout_s=2))], 1, [SOURCE])
        await pool.start()
        try:
            return (await pool.score(Job("main", given["completions"], given["answer"])))["it"].scores
        finally:
            await pool.close()

    found = asyncio.run(scores())
    return found, found == case["right"]


def _secrets(case: dict[str, Any], folder: Path, scratch: Path) -> tuple[Any, bool]:
    ((key, address),) = case["input"].items()
    password = unquote(re.sub(r"^[^:]*:", "", address.partition("://")[2].rpartition("@")[0]))
    parts = [part for part in re.split(r"[/?#\[\]@%]", password) if len(part) > 1]
    file = scratch / "run.toml"
    judged = f'url = "{address}"' if key == "verifiers.url" else 'url = "http://127.0.0.1/x"'
    redis = address if key == "redis.url" else ""
    file.write_text(
        f'redis.url = "{redis}"\nmodel = {{ path = "m", max_tokens = 64 }}\n'
        f'[data]\nsources = [{{ kind = "jsonl", path = "d.jsonl" }}]\n[[verifiers]]\nkind = "http"\n{judged}\n'
    )
    try:
        found = repr(without_secrets("", load(file, [], environ={}).model_dump(mode="json")))
        refused = False
    except ConfigError as error:
        found, refused = str(error), True
    shown = [part for part in parts if part in found]
    wanted = "refused" in case["right"] or "fault" in case["right"]
    return (found if refused else f"accepted; shown: {shown}"), refused == wanted and not shown and "\n" not in found.strip()


WAYS = {
    "clock in a chat template": _clock,
    "unknown notation of tool calls": _notation,
    "reasoning that the prompt opens": _reasoning,
    "special tokens in completions": _reasoning,
    "nearly equal rewards": _rewards,
    "one slow answer": _slow,
    "secrets in messages": _secrets,
}
"""Kind -> how it is tried."""
