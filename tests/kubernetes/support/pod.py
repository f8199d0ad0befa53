"""A rendered pod as a real process: its namespaces, mounts, user, environment, probes, hook and grace period.

Unlike a kubelet, it does without images (it uses the repository), resource limits and seccomp.
"""

from __future__ import annotations

import base64
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from services.runtime.process_tools import die_with_parent
from tests.kubernetes.support.chart import ROOT, Object

USER = 10001
REPOSITORY, PYTHON, PROGRAMS = "/srv/app", "/srv/venv", "/srv/bin"
PATH = f"{PROGRAMS}:{PYTHON}/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass
class Objects:
    """Objects that pods refer to, by name."""

    maps: dict[str, dict[str, str]]
    secrets: dict[str, dict[str, bytes]]
    folder: Path
    account: Path
    """Folder with the token that every service account has."""

    @classmethod
    def of(cls, objects: list[Object], folder: Path, account: Path) -> Objects:
        """Collect the objects of a release."""
        maps = {found["metadata"]["name"]: found.get("data", {}) for found in objects if found["kind"] == "ConfigMap"}
        secrets = {
            found["metadata"]["name"]: {key: base64.b64decode(value) for key, value in found["data"].items()}
            for found in objects
            if found["kind"] == "Secret"
        }
        return cls(maps, secrets, folder, account)

    def volume(self, spec: Object, pod: Path) -> Path:
        """Return the folder of a pod's volume."""
        folder = pod / spec["name"]
        if "persistentVolumeClaim" in spec:
            folder = self.folder / spec["persistentVolumeClaim"]["claimName"]
        folder.mkdir(parents=True, exist_ok=True)
        files: dict[str, bytes] = {}
        if "configMap" in spec:
            files = {name: text.encode() for name, text in self.maps[spec["configMap"]["name"]].items()}
        for source in spec.get("projected", {}).get("sources", [spec]):
            if "secret" in source:
                secret = self.secrets[source["secret"].get("name") or source["secret"]["secretName"]]
                files |= {item["path"]: secret[item["key"]] for item in source["secret"]["items"]}
        for name, content in files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)
        os.chown(folder, USER, USER)
        return folder


@dataclass
class Pod:
    """One pod, started with `start`. `keep` restarts a container that has exited, as the kubelet would."""

    name: str
    template: Object
    objects: Objects
    space: str
    address: str
    folder: Path
    cluster: dict[str, str] = field(default_factory=dict)  # variables with the address of the cluster's API
    claims: tuple[str, ...] = ()  # volume claims of a StatefulSet
    process: subprocess.Popen[bytes] | None = None
    codes: list[int] = field(default_factory=list)
    leaving: bool = False

    @property
    def container(self) -> Object:
        """The main container."""
        (container,) = self.template["spec"]["containers"]
        return container

    @property
    def log(self) -> Path:
        """Its output."""
        return self.folder / "log"

    def environment(self) -> dict[str, str]:
        """Return every variable, resolved as in the pod's spec."""
        fields = {"metadata.name": self.name, "status.podIP": self.address}
        fields |= {f"metadata.labels['{key}']": value for key, value in self.template["metadata"]["labels"].items()}
        result = {"PATH": PATH, "PYTHONPATH": REPOSITORY, "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1", **self.cluster}
        for entry in self.container.get("env", []):
            source = entry.get("valueFrom", {})
            if "fieldRef" in source:
                result[entry["name"]] = fields[source["fieldRef"]["fieldPath"]]
            elif "resourceFieldRef" in source:
                result[entry["name"]] = "1"
            elif "secretKeyRef" in source:
                reference = source["secretKeyRef"]
                result[entry["name"]] = self.objects.secrets[reference["name"]][reference["key"]].decode()
            else:
                result[entry["name"]] = entry["value"]
        return result

    def start(self) -> None:
        """Mount the volumes and run the container's command, without privileges, on a read-only root."""
        self.folder.mkdir(parents=True, exist_ok=True)
        volumes = {spec["name"]: self.objects.volume(spec, self.folder) for spec in self.template["spec"].get("volumes", [])}
        for claim in self.claims:
            volumes[claim] = self.objects.volume(
                {"name": claim, "persistentVolumeClaim": {"claimName": f"{claim}-{self.name}"}}, self.folder
            )
        mounts = [
            (volumes[mount["name"]], mount["mountPath"], mount.get("readOnly", False)) for mount in self.container["volumeMounts"]
        ]
        if self.template["spec"]["automountServiceAccountToken"]:
            mounts.append((self.objects.account, "/var/run/secrets/kubernetes.io/serviceaccount", True))
        mounts += [
            (ROOT, REPOSITORY, True),
            (Path(sys.prefix).resolve(), PYTHON, True),
            (self.objects.folder / "bin", PROGRAMS, True),
        ]
        # Sources first: they may be under /tmp, which a mount will cover.
        script = [
            "set -e",
            f"hostname {self.name}",
            "mount --make-rprivate /",
            "mount -t proc proc /proc",
            "mount -t tmpfs tmpfs /run",
            "mkdir /run/sources",
        ]
        for i, (source, _, _) in enumerate(mounts):
            script += [f"mkdir /run/sources/{i}", f"mount --bind {shlex.quote(str(source))} /run/sources/{i}"]
        script += ["mount -t tmpfs tmpfs /srv"]
        base = Path(sys.base_prefix)
        if base.parts[1] != "usr":  # an interpreter in a home folder that only its owner may enter
            script += ["mkdir /run/sources/python", f"mount --bind {base} /run/sources/python"]
            script += [
                f"mount -t tmpfs -o mode=755 tmpfs /{base.parts[1]}",
                f"mkdir -p {base}",
                f"mount --bind /run/sources/python {base}",
            ]
        for i, (_, target, read_only) in enumerate(mounts):
            script += [f"mkdir -p {target}", f"mount --bind /run/sources/{i} {target}"]
            script += [f"mount -o remount,ro,bind {target}"] * read_only
        script += ["mount -o remount,ro,bind /", f"cd {REPOSITORY}", f'exec {_unprivileged()} "$@"']
        spaces = ["ip", "netns", "exec", self.space, "unshare", "-mup", "--fork", "--kill-child"]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*spaces, "sh", "-c", "\n".join(script), "sh", *self.container["command"]],
                env=self.environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", preexec_fn=die_with_parent,
            )  # fmt: skip

    @property
    def main(self) -> int:
        """Id of the container's first process, which sees itself as 1; 0 if it has not started."""
        assert self.process is not None
        try:
            children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        except OSError:
            return 0
        return int(children[0]) if children else 0

    @property
    def running(self) -> bool:
        """Whether the container is running."""
        return self.process is not None and self.process.poll() is None

    def keep(self) -> None:
        """Restart the container if it has exited, unless the pod is terminating."""
        if not self.leaving and self.process is not None and (code := self.process.poll()) is not None:
            self.codes.append(code)
            self.start()

    def execute(self, command: list[str], limit_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Execute a command as `kubectl exec` does."""
        assert self.process is not None
        words = [
            "nsenter",
            "-t",
            str(self.process.pid),
            "-n",
            "-m",
            "sh",
            "-c",
            f'cd {REPOSITORY}; exec {_unprivileged()} "$@"',
            "sh",
        ]
        return subprocess.run(
            [*words, *command], env=self.environment(), capture_output=True, text=True, timeout=limit_s, check=False
        )

    def probe(self, kind: str) -> str:
        """Return the failure of a probe, or an empty string if it succeeds."""
        found: Any = self.container[kind]
        if not self.running:
            return "the container does not run"
        if "exec" in found:
            done = self.execute(found["exec"]["command"], found["timeoutSeconds"] + 30)
            return "" if done.returncode == 0 else done.stderr or f"exit code {done.returncode}"
        (port,) = [port["containerPort"] for port in self.container["ports"] if port["name"] == found["httpGet"]["port"]]
        scheme = found["httpGet"].get("scheme", "HTTP").lower()
        try:  # a kubelet does not verify certificates
            answer = httpx.get(f"{scheme}://{self.address}:{port}{found['httpGet']['path']}", timeout=30.0, verify=False)
        except httpx.HTTPError as error:
            return str(error) or type(error).__name__
        return "" if answer.is_success else answer.text

    def terminate(self) -> int:
        """Terminate the pod as a kubelet does: hook, SIGTERM, then SIGKILL after the grace period. Return the exit code."""
        self.leaving = True
        assert self.process is not None
        deadline = time.monotonic() + self.template["spec"]["terminationGracePeriodSeconds"]
        if hook := self.container.get("lifecycle", {}).get("preStop"):
            self.execute(hook["exec"]["command"], deadline - time.monotonic())
        if main := self.main:
            with contextlib.suppress(ProcessLookupError):  # it has exited by itself
                os.kill(main, signal.SIGTERM)
        try:
            return self.process.wait(deadline - time.monotonic())
        except subprocess.TimeoutExpired:
            self.kill()
            return self.process.wait()

    def kill(self) -> None:
        """Kill the whole pod at once."""
        self.leaving = True
        if self.running:
            assert self.process is not None
            self.process.kill()
            self.process.wait()


def _unprivileged() -> str:
    rights = "--clear-groups --no-new-privs --bounding-set=-all --inh-caps=-all"
    return f"setpriv --reuid={USER} --regid={USER} {rights} --pdeathsig=KILL --"
