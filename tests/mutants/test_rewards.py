"""Some of the broken rules of rewards and of tool calls; `python -m tests.mutants.rewards` breaks all of them."""

from __future__ import annotations

import pytest

from tests.mutants.rewards import MUTANTS, Breaking, notices


def test_every_rule_is_still_where_it_is_broken() -> None:
    for mutant in MUTANTS.values():
        assert Breaking(mutant).get_code(mutant.module).co_names, mutant.rule


@pytest.mark.slow
@pytest.mark.parametrize("rule", list(MUTANTS)[::4])
def test_a_broken_rule_is_noticed(rule: str) -> None:
    assert notices(rule)
