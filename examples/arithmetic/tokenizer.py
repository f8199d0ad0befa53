"""The tokenizer of the tiny model: bytes, single digits, a few merges, a chat template.

Guarantees: decoding restores any text unchanged; the same text gives the same tokens through `tokenizers` and through
transformers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

PAD, END, SYSTEM, USER, ASSISTANT = "<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL = (PAD, END, SYSTEM, USER, ASSISTANT)
PAD_ID, END_ID = 0, 1  # special tokens are numbered first, in order
VOCABULARY = 320  # upper limit: 5 special tokens, 256 bytes and the merges, about twenty for this few texts
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def train_tokenizer(texts: Iterable[str], special: Sequence[str] = SPECIAL, vocabulary: int = VOCABULARY) -> Tokenizer:
    """Train byte-level BPE. Digits stay single, so the text between them (`Calculate `, ` - `, ` = `) becomes the merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # type: ignore[assignment]
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in special],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, longest: int, template: str = CHAT_TEMPLATE) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja for transformers. `longest` is in tokens."""
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": longest,
        "pad_token": PAD,
        "eos_token": END,
        "additional_special_tokens": [SYSTEM, USER, ASSISTANT],
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def render(question: str) -> str:
    """Return what `CHAT_TEMPLATE` makes of one user message, with the generation prompt."""
    return f"{USER}{question}{END}{ASSISTANT}"
