"""The order of prompts: sources mixed by weight, each with its own epochs.

Guarantees: in every prefix of a run each source has its share of the prompts, rounded up or down; every row of an epoch is
asked once in it. The order is a function of the configuration, the data, the places at which failed prompts are asked again,
and the pass rates of groups more than `slots` prompts old. It does not depend on timing: a run that is interrupted and resumed
continues with the same rows. Permutations use 64-bit integer arithmetic and a stable sort, so they are the same on every
platform and with every numpy version.

The leader makes a draft, hands its state and epochs to Redis, and accepts it once Redis has stored them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import msgspec
import numpy as np
import structlog

from services.chat.errors import DataError
from services.dataprep.prompts.curriculum import Curriculum, arrange
from services.protocol import codec
from services.store.records import PassRate

log = structlog.get_logger()

ROW = np.dtype("<i4")  # a global row id, in memory and in Redis
RATE_SLACK = 1e-8  # tolerance, since rewards are sums of floats


class Exhausted(Exception):
    """No source has a row left to ask. The message says why and what to do."""


@dataclass(frozen=True)
class SourceSpan:
    """A prompt source among the rows of a run: its global row ids are `first` to `first + rows - 1`."""

    name: str
    weight: float
    first: int
    rows: int


@dataclass(frozen=True)
class Pick:
    """One prompt of the run."""

    source: str
    epoch: int
    row: int


@dataclass(frozen=True)
class Draft:
    """The next prompts, and what is stored together with their tickets."""

    picks: list[Pick]
    """Prompts asked again come first. There may be fewer than requested, if every source becomes exhausted on the way."""
    state: bytes
    """Position in the order after them: 10 bytes, 10 and the name for each source, and with a curriculum 4 bytes per slot."""
    epochs: dict[str, bytes]
    """Source -> rows of the epoch that began on the way, int32 little-endian. They replace the source's previous epoch."""


class _Source(msgspec.Struct, array_like=True):
    """Position within a source."""

    name: str
    epoch: int = -1
    taken: int = 0
    """Rows of the epoch that were asked."""
    mixed: int = 0
    """Prompts asked since the set of live sources last changed."""
    exhausted: bool = False


class _State(msgspec.Struct, array_like=True):
    sources: list[_Source]
    recent: np.ndarray
    """[<= slots] int32: rows of the most recent prompts, new or asked again, whose groups may not be settled. Kept for a
    curriculum."""
    exclude: float | None = None
    """Pass rate at which rows were excluded; None: an older version wrote the state."""


class PromptOrder:
    """Determines which row comes next. Pure: `draft` changes nothing; `accept` and `restore` do."""

    def __init__(
        self,
        spans: Sequence[SourceSpan],
        seed: int,
        shuffle: bool,
        slots: int,
        exclude_pass_rate: float = 0.0,
        curriculum: Curriculum | None = None,
    ) -> None:
        self._spans = {span.name: span for span in spans}
        exact = [Fraction(str(span.weight)) for span in spans]  # as written: 0.7 and 0.3 are 7 to 3
        scale = math.lcm(*(weight.denominator for weight in exact))
        self._weights = {span.name: int(weight * scale) for span, weight in zip(spans, exact, strict=True)}
        self._seed, self._shuffle, self._slots = seed, shuffle, slots
        self._exclude, self._curriculum = exclude_pass_rate, curriculum
        self._begin_run()

    def restore(self, state: bytes, epochs: Mapping[str, bytes]) -> None:
        """Resume where the last accepted draft of the run ended: its `state`, and the last `epochs` of the sources that have one.

        If both are empty, the run is new. If rows are excluded at another pass rate now, exhausted sources may have rows again.
        Raises `DataError` if the bytes are damaged or of other sources.
        """
        self._begin_run()
        if not state and not epochs:
            return
        try:
            read = codec.decode(state, _State)
            if [source.name for source in read.sources] != list(self._spans) or not epochs.keys() <= self._spans.keys():
                raise ValueError("it belongs to other sources")
        except ValueError as error:
            raise DataError(f"the run's order of prompts in Redis is invalid ({error}): start under another run.name") from None
        if read.exclude not in (None, self._exclude) and any(source.exhausted for source in read.sources):
            for source in read.sources:  # shares count from here
                source.exhausted, source.mixed = False, 0
        read.recent = read.recent[-self._slots :]  # a fork may have fewer slots than its origin
        self._state = read
        self._rows |= {name: np.frombuffer(body, ROW) for name, body in epochs.items()}

    def begins_epoch(self, count: int) -> bool:
        """Return whether the next `count` prompts begin an epoch of some source; `draft` then needs pass rates."""
        sources = _copy(self._state.sources)
        for _ in range(count):
            source = self._due(sources)
            if source is None:
                return False
            if source.taken == len(self._rows[source.name]):
                return True
            _take(source)
        return False

    def draft(self, count: int, cursor: int, rates: Mapping[int, PassRate], again: Sequence[Pick] = ()) -> Draft:
        """Return the prompts to ask `again`, then the next `count`; the first has number `cursor` in the run.

        `rates` (row -> pass rate) is only read when an epoch begins. For an epoch that begins at prompt c, groups with
        seq >= c - slots do not count, settled or not; all others must be settled by then.
        Raises `Exhausted`, and `DataError` for a curriculum that fails.
        """
        sources, rows = _copy(self._state.sources), dict(self._rows)
        picks = list(again)
        began: dict[str, bytes] = {}
        while len(picks) < len(again) + count:
            source = self._due(sources)
            if source is None and len(picks) == len(again):
                raise Exhausted(
                    f"every row of every prompt source has reached filters.exclude_pass_rate = {self._exclude}: raise it, or end "
                    "the run here, since nothing is left to learn"
                )
            if source is None:
                break
            if source.taken == len(rows[source.name]):
                begun = self._begin(source, cursor + len(picks), rates, self._recent(picks))
                if not len(begun):
                    source.exhausted = True
                    for each in sources:  # shares of the remaining sources count from here
                        each.mixed = 0
                    continue
                source.epoch, source.taken = source.epoch + 1, 0
                rows[source.name], began[source.name] = begun, begun.tobytes()
            picks.append(Pick(source.name, source.epoch, int(rows[source.name][source.taken])))
            _take(source)
        return Draft(picks, codec.encode(_State(sources, self._recent(picks), self._exclude)), began)

    def accept(self, draft: Draft) -> None:
        """Advance to the end of `draft`, which was made from the current position."""
        state = codec.decode(draft.state, _State)
        for before, now in zip(self._state.sources, state.sources, strict=True):
            if now.exhausted and not before.exhausted:
                log.warning("prompt source exhausted: all its rows have reached filters.exclude_pass_rate", source=now.name)
        self._state = state
        began = {name: np.frombuffer(body, ROW) for name, body in draft.epochs.items()}
        for source in state.sources:
            if source.name in began:
                rows, of = len(began[source.name]), self._spans[source.name].rows
                log.info("epoch begins", source=source.name, epoch=source.epoch, rows=rows, left_out=of - rows)
        self._rows |= began

    def _begin_run(self) -> None:
        self._state = _State([_Source(name) for name in self._spans], np.zeros(0, np.int32))
        self._rows = {name: np.zeros(0, ROW) for name in self._spans}

    def _due(self, sources: Sequence[_Source]) -> _Source | None:
        """Return the source to ask next, or None if all are exhausted.

        Uses the quota method (Balinski and Young 1975): among the sources below their share of the prompts, counting this one,
        take the one that would fall a whole prompt behind first. Taking the largest deficit does not keep the quota for more
        than two sources.
        """
        live = [source for source in sources if not source.exhausted]
        prompts = 1 + sum(source.mixed for source in live)
        weight = sum(self._weights[source.name] for source in live)
        below = [source for source in live if source.mixed * weight < self._weights[source.name] * prompts]
        return min(below, key=lambda source: Fraction(source.mixed + 1, self._weights[source.name]), default=None)

    def _recent(self, picks: Sequence[Pick]) -> np.ndarray:
        """Return the rows [<= slots] of the last prompts after `picks`. Empty without a curriculum, since only a curriculum
        needs them."""
        if self._curriculum is None:
            return self._state.recent
        return np.concatenate((self._state.recent, np.array([pick.row for pick in picks], ROW)))[-self._slots :]

    def _begin(self, source: _Source, cursor: int, rates: Mapping[int, PassRate], recent: np.ndarray) -> np.ndarray:
        """Return the rows of the source's next epoch, which begins at prompt `cursor`; empty if all are excluded."""
        span, epoch = self._spans[source.name], source.epoch + 1
        order = permutation(self._seed, epoch, span.rows) if self._shuffle else np.arange(span.rows)
        rows = (span.first + order).astype(ROW)
        if not self._exclude and self._curriculum is None:
            return rows
        known = self._known(span, cursor, rates)
        if self._exclude:
            rows = rows[~(known[rows - span.first] >= self._exclude - RATE_SLACK)]  # comparisons with NaN are false
        if self._curriculum is not None and len(rows):
            # A row that was asked since: whether `rates` still holds its older group depends on timing.
            known[[row - span.first for row in recent.tolist() if 0 <= row - span.first < span.rows]] = np.nan
            rows = arrange(self._curriculum, rows, known[rows - span.first], epoch)
        return rows

    def _known(self, span: SourceSpan, cursor: int, rates: Mapping[int, PassRate]) -> np.ndarray:
        """Return the pass rates [rows] of a source's groups that must be settled at prompt `cursor`; NaN if unknown."""
        known = np.full(span.rows, np.nan)
        for row, rate in rates.items():
            if 0 <= row - span.first < span.rows and rate.seq < cursor - self._slots:
                known[row - span.first] = rate.rate
        return known


def permutation(seed: int, epoch: int, n: int) -> np.ndarray:
    """Return rows [n] int32 in the order of the epoch, sorted by one SplitMix64 number each (Steele et al. 2014), ties by row."""
    start = int.from_bytes(hashlib.sha256(f"order {seed} {epoch}".encode()).digest()[:8], "little")
    with np.errstate(over="ignore"):
        z = np.uint64(start) + np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return np.argsort(z, kind="stable").astype(np.int32)


def _copy(sources: Sequence[_Source]) -> list[_Source]:
    return [msgspec.structs.replace(source) for source in sources]


def _take(source: _Source) -> None:
    source.taken += 1
    source.mixed += 1
