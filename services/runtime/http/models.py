"""What the endpoints take and give, beside what people look at (inspection/): for the services, and for those who call them."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from services.store.records import PauseMode, RunState

ROLES = ("generator", "dataprep", "trainer")
Role = Literal["generator", "dataprep", "trainer"]
WHY = Field(default="", max_length=200, description="Why, kept with the desired state.")
WHO = Field(default="", max_length=100, description="Who wants it, kept with the desired state.")


class Reason(BaseModel):
    """Who does something, and why; kept with the desired state."""

    why: str = WHY
    who: str = WHO

    @property
    def text(self) -> str:
        """Both in one line."""
        return ": ".join(part for part in (self.who, self.why) if part) or "REST"


class Pause(Reason):
    """How to pause, who wants it, and why."""

    mode: PauseMode = Field(
        default="keep",
        description="What becomes of requests of generators: `keep` freezes them, `drain` lets them finish, `abort` ends them "
        "and hands their tickets back with the tokens made so far.",
    )


class LoopHealth(BaseModel):
    """Progress of one supervised loop."""

    alive: bool
    silent_s: float
    limit_s: float | None
    failures: int


class Live(BaseModel):
    """Liveness: every loop made progress within its limit."""

    alive: bool
    loops: dict[str, LoopHealth]


class Ready(BaseModel):
    """Readiness: the pod would do work now."""

    ready: bool
    phase: str
    """Where the pod is on its way: starting, loading, unsynced, ready, draining and the like."""
    why_not: str
    """What it waits for; empty: for nothing."""


class PodState(BaseModel):
    """What a pod says of itself with every heartbeat."""

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
    paused: str


class State(BaseModel):
    """This pod, and the run as it sees it."""

    run: str
    pod: PodState
    state: RunState | None


class ScaleRequest(BaseModel):
    """How many generators the run is wanted to have; 0: it waits until there are some again."""

    replicas: int = Field(ge=0, le=2**31)
    why: str = WHY
    who: str = WHO


class Scaled(BaseModel):
    """How many generators are wanted after a call."""

    replicas: int
    why: str
    waiting_for: list[str]
    """Who was still to come or to go when the answer was given."""


class Desired(BaseModel):
    """Desired state of a role after a call."""

    role: Role
    paused: bool
    mode: PauseMode | None
    why: str
    waiting_for: list[str]
    """Pods that had not followed yet when the answer was given; see `wait_s`."""


class RunDesire(BaseModel):
    """What was asked of the run as a whole."""

    run: str
    desired: Literal["paused", "running", "stopping"]
    waiting_for: list[str]
    """Pods that had not followed yet when the answer was given; see `wait_s`."""


class Draining(BaseModel):
    """Answer to a drain: how many tickets are still under way."""

    draining: bool
    rollouts: int


MAX_REQUEUED = 1000  # ids of one call


class RequeueRequest(BaseModel):
    """Which dead letters to put back: some, or all."""

    model_config = ConfigDict(extra="forbid")

    ids: list[str] = Field(default=[], max_length=MAX_REQUEUED)
    all: bool = False

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if bool(self.ids) == self.all:
            raise ValueError('give either "ids", a list, or "all": true')
        return self
