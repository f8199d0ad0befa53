"""Where the sequences of a packed row are, and their places in padded batches. Lays tokens out there and takes them back.

Guarantees: copying a row to a device waits for none of its kernels, so the next row is sent while the previous one computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Shared:
    """Where tokens of shared prompts are in the m = S - T places of sequences that do not own them."""

    copies: Tensor  # [m] int64: these places in the concatenated sequences
    slots: Tensor  # [m] int64: these places in the batches
    prompts: Tensor  # [M] int64, ascending: the shared tokens of the row, each once
    numbers: Tensor  # [m] int64: the token at each place, by its number among `prompts`

    def to(self, device: torch.device) -> Shared:
        """Copy to `device`."""
        return Shared(**fields_to_device(self, device))


@dataclass(frozen=True)
class Packing:
    """Where the sequences of a row of T tokens are. A sequence is a prompt with a response; there are n of them.

    The row holds each sequence's own tokens one after the other; the first sequence of a group also owns the prompt. S = tokens
    of all sequences, with shared prompts counted each time.
    """

    own: Tensor  # [n + 1] int32, from 0 to T: boundaries of each sequence's own tokens
    whole: Tensor  # [n + 1] int32, from 0 to S: boundaries of whole sequences, concatenated
    sequences: Tensor  # [S] int64: the token of the row at each place of the concatenated sequences
    originals: Tensor  # [T] int64: the place of each token among these, in the sequence that owns it
    longest_own: int
    longest: int
    shapes: tuple[tuple[int, int], ...]  # count and length of padded batches of similar length
    filled: Tensor  # [P] int64: the token of the row at each place of the batches; an arbitrary token at places of padding
    owned: Tensor  # [T] int64: the place of each token in the sequence that owns it
    shared: Shared

    @classmethod
    def of(cls, lengths: Sequence[int], prompts: Sequence[tuple[int, int]] | None = None) -> Packing:
        """Build the packing of sequences with `lengths` own tokens each (>= 1), concatenated.

        `prompts` gives, for each, the start and length of a prompt elsewhere in the row (length 0: the sequence owns its prompt).
        """
        sizes = torch.tensor(lengths)
        begins, before = torch.tensor(prompts or [(0, 0)] * len(lengths)).T
        whole, ends = sizes + before, sizes.cumsum(0)
        first = ends - sizes  # of the own tokens
        owner = torch.repeat_interleave(torch.arange(len(whole)), whole)
        offset = torch.arange(len(owner)) - (whole.cumsum(0) - whole)[owner]
        theirs = offset < before[owner]
        sequences = torch.where(theirs, begins[owner], first[owner] - before[owner]) + offset
        slots, shapes = _batches(whole)
        slots = slots[owner] + offset
        filled = torch.zeros(sum(count * length for count, length in shapes), dtype=torch.int64)
        filled[slots] = sequences
        owned = slots[~theirs]  # in the order of the row, whose tokens lie as the sequences that own them
        unique, numbers = sequences[theirs].unique(return_inverse=True)
        return cls(
            own=F.pad(ends, (1, 0)).to(torch.int32),
            whole=F.pad(whole.cumsum(0), (1, 0)).to(torch.int32),
            sequences=sequences,
            originals=(~theirs).nonzero()[:, 0],
            longest_own=max(lengths),
            longest=int(whole.max()),
            shapes=shapes,
            filled=filled,
            owned=owned,
            shared=Shared(theirs.nonzero()[:, 0], slots[theirs], unique, numbers),
        )

    @property
    def shares(self) -> bool:
        """Whether a sequence has a prompt that another owns."""
        return len(self.shared.slots) > 0

    @property
    def prompts(self) -> tuple[Tensor, Tensor]:
        """Where in the row each sequence begins, and how many of its tokens are a prompt that another owns, two [n]."""
        return self.sequences[self.whole[:-1].long()], self.whole.diff() - self.own.diff()

    def batches(self, laid: Tensor) -> list[Tensor]:
        """Return the batches of tokens that are laid out, [count, heads, length, D] each, from [P, heads, D]."""
        sizes = [count * length for count, length in self.shapes]
        pieces = laid.split(sizes) if len(sizes) > 1 else [laid]
        return [piece.view(*shape, *laid.shape[1:]).transpose(1, 2) for piece, shape in zip(pieces, self.shapes, strict=True)]

    def longer(self, tokens: int) -> Packing:
        """Return the packing with another sequence of `tokens` tokens at the end of the row."""
        begins, before = self.prompts
        prompts = [*zip(begins.tolist(), before.tolist(), strict=True), (0, 0)]
        return Packing.of([*self.own.diff().tolist(), tokens], prompts).to(self.own.device)

    def to(self, device: torch.device) -> Packing:
        """Copy to `device`."""
        return Packing(**fields_to_device(self, device))


@dataclass(frozen=True)
class RowTokens:
    """What a model computes of one packed row. T = its tokens, R = its response tokens that are in the loss."""

    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64, starting from 0 in every context
    packing: Packing
    predictors: Tensor  # [R] int64, into T: the token before each target in its sequence
    targets: Tensor  # [R] int64


@dataclass
class CurrentRow:
    """The row of the last forward pass, for layers that pass no extra arguments to attention (those of Nemotron and StableLM, and
    compiled ones). It is kept until the next forward pass, because the backward pass of a row needs it, too.
    """

    packing: Packing | None = None


row = CurrentRow()


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to `device`, for a GPU by way of pinned memory: only from there do copies not wait for it.

    Torch reuses the pinned memory only once the device has read it.
    """
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def fields_to_device(record: Any, device: torch.device) -> dict[str, Any]:
    """Return the fields of a dataclass by name: tensors, and what else can be copied to a device, on `device`."""
    found: dict[str, Any] = {field.name: getattr(record, field.name) for field in fields(record)}
    for name, value in found.items():
        if isinstance(value, Tensor):
            found[name] = to_device(value, device)
        elif hasattr(value, "to"):
            found[name] = value.to(device)
    return found


def flat(batches: Sequence[Tensor]) -> Tensor:
    """Undo `Packing.batches`."""
    pieces = [each.transpose(1, 2).reshape(-1, each.shape[1], each.shape[3]) for each in batches]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def gathered(gradient: Tensor, own: Tensor, others: Tensor, shared: Shared) -> Tensor:
    """Return the gradient of the row's tokens, [T, ...], from that of the places to which they were copied: `own`, of each token
    in the sequence that owns it, and `others`, of shared tokens. These have many contributions, added in float32 or wider.
    """
    found = gradient.index_select(0, own)
    if not len(others):
        return found
    wide = torch.promote_types(found.dtype, torch.float32)
    prompts = found.index_select(0, shared.prompts).to(wide)
    prompts.index_add_(0, shared.numbers, gradient.index_select(0, others).to(wide))
    return found.index_copy_(0, shared.prompts, prompts.to(found.dtype))


def _batches(sizes: Tensor) -> tuple[Tensor, tuple[tuple[int, int], ...]]:
    """Return where each of n sequences begins, [n], in padded batches by powers of two, and the shapes of those batches."""
    exponents = torch.tensor([(size - 1).bit_length() for size in sizes.tolist()])
    begins, shapes, end = torch.empty_like(sizes), [], 0
    for exponent in exponents.unique():
        members = exponents == exponent
        count, length = int(members.sum()), int(sizes[members].max())
        begins[members] = end + torch.arange(count) * length
        shapes.append((count, length))
        end += count * length
    return begins, tuple(shapes)
