"""The pool with workers that hang, die and are killed. All processes are real."""

from __future__ import annotations

import asyncio
import errno
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from services.config.data import FileSource, ReasoningGymSource, Source
from services.config.verifiers import VerifierConfig, named
from services.confined import scratch
from services.protocol.entries import encode_entry
from services.verifiers.base import Job, Setup, VerifierFailure
from services.verifiers.pool import Freedoms, ScoringWorker, VerifierPool
from tests.support.console import lives
from tests.support.verifiers import scored, verifier

SOURCE = FileSource(kind="jsonl", path="prompts.jsonl")
# 40 letters before the mismatch: a backtracking engine needs 2^40 steps for this pattern.
CATASTROPHE = verifier("regex", pattern=r"^(a+)+$", timeout_s=1.0)
HOSTILE = "a" * 40 + "!"


@asynccontextmanager
async def running(
    *verifiers: VerifierConfig, workers: int = 1, sources: Sequence[Source] = (SOURCE,)
) -> AsyncIterator[VerifierPool]:
    pool = VerifierPool(named(verifiers), workers, sources)
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()


async def until(true: Callable[[], bool], limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < deadline, "the condition was not met"
        await asyncio.sleep(0.01)


async def test_a_worker_lost_on_a_full_disk_is_replaced_once_there_is_space(monkeypatch: pytest.MonkeyPatch):
    def full(**_: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    async with running(verifier("exact"), workers=1) as pool:
        with monkeypatch.context() as disk:
            disk.setattr(scratch.tempfile, "mkdtemp", full)
            os.kill(pool.pids[0], signal.SIGKILL)
            for _ in range(2):
                with pytest.raises(VerifierFailure, match=r"the worker died|cannot be started: .*No space left on device"):
                    await scored(pool, ["blue"], "blue", "main")
            await until(lambda: pool.counts.restarts >= 2)
        assert await scored(pool, ["blue"], "blue", "main") == {"exact": [1.0]}


async def test_a_pool_started_twice_gives_each_worker_one_group_at_a_time():
    async with running(verifier("exact"), workers=2) as pool:
        await pool.start()
        given = [str(number % 2) for number in range(12)]
        found = await asyncio.gather(*(scored(pool, [each], "1", "main") for each in given))
        assert found == [{"exact": [float(each)]} for each in given]


async def test_an_exchange_that_fails_in_any_way_leaves_no_answer_behind():
    async with running(verifier("exact"), workers=1) as pool:
        (worker,) = pool._workers
        jobs = [Job("main", [text], "1") for text in ("1", "0")]
        both = await asyncio.gather(*map(worker.score, jobs), return_exceptions=True)
        assert any(isinstance(one, Exception) for one in both), "two groups at a time"
        assert await scored(pool, ["1"], "1", "main") == {"exact": [1.0]}


async def test_a_group_gets_the_scores_of_all_verifiers():
    verifiers = [
        verifier("exact"),
        verifier("regex", pattern="{answer}"),
        verifier("regex", pattern="^blue"),
    ]
    async with running(*verifiers, workers=2) as pool:
        assert await scored(pool, ["blue", "dark blue", "red"], "blue", "main") == {
            "exact": [1.0, 0.0, 0.0],
            "regex": [1.0, 1.0, 0.0],
            "regex-2": [1.0, 0.0, 0.0],
        }
        groups = [scored(pool, [f"{i}", f"{i + 1}", "😀"], f"{i}", "main") for i in range(200)]
        assert all(scores["exact"] == [1.0, 0.0, 0.0] for scores in await asyncio.gather(*groups))
        assert pool.counts.groups == 201
        assert pool.counts.failures == 0


async def test_a_sources_own_verifiers_score_only_its_groups():
    from reasoning_gym.factory import create_dataset

    tasks = [
        ReasoningGymSource(kind="reasoning_gym", name=name, task=name, options={"size": 2, "seed": 7})
        for name in ("basic_arithmetic", "gcd")
    ]
    verifiers = [
        verifier("exact", sources=["main", "french"]),
        verifier("reasoning_gym", sources=["basic_arithmetic", "gcd"]),
        verifier("exact", sources=["french"], extract="«(.*)»"),
        verifier("regex", pattern="!"),
    ]
    french = FileSource(kind="jsonl", name="french", path="x")
    async with running(*verifiers, sources=[SOURCE, french, *tasks]) as pool:
        assert await scored(pool, ["a!"], "a!", "main") == {"exact": [1.0], "regex": [1.0]}
        assert await scored(pool, ["«b»", "b"], "b", "french") == {
            "exact": [0.0, 1.0],
            "exact-2": [1.0, 0.0],
            "regex": [0.0, 0.0],
        }
        for task in tasks:
            entry = create_dataset(task.task, size=2, seed=7)[1]
            scores = await scored(pool, [entry["answer"], "no"], encode_entry(entry), task.name)
            assert scores == {"reasoning_gym": [1.0, 0.0], "regex": [0.0, 0.0]}


async def test_text_with_surrogates_is_scored():
    async with running(verifier("exact")) as pool:
        assert await scored(pool, ["\ud800", "ok"], "ok", "main") == {"exact": [0.0, 1.0]}


async def test_a_group_cancelled_while_its_worker_starts_costs_no_other():
    async with running(verifier("exact")) as pool:
        (first,) = pool.pids
        os.kill(first, signal.SIGKILL)  # an idle worker, as the kernel does when memory is short
        await until(lambda: not lives(first))
        cut_off = asyncio.create_task(scored(pool, ["a"], "a", "main"))
        await until(lambda: pool.pids not in ([], [first]))
        cut_off.cancel()
        await asyncio.gather(cut_off, return_exceptions=True)
        assert await scored(pool, ["b"], "b", "main") == {"exact": [1.0]}


async def test_a_call_past_its_limit_fails_and_replaces_the_worker():
    async with running(verifier("exact"), CATASTROPHE) as pool:
        (first,) = pool.pids
        started = time.monotonic()
        with pytest.raises(VerifierFailure, match=r"'regex', timeout_s = 1: a call exceeded its time limit"):
            await scored(pool, ["aaa", HOSTILE], "aaa", "main")
        assert time.monotonic() - started < 30
        assert await scored(pool, ["aaa"], "aaa", "main") == {"exact": [1.0], "regex": [1.0]}
        assert pool.pids != [first]
        assert not lives(first)
        assert pool.counts.failures == 1
        assert pool.counts.restarts == 1


async def test_the_limit_is_per_completion_not_per_group():
    # 2^18 steps take some 10 to 20 ms; 300 of them take longer than one call may.
    async with running(CATASTROPHE) as pool:
        started = time.monotonic()
        assert await scored(pool, ["a" * 18 + "!"] * 300, "", "main") == {"regex": [0.0] * 300}
        assert time.monotonic() - started > CATASTROPHE.timeout_s


async def test_hostile_groups_do_not_starve_the_others():
    async with running(verifier("exact"), CATASTROPHE, workers=2) as pool:
        groups = [scored(pool, [HOSTILE if i % 5 == 0 else "aa"], "aa", "main") for i in range(15)]
        results = await asyncio.gather(*groups, return_exceptions=True)
        assert [isinstance(result, VerifierFailure) for result in results] == [i % 5 == 0 for i in range(15)]


@pytest.mark.parametrize(
    "completion",
    [
        r"\boxed{9^{9^{9^{9^{9}}}}}",
        r"\boxed{" + "(" * 450 + "1" + ")" * 450 + "}",
        r"\boxed{\int_0^{10^{10^{10}}} x^{x^x} dx}",
        r"\boxed{100000000!}",
        "9" * 200_000,
        "\\frac{" * 20_000,
        "$" * 50_000 + "1" + "," * 50_000,
        "-" * 300_000,
    ],
)
async def test_hostile_mathematics_terminates(completion: str):
    async with running(verifier("math", timeout_s=2.0)) as pool:  # long enough for a new worker's imports
        for gold in ("72", r"\frac{\sqrt{2}}{2}"):
            (outcome,) = await asyncio.gather(scored(pool, [completion], gold, "main"), return_exceptions=True)
            assert outcome == {"math": [0.0]} or (isinstance(outcome, VerifierFailure) and "time limit" in outcome.reason)
        assert await scored(pool, [r"\boxed{72}"], "72", "main") == {"math": [1.0]}


async def test_a_killed_worker_is_a_failure_and_is_replaced():
    async with running(verifier("regex", pattern=r"^(a+)+$", timeout_s=60.0)) as pool:
        group = asyncio.create_task(scored(pool, [HOSTILE], "", "main"))
        await until(pool._idle.empty)  # the worker has the group
        os.kill(pool.pids[0], signal.SIGKILL)
        with pytest.raises(VerifierFailure, match="the worker died, SIGKILL"):
            await group
        assert await scored(pool, ["aa"], "", "main") == {"regex": [1.0]}


async def test_a_worker_killed_while_idle_fails_no_group():
    async with running(verifier("exact")) as pool:
        (pid,) = pool.pids
        os.kill(pid, signal.SIGKILL)
        await until(lambda: not lives(pid))
        assert await scored(pool, ["a"], "a", "main") == {"exact": [1.0]}
        assert pool.counts.restarts == 1


async def test_pending_calls_fail_when_the_pool_closes():
    pool = VerifierPool(named([verifier("regex", pattern=r"^(a+)+$", timeout_s=60.0)]), 1, [SOURCE])
    await pool.start()
    under_way = asyncio.create_task(scored(pool, [HOSTILE], "", "main"))
    await until(pool._idle.empty)
    waiting = [asyncio.create_task(scored(pool, ["aa"], "", "main")) for _ in range(3)]
    await asyncio.sleep(0)
    await pool.close()
    for call in (under_way, *waiting):
        with pytest.raises(VerifierFailure, match=r"killed|the verifiers have been closed"):
            await asyncio.wait_for(call, 60)
    await asyncio.gather(*pool._replacing)
    assert pool.pids == []
    await pool.start()
    assert await scored(pool, ["aa"], "", "main") == {"regex": [1.0]}
    await pool.close()


async def test_a_stopped_worker_is_killed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("services.verifiers.pool.GRACE_S", 1.0)
    async with running(verifier("exact", timeout_s=1.0)) as pool:
        (pid,) = pool.pids
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(VerifierFailure, match="did not answer and was killed"):
            await scored(pool, ["a"], "a", "main")
        assert not lives(pid)
        assert await scored(pool, ["a"], "a", "main") == {"exact": [1.0]}


async def test_a_verifier_that_raises_keeps_its_worker():
    async with running(verifier("math")) as pool:
        pids = pool.pids
        with pytest.raises(VerifierFailure, match="verifier 'math' failed: ValueError: gold answer ''"):
            await scored(pool, ["72"], "", "main")
        assert await scored(pool, [r"\boxed{72}"], "72", "main") == {"math": [1.0]}
        assert pool.pids == pids


async def test_a_worker_is_reaped_although_its_end_is_cancelled():
    async with running(verifier("exact")) as pool:
        (worker,) = pool._workers
        process, folder = worker._process, worker._scratch
        assert process is not None
        assert folder is not None
        ending = worker.kill()
        ending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await ending
        await until(lambda: process.returncode == -signal.SIGKILL and not folder.path.exists())


async def test_a_cancelled_group_leaves_no_answer_behind():
    async with running(verifier("regex", pattern=r"^(a+)+$", timeout_s=60.0)) as pool:
        group = asyncio.create_task(scored(pool, [HOSTILE], "", "main"))
        await until(pool._idle.empty)  # the worker has the group
        group.cancel()
        with pytest.raises(asyncio.CancelledError):
            await group
        assert await scored(pool, ["aa"], "", "main") == {"regex": [1.0]}


async def test_invalid_settings_are_reported_at_start():
    pool = VerifierPool(named([verifier("reasoning_gym")]), 2, [SOURCE])
    with pytest.raises(VerifierFailure, match=r'needs a source of kind "reasoning_gym", but "main" is "jsonl"'):
        await pool.start()
    assert pool.pids == []


async def test_workers_ignore_ctrl_c_and_end_with_the_pool():
    async with running(verifier("exact"), workers=2) as pool:
        pids = pool.pids
        for pid in pids:
            os.kill(pid, signal.SIGINT)
        assert await asyncio.gather(*(scored(pool, ["a"], "a", "main") for _ in range(4))) == [{"exact": [1.0]}] * 4
        assert pool.pids == pids
    assert not any(lives(pid) for pid in pids)


async def test_workers_import_no_torch(monkeypatch: pytest.MonkeyPatch):
    modules = ["builtin.math", "builtin.simple", "worker"]
    code = "import sys\n" + "".join(f"import services.verifiers.{name}\n" for name in modules)
    code += "print([name for name in ('torch', 'vllm', 'transformers') if name in sys.modules])"
    found = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


PARENT = """
import asyncio, sys
from services.config.verifiers import named
from services.verifiers.pool import VerifierPool
from services.config.data import FileSource
from tests.support.verifiers import scored, verifier

async def main():
    pool = VerifierPool(named([verifier("regex", pattern="^(a+)+$", timeout_s=8.0)]), 2, [FileSource(kind="jsonl", path="x")])
    await pool.start()
    busy = asyncio.create_task(scored(pool, ["a" * 40 + "!"], "", "main"))
    await asyncio.sleep(0.2)
    print(*pool.pids, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


async def test_workers_exit_when_their_parent_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(scratch.tempfile, "tempdir", str(tmp_path))
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    command = (sys.executable, "-c", PARENT)
    parent = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, env=environ)
    assert parent.stdout is not None
    pids = [int(pid) for pid in (await parent.stdout.readline()).split()]
    assert len(pids) == 2
    assert all(lives(pid) for pid in pids)
    left = await asyncio.to_thread(lambda: list(tmp_path.iterdir()))
    assert len(left) == 2
    old = time.time() - 2 * scratch.YOUNG_S
    for folder in left:
        (folder / "note").write_text("mine")
        os.utime(folder, (old, old))
    assert scratch.sweep() == 0, "their owner is alive"
    parent.kill()
    await parent.wait()
    await until(lambda: not any(lives(pid) for pid in pids))  # including the busy worker, after its time limit
    own = scratch.Scratch()
    os.utime(own.path, (old, old))
    young = tmp_path / f"{scratch.PREFIX}young"
    young.mkdir()
    (tmp_path / f"{scratch.PREFIX}link").symlink_to(young)
    assert scratch.sweep() == 2
    assert own.path.exists()
    assert young.exists()
    own.remove()
    assert not own.path.exists()


@pytest.mark.parametrize("call", ["os.open", "fcntl.flock"])
def test_a_scratch_folder_that_cannot_be_locked_is_removed(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(scratch.tempfile, "tempdir", str(tmp_path))
    opened = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as failing:
        failing.setattr(f"services.confined.scratch.{call}", fail)
        with pytest.raises(OSError, match="Too many open files"):
            scratch.Scratch()
    assert not list(tmp_path.iterdir())
    assert len(os.listdir("/proc/self/fd")) == opened


def test_the_scratch_folder_is_deleted_with_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    exact = verifier("exact")
    setup = Setup([("exact", exact.model_dump(mode="json"))], [SOURCE.model_dump(mode="json")])
    worker = ScoringWorker(setup, {"main": [("exact", exact)]}, Freedoms())
    with asyncio.Runner() as runner:
        runner.run(worker.warm_up())
        (folder,) = tmp_path.iterdir()
        assert Path(f"/proc/{worker.pid}/cwd").resolve() == folder
        if platform.machine() in ("x86_64", "aarch64"):
            assert "Seccomp:\t2" in Path(f"/proc/{worker.pid}/status").read_text()
        assert runner.run(worker.score(Job("main", ["a", "b"], "a")))["exact"].scores == [1.0, 0.0]

        async def end() -> None:
            await worker.kill()

        runner.run(end())
    assert list(tmp_path.iterdir()) == []
