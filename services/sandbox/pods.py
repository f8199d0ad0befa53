"""The cluster's API as far as the sandbox service uses it: pods of one namespace, and the template from which they are created.

Guarantees: a pod is created at most once under its name, changed only if nobody else has changed it since it was read, and
deleted only if it is still the one that was read. Objects stay JSON: the client's own types take most of the time of a long list.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from http import HTTPStatus
from typing import Any, TypeVar

import msgspec
from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.stream import WsApiClient

from services.runtime.cluster.account import CALL_LIMIT_S, FAILURES, ClusterError

MERGE = "application/merge-patch+json"
PAGE = 500  # pods of a list in one reply
HEARTBEAT_S = 10.0  # a connection to a pod that does not answer a ping within half of it is closed and reopened
STATE, ROLLOUT, TICKET, TEMPLATE = "grpo/state", "grpo/rollout", "grpo/ticket", "grpo/template"
"""Labels: whether a rollout has it, which one (`FENCE.SAMPLE`), of which ticket, and the digest of its template."""
NAME = "grpo/name"
"""Annotation: the full name of the sandbox."""
WARM, HELD = "warm", "held"
POD = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")


T = TypeVar("T")


@dataclass(frozen=True)
class SandboxPod:
    """What is known about a pod."""

    name: str
    uid: str
    version: str
    """Version of the object: it changes with every update."""
    labels: dict[str, str]
    sandbox: str
    """The full name of the sandbox; empty: unassigned."""
    phase: str
    ready: bool
    deleting: bool
    created: float
    """Seconds since the epoch, by the cluster's clock."""
    ending: str = ""
    """Why its code ended it."""
    trouble: str = ""
    """Why it does not start, or why the cluster ended it."""

    @property
    def alive(self) -> bool:
        """Return whether code may run in it, now or soon."""
        return not self.deleting and self.phase in ("Pending", "Running")


class _Metadata(msgspec.Struct, rename="camel"):
    name: str
    uid: str
    resource_version: str
    creation_timestamp: datetime
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    deletion_timestamp: str = ""


class _Condition(msgspec.Struct):
    type: str
    status: str
    reason: str = ""
    message: str = ""


class _Cause(msgspec.Struct):
    reason: str = ""
    message: str = ""


class _ContainerState(msgspec.Struct):
    waiting: _Cause | None = None
    terminated: _Cause | None = None


class _Container(msgspec.Struct):
    state: _ContainerState = msgspec.field(default_factory=_ContainerState)


class _Status(msgspec.Struct, rename="camel"):
    phase: str = "Pending"
    reason: str = ""
    message: str = ""
    conditions: list[_Condition] = []
    container_statuses: list[_Container] = []


class _Pod(msgspec.Struct):
    metadata: _Metadata
    status: _Status = msgspec.field(default_factory=_Status)


class _Owner(msgspec.Struct):
    name: str
    uid: str


class PodTemplate(msgspec.Struct):
    """A template and its name."""

    metadata: _Owner
    template: dict[str, Any]

    @property
    def digest(self) -> str:
        """Return what differs between two templates."""
        return hashlib.sha256(msgspec.json.encode(self.template, order="sorted")).hexdigest()[:16]

    @property
    def life_s(self) -> float | None:
        """Return the seconds after which a pod is ended; None: never."""
        return self.template["spec"].get("activeDeadlineSeconds")

    def pod(self, name: str, labels: Mapping[str, str], annotations: Mapping[str, str]) -> dict[str, Any]:
        """Return a pod created from the template, which owns it: the pod is deleted with the release."""
        given: dict[str, dict[str, str]] = self.template.get("metadata") or {}
        owner = {"apiVersion": "v1", "kind": "PodTemplate", "name": self.metadata.name, "uid": self.metadata.uid}
        metadata = {
            "name": f"{self.metadata.name}-{name}",
            "ownerReferences": [owner],
            "labels": {**(given.get("labels") or {}), TEMPLATE: self.digest, **labels},
            "annotations": {**(given.get("annotations") or {}), **annotations},
        }
        return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": self.template["spec"]}


class _After(msgspec.Struct):
    after: str = msgspec.field(default="", name="continue")


class _PodList(msgspec.Struct):
    items: list[_Pod]
    metadata: _After = msgspec.field(default_factory=_After)


def read_pod(found: _Pod) -> SandboxPod:
    """Return a pod from an object of the API."""
    metadata, status = found.metadata, found.status
    conditions = {each.type: each for each in status.conditions}
    ready = "Ready" in conditions and conditions["Ready"].status == "True"
    ending, trouble = _why(status, conditions)
    return SandboxPod(
        metadata.name, metadata.uid, metadata.resource_version, metadata.labels, metadata.annotations.get(NAME, ""), status.phase,
        ready, bool(metadata.deletion_timestamp), metadata.creation_timestamp.timestamp(), ending, trouble,
    )  # fmt: skip


def _why(status: _Status, conditions: Mapping[str, _Condition]) -> tuple[str, str]:
    """Return why the code has ended a pod, and why the cluster has, or does not start it."""
    states = [each.state for each in status.container_statuses]
    if status.phase in ("Failed", "Succeeded"):
        ended = next((each.terminated.reason or "ended" for each in states if each.terminated), "")
        if status.reason == "Evicted" and "exceeds the" in status.message:  # a limit of its own, not a shortage of the node
            return status.message[:200], ""
        if not status.reason and "DisruptionTarget" not in conditions and ended in ("OOMKilled", "Error", "Completed"):
            return ended, ""
        return "", f"{status.reason or ended or 'ended'}: {status.message}"[:300]
    placed = conditions.get("PodScheduled")
    if placed is not None and placed.status == "False":
        return "", f"{placed.reason}: {placed.message}"[:300]
    waiting = next((each.waiting for each in states if each.waiting), None)
    return "", f"{waiting.reason}: {waiting.message}"[:300] if waiting else ""


class PodsApi:
    """Reads, creates, changes and deletes pods of a namespace."""

    def __init__(self, configuration: Configuration, namespace: str) -> None:
        configuration.connection_pool_maxsize = 0  # each call of code keeps a connection
        self.client: Any = WsApiClient(configuration, heartbeat=HEARTBEAT_S)
        self._root = f"{configuration.host}/api/v1/namespaces/{namespace}"

    async def close(self) -> None:
        """Close the connections."""
        await self.client.close()

    async def template(self, name: str) -> PodTemplate:
        """Return a PodTemplate. Raises `ClusterError`."""
        status, body = await self._call("GET", f"podtemplates/{name}")
        if status != HTTPStatus.OK:
            raise _refused(f"read podtemplate {name}", status, body)
        return _decoded(body, PodTemplate)

    async def selected(self, labels: Mapping[str, str]) -> list[SandboxPod]:
        """Return the pods that have labels. Raises `ClusterError`."""
        pods: list[SandboxPod] = []
        query = {"labelSelector": ",".join(f"{key}={value}" for key, value in labels.items()), "limit": str(PAGE)}
        while True:
            status, body = await self._call("GET", "pods", query)
            if status != HTTPStatus.OK:
                raise _refused("list pods", status, body)
            found = _decoded(body, _PodList)
            pods += map(read_pod, found.items)
            if not found.metadata.after:
                return pods
            query["continue"] = found.metadata.after

    async def get(self, name: str) -> SandboxPod | None:
        """Return a pod, or None if it is gone. Raises `ClusterError`."""
        status, body = await self._call("GET", f"pods/{name}")
        if status == HTTPStatus.NOT_FOUND:
            return None
        if status != HTTPStatus.OK:
            raise _refused(f"read pod {name}", status, body)
        return read_pod(_decoded(body, _Pod))

    async def create(self, pod: Mapping[str, Any]) -> SandboxPod | None:
        """Create a pod, or return None if one of this name exists. Raises `ClusterError`."""
        status, body = await self._call("POST", "pods", body=pod)
        if status == HTTPStatus.CONFLICT:
            return None
        if status != HTTPStatus.CREATED:
            raise _refused("create a pod", status, body)
        return read_pod(_decoded(body, _Pod))

    async def change(self, pod: SandboxPod, metadata: Mapping[str, Any]) -> bool:
        """Merge `metadata` into a pod's. Returns False if it is gone or was changed since. Raises `ClusterError`."""
        wanted = {"metadata": {**metadata, "resourceVersion": pod.version}}
        status, body = await self._call("PATCH", f"pods/{pod.name}", body=wanted, kind=MERGE)
        if status in (HTTPStatus.CONFLICT, HTTPStatus.NOT_FOUND):
            return False
        if status != HTTPStatus.OK:
            raise _refused(f"patch pod {pod.name}", status, body)
        return True

    async def delete(self, pod: SandboxPod, unchanged: bool = False) -> bool:
        """Delete a pod. Returns False if it is gone, or was changed since and must be `unchanged`. Raises `ClusterError`."""
        only = {"uid": pod.uid, **({"resourceVersion": pod.version} if unchanged else {})}
        options = {"kind": "DeleteOptions", "apiVersion": "v1", "preconditions": only}
        status, body = await self._call("DELETE", f"pods/{pod.name}", body=options)
        if status in (HTTPStatus.CONFLICT, HTTPStatus.NOT_FOUND):
            return False
        if status not in (HTTPStatus.OK, HTTPStatus.ACCEPTED):
            raise _refused(f"delete pod {pod.name}", status, body)
        return True

    def place(self, pod: str) -> str:
        """Return the address at which commands are executed in a pod."""
        return f"{self._root}/pods/{pod}/exec"

    async def credentials(self, place: str) -> dict[str, str]:
        """Return the headers that authorize a request."""
        headers: dict[str, str] = {}
        await self.client.update_params_for_auth(headers, [], ["BearerToken"], place, "GET", None)
        return headers

    async def _call(
        self, method: str, path: str, query: Mapping[str, str] | None = None, body: Any = None, kind: str = "application/json"
    ) -> tuple[int, bytes]:
        """Return the status of a reply and its body. Raises `ClusterError` if there is none."""
        place = f"{self._root}/{path}"
        rest = self.client.rest_client
        if rest.pool_manager is None:
            rest.pool_manager = rest._create_pool_manager()
        headers = {**await self.credentials(place), "Content-Type": kind, "Accept": "application/json"}
        data = None if body is None else msgspec.json.encode(body)
        try:
            async with (
                asyncio.timeout(CALL_LIMIT_S),
                rest.pool_manager.request(method, place, params=query, headers=headers, data=data) as reply,
            ):
                return reply.status, await reply.read()
        except FAILURES as error:
            raise ClusterError(f"{method} {path}: {str(error) or type(error).__name__}") from None


def _decoded(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise ClusterError(f"the cluster's reply is not a {kind.__name__.strip('_')}: {error}") from None


def _refused(what: str, status: int, body: bytes) -> ClusterError:
    return ClusterError(f"{what}: {status} {body[:300].decode(errors='replace')}")
