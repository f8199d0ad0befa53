"""What environments ask the service that keeps sandboxes for, and its replies: msgpack over `POST`.

Guarantees: every request may be sent again. `OpenSandbox` finds the sandbox that it has opened before, `RunCode` attaches to the
call that it has begun, and `CloseSandbox` finds nothing left to do.
"""

from __future__ import annotations

import hashlib
import hmac

import msgspec

OPEN, RUN, CLOSE = "/v1/sandboxes/open", "/v1/sandboxes/run", "/v1/sandboxes/close"
URL_ENV = "GRPO_SANDBOX_URL"
"""Variable with the address of the service. Where it is set, code that the policy writes runs in sandboxes."""
REQUEST_BYTES = 2 << 20
"""Most bytes of a request: the code, and the files of a rollout that is continued."""


class SandboxName(msgspec.Struct, frozen=True, array_like=True):
    """Names a sandbox: a rollout's program has one, and a program that takes its place has another."""

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
    """Give the rollout a sandbox in which nothing has run; those that it had before are deleted."""

    name: SandboxName
    wait_s: float


class SandboxOpened(msgspec.Struct, array_like=True):
    """The sandbox is ready, or why it is not yet."""

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
    """By path, in base85: written before the code runs."""


class CodeDone(msgspec.Struct, array_like=True):
    """What came of a call."""

    output: str = ""
    fault: str = ""
    """What ended it: `slow`, `full`, `loud`, or the name of a signal."""
    files: dict[str, str] | None = None
    """The contents of its folder; None: too many."""
    ended: str = ""
    """Why the sandbox has ended by what the code did."""
    lost: str = ""
    """Why it is unknown what came of the call: the sandbox was lost."""
    suspected: bool = False
    """Whether the code may be why it was lost."""


class CloseSandbox(msgspec.Struct, array_like=True):
    """Delete a sandbox."""

    name: SandboxName


def derived_token(operate: str) -> str:
    """Return the token for sandboxes alone, which programs may have that must not operate the run."""
    return hmac.new(operate.encode(), b"sandboxes", hashlib.sha256).hexdigest()
