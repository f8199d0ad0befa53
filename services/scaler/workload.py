"""The `/scale` subresource of one Deployment or StatefulSet, through the official client with the pod's own service account.

Guarantees: only get and patch are used, on objects that are named, and the chart's Role allows no more; a change by another
client since the last read is never overwritten; the token is read again every minute, since the cluster rotates it every hour.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, Literal, Self

import aiohttp
from kubernetes.aio.client.api.apps_v1_api import AppsV1Api
from kubernetes.aio.client.api_client import ApiClient
from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.config.config_exception import ConfigException
from kubernetes.aio.config.incluster_config import InClusterConfigLoader

from services.config import ConfigError

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where the cluster mounts the token, its certificate authority and the namespace."""

CALL_LIMIT_S = 10.0
PATCH = "application/merge-patch+json"
MANAGER = "grpo-scaler"
"""Name under which the cluster records that the scaler set a number."""
FAILURES = (aiohttp.ClientError, TimeoutError, OSError)

Kind = Literal["deployment", "stateful_set"]


class ClusterError(Exception):
    """The cluster's API refused a call or failed. The message quotes it."""


class WorkloadChanged(ClusterError):
    """Another client changed the object since it was read."""


@dataclass(frozen=True)
class Replicas:
    """The number of replicas that one version of an object specifies."""

    count: int
    version: str
    uid: str = ""
    """Identifies the object: one that is deleted and created again has another."""


class KubernetesApi:
    """The cluster's API, as far as the scaler uses it."""

    def __init__(self, apps: AppsV1Api, namespace: str) -> None:
        self.apps: Any = apps  # the client's own types are incomplete
        self.namespace = namespace

    @classmethod
    def in_cluster(cls, environ: Mapping[str, str], account: Path = ACCOUNT) -> Self:
        """Connect as the pod's service account. Raises `ConfigError` outside a cluster."""
        configuration = Configuration()
        loader: Any = InClusterConfigLoader(
            token_filename=str(account / "token"), cert_filename=str(account / "ca.crt"), environ=dict(environ)
        )
        try:
            loader.load_and_set(configuration)
            namespace = (account / "namespace").read_text(encoding="utf-8").strip()
        except (ConfigException, OSError) as error:
            raise ConfigError(f"the scaler needs a cluster and a service account with a mounted token: {error}") from None
        return cls(AppsV1Api(ApiClient(configuration)), namespace)

    async def close(self) -> None:
        """Close the connections."""
        await self.apps.api_client.close()

    def workload(self, kind: Kind, name: str) -> Workload:
        """Return the Deployment or StatefulSet `name` in the pod's own namespace."""
        return Workload(self, kind, name)


class Workload:
    """Reads and sets the replicas of a Deployment or StatefulSet."""

    def __init__(self, cluster: KubernetesApi, kind: Kind, name: str) -> None:
        self._cluster, self._kind, self.name = cluster, kind, name

    async def replicas(self) -> Replicas:
        """Return the specified replicas. Raises `ClusterError`."""
        read: Any = getattr(self._cluster.apps, f"read_namespaced_{self._kind}_scale")
        return self._read(await self._call(read))

    async def scale(self, count: int, seen: Replicas) -> None:
        """Set the replicas to `count`. Raises `WorkloadChanged` if the object changed since `seen`."""
        body = {"metadata": {"resourceVersion": seen.version}, "spec": {"replicas": count}}
        patch: Any = getattr(self._cluster.apps, f"patch_namespaced_{self._kind}_scale")
        await self._call(patch, body=body, field_manager=MANAGER, _content_type=PATCH)

    async def _call(self, method: Any, **arguments: Any) -> Any:
        try:
            return await method(self.name, self._cluster.namespace, _request_timeout=CALL_LIMIT_S, **arguments)
        except ApiException as error:
            refused: Any = error
            said = f"{method.__name__} {self.name}: {refused.status} {str(refused.body or refused.reason)[:300]}"
            raise (WorkloadChanged if refused.status == HTTPStatus.CONFLICT else ClusterError)(said) from None
        except FAILURES as error:
            raise ClusterError(f"{method.__name__} {self.name}: {str(error) or type(error).__name__}") from None

    def _read(self, found: Any) -> Replicas:
        if found.metadata is None or not found.metadata.resource_version:
            raise ClusterError(f"the cluster's answer about {self.name} is not a Scale")
        count = found.spec.replicas if found.spec else None
        return Replicas(count or 0, found.metadata.resource_version, found.metadata.uid or "")  # 0 is omitted
