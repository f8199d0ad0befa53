"""Just enough of a cluster to run a release: controllers that create pods, the scale subresource, the names of Services.

Pods of a release start immediately, as on a cluster, and are restarted when they exit.
"""

from __future__ import annotations

import secrets
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

from services.runtime.redis_process import find_server
from tests.kubernetes.support import chart
from tests.kubernetes.support.api_server import ApiServer
from tests.kubernetes.support.network import Network
from tests.kubernetes.support.pod import PYTHON, Objects, Pod

TICK_S = 0.2
RESTARTS = 8  # of a container; more of them mean more than a slow start
DOMAIN = "svc.cluster.local"

CLIENT = f"""#!{PYTHON}/bin/python
import os, redis, sys
print("PONG" if redis.Redis(port=int(sys.argv[2]), password=os.environ["REDISCLI_AUTH"]).ping() else "")
"""
"""A redis-cli for machines without Debian's."""


class Cluster:
    """One release on this machine, run as user 10001 in separate namespaces."""

    def __init__(
        self, objects: list[chart.Object], folder: Path, secrets: dict[str, dict[str, bytes]], namespace: str = "ml",
        release: str = "demo",
    ) -> None:  # fmt: skip
        """Prepare the release; `secrets` already exist, by name."""
        self.objects, self.release, self.namespace = objects, release, namespace
        self.network = Network()
        self.pods: dict[str, Pod] = {}
        self.gone: dict[str, list[int]] = {}  # pods that were terminated, with the exit codes of their containers
        self.folder = folder
        self.api = ApiServer(folder / "account", self.network.gateway, namespace, f"{release}-generator", 1, f"{release}-trainer")
        self.held = Objects.of(objects, folder / "volumes", folder / "account")
        self.held.secrets |= secrets
        self._programs()
        self._ending = threading.Event()
        self._keeper = threading.Thread(target=self._keep, daemon=True)

    def _programs(self) -> None:
        programs = self.held.folder / "bin"
        programs.mkdir(parents=True)
        for name, text in {
            "grpo": f'#!/bin/sh\nexec {PYTHON}/bin/python -m services.console.commands "$@"\n',
            "valkey-server": f'#!/bin/sh\nexec {find_server(shutil.which("redis-server") or "")} "$@"\n',
        }.items():
            (programs / name).write_text(text)
        if shutil.which("redis-cli") is None:
            (programs / "valkey-cli").write_text(CLIENT)
        for path in programs.iterdir():
            path.chmod(0o755)

    def start(self) -> None:
        """Create every pod of the release."""
        for found in chart.of_kind(self.objects, "StatefulSet"):
            if found["metadata"]["name"] != f"{self.release}-trainer":
                self._member(found, 0)
        for found in chart.of_kind(self.objects, "Deployment"):
            if found["metadata"]["name"] != f"{self.release}-generator":
                for _ in range(found["spec"].get("replicas", 1)):
                    self._add(found, f"{found['metadata']['name']}-{secrets.token_hex(3)}", {})
        self._keeper.start()  # it creates the generators and the trainer

    def _member(self, owner: chart.Object, index: int) -> None:
        """Create a pod of a StatefulSet."""
        self._add(owner, f"{owner['metadata']['name']}-{index}", {"apps.kubernetes.io/pod-index": str(index)})

    def run(self, found: chart.Object, limit_s: float = 400.0) -> tuple[int, str]:
        """Run a single pod, such as a hook's, to completion; return its exit code and output."""
        name = found["metadata"]["name"]
        space, address = self.network.add(name)
        pod = Pod(name, found, self.held, space, address, self.folder / "pods" / name)
        pod.start()
        assert pod.process is not None
        try:
            code = pod.process.wait(limit_s)
        finally:
            pod.kill()
        return code, pod.log.read_text(errors="replace")

    def _add(self, owner: chart.Object, name: str, labels: dict[str, str]) -> Pod:
        template = owner["spec"]["template"]
        template = {**template, "metadata": {**template["metadata"], "labels": {**template["metadata"]["labels"], **labels}}}
        space, address = self.network.add(name)
        claims = tuple(claim["metadata"]["name"] for claim in owner["spec"].get("volumeClaimTemplates", []))
        pod = Pod(name, template, self.held, space, address, self.folder / "pods" / name, self.api.environ, claims)
        for service in chart.of_kind(self.objects, "Service"):
            if service["spec"]["selector"].items() <= template["metadata"]["labels"].items():
                domain = f"{service['metadata']['name']}.{self.namespace}.{DOMAIN}"
                self.network.call(f"{name}.{domain}" if service["spec"].get("clusterIP") == "None" else domain, address)
        pod.start()
        self.pods[name] = pod
        return pod

    def of(self, component: str) -> list[Pod]:
        """Return the pods of a component that are not terminating, oldest first."""
        key = "app.kubernetes.io/component"
        pods = list(self.pods.values())  # the controllers may add others concurrently
        return [pod for pod in pods if pod.template["metadata"]["labels"][key] == component and not pod.leaving]

    def _keep(self) -> None:
        """Act as controllers and kubelet: keep the desired generators and trainer pods, and every container, running."""
        owner = chart.named(self.objects, "Deployment", f"{self.release}-generator")
        trainer = chart.named(self.objects, "StatefulSet", f"{self.release}-trainer")
        while not self._ending.wait(TICK_S):
            ranks = self.of("trainer")
            for index in range(len(ranks), self.api.trainer.replicas):
                self._member(trainer, index)
            for pod in ranks[self.api.trainer.replicas :]:
                pod.leaving = True
                threading.Thread(target=self._terminate, args=(pod,), daemon=True).start()
            generators = self.of("generator")
            for _ in range(self.api.replicas - len(generators)):
                self._add(owner, f"{owner['metadata']['name']}-{secrets.token_hex(3)}", {})
            for pod in generators[self.api.replicas :]:
                pod.leaving = True
                threading.Thread(target=self._terminate, args=(pod,), daemon=True).start()
            for pod in list(self.pods.values()):
                pod.keep()

    def _terminate(self, pod: Pod) -> None:
        code = pod.terminate()
        self.gone[pod.name] = [*pod.codes, code]

    def ready(self, component: str) -> list[str]:
        """Return why pods of a component are not ready, if they are not. Also runs their startup and liveness probes."""
        pods = self.of(component)
        if not pods:
            return [f"no {component} yet"]
        return [why for pod in pods for kind in ("startupProbe", "livenessProbe", "readinessProbe") if (why := pod.probe(kind))]

    def wait(self, true: Callable[[], object], what: str, limit_s: float = 200.0, every_s: float = TICK_S) -> None:
        """Wait for a condition, checked every `every_s`. A failure shows the end of every log."""
        deadline = time.monotonic() + limit_s
        while not true():
            assert time.monotonic() < deadline, f"{what}\n{self.words()}"
            looping = [name for name, pod in list(self.pods.items()) if len(pod.codes) > RESTARTS]
            assert not looping, f"{what}: {looping} restart in a loop\n{self.words()}"
            time.sleep(every_s)

    def words(self) -> str:
        """Return the end of every pod's log."""
        pods = list(self.pods.values())
        last = [pod.log.read_text(errors="replace")[-2500:] if pod.log.exists() else "" for pod in pods]
        return "\n".join(f"== {pod.name} {pod.codes}\n{text}" for pod, text in zip(pods, last, strict=True))

    def close(self) -> None:
        """Stop everything."""
        self._ending.set()
        if self._keeper.is_alive():
            self._keeper.join()
        for pod in self.pods.values():
            pod.kill()
        self.api.close()
        self.network.close()
