"""The loss: contradictory or unused settings are rejected with key, value and remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.config import ConfigError, RunConfig, load, load_resolved, to_toml
from services.config.loss import CLIPS, POLICIES

CHANGED = {"clip_low": "0.1", "clip_high": "0.3"}
CENTERED = ["loss.policy=dr_grpo", "advantage.kind=centered", "loss.denominator=constant"]
OFF = "whose ratio starts from the policy that sampled: the correction is 1: remove it"


def configured(folder: Path, *overrides: str) -> RunConfig:
    file = folder / "run.toml"
    file.write_text('[model]\npath = "m"\n[[data.sources]]\nkind = "jsonl"\npath = "d"\n[[verifiers]]\nkind = "exact"\n')
    return load(file, overrides, environ={})


def test_keys_unused_by_the_policy_loss_are_rejected(tmp_path: Path) -> None:
    for policy in [*(policy for policy in POLICIES if policy != "dr_grpo"), "mine.losses:own"]:
        for key in CLIPS:
            changes = [f"loss.policy={policy}", f"loss.{key}={CHANGED[key]}"]
            if key in POLICIES.get(policy, CLIPS):
                assert str(getattr(configured(tmp_path, *changes).loss, key)) == CHANGED[key]
                continue
            with pytest.raises(ConfigError, match=rf'loss.{key} = .* has no effect with loss.policy = "{policy}": remove it'):
                configured(tmp_path, *changes)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["loss.policy=ppo"], "loss.policy = 'ppo': must be one of grpo, dapo, dr_grpo, cispo, gspo, reinforce, dppo_tv,"),
        (["loss.policy=mine.losses"], "or package.module:function for a custom loss"),
        (["loss.policy=dr_grpo"], 'not "standard" and "token": set both'),
        ([*CENTERED, "advantage.kind=standard"], 'not "standard" and "constant": set both'),
        (["loss.denominator_tokens=9"], "loss.denominator_tokens = 9 was removed, and loss.denominator"),
        (["loss.old=behaviour"], "loss.old = 'behaviour' was removed, and the ratio starts from the policy that sampled"),
        (["loss.policy=dppo_tv", "loss.correction_upper=3"], f'has no effect with loss.policy = "dppo_tv", {OFF}'),
        (["loss.policy=dppo_kl", "loss.correction_mask={variation=[0.1]}"], f'has no effect with loss.policy = "dppo_kl", {OFF}'),
        (["loss.correction_mask={token=[2.0]}"], "`token` must be two bounds, the lower at most 1"),
        (["loss.correction_mask={sequence=[1.5,2.0]}"], "and the upper at least 1, e.g. { sequence = [0.5, 2.0] }"),
        (["loss.correction_mask={variation=[0.5,2.0]}"], "`variation` must be one bound above 0"),
        (["loss.entropy_coefficient=-1"], "loss.entropy_coefficient = -1: input should be greater than or equal to 0"),
    ],
)  # fmt: skip
def test_invalid_settings_are_rejected(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        configured(tmp_path, *overrides)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "overrides",
    [
        CENTERED, ["loss.policy=dppo_kl", "loss.clip_high=0.2"], ["loss.denominator=group"],
        ["loss.correction_mask={token=[1,1]}"], ["loss.policy=a.b:c"],
        ["loss.correction_mask={sequence=[0.5,2], variation=[0.2]}", "loss.entropy_coefficient=0.01"],
    ],
)  # fmt: skip
def test_valid_settings_round_trip(tmp_path: Path, overrides: list[str]) -> None:
    config = configured(tmp_path, *overrides)
    (tmp_path / "resolved.toml").write_text(to_toml(config))
    assert load_resolved(tmp_path / "resolved.toml") == config


def test_asynchronous_runs_of_one_mini_batch_take_their_ratio_from_behaviour(tmp_path: Path) -> None:
    expected = {
        "run.steps=100": True, "admission.max_staleness=0": False, "trainer.mini_batches=2": False,
        "loss.correction_upper=3": False, "loss.correction_mask={token=[0.5,2]}": False,
    }  # fmt: skip
    assert {override: configured(tmp_path, override).from_behaviour for override in expected} == expected
    assert configured(tmp_path, "loss.policy=dppo_tv", "admission.max_staleness=0").from_behaviour


def test_gspo_defaults_to_the_papers_bounds_and_mean(tmp_path: Path) -> None:
    loss = configured(tmp_path, "loss.policy=gspo").loss
    assert (loss.clip_low, loss.clip_high, loss.denominator) == (3e-4, 4e-4, "sequence")
    loss = configured(tmp_path, "loss.policy=gspo", "loss.clip_low=0.1", "loss.denominator=token").loss
    assert (loss.clip_low, loss.clip_high, loss.denominator) == (0.1, 4e-4, "token")
    assert configured(tmp_path, "loss.policy=dapo").loss.clip_low == 0.2
    assert configured(tmp_path, "loss.policy=dppo_tv").loss.clip_high == 0.1
