"""The tool `python` in sandboxes of a cluster: the real client library, before a fake API server and a real runtime."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.environment.programs.cluster_sandbox import NAMESPACE_ENV, POOL_ENV, SandboxLost, SandboxTool
from services.environment.programs.frames import ProgramSetup
from services.environment.programs.kinds import opened
from tests.environment.support.sandbox_cluster import SandboxCluster, sandbox_cluster


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[SandboxCluster]:
    async with sandbox_cluster(tmp_path) as cluster:
        yield cluster


async def run(tool: SandboxTool, code: str) -> str:
    return await tool.call({"code": code})


async def test_a_rollout_has_a_sandbox_from_its_first_call_to_its_end(cluster: SandboxCluster) -> None:
    sandboxes = cluster.sandboxes()
    tool = SandboxTool(60.0, sandboxes, 60.0)
    assert (tool.snapshot(), cluster.claims) == ({}, {})
    assert await run(tool, "x = 2\nopen('a', 'w').write('kept')\nx + 1") == "3"
    (claim,) = cluster.claims.values()
    assert claim["spec"]["lifecycle"]["shutdownPolicy"] == "Delete", "should nobody delete it"
    assert await run(tool, "print(open('a').read())") == "kept"
    assert (await run(tool, "x")).endswith("NameError: name 'x' is not defined")
    assert "\ufffd" in await run(tool, "print('\\ud800'.encode('utf-8', 'surrogatepass').decode('utf-8', 'replace'))")
    assert tool.snapshot() is None, "what is in a sandbox is not copied"
    await tool.close()
    assert cluster.claims == {}
    assert await run(tool, "1") == "Error: the rollout has ended"
    await sandboxes.close()


async def test_what_the_code_does_to_its_process_is_a_reply(cluster: SandboxCluster) -> None:
    sandboxes = cluster.sandboxes()
    tool = SandboxTool(2.0, sandboxes, 60.0)
    replies = {
        "import time\nprint('begun', flush=True)\ntime.sleep(60)": "begun\nError: the code ran longer than 2 s",
        "import os\nos.kill(os.getpid(), 11)": "Error: the code was killed by SIGSEGV (Segmentation fault)",
        "import os\nos.kill(os.getppid(), 9)": "Error: the code has ended the process that runs it",
        "import sys\nsys.exit(3)": "",
    }
    found = {code: await run(tool, code) for code in replies}
    assert found == replies
    assert (await run(tool, "print('x' * 2_000_000)")).endswith("Error: the code printed more than 1 MiB")
    assert await tool.call({}) == "Error: code: Field required"
    await tool.close()
    await sandboxes.close()


async def test_a_sandbox_that_is_lost_fails_the_rollout(cluster: SandboxCluster) -> None:
    """A failure of the cluster must not become a reply, and code must not run twice."""
    sandboxes = cluster.sandboxes()
    tool = SandboxTool(60.0, sandboxes, 60.0)
    cluster.broken = True
    with pytest.raises(SandboxLost, match="the sandbox was lost during a call"):
        await run(tool, "1")
    assert cluster.commands == 1
    await tool.close()
    assert cluster.claims == {}
    await sandboxes.close()


async def test_a_pool_that_does_not_exist_is_named(cluster: SandboxCluster) -> None:
    sandboxes = cluster.sandboxes("pithon")
    tool = SandboxTool(60.0, sandboxes, 60.0)
    with pytest.raises(SandboxLost, match="no pool pithon"):
        await run(tool, "1")
    await tool.close()
    assert cluster.claims == {}, "the library deletes a claim that it could not get"
    await sandboxes.close()


async def test_worker_processes_use_the_pool_that_their_variables_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(POOL_ENV, "python")
    monkeypatch.setenv(NAMESPACE_ENV, "sandboxes")
    kind = await opened(ProgramSetup("python", tools=["python"]))  # tries no code, and connects to nothing
    assert [tool["function"]["name"] for tool in kind.shared_tools()] == ["python"]
    program = kind.program("0-0.1.0")
    await program.start({})
    async with asyncio.timeout(10):
        await program.close()
        await kind.close()
