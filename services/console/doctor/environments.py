"""Checks of environments: each is loaded as a run's worker loads it, its server is asked for its tools, and one that replies to
the policy has a rollout with the first row of a source, whose only turn is the row's answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from services.config import ConfigError, RunConfig
from services.config.environments import EnvironmentConfig, code_of, drives_itself, environment_file
from services.console.doctor import Finding, fault, note, ok, told
from services.console.local.code import copied

if TYPE_CHECKING:
    from services.environment.programs.process import ProgramProcess
    from services.verifiers.base import Job

NAME = "doctor"  # of the rollout
TRIAL_LIMIT_S = 60.0


def environments(config: RunConfig) -> Iterator[Finding]:
    """Load every environment of the configuration, from a copy of its file as a run makes it."""
    only = config.model_copy(update={"verifiers": []})
    if not config.environments:
        return
    try:
        with copied(only) as tried:
            yield from asyncio.run(_loaded(config, tried))
    except ConfigError as error:  # a file of code that is not there
        index, environment = next(
            (index, each) for index, each in enumerate(config.environments) if (environment_file(each) or "-") in str(error)
        )
        yield told("environments", ConfigError(f"environments.{index}.function = {code_of(environment)!r}: {error}"))


async def _loaded(config: RunConfig, tried: RunConfig) -> list[Finding]:
    pairs = zip(config.environments, tried.environments, strict=True)
    return await asyncio.gather(*(_tried(tried, index, *pair) for index, pair in enumerate(pairs)))


async def _tried(config: RunConfig, index: int, given: EnvironmentConfig, tried: EnvironmentConfig) -> Finding:
    from services.console.offline import Offline
    from services.environment.programs.pool import ProgramPool
    from services.environment.programs.process import ProgramFailed, ProgramUnusable

    what = f"environment {given.name}"
    named = f"environments.{index}.{_named(given)}"
    pool, began = ProgramPool(tried.model_copy(update={"processes": 1})), time.monotonic()
    try:
        await pool.start()
        if drives_itself(given):
            return ok(what, f"loaded in {time.monotonic() - began:.2f} s")
        source = next(source for source in config.data.sources if source.environment == given.name)
        job = Offline(config).first_answer(source)
        async with pool.process() as process, asyncio.timeout(TRIAL_LIMIT_S):
            tools, then, scores = await _rollout(process, job)
    except TimeoutError:
        return note(what, f"a rollout with the first row took longer than {TRIAL_LIMIT_S:g} s: not tried to its end")
    except (ProgramUnusable, ProgramFailed) as error:
        return fault(what, f"{named}: {error}", "fix this error")
    except ConfigError as error:
        return note(what, f"not started, since a row cannot be read: {error}", "fix the data first")
    finally:
        await pool.close()
    names = ", ".join(tool["function"]["name"] for tool in tools) or "none"
    scored = f"scored {scores['score']:.3g}" if scores else "gave no score"
    told = f"started with the first row, tools: {names}; {then} its answer and {scored}, in {time.monotonic() - began:.2f} s"
    return ok(what, told)


async def _rollout(process: ProgramProcess, job: Job) -> tuple[list[dict[str, Any]], str, dict[str, float] | None]:
    """Return the tools, what the environment did on the policy's only turn, and its scores. Raises `ProgramFailed`."""
    from services.environment.programs.rows import row_for

    began = await process.do(NAME, "start", row_for(job.row, job.answer))
    replied = await process.do(NAME, "turn", {"role": "assistant", "content": job.completions[0]})
    scored = await process.do(NAME, "score")
    return began.value["tools"], "ended with" if replied.value["messages"] is None else "replied to", scored.value


def _named(environment: EnvironmentConfig) -> str:
    """Return the key that names the program, and its value."""
    if environment.kind == "mcp":
        return f"url = {environment.url!r}" if environment.url else f"command = {environment.command!r}"
    if environment.kind == "verifiers":
        return f"environment = {environment.id!r}"
    if environment.function:
        return f"function = {environment.function!r}"
    return f"command = {environment.command!r}" if environment.kind == "agent" else f"tools = {environment.tools!r}"
