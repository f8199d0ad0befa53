"""Environments: what replies to the policy in rollouts of several turns, and scores them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from services.config.base import Section
from services.config.data import Source
from services.config.verifiers import FUNCTION, VerifierConfig, verifier_names


class CommonEnvironment(Section):
    """The keys that all kinds of environment share. Prompt sources name the environment that their rollouts run in."""

    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,40}$")
    """Name of the environment, unique in the run; sources, metrics and messages refer to it."""
    options: dict[str, Any] = {}
    """Keyword arguments of the class when it is created, or of the function when it is called."""
    max_turns: int = Field(default=16, ge=1)
    """Most turns of a rollout. One that needs more ends as truncated."""
    timeout_s: float = Field(default=600.0, gt=0)
    """Time limit of a rollout on one pod. When it passes, the rollout has failed, and starts again."""
    processes: int = Field(default=1, ge=1)
    """Number of worker processes in each environment pod. A process runs many rollouts, but one step of its code at a time."""
    variables: list[str] = []
    """Names of environment variables, such as an API key's, that workers inherit although they look like secrets."""
    solved_at: float | None = None
    """Score from which a rollout counts as solved, for pass rates, exclusion and pass@k. Unset: it is not consulted."""


class PythonEnvironment(CommonEnvironment):
    """A Python class, one object of which takes part in each rollout (docs/environments.md)."""

    kind: Literal["python"]
    """`python`."""
    function: str
    """`module:Class`, or `path.py:Class` relative to the configuration file."""

    @field_validator("function")
    @classmethod
    def _names_a_class(cls, text: str) -> str:
        return _named_in_code(text)


class AgentEnvironment(CommonEnvironment):
    """A program that calls the policy at an OpenAI-compatible endpoint: a function or a command (docs/environments.md)."""

    kind: Literal["agent"]
    """`agent`."""
    function: str = ""
    """`module:function`, or `path.py:function` relative to the configuration file. Empty: `command` is run."""
    command: list[str] = []
    """Program and arguments, started once per rollout. Empty: `function` is called."""

    @field_validator("function")
    @classmethod
    def _names_a_function(cls, text: str) -> str:
        return _named_in_code(text) if text else text

    @model_validator(mode="after")
    def _one_program(self) -> Self:
        if bool(self.function) == bool(self.command):
            raise ValueError("needs either function or command: set one of them")
        return self


def _named_in_code(text: str) -> str:
    if FUNCTION.fullmatch(text) is None:
        raise ValueError("must be module:name or path.py:name, such as my_tools:Calculator or my_tools.py:Calculator")
    return text


EnvironmentConfig = Annotated[PythonEnvironment | AgentEnvironment, Field(discriminator="kind")]


def environment_file(environment: EnvironmentConfig) -> str:
    """Return the path of the file of the environment's class or function, or "" if a module or a command is named."""
    place = environment.function.rpartition(":")[0]
    return place if place.endswith(".py") else ""


def check_environments(
    environments: Sequence[EnvironmentConfig], verifiers: Sequence[VerifierConfig], sources: Sequence[Source]
) -> None:
    """Raise ValueError unless environments have names of their own, and sources name environments that exist."""
    names: list[str] = []
    for index, environment in enumerate(environments):
        if environment.name in (*names, *verifier_names(verifiers)):
            raise ValueError(
                f'environments.{index}.name = "{environment.name}" is the name of another environment or verifier: '
                "give each its own name"
            )
        names.append(environment.name)
    for source in sources:
        if source.environment and source.environment not in names:
            known = f"choose from: {', '.join(names)}" if names else "add it as one of [[environments]]"
            raise ValueError(f'environment of source "{source.name}" = "{source.environment}" does not exist; {known}')
    for index, environment in enumerate(environments):
        if all(source.environment != environment.name for source in sources):
            raise ValueError(
                f'environments.{index} ("{environment.name}") has no effect: no prompt source names it; set `environment` '
                "of one, or remove it"
            )
