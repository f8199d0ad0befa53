"""What a completion replies: the text after its reasoning, for all verifiers."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from services.chat.reply import MARKS, completion_texts, reply_of
from services.config.data import FileSource
from services.verifiers.base import Job, Overtime
from services.verifiers.loaded import BUILTIN, LoadedVerifier
from tests.environment.support.templates import FAMILIES, save_family
from tests.support.verifiers import verifier

SOURCE = FileSource(kind="jsonl", path="/unused")


def test_the_reply_follows_the_last_mark() -> None:
    wrong: list[str] = []
    for begin, end in MARKS:
        for text, reply in (
            ("4", "4"),
            (f"{begin}2 and 2{end}\n4", "\n4"),
            (f"2 and 2{end}4", "4"),
            (f"{begin}2 and 2", ""),
            (f"It is 3.{begin}No", ""),
            (f"{begin}a{end}b{begin}c{end}d", "d"),
            (f"{begin}a{end}b{begin}c", ""),
            (f"{begin}a{end}", ""),
            ("", ""),
        ):
            if reply_of(text) != reply:
                wrong.append(f"{text!r}: {reply_of(text)!r}, not {reply!r}")
    assert wrong == []


def test_marks_are_kept_and_other_special_tokens_are_not(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    family = replace(FAMILIES[0], special=(*FAMILIES[0].special, "<think>", "</think>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(save_family(family, tmp_path) / "tokenizer.json"))

    def texts(prompt: str, *sampled: str) -> list[str]:
        encoded = [tokenizer.encode(text, add_special_tokens=False) for text in (prompt, *sampled)]
        return completion_texts(tokenizer, encoded[0], encoded[1:])

    assert texts("<|im_start|>user", "<think>a</think>b<|im_end|>", "c<|im_end|>") == ["<think>a</think>b", "c"]
    assert texts("<|im_start|>assistant\n<think>\n", "a</think>b", "a") == ["<think>a</think>b", "<think>a"]
    assert texts("say <think> and go on", "a") == ["a"]


@pytest.mark.parametrize("kind", ["math", "exact"])
def test_verifiers_that_compare_with_the_answer_read_the_reply(kind: str) -> None:
    made = LoadedVerifier(verifier(kind), SOURCE)
    texts = ["<think>3</think>4", "<think>4</think>3", "<think>4", "4"]
    assert made.score(Job("main", texts, "4"), asyncio.run).scores == [1.0, 0.0, 0.0, 1.0]


class Slow:
    """A verifier that takes forever for some completions."""

    scores_overtime = True

    def __init__(self, config: object, source: object) -> None:
        """Ignore its settings."""

    def score(self, reply: str, answer: str) -> float:
        """Return 1.0, or 0.0 once the time is over."""
        try:
            while reply == "slow":
                pass
        except Overtime:
            return 0.0
        return 1.0


class Stuck(Slow):
    """A verifier that never returns to Python."""

    def score(self, reply: str, answer: str) -> float:
        """Return 1.0 after an hour."""
        return float(sum(range(10**12)) > 0)


def test_a_completion_that_takes_too_long_scores_zero_and_the_others_keep_their_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BUILTIN, "math", f"{__name__}:Slow")
    made = LoadedVerifier(verifier("math", timeout_s=0.1), SOURCE)
    assert made.score(Job("main", ["fast", "slow", "fast"], ""), asyncio.run).scores == [1.0, 0.0, 1.0]


def test_a_call_that_never_returns_to_python_ends_its_process() -> None:
    code = f"""
import asyncio
from services.verifiers import loaded
from {__name__} import SOURCE, Job, verifier
loaded.OVERTIME_S = 0.1
loaded.BUILTIN["math"] = "{__name__}:Stuck"
loaded.LoadedVerifier(verifier("math", timeout_s=0.1), SOURCE).score(Job("main", [""], ""), asyncio.run)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, timeout=60)
    assert done.returncode == -signal.SIGPROF, done.stderr.decode()
