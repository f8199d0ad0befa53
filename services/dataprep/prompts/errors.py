"""The error for prompts that cannot be used."""

from __future__ import annotations

from services.chat.errors import DataError

__all__ = ["DataError"]
