"""What a run has in it, as answers for people: of `grpo inspect`, which reads Redis itself, and of dataprep's endpoints.

Guarantees: looking changes nothing; a page has `MAX_PAGE` entries at most; what is not there raises `NotFound`, which says why.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

MAX_PAGE = 500


class Answer(BaseModel):
    """What every answer shares: fixed values, whose docstrings document the endpoints."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)
