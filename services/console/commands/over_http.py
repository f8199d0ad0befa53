"""Controls a run through a service's endpoints when its Redis is unreachable: `--api`, and `grpo drain`.

Guarantees: a request that a service refuses prints one line and sets an exit code; a wait that times out is exit code 1.
"""

from __future__ import annotations

import getpass
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from services.config import RunConfig, load_resolved
from services.console.attach import attach, find
from services.console.client import ApiError, Client
from services.console.errors import EXIT_CONFIG, EXIT_FAILED, EXIT_OK, ConsoleError
from services.runtime.http.credentials import API_TOKEN_ENV, api_tokens
from services.store.records import PauseMode


@dataclass(frozen=True)
class Endpoint:
    """The address and credentials given with `--api`."""

    url: str
    token_file: str = ""
    ca_file: str = ""


@contextmanager
def reached(endpoint: Endpoint, run: str = "") -> Iterator[Client]:
    """Open a client with the run's token: from `--token-file`, the environment, or the run's folder."""
    folder = find(run)
    config = load_resolved(folder.config) if folder else None
    ca_file = endpoint.ca_file or (config.api.ca_file if config else "")
    server_name = config.api.server_name if config else ""
    try:
        with Client(endpoint.url, _token(endpoint.token_file, config), ca_file, server_name) as client:
            yield client
    except ApiError as error:
        raise ConsoleError(str(error), EXIT_CONFIG if 0 < error.status < 500 else EXIT_FAILED) from None


def _token(path: str, config: RunConfig | None) -> str:
    if path:
        try:
            return Path(path).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConsoleError(f"--token-file {path} cannot be read: {error}", EXIT_CONFIG) from None
    if given := os.environ.get(API_TOKEN_ENV, "").strip():
        return given
    if config is None:
        raise ConsoleError(
            f"no token: give --token-file, set {API_TOKEN_ENV}, or name a run whose folder is on this machine", EXIT_CONFIG
        )
    return api_tokens(config).operate


def pause(endpoint: Endpoint, run: str, roles: Sequence[str], mode: PauseMode, why: str, wait_s: float) -> int:
    """Pause roles."""
    left: list[str] = []
    with reached(endpoint, run) as client:
        for role in roles:
            given: PauseMode = mode if role == "generator" else "keep"
            left += client.pause(role, given, why, getpass.getuser(), wait_s).waiting_for
    return concluded(f"{', '.join(roles)} paused", left, wait_s)


def resume(endpoint: Endpoint, run: str, roles: Sequence[str], wait_s: float) -> int:
    """Resume roles."""
    with reached(endpoint, run) as client:
        left = [name for role in roles for name in client.resume(role, wait_s).waiting_for]
    return concluded(f"{', '.join(roles)} resumed", left, wait_s)


def scale(endpoint: Endpoint, run: str, generators: int, why: str) -> int:
    """Set the number of generators."""
    with reached(endpoint, run) as client:
        client.scale(generators, why, getpass.getuser())
    return concluded(f"desired generators set to {generators}")


def stop(endpoint: Endpoint, run: str, why: str) -> int:
    """End the run early. The endpoint is dataprep's."""
    with reached(endpoint, run) as client:
        client.stop_run(why, getpass.getuser())
    return concluded("stop requested: the trainer finishes its step, saves and ends the run")


async def drain(pod: str, run: str, wait_s: float) -> int:
    """Drain a generator, found by its name in the fleet: it finishes its work, leaves the fleet and exits."""
    async with attach(run) as attached:
        pods = {
            status.name: status for status in await attached.store.fleet.members(attached.ttl_s) if status.kind == "generator"
        }
        config = attached.config
    if pod not in pods:
        raise ConsoleError(
            f"run {attached.name} has no generator {pod!r}; existing: {', '.join(sorted(pods)) or 'none'}", EXIT_CONFIG
        )
    endpoint = Endpoint(pods[pod].url, ca_file=config.api.ca_file if config else "")
    with reached(endpoint, run) as client:
        left = client.drain(wait_s).rollouts
    return concluded(f"{pod} is draining: it claims no more tickets", [f"{left} tickets of {pod}"] if left else [], wait_s)


def concluded(what: str, left: Sequence[str] = (), wait_s: float = 0.0) -> int:
    """Print the result of a request and return the exit code."""
    if wait_s and left:
        print(f"{what}; timed out after {wait_s:g} s waiting for {', '.join(left)}")
        return EXIT_FAILED
    print(what)
    return EXIT_OK
