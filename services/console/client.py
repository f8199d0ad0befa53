"""A typed client of the services' endpoints: a method an endpoint, answers as the models that the service gives.

Guarantees: every wait has a limit; an error is one `ApiError` that says what the service said; calls may be repeated, as the
endpoints allow it; tokens are in no message. A service that cannot be reached is an `ApiError` too.
"""

from __future__ import annotations

import ssl
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import httpx
from pydantic import BaseModel, TypeAdapter, ValidationError

from services.operations.inspection.buffer import Buffer
from services.operations.inspection.checkpoints import AskedCheckpoint, AskedRestore, CheckpointList
from services.operations.inspection.deadletters import DeadLetterBody, DeadLetters, RequeueAnswer
from services.operations.inspection.group import Group
from services.operations.inspection.ledger import AuditReport
from services.operations.inspection.step import Step
from services.runtime.http.models import Desired, Draining, Live, Ready, RunDesire, Scaled, ScaleRequest, State
from services.store.calls.inspection import Sort
from services.store.records import PauseMode

Answer = TypeVar("Answer")

ANSWER_LIMIT_S = 30.0  # beyond what a call asks the service to wait for


class ApiError(Exception):
    """An endpoint refused, or could not be reached. `status` is 0 where there was no answer."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class Client:
    """The endpoints of one service. Use it as a context manager."""

    def __init__(self, url: str, token: str = "", ca_file: str = "", server_name: str = "") -> None:
        """`url` as the fleet shows it, http://host:port. `ca_file`: who may have signed its certificate; empty: the system's.
        `server_name`: what that certificate is to bear; empty: the host of the address."""
        self.url = url.rstrip("/")
        self._extensions = {"sni_hostname": server_name} if server_name else {}
        try:
            trusted = ssl.create_default_context(cafile=ca_file) if ca_file else True
        except (OSError, ssl.SSLError) as error:
            raise ApiError(f"api.ca_file = {ca_file!r} cannot be used: {error}; name a file of certificates in PEM") from None
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            self._http = httpx.Client(base_url=self.url, headers=headers, verify=trusted, timeout=ANSWER_LIMIT_S)
        except httpx.InvalidURL as error:
            raise ApiError(f"{url!r} is no address of a service: {error}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._http.close()

    def live(self) -> Live:
        """Whether every loop of the pod makes progress."""
        return self._ask("GET", "/health/live", Live, wrong=503)

    def ready(self) -> Ready:
        """Whether the pod would do work now, and what it waits for."""
        return self._ask("GET", "/health/ready", Ready, wrong=503)

    def metrics(self) -> str:
        """Its metrics, as Prometheus reads them."""
        return self._send("GET", "/metrics").text

    def state(self) -> State:
        """The pod, and the run as it sees it."""
        return self._ask("GET", "/v1/state", State)

    def pause(
        self, role: str = "", mode: PauseMode = "keep", why: str = "", who: str = "", wait_s: float = 0.0
    ) -> Desired:  # fmt: skip
        """Pause a role, by default the service's own."""
        body = {"mode": mode, "why": why, "who": who}
        return self._ask("POST", "/v1/pause", Desired, body, {"role": role or None, "wait_s": wait_s})

    def resume(self, role: str = "", wait_s: float = 0.0) -> Desired:
        """Let a role go on."""
        return self._ask("POST", "/v1/resume", Desired, None, {"role": role or None, "wait_s": wait_s})

    def scale(self, replicas: int, why: str = "", who: str = "", wait_s: float = 0.0) -> Scaled:
        """Have so many generators."""
        wish = ScaleRequest(replicas=replicas, why=why, who=who)
        return self._ask("POST", "/v1/fleet/generators", Scaled, wish.model_dump(), {"wait_s": wait_s})

    def pause_run(self, mode: PauseMode = "keep", why: str = "", who: str = "", wait_s: float = 0.0) -> RunDesire:
        """Pause every role. Of dataprep."""
        return self._ask("POST", "/v1/run/pause", RunDesire, {"mode": mode, "why": why, "who": who}, {"wait_s": wait_s})

    def resume_run(self, wait_s: float = 0.0) -> RunDesire:
        """Let every role go on. Of dataprep."""
        return self._ask("POST", "/v1/run/resume", RunDesire, None, {"wait_s": wait_s})

    def stop_run(self, why: str = "", who: str = "", wait_s: float = 0.0) -> RunDesire:
        """End the run early. Of dataprep."""
        return self._ask("POST", "/v1/run/stop", RunDesire, {"why": why, "who": who}, {"wait_s": wait_s})

    def ledger(self) -> dict[str, int]:
        """Where the tickets are. Of dataprep."""
        return self._ask("GET", "/v1/ledger", dict[str, int])

    def audit(self) -> AuditReport:
        """The ledger judged: what is lost or doubled. Of dataprep."""
        return self._ask("GET", "/v1/audit", AuditReport)

    def buffer(self, sort: Sort = "order", reverse: bool = False, offset: int = 0, limit: int = 100) -> Buffer:
        """The replay table and a page of it. Of dataprep."""
        page = {"sort": sort, "reverse": reverse, "offset": offset, "limit": limit}
        return self._ask("GET", "/v1/buffer", Buffer, parameters=page)

    def group(self, id: str, offset: int = 0, limit: int = 16) -> Group:
        """A group and a page of its completions. Of dataprep."""
        return self._ask("GET", f"/v1/groups/{id}", Group, parameters={"offset": offset, "limit": limit})

    def step(self, number: int, offset: int = 0, limit: int = 100) -> Step:
        """A step and a page of its groups. Of dataprep."""
        return self._ask("GET", f"/v1/steps/{number}", Step, parameters={"offset": offset, "limit": limit})

    def dead_letters(self, before: str = "", limit: int = 100) -> DeadLetters:
        """What failed for good. Of dataprep."""
        return self._ask("GET", "/v1/deadletters", DeadLetters, parameters={"before": before, "limit": limit})

    def dead_letter(self, id: str) -> DeadLetterBody:
        """A dead letter with its body. Of dataprep."""
        return self._ask("GET", f"/v1/deadletters/{id}", DeadLetterBody)

    def requeue(self, ids: list[str] | Literal["all"]) -> RequeueAnswer:
        """Put dead letters back. Of dataprep."""
        body = {"all": True} if ids == "all" else {"ids": ids}
        return self._ask("POST", "/v1/deadletters/requeue", RequeueAnswer, body)

    def drain(self, wait_s: float = 0.0) -> Draining:
        """Have the pod finish or hand back what it does, and exit. Of a generator."""
        return self._ask("POST", "/v1/drain", Draining, None, {"wait_s": wait_s})

    def checkpoints(self) -> CheckpointList:
        """The run's checkpoints. Of the trainer."""
        return self._ask("GET", "/v1/checkpoints", CheckpointList)

    def checkpoint(self, why: str = "", who: str = "", wait_s: float = 0.0) -> AskedCheckpoint:
        """Have a checkpoint written. Of the trainer."""
        return self._ask("POST", "/v1/checkpoint", AskedCheckpoint, {"why": why, "who": who}, {"wait_s": wait_s})

    def restore(self, step: int, wait_s: float = 0.0) -> AskedRestore:
        """Take the run back to a checkpoint. Of the trainer."""
        return self._ask("POST", "/v1/restore", AskedRestore, None, {"step": step, "wait_s": wait_s})

    def _ask(
        self,
        method: str,
        path: str,
        kind: type[Answer],
        body: Any = None,
        parameters: dict[str, Any] | None = None,
        wrong: int = 0,
    ) -> Answer:
        """An answer of a kind. `wrong`: status of an answer of that kind which says that something is not as it should be."""
        answer = self._send(method, path, body, parameters, wrong)
        try:
            return TypeAdapter(kind).validate_json(answer.content)
        except ValidationError:
            kind_of = getattr(kind, "__name__", str(kind)) if isinstance(kind, type) and issubclass(kind, BaseModel) else "answer"
            raise ApiError(
                f"{self.url}{path} did not answer with a {kind_of}: is it a service of a run, of this version?",
                answer.status_code,
            ) from None

    def _send(
        self, method: str, path: str, body: Any = None, parameters: dict[str, Any] | None = None, wrong: int = 0
    ) -> httpx.Response:
        given = {name: value for name, value in (parameters or {}).items() if value is not None}
        limit_s = ANSWER_LIMIT_S + float(given.get("wait_s", 0.0))
        try:
            answer = self._http.request(method, path, json=body, params=given, timeout=limit_s, extensions=self._extensions)
        except httpx.TransportError as error:
            raise ApiError(f"{self.url} cannot be reached ({error}): is the service running, and is its address right?") from None
        if answer.is_success or answer.status_code == wrong:
            return answer
        raise ApiError(f"{self.url}{path}: {_detail(answer)}", answer.status_code)


def _detail(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["detail"])
    except (ValueError, KeyError, TypeError):
        return f"status {answer.status_code}: is it a service of a run?"
