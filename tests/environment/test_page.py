"""The configurations of docs/environments.md are valid."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from services.config import to_toml
from services.config.load import validate
from tests.support.harness import save_tokenizer_folder, small_config

PAGE = Path(__file__).parents[2] / "docs" / "environments.md"


def test_every_configuration_on_the_page_is_valid(tmp_path: Path) -> None:
    save_tokenizer_folder(tmp_path / "model")
    base = tomllib.loads(to_toml(small_config(tmp_path, None, "evaluation.every_steps=0")))
    kinds: list[str] = []
    for block in re.findall(r"```toml\n(.*?)```", PAGE.read_text(), flags=re.DOTALL):
        tree = tomllib.loads(block)
        if "data" not in tree:
            continue
        config = validate({**base, "verifiers": [], **tree, "data": {**base["data"], **tree["data"]}}, "docs/environments.md")
        kinds += [environment.kind for environment in config.environments]
    assert set(kinds) == {"python", "mcp", "agent", "verifiers"}
