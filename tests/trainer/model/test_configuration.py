"""A missing or invalid model is rejected with one line that names it."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.config import ConfigError
from services.trainer.model import configuration


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    absent = str(tmp_path / "absent")
    with pytest.raises(ConfigError) as refusal:
        configuration.read(absent, 64)
    assert str(refusal.value).startswith(f"model.path = {absent!r} is not a folder")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("content", [None, "{}", "{"])
def test_an_invalid_configuration_is_named(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError) as refusal:
        configuration.read(str(tmp_path), 64)
    assert str(refusal.value).startswith(f"model.path = {str(tmp_path)!r} is not a model that can be loaded: ")
    assert "\n" not in str(refusal.value)
