"""The gaps between the trainer's and the sampler's logprobs: compared once, and sent to the sample log token by token.

Guarantees: a run whose engine computes another model than its trainer stops before the first step that shows it is committed,
even if it was forked or resumed with other engine options. A step never waits for the sample log, neither for Redis nor for the
encoding; one step's gaps are under way at a time, and those of a step that ends meanwhile are left out; what it writes is bounded
and expires. Nothing is recomputed: the gaps are those of the step's own loss.

Waits for: Redis, for `WRITE_S` at most, on the portal's loop.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import math
from collections.abc import Mapping, Sequence

import numpy as np
import structlog
import torch
from torch import Tensor

from services.protocol.errors import StoreError
from services.protocol.logprob_gaps import HIGHEST, LEAST_GAP, STEP, UNKNOWN, LogprobGaps
from services.runtime.loops import Fatal
from services.runtime.portal import Portal
from services.store import Store
from services.store.samples import is_sampled
from services.trainer.step.batches import PackedRow
from services.trainer.step.priorities import group_of

log = structlog.get_logger()

WRITE_S = 10.0
END_S = 1.0  # for the last step's gaps, at the end of the process
STEP_BYTES = 8 << 20  # of the gaps of a step, over all ranks

OFF_POLICY = "staleness/trained/off_policy_share"

MAX_GAP = 0.1
"""Largest mean difference, in nats, of logprobs that precision explains: bfloat16 kernels differ by 0.001 to 0.03."""


@torch.no_grad()
def codes(gaps: Sequence[Tensor]) -> Tensor:
    """Return the codes of the rows' gaps, [sum R] int8, on the CPU."""
    gap = torch.cat(list(gaps)).float()
    sizes = torch.log(gap.abs() / LEAST_GAP).div(math.log(STEP)).round().add(1).clamp(0, HIGHEST)
    return torch.where(gap.isfinite(), sizes * gap.sign(), torch.full_like(gap, UNKNOWN)).to(torch.int8).cpu()


def message(rows: Sequence[PackedRow], gaps: Tensor, share: float, limit: int) -> LogprobGaps:
    """Return the gaps of the logged `share` of groups, as many whole segments as fit into `limit` bytes.

    `gaps`: the codes of `rows`, [sum R] int8.
    """
    payloads, segments, counts, pieces, at, size = list[str](), list[int](), list[int](), list[bytes](), 0, 0
    given = gaps.numpy()
    for row in rows:
        lengths = np.bincount(row.sample_of_token.numpy(), minlength=len(row.samples)).tolist()
        for (payload, _), segment, length in zip(row.samples, row.segments, lengths, strict=True):
            if length and size + length <= limit and is_sampled(group_of(payload), share):
                payloads.append(payload)
                segments.append(segment)
                counts.append(length)
                pieces.append(given[at : at + length].tobytes())
                size += length
            at += length
    return LogprobGaps(payloads, segments, counts, b"".join(pieces))


class GapSender:
    """Sends the gaps of data rank `rank`, of the logged `share` of groups."""

    def __init__(self, portal: Portal, store: Store, rank: int, share: float) -> None:
        self._portal, self._store, self._rank, self._share = portal, store, rank, share
        self._work: concurrent.futures.Future[None] | None = None

    def begin(self, step: int, rows: Sequence[PackedRow], gaps: Tensor, ranks: int) -> None:
        """Send the gaps of a step in the background, unless those of an earlier one are still under way."""
        if self._work is None or self._work.done():
            self._work = self._portal.start(self._send(step, rows, gaps, STEP_BYTES // ranks))

    def close(self) -> None:
        """Give running work a moment to finish."""
        if self._work is not None:
            with contextlib.suppress(TimeoutError, concurrent.futures.CancelledError):
                self._work.result(END_S)

    async def _send(self, step: int, rows: Sequence[PackedRow], gaps: Tensor, limit: int) -> None:
        try:
            async with asyncio.timeout(WRITE_S):
                made = await asyncio.to_thread(message, rows, gaps, self._share, limit)
                await self._store.samples.send_gaps(step, self._rank, made)
        except (StoreError, OSError, TimeoutError) as error:
            log.info("the sample log does not get the logprob gaps of a step", step=step, error=str(error))
        except Exception:  # no step waits for this, and none may fail because of it
            log.warning("the logprob gaps of a step could not be computed", step=step, exc_info=True)


class EngineComparison:
    """Checks the first suitable step of each trainer process."""

    def __init__(self, engine: str) -> None:
        """`engine`: `generator.engine`. A custom one may sample from whatever it likes, and is not compared."""
        self._done = engine != "vllm"

    def check(self, step: int, stats: Mapping[str, float], metrics: Mapping[str, float]) -> None:
        """Raise `Fatal` if the gap exceeds `MAX_GAP`. `stats`: the plan's, which say how much of the step is off-policy."""
        if self._done or (step and stats.get(OFF_POLICY, 1.0) > 0):
            return
        if not metrics["tokens/train/sum"]:
            if metrics["excluded/train/tokens"]:
                raise Fatal(
                    f"step {step} trains no token, since the engine returned no finite logprob for any of them: compare "
                    "generator.engine and generator.engine_options with the model's config.json (docs/models.md)"
                )
            return
        self._done = True
        if (gap := metrics["logprob_gap/train/mean"]) > MAX_GAP:
            raise Fatal(
                f"the engine's logprobs differ from the trainer's by {gap:.2g} nats on average (at most "
                f"{metrics['logprob_gap/train/max']:.2g}) on step {step}, more than {MAX_GAP}, although both have the same "
                "weights, so they compute different models: compare generator.engine_options with the model's config.json "
                "(docs/models.md)"
            )
