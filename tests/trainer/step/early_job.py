"""The work of a rank in the test of early parts: four steps, with whatever early parts Redis happens to have."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from tests.support.models.rank_worker import _policy, whole_weights

ROWS = 1
"""Rows of each rank in an early part."""
SLOW_S = 0.5
"""Seconds to fetch an early part."""


def run(model: Path, url: str, password: str, run: str) -> dict[str, Any]:
    """Train the steps as rank 0 leads them.

    They are one with an early part, one without, one whose early part lacks a payload at first, and one that was planned again
    without its early part. Return the weights before the last step, and those of a policy that trained the same steps whole.
    """
    from services.protocol import codec
    from services.protocol.messages import RankPlan
    from services.runtime.loops import Broken
    from services.runtime.portal import Portal
    from services.store import Store
    from services.trainer import ranks
    from services.trainer.step import batches
    from services.trainer.worker import Worker

    sections = {"run": {"name": run, "steps": 4}, "trainer": {"row_tokens": 128}, "samples": {"keep": True}}
    policy, portal = _policy(model, sections), Portal()
    store = portal.call(Store.connect(url, run, password))
    worker, keys, mine = Worker(policy.config, store, portal, policy, Path("unused")), store.keys, policy.world.rank

    def redis(command: str, *args: Any) -> Any:
        return portal.call(store.client.execute_command(command, *args))

    def everywhere(write: Any) -> Any:
        """Let rank 0 write to Redis before any rank continues."""
        value = write() if mine == 0 else None
        return ranks.gather(value)[0]

    def offer(step: int) -> None:
        plans = [portal.call(store.steps.rank_plan(step, rank)) for rank in range(policy.world.size)]
        rows = [part for rank, plan in enumerate(plans) for part in (f"0:{rank}", codec.encode(RankPlan(plan.rows[:ROWS])))]
        redis("DEL", keys.early)
        redis("HSET", keys.early, "step", step, "groups", "0-0", *rows)

    found: dict[str, Any] = {"trained": [], "ratios": [], "fetch_s": [], "problem": ""}

    def train(step: int) -> None:
        metrics = worker.train(step)[1].metrics  # type: ignore[index]
        found["ratios"].append(metrics["rows/train/early_ratio"])
        found["fetch_s"].append(metrics["time/train/fetch_s"])

    take = worker.prefetch.take_early

    def take_slowly(step: int, part: int) -> Any:
        time.sleep(SLOW_S)
        return take(step, part)

    worker.prefetch.take_early = take_slowly  # type: ignore[method-assign]

    everywhere(lambda: offer(0))
    found["trained"] += [worker.train_early(0), worker.early_parts(0), worker.train_early(0), worker.early_parts(1)]
    train(0)
    found["trained"] += [worker.train_early(1), worker.early_parts(0)]
    train(1)
    payload = portal.call(store.steps.rank_plan(2, 1)).rows[0][0].payload
    everywhere(lambda: offer(2))
    kept = everywhere(lambda: redis("GETDEL", keys.payload(payload)))
    found["trained"] += [worker.train_early(2), worker.early_parts(2)]
    everywhere(lambda: redis("SET", keys.payload(payload), kept))
    train(2)
    found["weights"] = whole_weights(policy)
    everywhere(lambda: offer(3))
    found["trained"] += [worker.train_early(3), worker.early_parts(3)]
    everywhere(lambda: redis("HSET", keys.step(3), "rank:1", redis("HGET", keys.step(2), "rank:1")))
    try:
        train(3)
    except Broken as error:
        found["problem"] = str(error)
    worker.close()
    found["gaps"] = [portal.call(store.samples.gaps(step, policy.world.size)) for step in range(3)]

    policy = _policy(model, sections)
    for step in range(3):
        plan, ours = portal.call(store.steps.plan(step)), portal.call(store.steps.rank_plan(step, mine))
        payloads = portal.call(store.steps.payloads(sorted({sample.payload for row in ours.rows for sample in row})))
        policy.train(batches.build(ours, payloads, vocabulary=policy.vocabulary, row_tokens=128), plan)
    found["whole"] = whole_weights(policy)
    portal.call(store.close())
    portal.close()
    return found
