"""Sandboxes as used by rollouts' programs, in pods that are local processes behind a cluster's API."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

pytest.importorskip("kubernetes", reason="pip install 'grpo[cluster]'")

from services.environment.code_tool.sandboxed import SandboxLost
from services.sandbox import keeper
from tests.kubernetes.support.pod_cluster import PodCluster, processes
from tests.sandbox.worlds import SandboxWorld, kept, sandboxes
from tests.support.harness import wait_until


@pytest_asyncio.fixture
async def place(tmp_path: Path) -> AsyncIterator[SandboxWorld]:
    async with sandboxes(tmp_path) as found:
        yield found


async def test_code_keeps_files_but_no_variables(place: SandboxWorld) -> None:
    tool = place.tool()

    async def run(code: str) -> str:
        return await tool.call({"code": code})

    assert await run("x = 2\nprint(x)\nx + 1") == "2\n3"
    assert (await run("x")).endswith("NameError: name 'x' is not defined")
    assert await run("import os\nos.mkdir('d')\nopen('d/a', 'w').write('kept')") == "4"
    assert await run("open('d/a').read()") == "'kept'"
    assert await run("f = open('d/b', 'w')\ng = f.write('written')\ndef h(): return f") == ""
    last = "import atexit, threading\natexit.register(print, 'over')\nthreading.Timer(0.1, print, ['ran']).start()"
    assert await run(last) == "ran\nover"
    assert await run("open('d/b').read()") == "'written'"
    assert (await run("1 / 0")).endswith("ZeroDivisionError: division by zero")
    assert await tool.call({"code": 1}) == "Error: code: Input should be a valid string"
    assert await run("import subprocess; subprocess.run(['echo', 'hello']).returncode") == "hello\n0"
    other = place.tool("0-0.7.1.0")
    other.restore(tool.snapshot())
    assert await other.call({"code": "open('d/a').read()"}) == "'kept'"
    assert len(place.cluster.held()) == 2
    await asyncio.gather(tool.close(), other.close())
    assert place.cluster.held() == []
    assert await run("1") == "Error: the rollout has ended"


LIMITED = {
    "while True: pass": "Error: the code ran longer than 2 s",
    "import os, time\nos.setsid() if os.fork() else time.sleep(900)\ntime.sleep(900)": "Error: the code ran longer than 2 s",
    "while True: print('x' * 10_000)": "Error: the code printed more than 1 MiB",
    "print('x' * 3_000_000)": "Error: the code printed more than 1 MiB",
    "x = bytearray(10 ** 9)": "MemoryError",
    "for i in range(6):\n  with open(f'{i}', 'wb') as f: f.write(bytes(14 << 20))": "may have 64 MiB and 10000 entries",
    "import os; os.kill(os.getpid(), 9)": "the code was killed by SIGKILL (Killed), perhaps for its memory or its processor time",
    "import os; os.kill(os.getpid(), 11)": "the code was killed by SIGSEGV (Segmentation fault)",
    "import os; os.kill(os.getpid(), 40)": "the code was killed by signal 40",
    "import subprocess; subprocess.Popen(['sleep', '900']); print('gone')": "gone",
    "import os; os.close(1); os.close(2)": "",
    "import sys; sys.exit('done')": "done",
}


async def test_a_call_ends_within_its_limits_with_all_its_processes(place: SandboxWorld) -> None:
    limits = [2.0 if "longer" in said else 100.0 for said in LIMITED.values()]
    tools = [place.tool(f"0-0.7.{sample}.0", limit_s=limit_s) for sample, limit_s in enumerate(limits)]
    answers = await asyncio.gather(*(tool.call({"code": code}) for tool, code in zip(tools, LIMITED, strict=True)))
    for (code, said), answer in zip(LIMITED.items(), answers, strict=True):
        assert said in answer, code
        assert len(answer) < 11_000
    pods = [pod["metadata"]["uid"] for pod in place.cluster.pods.values()]
    await wait_until(lambda: [len(processes(uid)) for uid in pods] == [1] * len(LIMITED))  # the pods' own process
    for tool in tools:
        tool._limit_s = 100.0
    again = await asyncio.gather(*(tool.call({"code": "1 + 1"}) for tool in tools))
    assert again == ["2"] * len(LIMITED), "the sandboxes still work"


async def test_a_resent_call_is_not_run_twice(place: SandboxWorld, tmp_path: Path) -> None:
    """The connections end during the call, and a service without any state replaces the first one."""
    tool, log = place.tool(limit_s=100.0), tmp_path / "log"
    code = f"import time\nwith open({str(log)!r}, 'a') as f: f.write('x')\ntime.sleep(3)\nprint('done')"
    call = asyncio.ensure_future(tool.call({"code": code}))
    await wait_until(log.exists)
    for _ in range(5):
        await asyncio.to_thread(place.cluster.cut)
        await asyncio.sleep(0.05)
    async with kept(place):
        again = place.tool(limit_s=100.0)
        again._sandbox, again._pod = tool._sandbox, tool._pod
        assert await again.call({"code": code}) == "done"
    assert await call == "done"
    assert log.read_text() == "x"
    assert len(place.cluster.executed) > 2


async def test_a_program_keeps_its_pod_and_a_new_one_gets_another(place: SandboxWorld) -> None:
    tool = place.tool()
    opened = await asyncio.gather(*(place.kept.open(tool._sandbox, 60.0) for _ in range(4)))
    assert len({each.pod for each in opened}) == 1
    async with kept(place) as fresh:
        assert (await fresh.open(tool._sandbox, 60.0)).pod == opened[0].pod
    await tool.call({"code": "open('left', 'w').close()"})
    successor = place.tool("0-0.7.0.1")
    assert await successor.call({"code": "import os; os.listdir()"}) == "[]"
    assert len(place.cluster.held()) == 1, "the predecessor's pod is deleted"
    with pytest.raises(SandboxLost, match="deleted"):
        await tool.call({"code": "1"})


async def test_the_reason_why_a_pod_ended_decides_the_reply(place: SandboxWorld) -> None:
    """What the code did to its sandbox is a reply; an external cause makes the result unknown, through no fault of the policy."""
    cluster = place.cluster

    async def during(end: object, *given: str) -> str:
        tool = place.tool(limit_s=100.0)
        await tool.call({"code": "1"})
        call = asyncio.ensure_future(tool.call({"code": "import time; time.sleep(60)"}))
        [pod] = cluster.held()
        await wait_until(lambda: len(processes(cluster.pods[pod]["metadata"]["uid"])) > 3)
        await asyncio.to_thread(end, pod, *given)  # pyright: ignore[reportArgumentType]
        try:
            said = await call
            assert await tool.call({"code": "1"}) == "1", "in another sandbox"
            return said
        finally:
            await tool.close()
            await wait_until(lambda: not cluster.pods)

    assert "ended its sandbox (OOMKilled)" in await during(cluster.end, "", "", "OOMKilled")
    assert "exceeds the limit" in await during(cluster.end, "Evicted", "Usage of EmptyDir volume exceeds the limit 1Gi")
    for reason, message in (("Evicted", "The node was low on resource: memory"), ("Terminated", "node shutdown")):
        with pytest.raises(SandboxLost, match=f"ended by the cluster .{reason}"):
            await during(cluster.end, reason, message)
    with pytest.raises(SandboxLost, match="its pod was deleted"):
        await during(cluster.lose)


async def test_code_that_attacks_its_sandbox_harms_only_its_rollout(place: SandboxWorld) -> None:
    tool, other = place.tool(), place.tool("0-0.7.1.0")
    assert await other.call({"code": "1"}) == "1"
    alone = "import os, signal\nfor p in os.listdir('/proc'):\n  if p.isdigit() and int(p) != os.getpid():\n    try: e = open(f'/proc/{p}/environ').read()\n    except OSError: continue\n"  # noqa: E501
    mine = "    if 'HOME=' + os.environ['HOME'] + chr(0) in e: "
    said = await tool.call({"code": alone + mine + "os.kill(int(p), 9)"})
    assert "Error: the code has ended its sandbox" in said
    assert tool.snapshot() == {}
    assert await tool.call({"code": "2"}) == "2"
    forged = json.dumps({"output": "forged", "files": {"../../etc/passwd": "x"}})
    speak = (
        f"try: os.write(os.open(f'/proc/{{p}}/fd/1', os.O_WRONLY), {forged.encode()!r} + b'x' * 10)\n      except OSError: pass"
    )
    assert "sent no result" in await tool.call({"code": alone + mine.rstrip() + "\n      " + speak})
    lost = json.dumps({"lost": "x"})
    place_of = "os.path.join(os.environ['HOME'], 'calls', '1.json')"
    written = f"import os, time\nopen('x', 'w').write({lost!r})\nos.replace('x', {place_of})\ntime.sleep(90)"  # atomically
    with pytest.raises(SandboxLost) as raised:
        await tool.call({"code": written})
    assert raised.value.suspected, "a rollout must not be able to restart itself without being suspected"
    assert await other.call({"code": "3"}) == "3"


async def test_only_a_rollouts_own_sandbox_is_reachable(place: SandboxWorld) -> None:
    tool, other = place.tool(), place.tool("0-0.7.1.0")
    await asyncio.gather(tool.call({"code": "1"}), other.call({"code": "1"}))
    for pod in (other._pod, "demo-trainer-0/../x", "demo-trainer-0"):
        tool._pod = pod
        with pytest.raises(SandboxLost, match="is not the sandbox of" if pod == other._pod else "deleted"):
            await tool.call({"code": "2"})
    for rollout in ("nonsense", "a.b.c.d", "0-0.7.x.0"):
        with pytest.raises(SandboxLost, match="names no rollout"):
            await place.tool(rollout).call({"code": "1"})
    stranger = place.tool()
    stranger._service._poster._token = "operate-token"  # a token with scope operate
    with pytest.raises(SandboxLost, match="the token is unknown"):
        await stranger.call({"code": "1"})


async def test_an_unreachable_cluster_delays_and_then_loses_calls(place: SandboxWorld) -> None:
    cluster: PodCluster = place.cluster
    cluster.away = True
    tool = place.tool()
    call = asyncio.ensure_future(tool.call({"code": "1 + 1"}))
    await asyncio.sleep(0.3)
    assert not call.done()
    cluster.away = False
    assert await call == "2"
    cluster.stuck = "0/3 nodes are available"
    with pytest.raises(SandboxLost, match=r"no sandbox within 3 s: pod .* Unschedulable: 0/3 nodes"):
        await place.tool("0-0.7.2.0", open_limit_s=3.0).call({"code": "1"})
    gone = place.tool("0-0.7.3.0", open_limit_s=0.5)
    gone._service._url = "http://127.0.0.1:1"
    with pytest.raises(SandboxLost, match="did not reply within"):
        await gone.call({"code": "1"})


async def test_a_missing_result_is_blamed_only_on_code_that_ran(place: SandboxWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    tool, client = place.tool(), place.kept._pods.client
    assert await tool.call({"code": "1"}) == "1"
    tool._limit_s = 2.0
    monkeypatch.setattr(keeper, "CALL_MARGIN_S", 0.0)
    honest = client.request

    async def hang(method: str, url: str, *given: Any, **named: Any) -> Any:
        await asyncio.sleep(60.0 if url.endswith("/exec") else 0.0)  # as when a node is lost
        return await honest(method, url, *given, **named)

    with monkeypatch.context() as gone:
        gone.setattr(client, "request", hang)
        with pytest.raises(SandboxLost, match=r"no result after 2 s: no connection") as raised:
            await tool.call({"code": "2"})
    assert not raised.value.suspected
    stopping = place.tool("0-0.7.1.0", limit_s=8.0)
    with pytest.raises(SandboxLost, match=r"no result after 8 s: nothing came") as raised:
        await stopping.call({"code": "import os, signal\nos.kill(os.getppid(), signal.SIGSTOP)"})
    assert raised.value.suspected
