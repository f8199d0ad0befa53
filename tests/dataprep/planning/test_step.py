"""The layout of a run's steps, derived from its configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from services.dataprep.planning.step import layout_of
from tests.support.models.tiny_model import make_config


@pytest.mark.parametrize(
    ("loss", "apart"),
    [
        ({"kl_beta": 0.0}, True),
        ({"kl_beta": 0.1}, False),
        ({"kl_beta": 0.0, "entropy_coefficient": 0.1}, False),
        ({"kl_beta": 0.0, "policy": "tests.trainer.loss_variants:custom"}, False),
    ],
)
def test_groups_without_a_gradient_are_packed_apart_where_the_loss_gives_them_none(loss: dict[str, Any], apart: bool) -> None:
    assert layout_of(make_config(Path("model"), loss=loss)).scored_apart == apart
