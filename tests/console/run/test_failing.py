"""`grpo run` ends with the cause if prompts keep failing, and the next `grpo run` has them generated again."""

from __future__ import annotations

import asyncio
from pathlib import Path

from services.config import load_resolved
from services.store import Store
from tests.support import flow
from tests.support.console import config_file, grpo, launched, log, processes_of, steps, wait_until

WHY = "16 in a row, the last one with: verifier exact: KeyError: 'answer'"


async def store_of(run: Path) -> Store:
    config = load_resolved(run / "config.toml")
    return await Store.connect(config.redis.url, "small", (run / "redis" / "password").read_text().strip())


async def fail_two_prompts(run: Path) -> None:
    """Fail two prompts like generators, and pause the run like dataprep."""
    store = await store_of(run)
    leader = await store.run.lead("leader-0:boot", 60.0)
    assert leader is not None
    team = flow.Team(leader, await store.run.attach_trainer())
    await store.steps.publish(team.trainer, 0)
    await flow.issue(store, team, 2)
    for claim in await flow.claim(store, "generator-0", 2):
        assert await store.tickets.fail("generator-0", claim, WHY, 1)
    await store.run.pause_failing(WHY, "1-0")
    await store.close()


def test_a_run_whose_prompts_fail_ends_and_generates_them_again_when_rerun(tmp_path: Path) -> None:
    file, run = config_file(tmp_path), tmp_path / "small"
    with launched("run", file, "run.steps=1000", FAKE_STEP_S="0.1") as console:
        wait_until(lambda: len(steps(run)) > 1, "the first steps")
        asyncio.run(fail_two_prompts(run))
        _, errors = console.communicate(timeout=60)
    assert console.returncode == 1
    assert f"prompts keep failing: {WHY}; fix the cause and rerun the same command" in errors
    assert processes_of(run) == {}
    done = grpo("run", file, f"run.steps={steps(run)[-1] + 30}", FAKE_STEP_S="0.1")
    assert (done.returncode, done.stderr) == (0, ""), log(run, "dataprep-0")
    assert "2 prompts that failed are generated again" in done.stdout
    assert "it is paused" not in done.stdout
