"""Verifiers: how completions are scored, and when one counts as solved."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import ConfigDict, Field, TypeAdapter, ValidationInfo, field_validator, model_validator
from typing_extensions import TypedDict  # that of `typing` has no errors per field before Python 3.12

from services.config.base import Section
from services.config.data import Capture, FileSource, Source, pattern_of
from services.config.secrets import TOKEN, has_login, without_secrets

FUNCTION = re.compile(r"(?P<place>[^:]+):(?P<name>[A-Za-z_]\w*(\.[A-Za-z_]\w*)*)")
"""`module:name` or `path.py:name`."""
OF_REWARDS = ("mean", "std", "zero_std_share")
"""Metrics of the reward itself, beside which the scores of verifiers and environments are reported."""


class CommonVerifier(Section):
    """The keys that all kinds of verifier share. The reward is the sum of the scores of a source's verifiers, each times its
    weight."""

    name: str = Field(default="", pattern=r"^[A-Za-z0-9_-]{0,40}$")
    """Name of the verifier in metrics and messages, unique in the run. Empty: its kind, numbered from the second one on."""
    weight: float = 1.0
    """Weight of the score in the reward. 0: the score is only reported."""
    sources: list[str] = []
    """Names of the prompt sources whose completions this verifier scores. Empty: all."""
    timeout_s: float = Field(default=5.0, gt=0)
    """Time limit of one call. A call that exceeds it fails, and the ticket is retried."""
    solved_at: float | None = None
    """Score at which a completion counts as solved, for pass rates, exclusion and pass@k. With several verifiers it must
    reach that of each one with a positive weight. Unset: the top of the range; without a range, the verifier is not consulted."""

    @property
    def bounds(self) -> tuple[float, float] | None:
        """Return the smallest and the largest score, or None if any finite number is a score."""
        return (0.0, 1.0)

    @property
    def threshold(self) -> float | None:
        """Return the score from which it counts a completion as solved, or None if it is not consulted."""
        if self.weight <= 0:
            return None
        return self.solved_at if self.solved_at is not None else self.bounds and self.bounds[1]

    @model_validator(mode="after")
    def _reachable(self) -> Self:
        if self.solved_at is not None and self.bounds and not self.bounds[0] <= self.solved_at <= self.bounds[1]:
            raise ValueError(
                f"solved_at = {self.solved_at:g} is outside the scores' range {list(self.bounds)}: set one within it"
            )
        return self

    def scores(self, source: str) -> bool:
        """Return whether it scores completions of the prompt source `source`."""
        return not self.sources or source in self.sources


class MathConfig(CommonVerifier):
    """Compare answers as mathematics."""

    kind: Literal["math"]
    """`math`."""


class ExtractingVerifier(CommonVerifier):
    """The key of verifiers that compare an answer which they find within the reply."""

    extract: Capture = ""
    """Regular expression that finds the answer within the reply, which is what the completion says after its reasoning; the first
    group of its last match counts. Empty: the whole reply."""


class ExactConfig(ExtractingVerifier):
    """Compare answers as text."""

    kind: Literal["exact"]
    """`exact`."""


class RegexConfig(CommonVerifier):
    """Search completions for a pattern."""

    kind: Literal["regex"]
    """`regex`."""
    pattern: str = Field(min_length=1)
    """The regular expression. `{answer}` is replaced by the escaped gold answer."""

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, text: str) -> str:
        pattern_of(text.replace("{answer}", "answer"))
        return text


class ReasoningGymConfig(ExtractingVerifier):
    """Score with the task's own scorer."""

    kind: Literal["reasoning_gym"]
    """`reasoning_gym`."""


class LengthConfig(CommonVerifier):
    """Penalise long completions softly: DAPO's overlong punishment (docs/rewards.md)."""

    kind: Literal["length"]
    """`length`."""
    soft_tokens: int = Field(ge=1)
    """Tokens before `sampling.max_tokens` over which the score falls from 0 to -1."""

    @property
    def bounds(self) -> tuple[float, float]:
        """Return the smallest and the largest score."""
        return (-1.0, 0.0)

    @property
    def threshold(self) -> None:
        """Return None: a length says nothing about whether a completion is right."""
        return None


class OwnVerifier(CommonVerifier):
    """The keys of verifiers whose scores may be any finite numbers."""

    range: list[float] = []
    """Smallest and largest score, e.g. `[0, 1]`. A score outside it is a failure. Empty: any finite number is a score."""

    @field_validator("range")
    @classmethod
    def _ascends(cls, given: list[float]) -> list[float]:
        if given and not (len(given) == 2 and all(map(math.isfinite, given)) and given[0] < given[1]):
            raise ValueError("must be two ascending finite numbers, such as [0, 1], or empty")
        return given

    @property
    def bounds(self) -> tuple[float, float] | None:
        """Return the smallest and the largest score, or None if any finite number is a score."""
        return (self.range[0], self.range[1]) if self.range else None


class PythonConfig(OwnVerifier):
    """Call a Python function or class (docs/rewards.md)."""

    kind: Literal["python"]
    """`python`."""
    function: str
    """`module:name`, or `path.py:name` relative to the configuration file. A function, or a class, which is created once per
    worker and then called."""
    options: dict[str, Any] = {}
    """Keyword arguments of the function, or of the class when it is created."""
    scope: Literal["completion", "group"] = "completion"
    """`completion`: each completion is scored by itself; `group`: all completions of a prompt are scored in one call."""
    network: bool = False
    """Allow the function to use the network (docs/security.md)."""
    variables: list[str] = []
    """Names of environment variables, such as an API key's, that workers inherit although they look like secrets."""

    @field_validator("function")
    @classmethod
    def _names_a_function(cls, text: str) -> str:
        if FUNCTION.fullmatch(text) is None:
            raise ValueError("must be module:name or path.py:name, such as my_rewards:score or my_rewards.py:score")
        return text

    @property
    def file(self) -> str:
        """Return the path of the function's file, or "" if a module is named."""
        place = self.function.rpartition(":")[0]
        return place if place.endswith(".py") else ""


class RemoteVerifier(OwnVerifier):
    """The keys of verifiers that ask a service over HTTP."""

    url: str = Field(pattern=r"^https?://[^\s]+$")
    """Address of the service."""
    token: str = Field(default="", pattern=TOKEN)
    """The service's bearer token: `env:NAME` names an environment variable, `file:PATH` a file. Empty: none."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Time limit of one request."""


class HttpConfig(RemoteVerifier):
    """Ask a service of your own for the scores of a group, in one request (docs/rewards.md)."""

    kind: Literal["http"]
    """`http`."""


class PromptMessage(TypedDict):
    """A message of a judge's prompt, whose content is a Jinja2 template."""

    role: Literal["system", "user", "assistant"]
    content: str


class JudgeConfig(RemoteVerifier):
    """Ask a language model for a verdict, at an OpenAI-compatible endpoint (docs/rewards.md)."""

    kind: Literal["judge"]
    """`judge`."""
    scope: Literal["completion", "group"] = "completion"
    """`completion`: each completion is scored by itself; `group`: all completions of a prompt are scored in one call."""
    model: str
    """Name of the model at the endpoint."""
    prompt: str | list[PromptMessage]
    """Jinja2 template of the question, with the variables `question`, `prompt` (messages), `answer`, `row`, `completion` (its
    reply), and `completions` with `scope = "group"`; or a list of messages, each a `role` and a template as `content`."""
    verdict: Capture = (
        r"(?i)\bscore[\s:=*]*([-+]?(?:\d+(?:\.\d+)?|\.\d+)(?:e[-+]?\d+)?)(?![\w%]|\.\d)"
        r"(?=\s*(?:$|[\n.,;!)\]*\"'|(]|[-–—]\s|/\s*\d|(?:out\s+)?of\s+\d|points?\b|because\b|since\b))"
    )
    """Regular expression whose first group is the score, a number; the last match counts. With `scope = "group"` the last n
    matches are the scores of the n completions. Ignored with `json_schema`. By default a statement such as `Score: 7`,
    `**Score:** 0.5` or `score = 7/10`, but no number in a sentence that continues, such as `a score 10 is not deserved`."""
    json_schema: dict[str, Any] = {}
    """JSON schema to which the endpoint constrains the reply, which then contains the number `score`, or with `scope = "group"`
    the list `scores`. Empty: the reply is text."""
    votes: int = Field(default=1, ge=1, le=64)
    """Verdicts to ask for, each with a `seed` of its own. The score is the mean of those that can be read, which
    must be at least half."""
    request: dict[str, Any] = {}
    """Further fields of the request, e.g. `temperature` or `max_tokens`."""

    @property
    def messages(self) -> list[PromptMessage]:
        """Return the messages of a request, whose contents are templates."""
        return [PromptMessage(role="user", content=self.prompt)] if isinstance(self.prompt, str) else self.prompt

    @field_validator("prompt")
    @classmethod
    def _asks_something(cls, prompt: str | list[PromptMessage]) -> str | list[PromptMessage]:
        if not prompt:
            raise ValueError("is empty: give a template, or a list of messages")
        return prompt

    @field_validator("json_schema")
    @classmethod
    def _has_scores(cls, schema: dict[str, Any], given: ValidationInfo) -> dict[str, Any]:
        key = "scores" if given.data.get("scope") == "group" else "score"
        if schema and key not in schema.get("properties", {}):
            raise ValueError(f"has no property {key!r}, which contains the verdict: add it")
        return schema

    @field_validator("request")
    @classmethod
    def _leaves_the_question(cls, fields: dict[str, Any], given: ValidationInfo) -> dict[str, Any]:
        if taken := sorted({"model", "messages", "stream", "n"} & fields.keys()):
            raise ValueError(f"{', '.join(taken)} cannot be set here: use the keys model, prompt and votes")
        if type(fields.get("seed", 0)) is not int:
            raise ValueError(f"seed = {fields['seed']!r} is not an integer; the votes of a completion count up from it")
        if "response_format" in fields and given.data.get("json_schema"):
            raise ValueError("response_format would replace json_schema: remove one of them")
        return fields


VerifierConfig = Annotated[
    MathConfig | ExactConfig | RegexConfig | ReasoningGymConfig | LengthConfig | PythonConfig | HttpConfig | JudgeConfig,
    Field(discriminator="kind"),
]

VERIFIER: TypeAdapter[VerifierConfig] = TypeAdapter(VerifierConfig, config=ConfigDict(defer_build=True))
"""Validates one entry of `verifiers`."""

GOLD = ("math", "exact", "reasoning_gym")
"""Kinds that compare with a gold answer."""
OWN = ("python", "http", "judge")
"""Kinds that are given the prompt's messages and its row."""


def verifier_names(verifiers: Sequence[VerifierConfig]) -> list[str]:
    """Return the name of each of the run's verifiers; the second one of a kind without a name is `kind-2`, and so on."""
    seen: dict[str, int] = {}
    names: list[str] = []
    for verifier in verifiers:
        count = seen[verifier.kind] = seen.get(verifier.kind, 0) + 1
        names.append(verifier.name or (verifier.kind if count == 1 else f"{verifier.kind}-{count}"))
    return names


def named(verifiers: Sequence[VerifierConfig]) -> list[tuple[str, VerifierConfig]]:
    """Return the run's verifiers with their names."""
    return list(zip(verifier_names(verifiers), verifiers, strict=True))


def needs_answer(verifiers: Sequence[VerifierConfig], source: str) -> bool:
    """Return whether a verifier of the prompt source compares with a gold answer, so that every row must have one."""
    return any(
        verifier.kind in GOLD or (verifier.kind == "regex" and "{answer}" in verifier.pattern)
        for verifier in verifiers
        if verifier.scores(source)
    )


def needs_row(verifiers: Sequence[VerifierConfig], source: str) -> bool:
    """Return whether a verifier of the prompt source is given the prompt's messages and its row, so that tickets carry them."""
    return any(verifier.kind in OWN for verifier in verifiers if verifier.scores(source))


def check_verifiers(verifiers: Sequence[VerifierConfig], sources: Sequence[Source]) -> None:
    """Raise ValueError unless all prompt sources and verifiers have unique names and every source has a verifier."""
    kinds: dict[str, str] = {}
    for source in sources:
        if source.name in kinds:
            raise ValueError(f'two prompt sources have name = "{source.name}": give each source its own name')
        kinds[source.name] = source.kind
    names = verifier_names(verifiers)
    for index, (name, verifier) in enumerate(zip(names, verifiers, strict=True)):
        check_name(f"verifiers.{index}.name", name)
        if name in names[:index]:
            raise ValueError(f'verifiers.{index}.name = "{name}" is the name of another verifier: give each its own name')
        if isinstance(verifier, RemoteVerifier):
            _check_address(f"verifiers.{index}.url", verifier)
        for source_name in verifier.sources:
            if source_name not in kinds:
                raise ValueError(
                    f'verifiers.{index}.sources names "{source_name}", which is not a prompt source; choose from: '
                    f"{', '.join(kinds)}"
                )
        for source_name, kind in kinds.items():
            if verifier.kind == "reasoning_gym" and kind != "reasoning_gym" and verifier.scores(source_name):
                raise ValueError(
                    f'verifiers.{index}: kind "reasoning_gym" only scores prompts of kind "reasoning_gym", but source '
                    f'"{source_name}" is "{kind}": use another kind, or leave the source out of verifiers.{index}.sources'
                )
    for source in sources:
        if not source.environment and not any(verifier.scores(source.name) for verifier in verifiers):
            raise ValueError(
                f'no verifier scores the prompt source "{source.name}": add it to the `sources` of one, '
                "or add one as [[verifiers]]"
            )
        _check_columns(verifiers, source)


def check_name(key: str, name: str) -> None:
    """Raise ValueError if the scores of a verifier or environment of this name would have the name of another metric."""
    if name in OF_REWARDS:
        raise ValueError(f'{key} = "{name}" is taken by the metric reward/train/{name}: choose another name')


def _check_address(key: str, verifier: RemoteVerifier) -> None:
    if has_login(verifier.url):  # the message does not repeat it
        raise ValueError(f"{key} contains a user name or password: remove them; token names a secret. Write %40 for @ elsewhere")
    try:
        address = urlsplit(verifier.url)
    except ValueError as error:
        url = without_secrets("url", verifier.url)
        raise ValueError(f'{key} = "{url}" is not an address ({error}): correct it') from None
    if not address.hostname:
        raise ValueError(f'{key} = "{verifier.url}" names no host: add it after {address.scheme}://')
    if isinstance(verifier, JudgeConfig) and (address.query or address.fragment):
        raise ValueError(f'{key} = "{verifier.url}" has a part after the path: end it with the path, such as …/v1')


def _check_columns(verifiers: Sequence[VerifierConfig], source: Source) -> None:
    if isinstance(source, FileSource) and source.columns and not source.environment and not needs_row(verifiers, source.name):
        raise ValueError(
            f'columns of source "{source.name}" = {source.columns} has no effect: only verifiers of the kinds '
            f"{', '.join(OWN)} and environments are given a row; remove it"
        )
