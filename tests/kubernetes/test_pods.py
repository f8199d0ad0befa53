"""A release as real processes: every rendered pod in a separate namespace, with its user, mounts, environment, probes and hooks.

Redis is real, the scripted engine generates the tokens, and two trainer nodes train with one rank each.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import TypeAdapter

from services.config import to_toml
from services.config.root import Api
from services.http.asking import Unanswered, ask
from services.http.models import State
from services.store import RunState
from tests.kubernetes.support import chart, network
from tests.kubernetes.support.cluster import Cluster
from tests.support.harness import save_model_folder, small_config
from tests.support.servers.certificates import make_certificates

pytest.importorskip("helm_python", reason="the extra `dev` has Helm: pip install helm-python-sdk")
WHY_NOT = network.reason_against()
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]


def values(folder: Path) -> dict[str, Any]:
    """Return the values of a run that lasts until it is stopped."""
    import tomllib

    config = small_config(
        folder, None, "run.steps=100000", "generator.engine_options.token_s=0.1", "checkpoint.every_steps=5",
        'verifiers=[{kind="regex", pattern="[0-4]"}]', "generator.drain_s=60", "data.curriculum=in_order",
        "samples.keep=1000",
    )  # fmt: skip
    given = tomllib.loads(to_toml(config))
    for section, keys in (
        ("run", ["dir", "name"]),
        ("redis", None),
        ("api", None),
        ("web", None),
        ("sync", ["host"]),
        ("fleet", ["scaling"]),
        ("trainer", ["ranks"]),
    ):
        given[section] = {} if keys is None else {key: value for key, value in given[section].items() if key not in keys}
    given = {section: keys for section, keys in given.items() if keys}
    given["generator"].pop("count")
    given["model"]["path"] = "/srv/grpo/models/tiny"
    given["data"]["sources"] = [{"kind": "jsonl", "path": "/srv/grpo/data/data.jsonl"}]
    return {
        "accelerator": "none",
        "config": given,
        "trainer": {"nodes": 2, "graceSeconds": 60},
        "redis": {"maxMemoryMiB": 256},
        "web": {"enabled": True, "runs": True},
        "tls": {"apiSecret": "api-tls", "redisSecret": "redis-tls"},
        "storage": {
            "runs": {"accessMode": "ReadWriteMany"},
            "models": {"enabled": True},
            "data": {"existingClaim": "prompts"},
        },
    }


def certificate(folder: Path, subject_names: str) -> dict[str, bytes]:
    """Return the Secret that cert-manager would create."""
    folder.mkdir()
    made = make_certificates(folder, subject_names)
    files = {"tls.crt": made.certificate, "tls.key": made.key, "ca.crt": made.authority}
    return {key: path.read_bytes() for key, path in files.items()}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Yield a starting release with TLS everywhere."""
    secrets = {f"{of}-tls": certificate(tmp_path / of, f"DNS:demo-{of}.ml.svc.cluster.local") for of in ("api", "redis")}
    made = Cluster(chart.render(values(tmp_path / "small")), tmp_path, secrets)
    try:
        volumes = made.held.folder
        save_model_folder(volumes / "demo-models" / "tiny")
        (volumes / "prompts").mkdir()
        (tmp_path / "small" / "data.jsonl").rename(volumes / "prompts" / "data.jsonl")
        subprocess.run(["chmod", "-R", "a+rX", str(tmp_path)], check=True)
        made.start()
        yield made
    finally:
        made.close()


STAYING = ("redis", "dataprep", "scaler", "tracker", "web")
"""Components whose pods stay after the run has finished."""

NOT_THERE = ("nsenter: cannot open", "sh: 1: cd: can't cd to", "setpriv: failed to execute")
"""Errors while a process or its files do not exist yet."""


def grpo(cluster: Cluster, *words: str, code: int = 0, component: str = "dataprep") -> str:
    """Run `kubectl exec deploy/demo-dataprep -- grpo …`; return its output."""
    deadline = time.monotonic() + 60.0
    while True:
        done = cluster.of(component)[0].execute(["grpo", *words], 300)
        if not done.stderr.startswith(NOT_THERE) or time.monotonic() > deadline:
            break
        time.sleep(0.2)  # the container has just exited and is being restarted
    assert done.returncode == code, done.stdout + done.stderr + cluster.words()
    return done.stdout


def page(cluster: Cluster) -> str:
    trusted = ssl.create_default_context(cafile=str(cluster.folder / "api" / "ca.pem"))
    url = f"https://{cluster.of('web')[0].address}:8080/"
    with httpx.Client(verify=trusted, timeout=30) as http:
        return http.get(url, extensions={"sni_hostname": "demo-api.ml.svc.cluster.local"}).raise_for_status().text


def dataprep(
    cluster: Cluster, path: str, method: str = "GET", body: Any = None, server_name: str = "demo-api.ml.svc.cluster.local"
) -> dict[str, Any]:
    """Send a request to dataprep, whose certificate names a host, not an address."""
    token = cluster.held.secrets["demo-auth"]["api-token"].decode()
    api = Api(ca_file=str(cluster.folder / "api" / "ca.pem"))
    url = f"https://{cluster.of('dataprep')[0].address}:8080{path}"
    return ask(api, method, url, token=token, body=body, server_name=server_name)


def state(cluster: Cluster) -> RunState | None:
    """Return the run's state as dataprep reports it; None if it is unreachable, for example while its container restarts."""
    with contextlib.suppress(Unanswered):
        return TypeAdapter(State).validate_python(dataprep(cluster, "/v1/state")).state
    return None


def goes_on(cluster: Cluster, what: str, limit_s: float = 200.0) -> None:
    """Wait until the run has trained two more steps."""
    committed = list[int]()

    def trained() -> bool:
        if (now := state(cluster)) is not None:
            committed.append(now.committed_step)
        return bool(committed) and committed[-1] >= committed[0] + 2

    cluster.wait(trained, what, limit_s)


def known(cluster: Cluster, true: Callable[[RunState], object]) -> Callable[[], object]:
    """Return a condition on the run's state, for `Cluster.wait`."""
    return lambda: (now := state(cluster)) is not None and true(now)


def test_a_release_trains_scales_and_loses_nothing(cluster: Cluster) -> None:
    for component in (*STAYING, "trainer", "generator"):
        cluster.wait(lambda component=component: not cluster.ready(component), f"{component} is not ready", 400)
    starts = {name: len(pod.codes) for name, pod in [*cluster.pods.items()]}  # some containers retried until Redis was reachable

    # helm test
    (smoke,) = chart.of_kind(cluster.objects, "Pod")
    code, printed = cluster.run(smoke)
    assert code == 0, printed + cluster.words()
    for words in ("can log in: console", "All checks passed", "trained 3 more steps, no ticket lost"):
        assert words in printed, printed
    for component in ("dataprep", "trainer", "generator", "web"):
        assert re.search(rf"\b(ok|note) +{component} +demo-{component}", printed), printed  # a generator may be in a sync round

    # The page of the web console, whose certificate names a host, not an address
    assert "<title>" in page(cluster)

    # grpo scale: the request reaches the Deployment
    grpo(cluster, "scale", "generators", "2", "--why", "a test")
    cluster.wait(lambda: len(cluster.of("generator")) == 2 and not cluster.ready("generator"), "there are no two generators", 400)

    # kubectl scale: the Deployment's number becomes the request, and the pod drains
    leaving = cluster.of("generator")[1].name
    cluster.api.scale(1)
    cluster.wait(lambda: leaving in cluster.gone, "the second generator does not go", 200)
    assert cluster.gone[leaving][-1] == 0, "a drain completes within the grace period"
    cluster.wait(known(cluster, lambda now: now.scale.wanted == 1), "the request does not follow kubectl scale")
    goes_on(cluster, "it does not go on after scaling")

    # The trainer's pre-stop hook
    trainer = cluster.of("trainer")[0]
    saved = trainer.execute(trainer.container["lifecycle"]["preStop"]["exec"]["command"], 60)
    assert saved.returncode == 0, saved.stdout + saved.stderr

    # A node of the trainer is lost: both ranks reconnect and resume
    os.kill(cluster.of("trainer")[1].main, signal.SIGKILL)
    goes_on(cluster, "the trainer does not go on without a node", 400)
    restarted = {name for name, pod in list(cluster.pods.items()) if len(pod.codes) > starts.get(name, 0) and not pod.leaving}
    assert restarted == {"demo-trainer-0", "demo-trainer-1"}, cluster.words()

    grpo(cluster, "stop", "--why", "seen enough")
    cluster.wait(known(cluster, lambda now: now.finished), "the run does not end", 300)
    assert json.loads(grpo(cluster, "status", "--json"))["state"]["finished"]
    account = json.loads(grpo(cluster, "audit", "--json"))
    assert (account["lost"], account["doubled"]) == (0, 0)
    exported = cluster.held.folder / "demo-runs" / "demo" / "model" / "model.safetensors"
    assert exported.stat().st_size > 0

    # Pods of a finished run free their GPUs; the others stay ready, as required by an upgrade that waits for them
    cluster.wait(lambda: not cluster.of("trainer") and not cluster.of("generator"), "trainer and generators do not go", 200)
    cluster.wait(lambda: {"demo-trainer-0", "demo-trainer-1"} <= cluster.gone.keys(), "the trainer does not end", 200)
    started_again = {128 + signal.SIGTERM, -signal.SIGKILL}  # it had finished, and was terminated before it had a signal handler
    for name, (*before, last) in cluster.gone.items():
        assert "trainer" not in name or last == 0 or (last in started_again and before[-1:] == [0]), cluster.gone

    for component in STAYING:
        cluster.wait(lambda component=component: not cluster.ready(component), f"{component} is not ready after the end", 200)
    cluster.wait(lambda: cluster.of("tracker")[0].codes[-1:] == [0], "the tracker does not begin to rest", 200)
    cluster.wait(lambda: not cluster.ready("tracker"), "the tracker is not ready while it rests", 200)
    assert not cluster.of("dataprep")[0].codes[starts[cluster.of("dataprep")[0].name] :], "dataprep must not restart"

    # The volume is read in a pod that mounts it, now that the trainer is gone
    for component in ("tracker", "web"):
        assert json.loads(grpo(cluster, "checkpoints", "--json", component=component))["checkpoints"]
        assert json.loads(grpo(cluster, "samples", "--json", component=component))["rows"]
        assert json.loads(grpo(cluster, "cost", "--json", component=component))
    paths = (cluster.api.generators.path, cluster.api.trainer.path, cluster.api.config_map)
    assert cluster.api.calls == {(verb, path) for verb in ("get", "patch") for path in paths}
    assert dataprep(cluster, "/v1/state")["pod"]["kind"] == "dataprep"
    assert dataprep(cluster, "/v1/audit")["lost"] == 0
    with pytest.raises(Unanswered, match="the run has already finished"):
        dataprep(cluster, "/v1/fleet/generators", "POST", {"replicas": 2})
    with pytest.raises(Unanswered, match="cannot be reached"):
        dataprep(cluster, "/v1/state", server_name="")
