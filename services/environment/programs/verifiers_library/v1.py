"""Environments of the v1 API: a task set, played by one agent, as in versions 0.3 and 0.4 of verifiers.

Guarantees: an episode that the library does not call a success is a failure; files that rollouts leave are in this process' own
folder; with the agent's program on this machine, a rollout needs no network. The library's agents run in Prime's sandboxes unless
told otherwise: here the default is a process of this machine, and a program without tools of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import itertools
import os
import re
import secrets
import sys
import tomllib
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

from services.environment.programs.frames import ProgramSetup
from services.environment.programs.loaded import BadReply
from services.runtime.own_code import Unusable

SCRIPT = re.compile(r"^# /// script\n((?:#.*\n)+?)# ///$", re.MULTILINE)  # PEP 723


class TasksetEnvironment:
    """An environment whose module exports a `Taskset`."""

    def __init__(self, setup: ProgramSetup) -> None:
        self._vf: Any = importlib.import_module("verifiers.v1")
        self._environment: Any = self._vf.load_environment(_configuration(setup))
        self._tasks: list[Any] = []
        self._further: Any = None
        self._serving = contextlib.AsyncExitStack()

    async def open(self) -> None:
        """Start the servers that rollouts share."""
        _run_scripts_here()
        await self._serving.enter_async_context(self._environment.serving())
        # Without a shared proxy each rollout has its own: a shared one keeps a client for every key that it has seen.
        self._environment._interception = None

    async def close(self) -> None:
        """End them."""
        await self._serving.aclose()

    @property
    def endless(self) -> bool:
        """Return whether the task set yields tasks without end."""
        return bool(self._environment.taskset.INFINITE)

    def row(self, index: int, evaluation: bool) -> Any:
        """Return a task; `evaluation` changes nothing, since an environment has one task set."""
        if self._further is None:
            self._further = iter(self._environment.taskset)
        self._tasks += itertools.islice(self._further, max(0, index + 1 - len(self._tasks)))
        return self._tasks[index] if index < len(self._tasks) else None

    def described(self, row: Any) -> dict[str, Any]:
        """Return the prompt and the answer of a task."""
        data, prompt = row.data, cast("str | list[Any] | None", row.data.prompt)
        if prompt is None:
            raise BadReply("it has a task without a prompt, in which the user speaks first: this is not supported")
        system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
        if isinstance(prompt, str):
            messages = [*system, {"role": "user", "content": prompt}]
        else:
            messages = [*system, *(each.model_dump(exclude_none=True) for each in prompt)]
        digest = hashlib.sha256(data.model_dump_json().encode()).hexdigest()[:32]
        return {"prompt": messages, "answer": str(getattr(data, "answer", None) or ""), "digest": digest}

    async def run(self, row: Any, given: Any) -> dict[str, Any] | None:
        """Run an episode of a task."""
        variable = f"ROLLOUT_API_KEY_{secrets.token_hex(8)}"  # the library passes on no variable of such a name
        os.environ[variable] = given["key"]
        try:
            client = self._vf.EvalClientConfig(base_url=given["url"], api_key_var=variable)
            episode = await self._environment.run_episode(row, self._vf.ModelContext(model="policy", client=client))
        finally:
            del os.environ[variable]
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            why = "; ".join(f"{error.type}: {error.message}" for error in errors) or "it gives no reason"
            raise RuntimeError(f"the library could not run the rollout: {why}")
        if len(episode.traces) != 1:
            raise RuntimeError(
                f"the environment ran its agent {len(episode.traces)} times, each with a reward: only one is supported"
            )
        [trace] = episode.traces
        if not trace.rewards:
            return None
        parts = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
        metrics = {name: value for name, value in trace.metrics.items() if value is not None}
        return {**metrics, **parts, "score": trace.reward}


def _configuration(setup: ProgramSetup) -> Any:
    """Return the environment's configuration, with the required values where options do not set them. Raises `Unusable`."""
    vf: Any = importlib.import_module("verifiers.v1")
    given = {**setup.options, "taskset": {**_table(setup.options, "taskset"), "id": setup.environment}}
    try:
        roles = {name: value for name, value in vf.resolve_env_config(given) if isinstance(value, vf.AgentConfig)}
        if len(roles) != 1:
            names = ", ".join(roles) or "none"
            raise Unusable(
                f"environment = {setup.environment!r} has several agents ({names}), but only one is supported: choose another"
            )
        [(name, role)] = roles.items()
        agent = _table(setup.options, name)
        if "runtime" not in agent and role.runtime.type == "prime":
            agent["runtime"] = {"type": "subprocess"}
        if role.harness is None and vf.default_agent_harness(setup.environment).id == "bash":
            agent["harness"] = {"id": "null"}  # does not run code that the policy writes
        agent["max_turns"] = min(role.max_turns or setup.max_turns, setup.max_turns)
        return vf.resolve_env_config({**given, name: agent})
    except ValueError as error:  # of pydantic
        raise Unusable(f"options = {setup.options!r}: {_one_line(error)}") from None
    except (TypeError, AttributeError) as error:  # not a task set
        raise Unusable(f"environment = {setup.environment!r} is not an environment of verifiers: {error}") from None


def _table(options: dict[str, Any], name: str) -> dict[str, Any]:
    table = options.get(name)
    return dict(cast("dict[str, Any]", table)) if isinstance(table, dict) else {}


def _one_line(error: ValueError) -> str:
    listed: Any = getattr(error, "errors", None)
    if listed is None:
        return " ".join(str(error).split())
    return "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in listed())


def _run_scripts_here() -> None:
    """Make the programs of agents run in this Python, if it has what they declare, and in this process' folder.

    The library would have `uv` make an environment for each of them, from a package index, whenever a process starts.
    """
    runtime: Any = importlib.import_module("verifiers.v1.runtimes.subprocess")
    runtime.CACHE_DIR = Path.cwd() / "verifiers"
    left_to_uv = runtime.SubprocessRuntime.prepare_uv_script

    async def prepare_uv_script(self: Any, script: str | bytes, *given: Any, **named: Any) -> list[str]:
        text = script.decode() if isinstance(script, bytes) else script
        if not _declares_only_what_is_here(text):
            return await left_to_uv(self, script, *given, **named)
        place = runtime.CACHE_DIR / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.py"
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text)
        return [sys.executable, str(place)]

    runtime.SubprocessRuntime.prepare_uv_script = prepare_uv_script


@cache
def _declares_only_what_is_here(script: str) -> bool:
    """Return whether this Python has every library that a script declares, in a version that it allows."""
    requirement: Any = importlib.import_module("packaging.requirements").Requirement
    declared = SCRIPT.search(script)
    if declared is None:
        return False
    text = "".join(f"{line.removeprefix('#').removeprefix(' ')}\n" for line in declared[1].splitlines())
    for needed in map(requirement, tomllib.loads(text).get("dependencies", [])):
        try:
            if not needed.specifier.contains(version(needed.name), prereleases=True):
                return False
        except PackageNotFoundError:
            return False
    return True
