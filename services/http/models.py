"""Request and response models of the endpoints, for services and clients. Those of inspections are in operations/inspection/."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from services.store.records import Role, RunState


class Reason(BaseModel):
    """Who makes a request, and why. Both are recorded with the desired state."""

    model_config = ConfigDict(extra="forbid")

    why: str = Field(default="", max_length=200, description="Reason, recorded with the desired state.")
    who: str = Field(default="", max_length=100, description="Who makes the request, recorded with the desired state.")


UNEXPLAINED = Reason()
"""The reason in a request without a body."""


class LoopHealth(BaseModel):
    """Progress of one supervised loop."""

    alive: bool
    silent_s: float
    limit_s: float | None
    failures: int


class Live(BaseModel):
    """Liveness: whether every loop made progress within its limit."""

    alive: bool
    loops: dict[str, LoopHealth]


class Ready(BaseModel):
    """Readiness: whether the pod can do work now."""

    ready: bool
    phase: str
    """Phase of the pod, such as starting, loading, unsynced, ready, draining or finished."""
    why_not: str
    """What the pod waits for; empty: nothing."""


class PodState(BaseModel):
    """A pod's report about itself, sent with every heartbeat."""

    kind: str
    name: str
    boot: str
    host: str
    pid: int
    url: str
    phase: str
    version: int
    world: int
    gauges: dict[str, float]
    trainer_fence: int
    unreached: str
    paused: bool
    """Whether a requested pause is in effect here."""
    draining: str
    """Who requested that it drains, and why."""


class State(BaseModel):
    """State of this pod, and of the run as the pod sees it."""

    run: str
    pod: PodState
    state: RunState | None


class ScaleRequest(Reason):
    """Desired number of generators. 0: the run waits until there is one."""

    replicas: int = Field(ge=0, le=2**31, strict=True)


class Scaled(BaseModel):
    """Desired number of generators after a call."""

    replicas: int
    why: str
    waiting_for: list[str]
    """Generators still missing or still running at the time of the response."""


class Desired(BaseModel):
    """Desired state of a role after a call."""

    role: Role
    paused: bool
    why: str
    waiting_for: list[str]
    """Pods that had not complied at the time of the response; see `wait_s`."""


class RunDesire(BaseModel):
    """Desired state of the run as a whole."""

    run: str
    desired: Literal["paused", "running", "stopping"]
    waiting_for: list[str]
    """Pods that had not complied at the time of the response; see `wait_s`."""


class Draining(BaseModel):
    """Response to a drain, with the number of tickets still in flight."""

    draining: bool
    rollouts: int


MAX_REQUEUED = 1000  # ids per call


class RequeueRequest(BaseModel):
    """Dead letters to requeue: some, or all."""

    model_config = ConfigDict(extra="forbid")

    ids: list[str] = Field(default=[], max_length=MAX_REQUEUED)
    all: bool = False

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if bool(self.ids) == self.all:
            raise ValueError('give either "ids", a list, or "all": true')
        return self
