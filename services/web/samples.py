"""Endpoints of the sample log (docs/samples.md): pages of completions, and one completion token by token.

Guarantees: a search runs on a thread, one at a time, and reads files only, so it slows neither the run nor other pages' frames.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Query, Request
from pydantic import BaseModel, ConfigDict

from services.http.endpoints import disconnected
from services.operations.inspection.text import TextReader
from services.runtime.service import Service

CUT = 300  # characters of a text in a page of completions
PAGE = 200
TOKENS = 8000  # of a completion that are sent one by one
NOT_INSTALLED = "the sample log needs pyarrow and duckdb: pip install 'grpo[dataprep]' where the page is served"
_LISTED = [
    *("group", "sample", "step", "outcome", "reason", "source", "completion", "reward", "advantage", "solved", "truncated"),
    *("length", "oldest", "newest", "payload", "incarnation"),
]


class SampleRows(BaseModel):
    """A page of completions."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    total: int
    """Completions that match."""
    of: int
    """Completions in the log."""
    missed_groups: dict[str, int]
    """Outcome -> groups that are missing from the log."""
    first_step: int
    """Step at which the log begins."""
    rows: list[dict[str, Any]]
    """The completions of the page; texts are cut after 300 characters."""


class SampledToken(BaseModel):
    """A token of a completion."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    text: str
    logprob: float | None
    """Logprob when it was sampled."""
    gap: float | None
    """Logprob in training minus that of the sampler; null if unknown."""


class WholeSample(BaseModel):
    """One completion."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    row: dict[str, Any]
    """All columns except `tokens`, `logprobs` and `gaps`."""
    tokens: list[SampledToken]
    """Its tokens; empty without a tokenizer."""
    note: str
    """Why tokens are missing; empty if none are."""


class LogReader:
    """The sample log in a folder, which is read by one search at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._once = folder, asyncio.Lock()
        self._search: Any = None

    async def find(self, request: Request, columns: Sequence[str] | None, *asked: Any) -> tuple[Any, Any]:
        """Return a page of completions (`Search.find`), with all columns if `columns` is None, and what the log does not have.
        Raise `HTTPException`. A search whose client disconnects ends, and does not start if it has not.
        """
        try:
            from services.operations.samples.columns import SCHEMA
            from services.operations.samples.folder import SAMPLES
            from services.operations.samples.search import ExpressionError, Search
        except ImportError:
            raise HTTPException(501, NOT_INSTALLED) from None
        gone = asyncio.create_task(disconnected(request))
        try:
            async with self._once:
                if gone.done():
                    raise HTTPException(503, "the client has disconnected")
                search = self._search = self._search or Search.of(self._folder / SAMPLES)
                gone.add_done_callback(lambda task: task.cancelled() or search.interrupt())
                found = await asyncio.to_thread(partial(search.find, *asked, columns or SCHEMA.names))
                return found, search.folder.status()
        except ExpressionError as error:
            raise HTTPException(422, str(error)) from None
        finally:
            gone.cancel()


def samples_router(service: Service) -> APIRouter:
    """Return the router of these endpoints."""
    router = APIRouter(prefix="/v1/console/samples", tags=["console"], dependencies=[service.app.state.reader])
    reader, log = TextReader(service.config.model.path), LogReader(service.folder)

    @router.get("")
    async def samples(
        request: Request,
        where: Annotated[str, Query(max_length=2000)] = "",
        sort: Annotated[str, Query(max_length=64)] = "",
        reverse: bool = False,
        offset: Annotated[int, Query(ge=0, le=2**31)] = 0,
        limit: Annotated[int, Query(ge=1, le=PAGE)] = 50,
    ) -> SampleRows:
        """Search the completions of the run, the newest first or sorted by a column."""
        found, status = await log.find(request, _LISTED, where, sort, reverse, offset, limit)
        rows = [row | {"completion": _cut(row["completion"]), "reason": _cut(row["reason"])} for row in found.rows]
        return SampleRows(total=found.total, of=found.of, missed_groups=status.missed, first_step=status.first_step, rows=rows)

    @router.get("/one")
    async def sample(
        request: Request,
        payload: Annotated[str, Query(pattern=r"^[0-9.r-]{1,64}$")],
        step: Annotated[int, Query(ge=0, le=2**31)],
        outcome: Annotated[str, Query(pattern=r"^[a-z]{1,16}$")],
        sample: Annotated[int | None, Query(ge=0, le=2**31)] = None,
        incarnation: Annotated[int | None, Query(ge=0, le=2**53)] = None,
    ) -> WholeSample:
        """Return one completion with its tokens: of an incarnation of the run, or of the last one that has it."""
        which = "sample IS NULL" if sample is None else f"sample = {sample}"
        life = "" if incarnation is None else f" AND incarnation = {incarnation}"
        where = f"payload = '{payload}' AND step = {step} AND outcome = '{outcome}' AND {which}{life} AND (undone OR NOT undone)"
        found, _ = await log.find(request, None, where, "", False, 0, 1)
        if not found.rows:
            raise HTTPException(404, "this completion is not in the sample log: it may have been deleted to keep samples.keep")
        [row] = found.rows
        tokens: list[int] = row.pop("tokens") or []
        logprobs: list[float] = row.pop("logprobs") or []
        gaps: list[float | None] = row.pop("gaps") or [None] * len(tokens)
        pieces = await asyncio.to_thread(pieces_of, reader, tokens[:TOKENS])
        given = [
            SampledToken(text=text, logprob=_finite(logprob), gap=_finite(gap))
            for text, logprob, gap in zip(pieces, logprobs, gaps, strict=False)
        ]
        return WholeSample(row=row, tokens=given, note=_note(reader, len(tokens), bool(pieces)))

    return router


def _note(reader: TextReader, tokens: int, readable: bool) -> str:
    """Return why tokens of a completion are missing from its page; empty: none are."""
    if not tokens:
        return "its tokens have been deleted"
    if not readable:
        return reader.why_not
    return f"Only the first {TOKENS:,} of {tokens:,} tokens are shown." if tokens > TOKENS else ""


def _cut(text: str | None) -> str | None:
    return text if text is None or len(text) <= CUT else f"{text[:CUT]}…"


def _finite(value: float | None) -> float | None:
    return value if value is not None and abs(value) < float("inf") else None


def pieces_of(reader: TextReader, tokens: Sequence[int]) -> list[str]:
    """Return the text that each token adds. A character made of several tokens belongs to the last one, as does the rest of one
    that is cut off.
    """
    pieces, before, done = list[str](), 0, 0
    for at in range(len(tokens)):
        known, text = reader.text(tokens[before:done]), reader.text(tokens[before : at + 1])
        if known is None or text is None:
            return []
        last = at == len(tokens) - 1
        if len(text) > len(known) and (last or not text.endswith("\ufffd")):
            pieces.append(text[len(known) :])
            before, done = done, at + 1
        else:
            pieces.append("")
    return pieces
