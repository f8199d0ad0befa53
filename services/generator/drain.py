"""Drain the generator of this pod and wait until it has exited: `python -m services.generator.drain`.

A cluster runs it before it ends the pod (docs/kubernetes.md).
Waits for: the generator. Unblocked by: its exit, at the latest `BEYOND_S` after `generator.drain_s`; a generator that does not
answer is not waited for.
"""

from __future__ import annotations

import sys
import time

import httpx

from services.config import ConfigError, RunConfig
from services.runtime.entry import EXIT_OK, arguments, report
from services.runtime.http.credentials import api_tokens

POLL_S = 0.2
ANSWER_LIMIT_S = 5.0
BEYOND_S = 10.0  # after the drain: submitting finished groups, a sync round that includes the pod, leaving the fleet


def drain(config: RunConfig, base_url: str) -> None:
    """Request a drain, and wait until the generator no longer answers."""
    deadline = time.monotonic() + config.generator.drain_s + BEYOND_S
    headers = {"Authorization": f"Bearer {api_tokens(config).operate}"}
    with httpx.Client(base_url=base_url, timeout=ANSWER_LIMIT_S, verify=False) as http:  # this pod, over loopback
        try:
            http.post("/v1/drain", headers=headers).raise_for_status()
            while time.monotonic() < deadline:
                http.get("/health/live")
                time.sleep(POLL_S)
        except httpx.TransportError:
            return  # it has exited


def main() -> int:
    """Drain this pod and return the exit code."""
    try:
        config = arguments("generator").config
        scheme = "https" if config.api.certificate_file else "http"
        drain(config, f"{scheme}://127.0.0.1:{config.api.port}")
    except (ConfigError, httpx.HTTPStatusError) as error:
        return report(error)
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
