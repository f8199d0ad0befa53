"""The verdict on a finished run, from its files and from the contents of its Redis.

Guarantees: a separate server loads the append-only file that the run left, so nothing that Redis held is missed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from services.console.run.redis_server import RedisServer
from services.dataprep.prompts.catalogue import PromptSource
from services.dataprep.prompts.order import PromptOrder
from services.operations.inspection.ledger import audit
from services.store import Store
from services.store.records import RunState
from tests.faults.rewards import fails
from tests.faults.run_under_test import RunUnderTest
from tests.faults.watcher import Watcher


@dataclass(frozen=True)
class Verdict:
    """The result of one run."""

    run: str
    steps: int
    lost: int
    doubled: int
    skipped: int
    """Prompts before the run's cursor that are unaccounted for: neither trained on nor dropped nor in flight."""
    leaked: int
    """Unreferenced payloads without an expiry."""
    dropped: int
    """Tickets with an outcome other than trained: there must be none, except for the prompts that always fail."""
    max_lag: int
    plans_seen: int
    in_order: bool | None
    """Whether the groups of every observed plan equal those of the undisturbed run; None if they may differ."""
    bit_identical: bool | None
    """Whether the weights are equal; None if they may differ."""
    evaluated: int
    """Evaluation rounds reported."""
    restarts: dict[str, int]
    audits: int
    went_back: int
    violations: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        same = {True: "yes", False: "NO", None: "not claimed"}
        return (
            f"{self.steps} steps, {self.lost} lost, {self.doubled} doubled, {self.skipped} skipped, {self.leaked} leaked, "
            f"{self.dropped} dropped, largest lag {self.max_lag}, in order: {same[self.in_order]}, "
            f"bit-identical: {same[self.bit_identical]}, {self.evaluated} evaluation rounds, {self.audits} audits, "
            f"{sum(self.restarts.values())} restarts"
        )


async def judge(run: RunUnderTest, watcher: Watcher, calm: RunUnderTest | None) -> Verdict:
    """Judge a finished run. `calm` is an undisturbed run of the same configuration, or None if the two may differ."""
    summary = json.loads(run.folder.summary.read_text())
    rows = [json.loads(line) for line in run.folder.metrics.read_text().splitlines()]
    violations = []
    server = RedisServer(run.folder.redis)
    server.start()
    try:
        store = await Store.connect(server.url, run.name, server.password)
        try:
            report, state = await audit(store), await store.run.state()
            assert state is not None
            skipped, leaked = await _skipped(run, store, state, report.issued), await _leaked(store)
            failed = {letter.ticket for letter in await store.dead_letters.page(1000)}
        finally:
            await store.close()
    finally:
        server.stop()
    dropped = sum(count for name, count in report.outcomes.items() if name != "trained")
    in_order = identical = None
    always = {ticket for ticket in _order(run, report.issued) if fails(ticket.rpartition("-")[2])}
    expected = report.outcomes.get("failed", 0) if run.shape.breakable and failed <= always else 0
    rounds, twice = _evaluations(run)
    if calm is not None:
        order = _order(run)
        per_step = run.config.admission.prompts_per_step
        in_order = all(groups == order[per_step * step : per_step * (step + 1)] for step, groups in watcher.plans.items())
        identical = run.weights() == calm.weights()
    verdict = Verdict(
        run.name, summary["steps"], report.lost, report.doubled, skipped, leaked, dropped,
        max(watcher.max_lag, int(summary["max_lag"])), len(watcher.plans), in_order, identical, len(rounds), summary["restarts"],
        watcher.audits, watcher.went_back, violations,
    )  # fmt: skip
    violations += [f"audit at the end: {message}" for message in report.messages]
    for name, wrong in {
        f"{verdict.steps} of {run.setting.steps} steps were trained": verdict.steps != run.setting.steps,
        f"{skipped} prompts were skipped": skipped != 0,
        f"{leaked} payloads leaked": leaked != 0,
        f"tickets were dropped: {report.outcomes}, dead letters {sorted(failed - always)}": dropped != expected,
        f"versions {twice} were evaluated twice": bool(twice),
        "an evaluation round had another result than without faults": calm is not None
        and not rounds.items() <= _evaluations(calm)[0].items(),
        f"a lag of {verdict.max_lag}": verdict.max_lag > run.config.admission.max_staleness,
        "steps are recorded other than once each, in order": [row["step"] for row in rows] != list(range(run.setting.steps)),
        f"{summary['syncs']} versions published": summary["syncs"] != run.setting.steps + 1 and not watcher.went_back,
        "a step trained on other prompts than without faults": in_order is False,
        "the weights are not those of the run without faults": identical is False,
        "the gradient was zero all along, so equal weights say nothing": not any(row["gradient/train/norm"] for row in rows),
        "processes are left": bool(run.processes()),
    }.items():
        if wrong:
            violations.append(name)
    return verdict


def _evaluations(run: RunUnderTest) -> tuple[dict[int, float], list[int]]:
    """Return the mean reward of each evaluated version, and the versions that were reported more than once."""
    path = run.folder.path / "evaluations.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    versions = [int(line["eval/version"]) for line in lines]
    rewards = {int(line["eval/version"]): line["eval/all/reward"] for line in lines}
    return rewards, sorted({version for version in versions if versions.count(version) > 1})


def _order(run: RunUnderTest, count: int = 0) -> list[str]:
    """Return the first `count` tickets of the run, by default as many as it trains on."""
    config = run.config
    order = PromptOrder(PromptSource(config).spans, config.run.seed, config.data.shuffle, config.slots)
    count = count or config.admission.prompts_per_step * config.run.steps
    return [f"{pick.epoch}-{pick.row}" for pick in order.draft(count, 0, {}).picks]


async def _skipped(run: RunUnderTest, store: Store, state: RunState, issued: int) -> int:
    """Count the issued tickets that have neither a place nor an outcome. Requeued ones move the cursor, too."""
    keys, places = store.keys, set()
    client: Any = store.client  # replies are bytes
    for name in (keys.outstanding, keys.replay_order, keys.prefix + ":reissue"):
        places |= {ticket.decode() for ticket in await client.zrange(name, 0, -1)}
    places |= {ticket.decode() for ticket in await client.hkeys(keys.drops)}
    for step in range(state.committed_step + 1, state.prepared_step + 1):
        if plan := await store.steps.plan(step):
            places |= set(plan.groups)
    trained: dict[str, bytes] = {}
    missing = 0
    for ticket in _order(run, issued):
        epoch, _, row = ticket.partition("-")
        if epoch not in trained:
            trained[epoch] = await client.get(keys.trained(int(epoch))) or b""
        byte, bit = divmod(int(row), 8)
        done = byte < len(trained[epoch]) and trained[epoch][byte] >> (7 - bit) & 1
        missing += not done and ticket not in places
    return missing


async def _leaked(store: Store) -> int:
    """Count the payloads without an expiry that no header, group or plan refers to."""
    keys = store.keys
    client: Any = store.client
    known = {fields[b"payload"].decode() for _, fields in await client.xrange(keys.headers)}
    prefix, leaked = keys.payload(""), 0
    async for key in client.scan_iter(f"{_glob(prefix)}*", count=1000):
        name = key.decode().removeprefix(prefix)
        held = await client.hget(keys.group(name.rpartition(".")[0]), "payload")
        leaked += name not in known and (held or b"").decode() != name and await client.ttl(key) == -1
    return leaked


def _glob(text: str) -> str:
    return text.replace("[", r"\[").replace("*", r"\*").replace("?", r"\?")
