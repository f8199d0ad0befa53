"""A whole run with evaluation rounds through `grpo run`: real processes, real sync rounds, a generator killed in a round."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from services.config import load_resolved, to_toml
from services.protocol import codec
from services.store import Store
from tests.support.harness import save_model_folder, small_config, wait_until
from tests.support.models.held_loss import HELD, STUCK_S
from tests.support.whole_runs import Hold, check_whole, finish, kill, start, steps_done, summary, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
EVERY, STEPS, PROMPTS = 4, 8, 12
TTL_S = 60.0


def write_run(folder: Path, name: str, *overrides: str) -> Path:
    held_out = folder / "held_out.jsonl"
    held_out.write_text("".join(json.dumps({"prompt": f"say {i}", "answer": str(i)}) + "\n" for i in range(PROMPTS)))
    config = small_config(
        folder, None, f"run.name={name}", f"run.steps={STEPS}", "generator.count=3", "checkpoint.every_steps=2", "run.seed=3",
        'api.token_file=""', 'redis.password_file=""', "generator.engine_options.token_s=0.03", "optimizer.learning_rate=1e-3",
        "sync.deadline_s=10", f"evaluation.every_steps={EVERY}", "evaluation.samples=2",
        f"evaluation.sources=[{{kind='jsonl', name='held_out', path='{held_out}'}}]",
        "evaluation.max_generators=2", *overrides,
    )  # fmt: skip
    path = folder / f"{name}.toml"
    path.write_text(to_toml(config))
    return path


def reported(folder: Path, name: str) -> list[int]:
    path = folder / name / "evaluations.jsonl"
    return [json.loads(line)["eval/version"] for line in path.read_text().splitlines()] if path.exists() else []


@asynccontextmanager
async def administrator(run: Path) -> AsyncIterator[Store]:
    """Return the run's store, logged in with full permissions."""
    config = load_resolved(run / "config.toml")
    store = await Store.connect(config.redis.url, config.run.name, (run / "redis" / "password").read_text().strip())
    try:
        yield store
    finally:
        await store.close()


async def damage(run: Path) -> None:
    """Pause the trainer permanently, and damage three payloads of the last prepared step, each in a different way."""
    async with administrator(run) as store:
        await store.run.pause("trainer", "its data are damaged")

        async def prepared() -> bool:
            state = await store.run.state()
            ahead = state.prepared_step - state.committed_step if state else 0
            # The rows of the first prepared step may already have been fetched.
            return ahead == 2 and any(pod.paused for pod in await store.fleet.members(TTL_S))

        await wait_until(prepared, 60)
        state = await store.run.state()
        assert state is not None
        plan = await store.steps.rank_plan(state.prepared_step, 0)
        gone, flipped, other = sorted({store.keys.payload(sample.payload) for row in plan.rows for sample in row})[:3]
        await store.client.delete(gone)
        await store.client.setbit(flipped, 77, 1 - await store.client.getbit(flipped, 77))
        await store.client.set(other, codec.seal(codec.encode([1, "nothing of the kind"])))


async def hang(run: Path, held: Path) -> None:
    """Resume the trainer. While its first step hangs, liveness fails within the loop's limit, for that loop only."""
    close = {"Connection": "close"}  # otherwise a server may close an idle connection as it is reused
    async with administrator(run) as store, httpx.AsyncClient(timeout=60, headers=close) as http:
        urls = {pod.name: f"{pod.url}/health/live" for pod in await store.fleet.members(TTL_S)}

        async def status(pod: str, expected: int) -> bool:
            return (await http.get(urls[pod])).status_code == expected

        await asyncio.to_thread(held.touch)
        await store.run.resume("trainer")
        try:
            await wait_until(lambda: status("trainer-0", 503), 60)
            loops = (await http.get(urls["trainer-0"])).json()["loops"]
            others = [(await http.get(urls[pod])).status_code for pod in urls if pod != "trainer-0"]
        finally:
            await asyncio.to_thread(held.unlink)
        assert [name for name, health in loops.items() if not health["alive"]] == ["train"]
        assert STUCK_S == loops["train"]["limit_s"] < loops["train"]["silent_s"]
        assert others == [200] * len(others)
        assert len(others) >= 4
        await wait_until(lambda: status("trainer-0", 200), 60)


def test_evaluation_survives_damaged_payloads_and_a_hanging_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model_folder(tmp_path / "model")
    held, run = tmp_path / "held", tmp_path / "evaluated"
    monkeypatch.setenv(HELD, str(held))
    options = (
        'loss.policy="tests.support.models.held_loss:dapo"',
        "generator.engine_options.token_s=0.1",
    )
    process = start(write_run(tmp_path, "evaluated", *options))
    wait_for(lambda: steps_done(tmp_path, "evaluated") >= 2, process)
    asyncio.run(damage(run))
    asyncio.run(hang(run, held))
    output = finish(process)
    check_whole(tmp_path, "evaluated")
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert sum(record.get("damaged/train/groups", 0) for record in records) == 3
    assert summary(tmp_path, "evaluated")["restarts"]["trainer"] == 0  # type: ignore[index]
    assert summary(tmp_path, "evaluated")["audit"]["outcomes"]["failed"] == 3  # type: ignore[index]
    rounds = reported(tmp_path, "evaluated")
    assert rounds in ([0, EVERY, STEPS], [EVERY, STEPS]), "version 0 may pass before a second generator is ready to train"
    facts = summary(tmp_path, "evaluated")
    assert facts["evaluations"] == len(rounds)
    last: dict[str, float] = facts["evaluation_last"]  # type: ignore[assignment]
    assert (last["eval/version"], last["eval/held_out/prompts"]) == (STEPS, PROMPTS)
    assert f"evaluation of version {STEPS}: held_out pass@1" in output


def test_a_generator_killed_in_a_round_costs_no_step(tmp_path: Path) -> None:
    save_model_folder(tmp_path / "model")
    hold = Hold(tmp_path, "killed")
    process = start(write_run(tmp_path, "killed", hold.option))

    def evaluates() -> list[str]:
        logs = tmp_path / "killed" / "logs"
        return [path.stem for path in logs.glob("generator-*.log") if '"evaluating"' in path.read_text()]

    wait_for(lambda: bool(evaluates()), process)
    kill(tmp_path, "killed", evaluates()[0], process)
    hold.release()
    finish(process)
    check_whole(tmp_path, "killed")
    assert {STEPS} <= set(reported(tmp_path, "killed")) <= {0, EVERY, STEPS}, "a version may pass while the dead pod still counts"
