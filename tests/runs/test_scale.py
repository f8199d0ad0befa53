"""Scaling a run up and down while it trains: real processes and a real trainer; the scripted engine generates the tokens."""

from __future__ import annotations

import asyncio
import getpass
import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from services.console.commands.__main__ import main
from services.console.commands.attach import attach
from services.protocol.messages import PodStatus
from tests.support.harness import save_model_folder
from tests.support.whole_runs import check_whole, finish, start, steps_done, summary, wait_for, weights, write_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
STEPS = 44
DEADLINE_S = 20.0  # sync.deadline_s: members that start during a round respond slowly on a loaded machine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scale")
    save_model_folder(folder / "model")
    return folder


def look(run: Path, opened: dict[str, int]) -> dict[str, PodStatus]:
    """Return generators by name. For each newly loaded process, record in `opened` the version of the latest round."""

    async def ask() -> dict[str, PodStatus]:
        async with attach(str(run)) as attached:
            pods = await attached.store.fleet.members(attached.ttl_s)
            last, _ = await attached.store.fleet.round()  # read after the pods: a later round includes those seen here
        for pod in pods:
            if pod.kind == "generator" and pod.world:
                opened.setdefault(pod.member, last.version if last else -1)
        return {pod.name: pod for pod in pods if pod.kind == "generator"}

    return asyncio.run(ask())


def logged(run: Path, event: str) -> list[dict[str, Any]]:
    """Return the log lines of the generators' processes with an event, ordered by name and time."""
    logs = (path.read_text() for path in sorted((run / "logs").glob("generator-*.log")))
    lines = (line for text in logs for line in text[: text.rfind("\n") + 1].splitlines())  # the last one may be incomplete
    return [json.loads(line) for line in lines if f'"{event}"' in line]


def test_scaling_up_and_down_ends_in_the_same_weights(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = (f"run.steps={STEPS}", "generator.count=1", "generator.drain_s=0.5", f"sync.deadline_s={DEADLINE_S}")
    run, opened = folder / "scaled", dict[str, int]()
    process = start(write_run(folder, "scaled", *common, "generator.engine_options.token_s=0.1"))

    def ready(count: int) -> bool:
        there = look(run, opened)
        return len(there) == count and all(pod.phase == "ready" for pod in there.values())

    wait_for(lambda: steps_done(folder, "scaled") >= 1, process)
    for count, joined in ((4, 4), (2, 4), (3, 5)):
        assert main(["scale", "generators", str(count), str(run), "--why", "a test"]) == 0
        assert f"desired generators set to {count}" in capsys.readouterr().out
        wait_for(lambda count=count: ready(count), process)
        wait_for(lambda joined=joined: len(logged(run, "first group submitted")) == joined, process)
        wait_for(lambda count=count: sorted(look(run, opened)) == [f"generator-{i}" for i in range(count)], process)
    assert main(["status", str(run)]) == 0
    assert f"generators: 3 running, 3 desired ({getpass.getuser()}: a test)" in capsys.readouterr().out
    output = finish(process)
    finish(start(write_run(folder, "calm", *common, "generator.engine_options.token_s=0.0")))

    assert weights(folder, "scaled") == weights(folder, "calm")
    check_whole(folder, "scaled", STEPS)
    restarts = summary(folder, "scaled")["restarts"]
    assert set(restarts.values()) == {0}, "a drain does not count as a crash"  # type: ignore[attr-defined]
    assert re.findall(r"- (generator-\d) drained and exited", output) in (
        ["generator-2", "generator-3"],
        ["generator-3", "generator-2"],
    )
    times = [json.loads(line)["time_s"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps_s = sorted(later - earlier for earlier, later in pairwise(times))
    assert steps_s[-1] < steps_s[len(steps_s) // 2] + DEADLINE_S, "a step waited for more than a round's deadline"
    synced = logged(run, "synced")
    assert len(synced) == len(opened) == 5
    for line in synced:
        assert line["version"] - opened[line["member"]] <= 1, (
            f"{line['member']} was left out of a round opened after it had loaded"
        )
    joined_s = [line["since_ready_s"] for line in logged(run, "first group submitted")]
    print(f"step seconds {steps_s}, joiners' first groups after {joined_s} s")
