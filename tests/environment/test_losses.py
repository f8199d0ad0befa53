"""What a rollout loses, and what it keeps, with a lost worker process or lease, damaged records or a long conversation."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from structlog.testing import capture_logs

from services.console.run.redis_server import RedisServer
from services.environment import group
from services.environment.agent import run_agent
from services.environment.door.turns import ContextFull, Overrides
from services.environment.endpoints import Door
from services.environment.programs.frames import StepDone
from services.environment.programs.process import ProcessLost, ProgramFailed
from services.environment.recording.recorder import Recorder
from services.environment.rollout import LeaseLost
from services.protocol import codec
from services.protocol.errors import RedisUnreachable
from services.protocol.payloads import Turn
from tests.environment.support.rollouts import ScriptedRollout, ScriptedRollouts, served
from tests.environment.support.templates import FAMILIES, chat_of
from tests.environment.test_pod import N, environment, fleet, groups, issue, overrides
from tests.environment.test_restore import Policy, rollout
from tests.support.harness import buried, wait_until
from tests.support.lazily import Lazily

openai = Lazily("openai")

PROMPT = [{"role": "user", "content": "say 0"}]


def worker_of(guard: int) -> int:
    """Return the process that a guard watches."""
    return int(Path(f"/proc/{guard}/task/{guard}/children").read_text().split()[0])


async def test_rollouts_lose_no_turn_if_another_kills_their_process(tmp_path: Path, server: RedisServer) -> None:
    log = tmp_path / "log"
    given = overrides(tmp_path, "python", "Echo", options={"turns": 6, "log": str(log)})
    given += [f"sampling.group_size={N}", "fleet.ttl_s=4"]
    async with fleet(tmp_path, server, *given) as (service, engine), environment(service.config) as pod:
        engine._token_s = 0.01
        [process] = pod.pools["world"].processes
        await issue(service.store, 0)
        ended: set[int | None] = set()  # a killed process may appear alive for a while
        for turns in range(1, 5):
            await wait_until(lambda turns=turns: log.exists() and log.read_text().count(f"turn {turns}\n") >= N)
            await wait_until(lambda: process.alive and process.pid not in ended)
            assert process.pid is not None
            ended.add(process.pid)
            os.kill(worker_of(process.pid), signal.SIGKILL)
        [(header, _)] = await groups(service.store, 1)
        assert (header.rewards, header.turns) == ([1.0] * N, [6] * N)
        assert log.read_text().count("start 0") == N
        assert await buried(service.store) == []


async def test_turns_wait_while_redis_is_full(tmp_path: Path, server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "COMMIT_AGAIN_S", 0.05)
    log = tmp_path / "log"
    given = overrides(tmp_path, "python", "Echo", options={"turns": 6, "log": str(log)})
    async with fleet(tmp_path, server, *given, f"sampling.group_size={N}") as (service, engine):
        engine._token_s = 0.01
        store = service.store
        with capture_logs() as logs:
            async with environment(service.config) as pod:
                await issue(store, 0)
                await wait_until(lambda: log.exists() and log.read_text().count("turn 2") >= N)
                await store.client.config_set("maxmemory", 1)
                try:
                    await wait_until(lambda: sum("a turn waits" in each["event"] for each in logs) == N)
                    await asyncio.sleep(0.3)  # time for several attempts, each of which is rejected
                    assert len(pod.loop.tickets.held) == 1
                finally:
                    await store.client.config_set("maxmemory", 0)
                [(header, _)] = await groups(store, 1)
        assert (header.rewards, header.turns) == ([1.0] * N, [6] * N)
        assert log.read_text().count("start 0") == N
        assert sum("a turn waits" in each["event"] for each in logs) == N, "told once"
        failed = pod.service.registry.get_sample_value("grpo_environment_failures_total", {"reason": "store"})
        assert failed == 0


@pytest.mark.parametrize("damage", ["base", "messages", "reply", "bytes"])
async def test_a_rollout_with_damaged_turns_restarts(damage: str, tmp_path: Path, server: RedisServer) -> None:
    log = tmp_path / "log"
    given = overrides(tmp_path, "python", "Echo", options={"turns": 6, "log": str(log)})
    async with fleet(tmp_path, server, *given, f"sampling.group_size={N}") as (service, engine):
        engine._token_s = 0.01
        store = service.store
        async with environment(service.config):
            await issue(store, 0)
            await wait_until(lambda: log.exists() and log.read_text().count("turn 2") >= N)
        turns = store.keys.turns("0-0")
        turn = codec.decode((await store.client.hget(turns, "0:1") or b"")[1:], Turn)
        damaged = {
            "base": lambda: b"T" + codec.encode(msgspec.structs.replace(turn, base=9)),
            "messages": lambda: b"T" + codec.encode(msgspec.structs.replace(turn, messages="{")),
            "reply": lambda: b"T" + codec.encode(msgspec.structs.replace(turn, reply="[]")),
            "bytes": lambda: b"Tx",
        }[damage]()
        await store.client.hset(turns, "0:1", damaged)
        async with environment(service.config, "environment-1"):
            [(header, _)] = await groups(store, 1)
        assert (header.rewards, header.turns) == ([1.0] * N, [6] * N)
        assert log.read_text().count("start 0") == N + 1


async def test_a_reply_that_is_nested_too_deeply_fails_its_rollout_alone(
    tmp_path: Path, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, raised = Recorder.record, list[str]()

    def deep(*given: Any, **named: Any) -> dict[str, Any]:
        """Raise as for the arguments of a tool that can just be parsed, but not be written again."""
        if not raised:
            raised.append("once")
            raise RecursionError("maximum recursion depth exceeded while encoding a JSON object")
        return record(*given, **named)

    monkeypatch.setattr(Recorder, "record", deep)
    given = overrides(tmp_path, "python", "Echo", options={"turns": 2, "log": str(tmp_path / "log")})
    given.append(f"sampling.group_size={N}")
    async with fleet(tmp_path, server, *given) as (service, _), environment(service.config):
        await issue(service.store, 0)
        [(header, _)] = await groups(service.store, 1)
        assert header.rewards == [1.0] * N
        assert await buried(service.store) == []
    assert (tmp_path / "log").read_text().count("start 0") == N + 1


class Program:
    """A fake worker process with a scripted answer."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.stopped: list[str] = []

    async def stop(self, rollout: str, why: str) -> None:
        """Record the reason."""
        self.stopped.append(why)

    async def do(self, rollout: str, what: str, given: Any) -> StepDone:
        """Return the scripted answer."""
        return await self.answer()

    def drop(self, rollout: str) -> None:
        """Do nothing."""


async def test_a_truncated_rollout_with_a_lost_process_has_no_reward() -> None:
    live, _ = rollout(Policy(chat_of(FAMILIES[0])), [], 1)
    await live.complete(PROMPT, [])
    live.truncated = True

    async def lost() -> StepDone:
        raise ProcessLost("its worker process died", suspected=True)

    async def failed() -> StepDone:
        raise ProgramFailed("run: APIStatusError: the rollout has had 1 turns")

    with pytest.raises(ProcessLost):
        await run_agent(live, cast(Any, Program(lost)), Door("m"), 60.0)
    assert (await run_agent(live, cast(Any, Program(failed)), Door("m"), 60.0)).scores is None


@pytest.mark.parametrize(("limit", "truncated"), [(None, True), (100, True), (5, False)])
async def test_an_agents_reply_that_reaches_the_runs_limit_counts_as_truncated(limit: int | None, truncated: bool) -> None:
    """A lower limit is the agent's own: it expects such replies."""
    policy = Policy(chat_of(FAMILIES[0]), cut=0, said=("word " * 50,))
    live, _ = rollout(policy, [], 9)
    reply = await live.complete(PROMPT, [], Overrides(max_tokens=limit))
    assert len(reply.generated.tokens) == min(limit or 16, 16)

    async def failed() -> StepDone:
        raise ProgramFailed("run: JSONDecodeError: the reply ends early")

    running = run_agent(live, cast(Any, Program(failed)), Door("m"), 60.0)
    if truncated:
        done = await running
        assert (done.truncated, done.scores) == (True, None)
    else:
        with pytest.raises(ProgramFailed):
            await running


async def test_an_agent_that_takes_too_long_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.environment.agent.WATCH_S", 0.02)
    live, _ = rollout(Policy(chat_of(FAMILIES[0])), [], 9)
    program = Program(asyncio.Event().wait)
    with pytest.raises(ProgramFailed, match=r"longer than timeout_s = 0\.1, without the policy's turns"):
        await run_agent(live, cast(Any, program), Door("m"), 0.1)
    assert len(program.stopped) == 1
    live.lost = LeaseLost()
    with pytest.raises(LeaseLost):
        await run_agent(live, cast(Any, Program(asyncio.Event().wait)), Door("m"), 60.0)


async def test_nothing_is_sampled_for_an_ended_agent() -> None:
    live, _ = rollout(Policy(chat_of(FAMILIES[0])), [], 9)
    await live.complete(PROMPT, [])
    never = asyncio.Event()

    async def gone() -> bool:
        return False

    async def ends() -> StepDone:
        return StepDone(0, {"score": 1.0})

    asked = live.asked.begin(b"", 0, gone, cast(Any, never.wait()), {})
    assert (await run_agent(live, cast(Any, Program(ends)), Door("m"), 60.0)).scores == {"score": 1.0}
    assert asked.turn.cancelled()


def test_an_oversized_conversation_is_rejected_before_tokenising(monkeypatch: pytest.MonkeyPatch) -> None:
    chat = chat_of(FAMILIES[0])
    live, _ = rollout(Policy(chat), [], 9)
    monkeypatch.setattr(chat, "_encoded", lambda *_: pytest.fail("it was tokenised"))
    with pytest.raises(ContextFull, match="characters, which are more than 4096 tokens"):
        asyncio.run(live.complete([{"role": "user", "content": "x" * 10_000_000}], []))
    assert live.truncated


@pytest.mark.parametrize("error", [LeaseLost(), RedisUnreachable("no answer from redis.internal")])
def test_an_uncommitted_turn_gets_an_error_that_is_not_retried(error: Exception) -> None:
    given = ScriptedRollout(FAMILIES[0], "1")
    asked: list[int] = []

    async def complete(*_: Any) -> Any:
        asked.append(1)
        raise error

    given.complete = complete
    with served(ScriptedRollouts({"k": given})) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="k") as client:
        with pytest.raises(openai.InternalServerError) as caught:
            client.chat.completions.create(model="any", messages=[{"role": "user", "content": "hello"}])
        assert (caught.value.status_code, len(asked)) == (503, 1)
        assert json.loads(caught.value.response.content)["error"]["code"] == "rollout_lost"
        assert "redis.internal" not in caught.value.response.text
