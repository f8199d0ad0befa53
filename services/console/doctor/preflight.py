"""Everything about a run on this machine that can be checked in seconds before it starts: what `grpo run` and `grpo doctor`
check.

Guarantees: nothing is started or written; torch and vLLM are not imported here; all faults are found at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

from services.config import ConfigError, RunConfig
from services.config.load import Before
from services.config.loss_in_words import loss_in_words
from services.config.model_files import check_model
from services.config.places import KeyPlaces
from services.console.doctor import Finding, functions, gathered, note, of_configuration, placed, resources, secrets, told
from services.console.doctor.environments import environments
from services.console.doctor.model import model
from services.console.doctor.packages import packages, there
from services.console.doctor.rows import data, evaluation_data
from services.console.doctor.work import Work
from services.console.lock import holder
from services.runtime.process_tools import CONFIG_ENV

POLL_S = 0.1
Check = Callable[[RunConfig], list[Finding]]
CheckAgain = Callable[[RunConfig, RunConfig], list[Finding]]
"""Checks a run that has been started: its configuration now, and the one in its folder."""
LOSS = "loss"
"""What notes about the effective loss are about."""
Look = tuple[str, Callable[[], Iterable[Finding]]]


def preflight(
    config: RunConfig, gpus: Sequence[str], environ: Mapping[str, str], *, own: bool, remote: bool = False
) -> list[Finding]:
    """Return the findings.

    `own`: the run has its own Redis, and all its services are here. `remote`: also call services that are verifiers, which need
    not respond before a run begins. A pod has only what its service needs, so packages, data and resources of the whole run are
    not checked there.
    """
    pod, work = CONFIG_ENV in environ, Work()
    looks = [
        *([] if pod else [("packages", lambda: packages(config)), *_machine(config, gpus, own)]),
        ("secrets", lambda: secrets.secrets(config, environ, own)),
        (LOSS, lambda: (note(LOSS, sentence) for sentence in loss_in_words(config))),
    ]
    slow: list[Look] = [("functions", lambda: functions.functions(config))]
    if there("tokenizers") and there("jinja2"):
        looks += [("model", lambda: model(config))]
        if not pod:
            slow += [("data", lambda: data(config)), ("verifiers", lambda: functions.verifiers(config, work, remote))]
            slow += [("environments", lambda: environments(config, work))]
    with ThreadPoolExecutor(len(slow)) as pool:  # they wait for processes that they start
        waiting = [pool.submit(gathered, [look]) for look in slow]
        try:
            found = gathered(looks)
            for each in waiting:
                found += each.result()
        except KeyboardInterrupt:
            from services.dataprep.prompts.tools import give_up

            work.cancel()
            while wait(waiting, POLL_S).not_done:  # there may be several to give up
                give_up()
            raise
    return without_repeats(found)


def check_again(config: RunConfig, held: RunConfig, gpus: Sequence[str], environ: Mapping[str, str]) -> list[Finding]:
    """Return the findings about a run on this machine that has begun as `held`: what it needs besides its data and functions.

    Evaluation may change, in which case its rows are read.
    """

    def model_files() -> Iterable[Finding]:
        try:
            check_model(config)
        except ConfigError as error:
            yield told("model", error)

    looks: list[Look] = [
        ("packages", lambda: packages(config)),
        ("model", model_files),
        *_machine(config, gpus, own=True),
        ("secrets", lambda: secrets.secrets(config, environ, own=True)),
    ]
    if config.evaluation != held.evaluation and there("tokenizers") and there("jinja2"):
        looks.append(("data", lambda: evaluation_data(config)))
    return without_repeats(gathered(looks))


def _machine(config: RunConfig, gpus: Sequence[str], own: bool) -> list[Look]:
    """Return the machine's checks. Memory and ports are not checked while the run's own processes use them."""
    looks: list[Look] = [
        ("disk", lambda: resources.disk(config)),
        ("GPUs for this run", lambda: resources.fleet(config, gpus)),
    ]
    found = holder(Path(config.run.dir) / config.run.name)
    if found is not None and not found.readers:
        said = f"not checked, since run {config.run.name} is running and uses them"
        return [*looks, ("memory and ports", lambda: [note("memory and ports", said)])]
    return [
        *looks,
        ("memory", lambda: resources.memory(config, gpus)),
        ("ports", lambda: resources.ports(config, own)),
    ]


def faults_of(
    options: Callable[[Before], tuple[RunConfig, KeyPlaces]], check: Check, before: Before = lambda config: None
) -> tuple[tuple[RunConfig, KeyPlaces] | None, list[Finding]]:
    """Load a configuration and check it. Return it with where its keys are set, or None if it is not valid, and all findings."""
    try:
        loaded = options(before)
    except ConfigError as error:
        found = of_configuration(error)
        if error.rest is not None and error.places is not None:
            stood_in = {one.key for one in found}  # by defaults, whose faults are not the file's
            further = placed(check(error.rest), error.places)
            found += [one for one in further if not (one.state == "fault" and one.key in stood_in)]
        return None, found
    return loaded, placed(check(loaded[0]), loaded[1])


def without_repeats(found: Sequence[Finding]) -> list[Finding]:
    """Return the findings without faults that another states: the tokenizer's, and an environment's that cannot be asked for its
    tools, come up again when data is read.

    Notes on a model that cannot be downloaded, or is faulty otherwise, are left out, too.
    """
    seen, kept = set[str](), list[Finding]()
    faulty = any(one.state == "fault" and one.detail.startswith("model.path = ") for one in found)
    unusable = [
        f"environment {one.what.removeprefix('environment ')!r} cannot be "
        for one in found
        if one.state == "fault" and one.what.startswith("environment ")
    ]
    for one in found:
        again = one.detail in seen or ("source " in one.what and any(said in one.detail for said in unusable))
        if not (one.state == "fault" and again) and not (faulty and one.what == "model" and one.state == "note"):
            kept.append(one)
        seen.add(one.detail)
    return kept
