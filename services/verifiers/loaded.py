"""One verifier inside a worker process: it is loaded, its parameter names show its inputs, and it is called.

Guarantees: no call exceeds its limit: the kernel's timer ends the process even inside a C loop that never returns to Python. With
a built-in verifier that says so, a completion that takes too long scores 0, and the others of its group keep their scores.
A verifier's module is imported only if the run uses it, since some import a computer algebra system.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import signal
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, cast

from services.config.data import Source
from services.config.verifiers import PythonConfig, VerifierConfig
from services.runtime.own_code import Unusable, imported
from services.verifiers.base import Job, Overtime
from services.verifiers.results import Verdict, read_results
from services.verifiers.together import together

BUILTIN: dict[str, str] = {
    "math": "services.verifiers.builtin.math:MathVerifier",
    "exact": "services.verifiers.builtin.simple:ExactVerifier",
    "regex": "services.verifiers.builtin.simple:RegexVerifier",
    "reasoning_gym": "services.verifiers.builtin.simple:ReasoningGymVerifier",
    "length": "services.verifiers.builtin.simple:LengthVerifier",
}
"""Kind -> `module:Class`. The class takes (config, Source), or for `length` the maximum length, and has the method `score`."""
ASYNC_GRACE_S = 1.0
"""An asynchronous call is cancelled at its limit; one that blocks the event loop instead ends its process this much later."""
OVERTIME_S = 2.0
"""A call that does not end after `Overtime`, because it never returns to Python, ends its process this much later."""
OF_ONE = {"completion": "completions", "reply": "replies", "tokens": "tokens", "finish": "finish"}
"""Parameters whose value differs between completions -> the list that has all values."""
OF_ALL = ("prompt", "answer", "row", "source")
"""Parameters whose value is the same for all completions of a group."""


ELSEWHERE = {
    "prompts": "prompt", "completion_ids": "tokens", "solution_str": "completion", "response": "completion",
    "ground_truth": "answer", "data_source": "source", "extra_info": "row",
}  # fmt: skip
"""Parameters of TRL's and verl's reward functions -> their names here."""


class LoadedVerifier:
    """Scores groups with one verifier."""

    def __init__(
        self, config: VerifierConfig, source: Source, own: Callable[..., Any] | None = None, max_tokens: int = 0
    ) -> None:
        """`own`: the result of `load` for a custom function; `max_tokens`: the maximum length of a completion.

        Raises `Unusable`, and any exception of the verifier's code.
        """
        self._source, self._limit_s = source, config.timeout_s
        self._whole = config.kind == "python" and config.scope == "group"
        self._own = own is not None
        made: Any = builtin(config, source, max_tokens) if own is None else None
        self._interrupted: bool = getattr(made, "scores_overtime", False)
        self._call: Callable[..., Any] = own or made.score
        self.needs = _parameters(self._call, self._whole)
        """Names of the parameters that it requests."""
        called = self._call.func if isinstance(self._call, partial) else self._call
        self.is_async = inspect.iscoroutinefunction(called) or inspect.iscoroutinefunction(getattr(called, "__call__", None))  # noqa: B004

    def score(self, job: Job, run: Callable[[Any], Any]) -> Verdict:
        """Return the verdict on a group; `run` runs a coroutine to its end. Raises whatever the verifier raises."""
        fields = job.fields(self._source) if self._own else {"answer": job.answer, **_columns(job)}
        count = len(job.completions)
        if self._whole:
            call = partial(self._call, **{name: fields[name] for name in self.needs})
            if self.is_async:
                return read_results(self._timed(1, lambda: _drawn(run(self._bounded(call())))), count)
            return read_results(self._timed(1, lambda: _drawn(call())), count)
        calls = [partial(self._call, **self._arguments(fields, i)) for i in range(count)]
        if self.is_async:
            return read_results(self._timed(count, lambda: run(self._together(calls))), count)
        return read_results([self._timed(1, call) for call in calls], count)

    def _arguments(self, fields: Mapping[str, Any], i: int) -> dict[str, Any]:
        return {name: fields[OF_ONE[name]][i] if name in OF_ONE else fields[name] for name in self.needs}

    async def _together(self, calls: list[Callable[[], Any]]) -> list[Any]:
        return await together([self._bounded(call()) for call in calls])

    async def _bounded(self, call: Any) -> Any:
        try:
            return await asyncio.wait_for(call, self._limit_s)
        except TimeoutError:
            raise TimeoutError(f"a call took longer than timeout_s = {self._limit_s:g}") from None

    def _timed(self, calls: int, function: Callable[[], Any]) -> Any:
        """Call a function. Past the time limit of `calls` calls SIGALRM, with its default action, ends the process.

        A verifier that scores a completion 0 which takes too long is interrupted by `Overtime` instead; the process ends only if
        it then uses the processor for `OVERTIME_S` more.
        """
        limit_s = self._limit_s * calls + ASYNC_GRACE_S * self.is_async
        if self._interrupted:
            signal.signal(signal.SIGALRM, _interrupt)
            signal.setitimer(signal.ITIMER_PROF, limit_s + OVERTIME_S)
        signal.setitimer(signal.ITIMER_REAL, limit_s, OVERTIME_S / 4 if self._interrupted else 0)
        try:
            return function()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            if self._interrupted:
                signal.setitimer(signal.ITIMER_PROF, 0)
                signal.signal(signal.SIGALRM, signal.SIG_DFL)


def _interrupt(*_: object) -> None:
    raise Overtime("the call exceeded its time limit")


def _drawn(results: Any) -> Any:
    """Return what a generator yields, otherwise the results themselves: its code runs within the time limit."""
    return list(cast("Iterator[Any]", results)) if isinstance(results, Iterator) else results


def load(config: PythonConfig) -> Callable[..., Any]:
    """Return the function that `config` names, with its options, or an instance of the class. Raises `Unusable`."""
    found: Any = imported(config.function)
    if inspect.isclass(found):
        found = found(**config.options)
        return found.score if hasattr(found, "score") else found
    if not callable(found):
        raise Unusable(f"function = {config.function!r} is not a function or class but {type(found).__name__}")
    offered = _offered(config.scope == "group")
    for name in sorted(offered & config.options.keys()):
        raise Unusable(
            f"options.{name} = {config.options[name]!r} has no effect: a parameter of this name gets the group's value "
            f"({', '.join(sorted(offered))}): rename the parameter and the option"
        )
    return partial(found, **config.options) if config.options else found


def builtin(config: VerifierConfig, source: Source, max_tokens: int = 0) -> Any:
    """Return a built-in verifier. Raises ValueError for invalid settings."""
    module, _, name = BUILTIN[config.kind].partition(":")
    made = getattr(importlib.import_module(module), name)
    return made(config, max_tokens) if config.kind == "length" else made(config, source)


def _offered(whole: bool) -> set[str]:
    """Return the names of the parameters that a function may have for a group's fields; `whole`: it gets all completions."""
    return {*(OF_ONE.values() if whole else OF_ONE), *OF_ALL}


def _parameters(function: Callable[..., Any], whole: bool) -> frozenset[str]:
    """Return which of a group's fields a function requests. Raises `Unusable` for an unknown parameter."""
    offered = _offered(whole)
    wanted: set[str] = set()
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            wanted |= offered
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
            raise Unusable(f"parameter {name!r} is passed by position: verifiers are called by keyword")
        elif name in offered:
            wanted.add(name)
        elif parameter.default is parameter.empty:
            scope, meant = "group" if whole else "completion", ELSEWHERE.get(name)
            here = f"; here it is called {meant!r}" if meant in offered else ""
            other = '; scope = "group" offers it' if name in OF_ONE.values() else ""
            raise Unusable(
                f'parameter {name!r} is unknown{here}{other}: with scope = "{scope}" a verifier may ask for '
                f"{', '.join(sorted(offered))}; set others in `options`"
            )
    return frozenset(wanted)


def _columns(job: Job) -> dict[str, Any]:
    return {"completions": job.completions, "replies": job.replies, "tokens": job.tokens, "finish": job.finish}
