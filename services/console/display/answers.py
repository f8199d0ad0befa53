"""Shows the answers of `grpo inspect` and `grpo checkpoints`: fields by name, lists as tables, conversations as text.

Guarantees: untrusted text is made printable and is never treated as markup; a field without a value is left out.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any, TypeGuard, cast

import msgspec
from rich.console import Group as Stacked
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from services.console.display.text import cell, facts, table
from services.groups.histograms import separated
from services.operations.figures import NOTHING, duration
from services.operations.inspection.answer import Answer
from services.operations.inspection.completions import Completion, CompletionSegment
from services.operations.inspection.ledger import OUTCOMES, PLACES, AuditReport
from services.operations.inspection.parts import CompletionPart
from services.operations.inspection.text import Passage

ROUNDING = 1e-12  # smaller numbers are rounding errors and are shown as 0
EPOCH_S = 1e9  # more seconds than that, 31 years, are no duration but a time
SHOWN = 1024  # characters of a value, such as the body of a dead letter that cannot be decoded; --json shows all
ALWAYS = ("index", "reward", "advantage")  # figures of a completion that are shown even if they are 0
HIDDEN = ("stats", "note")  # metrics of a plan, of which there are dozens, and what is shown below a completion


def answer(found: Answer) -> RenderableType:
    """Return the fields of an answer that have a value, one a line, and below them its texts and its lists."""
    lines, below = list[tuple[str, Text]](), list[RenderableType]()
    for name, value in _fields(found):
        if isinstance(value, Passage):
            below += [Text(), *_passage(f"{name}, {_value(value.tokens)} tokens", value)]
        elif _are_answers(value):
            completions = [value for value in value if isinstance(value, Completion)]
            below += [line for each in completions for line in _completion(each)] or [Text(), Text(name, "bold"), _rows(value)]
        elif isinstance(value, dict) and all(isinstance(key, str) for key in cast("dict[Any, Any]", value)):
            below += [Text(), Text(name, "bold"), _mapping(cast("dict[str, Any]", value))]
        elif isinstance(value, Answer) and any(_are_answers(each) for _, each in _fields(value)):
            below += [Text(), answer(value)]
        else:
            lines.append((name, cell(_value(value))))
    return Stacked(facts(lines), *below)


def _fields(found: Answer) -> Iterator[tuple[str, Any]]:
    """Yield the fields that have a value, by their names in words."""
    for field in fields(found):  # type: ignore[arg-type]  # every answer is a dataclass
        value = _of(found, field.name)
        if value not in (None, "", [], {}) and field.name not in HIDDEN:
            yield field.name.replace("_", " "), value


def _of(found: Answer, name: str) -> Any:
    """Return the value of a field: for seconds since 1970, the time."""
    value: Any = getattr(found, name)
    if name.endswith("_s") and value is not None and value >= EPOCH_S:
        return datetime.datetime.fromtimestamp(value, datetime.UTC)
    return value


def _are_answers(value: object) -> TypeGuard[list[Answer]]:
    return isinstance(value, list) and bool(value) and isinstance(value[0], Answer)


def _rows(found: Sequence[Answer]) -> Table:
    """Return answers of one type as a table, without the columns in which all have the default or no value."""
    columns: dict[str, list[Any]] = {}
    for field in fields(found[0]):  # type: ignore[arg-type]
        values = [_of(each, field.name) for each in found]
        without = {None, "" if field.default is MISSING else field.default}
        if not all(isinstance(value, str | bool | None) and value in without for value in values):
            columns[field.name.replace("_", "\n")] = values
    numbers = [name for name, values in columns.items() if not any(isinstance(value, str | bool) for value in values)]
    drawn = table(*columns, right=numbers)
    for row in zip(*columns.values(), strict=True):
        drawn.add_row(*(cell(NOTHING if value is None else _value(value)) for value in row))
    return drawn


def _mapping(found: Mapping[str, Any]) -> Table:
    """Return names with their values; of a step's metrics, without the histograms."""
    return facts([(name, cell(_value(value))) for name, value in sorted(separated(found)[0].items())])


def _completion(found: Completion) -> Iterator[RenderableType]:
    """Show a completion with its tokens below: a conversation turn by turn, in segments if it has several."""
    yield Text()
    alone = found.segments[0] if len(found.segments) == 1 else None
    yield cell(f"completion {_words(found)}{f', {_versions(alone)}' if alone else ''}", "bold")
    for segment in found.segments:
        if not alone:
            yield cell(f"segment {_words(segment)}, {_versions(segment)}")
        if segment.context is not None:
            yield from _passage(f"context, {segment.context.tokens} tokens", segment.context)
        for part in segment.parts or []:
            yield from _part(part, len(segment.parts or []) == 1)
    for verifier, said in (found.note or {}).items():
        yield cell(f"{verifier}: {msgspec.json.encode(said).decode()}", "dim")


def _words(found: Completion | CompletionSegment) -> str:
    """Return the figures of a completion or a segment in one line."""
    shown = [(name, value) for name, value in _fields(found) if not (_are_answers(value) or isinstance(value, Passage))]
    named = [each for each in shown if each[0] not in ("oldest", "newest") and (each[1] or each[0] in ALWAYS)]
    return ", ".join(f"{name} {_value(value)}" for name, value in named)


def _versions(found: CompletionSegment) -> str:
    spans = ", ".join(f"{span.version} [{span.start}, {span.end})" for span in found.spans)
    return f"versions {spans or f'{_value(found.oldest)} to {_value(found.newest)}'}"


def _part(part: CompletionPart, alone: bool) -> Iterator[RenderableType]:
    """Show a message of the policy, or dimmed one that it read. If it is all of the segment, it needs no heading."""
    took = f" in {duration(part.sampled_s)}" if part.sampled_s is not None else ""
    waited = f", after {duration(part.waited_s)} in its environment" if part.waited_s is not None else ""
    who, style = ("policy", "") if part.sampled else ("environment", "dim")
    heading = "" if alone else f"{who}, {part.passage.tokens} tokens{took}{waited}"
    yield from _passage(heading, part.passage, style)


def _passage(heading: str, passage: Passage, style: str = "") -> Iterator[RenderableType]:
    if heading:
        yield cell(heading, style or "bold")
    yield cell(passage.text if passage.text is not None else passage.token_ids, style, keep_lines=True)


def _value(value: Any) -> str:
    """Return a value as text."""
    match value:
        case None:
            return NOTHING
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case float():
            return _number(value)
        case datetime.datetime():
            return value.astimezone().strftime("%Y-%m-%d %H:%M:%S")
        case Answer():
            return ", ".join(f"{name} {_value(each)}" for name, each in _fields(value))
        case dict():
            return ", ".join(f"{name} {_value(each)}" for name, each in cast("dict[Any, Any]", value).items())
        case list():
            return "; ".join(map(_value, cast("list[Any]", value)))
        case _:
            text = str(value)
            return text if len(text) <= SHOWN else f"{text[:SHOWN]}… {len(text):,} characters in total, see --json"


def _number(value: float) -> str:
    if abs(value) < ROUNDING:
        return "0"
    whole = value.is_integer() or 1e4 <= abs(value) < 1e12
    return f"{value:,.0f}" if whole else f"{value:.4g}"


def audit_table(report: AuditReport) -> RenderableType:
    """Return the places and outcomes of all tickets, and what is wrong."""
    rows = table("place", "groups", "meaning", right=("groups",), titles=False)
    rows.add_row("issued", f"{report.issued:,}", "")
    for name, count in report.places.items():
        rows.add_row(name, f"{count:,}", PLACES[name])
    for name, count in report.outcomes.items():
        rows.add_row(name, f"{count:,}", OUTCOMES.get(name, f"filtered: {name.partition(':')[2]}"))
    for name, count in (("lost", report.lost), ("doubled", report.doubled)):
        rows.add_row(name, Text(f"{count:,}", "bold red" if count else "green"), "")
    slots = Text(f"{report.slots_used:,}", "green" if report.slots_ok else "bold red")
    rows.add_row("slots", slots, f"used by {report.slots_expected:,} tickets in flight")
    for message in report.messages:
        rows.add_row(Text("fault", "bold red"), "", cell(message))
    return Stacked(cell(f"audit of run {report.run}"), rows)
