"""A whole run with environments of the library verifiers from PyPI, each version in its own virtual environment."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.environment.programs.test_verifiers_library import made
from tests.support.whole_runs import check_whole, finish, start, write_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
STEPS = 2
NAMES = {"classic_tools": "0.3.1", "v1_single": "0.4.0"}
"""Environments, and the library version that each is written for."""


def test_environments_of_the_library_train(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    sources = ", ".join(
        f'{{kind = "jsonl", path = "{folder}/{name}.jsonl", name = "{name}", environment = "{name}"}}' for name in NAMES
    )
    pythons = {version: made(tmp_path_factory, version) for version in set(NAMES.values())}
    environments = ", ".join(
        f'{{name = "{name}", kind = "verifiers", interpreter = "{pythons[version]}", max_turns = 4}}'
        for name, version in NAMES.items()
    )
    path = write_run(
        folder, "library", f"data.sources=[{sources}]", f"environments=[{environments}]", f"run.steps={STEPS}", "verifiers=[]",
        "filters.exclude_pass_rate=0", "data.chat_template=true", "sampling.max_tokens=12", "data.max_prompt_tokens=40",
        "sampling.group_size=2", "admission.prompts_per_step=2", "admission.max_staleness=0",
    )  # fmt: skip
    subprocess.run([sys.executable, "-m", "services.console", "rows", str(path)], check=True)
    finish(start(path))
    check_whole(folder, "library", STEPS)
    records = [json.loads(line) for line in (folder / "library" / "metrics.jsonl").read_text().splitlines()]
    expected = {f"reward/train/{name}/{name}.digits" for name in NAMES}
    assert expected <= {key for record in records for key in record}
