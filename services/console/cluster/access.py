"""Reaches the pods of a release through a context of the user's kubeconfig.

Guarantees: a refusal by the cluster, or an unreachable cluster, is a `ConsoleError` of one line.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from services.console.errors import EXIT_CONFIG, EXIT_FAILED, ConsoleError
from services.console.options import KUBE_CONTEXT

INSTANCE, COMPONENT = "app.kubernetes.io/instance", "app.kubernetes.io/component"


@dataclass(frozen=True)
class Remote:
    """A command for a release on a cluster."""

    context: str
    namespace: str
    """Empty: the context's own."""
    command: list[str]
    """The arguments without those above."""


async def access(given: Remote) -> tuple[Any, str]:
    """Return how the context reaches its cluster, and the namespace."""
    try:
        from kubernetes.aio.client.configuration import Configuration
        from kubernetes.aio.config import (
            KUBE_CONFIG_DEFAULT_LOCATION,
            ConfigException,
            list_kube_config_contexts,
            load_kube_config,
        )
    except ImportError as error:
        raise ConsoleError(f"{KUBE_CONTEXT} needs {error.name}: pip install 'grpo[cluster]'", EXIT_CONFIG) from None
    configuration: Any = Configuration()
    try:
        file = os.environ.get("KUBECONFIG") or KUBE_CONFIG_DEFAULT_LOCATION  # the library reads the variable as it is imported
        await load_kube_config(file, given.context, client_configuration=configuration)
        contexts: Any = list_kube_config_contexts(file)[0]
    except (ConfigException, OSError) as error:
        raise ConsoleError(f"{KUBE_CONTEXT} {given.context}: {error}", EXIT_CONFIG) from None
    own = next((each["context"].get("namespace") for each in contexts if each["name"] == given.context), "")
    return configuration, given.namespace or own or "default"


async def pods_of(configuration: Any, namespace: str, release: str) -> Sequence[Any]:
    """Return the pods of a release."""
    from kubernetes.aio.client.api.core_v1_api import CoreV1Api
    from kubernetes.aio.client.api_client import ApiClient

    async with ApiClient(configuration) as client:
        pods: Any = CoreV1Api(client)
        return (await pods.list_namespaced_pod(namespace, label_selector=f"{INSTANCE}={release}")).items


@contextlib.contextmanager
def explained(where: str) -> Iterator[None]:
    """Raise `ConsoleError` if the cluster refuses, or cannot be reached."""
    import aiohttp
    from kubernetes.aio.client.exceptions import ApiException

    try:
        yield
    except ApiException as error:
        refused: Any = error
        raise ConsoleError(f"the cluster refused: {refused.status} {refused.reason} ({where})", EXIT_FAILED) from None
    except aiohttp.ClientError as error:
        raise ConsoleError(f"the cluster cannot be reached: {error} ({where})", EXIT_FAILED) from None


@contextlib.asynccontextmanager
async def opened(configuration: Any, path: str, query: Sequence[tuple[str, str]]) -> AsyncIterator[Any]:
    """Open a WebSocket of a pod."""
    from kubernetes.aio.stream import WsApiClient

    place = f"{configuration.host}{path}"
    async with WsApiClient(configuration) as client:  # its generated methods wait for the end, and lose the exit code
        headers: dict[str, str] = {}
        await client.update_params_for_auth(headers, [], ["BearerToken"], place, "GET", None)
        connecting: Any = await client.request("GET", place, query_params=query, headers=headers, _preload_content=False)
        async with connecting as socket:
            yield socket


def chosen(pods: Sequence[Any], components: Sequence[str], volume: str = "") -> tuple[str, str] | None:
    """Return the component and the name of the pod to run in; None: no pod of the `components` runs and mounts `volume`.

    It is one that is ready, or else one that runs; of these the first in the order of the components, then by name.
    """

    def rank(pod: Any) -> tuple[bool, int, str]:
        ready = any(each.type == "Ready" and each.status == "True" for each in pod.status.conditions or [])
        return not ready, components.index(pod.metadata.labels.get(COMPONENT)), pod.metadata.name

    there = [
        pod
        for pod in pods
        if pod.status.phase == "Running"
        and pod.metadata.deletion_timestamp is None
        and pod.metadata.labels.get(COMPONENT) in components
        and (not volume or any(each.name == volume for each in pod.spec.volumes or []))
    ]
    first = min(map(rank, there), default=None)
    return None if first is None else (components[first[1]], first[2])
