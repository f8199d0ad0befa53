"""The contents of a run, as answers for people: for `grpo inspect`, which reads Redis directly, and for dataprep's endpoints.

Guarantees: inspecting changes nothing; a page has at most `MAX_PAGE` entries; anything missing raises `NotFound` with the reason.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

MAX_PAGE = 500


class Answer(BaseModel):
    """Base of all answers. Its fields are immutable, and their docstrings document the endpoints."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)
