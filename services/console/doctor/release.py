"""Checks of a release on a cluster, made from one of its pods: whether its services are up and reachable."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable

from services.config import RunConfig
from services.console.doctor import Finding, fault, note, ok, told
from services.console.printable import printable
from services.http.asking import Unanswered, ask
from services.http.credentials import redis_login
from services.protocol.errors import StoreError
from services.protocol.messages import PodStatus
from services.store import Store

NEEDED = ("dataprep", "trainer", "generator")
MOST_PODS = 64  # pods queried one by one; for a fleet of hundreds, Prometheus shows which are unreachable


async def services(config: RunConfig) -> AsyncIterator[Finding]:
    """Check that each kind of service is up and responds at the address it advertises."""
    try:
        store = await Store.connect(config.redis.url, config.run.name, redis_login(config, "console"))
        try:
            state = await store.run.state()
            pods = sorted(await store.fleet.members(config.fleet.ttl_s), key=lambda pod: pod.name)
        finally:
            await store.close()
    except StoreError as error:
        yield told("services", error)
        return
    if state is None:
        yield note("run", f"{config.run.name} does not exist yet", "see the log of dataprep, which creates it")
    elif state.finished:
        yield ok("run", f"{config.run.name} has finished: {printable(state.finished)}")
    else:
        yield ok("run", f"{config.run.name}: {state.committed_step + 1} of {state.steps} steps trained")
    for finding in _missing(pods, over=bool(state and state.finished)):
        yield finding
    asked = [pod for pod in pods if pod.url][:MOST_PODS]
    for finding in await asyncio.gather(*(asyncio.to_thread(_answer, config, pod) for pod in asked)):
        yield finding


def _missing(pods: Iterable[PodStatus], over: bool) -> list[Finding]:
    there = {pod.kind for pod in pods}
    missing = [kind for kind in NEEDED if kind not in there and not over]
    remedy = "run kubectl get pods, and read the log of a pod that restarts"
    return [note(kind, "no heartbeat from any pod yet", remedy) for kind in missing]


def _answer(config: RunConfig, pod: PodStatus) -> Finding:
    what = f"{pod.kind} {pod.name}"
    try:
        ready = ask(config.api, "GET", f"{pod.url}/health/ready", accepted=503)
    except Unanswered as error:
        remedy = "check the NetworkPolicies between pods, and that the certificate is the one that the pods share"
        return fault(what, printable(str(error)), remedy)
    return ok(what, f"ready at {pod.url}") if ready["ready"] else note(what, f"not ready: {printable(ready['why_not'])}")
