"""The programs of a worker process, by the kind of its environment.

Guarantees: a library that a kind needs is imported only for it; one that is missing is named with the command that installs it.

Run as `python -m services.environment.programs.kinds` with an environment's configuration as JSON on standard input, it prints
the tools that the environment offers in all of its rollouts, so that its groups' prompts can have them: a JSON object with
`tools`, or with `error`. This is a separate process, since the code is not ours. Tools that an object of the class sets for its
row are not among them: the environment pod puts those into the rollout's own context.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from services.chat.messages import normalised_tools
from services.environment.programs.cluster_sandbox import ClusterSandboxes, SandboxTool, connected, on_cluster
from services.environment.programs.code_tool import CodeTool
from services.environment.programs.command import run_command
from services.environment.programs.frames import ProgramSetup, setup_of
from services.environment.programs.kind import LIBRARIES, Kind, policy_client
from services.environment.programs.loaded import BadReply, LoadedProgram, scores_of
from services.environment.programs.tools import CODE, ToolSet, lists_code, methods_of
from services.runtime.own_code import Unusable, imported, reason_of

METHODS = {"start": ["row"], "turn": ["message"], "score": [], "close": [], "snapshot": [], "restore": ["state"]}
"""Methods of a class -> their arguments. Each is optional, but a class needs at least one."""
WAIT_SHARE = 0.25
"""Part of `timeout_s` for which a call of code may wait: for its rollout's sandbox, or for a processor."""


class Conversing(Kind):
    """Kinds `python` and `mcp`: an object replies to the policy, or tools alone do."""

    def __init__(self, setup: ProgramSetup) -> None:
        super().__init__(setup)
        self._class: Any = imported(setup.function) if setup.function else None
        if self._class is not None and not inspect.isclass(self._class):
            raise Unusable(f"function = {setup.function!r} is not a class but {type(self._class).__name__}")
        if self._class is not None:
            _check_methods(self._class)
        if setup.options and self._class is None:
            raise Unusable("options have no effect without function: remove them")
        self._server: list[dict[str, Any]] = []
        self._session: Any = None
        self._sandboxes: ClusterSandboxes | None = None

    async def open(self) -> None:
        """List the tools of the server, and try the tool that runs code."""
        if self._setup.kind == "mcp":
            from services.environment.programs.mcp_tools import McpSession, listed

            self._session = McpSession(self._setup)
            self._server = await listed(self._session)
            if not self._setup.shared:
                await self._session.close()
                self._session = None
        if self._runs_code(self._class) and not on_cluster():
            await self._try_code()

    async def close(self) -> None:
        """End the session with the server, and the connections."""
        if self._session is not None:
            await self._session.close()
        if self._sandboxes is not None:
            await self._sandboxes.close()

    def shared_tools(self) -> list[dict[str, Any]]:
        """Return the descriptions of the tools that all rollouts have, in the order in which rollouts list them."""
        code = [self._code("").described] if self._runs_code(self._class) else []
        return [*_class_tools(self._class), *self._server, *code]

    def program(self, rollout: str) -> LoadedProgram:
        """Return the program of a rollout."""
        made = self._class(**self._setup.options) if self._class else None
        sets: list[ToolSet] = []
        if self._server:
            from services.environment.programs.mcp_tools import McpToolSet

            sets.append(McpToolSet(self._server, self._setup, self._session))
        if self._runs_code(made):
            sets.append(self._code(rollout))
        return LoadedProgram(made, sets, self._setup.timeout_s)

    async def _try_code(self) -> None:
        """Run code once. Raises `Unusable` if this machine cannot confine it."""
        trial = self._code("trial")
        said = await trial.call({"code": "1 + 1"})
        await trial.close()
        if said != "2":
            raise Unusable(f"the tool python cannot run code: {said}")

    def _runs_code(self, program: Any) -> bool:
        listed = getattr(program, "tools", ())
        return CODE in self._setup.tools or (isinstance(listed, list | tuple) and lists_code(program, cast("list[Any]", listed)))

    def _code(self, rollout: str) -> CodeTool | SandboxTool:
        setup, wait_limit_s = self._setup, WAIT_SHARE * self._setup.timeout_s
        if not on_cluster():
            return CodeTool(rollout, setup.tool_limit_s, wait_limit_s)
        if self._sandboxes is None:
            self._sandboxes = connected()
        return SandboxTool(setup.tool_limit_s, self._sandboxes, wait_limit_s)


class Agent(Kind):
    """Kind `agent`: a function, or a command."""

    def __init__(self, setup: ProgramSetup) -> None:
        super().__init__(setup)
        self._function: Any = imported(setup.function) if setup.function else None
        if setup.function and not callable(self._function):
            raise Unusable(f"run = {setup.function!r} is not a function")
        if inspect.isfunction(self._function):
            _check_call(self._function, "client, row", 2, setup.options)
        if setup.command and shutil.which(setup.command[0]) is None:
            raise Unusable(f"run = {setup.command!r}: there is no program {setup.command[0]!r}; install it, or give its path")

    async def run(self, given: Any) -> dict[str, float] | None:
        """Run the agent with access to the policy."""
        if self._setup.command:
            return scores_of(await run_command(self._setup.command, given))
        async with policy_client(given) as client:
            said = self._function(client, given["row"], **self._setup.options)
            return scores_of(await said if inspect.isawaitable(said) else said)


def _check_methods(program: type) -> None:
    """Raise `Unusable` for a class that takes no part in a rollout, or whose methods cannot be called."""
    if not any(hasattr(program, name) for name in ("tools", *METHODS)):
        raise Unusable(f"class {program.__name__} defines none of tools, {', '.join(METHODS)} (docs/environments.md)")
    for name, given in METHODS.items():
        method = getattr(program, name, None)
        if inspect.isfunction(method) and inspect.isfunction(inspect.getattr_static(program, name)):
            _check_call(method, ", ".join(("self", *given)), 1 + len(given))


def _check_call(function: Any, shown: str, count: int, options: Mapping[str, Any] | None = None) -> None:
    """Raise `Unusable` if a function cannot be called with this many arguments and `options`."""
    try:
        inspect.signature(function).bind(*range(count), **(options or {}))
    except TypeError as error:
        raise Unusable(f"{function.__name__} is called as {function.__name__}({shown}), but: {error}") from None


def _class_tools(program: Any) -> list[dict[str, Any]]:
    """Return the tools that a class lists as its attribute `tools`. Creates no object of the class."""
    listed = getattr(program, "tools", ())
    if not inspect.isclass(program) or not isinstance(listed, list | tuple):  # such as a property: each object has its own
        return []
    return [tool.described for tool in methods_of(object.__new__(program), cast("list[Any]", listed)).values()]


async def opened(setup: ProgramSetup) -> Kind:
    """Return a worker's program, loaded. Raises `Unusable`, and whatever its code raises."""
    needs, install = LIBRARIES.get(setup.kind, ("", ""))
    if needs and not (setup.kind == "agent" and setup.command):
        try:
            importlib.import_module(needs)
        except ModuleNotFoundError as error:
            if error.name != needs:
                raise
            python = Path(sys.executable)
            raise Unusable(
                f'kind = "{setup.kind}" needs the library {needs}, which {python} does not have: '
                f"run {python} -m pip install '{install}'"
            ) from None
    kind = _kind_of(setup)
    await kind.open()
    return kind


def _kind_of(setup: ProgramSetup) -> Kind:
    match setup.kind:
        case "agent":
            return Agent(setup)
        case "verifiers":
            from services.environment.programs.verifiers_library import LibraryEnvironment

            return LibraryEnvironment(setup)
        case _:
            return Conversing(setup)


def main() -> None:
    """Print the tools of the environment on standard input."""
    answers = os.dup(1)
    os.dup2(2, 1)  # what the code prints is not part of the answer
    try:
        found = {"tools": normalised_tools(asyncio.run(shared_tools(json.load(sys.stdin))))}
    except BaseException as error:  # whatever the code raises is reported to the user
        found = {"error": str(error) if isinstance(error, Unusable | BadReply) else reason_of(error)}
    with os.fdopen(answers, "w") as out:
        json.dump(found, out)


async def shared_tools(environment: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the tools of an environment in OpenAI's form; an agent names its own in each call."""
    kind = await opened(setup_of(environment))
    try:
        return kind.shared_tools()
    finally:
        await kind.close()


if __name__ == "__main__":
    main()
