"""Requests of environments to the sandbox service, and its replies: msgpack over `POST`.

Guarantees: every request may be repeated. `OpenSandbox` then finds the sandbox it opened before, `RunCode` attaches to the call
it started, and `CloseSandbox` has nothing left to do.
"""

from __future__ import annotations

import hashlib
import hmac

import msgspec

OPEN, RUN, CLOSE = "/v1/sandboxes/open", "/v1/sandboxes/run", "/v1/sandboxes/close"
URL_ENV = "GRPO_SANDBOX_URL"
"""Variable with the address of the service. Where it is set, code that the policy writes runs in sandboxes."""
REQUEST_BYTES = 2 << 20
"""Maximum size of a request in bytes: the code, and the files of a continued rollout."""


class SandboxName(msgspec.Struct, frozen=True, array_like=True):
    """Names a sandbox: each program of a rollout has its own, including one that replaces another."""

    rollout: str  # <ticket>.<fence of its claim>.<sample>.<restarts>
    attempt: str  # random: of the program

    @property
    def whole(self) -> str:
        """Return the name as one text."""
        return f"{self.rollout}.{self.attempt}"

    @property
    def parts(self) -> tuple[str, str, str]:
        """Return the ticket, the fence of its claim, and the sample. Raises ValueError for a name that is not a rollout's."""
        ticket, *numbers = self.rollout.rsplit(".", 3)
        if len(numbers) != 3 or not all(each.isdecimal() and each.isascii() for each in numbers):
            raise ValueError(f"{self.rollout!r} names no rollout")
        return ticket, numbers[0], numbers[1]


class OpenSandbox(msgspec.Struct, array_like=True):
    """Give the rollout a fresh sandbox; its earlier ones are deleted."""

    name: SandboxName
    wait_s: float


class SandboxOpened(msgspec.Struct, array_like=True):
    """Whether the sandbox is ready, or why not yet."""

    pod: str = ""
    why_not: str = ""


class RunCode(msgspec.Struct, array_like=True):
    """Run code in a sandbox, once: a call with the same number is the same call."""

    name: SandboxName
    pod: str
    call: int
    code: str
    limit_s: float
    memory_mib: int
    files: dict[str, str] | None = None
    """Files by path, in base85, written before the code runs."""


class CodeDone(msgspec.Struct, array_like=True):
    """The result of a call."""

    output: str = ""
    fault: str = ""
    """What ended it: `slow`, `full`, `loud`, or the name of a signal."""
    files: dict[str, str] | None = None
    """The contents of its folder; None: too many."""
    ended: str = ""
    """Why the code ended the sandbox."""
    lost: str = ""
    """Why the call's result is unknown: the sandbox was lost."""
    suspected: bool = False
    """Whether the code may have caused the loss."""


class CloseSandbox(msgspec.Struct, array_like=True):
    """Delete a sandbox."""

    name: SandboxName


def derived_token(operate: str) -> str:
    """Return the token that is valid only for sandboxes, for programs that must not operate the run."""
    return hmac.new(operate.encode(), b"sandboxes", hashlib.sha256).hexdigest()
