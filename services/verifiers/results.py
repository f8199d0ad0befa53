"""Reads the results of custom verifiers, and checks every score before it is used.

Guarantees: a result that is accepted is one finite number per completion, within the verifier's range, with parts and notes of
bounded size; anything else raises `BadResult` with the reason. Nothing that is not a score becomes one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

import msgspec

from services.verifiers.base import Scores
from services.verifiers.numeric import MOST_PARTS, MOST_SCORE, PART, number_of, tried

NOTE_BYTES = 16 * 1024
"""Maximum size in bytes of the JSON that a verifier may attach to a completion: notes are stored with its tokens."""
SHOWN_CHARACTERS = 200  # of a faulty value, in a message


class BadResult(ValueError):
    """A verifier returned something that cannot be a score. The message says what."""


class Verdict(msgspec.Struct, array_like=True):
    """One verifier's results for a group of n completions. One with an error has nothing else."""

    scores: list[float]  # [n]
    parts: dict[str, list[float]] = {}  # part -> [n]
    notes: list[str] = []  # [n] JSON, or empty
    error: str = ""


def read_results(results: Any, count: int) -> Verdict:
    """Read `count` numbers, or mappings with the key `score`; numbers that all mappings have are parts. Raises `BadResult`."""
    if isinstance(results, str | bytes | Mapping) or not hasattr(results, "__iter__"):
        raise BadResult(f"returned {shown(cast('object', results))}: return a list of {count} scores")
    if isinstance(results, set | frozenset):
        raise BadResult(f"returned a set, whose order is not that of the completions: return a list of {count} scores")
    listed = list(results)
    if len(listed) != count:
        raise BadResult(f"returned {len(listed)} results for {count} completions: return one for each")
    scores, others = zip(*map(_read_result, listed), strict=True) if listed else ((), ())
    if not any(others):
        return Verdict(list(scores))
    names = set[str].intersection(*(_numbers(other) for other in others))
    if len(names) > MOST_PARTS:
        raise BadResult(
            f"returned {len(names)} numbers in addition to the score, more than {MOST_PARTS}: return fewer, or put them in a list"
        )
    parts = {name: [float(other[name]) for other in others] for name in sorted(names)}
    return Verdict(list(scores), parts, [_note(other) for other in others])


def fault_of(verdict: Verdict, count: int, bounds: tuple[float, float] | None) -> str:
    """Return why a verdict cannot be used, or "" if it is whole and its scores are within `bounds`. It is not trusted."""
    if len(verdict.scores) != count or any(len(column) != count for column in verdict.parts.values()):
        return f"returned {len(verdict.scores)} scores for {count} completions"
    if len(verdict.notes) not in (0, count) or not all(map(_is_note, verdict.notes)):
        return f"attached {len(verdict.notes)} notes, or one that is not JSON of at most {NOTE_BYTES} bytes"
    low, high = bounds or (-MOST_SCORE, MOST_SCORE)
    for score in verdict.scores:
        if not math.isfinite(score):
            return f"score {score} is not a finite number"
        if not low <= score <= high:
            return f"score {score:g} is outside its range [{low:g}, {high:g}]"
    for part, column in verdict.parts.items():
        if PART.fullmatch(part) is None or not all(map(math.isfinite, column)):
            return f"part {part[:40]!r} of the score is not named by letters, digits, _ and -, or is not finite"
    return ""


def gathered(verdicts: Mapping[str, Verdict], count: int) -> Scores:
    """Return the scores of several verifiers for a group of `count` completions."""
    scores = {name: verdict.scores for name, verdict in verdicts.items()}
    for name, verdict in verdicts.items():
        scores |= {f"{name}.{part}": column for part, column in verdict.parts.items()}
    said = {name: verdict.notes for name, verdict in verdicts.items() if verdict.notes}
    notes = [
        msgspec.json.encode({name: msgspec.Raw(notes[i].encode()) for name, notes in said.items() if notes[i]}).decode()
        for i in range(count if said else 0)
    ]
    return Scores(scores, notes)


def shown(value: object) -> str:
    """Return a value for a message, shortened, with its type."""
    text, raised = tried(lambda: repr(value))
    text = text if text is not None else f"a value whose repr raises {type(raised).__name__}"
    return f"{text[:SHOWN_CHARACTERS]}{'…' * (len(text) > SHOWN_CHARACTERS)} ({type(value).__name__})"


def _is_note(note: str) -> bool:
    try:
        return len(note) <= NOTE_BYTES and (not note or msgspec.json.decode(note) is not None)
    except (ValueError, RecursionError):
        return False


def _read_result(result: Any) -> tuple[float, dict[str, Any]]:
    """Return the score, and the rest of a mapping."""
    if not isinstance(result, Mapping):
        return _number(result), {}
    rest = {str(key): value for key, value in cast("Mapping[Any, Any]", result).items()}
    if "score" not in rest:
        raise BadResult(f"returned a mapping without the key 'score': {shown(rest)}")
    return _number(rest.pop("score")), rest


def _number(value: Any) -> float:
    number = None if isinstance(value, str | bytes) or value is None else tried(lambda: float(value))[0]
    if number is None:
        raise BadResult(f"returned {shown(value)}: return a number, or a mapping with 'score'")
    return number


def _numbers(rest: Mapping[str, Any]) -> set[str]:
    """Return the names of the finite numbers."""
    return {name for name, value in rest.items() if _is_finite(value) and PART.fullmatch(name) is not None}


def _is_finite(value: Any) -> bool:
    number = number_of(value)
    return number is not None and math.isfinite(number)


def _as_json(value: Any) -> Any:
    """Return what JSON has for a value that it does not know."""
    number = number_of(value)
    return str(value) if number is None else number


def _note(rest: Mapping[str, Any]) -> str:
    """Return the JSON of the values besides the score, or "" if there are none."""
    if not rest:
        return ""
    note, raised = tried(lambda: msgspec.json.encode(rest, enc_hook=_as_json))
    if note is None:
        raise BadResult(f"what was returned in addition to the score is not JSON: {type(raised).__name__}: {raised}")
    if len(note) > NOTE_BYTES:
        raise BadResult(f"returned {len(note)} bytes in addition to the score, more than {NOTE_BYTES}: return less")
    return note.decode("utf-8", "replace")
