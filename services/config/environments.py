"""Environments: they reply to the policy in rollouts of several turns, and score these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from services.config.base import Section
from services.config.data import FileSource, Source
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
    rollout that exceeds it fails and starts again."""
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
    tool_timeout_s: float = Field(default=30.0, gt=0)
    """Time limit of a call of a built-in or MCP tool. If a call exceeds it, the policy gets an error as the reply."""
    memory_mib: int = Field(default=512, ge=64)
    """Memory limit of the code that the tool `python` runs."""

    @model_validator(mode="after")
    def _calls_end_before_their_reply(self) -> Self:
        if (self.tools or isinstance(self, McpEnvironment)) and self.tool_timeout_s > self.timeout_s / 2:
            raise ValueError(
                f"tool_timeout_s = {self.tool_timeout_s:g} is more than half of timeout_s = {self.timeout_s:g}, so that a slow "
                "call would fail its rollout instead of being answered: lower it, or raise timeout_s"
            )
        return self


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
    command: list[str] = []
    """Program and arguments of a server that speaks over its standard input and output, started for each rollout that calls one
    of its tools. Empty: `url` is used."""
    url: str = ""
    """Address of a server that speaks streamable HTTP, such as `http://tools:8000/mcp`. Empty: `command` is started."""
    shared: bool = False
    """Whether the rollouts of a worker process share one session with the server: for stateless servers."""
    token_env: str = ""
    """Name of an environment variable that contains the bearer token of the server at `url`. Empty: none."""
    function: str = ""
    """`module:Class`, or `path.py:Class` relative to the configuration file, as for kind `python`: it may score, reply, and add
    tools. Empty: a rollout ends with the first reply that calls no tool, and verifiers score it."""

    @field_validator("function")
    @classmethod
    def _names_a_class(cls, text: str) -> str:
        return _named_in_code(text) if text else text

    @field_validator("url")
    @classmethod
    def _is_a_url(cls, text: str) -> str:
        if text and not text.startswith(("http://", "https://")):
            raise ValueError("must begin with http:// or https://, such as http://tools:8000/mcp")
        if "@" in urlsplit(text).netloc:
            raise ValueError("contains a user name or password: remove them; token_env names a bearer token")
        return text

    @property
    def inherited(self) -> list[str]:
        """Return the environment variables that its processes inherit although they look like secrets."""
        return [*self.variables, *filter(None, [self.token_env])]

    @model_validator(mode="after")
    def _one_server(self) -> Self:
        if bool(self.command) == bool(self.url):
            raise ValueError("needs either command or url: set one of them")
        if self.token_env and not self.url:
            raise ValueError(f'token_env = "{self.token_env}" has no effect without url: remove it')
        return self


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


class VerifiersEnvironment(CommonEnvironment):
    """An environment of the library verifiers, version 0.3 or 0.4 (docs/environments.md). `options` are the keyword arguments of
    its `load_environment`, or, with the v1 API, fields of its configuration."""

    kind: Literal["verifiers"]
    """`verifiers`."""
    environment: str = Field(default="", pattern=r"^([A-Za-z0-9_.-]+/)?[A-Za-z0-9_.-]*(@[A-Za-z0-9_.-]+)?$")
    """Id of the environment, as verifiers' own loader takes it, such as `gsm8k` or `owner/gsm8k`. Empty: its name."""

    @property
    def id(self) -> str:
        """Return the id of the environment."""
        return self.environment or self.name


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
