#!/opt/grpo/bin/python
"""Check whether this container's service is alive. For Docker's health check; Kubernetes probes the same endpoint directly."""

from __future__ import annotations

import os
import ssl
import sys
import tomllib
import urllib.request


def main() -> int:
    """Exit with code 0 if every loop makes progress."""
    with open(os.environ["GRPO_CONFIG"], "rb") as file:
        api = tomllib.load(file).get("api", {})
    scheme = "https" if api.get("certificate_file") else "http"
    own = ssl._create_unverified_context()  # the container itself, over loopback
    with urllib.request.urlopen(f"{scheme}://127.0.0.1:{api.get('port', 0)}/health/live", timeout=5, context=own) as answer:
        return 0 if answer.status == 200 else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (OSError, KeyError, ValueError) as error:
        sys.exit(f"unhealthy: {error}")
