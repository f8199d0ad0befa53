"""The order of prompts: the quotas of a mixture, epochs with exclusions, and resuming at any point."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from services.chat.errors import DataError
from services.dataprep.prompts.curriculum import Curriculum, middle_first
from services.dataprep.prompts.order import Exhausted, Pick, PromptOrder, SourceSpan, _State, permutation
from services.protocol import codec
from services.store.records import PassRate

WEIGHTS = st.lists(st.sampled_from([0.001, 0.1, 0.3, 0.7, 1.0, 1.5, 3.0, 16.0, 30.0]), min_size=1, max_size=7)


def _spans(*sources: tuple[int, float]) -> list[SourceSpan]:
    """Return sources `a`, `b`, … with these (rows, weight), one after the other."""
    spans: list[SourceSpan] = []
    for rows, weight in sources:
        spans.append(SourceSpan("abcdefgh"[len(spans)], weight, sum(span.rows for span in spans), rows))
    return spans


def _order(
    spans: Sequence[SourceSpan], exclude: float = 0.0, slots: int = 4, curriculum: Curriculum | None = None
) -> PromptOrder:
    return PromptOrder(spans, 5, True, slots, exclude, curriculum)


def _draw(order: PromptOrder, count: int, cursor: int, rates: dict[int, PassRate] | None = None) -> list[Pick]:
    draft = order.draft(count, cursor, rates or {})
    order.accept(draft)
    return draft.picks


def _slow_permutation(seed: int, epoch: int, n: int) -> list[int]:
    """Return the permutation by SplitMix64 on Python integers."""
    mask = 2**64 - 1
    start = int.from_bytes(hashlib.sha256(f"order {seed} {epoch}".encode()).digest()[:8], "little")

    def key(row: int) -> int:
        z = (start + (row + 1) * 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    return sorted(range(n), key=key)


def test_the_permutation_never_changes_between_versions():
    assert permutation(0, 0, 10).tolist() == [5, 3, 2, 4, 8, 6, 1, 0, 7, 9]
    for seed, epoch in [(0, 0), (0, 1), (123456789, 40)]:
        assert permutation(seed, epoch, 200).tolist() == _slow_permutation(seed, epoch, 200)
    assert permutation(0, 0, 10).tolist() != permutation(0, 1, 10).tolist() != permutation(1, 1, 10).tolist()
    assert np.array_equal(np.sort(permutation(3, 7, 1000)), np.arange(1000))


def test_every_row_is_equally_likely_to_come_first():
    first = np.bincount([permutation(1, epoch, 10)[0] for epoch in range(5000)], minlength=10)
    chi_square = float(((first - 500) ** 2 / 500).sum())
    assert chi_square < 27.9  # 9 degrees of freedom, p = 0.001


@given(st.integers(1, 12), st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_one_source_follows_its_permutations_for_any_batches(rows: int, batches: list[int]):
    order = PromptOrder([SourceSpan("main", 1.0, 0, rows)], 5, True, 4)
    picks: list[Pick] = []
    for count in batches:
        picks += _draw(order, count, len(picks))
    expected = [
        Pick("main", epoch, int(permutation(5, epoch, rows)[place]))
        for epoch, place in (divmod(position, rows) for position in range(len(picks)))
    ]
    assert picks == expected


def test_without_shuffle_rows_keep_their_order():
    order = PromptOrder(_spans((3, 1.0), (2, 1.0)), 0, False, 4)
    assert [pick.row for pick in _draw(order, 10, 0)] == [0, 3, 1, 4, 2, 3, 0, 4, 1, 3]


@settings(max_examples=100, deadline=None)
@given(WEIGHTS, st.builds(random.Random, st.integers(0)))
def test_every_prefix_of_a_mixture_keeps_each_sources_share(weights: list[float], rng: random.Random):
    spans = _spans(*((rng.randint(1, 30), weight) for weight in weights))
    taken: Counter[str] = Counter()
    total = sum(Fraction(str(weight)) for weight in weights)
    for number, pick in enumerate(_draw(_order(spans), 300, 0), start=1):
        taken[pick.source] += 1
        for span in spans:
            assert abs(taken[span.name] - Fraction(str(span.weight)) * number / total) < 1


def test_every_source_has_its_own_epochs():
    spans = _spans((4, 1.0), (10, 2.0), (7, 0.5))
    picks = _draw(_order(spans), 280, 0)
    for span in spans:
        epochs: dict[int, list[int]] = {}
        for pick in picks:
            if pick.source == span.name:
                epochs.setdefault(pick.epoch, []).append(pick.row)
        *whole, last = epochs
        assert list(epochs) == list(range(len(epochs)))
        assert len(whole) > 1
        for epoch in whole:
            assert epochs[epoch] == (span.first + permutation(5, epoch, span.rows)).tolist()
        assert epochs[last] == (span.first + permutation(5, last, span.rows)).tolist()[: len(epochs[last])]


def test_a_draft_changes_nothing_until_it_is_accepted():
    order = _order(_spans((3, 1.0), (5, 1.0)))
    _draw(order, 7, 0)
    assert order.draft(6, 7, {}) == order.draft(6, 7, {})
    longer = order.draft(9, 7, {})
    assert longer.picks[:6] == order.draft(6, 7, {}).picks
    order.accept(longer)
    assert order.draft(1, 16, {}).picks != longer.picks[:1]
    assert order.draft(0, 16, {}).picks == []


@given(st.lists(st.integers(1, 6), min_size=1, max_size=20))
def test_the_start_of_an_epoch_is_predicted(batches: list[int]):
    order, cursor = _order(_spans((5, 1.0), (7, 3.0))), 0
    for count in batches:
        foreseen, draft = order.begins_epoch(count), order.draft(count, cursor, {})
        assert foreseen == bool(draft.epochs)
        order.accept(draft)
        cursor += count


def _answered(row: int, epoch: int) -> float:
    """Return a row's pass rate, which varies between epochs and grows with the row's last digit."""
    noise = hashlib.blake2b(f"{row} {epoch}".encode(), digest_size=1).digest()[0] / 255
    return min(1.0, (row % 10) / 10 + noise / 3 + epoch / 20)


class _Run:
    """A run whose groups settle in any order, but at most `slots` prompts after their issue.

    Every `failing`-th prompt fails and is issued again, at a position that depends only on its number.
    """

    def __init__(self, order: PromptOrder, slots: int, exclude: float, failing: int = 0) -> None:
        self.order, self.slots, self.exclude, self.failing = order, slots, exclude, failing
        self.picks: list[Pick] = []
        self.due: dict[int, int] = {}  # failed prompt -> the first position at which it may be issued again
        self.unsettled: list[int] = []
        self.rates: dict[int, PassRate] = {}
        self.state, self.epochs = b"", dict[str, bytes]()

    def settle(self, seq: int) -> None:
        """Settle the group of prompt `seq`. Of its row's groups, the first solved one counts; without one, the last issued."""
        pick = self.picks[seq]
        self.unsettled.remove(seq)
        if self._fails(seq):
            return
        groups = [PassRate(seq, _answered(pick.row, pick.epoch)), *filter(None, [self.rates.get(pick.row)])]
        solved = [group for group in groups if self.exclude and group.rate >= self.exclude]
        self.rates[pick.row] = min(solved, key=lambda group: group.seq) if solved else max(groups, key=lambda group: group.seq)

    def draw(self, count: int) -> bool:
        """Issue up to `count` prompts; return whether there were any."""
        cursor = len(self.picks)
        asked_again = [seq for seq, due in self.due.items() if due <= cursor]
        self.due = {seq: due for seq, due in self.due.items() if due > cursor}
        first = cursor + len(asked_again)
        failing = {seq: self._due(seq) for seq in range(first, first + count) if self._fails(seq)}
        end = max(first, min([first + count, *self.due.values(), *failing.values()]))
        count = end - first
        for seq in [seq for seq in self.unsettled if seq < end - self.slots or seq in asked_again]:
            self.settle(seq)
        rates = self.rates if self.order.begins_epoch(count) else {}
        again = [self.picks[seq] for seq in asked_again]
        try:
            draft = self.order.draft(count, cursor, rates, again)
        except Exhausted:
            if not again:
                return False
            draft = self.order.draft(0, cursor, rates, again)
        self.order.accept(draft)
        self.state, self.epochs = draft.state, self.epochs | draft.epochs
        self.picks += draft.picks
        self.due |= {seq: due for seq, due in failing.items() if seq < len(self.picks)}
        self.unsettled += range(cursor, len(self.picks))
        return True

    def _fails(self, seq: int) -> bool:
        return bool(self.failing) and seq % self.failing == 0

    def _due(self, seq: int) -> int:
        return seq + 1 + seq // self.failing % self.slots


def _some_of_the_middle(rows: np.ndarray, rates: np.ndarray, epoch: int) -> np.ndarray:
    """Return a curriculum's order, which depends on every rate and drops some rows."""
    return middle_first(rows, rates, epoch)[: max(1, len(rows) * 2 // 3)]


SOURCES = st.lists(st.tuples(st.integers(1, 25), st.sampled_from([0.5, 1.0, 3.0])), min_size=1, max_size=3)


@settings(max_examples=150, deadline=None)
@given(
    SOURCES, st.integers(1, 12), st.sampled_from([0.0, 0.6, 0.9]), st.booleans(), st.sampled_from([0, 3, 7]),
    st.builds(random.Random, st.integers(0)),
)  # fmt: skip
def test_timing_batches_and_resumes_do_not_change_the_order(
    sources: list[tuple[int, float]], slots: int, exclude: float, hook: bool, failing: int, rng: random.Random
):
    spans, curriculum = _spans(*sources), _some_of_the_middle if hook else None
    steady, restless = (_Run(_order(spans, exclude, slots, curriculum), slots, exclude, failing) for _ in range(2))
    while len(steady.picks) < 150 and steady.draw(1):
        for seq in list(steady.unsettled):
            steady.settle(seq)
    while len(restless.picks) < len(steady.picks):
        if rng.random() < 0.3:
            restless.order = _order(spans, exclude, slots, curriculum)
            restless.order.restore(restless.state, restless.epochs)
        assert restless.draw(rng.randint(1, slots))
        for seq in rng.sample(restless.unsettled, rng.randint(0, len(restless.unsettled))):
            restless.settle(seq)
    assert restless.picks[: len(steady.picks)] == steady.picks


@settings(max_examples=60, deadline=None)
@given(SOURCES, st.integers(1, 12), st.sampled_from([0.6, 0.9]), st.builds(random.Random, st.integers(0)))
def test_an_epoch_asks_every_row_not_yet_solved_once(
    sources: list[tuple[int, float]], slots: int, exclude: float, rng: random.Random
):
    spans = _spans(*sources)
    run = _Run(_order(spans, exclude, slots), slots, exclude)
    while len(run.picks) < 150 and run.draw(rng.randint(1, slots)):
        for seq in rng.sample(run.unsettled, rng.randint(0, len(run.unsettled))):
            run.settle(seq)
    for span in spans:
        seqs = [seq for seq, pick in enumerate(run.picks) if pick.source == span.name]
        numbers = sorted({run.picks[seq].epoch for seq in seqs})
        for epoch in numbers[:-1]:
            asked = [run.picks[seq].row for seq in seqs if run.picks[seq].epoch == epoch]
            began = min(seq for seq in seqs if run.picks[seq].epoch == epoch)
            solved = {run.picks[seq].row for seq in seqs if seq < began - slots and _at(run, seq) >= exclude}
            assert asked == [span.first + row for row in permutation(5, epoch, span.rows) if span.first + row not in solved]


def _at(run: _Run, seq: int) -> float:
    return _answered(run.picks[seq].row, run.picks[seq].epoch)


def test_rows_solved_in_mid_epoch_are_dropped_from_the_next():
    order = _order(_spans((6, 1.0)), exclude=0.9, slots=2)
    first = [pick.row for pick in _draw(order, 2, 0)]
    solved = {row: PassRate(0, 1.0) for row in range(6)}
    rest = [pick.row for pick in _draw(order, 4, 2, solved)]
    assert sorted(first + rest) == list(range(6))
    half = {row: PassRate(seq, 0.89 if row < 3 else 0.9) for seq, row in enumerate(first + rest)}
    left = {0, 1, 2, *rest[2:]}  # the last two may not be settled yet
    second = _draw(order, len(left), 6, half)
    assert sorted(pick.row for pick in second) == sorted(left)
    assert {pick.epoch for pick in second} == {1}


def test_pass_rates_tolerate_rounding():
    order = _order(_spans((4, 1.0)), exclude=0.3)
    (pick,) = order.draft(1, 9, {row: PassRate(0, 0.3 - 1e-12) for row in range(3)}).picks
    assert pick.row == 3


def test_an_exhausted_sources_share_goes_to_the_others():
    spans = _spans((5, 2.0), (50, 1.0), (70, 3.0))
    order = _order(spans, exclude=1.0, slots=3)
    picks = _draw(order, 15, 0)
    assert Counter(pick.source for pick in picks) == {"a": 5, "b": 2, "c": 8}
    solved = {pick.row: PassRate(seq, 1.0) for seq, pick in enumerate(picks) if pick.source == "a"}
    with capture_logs() as logs:
        more = _draw(order, 41, 60, solved)
    assert [line["source"] for line in logs] == ["a"]
    assert logs[0]["log_level"] == "warning"
    rest = _order(_spans((50, 1.0), (70, 3.0)))  # b and c alone, mixed from their first prompt on
    assert [pick.source == "c" for pick in more] == [pick.source == "b" for pick in _draw(rest, 41, 0)]
    with capture_logs() as logs:
        _draw(order, 8, 101, solved)
    assert logs == [], "it is logged once"


def test_a_run_ends_once_all_rows_are_excluded():
    run = _Run(_order(_spans((3, 1.0), (4, 1.0)), exclude=0.01, slots=2), 2, exclude=0.01)
    while run.draw(2):
        for seq in list(run.unsettled):
            run.settle(seq)
        assert len(run.picks) < 40
    assert {pick.row for pick in run.picks} == set(range(7))
    with pytest.raises(
        Exhausted, match=r"every row of every prompt source has reached filters\.exclude_pass_rate = 0\.01: raise it"
    ):
        run.order.draft(1, len(run.picks), run.rates)


def test_remaining_rows_are_drawn_before_the_end():
    order = _order(_spans((5, 1.0)), exclude=0.9, slots=1)
    _draw(order, 3, 0)
    solved = {row: PassRate(-9, 1.0) for row in range(5)}
    draft = order.draft(4, 3, solved)
    assert len(draft.picks) == 2
    order.accept(draft)
    with pytest.raises(Exhausted):
        order.draft(2, 5, solved)
    assert not order.begins_epoch(2), "there is no epoch to start"
    assert order.draft(0, 5, solved).picks == []


def test_a_damaged_or_foreign_state_is_rejected():
    spans = _spans((5, 1.0), (6, 1.0))
    draft = _order(spans).draft(4, 0, {})
    for now, state, epochs in [
        (_spans((5, 1.0)), draft.state, draft.epochs),
        (_spans((5, 1.0), (6, 1.0), (2, 1.0)), draft.state, draft.epochs),
        (spans, draft.state, draft.epochs | {"x": b"\0\0\0\0"}),
        (spans, draft.state[:-1], draft.epochs),
        (spans, b"", draft.epochs),
    ]:
        with pytest.raises(DataError, match=r"order of prompts in Redis is invalid .* another run\.name"):
            _order(now).restore(state, epochs)


def test_a_fork_with_fewer_slots_keeps_the_last_recent_prompts():
    spans = _spans((5, 1.0), (6, 1.0))
    origin = _order(spans, slots=9, curriculum=middle_first)
    _draw(origin, 9, 0)
    kept = origin.draft(0, 9, {})
    fork = _order(spans, slots=3, curriculum=middle_first)
    fork.restore(kept.state, {name: rows.tobytes() for name, rows in origin._rows.items()})
    picks = fork.draft(1, 9, {}).picks
    assert picks == origin.draft(1, 9, {}).picks
    np.testing.assert_array_equal(codec.decode(fork.draft(0, 9, {}).state, _State).recent, origin._state.recent[-3:])


def test_restoring_an_empty_state_starts_from_the_beginning():
    order = _order(_spans((5, 1.0)))
    beginning = order.draft(5, 0, {})
    order.accept(beginning)
    order.restore(b"", {})
    assert order.draft(5, 0, {}) == beginning


def test_stored_state_is_small_and_epochs_are_plain_integers():
    spans = [replace(span, name=f"source-{span.name}") for span in _spans((100_000, 1.0), (50_000, 2.0))]
    order = PromptOrder(spans, 5, True, slots=32, curriculum=lambda rows, rates, epoch: rows)
    draft = order.draft(128, 0, {})
    assert {name: len(body) for name, body in draft.epochs.items()} == {"source-a": 400_000, "source-b": 200_000}
    assert np.frombuffer(draft.epochs["source-b"], "<i4").tolist() == (100_000 + permutation(5, 0, 50_000)).tolist()
    assert len(draft.state) < 32 * 4 + 2 * 20 + 10
    assert len(PromptOrder(spans, 5, True, slots=32).draft(128, 0, {}).state) < 2 * 25 + 10


def test_a_curriculum_gets_the_rates_known_at_each_epoch():
    seen: list[tuple[list[int], list[float], int]] = []

    def backwards(rows: np.ndarray, rates: np.ndarray, epoch: int) -> np.ndarray:
        seen.append((rows.tolist(), rates.tolist(), epoch))
        return rows[::-1]

    order = _order(_spans((4, 1.0)), exclude=0.9, slots=1, curriculum=backwards)
    first = [pick.row for pick in _draw(order, 4, 0)]
    assert first == permutation(5, 0, 4).tolist()[::-1]
    easy, middle, hard, _ = first
    rates = {easy: PassRate(0, 0.95), middle: PassRate(1, 0.5), hard: PassRate(2, 0.0), first[3]: PassRate(3, 1.0)}
    second = [pick.row for pick in order.draft(3, 4, rates).picks]
    rows, given_rates, epoch = seen[1]
    assert epoch == 1
    assert rows == [row for row in permutation(5, 1, 4).tolist() if row != easy]
    assert second == rows[::-1]
    known = dict(zip(rows, given_rates, strict=True))
    assert (known[middle], known[hard]) == (0.5, 0.0)
    assert np.isnan(known[first[3]]), "the last one may not be settled yet"


def test_a_curriculum_needs_no_exclusion():
    order = _order(_spans((4, 1.0)), curriculum=lambda rows, rates, epoch: rows[::-1])
    assert [pick.row for pick in _draw(order, 4, 0)] == permutation(5, 0, 4).tolist()[::-1]


def test_a_raised_bound_brings_exhausted_sources_back():
    spans = _spans((5, 1.0), (7, 1.0))
    order = _order(spans, exclude=0.5, slots=1)
    rates = {row: PassRate(-9, 0.6) for row in range(5)} | {row: PassRate(-9, 0.1) for row in range(5, 12)}
    picks = _draw(order, 10, 0) + _draw(order, 6, 10, rates)
    assert {pick.source for pick in picks[11:]} == {"b"}
    state, epochs = order.draft(0, 16, rates).state, {name: rows.tobytes() for name, rows in order._rows.items()}
    same, raised = _order(spans, exclude=0.5, slots=1), _order(spans, exclude=0.9, slots=1)
    same.restore(state, epochs)
    raised.restore(state, epochs)
    assert {pick.source for pick in _draw(same, 6, 16, rates)} == {"b"}
    more = _draw(raised, 6, 16, rates)
    assert Counter(pick.source for pick in more) == {"a": 3, "b": 3}
    assert len({(pick.epoch, pick.row) for pick in picks + more}) == len(picks + more), "no row is asked twice in an epoch"
