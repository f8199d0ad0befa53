"""The run of a storm: its Redis, a trainer that only commits and publishes, and pods that are restarted when they die."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from services.config import RunConfig, to_toml
from services.console.run.redis_server import RedisServer
from services.runtime.loops import end_tasks
from services.runtime.process_tools import die_with_parent
from services.store import Store
from tests.environment.support.templates import FAMILIES, save_family
from tests.support.harness import small_config

ENDLESS = 100_000  # steps
POLL_S = 0.05
MARK = "STORM_FOLDER"
"""Environment variable that identifies processes of a storm."""


@dataclass
class Pod:
    """A pod that is restarted when it dies."""

    name: str
    command: Sequence[str]
    process: subprocess.Popen[bytes] | None = None

    @property
    def kind(self) -> str:
        """The kind of pod."""
        return self.name.partition("-")[0]


@dataclass
class World:
    """A run exposed to a storm."""

    folder: Path
    config: RunConfig
    store: Store
    pods: list[Pod] = field(default_factory=list[Pod])

    @property
    def log(self) -> Path:
        """Records of programs and generators."""
        return self.folder / "notes"

    def start(self, pod: Pod) -> None:
        """Start a pod with its scratch folders in the storm's folder."""
        environ = {**os.environ, MARK: str(self.folder), "TMPDIR": str(self.folder / "scratch")}
        with (self.folder / f"{pod.name}.log").open("ab") as out:
            pod.process = subprocess.Popen(
                [sys.executable, "-m", *pod.command], env=environ, stdout=out, stderr=out, preexec_fn=die_with_parent,
            )  # fmt: skip

    async def ready(self, pod: Pod) -> None:
        """Wait until a newly started pod works."""
        assert pod.process is not None
        while pod.process.poll() is None:
            members = await self.store.fleet.members(self.config.fleet.ttl_s)
            phases = [each.phase for each in members if each.name == pod.name and each.pid == pod.process.pid]
            if phases and phases[0] not in ("starting", "loading"):
                return
            await asyncio.sleep(POLL_S)
        raise RuntimeError(f"{pod.name} ended by itself: {(self.folder / f'{pod.name}.log').read_text()[-2000:]}")

    async def train(self) -> None:
        """Commit every prepared step, and publish its weights."""
        while await self.store.run.state() is None:
            await asyncio.sleep(POLL_S)
        fence = await self.store.run.attach_trainer()
        await self.store.steps.publish(fence, 0)
        while True:
            state = await self.store.run.state()
            assert state is not None
            if state.prepared_step > state.committed_step:
                step = state.committed_step + 1
                await self.store.steps.commit(fence, step)
                await self.store.steps.publish(fence, step + 1)
                await self.store.steps.checkpointed(fence, step)
                await self.store.steps.retire()
            await asyncio.sleep(POLL_S)

    def end(self, pod: Pod, sig: signal.Signals) -> None:
        """Signal a pod."""
        assert pod.process is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(pod.process.pid, sig)

    def processes(self) -> list[int]:
        """Return the processes that belong to the storm, apart from its Redis and this one."""
        found: list[int] = []
        for proc in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has exited
                if f"{MARK}={self.folder}".encode() in (proc / "environ").read_bytes() and proc.name != str(os.getpid()):
                    found.append(int(proc.name))
        return found


@asynccontextmanager
async def world(folder: Path, environments: int, generators: int) -> AsyncIterator[World]:
    """Yield a run whose pods are ready, and leave nothing of it behind."""
    (folder / "scratch").mkdir(parents=True)
    (folder / "model").mkdir()
    save_family(FAMILIES[0], folder / "model")
    server = RedisServer(folder, appendfsync="no")
    await asyncio.to_thread(server.start)
    program = f"{Path(__file__).parent / 'programs.py'}:Noted"
    config = small_config(
        folder, server, f"run.steps={ENDLESS}", "data.chat_template=true", "data.max_prompt_tokens=1024", "model.max_tokens=8192",
        "trainer.row_tokens=8192", "sampling.max_tokens=400", "sampling.group_size=4", "admission.prompts_per_step=8",
        "generator.drain_s=5", "fleet.ttl_s=2", "generator.engine_options.token_s=0.001",
        f'data.sources=[{{kind = "jsonl", path = "{folder / "data.jsonl"}", environment = "noted"}}]', "verifiers=[]",
        f'environments=[{{name = "noted", kind = "python", function = "{program}", max_turns = 12, '
        f'options = {{log = "{folder / "notes"}"}}}}]',
        prompts=500,
    )  # fmt: skip
    path = folder / "storm.toml"
    path.write_text(to_toml(config))
    store = await Store.connect(server.url, config.run.name, server.password)
    kinds = [("dataprep", 1), ("generator", generators), ("environment", environments)]
    names = [f"{kind}-{i}" for kind, count in kinds for i in range(count)]
    place = World(folder, config, store)
    place.pods = [
        Pod(name, ("tests.storm.generator", str(path), name, str(place.log)))
        if name.startswith("generator")
        else Pod(name, (f"services.{name.partition('-')[0]}", "--config", str(path), "--name", name))
        for name in names
    ]
    training = asyncio.create_task(place.train())
    try:
        for pod in place.pods:
            place.start(pod)
        for pod in place.pods:
            await place.ready(pod)
        yield place
    finally:
        for pid in place.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pod in place.pods:
            if pod.process is not None:
                await asyncio.to_thread(pod.process.wait)
        await end_tasks([training])
        await store.close()
        await asyncio.to_thread(server.stop)
