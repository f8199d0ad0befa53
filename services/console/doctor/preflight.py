"""Everything about a run on this machine that can be told before it starts, in seconds: what `grpo run` and `grpo doctor` check.

Guarantees: nothing is started or written; torch and vLLM are not imported here; all faults are found at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from services.config import ConfigError, RunConfig
from services.config.load import Before
from services.config.model_files import check_model
from services.config.reading.places import KeyPlaces
from services.console.doctor import Finding, functions, gathered, of_configuration, placed, resources, secrets, told
from services.console.doctor.environments import environments
from services.console.doctor.model import model
from services.console.doctor.packages import packages, there
from services.console.doctor.rows import data
from services.runtime.tracing import check_tracing
from services.runtime.tracking import check_tracking

Check = Callable[[RunConfig], list[Finding]]
Look = tuple[str, Callable[[], Iterable[Finding]]]


def preflight(
    config: RunConfig, gpus: Sequence[str], environ: Mapping[str, str], *, own: bool, remote: bool = False
) -> list[Finding]:
    """Return the findings. `own`: the run has its own Redis, and all its services are here. `remote`: also call services that are
    verifiers, which need not answer before a run begins."""
    looks: list[Look] = [
        ("packages", lambda: packages(config)),
        ("disk", lambda: resources.disk(config)),
        ("memory", lambda: resources.memory(config, gpus)),
        ("GPUs for this run", lambda: resources.fleet(config, gpus)),
        ("ports", lambda: resources.ports(config, own)),
        ("secrets", lambda: secrets.secrets(config, environ, own)),
    ]
    slow: list[Look] = [("functions", lambda: functions.functions(config))]
    if there("tokenizers") and there("jinja2"):
        looks += [("model", lambda: model(config))]
        slow += [("data", lambda: data(config)), ("verifiers", lambda: functions.verifiers(config, remote))]
        slow += [("environments", lambda: environments(config))]
    with ThreadPoolExecutor(len(slow)) as pool:  # they wait for processes that they start
        waiting = [pool.submit(gathered, [look]) for look in slow]
        found = gathered(looks)
        for each in waiting:
            found += each.result()
    return without_repeats(found)


def check_again(config: RunConfig) -> list[Finding]:
    """Return the findings about a run that has begun: what it needs besides the data and functions that it began with."""

    def model_files() -> Iterable[Finding]:
        check_model(config)
        return ()

    def trackers() -> Iterable[Finding]:
        check_tracking(config, os.environ)
        check_tracing(config)
        return ()

    found = list[Finding]()
    for what, look in (("model", model_files), ("secrets", trackers)):
        try:
            found += look()
        except ConfigError as error:
            found.append(told(what, error))
    return found


def faults_of(
    options: Callable[[Before], tuple[RunConfig, KeyPlaces]], check: Check, before: Before = lambda config: None
) -> tuple[tuple[RunConfig, KeyPlaces] | None, list[Finding]]:
    """Load a configuration and check it. Return it with where its keys are set, or None if it is not valid, and all findings."""
    try:
        loaded = options(before)
    except ConfigError as error:
        found = of_configuration(error)
        if error.rest is not None and error.places is not None:
            stood_in = {one.key for one in found}  # by defaults, whose faults are none of the file's
            further = placed(check(error.rest), error.places)
            found += [one for one in further if not (one.state == "fault" and one.key in stood_in)]
        return None, found
    return loaded, placed(check(loaded[0]), loaded[1])


def without_repeats(found: Sequence[Finding]) -> list[Finding]:
    """Return the findings without faults whose text another had: the tokenizer's come up again where data is read.

    Notes on a model that cannot be downloaded, or is faulty otherwise, are left out, too.
    """
    seen, kept = set[str](), list[Finding]()
    faulty = any(one.state == "fault" and one.detail.startswith("model.path = ") for one in found)
    for one in found:
        if not (one.state == "fault" and one.detail in seen) and not (faulty and one.what == "model" and one.state == "note"):
            kept.append(one)
        seen.add(one.detail)
    return kept
