"""Metrics of a training step, summed over tokens.

Guarantees: every mean is over the tokens of all ranks. Rows are summed without rounding (`math.fsum`), so a mean does not depend
on how rows were distributed, to the bit.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from services.groups.histograms import BOUNDS, named
from services.trainer import ranks
from services.trainer.losses import COUNTS, HISTOGRAMS, MAXIMA, SUMS
from services.trainer.losses.policies import ESTIMATORS


class StepMetrics:
    """Collects sums and maxima of `losses.LossOutput`s on the device until `report`."""

    def __init__(self, device: torch.device, reference: bool, clips: bool, corrects: bool) -> None:
        """`reference`: whether there is a reference to measure the KL to. `clips`: whether clip bounds can act. `corrects`:
        whether a separate correction accounts for the policy that sampled.
        """
        self._sums: list[Tensor] = []  # of each row, float64
        self._maxima = torch.full((len(MAXIMA),), -torch.inf, dtype=torch.float64, device=device)
        self._reference, self._clips, self._corrects = reference, clips, corrects

    def add(self, sums: dict[str, Tensor], maxima: dict[str, Tensor]) -> None:
        """Add one row."""
        self._sums.append(torch.cat([torch.stack([sums[name] for name in SUMS]).double(), sums[COUNTS]]))
        self._maxima = torch.maximum(self._maxima, torch.stack([maxima[name] for name in MAXIMA]))

    def report(self, flops: float = 0.0) -> dict[str, float]:
        """Return metrics over all ranks, equal on each of them. Collective. Without any token, means and extremes are 0.

        `flops`: those of this rank's rows, 0 if unknown.
        """
        gathered = ranks.gather((torch.stack(self._sums).tolist() if self._sums else [], flops))
        of_rows = [row for rows, _ in gathered for row in rows]
        sums = {name: math.fsum(row[place] for row in of_rows) for place, name in enumerate(SUMS)}
        counts = [math.fsum(of_bin) for of_bin in zip(*(row[len(SUMS) :] for row in of_rows), strict=True)]
        maxima = dict(zip(MAXIMA, ranks.maximum(self._maxima).tolist(), strict=True))
        tokens = sums["tokens"]
        mean = {name: value / tokens if tokens else 0.0 for name, value in sums.items()}
        largest = {name: value if tokens else 0.0 for name, value in maxima.items()}
        record = {
            "tokens/train/sum": tokens,
            "loss/train/sum": sums["loss"],
            "policy_loss/train/mean": mean["policy_loss"],
            "ratio/train/mean": mean["ratio"],
            "ratio/train/var": max(mean["ratio_squared"] - mean["ratio"] ** 2, 0.0),
            "entropy/train/mean": mean["entropy"],
            "logprob_gap/train/mean": mean["logprob_gap"],
            "logprob_gap/train/max": largest["logprob_gap"],
            "advantage/train/mean": mean["advantage"],
            "advantage/train/max": largest["advantage"],
            "advantage/train/min": -largest["negative_advantage"] if tokens else 0.0,
        }
        for name in HISTOGRAMS if counts else ():
            bins = len(BOUNDS[name]) + 1
            record |= named(name, "train", counts[:bins])
            counts = counts[bins:]
        if needed := math.fsum(of_rank for _, of_rank in gathered):
            record["flops/train/sum"] = needed
        if self._clips:  # where they cannot act, 0 would look like a policy that hardly moves
            record |= {"clip_low/train/fraction": mean["clip_low"], "clip_high/train/fraction": mean["clip_high"]}
        if self._corrects:  # where there is none, its weight of 1 would look like a policy that hardly moves
            record |= {
                "correction/train/mean": mean["rho"],
                "correction/train/weight_mean": mean["rho_weight"],
                "correction/train/clip_fraction": mean["rho_clipped"],
                "correction/train/drop_fraction": mean["rho_dropped"],
            }
        if self._reference:
            record |= {"kl/train/mean": mean["kl"], **{f"kl/train/{name}": mean[name] for name in ESTIMATORS}}
        return record


class Clock:
    """Measures seconds per phase on this rank. On a GPU a phase begins and ends when the kernels before that point have finished,
    and nothing waits for them until `seconds` are read.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._phases: list[tuple[str, _Moment, _Moment]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the code inside the block; times of the same name add up."""
        begin = _Moment(self._device)
        yield
        self._phases.append((name, begin, _Moment(self._device)))

    @property
    def seconds(self) -> dict[str, float]:
        """Return the seconds of every phase so far. Waits for the device."""
        found: defaultdict[str, float] = defaultdict(float)
        for name, begin, end in self._phases:
            found[name] += end.since(begin)
        return dict(found)


class _Moment:
    """A point in time: now, or on a GPU, when the kernels that were launched before have finished."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        self._time = time.perf_counter()
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(torch.cuda.current_stream(device))

    def since(self, earlier: _Moment) -> float:
        """Return the seconds from an earlier moment of the same device to this one."""
        if self._event is None or earlier._event is None:
            return self._time - earlier._time
        self._event.synchronize()
        return earlier._event.elapsed_time(self._event) / 1000
