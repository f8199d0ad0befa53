"""Drain the generator of this pod and wait until it has exited: `python -m services.generator.drain`.

A cluster runs it before it terminates the pod (docs/kubernetes.md). Guarantees: it returns at once if there is nothing to
drain: a generator that is still loading, idles because its run is over, or does not answer. Waits for: the generator. Unblocked
by: its exit, at the latest `BEYOND_S` after `generator.drain_s`.
"""

from __future__ import annotations

import sys
import time

import httpx

from services.config import ConfigError, RunConfig
from services.http.credentials import api_tokens
from services.http.entry import arguments, report
from services.operations.condition import LOADING
from services.runtime.exits import EXIT_OK

POLL_S = 0.2
ANSWER_LIMIT_S = 5.0
BEYOND_S = 10.0  # after the drain: submitting finished groups, a sync round that includes the pod, leaving the fleet


def drain(config: RunConfig, base_url: str) -> None:
    """Request a drain, and wait until the generator no longer answers. Do nothing if it has not started to work."""
    deadline = time.monotonic() + config.generator.drain_s + BEYOND_S
    headers = {"Authorization": f"Bearer {api_tokens(config).operate}"}
    # This pod, over loopback: past any proxy, which would answer for it.
    with httpx.Client(base_url=base_url, timeout=ANSWER_LIMIT_S, verify=False, trust_env=False) as http:
        try:
            if http.get("/health/ready").json()["phase"] in LOADING:
                return
            asked = http.post("/v1/drain", headers=headers)
            if asked.status_code == httpx.codes.NOT_FOUND:
                return  # it idles, and has only the endpoints of every service
            asked.raise_for_status()
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
