"""Sequence parallelism: a team of ranks shares each row, and every rank has a slice of its tokens (DeepSpeed Ulysses).

Guarantees: loss and gradient are those of one rank with the whole row. In attention the team exchanges slices for heads, so that
each rank sees all tokens of its heads. Logprobs are joined afterwards, so every rank computes the loss of the whole row and
sequence-level quantities need no special handling. In backward, a rank takes the gradient of its own slice; the sum over all
ranks, which training takes anyway, is the gradient of the row.

Jacobs et al. 2023, "DeepSpeed Ulysses". Waits for: the other ranks of the team, in every forward and backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from services.trainer.model.attention import packed_attention
from services.trainer.model.attention.packing import RowTokens

NAME = "packed_ulysses"
"""Name under which transformers knows the exchange around `packed_attention`."""


@dataclass(frozen=True)
class Slice(RowTokens):
    """One rank's part of a row, with the packing of the whole row, whose padding is an additional response.

    r = its response tokens.
    """

    counts: list[int]  # r of every rank of the team
    order: Tensor  # [R]: index of each token of the row among those of all slices, concatenated


class Team:
    """The ranks that share rows with this one: `size` consecutive ranks, of which this is number `rank`."""

    def __init__(self, size: int, world_rank: int, world_size: int) -> None:
        self.size, self.rank = size, world_rank % size
        for first in range(0, world_size, size):  # every rank must take part in creating every group
            group = dist.new_group(list(range(first, first + size)))
            if first <= world_rank < first + size:
                self.group = group

    def register(self, config: Any) -> str:
        """Register the exchange with transformers for a model of this text configuration. Returns its name."""
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

        heads = config.num_attention_heads
        exchange = UlyssesSPAttentionHF(
            attn=packed_attention,
            batch_size=1,
            attn_head_count=heads,
            attn_head_size=getattr(config, "head_dim", None) or config.hidden_size // heads,
            kv_head_count=getattr(config, "num_key_value_heads", None) or heads,
            num_hidden_layers=config.num_hidden_layers,
            process_group=self.group,  # pyright: ignore[reportArgumentType]
            seq_length_is_variable=True,
        )
        ALL_ATTENTION_FUNCTIONS.register(NAME, exchange)
        return NAME

    def cut(self, row: RowTokens) -> Slice:
        """Cut this rank's slice out of a row. Slices have equal length; padding at the end counts as a response."""
        length = -(-len(row.input_ids) // self.size)
        missing = length * self.size - len(row.input_ids)
        owners = row.predictors // length  # not ascending: the first tokens of a group's responses share a predictor
        mine, part = owners == self.rank, slice(self.rank * length, (self.rank + 1) * length)
        return Slice(
            F.pad(row.input_ids, (0, missing))[part],
            F.pad(row.positions, (0, missing))[part],
            row.packing.longer(missing) if missing else row.packing,
            row.predictors[mine] - part.start,
            row.targets[mine],
            torch.bincount(owners, minlength=self.size).tolist(),
            owners.argsort(stable=True).argsort(),
        )

    def join(self, values: Tensor, part: Slice) -> Tensor:
        """Join the values [r] of all slices in the order of the row, [R]. Collective."""
        joined: Tensor = _Join.apply(values, part.counts, self)  # pyright: ignore[reportAssignmentType]
        return joined[part.order]


class _Join(torch.autograd.Function):
    """Joins values. All ranks then compute the same loss, so a slice's gradient is its part of any rank's: nothing is summed."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, counts: list[int], team: Team) -> Tensor:
        ctx.part = slice(sum(counts[: team.rank]), sum(counts[: team.rank + 1]))
        padded = F.pad(values, (0, max(counts) - len(values)))
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded, group=team.group)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0][ctx.part], None, None
