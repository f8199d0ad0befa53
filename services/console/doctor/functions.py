"""Checks of every function that a run names: curriculum, loss, engine and verifiers.

Verifiers are called in the processes in which they score during a run: those that compare with the row's answer on the rows of
each prompt source, as many as `ROWS_S` allows, the others on the first row.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from services.config import ConfigError, RunConfig
from services.config.loss import IMPORT_PATH
from services.config.verifiers import RemoteVerifier, VerifierConfig, named
from services.console.code import copied
from services.console.doctor import Finding, fault, note, ok, told
from services.console.doctor.packages import VERIFIERS, there
from services.console.doctor.work import Work

if TYPE_CHECKING:
    from services.config.data import Source
    from services.console.offline import Offline
    from services.verifiers.scoring import Scoring

IMPORT_LIMIT_S = 120.0  # torch takes seconds on an idle machine
ANSWER_CHARACTERS = 40
_IMPORT = "import importlib, sys; getattr(importlib.import_module(sys.argv[1]), sys.argv[2])"
REMOTE_GIVE_UP_S = 5.0  # for a service that does not answer
ROWS_S = 10.0  # for the rows of one source
COMPARING = ("math", "exact", "reasoning_gym")
"""Verifiers for which a row's own answer is right."""
SHOWN = 3  # rows that are named
MOST_FAULTS = 20  # rows after which no further ones are tried: each may end a worker


def functions(config: RunConfig) -> Iterator[Finding]:
    """Import the custom curriculum, loss and engine that the run names, as its services will."""
    named = {"data.curriculum": config.data.curriculum_function, "generator.engine": config.generator.engine}
    if IMPORT_PATH.fullmatch(config.loss.policy):
        named["loss.policy"] = config.loss.policy
    for key, name in named.items():
        if ":" in name:
            yield _imported(key, name)


def _imported(key: str, name: str) -> Finding:
    """Import in a separate process: it may take seconds, or crash."""
    module, _, attribute = name.partition(":")
    try:
        done = subprocess.run(
            [sys.executable, "-c", _IMPORT, module, attribute],
            capture_output=True,
            text=True,
            timeout=IMPORT_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return fault(key, f"{key} = {name!r}: importing {module} takes longer than {IMPORT_LIMIT_S:g} s", "fix the module")
    if done.returncode == 0:
        return ok(key, name)
    said = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    return fault(key, f"{key} = {name!r}: {said}", "fix the name or its module, or start grpo in the folder that contains it")


def verifiers(config: RunConfig, work: Work, remote: bool = True) -> Iterator[Finding]:
    """Call the verifiers on the first row of each prompt source.

    `work` can be cancelled. `remote`: also call services; otherwise only their keys are checked.
    """
    try:
        with copied(config.model_copy(update={"environments": []})) as tried:
            yield from work.run(_called(config, tried, remote))
    except ConfigError as error:  # a file of code that is not there
        yield told("verifiers", error)


async def _called(config: RunConfig, tried: RunConfig, remote: bool) -> list[Finding]:
    """Return a finding for each verifier whose package is there."""
    found = [
        _call(tried, index, name, _given(index, config.verifiers[index]), remote)
        for index, (name, verifier) in enumerate(named(tried.verifiers))
        if there(VERIFIERS.get(verifier.kind, "msgspec"))
    ]
    return [finding for each in await asyncio.gather(*found) for finding in each]


def _given(index: int, verifier: VerifierConfig) -> str:
    """Return the key that says most about a verifier, with its value."""
    key = next((key for key in ("function", "url", "pattern") if hasattr(verifier, key)), "kind")
    return f"verifiers.{index}.{key} = {getattr(verifier, key)!r}"


async def _call(config: RunConfig, index: int, name: str, verifier: str, remote: bool) -> list[Finding]:
    from services.console.offline import Offline
    from services.verifiers.base import VerifierFailure
    from services.verifiers.scoring import Scoring

    given, tried = verifier, config.verifiers[index]
    asks = isinstance(tried, RemoteVerifier)
    what, sources = f"verifier {name}", config.all_sources
    asked = [source for source in sources if tried.scores(source.name)]
    only = config.model_copy(update={"verifiers": [tried.model_copy(update={"name": name})]})
    scoring, offline = Scoring(only, sources, workers=1, give_up_s=REMOTE_GIVE_UP_S), Offline(only)
    began, scores, found = time.monotonic(), list[str](), list[Finding]()
    try:
        await scoring.start()
        if asks and not remote:
            return []
        for source in asked:
            if tried.kind in COMPARING:
                rows = await _own_answers(scoring, offline, name, source, getattr(tried, "extract", ""))
                found += rows.findings(what, given, source.name)
                scores.append(f"the own answers of {rows.right} of {rows.tried} rows are right (source {source.name})")
            else:
                score = (await scoring.score(offline.first_answer(source))).scores[name][0]
                scores.append(f"the first row's own answer scores {score:g} (source {source.name})")
    except VerifierFailure as failure:
        return [fault(what, f"{given}: {failure}", "fix this error; to try it, use grpo score")]
    except ConfigError as error:
        return [note(what, f"not called, since a row cannot be read: {error}", "fix the data first")]
    finally:
        await scoring.close()
    if any(one.state == "fault" for one in found):
        return found
    return [ok(what, f"{', '.join(scores)}, in {time.monotonic() - began:.2f} s"), *found]


@dataclass
class OwnAnswers:
    """Scores of rows' own answers."""

    tried: int = 0
    right: int = 0
    wrong: list[str] = field(default_factory=list[str])
    """Rows whose own answer is not right, each with its score."""
    failed: list[str] = field(default_factory=list[str])
    """Rows that cannot be scored, each with the reason."""

    def findings(self, what: str, given: str, source: str) -> Iterator[Finding]:
        """Yield what is wrong with the rows of a source."""
        for line in self.failed[:SHOWN]:
            yield fault(what, f"{given}: {line}", "fix the row's answer, or remove the row")
        if self.wrong:
            how_many = f"{len(self.wrong)} of {self.tried} rows of source {source}"
            detail = f"{given}: the own answer of {how_many} is not right: {'; '.join(self.wrong[:SHOWN])}"
            state = fault if len(self.wrong) == self.tried else note
            yield state(what, detail, "compare answer_field, answer_pattern and the verifier with these rows")


async def _own_answers(scoring: Scoring, offline: Offline, name: str, source: Source, extract: str) -> OwnAnswers:
    """Score rows with their own answers, up to `ROWS_S`; what `extract` can find counts for the text around it."""
    from services.verifiers.base import VerifierFailure

    found, until = OwnAnswers(), time.monotonic() + ROWS_S
    group = group_of(extract)
    for where, job in offline.own_answers(source):
        if (found.tried and time.monotonic() > until) or len(found.failed) == MOST_FAULTS:
            break
        found.tried += 1
        answer = job.completions[0]
        if extract:
            score = float(not group or re.fullmatch(group, answer.strip()) is not None)
        else:
            try:
                score = (await scoring.score(job)).scores[name][0]
            except VerifierFailure as failure:
                found.failed.append(f"{where}: {failure}")
                continue
        found.right += score > 0
        found.wrong += [f"{where} scores {score:g} for {answer[:ANSWER_CHARACTERS]!r}"] * (score <= 0)
    return found


def group_of(pattern: str) -> str:
    """Return what the first group of a regular expression captures, as one of its own; "" where it needs the rest."""
    flags, begin, depth = re.match(r"\(\?[a-zA-Z]+\)", pattern), 0, 0
    for token in re.finditer(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\((?:\?P<\w+>|\?)?|\)", pattern):
        if token[0].startswith("(") and (depth or token[0] != "(?"):  # the first group, and whatever is inside of it
            begin, depth = begin or token.end(), depth + 1
        elif token[0] == ")" and depth:
            depth -= 1
            if not depth:
                part = f"{flags[0] if flags else ''}{pattern[begin : token.start()]}"
                with contextlib.suppress(re.error):
                    return re.compile(part).pattern
                break
    return ""
