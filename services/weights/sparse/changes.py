"""Where two tensors differ, on their device, and positions as bytes.

Guarantees: bits are compared, so NaN payloads and signed zeros are exact; positions that are decoded are strictly increasing,
below the element count and as many as announced, or `InvalidVersion`. The bytes are those of versions/positions.py, which works
on host memory: a gap is the number of unchanged elements before a changed one; a byte below 255 ends it, 255 adds 255.
"""

from __future__ import annotations

import torch

from services.weights.versions.positions import InvalidVersion

_MORE = 255
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(elements: torch.Tensor) -> torch.Tensor:
    """Return `elements`, contiguous, as integers of the same size, [count], sharing their memory."""
    return elements.detach().view(-1).view(_INTEGERS[elements.element_size()])


def changed_positions(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """Return where the bits `new` and `old`, [count], differ: [changed] int64, increasing."""
    return (new != old).nonzero().view(-1)


def encode_gaps(positions: torch.Tensor) -> torch.Tensor:
    """Return `positions`, [changed] int64, strictly increasing, as [bytes] uint8 on their device."""
    if not positions.numel():
        return positions.new_empty(0, dtype=torch.uint8)
    gaps = torch.diff(positions, prepend=positions.new_full((1,), -1)) - 1
    ends = (gaps // _MORE + 1).cumsum(0) - 1
    encoded = torch.full((int(ends[-1]) + 1,), _MORE, dtype=torch.uint8, device=positions.device)
    encoded[ends] = (gaps % _MORE).to(torch.uint8)
    return encoded


def decode_gaps(encoded: torch.Tensor, changed: int, count: int) -> torch.Tensor:
    """Return the `changed` positions below `count`, [changed] int64. Raises `InvalidVersion`."""
    ends = (encoded != _MORE).nonzero().view(-1)
    if ends.numel() != changed or (encoded.numel() and int(encoded[-1]) == _MORE):
        raise InvalidVersion(f"gaps hold {ends.numel()} positions instead of {changed}")
    positions = encoded.to(torch.int64).cumsum(0)[ends] + torch.arange(changed, device=encoded.device)
    if changed and int(positions[-1]) >= count:
        raise InvalidVersion(f"position {int(positions[-1])} is beyond the {count} elements")
    return positions
