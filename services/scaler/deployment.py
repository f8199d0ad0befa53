"""The `/scale` subresource of one Deployment, through the cluster's API as the pod's own service account.

Guarantees: two verbs are used on one object, get and patch, and the chart's Role allows no more; a change that somebody else made
since the look is never overwritten; the token is read anew for each call, as the cluster exchanges it every hour.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import httpx

from services.config import ConfigError

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where the cluster mounts the token, its certificate authority and the namespace."""

CALL_LIMIT_S = 10.0
PATCH = {"Content-Type": "application/merge-patch+json"}


class ClusterError(Exception):
    """The cluster's API did not do as it was asked; the message says what it said."""


class DeploymentChanged(ClusterError):
    """Somebody else changed the Deployment since it was looked at."""


@dataclass(frozen=True)
class Replicas:
    """How many pods are wanted, as of one version of the object."""

    count: int
    version: str


class Deployment:
    """Reads and sets how many pods a Deployment is to have."""

    def __init__(self, http: httpx.AsyncClient, path: str, token_file: Path) -> None:
        self._http, self._path, self._token_file = http, path, token_file

    @classmethod
    def in_cluster(cls, name: str, environ: Mapping[str, str], account: Path = ACCOUNT) -> Self:
        """The Deployment `name` of the pod's own namespace. Raises `ConfigError` outside a cluster."""
        try:
            address = f"https://{_bracketed(environ['KUBERNETES_SERVICE_HOST'])}:{environ['KUBERNETES_SERVICE_PORT']}"
            namespace = (account / "namespace").read_text(encoding="utf-8").strip()
            trusted = ssl.create_default_context(cafile=str(account / "ca.crt"))
        except (KeyError, OSError) as error:
            raise ConfigError(f"the scaler needs a cluster and a service account whose token is mounted: {error}") from None
        http = httpx.AsyncClient(base_url=address, verify=trusted, timeout=CALL_LIMIT_S)
        return cls(http, f"/apis/apps/v1/namespaces/{namespace}/deployments/{name}/scale", account / "token")

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def replicas(self) -> Replicas:
        """How many pods are wanted. Raises `ClusterError`."""
        return _read(await self._call("GET", {}, None))

    async def scale(self, count: int, seen: Replicas) -> None:
        """Want `count` pods. Raises `Changed` when it is not as it was `seen` any more."""
        body = {"metadata": {"resourceVersion": seen.version}, "spec": {"replicas": count}}
        await self._call("PATCH", PATCH, body)

    async def _call(self, method: str, headers: Mapping[str, str], body: object) -> httpx.Response:
        bearer = {"Authorization": f"Bearer {self._token_file.read_text(encoding='utf-8').strip()}"}
        try:
            answer = await self._http.request(method, self._path, headers={**bearer, **headers}, json=body)
        except httpx.HTTPError as error:
            raise ClusterError(f"{method} {self._path}: {str(error) or type(error).__name__}") from None
        if answer.status_code == httpx.codes.CONFLICT:
            raise DeploymentChanged(f"{method} {self._path}: {_said(answer)}")
        if answer.is_error:
            raise ClusterError(f"{method} {self._path}: {answer.status_code} {_said(answer)}")
        return answer


def _read(answer: httpx.Response) -> Replicas:
    try:
        scale = answer.json()
        return Replicas(int(scale["spec"].get("replicas", 0)), str(scale["metadata"]["resourceVersion"]))  # 0 is left out
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ClusterError(f"{answer.url} is no Scale: {error}") from None


def _said(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["message"])
    except (ValueError, KeyError, TypeError):
        return answer.text[:200]


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
