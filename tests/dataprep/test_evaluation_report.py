"""The report of an evaluation round: pass@k against an enumeration of all draws, means, and results to reject."""

from __future__ import annotations

from itertools import combinations
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.dataprep.evaluation_report import Result, Unfit, pass_at_k, read_results, report
from services.protocol import codec
from services.protocol.messages import Header, Ticket
from tests.support.harness import ticket

VERSION = 6


def asked(index: int = 0, source: str = "held_out") -> Ticket:
    return ticket(index, id=f"{source}:{index}", version=VERSION, source=source, group_size=4)


def answered(one: Ticket, **fields: object) -> bytes:
    given = {
        "ticket": one.id, "seq": one.seq, "epoch": one.epoch, "index": one.index, "payload": "", "payload_bytes": 0,
        "prompt_tokens": 3, "lengths": [2, 4, 6, 8], "rewards": [1.0, 0.0, 1.0, 0.5], "scores": {},
        "truncated": [False, False, False, True], "oldest": [VERSION] * 4, "newest": [VERSION] * 4, "generator": "g",
        "generate_s": 0.1, "score_s": 0.1, "source": one.source, "tool_tokens": [0] * 4,
        "solved": [True, False, True, False],
    }  # fmt: skip
    return codec.encode(Header(**{**given, **fields}))


@given(st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_matches_all_draws(numbers: tuple[int, int, int]) -> None:
    n, correct, k = numbers
    draws = list(combinations([1] * correct + [0] * (n - correct), k))
    assert pass_at_k(n, correct, k) == pytest.approx(sum(any(draw) for draw in draws) / len(draws), abs=1e-12)


def test_pass_at_k_is_exact_where_binomials_overflow() -> None:
    n, correct, k = 5000, 3, 2000
    assert comb(n, k) > 1e308
    assert pass_at_k(n, correct, k) == pytest.approx(float(1 - comb(n - correct, k) * 10**30 // comb(n, k) / 10**30), rel=1e-9)


def test_a_report_covers_each_source_and_all_of_them() -> None:
    easy = Result("easy", [1.0, 1.0], 2, [2, 4], [False, False])
    hard = [Result("hard", [0.0, 0.0], 0, [8, 8], [True, True]), Result("hard", [1.0, 0.0], 1, [6, 8], [False, True])]
    record = report([easy, *hard], [2, 1])
    assert record == {
        "eval/easy/pass@1": 1.0, "eval/easy/pass@2": 1.0, "eval/easy/reward": 1.0, "eval/easy/length": 3.0,
        "eval/easy/truncated": 0.0, "eval/easy/prompts": 1.0,
        "eval/hard/pass@1": 0.25, "eval/hard/pass@2": 0.5, "eval/hard/reward": 0.25, "eval/hard/length": 7.5,
        "eval/hard/truncated": 0.75, "eval/hard/prompts": 2.0,
        "eval/all/pass@1": 0.5, "eval/all/pass@2": pytest.approx(2 / 3), "eval/all/reward": 0.5, "eval/all/length": 6.0,
        "eval/all/truncated": 0.5, "eval/all/prompts": 3.0,
    }  # fmt: skip


def test_a_solved_completion_is_correct_whatever_its_reward() -> None:
    one = asked()
    body = answered(one, rewards=[-0.1, 0.3, 7.0, 0.0], solved=[True, False, False, True])
    (result,) = read_results([one], {one.id: body})
    assert result.correct == 2


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"oldest": [VERSION, VERSION, 5, VERSION]}, r"versions \[5, 6\], but the round is of version 6"),
        ({"newest": [VERSION + 1] * 4}, "but the round is of version 6"),
        ({"oldest": [5] * 4, "newest": [5] * 4}, "but the round is of version 6"),
        ({"rewards": [1.0]}, "4 rollouts"),
        ({"solved": []}, "4 rollouts"),
        ({"ticket": "other:0"}, "names ticket other:0"),
    ],
)
def test_an_unsuitable_result_is_rejected(fields: dict[str, object], why: str) -> None:
    one = asked()
    with pytest.raises(Unfit, match=why):
        read_results([one], {one.id: answered(one, **fields)})


def test_a_rollouts_length_is_the_sum_of_its_segments() -> None:
    one, owners = asked(), [0, 1, 1, 2, 3, 3]
    columns = {"lengths": [2, 4, 6, 8, 1, 2], "oldest": [VERSION] * 6, "newest": [VERSION] * 6, "tool_tokens": [0] * 6}
    (result,) = read_results([one], {one.id: answered(one, rollout=owners, **columns)})
    assert (result.lengths, result.rewards) == ([2, 10, 8, 3], [1.0, 0.0, 1.0, 0.5])


def test_malformed_and_missing_results_are_rejected() -> None:
    one, other = asked(0), asked(1)
    with pytest.raises(Unfit, match="corrupt"):
        read_results([one], {one.id: b"\xff"})
    with pytest.raises(Unfit, match="missing: held_out:1"):
        read_results([one, other], {one.id: answered(one)})
