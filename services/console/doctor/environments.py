"""Checks of environments: each is loaded as a run's worker loads it, its server is asked for its tools, and it runs a rollout.

The rollout is of the first row of a source, and the policy replies with the row's answer: once, or to every call of an
environment that drives itself. A second rollout of a class is scored without a reply, as if its first one had been cut off.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from services.config import ConfigError, RunConfig
from services.config.environments import AgentEnvironment, EnvironmentConfig, McpEnvironment, drives_itself
from services.console.code import copied
from services.console.doctor import Finding, fault, note, ok, told
from services.console.doctor.work import Work

if TYPE_CHECKING:
    from services.environment.programs.process import ProgramProcess
    from services.verifiers.base import Job

NAME = "doctor"  # of the rollout
CUT_OFF = "doctor-cut-off"  # of the rollout that is scored without a turn
TRIAL_LIMIT_S = 60.0
OWN_FOLDER = "the program starts in a folder of its own, so its paths must be absolute"


def environments(config: RunConfig, work: Work) -> Iterator[Finding]:
    """Load every environment of the configuration, from a copy of its file as a run makes it. `work` can be cancelled."""
    only = config.model_copy(update={"verifiers": []})
    if not config.environments:
        return
    yield from _notation(config)
    try:
        with copied(only) as tried:
            yield from work.run(_loaded(config, tried))
    except ConfigError as error:  # a file of code that is not there
        yield told("environments", error)


def _notation(config: RunConfig) -> Iterator[Finding]:
    """Find a chat template that shows tools in a notation that is not known: no call of them would be found."""
    from services.chat.errors import DataError
    from services.chat.format import PARSERS, ChatFormat
    from services.chat.templates import TOOL_FORMAT_KEY
    from services.chat.tokenizers import tokenizer_folder

    try:
        known = ChatFormat(tokenizer_folder(config.model.path), config.data).notation_known
    except (DataError, ConfigError) as error:
        if TOOL_FORMAT_KEY in str(error):
            yield told("tool calls", error)
        return  # the model's checks report what else is wrong
    if not known:
        detail = "the notation of tool calls does not show in the chat template: calls in another one than hermes are not found"
        yield note("tool calls", detail, f"set {TOOL_FORMAT_KEY} to one of {', '.join(PARSERS)}")


async def _loaded(config: RunConfig, tried: RunConfig) -> list[Finding]:
    pairs = zip(config.environments, tried.environments, strict=True)
    return await asyncio.gather(*(_tried(config, index, *pair) for index, pair in enumerate(pairs)))


async def _tried(config: RunConfig, index: int, given: EnvironmentConfig, tried: EnvironmentConfig) -> Finding:
    from services.console.offline import Offline
    from services.environment.programs.pool import ProgramPool
    from services.environment.programs.process import ProgramFailed, ProgramUnusable, check_reward

    what = f"environment {given.name}"
    named = f"environments.{index}.{_named(given)}"
    pool, began = ProgramPool(tried.model_copy(update={"processes": 1})), time.monotonic()
    source = next(source for source in config.all_sources if source.environment == given.name)
    try:
        await pool.start()
        job = Offline(config).first_answer(source)
        async with pool.process() as process, asyncio.timeout(TRIAL_LIMIT_S):
            done = await (_driven if drives_itself(given) else _rollout)(config, tried, process, job)
        check_reward(done.scores, done.truncated, source.name, config)
    except TimeoutError:
        return note(what, f"a rollout with the first row took longer than {TRIAL_LIMIT_S:g} s: not tried to its end")
    except Unprepared as error:
        return fault(what, f"{named}: {error}", "set whatever score() reads in start()")
    except (ProgramUnusable, ProgramFailed) as error:
        return fault(what, f"{named}: {error}", _remedy(tried))
    except ConfigError as error:
        return note(what, f"not started, since a row cannot be read: {error}", "fix the data first")
    finally:
        await pool.close()
    if given.solved_at is not None and done.scores is None and not done.truncated:
        why = f"with environments.{index}.solved_at = {given.solved_at:g}, it does not count as solved"
        return note(what, f"{done.what} and gave no score: {why}", "give one, or remove solved_at")
    if done.truncated and done.scores is None and not drives_itself(given) and not config.verified(source.name):
        return note(what, f"{done.what} and gave no reward yet", "it must give one by its end, or a verifier must")
    without = "left the reward to verifiers" if config.verified(source.name) else "gave no reward"
    scored = f"scored {done.scores['score']:.3g}" if done.scores else without
    return ok(what, f"{done.what} and {scored}, in {time.monotonic() - began:.2f} s")


class Unprepared(Exception):
    """A rollout cannot be scored if its first reply is cut off."""


class Tried(NamedTuple):
    """A rollout that was tried."""

    what: str  # was done
    scores: dict[str, float] | None
    truncated: bool = False
    """Whether it was ended early, so that it need not have a reward."""


async def _driven(config: RunConfig, tried: EnvironmentConfig, process: ProgramProcess, job: Job) -> Tried:
    """Let an environment drive itself. Raises `ProgramFailed`."""
    from services.environment.rehearsal import rehearse

    done = await rehearse(config, tried, process, job)
    asked = f"asked the policy {'once' if done.turns == 1 else f'{done.turns} times'} with the first row"
    return Tried(asked + ", reached a limit" * done.truncated, done.scores, done.truncated)


async def _rollout(config: RunConfig, tried: EnvironmentConfig, process: ProgramProcess, job: Job) -> Tried:
    """Have an environment reply to the policy once, and score that. Raises `ProgramFailed` and `Unprepared`."""
    from services.environment.programs.process import row_for

    began = await process.do(NAME, "start", row_for(job.row, job.answer))
    replied = await process.do(NAME, "turn", {"role": "assistant", "content": job.completions[0]})
    scored = await process.do(NAME, "score")
    process.drop(NAME)
    await _cut_off(process, job)
    names = ", ".join(tool["function"]["name"] for tool in began.value["tools"]) or "none"
    goes_on = replied.value["messages"] is not None
    what = f"started with the first row, tools: {names}; {'replied to' if goes_on else 'ended with'} its answer"
    return Tried(what, scored.value, truncated=goes_on)


async def _cut_off(process: ProgramProcess, job: Job) -> None:
    """Have an environment score a rollout to which it never replied. Raises `ProgramFailed` and `Unprepared`."""
    from services.environment.programs.process import ProgramFailed, row_for

    await process.do(CUT_OFF, "start", row_for(job.row, job.answer))
    try:
        await process.do(CUT_OFF, "score")
    except ProgramFailed as error:
        why = "a rollout whose first reply is cut off at sampling.max_tokens is scored without turn()"
        raise Unprepared(f"{why}, and this fails: {error}") from None


def _remedy(environment: EnvironmentConfig) -> str:
    remedy = "fix this error"
    if drives_itself(environment):
        remedy += (
            "; the policy replied in plain text, with the row's answer and without a tool call, as models sometimes do: if the "
            "error is about that, return a low reward instead of raising"
        )
    command = environment.command if isinstance(environment, AgentEnvironment | McpEnvironment) else []
    meant = [str(path.resolve()) for path in map(Path, command[1:]) if not path.is_absolute() and path.is_file()]
    if meant:
        return f"{OWN_FOLDER}: write {', '.join(meant)}"
    return f"{remedy} ({OWN_FOLDER})" if command else remedy


def _named(environment: EnvironmentConfig) -> str:
    """Return the key that names the program, and its value."""
    if environment.kind == "mcp":
        return f"server = {environment.server!r}"
    if environment.kind == "verifiers":
        return f"name = {environment.name!r}"
    if environment.kind == "agent":
        return f"run = {environment.run!r}"
    return f"function = {environment.function!r}" if environment.function else f"tools = {environment.tools!r}"
