"""Environments of the classic API: `load_environment(id, **options)` and `run_rollout`, as in version 0.3 of verifiers.

Guarantees: a rollout that the library could not run is a failure. So is one whose reward function met a service that failed,
which the library scores 0; a reward function that raises anything else gives 0, as in the library.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import importlib
import inspect
import json
import socket
import traceback
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from http import HTTPStatus
from typing import Any, cast

from services.environment.programs.frames import ProgramSetup
from services.environment.programs.kind import policy_client
from services.runtime.own_code import Unusable

CLIENTS = frozenset({"aiohttp", "http", "httpcore", "httpx", "requests", "socket", "ssl", "urllib", "urllib3"})
"""Packages that call services."""
_UNREACHED: ContextVar[list[str]] = ContextVar("unreached")
"""Services that reward functions of this rollout could not reach."""


class ClassicEnvironment:
    """An environment whose module has `load_environment`."""

    endless = False

    def __init__(self, setup: ProgramSetup) -> None:
        self._environment: Any = importlib.import_module("verifiers.legacy").load_environment(setup.environment, **setup.options)
        self._data: dict[bool, Any] = {}
        for each in _environments(self._environment):
            turns = getattr(each, "max_turns", None)
            if isinstance(turns, int) and not 0 < turns <= setup.max_turns:
                each.max_turns = setup.max_turns  # so that the library ends the rollout, and scores it
            for rubric in _rubrics(each.rubric):
                if rubric.has_group_rewards:
                    raise Unusable(
                        f"environment = {setup.environment!r} scores the rollouts of a group together, which is not supported: "
                        "choose an environment that scores each alone"
                    )
                rubric.funcs = [_watched(function) for function in rubric.funcs]

    async def open(self) -> None:
        """Do nothing: rollouts share the environment alone."""

    async def close(self) -> None:
        """Do nothing."""

    def row(self, index: int, evaluation: bool) -> Any:
        """Return a row of the training or evaluation set."""
        if evaluation not in self._data:
            loaded = self._environment
            self._data[evaluation] = loaded.get_eval_dataset() if evaluation else loaded.get_dataset()
        data = self._data[evaluation]
        return data[index] if index < len(data) else None

    def described(self, row: Any) -> dict[str, Any]:
        """Return the prompt and the answer of a row."""
        prompt: Any = row["prompt"]
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [_without_none(each) for each in prompt]
        digest = hashlib.sha256(json.dumps(row, sort_keys=True, default=str).encode()).hexdigest()[:32]
        return {"prompt": messages, "answer": str(row.get("answer") or ""), "digest": digest}

    async def run(self, row: Any, given: Any) -> dict[str, Any] | None:
        """Run a rollout."""
        wrapper = importlib.import_module("verifiers.legacy.clients.openai_chat_completions_client")
        unreached: list[str] = []
        _UNREACHED.set(unreached)
        async with policy_client(given) as client:
            done = await self._environment.run_rollout(row, wrapper.OpenAIChatCompletionsClient(client), "policy", {})
        if done["error"]:
            raise RuntimeError(f"the library could not run the rollout: {done['error']}")
        if unreached:
            raise RuntimeError(f"the library could not score the rollout: {'; '.join(unreached)}")
        if not self._environment.score_rollouts:
            return None
        return {**{name: float(value) for name, value in done["metrics"].items()}, "score": float(done["reward"])}


def _without_none(message: Any) -> Any:
    """Return a message without the fields that other rows of its table have."""
    return {name: value for name, value in message.items() if value is not None}


def _environments(environment: Any) -> Iterator[Any]:
    yield environment
    for each in getattr(environment, "envs", ()):  # of an EnvGroup
        yield from _environments(each)


def _rubrics(rubric: Any) -> Iterator[Any]:
    yield rubric
    for each in getattr(rubric, "rubrics", ()):  # of a RubricGroup
        yield from _rubrics(each)


def _watched(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a reward function that records unreachable services; the library turns any exception into 0."""

    @functools.wraps(function)
    async def watched(*given: Any, **named: Any) -> Any:
        try:
            said = function(*given, **named)
            return await said if inspect.isawaitable(said) else said
        except Exception as error:  # raised again: the library catches it
            if _of_a_service(error):
                _UNREACHED.get().append(f"{function.__name__}: {type(error).__name__}: {error}"[:500])
            raise

    return watched


def _of_a_service(error: BaseException | None) -> bool:
    """Return whether an exception, or one that led to it, says that a service failed: a judge, a sandbox, a server."""
    httpx, openai = (cast("Any", importlib.import_module(name)) for name in ("httpx", "openai"))
    library = importlib.import_module("verifiers.legacy.errors").Error
    while error is not None:
        if isinstance(error, ConnectionError | socket.gaierror | httpx.TransportError | openai.APIError | library):
            return True
        if isinstance(error, TimeoutError | asyncio.CancelledError) and _in_a_client(error):
            return True
        status = getattr(getattr(error, "response", None), "status_code", None) or getattr(error, "status", None)
        if isinstance(status, int) and (status == HTTPStatus.TOO_MANY_REQUESTS or status >= HTTPStatus.INTERNAL_SERVER_ERROR):
            return True
        error = error.__cause__ or error.__context__
    return False


def _in_a_client(error: BaseException) -> bool:
    """Return whether an exception came from within a client of a service, and not from a time limit of the function itself."""
    frames = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(name.partition(".")[0] in CLIENTS for name in frames)
