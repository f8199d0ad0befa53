"""The cluster's API as far as the scaler uses it, through the official client with the pod's own service account: `/scale` of a
Deployment, StatefulSet or LeaderWorkerSet, and notes in a ConfigMap.

Guarantees: only get and patch are used, on objects that are named, and the chart's Role allows no more; a change by another
client since the last read is never overwritten.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, Self

import aiohttp
from kubernetes.aio.client.api.core_v1_api import CoreV1Api
from kubernetes.aio.client.api.custom_objects_api import CustomObjectsApi
from kubernetes.aio.client.api_client import ApiClient
from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.config.config_exception import ConfigException
from kubernetes.aio.config.incluster_config import InClusterConfigLoader

from services.config import ConfigError

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where the cluster mounts the token, its certificate authority and the namespace."""
CALL_LIMIT_S = 10.0
FAILURES = (aiohttp.ClientError, TimeoutError, OSError)
PATCH = "application/merge-patch+json"
MANAGER = "grpo-scaler"
"""Name under which the cluster records that the scaler set a number."""


KINDS = {
    "Deployment": ("apps", "v1", "deployments"),
    "StatefulSet": ("apps", "v1", "statefulsets"),
    "LeaderWorkerSet": ("leaderworkerset.x-k8s.io", "v1", "leaderworkersets"),
}
"""What can be scaled: group, version and plural name of its objects in the API."""


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
    """Identifies the object: it changes if the object is deleted and recreated."""


class KubernetesApi:
    """The cluster's API, as far as the scaler uses it."""

    def __init__(self, client: ApiClient, namespace: str) -> None:
        self._client, self.namespace = client, namespace
        self.objects: Any = CustomObjectsApi(client)  # the client's own types are incomplete; this one takes any kind
        self._core: Any = CoreV1Api(client)

    @classmethod
    def in_cluster(cls, environ: Mapping[str, str], account: Path = ACCOUNT) -> Self:
        """Connect as the pod's service account, whose token is read again every minute. Raises `ConfigError` elsewhere."""
        configuration = Configuration()
        loader: Any = InClusterConfigLoader(
            token_filename=str(account / "token"), cert_filename=str(account / "ca.crt"), environ=dict(environ)
        )
        try:
            loader.load_and_set(configuration)
            namespace = (account / "namespace").read_text(encoding="utf-8").strip()
        except (ConfigException, OSError) as error:
            raise ConfigError(f"the scaler needs a cluster and a service account with a mounted token: {error}") from None
        return cls(ApiClient(configuration), namespace)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    def workload(self, kind: str, name: str) -> Workload:
        """Return the object `name` of a kind (`KINDS`) in the pod's own namespace."""
        return Workload(self, kind, name)

    async def notes(self, name: str) -> dict[str, str]:
        """Return the data of a ConfigMap. Raises `ClusterError`."""
        found = await called(f"read ConfigMap {name}", self._core.read_namespaced_config_map, name, self.namespace)
        return dict(found.data or {})

    async def note(self, name: str, key: str, text: str | None) -> None:
        """Set a key of a ConfigMap, or remove it. Raises `ClusterError`."""
        patch, body = self._core.patch_namespaced_config_map, {"data": {key: text}}
        await called(
            f"patch ConfigMap {name}", patch, name, self.namespace, body=body, field_manager=MANAGER, _content_type=PATCH
        )


class Workload:
    """Reads and sets the replicas of one object."""

    def __init__(self, cluster: KubernetesApi, kind: str, name: str) -> None:
        self._objects, self.kind, self.name = cluster.objects, kind, name
        group, version, plural = KINDS[kind]
        self._place = (group, version, cluster.namespace, plural, name)

    async def replicas(self) -> Replicas:
        """Return the specified replicas. Raises `ClusterError`."""
        found = await called(f"read {self.kind} {self.name}", self._objects.get_namespaced_custom_object_scale, *self._place)
        match found:
            case {"metadata": {"resourceVersion": str(version), **metadata}, "spec": {**spec}}:
                return Replicas(spec.get("replicas") or 0, version, str(metadata.get("uid") or ""))  # 0 is omitted
            case _:
                raise ClusterError(f"the cluster's answer about {self.kind} {self.name} is not a Scale")

    async def scale(self, count: int, seen: Replicas) -> None:
        """Set the replicas to `count`. Raises `WorkloadChanged` if the object changed since `seen`."""
        body = {"metadata": {"resourceVersion": seen.version}, "spec": {"replicas": count}}
        patch = self._objects.patch_namespaced_custom_object_scale
        await called(f"scale {self.kind} {self.name}", patch, *self._place, body=body, field_manager=MANAGER, _content_type=PATCH)


async def called(what: str, method: Any, *arguments: Any, **options: Any) -> Any:
    """Return the result of an API call. Raises `ClusterError`, which begins with `what`."""
    try:
        return await method(*arguments, _request_timeout=CALL_LIMIT_S, **options)
    except ApiException as error:
        refused: Any = error
        said = f"{what}: {refused.status} {str(refused.body or refused.reason)[:300]}"
        raise (WorkloadChanged if refused.status == HTTPStatus.CONFLICT else ClusterError)(said) from None
    except FAILURES as error:
        raise ClusterError(f"{what}: {str(error) or type(error).__name__}") from None
