"""Checks of every function that a run names: curriculum, loss, engine and verifiers.

Verifiers are called on the first row of each prompt source, in the processes in which they score during a run.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator

from services.config import ConfigError, RunConfig
from services.config.loss import IMPORT_PATH
from services.config.verifiers import RemoteVerifier, VerifierConfig, named
from services.console.code import copied
from services.console.doctor import Finding, fault, note, ok, told
from services.console.doctor.packages import VERIFIERS, there
from services.console.doctor.work import Work

IMPORT_LIMIT_S = 120.0  # torch takes seconds on an idle machine
_IMPORT = "import importlib, sys; getattr(importlib.import_module(sys.argv[1]), sys.argv[2])"
REMOTE_GIVE_UP_S = 5.0  # for a service that does not answer


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
    began = time.monotonic()
    try:
        await scoring.start()
        if asks and not remote:
            return []
        scores = [(await scoring.score(offline.first_answer(source))).scores[name][0] for source in asked]
    except VerifierFailure as failure:
        return [fault(what, f"{given}: {failure}", "fix this error; to try it, use grpo score")]
    except ConfigError as error:
        return [note(what, f"not called, since a row cannot be read: {error}", "fix the data first")]
    finally:
        await scoring.close()
    shown = ", ".join(f"{score:g} (source {source.name})" for score, source in zip(scores, asked, strict=True))
    return [ok(what, f"gives the first row's own answer a score of {shown}, in {time.monotonic() - began:.2f} s")]
