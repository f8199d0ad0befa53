"""Scores groups with all verifiers of the run: those in worker processes on this machine, and those that are services.

Guarantees: a group gets the scores of all verifiers of its prompt source, each checked (results.py), or one `VerifierFailure`.
Waits for: idle workers, and services, whose outages it outlasts up to `GIVE_UP_S`; `waiting` says for which one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import astuple

from services.config import RunConfig
from services.config.data import Source
from services.config.secrets import variable_of
from services.config.verifiers import RemoteVerifier, named
from services.verifiers.base import Job, Scores, VerifierFailure
from services.verifiers.connection import GIVE_UP_S
from services.verifiers.pool import Freedoms, PoolCounts, VerifierPool
from services.verifiers.remote_pool import RemotePool
from services.verifiers.results import Verdict, gathered
from services.verifiers.together import together


class Scoring:
    """All verifiers of a run. Verifiers with `network = true` have their own worker processes."""

    def __init__(
        self, config: RunConfig, sources: Sequence[Source], workers: int = 0, prints: bool = False, give_up_s: float = 0.0
    ) -> None:
        """`workers`: of each pool; 0: as configured. `prints`: show what verifiers print; `give_up_s`: how
        long a service may be away; 0: `GIVE_UP_S`."""
        verifiers = named(config.verifiers)
        local = [(name, each) for name, each in verifiers if not isinstance(each, RemoteVerifier)]
        self._sources = {source.name for source in sources}
        workers = workers or config.generator.verifier_workers
        tokens = frozenset(variable_of(each.token) for each in config.verifiers if isinstance(each, RemoteVerifier))
        self.pools: list[VerifierPool] = []
        for network in (False, True):
            chosen = [(name, each) for name, each in local if (each.kind == "python" and each.network) == network]
            if chosen:
                variables = frozenset(name for _, each in chosen if each.kind == "python" for name in each.variables)
                freedoms = Freedoms(network, variables, prints, tokens)
                self.pools.append(VerifierPool(chosen, workers, sources, freedoms, config.sampling.max_tokens))
        self._remote = RemotePool(verifiers, sources, give_up_s or GIVE_UP_S)

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
        return PoolCounts(*map(sum, zip(*(astuple(pool.counts) for pool in self.pools), strict=True)))
