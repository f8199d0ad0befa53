"""Rows of tensors from a rank's plan and the payloads it names.

Guarantees: every segment of the plan is in its row, whole, after its context, which segments of one group in a row share if
theirs are equal; a payload that cannot be trained on raises `Damaged`, with the reason, before anything is trained; tokens that
the policy did not sample (contexts and tool spans) are attended to and never a target; an empty row becomes one dummy token
without a target, so that every rank runs the same number of micro-batches. What a payload says about its segments and tools is
right by construction (services/groups/records.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from services.groups.records import number_contexts
from services.protocol.errors import Damaged
from services.protocol.messages import RankPlan, Sample
from services.protocol.payloads import Payload
from services.trainer import losses
from services.trainer.model.attention.packing import Packing, RowTokens, fields_to_device

LOWEST_LOGPROB, HIGHEST_LOGPROB = -1000.0, 0.1
"""Range of valid sampled logprobs: below -745 a probability is 0 even in float64, and never sampled; above 0 a logprob can only
be a rounding error.
"""


class PlanMismatch(ValueError):
    """A plan contradicts itself, or was made for another configuration."""


@dataclass(frozen=True)
class PackedRow(RowTokens):
    """One packed row, one micro-batch.

    A context (mostly the prompt) is stored only before the first segment of its group that has it. Masked segments and tool
    tokens are part of the row but not of the R.
    """

    samples: tuple[tuple[str, int], ...]  # (payload, rollout) of each segment, in order
    segments: tuple[int, ...]  # place of each segment in its payload
    behaviour: Tensor  # [R] float32, behaviour logprobs
    advantages: Tensor  # [R] float32
    weights: Tensor  # [R] float32, importance weight of the token's group
    sample_of_token: Tensor  # [R] int64, into samples
    counted: Tensor  # int64, ascending, into R: the tokens that the loss counts

    def to(self, device: torch.device) -> PackedRow:
        """Copy to `device`."""
        return PackedRow(**fields_to_device(self, device))


def build(plan: RankPlan, payloads: Mapping[str, Payload], *, vocabulary: int, row_tokens: int) -> list[PackedRow]:
    """Build the rows of a rank, in the plan's order, on the CPU.

    `vocabulary` and `row_tokens` bound token ids and row lengths. Raises `Damaged`, which names every payload that cannot be
    trained on, and `PlanMismatch`.
    """
    planned: dict[str, list[Sample]] = {}
    for sample in (sample for row in plan.rows for sample in row):
        planned.setdefault(sample.payload, []).append(sample)
    groups: dict[str, _Group] = {}
    damaged: dict[str, str] = {}
    for name, samples in planned.items():
        try:
            groups[name] = _check(payloads[name], samples, vocabulary)
        except (IndexError, ValueError) as fault:  # also of numpy, for columns that do not fit together
            damaged[name] = str(fault)
    if damaged:
        raise Damaged(damaged)
    return [_row(row, groups, row_tokens) for row in plan.rows]


@dataclass(frozen=True)
class _Group:
    """A payload that can be trained on."""

    payload: Payload
    sampled: np.ndarray  # [sum lengths] bool, which of its tokens the policy sampled
    contexts: list[np.ndarray]  # [s] context of each segment
    numbers: list[int]  # [s] number of each segment's context

    def response(self, index: int) -> slice:
        """Return where a segment's tokens are in the payload."""
        start = int(self.payload.lengths[:index].sum())
        return slice(start, start + int(self.payload.lengths[index]))


def _check(payload: Payload, samples: list[Sample], vocabulary: int) -> _Group:
    """Check that a payload can be trained on, and that the plan trains what was sampled. Raises as numpy does, or ValueError."""
    names = ("prompt", "lengths", "tokens", "logprobs", "rollout", "context_lengths", "context")
    for column in names:
        array: np.ndarray = getattr(payload, column)
        kind = "f" if column == "logprobs" else "i"
        if array.ndim != 1 or array.dtype.kind != kind:
            raise ValueError(f"{column} is {array.dtype} of {array.ndim} dimensions, expected one dimension of kind {kind!r}")
    if len(payload.prompt) == 0:
        raise ValueError("the prompt is empty, so nothing predicts the first response token")
    fits = payload.lengths.sum() == len(payload.tokens) == len(payload.logprobs)
    if not fits or (payload.lengths < 0).any():
        raise ValueError(
            f"lengths add up to {payload.lengths.sum()}, but there are {len(payload.tokens)} tokens "
            f"and {len(payload.logprobs)} logprobs"
        )
    ids = np.concatenate((payload.prompt, payload.tokens, payload.context))
    if ids.min() < 0 or ids.max() >= vocabulary:
        raise ValueError(f"token ids {ids.min()}..{ids.max()} do not fit a vocabulary of {vocabulary}")
    sampled = _sampled(payload)
    known = payload.logprobs[sampled & np.isfinite(payload.logprobs)]  # the others leave the loss
    if (absurd := known[(known < LOWEST_LOGPROB) | (known > HIGHEST_LOGPROB)]).size:
        raise ValueError(f"a behaviour logprob is {absurd[0]:g}, outside the valid range {LOWEST_LOGPROB:g}..0")
    own = payload.own_contexts
    contexts = [context if len(context) else payload.prompt for context in own]
    group = _Group(payload, sampled, contexts, number_contexts(payload.prompt, own))
    for sample in samples:
        own = int(sampled[group.response(sample.index)].sum())
        if sample.trained_tokens not in (0, own):
            raise ValueError(f"completion {sample.index} has {own} sampled tokens, but the plan trains {sample.trained_tokens}")
    return group


def _sampled(payload: Payload) -> np.ndarray:
    """Return [sum lengths] bool, False inside tool spans."""
    sampled, starts = np.ones(len(payload.tokens), dtype=bool), np.cumsum(payload.lengths) - payload.lengths
    for segment, start, end in payload.tool_spans:
        sampled[starts[segment] + start : starts[segment] + end] = False
    return sampled


def _row(samples: list[Sample], groups: Mapping[str, _Group], row_tokens: int) -> PackedRow:
    ids, positions, predictors, targets, behaviour, advantages, weights, owners = [], [], [], [], [], [], [], []
    lengths: list[int] = []
    contexts: list[tuple[int, int]] = []
    placed: dict[tuple[str, int], tuple[int, int]] = {}  # contexts by payload and number: start in the row, and length
    end = 0
    for number, sample in enumerate(samples):
        group = groups[sample.payload]
        payload, tokens, context = group.payload, group.response(sample.index), group.contexts[sample.index]
        trained = np.flatnonzero(group.sampled[tokens]) if sample.trained_tokens else np.zeros(0, np.int64)
        shared = placed.get((sample.payload, sample.context), (0, 0))
        own = [payload.tokens[tokens]] if shared[1] else [context, payload.tokens[tokens]]
        begin, before = placed.setdefault((sample.payload, sample.context), (end, len(context)))
        size = sum(map(len, own))
        response = end + size - (tokens.stop - tokens.start)
        predictors.append(np.where(trained == 0, begin + before - 1, response + trained - 1))
        targets.append(payload.tokens[tokens][trained])
        behaviour.append(payload.logprobs[tokens][trained])
        advantages.append(np.full(len(trained), sample.advantage))
        weights.append(np.full(len(trained), sample.weight))
        owners.append(np.full(len(trained), number))
        ids += own
        positions.append(np.arange(shared[1], shared[1] + size))
        if size:  # an empty response after a shared context has no tokens to attend with
            lengths.append(size)
            contexts.append(shared)
        end += size
    if end > row_tokens:
        raise PlanMismatch(f"a row of {end} tokens exceeds trainer.row_tokens = {row_tokens}")
    if not samples:  # one token without a target
        ids, positions, lengths, contexts = [np.zeros(1)], [np.zeros(1)], [1], [(0, 0)]
    mu = _join(behaviour, np.float32)
    return PackedRow(
        samples=tuple(sample.response for sample in samples),
        segments=tuple(sample.index for sample in samples),
        input_ids=_join(ids, np.int64),
        positions=_join(positions, np.int64),
        packing=Packing.of(lengths, contexts),
        predictors=_join(predictors, np.int64),
        targets=_join(targets, np.int64),
        behaviour=mu,
        advantages=_join(advantages, np.float32),
        weights=_join(weights, np.float32),
        sample_of_token=_join(owners, np.int64),
        counted=losses.counted_places(mu),
    )


def _join(parts: list[np.ndarray], dtype: type) -> Tensor:
    return torch.from_numpy(np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype))
