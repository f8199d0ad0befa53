"""Whole runs with environments of the library verifiers, from PyPI, in virtual environments of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.environment.test_verifiers_library import made
from tests.runs.test_run import check_whole, finish, folder, start, write_run  # noqa: F401

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
STEPS = 3


@pytest.mark.parametrize(("version", "names"), [("0.3.1", ("classic_single", "classic_tools")), ("0.4.0", ("v1_single",))])
def test_environments_of_the_library_train(
    version: str, names: tuple[str, ...], folder: Path, tmp_path_factory: pytest.TempPathFactory  # noqa: F811
) -> None:  # fmt: skip
    run = f"library-{version}"
    sources = ", ".join(
        f'{{kind = "jsonl", path = "{folder}/{name}.jsonl", name = "{name}", environment = "{name}"}}' for name in names
    )
    python = made(tmp_path_factory, version)
    environments = ", ".join(
        f'{{name = "{name}", kind = "verifiers", interpreter = "{python}", max_turns = 4}}' for name in names
    )
    path = write_run(
        folder, run, f"data.sources=[{sources}]", f"environments=[{environments}]", f"run.steps={STEPS}", "verifiers=[]",
        "filters.exclude_pass_rate=0", "data.chat_template=true", "sampling.max_tokens=12", "data.max_prompt_tokens=40",
        "sampling.group_size=2", "admission.prompts_per_step=2", "admission.max_staleness=0",
    )  # fmt: skip
    subprocess.run([sys.executable, "-m", "services.console", "rows", str(path)], check=True)
    finish(start(path))
    check_whole(folder, run, STEPS)
    records = [json.loads(line) for line in (folder / run / "metrics.jsonl").read_text().splitlines()]
    of_sources = [f"{name}/" for name in names] if len(names) > 1 else [""]
    expected = {f"reward/train/{of}{name}.digits" for of, name in zip(of_sources, names, strict=True)}
    assert expected <= {key for record in records for key in record}
