"""What all kinds of environment share: the interface of their programs, the libraries they need, a client of the policy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from services.environment.programs.frames import ProgramSetup
from services.environment.programs.loaded import LoadedProgram
from services.runtime.own_code import Unusable

if TYPE_CHECKING:
    from openai import AsyncOpenAI

LIBRARIES = {
    "mcp": ("mcp", "mcp>=2"), "agent": ("openai", "openai>=2"), "verifiers": ("verifiers", "verifiers>=0.4,<0.5"),
}  # fmt: skip
"""Kind -> the module that it needs, and what to install."""


class Kind:
    """The programs of an environment. A kind of environment is a subclass."""

    def __init__(self, setup: ProgramSetup) -> None:
        self._setup = setup

    async def open(self) -> None:
        """Load everything that the rollouts need. Raises `Unusable`, and whatever its code raises."""

    async def close(self) -> None:
        """Free what `open` took."""

    def shared_tools(self) -> list[dict[str, Any]]:
        """Return the descriptions of the tools that all rollouts have."""
        return []

    def program(self, rollout: str) -> LoadedProgram:
        """Return the program of a rollout that replies to the policy."""
        raise Unusable(f"an environment of kind {self._setup.kind} calls the policy itself")

    async def run(self, given: Any) -> dict[str, float] | None:
        """Run a rollout that calls the policy itself; return its reward as `score` and its parts, or None if it gives none."""
        raise Unusable(f"an environment of kind {self._setup.kind} replies to the policy")

    async def rows(self, start: int, count: int, evaluation: bool, limited: bool) -> list[dict[str, Any]]:
        """Return up to `count` rows of the environment's own data from number `start`; fewer at the end of the data."""
        raise Unusable(f"an environment of kind {self._setup.kind} has no rows of its own")


def policy_client(given: Any) -> AsyncOpenAI:
    """Return a client that calls the policy for the rollout passed to `run`."""
    from openai import AsyncOpenAI, DefaultAsyncHttpxClient

    # A door on the loopback interface: without TLS, whose certificates take longer to load than most requests, and proxies.
    http = DefaultAsyncHttpxClient(verify=False, trust_env=False)
    return AsyncOpenAI(base_url=given["url"], api_key=given["key"], max_retries=0, timeout=None, http_client=http)
