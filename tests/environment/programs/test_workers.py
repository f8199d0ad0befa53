"""Worker processes: a faulty program fails only its own rollout, and other rollouts keep their programs."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.config.environments import AgentEnvironment, PythonEnvironment
from services.environment.programs.command import run_command
from services.environment.programs.frames import ProgramSetup
from services.environment.programs.kinds import Agent
from services.environment.programs.pool import ProgramPool
from services.environment.programs.process import ProcessLost, ProgramFailed, ProgramProcess
from services.environment.programs.tools import TURN_CALLS, TURN_CHARACTERS
from services.environment.programs.worker import WHY_CHARACTERS, _told
from services.environment.records import pack_record, reply_of, unpack_records
from services.runtime.own_code import Unusable
from tests.environment.programs.test_programs import called, process
from tests.support.harness import wait_until

MEET = 40
"""More than the threads that Python starts by default, whatever the number of processors."""
CODE = """
import asyncio, json, os, sys, threading, time
from pathlib import Path

class World:
    tools = ["nap", "large", "say", "broken", "stays"]
    def __init__(self): self.seen, self.row = 0, {}
    def start(self, row): self.row = row
    def snapshot(self): return self.row
    def restore(self, state): self.row = state
    async def turn(self, message):
        self.seen += 1
        match message["content"]:
            case "hang": await asyncio.sleep(3600)
            case "block": time.sleep(3600)
            case "die": os._exit(3)
            case "leave": sys.exit(3)
            case "large": return "x" * (65 << 20)
            case "loud": return ["x" * (65 << 20)]
            case "unprintable": raise Unprintable
            case "whole": return f"{self.row['n'] == 10**40}"
            case "wait": await asyncio.sleep(0.3)
        return str(self.seen)
    async def nap(self, seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "rested"
    def large(self) -> str: return "x" * 250_000
    def say(self, text: str) -> str: return text
    def broken(self) -> str: raise Unprintable
    def stays(self) -> bool: return Path.cwd().is_dir()

class Unprintable(Exception):
    def __str__(self): raise ValueError("no text")

met = threading.Barrier(THREADS)

async def solve(client, row):
    match row["do"]:
        case "meet": await asyncio.to_thread(met.wait, 60)
        case "block":
            open(row["begun"], "w").close()
            time.sleep(3600)
        case "leave": sys.exit(3)
        case "leave in a task": await asyncio.gather(solve(client, {"do": "leave"}))
        case "hang": await asyncio.sleep(3600)
        case "stubborn":
            open(row["begun"], "w").close()
            while True:
                try: await asyncio.sleep(3600)
                except BaseException: pass
    return 1.0
""".replace("THREADS", str(MEET))


@pytest.fixture
def world(tmp_path: Path) -> PythonEnvironment:
    (tmp_path / "world.py").write_text(CODE)
    return PythonEnvironment(name="w", kind="python", function=f"{tmp_path / 'world.py'}:World", timeout_s=20.0)


@pytest.fixture
def agent(tmp_path: Path) -> AgentEnvironment:
    (tmp_path / "world.py").write_text(CODE)
    return AgentEnvironment(name="a", kind="agent", run=f"{tmp_path / 'world.py'}:solve", timeout_s=1.0)


async def ask(one: ProgramProcess, rollout: str, content: str = "") -> str:
    [message] = (await one.do(rollout, "turn", {"content": content})).value["messages"]
    return message["content"]


async def call(one: ProgramProcess, rollout: str, *calls: tuple[str, dict[str, Any]]) -> list[str]:
    made = [called(name, json.dumps(arguments))["tool_calls"][0] for name, arguments in calls]
    return [each["content"] for each in (await one.do(rollout, "turn", {"tool_calls": made})).value["messages"]]


async def test_a_cancelled_start_leaves_no_process(world: PythonEnvironment) -> None:
    pool = ProgramPool(world)
    [one] = pool.processes
    starting = asyncio.ensure_future(one.ensure())
    await wait_until(lambda: one.pid is not None)
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    await one.ensure()
    await one.do("a", "start", {})
    await pool.close()
    starting = asyncio.ensure_future(one.ensure())
    await wait_until(lambda: one.pid is not None)
    await pool.close()
    assert one.pid is None
    with pytest.raises(asyncio.CancelledError):
        await starting


async def test_rows_and_snapshots_may_have_integers_of_any_size(world: PythonEnvironment) -> None:
    async with process(world) as one:
        started = await one.do("a", "start", {"n": 10**40})
        assert await ask(one, "a", "whole") == "True"
        assert started.value["snapshot"] == {"n": 10**40}
        await one.do("b", "restore", started.value["snapshot"])
        assert await ask(one, "b", "whole") == "True"


async def test_a_hanging_step_fails_only_its_rollout(world: PythonEnvironment) -> None:
    async with process(world) as one:
        for rollout in "ab":
            await one.do(rollout, "start", {})
        assert await ask(one, "b") == "1"
        one._environment = world.model_copy(update={"timeout_s": 1.0})
        with pytest.raises(ProgramFailed, match="turn took longer than timeout_s = 1"):
            await ask(one, "a", "hang")
        one._environment = world
        assert await ask(one, "b") == "2"


async def test_a_faulty_step_fails_only_its_rollout(world: PythonEnvironment) -> None:
    async with process(world) as one:
        await one.do("b", "start", {})
        faults = {
            "leave": "SystemExit: 3", "large": "the reply has", "unprintable": "Unprintable", "loud": "is not a reply",
        }  # fmt: skip
        for what, why in faults.items():
            await one.do(what, "start", {})
            with pytest.raises(ProgramFailed, match=why) as found:
                await ask(one, what, what)
            assert len(str(found.value)) < WHY_CHARACTERS
        assert await ask(one, "b") == "1"
    assert len(_told("x" * 10_000_000)) == WHY_CHARACTERS


async def test_a_faulty_agent_fails_only_its_rollout(
    agent: AgentEnvironment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with process(agent) as one:
        given = {"url": "http://127.0.0.1:1/v1", "key": "k"}
        hanging = asyncio.ensure_future(one.do("b", "run", {**given, "row": {"do": "hang"}}))
        for what in ("leave", "leave in a task"):
            with pytest.raises(ProgramFailed, match="SystemExit: 3"):
                await one.do(what, "run", {**given, "row": {"do": what}})
        early = asyncio.ensure_future(one.do("c", "run", {**given, "row": {"do": "hang"}}))
        await asyncio.sleep(0)
        await one.stop("c", "it took too long")  # possibly before it has started
        with pytest.raises(ProgramFailed, match=r"stopped|CancelledError"):
            await early
        tried = tmp_path / "tried"
        stubborn = asyncio.ensure_future(one.do("c", "run", {**given, "row": {"do": "stubborn", "begun": str(tried)}}))
        await wait_until(tried.exists)
        await one.stop("c", "it took too long")
        stubborn.cancel()
        assert (await one.do("d", "run", {**given, "row": {"do": "nothing"}})).value == {"score": 1.0}
        assert not hanging.done()
        begun = tmp_path / "begun"
        blocking = asyncio.ensure_future(one.do("e", "run", {**given, "row": {"do": "block", "begun": str(begun)}}))
        await wait_until(begun.exists)
        monkeypatch.setattr("services.environment.programs.process.STOP_LIMIT_S", 1.0)
        await one.stop("e", "run took too long")
        for lost in (hanging, blocking):
            with pytest.raises(ProcessLost, match="killed, since another rollout's run took too long") as found:
                await lost
            assert not found.value.suspected
        with pytest.raises(ProcessLost, match="score: its worker process has ended"):
            await one.do("b", "score")
        await asyncio.gather(one.ensure(), one.ensure())
        assert (await one.do("f", "run", {**given, "row": {"do": "nothing"}})).value == {"score": 1.0}


async def test_agents_that_block_threads_do_not_wait_for_each_other(agent: AgentEnvironment) -> None:
    async with process(agent) as one:
        given = {"url": "http://127.0.0.1:1/v1", "key": "k", "row": {"do": "meet"}}
        done = await asyncio.gather(*(one.do(f"{number}", "run", given) for number in range(MEET)))
        assert [each.value for each in done] == [{"score": 1.0}] * MEET


async def test_calls_in_progress_when_a_process_dies_are_suspected(world: PythonEnvironment) -> None:
    async with process(world) as one:
        for rollout in "abc":
            await one.do(rollout, "start", {})
        waiting = asyncio.ensure_future(ask(one, "b", "wait"))
        with pytest.raises(ProcessLost, match="died") as found:
            await ask(one, "a", "die")
        assert found.value.suspected
        with pytest.raises(ProcessLost) as found:
            await waiting
        assert found.value.suspected
        await one.ensure()
        with pytest.raises(ProcessLost, match="turn: its worker process has ended") as found:
            await ask(one, "c")
        assert not found.value.suspected
        await one.do("d", "start", {})
        assert await call(one, "d", ("stays", {})) == ["true"], "cleaning up after the old process keeps the new one's folder"


async def test_the_calls_of_a_turn_share_limits(world: PythonEnvironment) -> None:
    async with process(world.model_copy(update={"timeout_s": 10.0})) as one:
        await one.do("a", "start", {})
        said = await call(one, "a", ("say", {"text": "x"}), ("nap", {"seconds": 5.2}), ("say", {"text": "x"}))
        assert said[:2] == ["x", "rested"]
        assert said[2].startswith("Error: not called, since earlier calls took too long")
        said = await call(one, "a", *[("large", {})] * 3)
        assert sum(map(len, said[:2])) == TURN_CHARACTERS
        assert said[2].startswith("Error: not called, since earlier calls returned too much")
        said = await call(one, "a", *[("say", {"text": "x"})] * (TURN_CALLS + 1))
        assert said[-2:] == ["x", "Error: not called, since one message may call at most 100 tools"]
        assert await call(one, "a", ("say", {"text": "\ud800"}), ("broken", {})) == ["?", "Error: Unprintable"]
        deep = {"tool_calls": [{"id": "1", "function": {"name": "say", "arguments": "[" * 100_000}}]}
        assert (await one.do("a", "turn", deep)).value["messages"][0]["content"].startswith("Error: arguments")


def test_the_largest_tool_results_of_a_turn_fit_into_a_record() -> None:
    answer = {"role": "tool", "tool_call_id": "0" * 64, "content": "\U0001f642" * (TURN_CHARACTERS // TURN_CALLS)}
    record = reply_of([answer] * TURN_CALLS, None, 0.0)
    assert unpack_records([pack_record(record)]) == [record], "`pack_record` raises for a record that is too large"


async def test_a_command_has_its_own_folder_and_may_print_endlessly() -> None:
    script = (
        "import json, os, sys, subprocess\n"
        "assert os.listdir() == []\nopen('x', 'w')\n"
        "subprocess.Popen(['sleep', '3600'], start_new_session=True)\n"
        "for i in range(200): print('x' * (1 << 20), file=[sys.stdout, sys.stderr][i % 2])\n"
        "row = json.load(open(os.environ['GRPO_ROW_FILE']))\n"
        "while row.get('wait'): pass\n"
        "print(json.dumps({'score': len(row['text'])} | {f'part_{i}': i for i in range(30)}))"
    )
    given = {"url": "http://127.0.0.1:1/v1", "key": "k", "row": {"text": "x" * 200_000}}
    async with process(AgentEnvironment(name="c", kind="agent", run=[sys.executable, "-c", script])) as one:
        for rollout in "ab":
            assert (await one.do(rollout, "run", given)).value["score"] == 200_000
        await wait_until(lambda: len(list(descendants(one.pid or 0))) == 1)  # the first two have left no process behind
        sleeping = asyncio.ensure_future(one.do("c", "run", {**given, "row": {"wait": True}}))
        await wait_until(lambda: len(list(descendants(one.pid or 0))) == 4)
        one.drop("c")
        with pytest.raises(ProgramFailed, match="Cancelled"):
            await sleeping
        await wait_until(lambda: len(list(descendants(one.pid or 0))) == 1)


async def test_a_command_keeps_its_reward_if_its_folder_cannot_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(folder: Path) -> None:
        raise PermissionError(f"Operation not permitted: {folder}/work/of-root")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("services.environment.programs.command.remove", refused)
    given = {"url": "http://127.0.0.1:1/v1", "key": "k", "row": {}}
    assert await run_command([sys.executable, "-c", "print(0.5)"], given) == 0.5
    assert "work/of-root" in caplog.text


def descendants(pid: int) -> Iterator[int]:
    """Yield the descendants of a process."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:  # it has just exited
        return
    for child in children:
        yield int(child)
        yield from descendants(int(child))


def test_a_missing_program_is_named() -> None:
    with pytest.raises(Unusable, match="there is no program 'no-such-agent'"):
        Agent(ProgramSetup("agent", command=["no-such-agent"]))
