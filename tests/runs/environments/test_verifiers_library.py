"""A whole run with an environment of the library verifiers from PyPI, in a virtual environment of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.environment.programs.test_verifiers_library import made
from tests.support.whole_runs import check_whole, finish, start, write_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
STEPS = 2


def test_an_environment_of_the_library_trains(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    source = f'{{kind = "jsonl", path = "{folder}/v1_tools.jsonl", environment = "v1_tools"}}'
    environment = f'{{name = "v1_tools", kind = "verifiers", interpreter = "{made(tmp_path_factory)}", max_turns = 4}}'
    path = write_run(
        folder, "library", f"data.sources=[{source}]", f"environments=[{environment}]", f"run.steps={STEPS}", "verifiers=[]",
        "filters.exclude_pass_rate=0", "data.chat_template=true", "sampling.max_tokens=12", "data.max_prompt_tokens=40",
        "sampling.group_size=2", "admission.prompts_per_step=1", "admission.max_staleness=0",
    )  # fmt: skip
    subprocess.run([sys.executable, "-m", "services.console.commands", "rows", str(path)], check=True)
    finish(start(path))
    check_whole(folder, "library", STEPS)
    records = [json.loads(line) for line in (folder / "library" / "metrics.jsonl").read_text().splitlines()]
    assert "reward/train/v1_tools.digits" in {key for record in records for key in record}
