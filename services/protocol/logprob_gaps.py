"""How far the trainer's logprobs of a step's tokens are from the sampler's. Produced by trainer ranks, consumed by the tracker.

A gap is trainer - sampler, in a byte: 0 is less than `LEAST_GAP`, k and -k are `LEAST_GAP` x `STEP`^(k - 1) and its negative.
Gaps from 1e-4 to 16 are therefore exact to 5 %; a larger one counts as 16. `UNKNOWN` stands for a token without a finite
behaviour logprob.
"""

from __future__ import annotations

from functools import cache
from itertools import accumulate, pairwise

import msgspec
import numpy as np

LEAST_GAP = 1e-4  # nats; in float32, engine and trainer differ by some 1e-5 with equal weights
STEP = 1.1  # ratio of neighbouring codes
HIGHEST = 127
UNKNOWN = -128


class LogprobGaps(msgspec.Struct, frozen=True, array_like=True):
    """Gaps of the segments that a rank trained, one after the other. A segment's tokens are those that the policy sampled."""

    payloads: list[str]
    segments: list[int]  # place of each segment in its payload
    counts: list[int]  # tokens of each segment
    codes: bytes  # [sum counts] int8

    def by_segment(self) -> dict[tuple[str, int], np.ndarray]:
        """Return the gaps of each segment, [count] float32, NaN where unknown; nothing if the columns do not fit together."""
        fits = len(self.payloads) == len(self.segments) == len(self.counts) and min(self.counts, default=0) >= 0
        if not fits or sum(self.counts) != len(self.codes):
            return {}
        gaps = _values()[np.frombuffer(self.codes, np.uint8)]
        ends = accumulate(self.counts, initial=0)
        parts = [gaps[start:end] for start, end in pairwise(ends)]  # `np.split` takes three times as long
        return dict(zip(zip(self.payloads, self.segments, strict=True), parts, strict=True))


@cache
def _values() -> np.ndarray:
    """Return the gap of each code, [256] float32, by the code as an unsigned byte."""
    codes = np.arange(256).astype(np.uint8).view(np.int8).astype(np.float64)
    values = np.sign(codes) * LEAST_GAP * STEP ** (np.abs(codes) - 1)
    return np.where(codes == UNKNOWN, np.nan, values).astype(np.float32)
