"""What a model replied: the part of its text that follows its reasoning. Pure.

Guarantees: text that is cut off within the reasoning has no reply, whether the model or the prompt opened the reasoning; the
marks are found also where a tokenizer treats them as special tokens, which are otherwise left out of completions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

MARKS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("◁think▷", "◁/think▷"),
)
"""What begins and ends the reasoning, of each family of models."""

OPENING_TOKENS = 16
"""Tokens at the end of a prompt that hold such a mark and the white space after it."""


def split_reply(text: str) -> tuple[str, str]:
    """Return the reasoning of a completion, and its reply: what follows the last mark that ends reasoning; nothing after one that
    begins it."""
    place, length, ends = max((text.rfind(mark), len(mark), ends) for pair in MARKS for ends, mark in enumerate(pair))
    if place < 0:
        return "", text
    return (text[:place], text[place + length :]) if ends else (text, "")


def reply_of(text: str) -> str:
    """Return the reply of a completion."""
    return split_reply(text)[1]


def opening_of(prompt: str) -> str:
    """Return the mark that a prompt ends with, so that the model does not sample it; empty without one."""
    prompt = prompt.rstrip()
    return next((begin for begin, _ in MARKS if prompt.endswith(begin)), "")


def completion_texts(tokenizer: Any, prompt: Sequence[int], completions: Sequence[Sequence[int]]) -> list[str]:
    """Return the texts of sampled tokens, without special tokens but with the marks of reasoning. `tokenizer` is transformers'.

    A text begins with the mark that the prompt ends with.
    """
    opening = opening_of(tokenizer.batch_decode([prompt[-OPENING_TOKENS:]], skip_special_tokens=False)[0])
    special = _special_marks(tokenizer)
    if not special:
        return [opening + text for text in tokenizer.batch_decode(completions, skip_special_tokens=True)]
    texts: list[str] = []
    for tokens in completions:
        cuts = [i for i, token in enumerate(tokens) if token in special]
        parts = [tokens[begin + 1 : end] for begin, end in zip([-1, *cuts], [*cuts, len(tokens)], strict=True)]
        marks = ["", *(special[tokens[i]] for i in cuts)]
        decoded = tokenizer.batch_decode(parts, skip_special_tokens=True)
        texts.append(opening + "".join(mark + part for mark, part in zip(marks, decoded, strict=True)))
    return texts


@lru_cache(maxsize=4)
def _special_marks(tokenizer: Any) -> dict[int, str]:
    """Return the marks that a tokenizer leaves out of texts as special tokens, by their ids."""
    marks = [mark for pair in MARKS for mark in pair]
    ids = [(mark, tokenizer.convert_tokens_to_ids(mark)) for mark in marks]
    known = [(mark, number) for mark, number in ids if isinstance(number, int)]
    if not known:
        return {}
    texts = tokenizer.batch_decode([[number] for _, number in known], skip_special_tokens=False)
    bare = tokenizer.batch_decode([[number] for _, number in known], skip_special_tokens=True)
    return {
        number: mark
        for (mark, number), text, rest in zip(known, texts, bare, strict=True)
        if text.strip() == mark and not rest.strip()
    }
