"""Rows of tensors from a rank's plan and the payloads it names.

Guarantees: every response of the plan is in its row, whole, with positions that restart; a payload that does not fit its
plan is a `PlanMismatch` before anything is trained; an empty row becomes one dummy token without a target, so that every
rank runs the same number of micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from services.protocol.messages import Payload, RankPlan, Sample
from services.trainer.attention import Packing


class PlanMismatch(ValueError):
    """A plan and its payloads contradict each other."""


@dataclass(frozen=True)
class Row:
    """One packed row, one micro-batch. T = its tokens, R = its response tokens that are in the loss.

    Token j of the R has its logprob under the output at `predictors[j]`, the position before it. Responses that are
    masked lie in the row and have none of the R.
    """

    samples: tuple[tuple[str, int], ...]  # (payload, index) of each response, in order
    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64, from 0 in every response
    packing: Packing
    predictors: Tensor  # [R] int64, into T
    targets: Tensor  # [R] int64
    behaviour: Tensor  # [R] float32, behaviour logprobs
    advantages: Tensor  # [R] float32
    sample_of_token: Tensor  # [R] int64, into samples

    def to(self, device: torch.device) -> Row:
        """The same on `device`."""
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        return Row(**{name: value.to(device) if hasattr(value, "to") else value for name, value in values.items()})


def build(plan: RankPlan, payloads: Mapping[str, Payload], *, vocabulary: int, row_tokens: int) -> list[Row]:
    """The rows of a rank, in the plan's order, on the CPU.

    `vocabulary` and `row_tokens` bound token ids and row lengths. Raises `PlanMismatch`.
    """
    for name in {sample.payload for row in plan.rows for sample in row}:
        _check_payload(name, payloads.get(name), vocabulary)
    return [_row(row, payloads, row_tokens) if row else _empty_row() for row in plan.rows]


def _check_payload(name: str, payload: Payload | None, vocabulary: int) -> None:
    if payload is None:
        raise PlanMismatch(f"payload {name} is in the plan but was not fetched")
    columns = {"prompt": payload.prompt, "lengths": payload.lengths, "tokens": payload.tokens, "logprobs": payload.logprobs}
    for column, array in columns.items():
        kind = "f" if column == "logprobs" else "i"
        if array.ndim != 1 or array.dtype.kind != kind:
            raise PlanMismatch(
                f"payload {name}: {column} is {array.dtype} of {array.ndim} dimensions, expected one of kind {kind!r}"
            )
    if len(payload.prompt) == 0:
        raise PlanMismatch(f"payload {name}: the prompt is empty, its first response token has nothing to be predicted from")
    fits = payload.lengths.sum() == len(payload.tokens) == len(payload.logprobs)
    if not fits or (payload.lengths < 0).any():
        raise PlanMismatch(
            f"payload {name}: lengths add up to {payload.lengths.sum()}, but there are {len(payload.tokens)} tokens "
            f"and {len(payload.logprobs)} logprobs"
        )
    ids = np.concatenate((payload.prompt, payload.tokens))
    if ids.min() < 0 or ids.max() >= vocabulary:
        raise PlanMismatch(f"payload {name}: token ids {ids.min()}..{ids.max()} do not fit a vocabulary of {vocabulary}")


def _row(samples: list[Sample], payloads: Mapping[str, Payload], row_tokens: int) -> Row:
    ids, positions, predictors, behaviour, advantages, owners = [], [], [], [], [], []
    lengths: list[int] = []
    for number, sample in enumerate(samples):
        payload, tokens = payloads[sample.payload], _response(sample, payloads[sample.payload])
        prompt = len(payload.prompt)
        size = prompt + tokens.stop - tokens.start
        if sample.trained_tokens:
            predictors.append(np.arange(prompt - 1, size - 1) + sum(lengths))
            behaviour.append(payload.logprobs[tokens])
            advantages.append(np.full(sample.trained_tokens, sample.advantage, dtype=np.float32))
            owners.append(np.full(sample.trained_tokens, number))
        ids += [payload.prompt, payload.tokens[tokens]]
        positions.append(np.arange(size))
        lengths.append(size)
    if sum(lengths) > row_tokens:
        raise PlanMismatch(f"a row of {sum(lengths)} tokens exceeds trainer.row_tokens = {row_tokens}")
    input_ids, predictor = _join(ids, np.int64), _join(predictors, np.int64)
    return Row(
        samples=tuple((sample.payload, sample.index) for sample in samples),
        input_ids=input_ids,
        positions=_join(positions, np.int64),
        packing=Packing.of(lengths),
        predictors=predictor,
        targets=input_ids[predictor + 1],
        behaviour=_join(behaviour, np.float32),
        advantages=_join(advantages, np.float32),
        sample_of_token=_join(owners, np.int64),
    )


def _response(sample: Sample, payload: Payload) -> slice:
    """Where the sample's tokens lie in its payload."""
    name = f"sample {sample.index} of payload {sample.payload}"
    if not 0 <= sample.index < len(payload.lengths):
        raise PlanMismatch(f"{name} does not exist: the group has {len(payload.lengths)}")
    length = int(payload.lengths[sample.index])
    if sample.trained_tokens not in (0, length):
        raise PlanMismatch(f"{name} has {length} tokens, but the plan trains {sample.trained_tokens}; all or none can be trained")
    if not np.isfinite(sample.advantage):
        raise PlanMismatch(f"{name} has the advantage {sample.advantage}")
    start = int(payload.lengths[: sample.index].sum())
    return slice(start, start + length)


def _empty_row() -> Row:
    nothing = torch.zeros(0, dtype=torch.int64)
    return Row(
        samples=(),
        input_ids=torch.zeros(1, dtype=torch.int64),
        positions=torch.zeros(1, dtype=torch.int64),
        packing=Packing.of([1]),
        predictors=nothing,
        targets=nothing,
        behaviour=torch.zeros(0),
        advantages=torch.zeros(0),
        sample_of_token=nothing,
    )


def _join(parts: list[np.ndarray], dtype: type) -> Tensor:
    return torch.from_numpy(np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype))
