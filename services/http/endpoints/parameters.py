"""Parameters that several endpoints take."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query

from services.operations.waiting import LONGEST_WAIT_S

WaitS = Annotated[
    float,
    Query(
        ge=0,
        le=LONGEST_WAIT_S,
        description="Seconds to wait for completion; the response's `waiting_for` names those that have not complied yet.",
    ),
]
