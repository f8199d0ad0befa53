"""The description and the replies of the tool `python`, wherever the code runs."""

from __future__ import annotations

import signal
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, cast

from services.environment.programs.tools import Callee, shortened
from services.verifiers.sandbox.folder import FOLDER_BYTES, FOLDER_ENTRIES
from services.verifiers.sandbox.script import OUTPUT_BYTES

SHOWN_CHARACTERS = 10_000
DESCRIBED = (
    "Run Python code and return what it prints, and the value of its last expression. Files in the working directory are kept "
    "between calls, variables are not. There is no network."
)
SLOW, FULL, LOUD = "slow", "full", "loud"
"""Ways in which a call ends, besides signals."""
HINTS = {"SIGKILL": ", perhaps for its memory or its processor time"}  # for others, such as SIGXCPU, the description says it


class PythonTool(ABC):
    """The tool `python` of one rollout. Subclasses decide where the code runs."""

    name = "python"

    @property
    def described(self) -> dict[str, Any]:
        """Return its description for chat templates: a JSON schema in OpenAI's form."""
        schema = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}
        return {"type": "function", "function": {"name": self.name, "description": DESCRIBED, "parameters": schema}}

    @property
    def tools(self) -> Sequence[Callee]:
        """Return the tool."""
        return [self]

    @abstractmethod
    async def call(self, arguments: object) -> str:
        """Return the code's output, or the fault."""


def code_of(arguments: object) -> tuple[str, str]:
    """Return the code of a call, and the fault of its arguments, or ""."""
    code = cast("dict[str, Any]", arguments).get("code") if isinstance(arguments, dict) else None
    if isinstance(code, str):
        return code, ""
    return "", "Error: code: Field required" if code is None else "Error: code: Input should be a valid string"


def told(output: str, fault: str, limit_s: float) -> str:
    """Return the reply to a call: the code's output, and what ended it."""
    meaning = {
        "": "",
        SLOW: f"the code ran longer than {limit_s:g} s",
        FULL: f"the working directory may have {FOLDER_BYTES >> 20} MiB and {FOLDER_ENTRIES} entries, all of them readable; "
        "it was emptied",
        LOUD: f"the code printed more than {OUTPUT_BYTES >> 20} MiB",
    }
    said = meaning[fault] if fault in meaning else f"the code was killed by {_described(fault)}"
    return "\n".join(filter(None, [shortened(output.rstrip(), SHOWN_CHARACTERS), f"Error: {said}" if said else ""]))


def signal_name(number: int) -> str:
    """Return the name of a signal; most real-time signals have none."""
    return next((each.name for each in signal.Signals if each == number), f"signal {number}")


def _described(name: str) -> str:
    known = signal.Signals.__members__.get(name)
    return name if known is None else f"{name} ({signal.strsignal(known)}){HINTS.get(name, '')}"
