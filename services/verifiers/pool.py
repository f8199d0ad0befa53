"""A pool of warm worker processes that score whole groups.

Waits for: an idle worker. Unblocked by: the end of another group, which each reaches within its time limit, and the replacement
of a worker that died.
Guarantees: a group gets the verdicts of all the pool's verifiers of its prompt source, or one `VerifierFailure`; a broken worker
is replaced in the background before it gets another group; the pool keeps working.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.config.data import Source
from services.config.verifiers import VerifierConfig
from services.confined.scratch import sweep
from services.confined.worker import LOST, ConfinedWorker, Launch, NotStarted
from services.verifiers.base import Hello, Job, Setup, VerifierFailure
from services.verifiers.results import Verdict, fault_of

MEMORY_BYTES = 4 << 30
"""Address space of a worker: several times the size that the libraries of built-in verifiers map, and far below that of a tower
of powers."""

GRACE_S = 5.0
"""A worker ends itself at a call's limit. If it does not, because it is stopped or stuck, it is killed this much later."""


@dataclass
class PoolCounts:
    """Counters of the pool since it started."""

    groups: int = 0
    failures: int = 0
    restarts: int = 0
    busy_s: float = 0.0
    """Time that workers spent on groups, including failed ones."""


@dataclass(frozen=True)
class Freedoms:
    """Permissions of a pool's workers."""

    network: bool = False
    inherited: frozenset[str] = frozenset()
    """Environment variables that they get although they look like secrets."""
    prints: bool = False
    """Whether what verifiers print is shown."""
    withheld: frozenset[str] = frozenset()
    """Environment variables that they do not get although they look harmless."""


class VerifierPool:
    """Scores groups with some of the verifiers of their prompt source, on `workers` processes."""

    def __init__(
        self,
        verifiers: Sequence[tuple[str, VerifierConfig]],
        workers: int,
        sources: Sequence[Source],
        freedoms: Freedoms = Freedoms(),
        max_tokens: int = 0,
    ) -> None:
        """`verifiers` have names; `sources` are all possible sources; `max_tokens` is the maximum length of a completion."""
        self.counts = PoolCounts()
        setup = Setup(
            [(name, each.model_dump(mode="json")) for name, each in verifiers],
            [each.model_dump(mode="json") for each in sources],
            freedoms.network,
            MEMORY_BYTES,
            freedoms.prints,
            max_tokens,
        )
        self._verifiers = {
            source.name: [(name, verifier) for name, verifier in verifiers if verifier.scores(source.name)] for source in sources
        }
        self._workers = [ScoringWorker(setup, self._verifiers, freedoms) for _ in range(workers)]
        self._idle: asyncio.LifoQueue[ScoringWorker] = asyncio.LifoQueue()
        self._replacing: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def pids(self) -> list[int]:
        """Process ids of the running workers."""
        return [worker.pid for worker in self._workers if worker.pid is not None]

    async def start(self) -> None:
        """Start all workers and wait until they are warm. Raises `VerifierFailure`, e.g. for a broken pattern.

        First delete what workers of killed processes left behind.
        """
        await asyncio.to_thread(sweep)
        outcomes = await asyncio.gather(*(worker.warm_up() for worker in self._workers), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                await self.close()
                raise outcome
        self._closed = False
        self._idle = asyncio.LifoQueue()  # each worker is in it once, even if the pool is started again
        for worker in self._workers:
            self._idle.put_nowait(worker)

    async def score(self, job: Job) -> dict[str, Verdict]:
        """Score a group: map those verifiers of its source that the pool has to their verdicts. Raises `VerifierFailure`."""
        if not self._verifiers.get(job.source):
            return {}
        worker = await self._idle.get()
        if self._closed:
            self._idle.put_nowait(worker)  # for the next call that waits
            raise VerifierFailure("the verifiers have been closed")
        started = time.monotonic()
        try:
            if not worker.alive:
                self.counts.restarts += 1
                await worker.warm_up()
            return await worker.score(self._trimmed(job, worker.needs[job.source]))
        except VerifierFailure:
            self.counts.failures += 1
            raise
        finally:
            self.counts.groups += 1
            self.counts.busy_s += time.monotonic() - started
            self._hand_back(worker)

    def _trimmed(self, job: Job, needs: Sequence[str]) -> Job:
        """Return the job with the fields that the verifiers request, in encodable characters."""
        return Job(
            job.source,
            [_encodable(text) for text in job.completions],
            _encodable(job.answer),
            job.row if {"prompt", "row"} & {*needs} else "",
            job.finish,
            job.tokens if "tokens" in needs else [],
        )

    async def close(self) -> None:
        """End all workers. Pending calls of `score` fail."""
        self._closed = True
        for task in self._replacing:
            task.cancel()  # which ends the process that it starts
        await asyncio.gather(*(worker.kill() for worker in self._workers), *self._replacing, return_exceptions=True)
        self._idle.put_nowait(self._workers[0])  # wakes a call that waits for one

    def _hand_back(self, worker: ScoringWorker) -> None:
        if worker.alive or self._closed:
            self._idle.put_nowait(worker)
            return
        task = asyncio.create_task(self._replace(worker))
        self._replacing.add(task)
        task.add_done_callback(self._replacing.discard)

    async def _replace(self, worker: ScoringWorker) -> None:
        """Restart a dead worker. If that fails, the next group tries again and reports the reason."""
        self.counts.restarts += 1
        try:
            await worker.warm_up()
        except VerifierFailure:
            self.counts.failures += 1
        finally:
            self._idle.put_nowait(worker)


class ScoringWorker(ConfinedWorker):
    """One worker process, which scores one group at a time and can be started again.

    Guarantees: every exchange ends within its limit, with verdicts or with a `VerifierFailure`, after which the process is dead.
    """

    def __init__(self, setup: Setup, verifiers: Mapping[str, Sequence[tuple[str, VerifierConfig]]], freedoms: Freedoms) -> None:
        """`verifiers`: source -> its verifiers by name."""
        super().__init__(Launch("services.verifiers.worker", freedoms.inherited, freedoms.withheld, prints=freedoms.prints))
        self._setup, self._verifiers = setup, verifiers
        self.needs: dict[str, list[str]] = {}
        """Source -> fields of a group that its verifiers request, once started."""

    async def warm_up(self) -> None:
        """Start the process and wait until it is warm. Raises `VerifierFailure`."""
        try:
            hello = await self.start(self._setup, Hello)
        except NotStarted as error:
            raise VerifierFailure(f"a verifier worker {error}") from None
        if hello.error:
            await self.kill()
            raise VerifierFailure(hello.error)
        self.needs = hello.needs

    async def score(self, job: Job) -> dict[str, Verdict]:
        """Return verifier -> its verdict on a group. Raises `VerifierFailure`. Cancelling the call kills the process."""
        verdicts: dict[str, Verdict] = {}
        fault, answered = "", False
        verifiers, count = self._verifiers[job.source], len(job.completions)
        allowed_s = sum(verifier.timeout_s for _, verifier in verifiers) * count + GRACE_S
        try:
            async with asyncio.timeout(allowed_s):
                for name, verifier in verifiers:
                    verdict = await (self.receive(Verdict) if verdicts else self.exchange(job, Verdict))
                    verdicts[name] = verdict
                    if found := verdict.error or fault_of(verdict, count, verifier.bounds):
                        fault = fault or f"verifier {name!r} failed: {found}"
                    if verdict.error:  # the worker has ended the group
                        break
            answered = True
        except LOST as error:
            name, verifier = verifiers[min(len(verdicts), len(verifiers) - 1)]
            why = await self.end(error)
            raise VerifierFailure(f"verifier {name!r}, timeout_s = {verifier.timeout_s:g}: {why}") from None
        finally:
            if not answered:  # also cancelled: its answer to this group would be taken for the next group's
                await self.kill()
        if fault:
            raise VerifierFailure(fault)
        return verdicts


def _encodable(text: str) -> str:
    """Replace lone surrogates, which cannot be encoded."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")
