"""Environments: they reply to the policy in rollouts of several turns, and score these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from services.config.base import Section
from services.config.data import FileSource, Source
from services.config.secrets import TOKEN, has_login, variable_of
from services.config.verifiers import FUNCTION, VerifierConfig, check_name, verifier_names


class CommonEnvironment(Section):
    """The keys that all kinds of environments share. A prompt source names the environment in which its rollouts run."""

    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,40}$")
    """Name of the environment, unique in the run; sources, metrics and messages refer to it."""
    options: dict[str, Any] = {}
    """Keyword arguments of the class when it is created, or of the function when it is called."""
    max_turns: int = Field(default=16, ge=1)
    """Maximum number of turns of a rollout. One that needs more is truncated."""
    timeout_s: float = Field(default=600.0, gt=0)
    """Time limit of one reply of the environment; for an agent, of the whole rollout on one pod, without the policy's turns. A
    rollout that exceeds it fails and starts again. A call of a built-in or MCP tool may take a twentieth of it; if it takes
    longer, the policy gets an error as the reply."""
    processes: int = Field(default=1, ge=1)
    """Number of worker processes in each environment pod. A process runs many rollouts, but one step of its code at a time."""
    variables: list[str] = []
    """Names of environment variables, such as an API key's, that workers inherit although they look like secrets."""
    interpreter: str = ""
    """Python of the virtual environment that the workers run in, such as `.venv-agents/bin/python`, relative to the configuration
    file: for libraries that cannot be installed next to this project's. Empty: the Python that runs the pod."""
    solved_at: float | None = None
    """Score at which a rollout counts as solved, for pass rates, exclusion and pass@k. Unset: the score is not consulted."""

    @property
    def inherited(self) -> list[str]:
        """Return the environment variables that its processes inherit although they look like secrets."""
        return self.variables


class ToolEnvironment(CommonEnvironment):
    """The keys of environments with tools of their own."""

    tools: list[Literal["python"]] = []
    """Built-in tools that the policy may call in addition to the environment's own. `python` runs code that the policy writes,
    without network, in a folder that lasts as long as the rollout."""


class PythonEnvironment(ToolEnvironment):
    """A Python class; each rollout has an instance of it (docs/environments.md)."""

    kind: Literal["python"]
    """`python`."""
    function: str = ""
    """`module:Class`, or `path.py:Class` relative to the configuration file. Empty, with `tools`: a rollout ends with the first
    reply that calls no tool, and verifiers score it."""

    @field_validator("function")
    @classmethod
    def _names_a_class(cls, text: str) -> str:
        return _named_in_code(text) if text else text

    @model_validator(mode="after")
    def _has_something(self) -> Self:
        if not self.function and not self.tools:
            raise ValueError('needs function, a class, or tools = ["python"]: set one of them')
        return self


class McpEnvironment(ToolEnvironment):
    """The tools of an MCP server (docs/environments.md)."""

    kind: Literal["mcp"]
    """`mcp`."""
    server: list[str] | str
    """Program and arguments of a server that speaks over its standard input and output, started for each rollout that calls one
    of its tools; or the address of one that speaks streamable HTTP, such as `http://tools:8000/mcp`."""
    shared: bool = False
    """Whether the rollouts of a worker process share one session with the server: for stateless servers."""
    token: str = Field(default="", pattern=TOKEN)
    """Bearer token of a server with an address: `env:NAME` names an environment variable, `file:PATH` a file. Empty: none."""
    function: str = ""
    """`module:Class`, or `path.py:Class` relative to the configuration file, as for kind `python`: it may score, reply, and add
    tools. Empty: a rollout ends with the first reply that calls no tool, and verifiers score it."""

    @field_validator("function")
    @classmethod
    def _names_a_class(cls, text: str) -> str:
        return _named_in_code(text) if text else text

    @field_validator("server")
    @classmethod
    def _is_one(cls, server: list[str] | str) -> list[str] | str:
        if not server:
            raise ValueError("must be a program with its arguments, or an address")
        if isinstance(server, str) and not server.startswith(("http://", "https://")):
            raise ValueError("must begin with http:// or https://, such as http://tools:8000/mcp, or be a list of words")
        if isinstance(server, str) and has_login(server):
            raise ValueError("contains a user name or password: remove them; token names a bearer token")
        return server

    @model_validator(mode="after")
    def _has_use_for_a_token(self) -> Self:
        if self.token and self.command:
            raise ValueError("token has no effect with a server that is a program: remove it")
        return self

    @property
    def command(self) -> list[str]:
        """Return the program and its arguments; empty for a server with an address."""
        return self.server if isinstance(self.server, list) else []

    @property
    def url(self) -> str:
        """Return the address; empty for a server that is a program."""
        return self.server if isinstance(self.server, str) else ""

    @property
    def inherited(self) -> list[str]:
        """Return the environment variables that its processes inherit although they look like secrets."""
        return [*self.variables, *filter(None, [variable_of(self.token)])]


class AgentEnvironment(CommonEnvironment):
    """A program that calls the policy at an OpenAI-compatible endpoint: a function or a command (docs/environments.md)."""

    kind: Literal["agent"]
    """`agent`."""
    run: list[str] | str
    """`module:function`, or `path.py:function` relative to the configuration file; or, as a list, a program and its arguments,
    started once per rollout."""

    @field_validator("run")
    @classmethod
    def _names_a_program(cls, run: list[str] | str) -> list[str] | str:
        if not run:
            raise ValueError("must be a function, or a program with its arguments")
        return _named_in_code(run) if isinstance(run, str) else run

    @property
    def function(self) -> str:
        """Return the name of the function; empty for a program."""
        return self.run if isinstance(self.run, str) else ""

    @property
    def command(self) -> list[str]:
        """Return the program and its arguments; empty for a function."""
        return self.run if isinstance(self.run, list) else []


class VerifiersEnvironment(CommonEnvironment):
    """An environment of the library verifiers, of its v1 API (docs/environments.md). Its id is `name`; `options` are fields of
    its configuration."""

    kind: Literal["verifiers"]
    """`verifiers`."""


def _named_in_code(text: str) -> str:
    if FUNCTION.fullmatch(text) is None:
        raise ValueError("must be module:name or path.py:name, such as my_tools:Calculator or my_tools.py:Calculator")
    return text


EnvironmentConfig = Annotated[
    PythonEnvironment | AgentEnvironment | McpEnvironment | VerifiersEnvironment, Field(discriminator="kind")
]


def code_of(environment: EnvironmentConfig) -> str:
    """Return the name of the environment's class or function, or "" if it has none."""
    return "" if isinstance(environment, VerifiersEnvironment) else environment.function


def code_key(environment: EnvironmentConfig) -> str:
    """Return the key that names the environment's class or function."""
    return "run" if environment.kind == "agent" else "function"


def environment_file(environment: EnvironmentConfig) -> str:
    """Return the path of the file of the environment's class or function, or "" if it has none."""
    place = code_of(environment).rpartition(":")[0]
    return place if place.endswith(".py") else ""


def drives_itself(environment: EnvironmentConfig) -> bool:
    """Return whether its program calls the policy, instead of replying to it."""
    return environment.kind in ("agent", "verifiers")


def check_environments(
    environments: Sequence[EnvironmentConfig], verifiers: Sequence[VerifierConfig], sources: Sequence[Source]
) -> None:
    """Raise ValueError unless environments have unique names, and sources name environments that exist."""
    names: list[str] = []
    for index, environment in enumerate(environments):
        check_name(f"environments.{index}.name", environment.name)
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
        scored = [source for source in sources if source.environment == environment.name]
        if isinstance(environment, VerifiersEnvironment):
            for source in scored:
                _check_rows(source)
        if not code_of(environment) and environment.kind in ("python", "mcp"):
            for source in scored:
                if not any(verifier.scores(source.name) for verifier in verifiers):
                    raise ValueError(
                        f'environments.{index} ("{environment.name}") has no function, and no verifier scores source '
                        f'"{source.name}": set function, a class with the method score, or add a verifier'
                    )


def _check_rows(source: Source) -> None:
    """Raise ValueError unless a source may have the rows of an environment that brings its own data."""
    if not isinstance(source, FileSource):
        raise ValueError(
            f'kind of source "{source.name}" = "{source.kind}", but its environment has its own prompts: set "jsonl"'
        )
    if source.columns and not {"row", "digest"} <= {*source.columns}:
        raise ValueError(
            f'columns of source "{source.name}" lack row and digest, by which its environment finds the row: add them'
        )
