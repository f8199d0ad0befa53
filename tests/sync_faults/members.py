"""The members of a campaign: their processes, networks and routes to Redis, and the faults applied to them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from services.config import RunConfig, to_toml
from services.runtime.portal import Portal
from tests.faults.proxy import Proxy
from tests.sync_faults.faults import Fault
from tests.sync_faults.network import Loopback, Networks

ANSWER_LIMIT_S = 60.0


class Member:
    """One member. `seconds` gives the duration of a temporary fault."""

    def __init__(
        self, name: str, streams: bool, network: Networks | Loopback, config: RunConfig, portal: Portal, server: tuple[str, int]
    ) -> None:
        self.name, self._network, self._streams, self._portal = name, network, streams, portal
        self.applied: dict[int, str] = {}  # version -> digest applied by this process
        self.wrong: list[str] = []  # reported violations
        self.stopped = False
        self.over = threading.Event()  # set while no fault is in progress
        self.over.set()
        self._held: list[dict[str, Any]] = []
        self._reported = threading.Condition()
        self._proxy = Proxy(lambda: server)
        portal.call(self._proxy.start(network.redis))
        network.add(name)
        redis = config.redis.model_copy(update={"url": f"redis://{network.redis}:{self._proxy.port}/0"})
        folder = Path(config.run.dir)
        self._config, self._log = folder / f"{name}.toml", folder / f"{name}.log"
        self._config.write_text(to_toml(config.model_copy(update={"redis": redis})))
        self.start()

    def start(self) -> None:
        """Start the member's process."""
        command = [sys.executable, "-m", "tests.sync_faults.member"]
        command += ["--config", str(self._config), "--name", self.name, *(["--streams"] if self._streams else [])]
        pipe = subprocess.PIPE
        self.applied.clear()
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=log, text=True, preexec_fn=self._network.join(self.name), env=os.environ
            )
        threading.Thread(target=self._listen, args=(self._process,), daemon=True).start()

    def start_again_if_it_ended(self) -> None:
        """Restart the member's process if it has exited."""
        if self._process.poll() is not None:
            self._process.wait()
            self._start_for_good()

    def _start_for_good(self) -> None:
        """Start the process from the portal's thread: a child exits with the thread that started it, as a transfer's does."""

        async def start() -> None:
            self.start()

        self._portal.call(start())

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            event = json.loads(line)
            with self._reported:
                match event["event"]:
                    case "applied":
                        self.applied[event["version"]] = event["digest"]
                    case "mixed":
                        self.wrong.append(f"{self.name} could sample version {event['version']} with weights of {event['marks']}")
                    case "holds":
                        self._held.append(event)
                self._reported.notify_all()

    def held(self) -> tuple[int, str] | None:
        """Return version (-1 for none) and digest of its current weights; None if it does not respond."""
        if self.stopped or self._process.poll() is not None:
            return None
        with self._reported:
            self._held.clear()
            try:
                assert self._process.stdin is not None
                self._process.stdin.write("tell\n")
                self._process.stdin.flush()
            except BrokenPipeError:
                return None
            self._reported.wait_for(lambda: self._held or self.stopped or self._process.poll() is not None, ANSWER_LIMIT_S)
            return (self._held[0]["version"], self._held[0]["digest"]) if self._held else None

    def took(self, version: int) -> str:
        """Wait for it to apply `version`, and return the digest of what it applied; empty if it did not."""
        with self._reported:
            self._reported.wait_for(lambda: version in self.applied, ANSWER_LIMIT_S)
            return self.applied.get(version, "")

    def hit(self, fault: Fault, seconds: float) -> None:
        """Apply a fault; a temporary one ends after `seconds` and sets `over`."""
        self.over.clear()
        if fault.verb == "kill":
            self._process.kill()
            self._process.wait()
            self._start_for_good()
            self.over.set()
            return
        begin, end = self._ways(fault.verb)
        begin()

        def mend() -> None:
            end()
            self.over.set()

        timer = threading.Timer(seconds, mend)
        timer.daemon = True
        timer.start()

    def _ways(self, verb: str) -> tuple[Callable[[], object], Callable[[], object]]:
        network = self._network
        match verb:
            case "stop":
                return self._stop, self._wake
            case "cut-redis":
                soon = self._portal.loop.call_soon_threadsafe
                return lambda: soon(self._proxy.cut), lambda: soon(self._proxy.mend)
        assert isinstance(network, Networks), f"{verb} needs a network for each member"
        if verb == "cut-trainer":
            return lambda: network.cut_trainer(self.name), lambda: network.mend_trainer(self.name)
        return lambda: network.cut_all(self.name), lambda: network.mend_all(self.name)

    def _stop(self) -> None:
        self.stopped = True
        self._process.send_signal(signal.SIGSTOP)

    def _wake(self) -> None:
        self._process.send_signal(signal.SIGCONT)
        self.stopped = False

    def close(self) -> None:
        """Stop the process, whatever its state."""
        self.over.wait(ANSWER_LIMIT_S)
        deadline = time.monotonic() + ANSWER_LIMIT_S
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._portal.call(self._proxy.close())
