"""A whole run with unmodified openai-agents, clients of OpenAI and Anthropic, and an MCP server from PyPI."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.support.whole_runs import check_whole, finish, start, write_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
LIBRARIES = Path(__file__).parents[2] / "environment" / "support" / "libraries.py"
AGENTS = ("agents", "waiting", "claude")
STEPS = 3


def test_third_party_clients_and_servers_train(folder: Path) -> None:
    sources = ", ".join(
        f'{{kind = "jsonl", path = "{folder / "data.jsonl"}", name = "{name}", environment = "{name}"}}'
        for name in (*AGENTS, "clock")
    )
    clock = json.dumps([sys.executable, "-m", "mcp_server_time", "--local-timezone", "UTC"])
    environments = "".join(f'{{name = "{name}", kind = "agent", run = "{LIBRARIES}:{name}"}}, ' for name in AGENTS)
    environments += f'{{name = "clock", kind = "mcp", server = {clock}, shared = true}}'
    path = write_run(
        folder, "libraries", f"data.sources=[{sources}]", f"environments=[{environments}]", f"run.steps={STEPS}",
        'verifiers=[{kind="regex", pattern="[0-4]", sources=["clock"]}]', "filters.exclude_pass_rate=0",
        "data.chat_template=true", "sampling.max_tokens=12",
    )  # fmt: skip
    finish(start(path))
    check_whole(folder, "libraries", STEPS)
    records = [json.loads(line) for line in (folder / "libraries" / "metrics.jsonl").read_text().splitlines()]
    found = {key for record in records for key in record}
    assert {*(f"reward/train/{name}/{name}" for name in AGENTS), "reward/train/clock/regex"} <= found
