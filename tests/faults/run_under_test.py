"""A small real run to break: its configuration, its console, its standby and its processes.

Guarantees: the run uses a copy of the code, so its pods have one version to the end; when `close` returns, none of its processes
is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from services.config import RunConfig, load, to_toml
from services.config.load import load_resolved
from services.console.run.folder import RunFolder
from services.protocol.errors import StoreError
from services.runtime.process_tools import die_with_parent, free_port
from services.store import Store
from tests.faults.kinds import Shape
from tests.faults.mutants import ROOT
from tests.faults.proxy import Proxy
from tests.support.harness import save_model_folder, small_config
from tests.support.servers.admin import admin_password

PROFILES = {
    "fifo": (),
    "ranks": ("trainer.ranks=2",),
    "turns": (
        'data.sources=[{kind="jsonl", path="FOLDER/data.jsonl", environment="digits"}]',
        "verifiers=[]",
        "generator.verifier_workers=2",  # the default, as there is no verifier
        "data.chat_template=true",
        f'environments=[{{name="digits", kind="python", function="{ROOT}/tests/environment/support/programs.py:Digits"}}]',
        "sampling.max_tokens=12",
    ),
    "equal": (
        "trainer.ranks=2", "trainer.mini_batches=2", "sampling.group_size=2", "evaluation.every_steps=7", "evaluation.samples=2",
        'evaluation.sources=[{name="held_out", kind="jsonl", path="FOLDER/held_out.jsonl"}]',
    ),
    "failing": (
        f'verifiers=[{{kind="python", function="{ROOT}/tests/faults/rewards.py:score", '
        'options={broken="FOLDER/broken"}, range=[0, 1]}]',
        
    ),
    "replay": ("replay.sampler=prioritized", "replay.max_uses=2", "replay.capacity=64"),
}  # fmt: skip
"""Settings of a kind of run, beside the common ones. Only in `replay` and `failing` do a step's groups depend on timing."""
TIMED = ("replay", "failing")

SCRIPTED = (
    "run.seed=3", "generator.verifier_workers=1", "generator.drain_s=3",
    "checkpoint.every_steps=5", "sync.deadline_s=10", "trainer.deterministic=true",
    "optimizer.learning_rate=1e-3", 'verifiers=[{kind="regex", pattern="[0-4]"}]',
    'api.token_file=""', 'redis.password_file=""',
)  # fmt: skip
VLLM = (
    "run.seed=3", "generator.drain_s=3", "checkpoint.every_steps=5",
    "fleet.ttl_s=5", "sync.deadline_s=20", "admission.prompts_per_step=8",
    "admission.max_staleness=1", "optimizer.warmup_steps=0",
    f'model.path="{ROOT / "build/arithmetic"}"',
)  # fmt: skip
STANDBY = "dataprep-1"
KEEP_S = 0.5  # seconds before a dead second dataprep is restarted


@dataclass(frozen=True)
class Setting:
    """The kind of run, its folder, its length and its pods."""

    folder: Path
    code: Path
    """Folder with the copy of `services`, or the tree itself."""
    profile: str = "fifo"
    engine: str = "scripted"
    steps: int = 100
    generators: int = 3
    token_s: float = 0.06
    appendfsync: str = "always"

    def _profile(self) -> list[str]:
        return [override.replace("FOLDER", str(self.folder)) for override in PROFILES[self.profile]]

    @property
    def broken(self) -> Path:
        """While this file exists, all rewards of `failing` fail."""
        return self.folder / "broken"

    def shape(self, config: RunConfig) -> Shape:
        """Return the pods of a run with this configuration, and what can be done to it."""
        return Shape(config.generator.count, config.trainer.ranks, bool(config.environments), self.profile == "failing")

    def write(self, name: str, *overrides: str) -> Path:
        """Write the configuration file of the run `name`."""
        own = [f"run.name={name}", f'run.dir="{self.folder}"', f"run.steps={self.steps}"]
        own += [f"generator.count={self.generators}", *self._profile(), *overrides]
        if self.engine == "vllm":
            config = load(ROOT / "examples/arithmetic/config.toml", [*VLLM, *own], environ={})
        else:
            if not (self.folder / "model").exists():
                save_model_folder(self.folder / "model")
                rows = "".join(json.dumps({"prompt": f"tell {i}", "answer": str(i)}) + "\n" for i in range(6))
                (self.folder / "held_out.jsonl").write_text(rows)
            given = [*SCRIPTED, f"generator.engine_options.token_s={self.token_s}", *own]
            config = small_config(self.folder, None, *given, prompts=200)
        path = self.folder / f"{name}.toml"
        path.write_text(to_toml(config))
        return path


@dataclass
class RunUnderTest:
    """A run of `setting` and its possible victims."""

    setting: Setting
    name: str
    overrides: tuple[str, ...] = ()
    standby: bool = True
    proxies: dict[str, Proxy] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.path = self.setting.write(self.name, *self.overrides)
        self.config = load(self.path, environ={})
        self.folder = RunFolder.of(self.config)
        self.shape = self.setting.shape(self.config)
        self.log = self.setting.folder / f"{self.name}.log"
        self._console: subprocess.Popen[bytes] | None = None
        self._beside: dict[str, subprocess.Popen[bytes]] = {}  # pods that the console does not know of
        self.twins = 0

    @property
    def pods(self) -> list[str]:
        """The pods that send heartbeats when all is well."""
        generators = [f"generator-{i}" for i in range(self.shape.generators)]
        environments = [f"environment-{i}" for i in range(self.shape.environments)]
        return ["dataprep-0", *([STANDBY] if self.standby else []), "trainer-0", *generators, *environments]

    async def open(self) -> None:
        """Start the proxies, and the run that connects through them."""
        for pod in {*self.pods, *(f"trainer-{rank}" for rank in range(self.shape.ranks))}:
            self.proxies[pod] = Proxy(self.place)
            await self.proxies[pod].start()
        self.start()

    async def close(self) -> None:
        """Stop whatever is left of the run."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in [*self._beside.values(), *([self._console] if self._console else [])]:
            process.wait()
        for proxy in self.proxies.values():
            await proxy.close()

    def start(self, module: str = "tests.faults.launch") -> None:
        """Run the command as a user would: at first, and again after the console has exited."""
        ports = json.dumps({name: proxy.port for name, proxy in self.proxies.items()})
        environ = self._environ(FAULTS_PROXIES=ports, FAULTS_APPENDFSYNC=self.setting.appendfsync)
        command = [sys.executable, "-m", module, "run", str(self.path), "--no-screen"]
        with self.log.open("ab") as log:
            self._console = subprocess.Popen(
                command, env=environ, cwd=self.setting.code, stdout=log, stderr=log,
                preexec_fn=die_with_parent, start_new_session=True,
            )  # fmt: skip

    @property
    def ended(self) -> int | None:
        """Exit code of the console; None while it runs."""
        assert self._console is not None
        return self._console.poll()

    @property
    def last_line(self) -> str:
        """The end of the console's output."""
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    def place(self) -> tuple[str, int] | None:
        """Return the current address of Redis; None before the run has one."""
        with contextlib.suppress(OSError, ValueError):
            url = urlsplit(load_resolved(self.folder.config).redis.url)
            return url.hostname or "", url.port or 0
        return None

    async def store(self) -> Store:
        """Return the run's store, bypassing the proxies. Raises `StoreError` when it cannot be reached."""
        try:
            config = load_resolved(self.folder.config)
            return await Store.connect(config.redis.url, self.name, admin_password(config))
        except (OSError, ValueError) as error:
            raise StoreError(f"the run has no folder yet: {error}") from None

    def processes(self, pod: str = "") -> list[int]:
        """Return the processes of the run, or only those of a pod, of `console` or of `redis`."""
        own = str(self.folder.path / "pods" / f"{pod}.toml")
        found = []
        for proc in Path("/proc").glob("[0-9]*"):
            try:
                words = (proc / "cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
                inherited = f"GRPO_CONFIG={self.folder.path}/".encode() in (proc / "environ").read_bytes()
                in_redis = os.readlink(proc / "cwd") == str(self.folder.redis)
            except OSError:  # it has exited, or belongs to another user
                continue
            is_console = words[-2:] == [str(self.path), "--no-screen"]
            named = {"console": is_console, "redis": in_redis, "": is_console or in_redis or inherited}.get(pod, own in words)
            if named and words != [""]:  # a zombie has no command line
                found.append(int(proc.name))
        return found

    def signal(self, victim: str, sig: signal.Signals) -> list[int]:
        """Signal a victim's processes.

        SIGSTOP and SIGCONT also go to its children, as when a machine freezes.
        """
        pids = self.processes(victim)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                if sig in (signal.SIGSTOP, signal.SIGCONT) and victim not in ("console", "redis"):
                    os.killpg(os.getpgid(pid), sig)
                else:
                    os.kill(pid, sig)
        return pids

    def wake(self, pids: Sequence[int]) -> None:
        """Continue these processes and their children."""
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                group = os.getpgid(pid)
                os.killpg(group, signal.SIGCONT) if group == pid else os.kill(pid, signal.SIGCONT)

    async def keep_standby(self) -> None:
        """Keep a second dataprep running, as a cluster would."""
        while True:
            process, place = self._beside.get(STANDBY), self.folder.path / "pods" / f"{STANDBY}.toml"
            if place.exists() and (process is None or process.poll() is not None):
                self._start_beside("dataprep", STANDBY, STANDBY)
            await asyncio.sleep(KEEP_S)

    def start_twin(self) -> subprocess.Popen[bytes]:
        """Start another trainer with the same name, as when a pod is replaced while it is still alive."""
        self.twins += 1
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        return self._start_beside("trainer", "trainer-0", f"twin-{self.twins}", alone)

    def _start_beside(self, kind: str, pod: str, log: str, environ: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        place = self.folder.path / "pods" / f"{pod}.toml"
        argv = [sys.executable, "-m", f"services.{kind}", "--config", str(place), "--name", pod]
        env = self._environ(
            GRPO_CONFIG=str(place), CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", **(environ or {})
        )
        with (self.folder.logs / f"{log}.log").open("ab") as out:
            process = subprocess.Popen(
                argv, env=env, cwd=self.setting.code, stdout=out, stderr=out, preexec_fn=die_with_parent, start_new_session=True
            )
        self._beside[log] = process
        return process

    def _environ(self, **more: str) -> dict[str, str]:
        # The copy precedes the tree, which has the scripted engine and this package.
        return {**os.environ, "PYTHONPATH": f"{self.setting.code}:{ROOT}", "PYTHONDONTWRITEBYTECODE": "", **more}

    def weights(self) -> str:
        """Return a digest of the exported weights."""
        return hashlib.sha256((self.folder.path / "model" / "model.safetensors").read_bytes()).hexdigest()


async def run_calmly(setting: Setting, name: str) -> RunUnderTest:
    """Run a short undisturbed run: scripted tokens depend neither on time nor on the generator."""
    alone = ("generator.engine_options.token_s=0.0", "generator.count=1")
    run = RunUnderTest(setting, name, alone, standby=False)
    try:
        run.start("services.console.commands")
        while run.ended is None:
            await asyncio.sleep(KEEP_S)
    finally:
        await run.close()
    if run.ended:
        raise RuntimeError(f"the run without faults failed with exit code {run.ended}: {run.last_line} (log: {run.log})")
    return run
