"""Kind `verifiers`: an environment of the library verifiers by its name: a task set of the v1 API, played by one agent.

Guarantees: a rollout uses the row that its ticket was made from; an episode that the library does not call a success is a
failure, never a reward; files that rollouts leave are in this process' own folder; with the agent's program on this machine, a
rollout needs no network. The library's agents run in Prime's sandboxes unless told otherwise: here the default is a process of
this machine, and a program without tools of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib
import importlib.util
import itertools
import os
import pkgutil
import re
import secrets
import sys
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

from services.environment.programs.frames import ProgramSetup
from services.environment.programs.kind import LIBRARIES, Kind
from services.environment.programs.loaded import BadReply, scores_of
from services.runtime.own_code import Unusable
from services.verifiers.numeric import MOST_PARTS

TASK_SETS = ("verifiers", "v1", "tasksets")  # package of the task sets that come with the library
AGAIN = "write the rows again with grpo rows"
SCRIPT = re.compile(r"^# /// script\n((?:#.*\n)+?)# ///$", re.MULTILINE)  # PEP 723


class LibraryEnvironment(Kind):
    """One environment of the library."""

    def __init__(self, setup: ProgramSetup) -> None:
        super().__init__(setup)
        _import(setup.environment)
        self._vf: Any = importlib.import_module("verifiers.v1")
        self._environment: Any = self._vf.load_environment(_configuration(setup))
        self._tasks: list[Any] = []
        self._further: Any = None
        self._serving = contextlib.AsyncExitStack()
        self._reading = asyncio.Lock()  # tasks are read one after another, in a thread

    async def open(self) -> None:
        """Start the servers that rollouts share."""
        _run_scripts_here()
        await self._serving.enter_async_context(self._environment.serving())
        # Without a shared proxy each rollout has its own: a shared one keeps a client for every key that it has seen.
        self._environment._interception = None

    async def close(self) -> None:
        """End them."""
        await self._serving.aclose()

    async def rows(self, start: int, count: int, evaluation: bool, limited: bool) -> list[dict[str, Any]]:
        """Return rows of its data: `prompt`, `answer`, and the columns by which `run` finds the task again.

        `evaluation` changes nothing, since an environment has one task set.
        """
        if self._environment.taskset.INFINITE and not limited:
            raise BadReply("it generates rows endlessly: give --limit")
        found: list[dict[str, Any]] = []
        for index in range(start, start + count):
            task = await self._task(index)
            if task is None:
                break
            found.append({**_described(task), "row": index, "evaluation": evaluation})
        return found

    async def run(self, given: Any) -> dict[str, float] | None:
        """Run an episode of the task that the ticket's data row names."""
        index, digest = given["row"].get("row"), given["row"].get("digest")
        if not isinstance(index, int) or not isinstance(digest, str):
            raise BadReply(f"the data row lacks the columns `row` and `digest`: {AGAIN}")
        task = await self._task(index)
        if task is None or _described(task)["digest"] != digest:
            why = "is not what it was" if task is not None else "does not exist"
            raise BadReply(f"row {index} of the environment's data {why}: {AGAIN}, and leave its options as they are")
        found = await self._episode(task, given)
        return scores_of(found and _with_valid_parts(found))

    async def _task(self, index: int) -> Any:
        """Return a task, or None if the task set has fewer."""
        async with self._reading:
            return await asyncio.to_thread(self._read_task, index)

    def _read_task(self, index: int) -> Any:
        if self._further is None:
            self._further = iter(self._environment.taskset)
        self._tasks += itertools.islice(self._further, max(0, index + 1 - len(self._tasks)))
        return self._tasks[index] if index < len(self._tasks) else None

    async def _episode(self, task: Any, given: Any) -> dict[str, Any] | None:
        """Run an episode with access to the policy; return its reward as `score` and its parts. Raises whatever fails."""
        variable = f"ROLLOUT_API_KEY_{secrets.token_hex(8)}"  # the library passes on no variable of such a name
        os.environ[variable] = given["key"]
        try:
            client = self._vf.EvalClientConfig(base_url=given["url"], api_key_var=variable)
            episode = await self._environment.run_episode(task, self._vf.ModelContext(model="policy", client=client))
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


def _described(task: Any) -> dict[str, Any]:
    """Return the prompt and the answer of a task, and `digest`, by which it is recognised."""
    data, prompt = task.data, cast("str | list[Any] | None", task.data.prompt)
    if prompt is None:
        raise BadReply("it has a task without a prompt, in which the user speaks first: this is not supported")
    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    if isinstance(prompt, str):
        messages = [*system, {"role": "user", "content": prompt}]
    else:
        messages = [*system, *(each.model_dump(exclude_none=True) for each in prompt)]
    digest = hashlib.sha256(data.model_dump_json().encode()).hexdigest()[:32]
    return {"prompt": messages, "answer": str(getattr(data, "answer", None) or ""), "digest": digest}


def _with_valid_parts(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return a reward with as many parts as may be. The library names them after functions, such as `<lambda>`."""
    parts = {re.sub(r"[^A-Za-z0-9_-]", "_", name)[:40]: value for name, value in found.items() if name != "score"}
    return {**dict(itertools.islice(parts.items(), MOST_PARTS)), "score": found["score"]}


def _import(name: str) -> None:
    """Import the module of an environment, found by its name as the library finds it. Raises `Unusable`."""
    python, has, install = Path(sys.executable), version("verifiers"), LIBRARIES["verifiers"][1]
    if has.startswith(("0.0.", "0.1.", "0.2.", "0.3.")):
        raise Unusable(f"{python} has verifiers {has}, which is too old: run {python} -m pip install '{install}'")
    place = _place(name.replace("-", "_"))
    if not place:
        raise Unusable(
            f"name = {name!r}: {python} has no module {name.replace('-', '_')!r}: correct the name, or install the environment's "
            f"package with {python} -m pip install"
        )
    try:
        module = importlib.import_module(place)
    except (ImportError, AttributeError) as error:
        raise Unusable(f"name = {name!r} cannot be imported: {error}") from None
    if hasattr(module, "load_environment") and not hasattr(module, "__all__"):
        raise Unusable(f"name = {name!r} has load_environment of the library's classic API: only its v1 API is supported")


def _place(name: str) -> str:
    """Return the module of an environment, or an empty string; a task set of the library's comes before a module of that name."""
    library = importlib.util.find_spec(TASK_SETS[0])
    folders = [str(Path(each, *TASK_SETS[1:])) for each in (library.submodule_search_locations if library else None) or ()]
    if name.lower() in {each.name for each in pkgutil.iter_modules(folders)}:
        return ".".join((*TASK_SETS, name.lower()))
    return next((each for each in (name, name.lower()) if importlib.util.find_spec(each)), "")


def _configuration(setup: ProgramSetup) -> Any:
    """Return the environment's configuration, with the required values where options do not set them. Raises `Unusable`."""
    vf: Any = importlib.import_module("verifiers.v1")
    given = {**setup.options, "taskset": {**_table(setup.options, "taskset"), "id": setup.environment}}
    try:
        roles = {name: value for name, value in vf.resolve_env_config(given) if isinstance(value, vf.AgentConfig)}
        if len(roles) != 1:
            names = ", ".join(roles) or "none"
            raise Unusable(
                f"name = {setup.environment!r} has several agents ({names}), but only one is supported: choose another"
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
        raise Unusable(f"name = {setup.environment!r} is not an environment of verifiers: {error}") from None


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
