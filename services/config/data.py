"""What is asked and how an answer is judged: prompt sources and verifiers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from services.config.base import Section


def _pattern(text: str, groups: int = 0) -> str:
    """`text` if it is a regular expression with at least so many groups, or empty."""
    try:
        compiled = re.compile(text)
    except re.error as error:
        raise ValueError(f"is not a regular expression ({error}); mend it") from None
    if text and compiled.groups < groups:
        raise ValueError("has no group; put the part that is the answer in parentheses")
    return text


class NamedSource(Section):
    """What every prompt source has."""

    name: str = Field(default="main", pattern=r"^[A-Za-z0-9_.-]+$")
    """Name of the source, unique in the run: verifiers and metrics call it so."""
    weight: float = Field(default=1.0, gt=0)
    """Share of the prompts, over the sum of all sources' weights."""


class FileSource(NamedSource):
    """Prompts from a JSONL or parquet file, one row a prompt."""

    kind: Literal["jsonl", "parquet"]
    """`jsonl` (one JSON object a line) or `parquet`."""
    path: str
    """The file. Relative paths start at the working directory."""
    prompt_field: str = "prompt"
    """Field that holds the question: a string, or a list of chat messages with `role` and `content`."""
    answer_field: str = "answer"
    """Field that holds the gold answer, a string."""
    answer_pattern: str = ""
    """Regular expression whose first group is the answer within the field, e.g. `####\\s*(.+)` for GSM8K; empty: all of it."""

    @field_validator("answer_pattern")
    @classmethod
    def _captures(cls, text: str) -> str:
        return _pattern(text, groups=1)


class ReasoningGymSource(NamedSource):
    """Prompts made by a task of the reasoning-gym library; its own scorer is the verifier `reasoning_gym`."""

    kind: Literal["reasoning_gym"]
    """`reasoning_gym`."""
    task: str
    """Name of the task, e.g. `basic_arithmetic`."""
    size: int = Field(default=10_000, ge=1)
    """Number of prompts of an epoch."""
    seed: int = 0
    """Seed of the task's generator."""
    options: dict[str, Any] = {}
    """Further options of the task, as reasoning-gym documents them."""


Source = Annotated[FileSource | ReasoningGymSource, Field(discriminator="kind")]


class Data(Section):
    """Where prompts come from and how they become tokens."""

    sources: list[Source] = Field(min_length=1)
    """The prompt sources; `kind` is `jsonl`, `parquet` or `reasoning_gym`. Several are mixed by their weights."""
    system_prompt: str = ""
    """System message put before every string prompt; empty: none."""
    user_template: str = "{prompt}"
    """Text of the user message; `{prompt}` stands for the question."""
    chat_template: bool = True
    """Render messages with the tokenizer's chat template; off: the user message is tokenised as it stands."""
    chat_template_options: dict[str, Any] = {}
    """Further variables for the chat template, e.g. `enable_thinking = false`."""
    max_prompt_tokens: int = Field(default=1024, ge=1)
    """Longest prompt in tokens. No prompt is ever cut."""
    long_prompts: Literal["error", "drop"] = "error"
    """A prompt longer than that is an `error` before the run starts, or its row is left out (`drop`) and counted in the log."""
    shuffle: bool = True
    """Permute the rows of each epoch of a source, seeded by (run.seed, epoch)."""
    curriculum: str = Field(default="", pattern=r"^([A-Za-z_][\w.]*:[A-Za-z_]\w*)?$")
    """`package.module:function` that chooses and orders the rows of every epoch (docs/data.md); empty: their seeded order."""


class VerifierConfig(Section):
    """One way to score a completion. The scores of all verifiers of a prompt source add up, each times its weight."""

    kind: Literal["math", "exact", "regex", "reasoning_gym"]
    """`math`: equal as mathematics; `exact`: equal text; `regex`: the pattern matches; `reasoning_gym`: the task's own scorer."""
    weight: float = 1.0
    """Factor of the score, which lies in 0..1, in the reward."""
    timeout_s: float = Field(default=5.0, gt=0)
    """Time limit of one call; past it the worker is killed and the ticket retried."""
    extract: str = ""
    """`exact` and `reasoning_gym`: regular expression whose first group, in its last match, is the answer within the
    completion; empty: the whole completion."""
    pattern: str = ""
    """`regex`: the pattern; `{answer}` stands for the escaped gold answer."""
    sources: list[str] = []
    """Names of the prompt sources whose completions it scores; empty: all."""

    @field_validator("extract")
    @classmethod
    def _captures(cls, text: str) -> str:
        return _pattern(text, groups=1)

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, text: str) -> str:
        _pattern(text.replace("{answer}", "answer"))
        return text

    def scores(self, source: str) -> bool:
        """Whether it scores completions of the prompt source of that name."""
        return not self.sources or source in self.sources


def verifier_names(verifiers: Sequence[VerifierConfig]) -> list[str]:
    """One name for each of the run's verifiers: its kind; the second of a kind is `kind-2`, and so on."""
    seen: dict[str, int] = {}
    names = []
    for verifier in verifiers:
        count = seen[verifier.kind] = seen.get(verifier.kind, 0) + 1
        names.append(verifier.kind if count == 1 else f"{verifier.kind}-{count}")
    return names


def check_verifiers(verifiers: Sequence[VerifierConfig], sources: Sequence[Source]) -> None:
    """Raise ValueError unless the names of `sources`, all prompt sources of the run, are unique and each can be scored."""
    kinds: dict[str, str] = {}
    for source in sources:
        if source.name in kinds:
            raise ValueError(f'two prompt sources have name = "{source.name}": give each a name of its own')
        kinds[source.name] = source.kind
    for index, verifier in enumerate(verifiers):
        for name in verifier.sources:
            if name not in kinds:
                raise ValueError(
                    f'verifiers.{index}.sources names "{name}", which is no prompt source; there are: {", ".join(kinds)}'
                )
        for name, kind in kinds.items():
            if verifier.kind == "reasoning_gym" and kind != "reasoning_gym" and verifier.scores(name):
                raise ValueError(
                    f'verifiers.{index}: kind "reasoning_gym" scores prompts of kind "reasoning_gym", and source "{name}" is '
                    f'"{kind}": use "math", "exact" or "regex", or leave it out of verifiers.{index}.sources'
                )
    for name in kinds:
        if not any(verifier.scores(name) for verifier in verifiers):
            raise ValueError(f'no verifier scores the prompt source "{name}": add it to the `sources` of one')
