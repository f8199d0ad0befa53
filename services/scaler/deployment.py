"""The `/scale` subresource of one Deployment, accessed through the cluster's API with the pod's own service account.

Guarantees: only get and patch are used, on one object, and the chart's Role allows no more; a change by another client since the
last read is never overwritten; the token is read for each call, since the cluster rotates it every hour.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Self

import httpx

from services.config import ConfigError

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where the cluster mounts the token, its certificate authority and the namespace."""

CALL_LIMIT_S = 10.0
PATCH = {"Content-Type": "application/merge-patch+json"}


class ClusterError(Exception):
    """The cluster's API refused a call or failed. The message quotes it."""


class DeploymentChanged(ClusterError):
    """Another client changed the Deployment since it was read."""


@dataclass(frozen=True)
class Replicas:
    """The number of replicas that one version of the object specifies."""

    count: int
    version: str


class Deployment:
    """Reads and sets the replicas of a Deployment."""

    def __init__(self, http: httpx.AsyncClient, path: str, token_file: Path) -> None:
        self._http, self._path, self._token_file = http, path, token_file

    @classmethod
    def in_cluster(cls, name: str, environ: Mapping[str, str], account: Path = ACCOUNT) -> Self:
        """Return the Deployment `name` in the pod's own namespace. Raises `ConfigError` outside a cluster."""
        try:
            address = f"https://{_bracketed(environ['KUBERNETES_SERVICE_HOST'])}:{environ['KUBERNETES_SERVICE_PORT']}"
            namespace = (account / "namespace").read_text(encoding="utf-8").strip()
            trusted = ssl.create_default_context(cafile=str(account / "ca.crt"))
        except (KeyError, OSError) as error:
            raise ConfigError(f"the scaler needs a cluster and a service account with a mounted token: {error}") from None
        http = httpx.AsyncClient(base_url=address, verify=trusted, timeout=CALL_LIMIT_S)
        return cls(http, f"/apis/apps/v1/namespaces/{namespace}/deployments/{name}/scale", account / "token")

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def replicas(self) -> Replicas:
        """Return the specified replicas. Raises `ClusterError`."""
        return _read(await self._call("GET", {}, None))

    async def scale(self, count: int, seen: Replicas) -> None:
        """Set the replicas to `count`. Raises `DeploymentChanged` if the Deployment changed since `seen`."""
        body = {"metadata": {"resourceVersion": seen.version}, "spec": {"replicas": count}}
        await self._call("PATCH", PATCH, body)

    async def _call(self, method: str, headers: Mapping[str, str], body: object) -> httpx.Response:
        bearer = {"Authorization": f"Bearer {self._token_file.read_text(encoding='utf-8').strip()}"}
        try:
            answer = await self._http.request(method, self._path, headers={**bearer, **headers}, json=body)
        except httpx.HTTPError as error:
            raise ClusterError(f"{method} {self._path}: {str(error) or type(error).__name__}") from None
        if answer.status_code == HTTPStatus.CONFLICT:
            raise DeploymentChanged(f"{method} {self._path}: {_said(answer)}")
        if answer.is_error:
            raise ClusterError(f"{method} {self._path}: {answer.status_code} {_said(answer)}")
        return answer


def _read(answer: httpx.Response) -> Replicas:
    try:
        scale = answer.json()
        return Replicas(int(scale["spec"].get("replicas", 0)), str(scale["metadata"]["resourceVersion"]))  # 0 is omitted
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ClusterError(f"{answer.url} is not a Scale: {error}") from None


def _said(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["message"])
    except (ValueError, KeyError, TypeError):
        return answer.text[:200]


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
