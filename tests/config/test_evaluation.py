"""The `evaluation` section: which versions are evaluated, and which settings are rejected, with key, value and remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.config import ConfigError, RunConfig, load_resolved, to_toml
from services.config.evaluation import Evaluation
from tests.support.harness import small_config

SOURCES = "evaluation.sources=[{kind='jsonl', name='held_out', path='held_out.jsonl'}]"


def evaluating(folder: Path, *overrides: str) -> RunConfig:
    return small_config(folder, None, "evaluation.every_steps=10", SOURCES, "generator.count=2", *overrides)


def test_a_round_trip_keeps_the_section(tmp_path: Path) -> None:
    config = evaluating(tmp_path, "evaluation.samples=4")
    (tmp_path / "resolved.toml").write_text(to_toml(config))
    assert load_resolved(tmp_path / "resolved.toml") == config
    assert config.evaluation.sources[0].name == "held_out"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["evaluation.sources=[]"], r"evaluation\.every_steps = 10 needs prompts: add \[\[evaluation\.sources\]\]"),
        (["evaluation.sources.0.name=main"], 'two prompt sources have name = "main"'),
        (["evaluation.sources.0.name=all"], r'evaluation\.sources\.0\.name = "all" means all sources'),
        (["evaluation.sources.0.weight=2"], r"evaluation\.sources\.0\.weight = 2\.0 has no effect: every prompt is evaluated"),
        (["evaluation.temperature=0", "evaluation.samples=2"], r"evaluation\.temperature = 0 makes all .*samples = 2"),
        (["evaluation.max_tokens=41"], r"evaluation\.max_tokens = 65 exceeds model\.max_tokens = 64"),
    ],
)
def test_invalid_settings_are_rejected_with_a_remedy(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        evaluating(tmp_path, *overrides)


def test_pass_at_k_is_reported_for_powers_of_two_and_all_samples() -> None:
    found = {n: Evaluation(samples=n, temperature=1.0).ks for n in (1, 2, 3, 4, 8, 12)}
    assert found == {1: [1], 2: [1, 2], 3: [1, 2, 3], 4: [1, 2, 4], 8: [1, 2, 4, 8], 12: [1, 2, 4, 8, 12]}


def test_evaluation_completions_may_be_longer(tmp_path: Path) -> None:
    assert evaluating(tmp_path, "evaluation.max_tokens=40").evaluation.max_tokens == 40


@pytest.mark.parametrize(
    ("every", "steps", "versions"),
    [(2, 6, [0, 2, 4, 6]), (4, 6, [0, 4, 6]), (10, 3, [0, 3]), (1, 2, [0, 1, 2]), (0, 5, [])],
)
def test_versions_are_evaluated_in_order(tmp_path: Path, every: int, steps: int, versions: list[int]) -> None:
    given = evaluating(tmp_path).evaluation.model_copy(update={"every_steps": every})
    found: list[int] = []
    while (version := given.next_version(found[-1] if found else -1, steps)) is not None:
        found.append(version)
    assert found == versions
    assert Evaluation().next_version(-1, steps) is None
