"""A small real run for the page, with the scripted engine, a real trainer, evaluation rounds and two failed tickets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from services.config import load_resolved, to_toml
from services.http.credentials import redis_login
from services.runtime.process_tools import free_port
from services.store import RunState, Store
from tests.support.harness import save_model_folder, small_config

T = TypeVar("T")

NAME, REASON = "shown", "verifier math: worker killed after 5.0 s"
LIMIT_S = 300.0  # for the run to reach some state, on a busy machine


@dataclass
class Shown:
    """A live run and the address of its page."""

    folder: Path
    url: str
    process: subprocess.Popen[str]
    output: Path

    @property
    def token(self) -> str:
        """Return the token with scope operate."""
        return (self.folder / "api-token").read_text().strip()

    @property
    def read_token(self) -> str:
        """Return the token with scope read."""
        return (self.folder / "api-read-token").read_text().strip()

    def ask(self, question: Callable[[Store], Coroutine[Any, Any, T]], kind: str = "console") -> T:
        """Query the run's Redis as the user of a kind of service, in a new thread because playwright runs a loop in this one."""

        async def asked() -> T:
            config = load_resolved(self.folder / "config.toml")
            store = await Store.connect(config.redis.url, config.run.name, redis_login(config, kind))
            try:
                return await question(store)
            finally:
                await store.close()

        with ThreadPoolExecutor(1) as thread:
            return thread.submit(lambda: asyncio.run(asked())).result()

    def state(self) -> RunState:
        """Return the run's state."""
        state = self.ask(lambda store: store.run.state())
        assert state is not None
        return state

    def wait_for(self, true: Callable[[], Any], what: str) -> None:
        """Wait until `true()` while the run is alive."""
        deadline = time.monotonic() + LIMIT_S
        while not true():
            assert self.process.poll() is None, self.output.read_text()
            assert time.monotonic() < deadline, f"did not come true: {what}\n{self.output.read_text()}"
            time.sleep(0.1)

    @property
    def kept_step(self) -> int | None:
        """Return a trained step whose plan still exists, or None."""
        state = self.state()
        return state.committed_step if state.committed_step > state.checkpointed_step else None


def write_run(folder: Path, steps: int, port: int, token_s: float) -> Path:
    """Write the configuration of the run, its model and its data; return the configuration's path."""
    save_model_folder(folder / "model")
    prompts, held_out = folder / "sums.jsonl", folder / "held_out.jsonl"
    for file, first, count in ((prompts, 0, 4000), (held_out, 5000, 8)):
        sums = ((i * 37 % 89 + 1, i * 53 % 97 + 1) for i in range(first, first + count))
        lines = (json.dumps({"prompt": f"What is {a} + {b}?", "answer": str(a + b)}) for a, b in sums)
        file.write_text("\n".join(lines) + "\n")
    config = small_config(
        folder, None, f"run.name={NAME}", f"run.dir={folder / 'runs'}", f"run.steps={steps}", "generator.count=2",
        "generator.max_num_seqs=8", f"web.port={port}", "samples.keep=100000", "run.seed=3",
        "checkpoint.every_steps=100000",
        'api.token_file=""', 'redis.password_file=""',
        "generator.engine=tests.web.engine:SumsEngine", f"generator.engine_options.token_s={token_s}",
        "optimizer.learning_rate=1e-3", "sync.deadline_s=10", f"data.sources=[{{kind='jsonl', path='{prompts}'}}]",
        "verifiers=[{kind='exact', extract='= (\\d+)$'}]", "admission.max_staleness=2", "evaluation.every_steps=4",
        "evaluation.samples=2", "evaluation.max_generators=1",
        f"evaluation.sources=[{{kind='jsonl', name='held_out', path='{held_out}'}}]", "sampling.max_tokens=40",
    )  # fmt: skip
    path = folder / f"{NAME}.toml"
    path.write_text(to_toml(config))
    return path


@contextlib.contextmanager
def shown(folder: Path, steps: int = 2000, trained: int = 3, token_s: float = 0.1) -> Iterator[Shown]:
    """Start a run and wait until it has trained some steps, with a checkpoint and two failed tickets."""
    port = free_port()
    with started(write_run(folder, steps, port, token_s), folder, NAME, port, trained) as run:
        yield run


@contextlib.contextmanager
def started(path: Path, folder: Path, name: str, port: int, trained: int) -> Iterator[Shown]:
    """Start the run `name` of the configuration at `path`, whose `run.dir` is `folder / "runs"` and whose `web.port` is `port`.
    Wait until it has trained some steps, with a checkpoint and two failed tickets.
    """
    output = folder / "output.txt"
    with output.open("w") as out:
        command = [sys.executable, "-m", "services.console.commands", "run", str(path), "--no-screen"]
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, text=True)
    run = Shown(folder / "runs" / name, f"http://127.0.0.1:{port}", process, output)
    try:
        run.wait_for(lambda: (run.folder / "metrics.jsonl").exists(), "a server")
        run.wait_for(lambda: bury(run, 2), "two failures")
        run.wait_for(lambda: run.state().committed_step >= trained, f"step {trained}")
        run.ask(lambda store: store.run.request_checkpoint("tests"))
        run.wait_for(lambda: run.state().checkpointed_step >= 0, "a checkpoint")
        run.wait_for(lambda: run.kept_step is not None, "a step after it")
        yield run
    finally:
        process.send_signal(signal.SIGINT)
        time.sleep(1.0)
        process.send_signal(signal.SIGINT)  # a second signal stops the run immediately, as it is not resumed
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def bury(run: Shown, count: int) -> bool:
    """Let some tickets fail like a generator; return whether there are enough dead letters."""

    async def failed(store: Store) -> int:
        buried = 0
        for _ in range(100):
            state = await store.run.state()
            if state is None or buried >= count:
                break
            _, claims = await store.tickets.claim("script", state.published_version, state.published_by, 30.0, 1)
            for claim in claims:
                buried += await store.tickets.fail("script", claim, REASON, 1)
            await asyncio.sleep(0.02)  # the generators claim quickly
        return buried

    run.ask(failed, "generator")
    return run.ask(lambda store: store.dead_letters.count()) >= count


def pids(run: Shown, pod: str) -> list[int]:
    """Return the process ids of a pod of the run."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().decode().split("\0")
            if pod in words and any(str(run.folder) in word for word in words):
                found.append(int(entry.name))
    return found


def kill(run: Shown, pod: str) -> None:
    """Kill a pod with SIGKILL."""
    for pid in pids(run, pod):
        with contextlib.suppress(ProcessLookupError):  # it exited with its parent
            os.kill(pid, signal.SIGKILL)
