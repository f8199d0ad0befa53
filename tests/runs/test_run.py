"""Whole runs through `grpo run`: real processes, real Redis, a real trainer; the scripted engine generates the tokens.

The scripted engine's tokens depend only on prompt and seed, so a run with faults must end with exactly the same weights as one
without.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from services.console.commands.__main__ import main
from services.runtime.redis_process import find_server
from services.store import Store
from tests.support.servers.redis_cluster import RedisCluster, redis_cluster
from tests.support.whole_runs import (
    STEPS,
    Hold,
    check_whole,
    finish,
    kill,
    pids_of,
    start,
    summary,
    wait_for,
    weights,
    write_run,
)  # fmt: skip

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_a_run_finishes_with_every_ticket_accounted_for(folder: Path, undisturbed: str) -> None:
    check_whole(folder, "calm")
    for name in ("config.toml", "summary.json", "report.png", "model/config.json"):
        assert (folder / "calm" / name).stat().st_size > 0


def test_a_checkpoint_is_exported_without_a_server(
    folder: Path, undisturbed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = folder / "calm", tmp_path / "out"
    assert main(["export", str(run), str(out)]) == 0
    assert capsys.readouterr().out == f"checkpoint of step {STEPS - 1} written to {out}\n"
    assert hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest() == undisturbed
    assert main(["export", str(run), str(tmp_path), "--step", str(STEPS - 1)]) == 1
    assert "exists and is not an earlier export" in capsys.readouterr().err
    assert main(["export", str(run), str(run / "model")]) == 2
    assert "where the run itself writes its export" in capsys.readouterr().err
    assert main(["export", str(run), str(out), "--step", "99"]) == 1
    assert "the checkpoint of step 99" in capsys.readouterr().err
    assert hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest() == undisturbed


def test_killing_any_kind_of_pod_in_mid_run_changes_nothing(folder: Path, undisturbed: str) -> None:
    hold = Hold(folder, "killed")
    process = start(write_run(folder, "killed", hold.option))
    for step, pod in ((1, "dataprep-0"), (2, "generator-0"), (3, "trainer-0")):
        hold.reach(step, process)
        kill(folder, "killed", pod, process)
    hold.release()
    finish(process)
    check_whole(folder, "killed")
    restarts = summary(folder, "killed")["restarts"]
    assert [restarts[name] for name in ("dataprep-0", "generator-0", "generator-1", "trainer")] == [1, 1, 0, 1]  # type: ignore[index]
    assert weights(folder, "killed") == undisturbed


def test_payload_shards_on_a_cluster_change_nothing(folder: Path, undisturbed: str) -> None:
    """Services have their own Redis users. One of each kind is killed, then the master of some shards, which has a replica."""
    (folder / "cluster").mkdir()
    with redis_cluster(folder / "cluster", find_server(), "spread", replicated=1) as cluster:
        users, hold = folder / "cluster" / "users", Hold(folder, "spread")
        path = write_run(folder, "spread", hold.option, f'redis.password_file="{users}"')
        process = start(path, "--redis-url", f"redis://:{cluster.password}@127.0.0.1:{cluster.third.port}/0")
        masters = (cluster.owner, cluster.other, cluster.third)
        used: set[int] = set()

        def all_used() -> bool:
            """Check for payloads repeatedly: between a checkpoint and the next groups there may be none."""
            used.update(
                node.port
                for node in masters
                if any(b":payload:" in key and b"/" in key for key in cluster.call(node, "KEYS", "*"))
            )
            return len(used) == len(masters)

        for step, pod in ((1, "dataprep-0"), (2, "generator-0"), (3, "trainer-0")):
            hold.reach(step, process)
            all_used()
            kill(folder, "spread", pod, process)
        hold.reach(5, process)
        wait_for(all_used, process)
        cluster.other.kill()
        cluster.take_over(cluster.replica)
        hold.release()
        finish(process)
        check_whole(folder, "spread")
        assert weights(folder, "spread") == undisturbed
        asyncio.run(check_shards(cluster))


async def check_shards(cluster: RedisCluster) -> None:
    """Check that the shards hold exactly the payloads in the index, and that deleting the run deletes every key."""
    store = await Store.connect(cluster.url(cluster.third), "spread", cluster.login())
    await store.run.state()
    nodes = (cluster.owner, cluster.replica, cluster.third)
    held = sum(b"/" in key and b":payload:" in key for node in nodes for key in cluster.call(node, "KEYS", "*"))
    assert held < 8 * STEPS, "dataprep has swept some payloads covered by checkpoints"
    await store.payloads.sweep()
    keys = [key.decode() for node in nodes for key in cluster.call(node, "KEYS", "*:payload:*")]
    names = [key.partition(":payload:")[2] for key in keys]
    assert set(Counter(names).values()) <= {2}, "each must be in the index and in a shard"
    await store.restores.delete_run()
    await store.close()
    assert [cluster.call(node, "KEYS", "*") for node in nodes] == [[], [], []]


def interrupt(process: subprocess.Popen[str], folder: Path, name: str, hold: Hold, steps: int) -> str:
    """Send Ctrl-C once this many steps are trained, and return the output."""
    hold.reach(steps, process)
    process.send_signal(signal.SIGINT)
    hold.release()  # generators finish what they sample
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert not pids_of(folder, name, "trainer-0")
    return output


def test_ctrl_c_and_a_lost_redis_are_resumed_by_the_same_command(folder: Path, undisturbed: str) -> None:
    hold = Hold(folder, "interrupted")
    path = write_run(folder, "interrupted", hold.option)
    interrupt(start(path), folder, "interrupted", hold, 2)
    output = interrupt(start(path), folder, "interrupted", hold, 4)
    assert "resumed from checkpoint" in output
    shutil.rmtree(folder / "interrupted" / "redis")
    output = finish(start(path))
    assert "restored from checkpoint" in output
    check_whole(folder, "interrupted")
    assert weights(folder, "interrupted") == undisturbed


def test_a_run_is_restored_while_running_and_after_its_end(folder: Path, undisturbed: str) -> None:
    hold = Hold(folder, "back")
    path = write_run(folder, "back", "checkpoint.keep=9", "checkpoint.save_replay_buffer=true", hold.option)
    process = start(path)
    hold.reach(3, process)
    command = [sys.executable, "-m", "services.console.commands", "restore", "1", str(folder / "back"), "--wait"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, "run back: restored to step 1\n"), done.stderr
    hold.release()
    output = finish(process)
    assert "restored from checkpoint 1: step 1 was requested" in output
    assert "\n! dataprep" not in output, "a requested restore is no warning"
    check_whole(folder, "back")
    assert weights(folder, "back") == undisturbed
    output = finish(start(path, "--resume", "5"))
    assert "restored from checkpoint 5: step 5 was requested" in output
    check_whole(folder, "back")
    assert weights(folder, "back") == undisturbed
    assert "has already finished" in finish(start(path, "--resume", "latest"))
