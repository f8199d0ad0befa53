"""Connects to the cluster's API as the pod's own service account, through the official client.

Guarantees: the token is read again every minute, since the cluster rotates it every hour.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.config.config_exception import ConfigException
from kubernetes.aio.config.incluster_config import InClusterConfigLoader

from services.config import ConfigError

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where the cluster mounts the token, its certificate authority and the namespace."""
CALL_LIMIT_S = 10.0
FAILURES = (aiohttp.ClientError, TimeoutError, OSError)


class ClusterError(Exception):
    """The cluster's API refused a call or failed. The message quotes it."""


def in_cluster(what: str, environ: Mapping[str, str], account: Path = ACCOUNT) -> tuple[Configuration, str]:
    """Return how to connect, and the pod's namespace. Raises `ConfigError` outside a cluster; `what` needs one."""
    configuration = Configuration()
    loader: Any = InClusterConfigLoader(
        token_filename=str(account / "token"), cert_filename=str(account / "ca.crt"), environ=dict(environ)
    )
    try:
        loader.load_and_set(configuration)
        namespace = (account / "namespace").read_text(encoding="utf-8").strip()
    except (ConfigException, OSError) as error:
        raise ConfigError(f"{what} needs a cluster and a service account with a mounted token: {error}") from None
    return configuration, namespace
