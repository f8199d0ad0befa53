"""Access to secrets: each pod has only the passwords of its own Redis users, and the server only their digests."""

from __future__ import annotations

import base64
import contextlib
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from services.protocol.keys import Keys
from services.runtime.process_tools import free_port
from services.runtime.redis_process import find_server
from services.store import acl
from tests.kubernetes.support import chart
from tests.support.servers.certificates import Certificates, make_certificates

pytest.importorskip("helm_python", reason="the extra `dev` has Helm: pip install helm-python-sdk")

OWN = {
    "Deployment/demo-generator": {"generator"}, "Deployment/demo-dataprep": {"dataprep", "console"},
    "StatefulSet/demo-trainer": {"trainer", "console"}, "Deployment/demo-tracker": {"tracker"}, "Deployment/demo-web": {"web"},
    "Deployment/demo-scaler": {"scaler"},
    "Pod/demo-smoke": {"console"}, "StatefulSet/demo-redis": set(acl.GRANTS),
    "Job/demo-check": {"console"}, "Deployment/demo-environment": {"environment"},
}  # fmt: skip
WHOLE = {
    "web": {"enabled": True}, "environment": {"internet": True},
    "storage": {"data": {"existingClaim": "prompts"}},
    "config": {
        "tracking": {"tensorboard": True}, "environments": [{"name": "e", "kind": "python", "function": "e:E"}],
        "data": {"sources": [{"kind": "jsonl", "path": "/srv/grpo/data/x.jsonl", "environment": "e"}]},
    },
}  # fmt: skip


def items(template: chart.Object, secret: str) -> dict[str, str]:
    """Return the files of a Secret that a pod mounts: path -> key."""
    found: dict[str, str] = {}
    for volume in template["spec"]["volumes"]:
        for source in volume.get("projected", {}).get("sources", []):
            if source["secret"]["name"] == secret:
                found |= {item["path"]: item["key"] for item in source["secret"]["items"]}
    return found


def test_the_rules_of_users_match_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(chart.CHART))
    import make_users

    sys.modules.pop("make_users")
    assert make_users.FILE.read_text() == make_users.make(), "run make generate"


def test_each_pod_has_only_the_passwords_of_its_own_users() -> None:
    objects = chart.render(WHOLE)
    made = chart.named(objects, "Secret", "demo-redis-users")["data"]
    assert made.keys() == acl.GRANTS.keys()
    assert len(set(made.values())) == len(made)
    for label, template in chart.pods(objects):
        own = {key: key.removeprefix("users/") for key in items(template, "demo-redis-users")}
        assert own == {f"users/{kind}": kind for kind in OWN[label]}, label
        administrates = "redis-password" in items(template, "demo-auth")
        assert administrates == (label == "StatefulSet/demo-redis"), label
    for found in chart.of_kind(objects, "ConfigMap"):
        text = chart.as_text([found])
        assert not any(base64.b64decode(password).decode() in text for password in made.values())


def test_an_external_redis_has_all_users_or_a_single_one(tmp_path: Path) -> None:
    external = {"enabled": False, "external": {"url": "redis://redis.example.com:6379/0"}}
    for given, expected, config in (
        ({"usersSecret": "mine"}, {"users/generator": "generator"}, "secrets/users"),
        ({"external": {**external["external"], "existingSecret": "mine"}}, {"redis-password": "redis-password"}, "password_file"),
        ({}, {}, '"url"'),
    ):  # type: ignore[misc]
        objects = chart.render({"redis": {**external, **given}})
        template = chart.named(objects, "Deployment", "demo-generator")["spec"]["template"]
        assert items(template, "mine") == expected
        assert config in chart.named(objects, "ConfigMap", "demo-config")["data"]["config.toml"]
        assert not [found for found in chart.of_kind(objects, "Secret") if found["metadata"]["name"] == "demo-redis-users"]


@dataclass
class Server:
    """A Redis started by the chart's script."""

    port: int
    passwords: dict[str, str]
    folder: Path
    tls: bool

    @property
    def environ(self) -> dict[str, str]:
        """Return the environment of the pod's scripts."""
        return {"PATH": f"{self.folder}/bin:/usr/bin:/bin"}

    def login(self, user: str, password: str) -> redis.Redis:
        """Return a client."""
        return redis.Redis(
            host="127.0.0.1", port=self.port, username=user, password=password, socket_timeout=10, retry=Retry(NoBackoff(), 0),
            ssl=self.tls, ssl_ca_certs=str(self.folder / "tls" / "ca.crt"),
        )  # fmt: skip

    def log(self) -> str:
        """Return the log of its output."""
        return (self.folder / "log").read_text()

    def probe(self) -> None:
        """Run the kubelet's periodic probe."""
        command = ["sh", str(self.folder / "files" / "ping.sh")]
        done = subprocess.run(command, env=self.environ, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@contextlib.contextmanager
def start(folder: Path, certificates: Certificates | None = None) -> Iterator[Server]:
    """Run the script and files of the Redis pod, with local folders in place of its mounts."""
    values = {"tls": {"redisSecret": "redis-tls"}} if certificates else {}
    objects = chart.render({"config": {"run": {"name": "sums.1"}}, **values})
    port, files = free_port(), chart.named(objects, "ConfigMap", "demo-redis")["data"]
    places = {
        "/tmp": "tmp", "/srv/grpo/redis": "data", "/run/grpo/secrets": "secrets", "/run/grpo/redis": "files",
        "/run/grpo/tls": "tls",
    }  # fmt: skip
    for place in (*places.values(), "secrets/users", "bin"):
        (folder / place).mkdir()
    for name, text in files.items():
        text = text.replace("6379", str(port))
        for place, here in places.items():
            text = text.replace(f"{place}/", f"{folder}/{here}/").replace(f"{place}\n", f"{folder}/{here}\n")
        (folder / "files" / name).write_text(text)
    passwords: dict[str, str] = {}
    for secret, place in (("demo-auth", "secrets"), ("demo-redis-users", "secrets/users")):
        for key, value in chart.named(objects, "Secret", secret)["data"].items():
            passwords[key] = base64.b64decode(value).decode()
            (folder / place / key).write_text(passwords[key])
    if certificates:
        mount(certificates, folder / "tls")
    (folder / "bin" / "valkey-server").symlink_to(find_server(shutil.which("redis-server") or ""))
    server = Server(port, passwords, folder, bool(certificates))
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(["sh", str(folder / "files" / "start.sh")], env=server.environ, stdout=log)
    try:
        deadline = time.monotonic() + 60
        while "Ready to accept connections" not in server.log():
            assert process.poll() is None, server.log()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield server
    finally:
        process.kill()
        process.wait()


def mount(certificates: Certificates, folder: Path) -> None:
    """Write a Secret with certificates where the pod mounts it."""
    for name, path in (("ca.crt", certificates.authority), ("tls.crt", certificates.certificate), ("tls.key", certificates.key)):
        (folder / name).write_bytes(path.read_bytes())


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Server]:
    with start(tmp_path) as server:
        yield server


def test_the_charts_redis_has_the_users_of_the_run(started: Server) -> None:
    mine, other = Keys("sums.1"), Keys("demo")
    for kind in acl.GRANTS:
        with started.login(f"sums.1.{kind}", started.passwords[kind]) as user:
            assert user.hgetall(mine.run) == {}
            with pytest.raises(redis.exceptions.NoPermissionError):
                user.hgetall(other.run)
            with pytest.raises(redis.exceptions.NoPermissionError):
                user.flushall()
    with started.login("default", started.passwords["redis-password"]) as everything:
        for kind in acl.GRANTS:
            held: Any = everything.acl_getuser(f"sums.1.{kind}")
            assert held["passwords"] == [acl.digest(started.passwords[kind])]
        everything.xgroup_create(mine.tickets, "generators", "0", mkstream=True)
    with started.login("sums.1.autoscaler", started.passwords["autoscaler"]) as keda:
        assert [group["name"] for group in keda.xinfo_groups(mine.tickets)] == [b"generators"]
    with started.login("default", "") as nobody, pytest.raises(redis.exceptions.AuthenticationError):
        nobody.execute_command("AUTH", "default", "")


@pytest.mark.skipif(not (shutil.which("openssl") and shutil.which("redis-cli")), reason="no openssl, or no redis-cli")
def test_the_charts_redis_loads_a_renewed_certificate_on_probe(tmp_path: Path) -> None:
    first, second, pod = (tmp_path / name for name in ("first", "second", "pod"))
    for folder in (first, second, pod):
        folder.mkdir()
    before, after = make_certificates(first), make_certificates(second)

    def reached() -> bool:
        try:
            return bool(started.login("default", started.passwords["redis-password"]).ping())
        except redis.ConnectionError:
            return False

    with start(pod, before) as started:
        started.probe()
        assert reached()
        mount(replace(after, key=before.key), pod / "tls")
        started.probe()
        mount(before, pod / "tls")
        assert reached(), "a certificate without its key is not loaded"
        assert "key values mismatch" in started.log()
        mount(after, pod / "tls")
        assert not reached()
        started.probe()
        assert reached()
        log = started.log()
        started.probe()
        assert started.log() == log, "it is loaded once"
