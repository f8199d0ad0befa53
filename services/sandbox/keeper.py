"""Opens, runs and closes sandboxes, keeps some ready, and sweeps those that are no longer held.

Guarantees: everything that must outlive this process is in the pods' labels and annotations, so it may be killed at any moment.
A rollout is assigned a pod in which nothing has run, by one call that fails after a concurrent claim; the same request finds the
same pod. Code runs only in the pod that its request names, if that is the rollout's. A pod is never assigned twice.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection
from functools import partial

import structlog

from services.protocol.sandboxes import CodeDone, RunCode, SandboxName, SandboxOpened
from services.sandbox.execution import Garbled, NotExecuted, execute
from services.sandbox.metrics import SandboxMetrics
from services.sandbox.pods import HELD, NAME, POD, ROLLOUT, STATE, TICKET, WARM, PodsApi, PodTemplate, SandboxPod
from services.sandbox.settings import SandboxSettings
from services.sandbox.sweeping import FRESH_SHARE, decide

log = structlog.get_logger()

LOOK_S = (0.1, 0.2, 0.4, 0.8)  # between polls of a pod that starts, or that a call has lost
CALL_MARGIN_S = 15.0
"""Time beyond the code's own for a call to begin and its result to arrive."""
AT_ONCE = 20  # requests of a sweep to the cluster's API
ATTEMPT = re.compile("[a-z0-9]{1,16}")
LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")


class SandboxKeeper:
    """The sandboxes of a release."""

    def __init__(
        self, pods: PodsApi, settings: SandboxSettings, fences: Callable[[], Awaitable[Collection[str]]], metrics: SandboxMetrics
    ) -> None:
        """`fences` returns the fences of all current claims."""
        self._pods, self._settings, self._fences, self._metrics = pods, settings, fences, metrics
        self._ready: deque[SandboxPod] = deque()  # as of the last sweep
        self._locks: dict[str, asyncio.Lock] = {}
        self._held: dict[str, str] = {}  # by pod: its owner, as far as this process knows
        self._template: PodTemplate | None = None
        self.taken = asyncio.Event()
        """Set when a pod that was ready has been assigned."""

    async def open(self, name: SandboxName, wait_s: float) -> SandboxOpened:
        """Return the sandbox of a rollout's program, and delete those of its predecessors.

        Raises `ClusterError` and ValueError.
        """
        rollout = _rollout(name)
        deadline = time.monotonic() + wait_s
        async with self._lock(rollout):
            pod = await self._found(name, rollout) or await self._claimed(name, rollout) or await self._created(name, rollout)
        for look in (*LOOK_S, *(LOOK_S[-1] for _ in range(int(wait_s / LOOK_S[-1]) + 1))):
            if pod is None or not pod.alive or pod.sandbox != name.whole:
                return SandboxOpened(why_not="its pod ended before it was ready" if pod is None else _state(pod))
            if pod.ready:
                self._held[pod.name] = name.whole
                return SandboxOpened(pod.name)
            if time.monotonic() + look > deadline:
                break
            await asyncio.sleep(look)
            pod = await self._pods.get(pod.name)
        return SandboxOpened(why_not=_state(pod) if pod else "its pod is gone")

    async def run(self, call: RunCode) -> CodeDone:
        """Run code, or attach to the call that runs it.

        Raises `ClusterError`, and ValueError for a pod that is not the rollout's.
        """
        began, looks = time.monotonic(), 0
        if fate := await self._not_its_own(call):
            return self._counted(fate, began)
        deadline = began + call.limit_s + CALL_MARGIN_S
        last, suspected = "", False
        while (left := deadline - time.monotonic()) > 0:
            try:
                return self._counted(await execute(self._pods, call, left), began)
            except Garbled as error:
                return self._counted(CodeDone(ended=f"it sent no result: {error}"), began)
            except NotExecuted as error:
                last, suspected = f": {error}"[:300], suspected or error.suspected
                log.info("a call was cut off", pod=call.pod, call=call.call, error=str(error))
            fate = _fate(await self._pods.get(call.pod))
            if fate is not None:
                return self._counted(fate, began)
            await asyncio.sleep(LOOK_S[min(looks, len(LOOK_S) - 1)])
            looks += 1
        lost = f"no result after {call.limit_s + CALL_MARGIN_S:g} s{last}"
        return self._counted(CodeDone(lost=lost, suspected=suspected), began)

    async def close(self, name: SandboxName) -> None:
        """Delete a rollout's sandbox, if it has one. Raises `ClusterError` and ValueError."""
        rollout = _rollout(name)
        async with self._lock(rollout):
            for pod in await self._pods.selected({**self._settings.labels, ROLLOUT: rollout}):
                if pod.sandbox == name.whole:
                    self._held.pop(pod.name, None)
                    await self._pods.delete(pod)

    async def sweep(self) -> None:
        """Delete unneeded sandboxes, and create the warm ones. Raises `ClusterError` and `StoreError`."""
        self.taken.clear()
        template = self._template = await self._pods.template(self._settings.template)
        pods = await self._pods.selected(self._settings.labels)
        plan = decide(pods, await self._fences(), template.digest, self._settings.warm, self._oldest(template))
        self._ready = deque(plan.ready)
        self._held = {pod.name: pod.sandbox for pod in pods if pod.name in self._held and not pod.deleting}
        gate = asyncio.Semaphore(AT_ONCE)

        async def once(doing: Callable[[], Awaitable[object]]) -> object:
            async with gate:
                return await doing()

        fresh = {**self._settings.labels, STATE: WARM}
        bodies = [template.pod(f"warm-{secrets.token_hex(5)}", fresh, {}) for _ in range(plan.create)]
        doing = [
            *(partial(self._pods.delete, pod) for pod in plan.orphaned),
            *(partial(self._pods.delete, pod, unchanged=True) for pod in plan.spare),
            *(partial(self._pods.create, body) for body in bodies),
        ]
        done = await asyncio.gather(*map(once, doing), return_exceptions=True)
        self._metrics.swept.inc(sum(each is True for each in done[: len(plan.orphaned)]))
        self._metrics.held.set(sum(pod.labels.get(STATE) == HELD and not pod.deleting for pod in pods))
        self._metrics.warm.set(len(plan.ready))
        for error in done:
            if isinstance(error, BaseException):
                raise error

    async def _found(self, name: SandboxName, rollout: str) -> SandboxPod | None:
        """Return the pod that this request was assigned before; delete those of the rollout's earlier programs."""
        found = None
        for pod in await self._pods.selected({**self._settings.labels, ROLLOUT: rollout}):
            if found is None and pod.sandbox == name.whole and pod.alive:
                found = pod
            elif not pod.deleting:
                await self._pods.delete(pod)
        return found

    async def _claimed(self, name: SandboxName, rollout: str) -> SandboxPod | None:
        """Return a ready pod, which belongs to the rollout from now on; None if there is none."""
        while self._ready:
            pod = self._ready.popleft()
            self.taken.set()
            if await self._pods.change(pod, {"labels": _labels(name, rollout), "annotations": {NAME: name.whole}}):
                self._metrics.opened["warm"].inc()
                return await self._pods.get(pod.name)
        return None

    async def _created(self, name: SandboxName, rollout: str) -> SandboxPod | None:
        """Return a new pod of the rollout, or the one that an earlier request has created."""
        if self._template is None:
            self._template = await self._pods.template(self._settings.template)
        fence, _, sample = rollout.partition(".")
        own, labels = f"{fence}-{sample}-{name.attempt}", {**self._settings.labels, **_labels(name, rollout)}
        made = await self._pods.create(self._template.pod(own, labels, {NAME: name.whole}))
        if made is not None:
            self._metrics.opened["cold"].inc()
        return made or await self._pods.get(f"{self._settings.template}-{own}")

    def _oldest(self, template: PodTemplate) -> float:
        """Return the earliest creation time of a pod that may still be assigned to a rollout."""
        return time.time() - FRESH_SHARE * template.life_s if template.life_s else 0.0

    async def _not_its_own(self, call: RunCode) -> CodeDone | None:
        """Return why a call cannot be made. Raises ValueError if the pod belongs to another rollout, and `ClusterError`."""
        if self._held.get(call.pod) == call.name.whole:
            return None
        pod = await self._pods.get(call.pod) if POD.fullmatch(call.pod) else None
        if pod is not None and (pod.sandbox != call.name.whole or not self._settings.labels.items() <= pod.labels.items()):
            raise ValueError(f"pod {call.pod} is not the sandbox of {call.name.whole}")
        if pod is not None:
            self._held[call.pod] = call.name.whole
        return _fate(pod)

    def _counted(self, done: CodeDone, began: float) -> CodeDone:
        """Count a call."""
        self._metrics.calls["lost" if done.lost else "ended" if done.ended else "done"].inc()
        self._metrics.call_s.observe(time.monotonic() - began)
        return done

    def _lock(self, rollout: str) -> asyncio.Lock:
        """Return the lock of a rollout, which serialises its requests."""
        if len(self._locks) > 10_000:
            self._locks = {key: lock for key, lock in self._locks.items() if lock.locked()}
        return self._locks.setdefault(rollout, asyncio.Lock())


def _rollout(name: SandboxName) -> str:
    """Return the label of a sandbox's rollout. Raises ValueError for a name that no rollout has."""
    _, fence, sample = name.parts
    if not ATTEMPT.fullmatch(name.attempt):
        raise ValueError(f"{name.attempt!r} names no attempt")
    return f"{fence}.{sample}"


def _labels(name: SandboxName, rollout: str) -> dict[str, str]:
    ticket = name.parts[0]
    return {STATE: HELD, ROLLOUT: rollout, **({TICKET: ticket} if LABEL.fullmatch(ticket) else {})}


def _fate(pod: SandboxPod | None) -> CodeDone | None:
    """Return what a pod's end means for a call in it; None: it has not ended."""
    if pod is None or pod.deleting:
        return CodeDone(lost="its pod was deleted")
    if pod.ending:
        return CodeDone(ended=pod.ending)
    return None if pod.alive else CodeDone(lost=f"its pod was ended by the cluster ({pod.trouble})")


def _state(pod: SandboxPod) -> str:
    """Return why a pod is not ready."""
    if pod.deleting:
        return f"pod {pod.name} is being deleted"
    return f"pod {pod.name} is {pod.phase}: {pod.trouble or pod.ending or 'its container starts'}"
