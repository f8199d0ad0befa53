"""Repeats the stages of a bundle that need neither torch nor ranks: score, settle, pack. Each yields recorded and new
values.

Guarantees: nothing that a bundle names is executed or called over the network unless requested.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from services.algorithm import advantages, row_statistics
from services.algorithm.group_statistics import DAMAGED
from services.config import RunConfig
from services.config.verifiers import PythonConfig, named
from services.dataprep.planning.plan import plan_step
from services.dataprep.planning.step import layout_of, plan_group
from services.dataprep.replay.settling import settle
from services.generator.engines.tokenizer import load_tokenizer
from services.operations.bundles.format import Bundle, BundleError, RecordedGroup
from services.protocol import codec
from services.protocol.messages import Header, RankPlan, Sample, StepPlan
from services.protocol.payloads import Payload
from services.store import HeaderEntry
from services.verifiers.base import Job, VerifierFailure, combine, solved
from services.verifiers.scoring import Scoring

CONFINED = ("math", "exact", "regex", "reasoning_gym", "length")
"""Kinds of verifier that run none of the bundle's code and call no service."""
ZERO_STD = "filters.zero_std"
"""The key that may change when a run is resumed and decides whether a group is inserted."""


@dataclass(frozen=True)
class Compared:
    """A recorded value and the one that the replay computes."""

    where: str
    was: Any
    now: Any

    def differs(self, tolerance: float) -> bool:
        """Return whether the two differ, floats by more than `tolerance` times the larger."""
        if isinstance(self.was, float) and isinstance(self.now, int | float):
            return not (self.was == self.now or abs(self.was - self.now) <= tolerance * max(abs(self.was), abs(self.now)))
        return bool(self.was != self.now)

    def __str__(self) -> str:
        text = f"{self.where}: was {self.was}, is now {self.now}"
        if isinstance(self.was, float) and isinstance(self.now, float) and self.was:
            text += f" (relative difference {abs(self.now / self.was - 1):.1e})"
        return text


def headers_of(bundle: Bundle) -> dict[str, Header]:
    """Return the headers by payload. Raises `CorruptMessage`."""
    return {name: codec.decode(group.header, Header) for name, group in bundle.groups.items()}


async def score(bundle: Bundle, config: RunConfig, run_code: bool) -> AsyncIterator[Compared | str]:
    """Score all completions again. Yields a message for skipped parts."""
    names = {id(verifier): name for name, verifier in named(config.verifiers)}
    allowed = [each for each in config.verifiers if run_code or each.kind in CONFINED]
    left_out = [names[id(each)] for each in config.verifiers if each not in allowed]
    if left_out:
        yield f"{', '.join(left_out)}: left out, because it runs code or asks a service: trust the bundle and add --run-code"
    if not allowed:
        return
    for each in allowed:
        if isinstance(each, PythonConfig) and each.file and not await asyncio.to_thread(Path(each.file).is_file):
            raise BundleError(
                f"verifier {names[id(each)]!r}: the bundle does not contain its code, and there is no {each.file} here: put the "
                "function's file there, or replay it where the run was"
            )
    allowed = [each.model_copy(update={"name": names[id(each)]}) for each in allowed]
    tried = config.model_copy(update={"verifiers": allowed})
    _check_model(bundle, config)
    tokenizer = load_tokenizer(config)
    scoring = Scoring(tried, [*config.data.sources], workers=1)
    await scoring.start()
    try:
        for name, group in bundle.groups.items():
            header, payload = codec.decode(group.header, Header), codec.decode(group.payload, Payload)
            if config.environment_of(header.source) or group.answer is None:
                what = "scored by its environment" if group.answer is not None else "its answer was not recorded"
                yield f"group {header.ticket}: left out, {what}"
                continue
            try:
                found = await scoring.score(_job(header, payload, group, tokenizer))
            except VerifierFailure as failure:
                yield Compared(f"score of group {header.ticket}", "scores", f"a failure: {failure}")
                continue
            for verifier, column in found.scores.items():
                for i, now in enumerate(column):
                    was = header.scores.get(verifier, [])
                    yield Compared(
                        f"score of verifier {verifier}, group {header.ticket} ({name}), completion {i}",
                        was[i] if i < len(was) else None, now,
                    )  # fmt: skip
            if not left_out:
                for i, now in enumerate(combine(found.scores, config.verifiers)):
                    yield Compared(f"reward of group {header.ticket}, completion {i}", header.rewards[i], now)
                judged = solved(found.scores, config.thresholds(header.source))
                yield Compared(f"solved completions of group {header.ticket}", header.solved, judged)
    finally:
        await scoring.close()


def _check_model(bundle: Bundle, config: RunConfig) -> None:
    """Raise `BundleError` if the model was a folder that is not here: otherwise the hub would be asked for the folder's name."""
    if bundle.model and not Path(config.model.path).is_dir():
        raise BundleError(
            f"model.path = {config.model.path!r} is no folder here, and the stage score needs its tokenizer; the bundle only "
            "refers to it: replay it where the model is, or record it with --weights"
        )


def _job(header: Header, payload: Payload, group: RecordedGroup, tokenizer: Any) -> Job:
    tokens = [part.tolist() for part in np.split(payload.tokens, np.cumsum(payload.lengths)[:-1])]
    texts = tokenizer.batch_decode(tokens, skip_special_tokens=True)
    finish = ["length" if truncated else "stop" for truncated in header.truncated]
    return Job(header.source, texts, group.answer or "", group.row, finish, tokens)


def settled(bundle: Bundle, config: RunConfig) -> Iterator[Compared | str]:
    """Settle every group again: it was inserted, and its completions had these advantages.

    A group that was settled before filters were changed for a resumed run may have been inserted by the earlier ones.
    """
    headers, others = headers_of(bundle), [_filtering(config, value) for value in bundle.earlier.get(ZERO_STD, ())]
    for step in bundle.steps:
        plan, samples = codec.decode(step.plan, StepPlan), dict[str, list[Sample]]()
        for sample in _samples(step.ranks):
            samples.setdefault(sample.payload, []).append(sample)
        for header in (headers[name] for name in samples):
            item = HeaderEntry("0-0", header.ticket, header.payload, b"", header)
            again = settle(item, plan.step, config)
            if again.action != "insert" and any(settle(item, plan.step, other).action == "insert" for other in others):
                yield f"outcome of group {header.ticket}: left out, {ZERO_STD} had another value before the run was resumed"
            else:
                yield Compared(f"outcome of group {header.ticket} at step {plan.step}", "insert", again.action)
            given = advantages.advantages(header.rewards, config.advantage.kind)
            for sample in samples[header.payload]:
                rollout = sample.response[1]
                now = float(given[rollout]) if rollout < len(given) else None
                yield Compared(f"advantage of group {header.ticket}, completion {rollout}", sample.advantage, now)


def _filtering(config: RunConfig, zero_std: bool) -> RunConfig:
    return config.model_copy(update={"filters": config.filters.model_copy(update={"zero_std": zero_std})})


def packed(bundle: Bundle, config: RunConfig) -> Iterator[Compared | str]:
    """Plan every step again from its groups and their importance weights, for rows of the length that it was planned for.

    A step that lost damaged groups keeps the places of the others, which depend on those that are lost.
    """
    headers, layout = headers_of(bundle), layout_of(config)
    for step in bundle.steps:
        plan, ranks = codec.decode(step.plan, StepPlan), [codec.decode(rank, RankPlan) for rank in step.ranks]
        if lost := int(plan.stats.get(DAMAGED, 0)):
            groups_lost = f"{lost} damaged group{'s' * (lost > 1)} after it was planned"
            yield f"step {plan.step}: left out, it lost {groups_lost}, without which it cannot be planned again"
            continue
        weights = {sample.payload: sample.weight for sample in _samples(step.ranks)}
        by_group = {header.ticket: header for name, header in headers.items() if name in weights}
        chosen = [by_group[name] for name in plan.groups]
        groups = [plan_group(header, config, header.ticket in plan.fresh_groups, weights[header.payload]) for header in chosen]
        layout = replace(layout, row_tokens=plan.row_tokens or layout.row_tokens)
        new, new_ranks = plan_step(plan.step, groups, layout)
        rows = row_statistics.of_rows(new_ranks, new.row_tokens, config.admission.prompts_per_step)
        for field in ("ranks", "rows_per_rank", "mini_batch_rows", "denominators", "response_tokens", "total_tokens"):
            yield Compared(f"{field} of the plan of step {plan.step}", getattr(plan, field), getattr(new, field))
        for rank, (was, now) in enumerate(zip(ranks, new_ranks, strict=False)):
            yield Compared(f"rows of step {plan.step}, rank {rank}", len(was.rows), len(now.rows))
            for number, (old_row, new_row) in enumerate(zip(was.rows, now.rows, strict=False)):
                where = f"step {plan.step}, rank {rank}, row {number}"
                yield Compared(f"samples of {where}", len(old_row), len(new_row))
                for place, (old, new_one) in enumerate(zip(old_row, new_row, strict=False)):
                    for field in msgspec.structs.fields(Sample):
                        values = getattr(old, field.name), getattr(new_one, field.name)
                        yield Compared(f"{field.name} of {where}, sample {place}", *values)
        for name, now in rows.items():
            if name in plan.stats:
                yield Compared(f"{name} of step {plan.step}", plan.stats[name], now)


def _samples(ranks: list[bytes]) -> list[Sample]:
    return [sample for rank in ranks for row in codec.decode(rank, RankPlan).rows for sample in row]
