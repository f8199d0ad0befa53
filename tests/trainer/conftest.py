"""Shared by the trainer's tests: the tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tiny_model import make_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny random Qwen3 in float32."""
    return make_model(tmp_path_factory.mktemp("model"))
