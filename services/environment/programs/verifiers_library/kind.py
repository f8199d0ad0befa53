"""Kind `verifiers`: an environment of the library verifiers, by its id, with the API that its module has.

Guarantees: a rollout uses the row that its ticket was made from; a failure inside the library is a failure, never a reward.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import itertools
import pkgutil
import re
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

from services.environment.programs.frames import ProgramSetup
from services.environment.programs.kind import LIBRARIES, Kind
from services.environment.programs.loaded import BadReply, scores_of
from services.runtime.own_code import Unusable
from services.verifiers.numeric import MOST_PARTS

TASK_SETS = ("verifiers", "v1", "tasksets")  # package of the task sets that come with the library
AGAIN = "write the rows again with grpo rows"


class LoadedEnvironment(Protocol):
    """An environment of either API."""

    async def open(self) -> None:
        """Start what its rollouts share."""
        ...

    async def close(self) -> None:
        """Free what `open` took."""
        ...

    @property
    def endless(self) -> bool:
        """Return whether there is always another row."""
        ...

    def row(self, index: int, evaluation: bool) -> Any:
        """Return a row of its data for training or evaluation; None if it has fewer. Blocks while it loads them."""
        ...

    def described(self, row: Any) -> dict[str, Any]:
        """Return `prompt` (messages), `answer` and `digest`, by which the row is recognised."""
        ...

    async def run(self, row: Any, given: Any) -> dict[str, Any] | None:
        """Run a rollout of a row with access to the policy; return the reward as `score`, and its parts.

        Raises whatever fails.
        """
        ...


class LibraryEnvironment(Kind):
    """One environment of the library."""

    def __init__(self, setup: ProgramSetup) -> None:
        super().__init__(setup)
        self._loaded = loaded(setup)
        self._reading = asyncio.Lock()  # rows are read one after another, in a thread

    async def open(self) -> None:
        """Start what rollouts share."""
        await self._loaded.open()

    async def close(self) -> None:
        """Free it."""
        await self._loaded.close()

    async def rows(self, start: int, count: int, evaluation: bool, limited: bool) -> list[dict[str, Any]]:
        """Return rows of its data for a source: `prompt`, `answer`, and the columns by which `run` finds the row again."""
        if self._loaded.endless and not limited:
            raise BadReply("it generates rows endlessly: give --limit")
        found: list[dict[str, Any]] = []
        for index in range(start, start + count):
            row = await self._row(index, evaluation)
            if row is None:
                break
            found.append({**self._loaded.described(row), "row": index, "evaluation": evaluation})
        return found

    async def run(self, given: Any) -> dict[str, float] | None:
        """Run a rollout of the row that the ticket's data row names."""
        index, digest = given["row"].get("row"), given["row"].get("digest")
        if not isinstance(index, int) or not isinstance(digest, str):
            raise BadReply(f"the data row lacks the columns `row` and `digest`: {AGAIN}")
        row = await self._row(index, bool(given["row"].get("evaluation")))
        if row is None or self._loaded.described(row)["digest"] != digest:
            why = "is not what it was" if row is not None else "does not exist"
            raise BadReply(f"row {index} of the environment's data {why}: {AGAIN}, and leave its options as they are")
        found = await self._loaded.run(row, given)
        return scores_of(found and _with_valid_parts(found))

    async def _row(self, index: int, evaluation: bool) -> Any:
        async with self._reading:
            return await asyncio.to_thread(self._loaded.row, index, evaluation)


def _with_valid_parts(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return a reward with as many parts as may be. The library names them after functions, such as `<lambda>`."""
    parts = {re.sub(r"[^A-Za-z0-9_-]", "_", name)[:40]: value for name, value in found.items() if name != "score"}
    return {**dict(itertools.islice(parts.items(), MOST_PARTS)), "score": found["score"]}


def loaded(setup: ProgramSetup) -> LoadedEnvironment:
    """Return the environment that a configuration names. Raises `Unusable`, and what its code raises."""
    has = version("verifiers")
    python, install = Path(sys.executable), LIBRARIES["verifiers"][1]
    if has.startswith(("0.0.", "0.1.", "0.2.")):
        raise Unusable(f"{python} has verifiers {has}, which is too old: run {python} -m pip install '{install}'")
    module = _module(setup.environment, python, has)
    if hasattr(module, "load_environment") and _has_classic():
        from services.environment.programs.verifiers_library.classic import ClassicEnvironment

        _check_arguments(module.load_environment, setup.options)
        return ClassicEnvironment(setup)
    if hasattr(module, "load_environment") and not hasattr(module, "__all__"):
        raise Unusable(f"environment = {setup.environment!r} has load_environment of the classic API: {_older(python, has)}")
    from services.environment.programs.verifiers_library.v1 import TasksetEnvironment

    return TasksetEnvironment(setup)


def _has_classic() -> bool:
    return importlib.util.find_spec("verifiers.legacy") is not None


def _older(python: Path, has: str) -> str:
    return f"verifiers {has} has the v1 API only; for the classic one run {python} -m pip install 'verifiers>=0.3,<0.4'"


def _module(id: str, python: Path, has: str) -> Any:
    """Import the module of an environment, found by its id as the library finds it."""
    name = id.rpartition("/")[2].partition("@")[0].replace("-", "_")
    place = _place(name)
    if not place:
        raise Unusable(
            f"environment = {id!r}: {python} has no module {name!r}: correct the id, or install the environment's package with "
            f"{python} -m pip install"
        )
    try:
        return importlib.import_module(place)
    except (ImportError, AttributeError) as error:
        if _has_classic():
            raise
        raise Unusable(f"environment = {id!r} cannot be imported ({error}): {_older(python, has)}") from None


def _place(name: str) -> str:
    """Return the module of an environment, or an empty string; a task set of the library's comes before a module of that name.

    The v1 API is not imported to find out: that takes a second of processor time, and the classic API does without it.
    """
    library = importlib.util.find_spec(TASK_SETS[0])
    folders = [str(Path(each, *TASK_SETS[1:])) for each in (library.submodule_search_locations if library else None) or ()]
    if name.lower() in {each.name for each in pkgutil.iter_modules(folders)}:
        return ".".join((*TASK_SETS, name.lower()))
    return next((each for each in (name, name.lower()) if importlib.util.find_spec(each)), "")


def _check_arguments(function: Any, options: dict[str, Any]) -> None:
    """Raise `Unusable` for options that a function does not take."""
    taken = inspect.signature(function)
    try:
        taken.bind(**options)
    except TypeError as error:
        names = ", ".join(taken.parameters) or "nothing"
        raise Unusable(f"options = {options!r}: {error}; load_environment takes {names}") from None
