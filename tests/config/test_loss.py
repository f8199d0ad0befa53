"""The loss: contradictory or unused settings are rejected with key, value and remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.config import ConfigError, RunConfig, load, load_resolved, to_toml
from services.config.load import digest
from services.config.loss import CLIPS, POLICIES, Loss

CHANGED = {"clip_low": "0.1", "clip_high": "0.3", "divergence": "kl", "divergence_bound": "0.2"}
CENTERED = ["loss.policy=dr_grpo", "advantage.kind=centered", "loss.denominator=constant", "loss.denominator_tokens=4096"]
MU = 'with loss.old = "behaviour"'
OFF = "whose ratio already starts from the generators' policy, so that the correction is 1: remove it"


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
        (["loss.policy=ppo"], "loss.policy = 'ppo': must be one of grpo, dapo, dr_grpo, cispo, gspo, reinforce, dppo, or"),
        (["loss.policy=mine.losses"], "or package.module:function for a custom loss"),
        (["loss.policy=dr_grpo"], 'set both, and set loss.denominator_tokens to the divisor of a mini-batch'),
        ([*CENTERED, "advantage.kind=standard"], 'not "standard" and "constant": set both'),
        ([*CENTERED, "loss.denominator_tokens=0"], 'loss.denominator = "constant" needs loss.denominator_tokens > 0'),
        (["loss.denominator_tokens=9"], 'loss.denominator_tokens = 9 has no effect with loss.denominator = "token"'),
        (["loss.kl_beta=0", "loss.kl_estimator=k1"], "loss.kl_estimator = 'k1' has no effect with loss.kl_beta = 0"),
        (["loss.old=behaviour", "loss.correction_upper=3"], f'loss.correction_upper = 3.0 has no effect {MU}, {OFF}'),
        (["loss.old=behaviour", "loss.correction_token_mask=[0.5,2]"], f"correction_token_mask = [0.5, 2.0] has no effect {MU}"),
        (["loss.policy=dppo", "loss.correction_variation_mask=0.1"], f'has no effect with loss.policy = "dppo", {OFF}'),
        (["loss.correction_token_mask=[2.0]"], "loss.correction_token_mask = [2.0]: must be empty or two bounds"),
        (["loss.correction_sequence_mask=[1.5,2.0]"], "the lower at most 1 and the upper at least 1, e.g. [0.5, 2.0]"),
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
        CENTERED, ["loss.policy=dppo", "loss.divergence=kl"], ["loss.old=behaviour"], ["loss.denominator=group"],
        ["loss.policy=dppo", "loss.old=behaviour"], ["loss.correction_token_mask=[1,1]"], ["loss.policy=a.b:c"],
        ["loss.correction_sequence_mask=[0.5,2]", "loss.correction_variation_mask=0.2", "loss.entropy_coefficient=0.01"],
    ],
)  # fmt: skip
def test_valid_settings_round_trip(tmp_path: Path, overrides: list[str]) -> None:
    config = configured(tmp_path, *overrides)
    (tmp_path / "resolved.toml").write_text(to_toml(config))
    assert load_resolved(tmp_path / "resolved.toml") == config


@pytest.mark.parametrize(
    ("overrides", "old"),
    [
        ([], "behaviour"),
        (["admission.max_staleness=0"], "recompute"),
        (["trainer.mini_batches=2"], "recompute"),
        (["loss.correction_upper=3"], "recompute"),
        (["loss.old=recompute"], "recompute"),
        (["loss.old=behaviour", "trainer.mini_batches=2"], "behaviour"),
    ],
)
def test_asynchronous_runs_default_to_old_behaviour(tmp_path: Path, overrides: list[str], old: str) -> None:
    config = configured(tmp_path, *overrides)
    assert config.loss.old == old
    assert config.loss.from_behaviour == (old == "behaviour")


def test_gspo_defaults_to_the_papers_bounds_and_mean(tmp_path: Path) -> None:
    loss = configured(tmp_path, "loss.policy=gspo").loss
    assert (loss.clip_low, loss.clip_high, loss.denominator) == (3e-4, 4e-4, "sequence")
    loss = configured(tmp_path, "loss.policy=gspo", "loss.clip_low=0.1", "loss.denominator=token").loss
    assert (loss.clip_low, loss.clip_high, loss.denominator) == (0.1, 4e-4, "token")
    assert configured(tmp_path, "loss.policy=dapo").loss.clip_low == 0.2


def test_correction_max_gap_may_change_on_resume(tmp_path: Path) -> None:
    one, other = (configured(tmp_path, f"loss.correction_max_gap={limit}") for limit in (0.1, 0.2))
    assert digest(one) == digest(other)
    assert digest(one) != digest(configured(tmp_path, "loss.clip_low=0.1"))


def test_dppo_and_old_behaviour_use_the_generators_logprobs() -> None:
    assert [Loss(old="behaviour").from_behaviour, Loss(policy="dppo").from_behaviour, Loss().from_behaviour] == [
        True,
        True,
        False,
    ]
