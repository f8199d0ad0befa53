"""Checks of what a run is made of besides its model: every row of its data, and every function that it names.

Verifiers are called on the first row of each prompt source, in the processes in which they score during a run.
"""

from __future__ import annotations

import asyncio
import importlib.util
import subprocess
import sys
import time
from collections.abc import Iterator

from services.config import ConfigError, RunConfig
from services.config.data import Source
from services.config.loss import IMPORT_PATH
from services.config.verifiers import RemoteVerifier, VerifierConfig, named
from services.console.doctor import Finding, fault, note, ok, told
from services.console.errors import EXIT_CONFIG, ConsoleError
from services.console.local.code import copied

EXTRAS = {"math": ("math_verify", "generator"), "reasoning_gym": ("reasoning_gym", "generator"), "judge": ("jinja2", "generator")}
"""Kind of verifier -> the package that it needs, and the extra of ours that has it."""
IMPORT_LIMIT_S = 120.0  # torch takes seconds on an idle machine
_IMPORT = "import importlib, sys; getattr(importlib.import_module(sys.argv[1]), sys.argv[2])"
REMOTE_GIVE_UP_S = 5.0  # for a service that does not answer


def check_inputs(config: RunConfig) -> None:
    """Refuse a run whose data or functions cannot be used; services need not answer yet. Raises `ConsoleError`."""
    found = [*data(config), *functions(config), *verifiers(config, remote=False)]
    faults = [f"{one.what}: {one.detail}: {one.remedy}" for one in found if one.state == "fault"]
    if faults:
        raise ConsoleError("; ".join(faults), EXIT_CONFIG)


def data(config: RunConfig) -> Iterator[Finding]:
    """Read and tokenise every row of every prompt source."""
    for kind, sources in (("data", config.data.sources), ("evaluation", config.evaluation.sources)):
        for source in sources:
            yield _source(f"{kind} source {source.name}", source, config)


def _source(what: str, source: Source, config: RunConfig) -> Finding:
    if source.kind == "reasoning_gym" and importlib.util.find_spec("reasoning_gym") is None:
        return fault(what, f"task {source.task} needs the package reasoning-gym", "run pip install 'grpo[dataprep]'")
    from services.dataprep.prompts.catalogue import PromptSource

    try:
        read = PromptSource(config, [source])
    except ConfigError as error:
        return told(what, error)
    return ok(what, f"{len(read)} rows, the longest prompt has {read.longest} tokens")


def functions(config: RunConfig) -> Iterator[Finding]:
    """Import the curriculum, the loss and the engine of one's own that the run names, as its services will."""
    named = {"data.curriculum": config.data.curriculum, "generator.engine": config.generator.engine}
    if IMPORT_PATH.fullmatch(config.loss.policy):
        named["loss.policy"] = config.loss.policy
    for key, name in named.items():
        if ":" in name:
            yield _imported(key, name)


def _imported(key: str, name: str) -> Finding:
    """Import in a process of its own: it may take seconds, or crash."""
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
    return fault(key, f"{key} = {name!r}: {said}", "fix the name or its module, or start in the folder that has it")


def verifiers(config: RunConfig, remote: bool = True) -> Iterator[Finding]:
    """Call the verifiers on the first row of each prompt source. `remote`: the services too."""
    missing = False
    for kind in sorted({verifier.kind for verifier in config.verifiers} & EXTRAS.keys()):
        package, extra = EXTRAS[kind]
        if importlib.util.find_spec(package) is None:
            missing = True
            yield fault(f"verifier {kind}", f"needs the package {package}", f"run pip install 'grpo[{extra}]'")
    if not missing:
        try:
            with copied(config) as tried:
                yield from asyncio.run(_called(tried, remote))
        except ConfigError as error:
            yield told("verifiers", error)


async def _called(config: RunConfig, remote: bool) -> list[Finding]:
    """Return a finding for each verifier."""
    found: list[Finding] = []
    for name, verifier in named(config.verifiers):
        if remote or not isinstance(verifier, RemoteVerifier):
            found += await _call(config, name, verifier)
    return found


async def _call(config: RunConfig, name: str, verifier: VerifierConfig) -> list[Finding]:
    from services.console.offline import Offline
    from services.verifiers.base import VerifierFailure
    from services.verifiers.scoring import Scoring

    if isinstance(verifier, RemoteVerifier):
        verifier = verifier.model_copy(update={"give_up_s": REMOTE_GIVE_UP_S})
    what, sources = f"verifier {name}", [*config.data.sources, *config.evaluation.sources]
    asked = [source for source in sources if verifier.scores(source.name)]
    only = config.model_copy(update={"verifiers": [verifier.model_copy(update={"name": name})]})
    scoring, offline = Scoring(only, sources, workers=1), Offline(only)
    began = time.monotonic()
    try:
        await scoring.start()
        scores = [(await scoring.score(offline.first_answer(source))).scores[name][0] for source in asked]
    except VerifierFailure as failure:
        return [fault(what, str(failure), "fix what the message names")]
    except ConfigError as error:
        return [note(what, f"not called, since a row cannot be read: {error}", "fix the data first")]
    finally:
        await scoring.close()
    shown = ", ".join(f"{score:g} for {source.name}" for score, source in zip(scores, asked, strict=True))
    return [ok(what, f"scores the first row's own answer {shown}, in {time.monotonic() - began:.2f} s")]
