"""A typed client for the services' endpoints: one method per endpoint, returning the service's response models.

Guarantees: every wait has a limit; every failure, including an unreachable service, is an `ApiError` with the service's own
message; calls can be repeated because the endpoints are idempotent; no message contains a token.
"""

from __future__ import annotations

import ssl
from types import TracebackType
from typing import Any, Literal, Self, TypeVar
from urllib.parse import quote

import httpx
from pydantic import TypeAdapter, ValidationError

from services.http.models import Desired, Draining, Live, Ready, RunDesire, Scaled, State
from services.operations.inspection.buffer import Buffer
from services.operations.inspection.checkpoints import AskedCheckpoint, AskedRestore, CheckpointList
from services.operations.inspection.deadletters import DeadLetterBody, DeadLetters, RequeueAnswer
from services.operations.inspection.group import Group
from services.operations.inspection.ledger import AuditReport
from services.operations.inspection.step import Step
from services.operations.inspection.sync import SyncAnswer
from services.store.calls.inspection import Sort
from services.store.records import PauseMode

Answer = TypeVar("Answer")

SHOWN = 200  # characters of a path that is no address
ANSWER_LIMIT_S = 30.0  # in addition to the time that a call asks the service to wait


class ApiError(Exception):
    """An endpoint refused the request or could not be reached. `status` is 0 when there was no response."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class Client:
    """The endpoints of one service. Use it as a context manager."""

    def __init__(self, url: str, token: str = "", ca_file: str = "", server_name: str = "") -> None:
        """Open a client for `url` (http://host:port, as the fleet shows it).

        `ca_file`: CA bundle used to verify the server certificate; empty: the system's. `server_name`: name expected in the
        certificate; empty: the host in `url`.
        """
        self.url = url.rstrip("/")
        self._extensions = {"sni_hostname": server_name} if server_name else {}
        try:
            trusted = ssl.create_default_context(cafile=ca_file) if ca_file else True
        except (OSError, ssl.SSLError) as error:
            raise ApiError(f"api.ca_file = {ca_file!r} cannot be used: {error}; set it to a PEM file of certificates") from None
        if not (token.isascii() and token.isprintable()):  # httpx would quote it
            raise ApiError("the API token is not one line of printable ASCII characters: correct it where it is stored")
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            self._http = httpx.Client(base_url=self.url, headers=headers, verify=trusted, timeout=ANSWER_LIMIT_S)
        except httpx.InvalidURL as error:
            raise ApiError(f"{url!r} is not a valid service address: {error}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._http.close()

    def live(self) -> Live:
        """Check whether every loop of the pod makes progress."""
        return self._ask("GET", "/health/live", Live, wrong=503)

    def ready(self) -> Ready:
        """Check whether the pod can do work now, and what it waits for."""
        return self._ask("GET", "/health/ready", Ready, wrong=503)

    def metrics(self) -> str:
        """Return the pod's metrics in Prometheus text format."""
        return self._send("GET", "/metrics").text

    def state(self) -> State:
        """Return the state of the pod, and of the run as the pod sees it."""
        return self._ask("GET", "/v1/state", State)

    def pause(
        self, role: str = "", mode: PauseMode = "keep", why: str = "", who: str = "", wait_s: float = 0.0
    ) -> Desired:  # fmt: skip
        """Pause a role; by default the service's own."""
        body = {"mode": mode, "why": why, "who": who}
        return self._ask("POST", "/v1/pause", Desired, body, {"role": role or None, "wait_s": wait_s})

    def resume(self, role: str = "", why: str = "", who: str = "", wait_s: float = 0.0) -> Desired:
        """Resume a role; by default the service's own."""
        return self._ask("POST", "/v1/resume", Desired, {"why": why, "who": who}, {"role": role or None, "wait_s": wait_s})

    def scale(self, replicas: int, why: str = "", who: str = "", wait_s: float = 0.0) -> Scaled:
        """Set the number of generators."""
        body = {"replicas": replicas, "why": why, "who": who}
        return self._ask("POST", "/v1/fleet/generators", Scaled, body, {"wait_s": wait_s})

    def pause_run(self, mode: PauseMode = "keep", why: str = "", who: str = "", wait_s: float = 0.0) -> RunDesire:
        """Pause every role. Served by dataprep."""
        return self._ask("POST", "/v1/run/pause", RunDesire, {"mode": mode, "why": why, "who": who}, {"wait_s": wait_s})

    def resume_run(self, why: str = "", who: str = "", wait_s: float = 0.0) -> RunDesire:
        """Resume every role. Served by dataprep."""
        return self._ask("POST", "/v1/run/resume", RunDesire, {"why": why, "who": who}, {"wait_s": wait_s})

    def stop_run(self, why: str = "", who: str = "", wait_s: float = 0.0) -> RunDesire:
        """End the run early. Served by dataprep."""
        return self._ask("POST", "/v1/run/stop", RunDesire, {"why": why, "who": who}, {"wait_s": wait_s})

    def ledger(self) -> dict[str, int]:
        """Count the tickets in each place. Served by dataprep."""
        return self._ask("GET", "/v1/ledger", dict[str, int])

    def audit(self) -> AuditReport:
        """Audit the ledger for lost and duplicated tickets. Served by dataprep."""
        return self._ask("GET", "/v1/audit", AuditReport)

    def buffer(self, sort: Sort = "order", reverse: bool = False, offset: int = 0, limit: int = 100) -> Buffer:
        """Return the state of the replay table and a page of its groups. Served by dataprep."""
        page = {"sort": sort, "reverse": reverse, "offset": offset, "limit": limit}
        return self._ask("GET", "/v1/buffer", Buffer, parameters=page)

    def group(self, id: str, offset: int = 0, limit: int = 16) -> Group:
        """Return a group and a page of its completions. Served by dataprep."""
        return self._ask("GET", f"/v1/groups/{quote(id, safe='')}", Group, parameters={"offset": offset, "limit": limit})

    def step(self, number: int, offset: int = 0, limit: int = 100) -> Step:
        """Return a step and a page of its groups. Served by dataprep."""
        return self._ask("GET", f"/v1/steps/{number}", Step, parameters={"offset": offset, "limit": limit})

    def sync(self) -> SyncAnswer:
        """Return the last round of weight sync and what each generator holds. Served by dataprep."""
        return self._ask("GET", "/v1/sync", SyncAnswer)

    def dead_letters(self, before: str = "", limit: int = 100) -> DeadLetters:
        """List the dead letters. Served by dataprep."""
        return self._ask("GET", "/v1/deadletters", DeadLetters, parameters={"before": before, "limit": limit})

    def dead_letter(self, id: str) -> DeadLetterBody:
        """Return a dead letter with its body. Served by dataprep."""
        return self._ask("GET", f"/v1/deadletters/{quote(id, safe='')}", DeadLetterBody)

    def requeue(self, ids: list[str] | Literal["all"]) -> RequeueAnswer:
        """Requeue dead letters. Served by dataprep."""
        body = {"all": True} if ids == "all" else {"ids": ids}
        return self._ask("POST", "/v1/deadletters/requeue", RequeueAnswer, body)

    def drain(self, why: str = "", who: str = "", wait_s: float = 0.0) -> Draining:
        """Make the pod finish or hand back its work, and exit. Served by generators."""
        return self._ask("POST", "/v1/drain", Draining, {"why": why, "who": who}, {"wait_s": wait_s})

    def checkpoints(self) -> CheckpointList:
        """List the run's checkpoints. Served by the trainer."""
        return self._ask("GET", "/v1/checkpoints", CheckpointList)

    def checkpoint(self, why: str = "", who: str = "", wait_s: float = 0.0) -> AskedCheckpoint:
        """Request a checkpoint. Served by the trainer."""
        return self._ask("POST", "/v1/checkpoint", AskedCheckpoint, {"why": why, "who": who}, {"wait_s": wait_s})

    def restore(self, step: int, why: str = "", who: str = "", wait_s: float = 0.0) -> AskedRestore:
        """Restore the run to a checkpoint. Served by the trainer."""
        return self._ask("POST", "/v1/restore", AskedRestore, {"why": why, "who": who}, {"step": step, "wait_s": wait_s})

    def _ask(
        self,
        method: str,
        path: str,
        kind: type[Answer],
        body: Any = None,
        parameters: dict[str, Any] | None = None,
        wrong: int = 0,
    ) -> Answer:
        """Send a request and validate the response as `kind`. `wrong`: an error status whose body is also a `kind`."""
        answer = self._send(method, path, body, parameters, wrong)
        try:
            return TypeAdapter(kind).validate_json(answer.content)
        except ValidationError:
            kind_of = kind.__name__ if isinstance(kind, type) else "answer"
            raise ApiError(
                f"{self.url}{path} did not return a {kind_of}: check that it is a service of a run, at this version",
                answer.status_code,
            ) from None

    def _send(
        self, method: str, path: str, body: Any = None, parameters: dict[str, Any] | None = None, wrong: int = 0
    ) -> httpx.Response:
        given = {name: value for name, value in (parameters or {}).items() if value is not None}
        limit_s = ANSWER_LIMIT_S + float(given.get("wait_s", 0.0))
        try:
            answer = self._http.request(method, path, json=body, params=given, timeout=limit_s, extensions=self._extensions)
        except httpx.InvalidURL as error:
            raise ApiError(f"{self.url}{path[:SHOWN]} is not a valid address: {error}") from None
        except httpx.DecodingError as error:
            raise ApiError(f"{self.url}{path}: the response cannot be decoded ({error}): check the proxies on the way") from None
        except httpx.RequestError as error:
            raise ApiError(f"{self.url} cannot be reached ({error}): check its address and that the service is running") from None
        if answer.is_success or answer.status_code == wrong:
            return answer
        raise ApiError(f"{self.url}{path}: {_detail(answer)}", answer.status_code)


def _detail(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["detail"])
    except (ValueError, KeyError, TypeError):
        return f"status {answer.status_code}: check that it is a service of a run"
