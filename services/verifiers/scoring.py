"""Scores groups with all verifiers of the run: those in worker processes on this machine, and those that are services.

Guarantees: a group gets the scores of all verifiers of its prompt source, each checked (results.py), or one `VerifierFailure`.
Waits for: idle workers, and services, whose outages it outlasts up to their `give_up_s`; `waiting` says for which one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from services.config import RunConfig
from services.config.data import Source
from services.config.verifiers import RemoteVerifier, VerifierConfig, named
from services.verifiers.base import Job, Scores, VerifierFailure
from services.verifiers.pool import MEMORY_BYTES, Freedoms, PoolCounts, VerifierPool
from services.verifiers.remote import RemotePool
from services.verifiers.results import Verdict, gathered
from services.verifiers.together import together


class Scoring:
    """All verifiers of a run. Verifiers with `network = true` have their own worker processes."""

    def __init__(self, config: RunConfig, sources: Sequence[Source], workers: int = 0, prints: bool = False) -> None:
        """`workers`: of each pool; 0: as configured. `prints`: show what verifiers print."""
        verifiers = [(name, _completed(verifier, config)) for name, verifier in named(config.verifiers)]
        self._sources = {source.name for source in sources}
        workers = workers or config.generator.verifier_workers
        tokens = frozenset(each.token_env for each in config.verifiers if isinstance(each, RemoteVerifier))
        self.pools: list[VerifierPool] = []
        for network in (False, True):
            chosen = [(name, each) for name, each in verifiers if _is_local(each) and _networked(each) == network]
            if chosen:
                freedoms = replace(_freedoms([each for _, each in chosen], network, prints), withheld=tokens)
                self.pools.append(VerifierPool(chosen, workers, sources, freedoms))
        self._remote = RemotePool([(name, each) for name, each in verifiers if not _is_local(each)], sources)

    async def start(self) -> None:
        """Start all workers and wait until they are warm. Raises `VerifierFailure`, e.g. for a function that cannot be loaded."""
        await self._remote.start()
        for pool in self.pools:
            await pool.start()

    async def score(self, job: Job) -> Scores:
        """Score a group. Raises `VerifierFailure`."""
        if job.source not in self._sources:
            raise VerifierFailure(
                f"the run has no prompt source {job.source!r}: its sources are {', '.join(sorted(self._sources))}"
            )
        found: dict[str, Verdict] = {}
        for verdicts in await together([one.score(job) for one in (*self.pools, self._remote)]):
            found |= verdicts
        return gathered(found, len(job.completions))

    async def close(self) -> None:
        """End all workers and connections. Pending calls of `score` fail."""
        await asyncio.gather(*(pool.close() for pool in self.pools), self._remote.close())

    @property
    def waiting(self) -> str:
        """Return which service is waited for, since when and why, or "" if all answer."""
        return self._remote.waiting

    @property
    def counts(self) -> PoolCounts:
        """Counters of all workers since they started."""
        total = PoolCounts()
        for counts in (pool.counts for pool in self.pools):
            total.groups, total.failures = total.groups + counts.groups, total.failures + counts.failures
            total.restarts, total.busy_s = total.restarts + counts.restarts, total.busy_s + counts.busy_s
        return total


def _completed(verifier: VerifierConfig, config: RunConfig) -> VerifierConfig:
    if verifier.kind == "length" and not verifier.max_tokens:
        return verifier.model_copy(update={"max_tokens": config.sampling.max_tokens})
    return verifier


def _is_local(verifier: VerifierConfig) -> bool:
    return not isinstance(verifier, RemoteVerifier)


def _networked(verifier: VerifierConfig) -> bool:
    return verifier.kind == "python" and verifier.network


def _freedoms(verifiers: Sequence[VerifierConfig], network: bool, prints: bool) -> Freedoms:
    own = [verifier for verifier in verifiers if verifier.kind == "python"]
    limits = [verifier.memory_mib << 20 if verifier.kind == "python" else MEMORY_BYTES for verifier in verifiers]
    memory = 0 if 0 in limits else max(limits)
    return Freedoms(network, frozenset(name for each in own for name in each.environment), memory, prints)
