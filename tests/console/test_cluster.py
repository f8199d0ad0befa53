"""Commands on a release in a cluster, which run in a pod through a fake of the cluster's API."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import signal
import ssl
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import yaml

pytest.importorskip("kubernetes", reason="pip install 'grpo[cluster]'")
from aiohttp import web

from services.config import to_toml
from services.console.__main__ import main
from services.console.cluster.command import exit_code
from services.console.errors import ConsoleError
from services.console.run.redis_server import RedisServer
from services.runtime.process_tools import CONFIG_ENV, free_port
from services.store import Store
from tests.support.harness import small_config

TOKEN = "of-the-user"
PROTOCOL = "v4.channel.k8s.io"


def pod(name: str, component: str, ready: bool = True, phase: str = "Running", runs: bool = False) -> dict[str, Any]:
    labels = {"app.kubernetes.io/instance": "demo", "app.kubernetes.io/component": component}
    status = {"phase": phase, "conditions": [{"type": "Ready", "status": str(ready), "lastTransitionTime": None}]}
    volumes = [{"name": "config"}, *([{"name": "runs", "persistentVolumeClaim": {"claimName": "demo-runs"}}] if runs else [])]
    spec = {"containers": [{"name": component}], "volumes": volumes}
    return {"metadata": {"name": name, "labels": labels}, "spec": spec, "status": status}


class Cluster:
    """A fake of the API that lists pods and runs commands in them; here, they are processes with a pod's environment."""

    def __init__(self, folder: Path, environ: dict[str, str]) -> None:
        self.environ, self.executed = environ, list[tuple[str, str, list[str]]]()
        self.pods = [
            pod("demo-dataprep-b", "dataprep", ready=False),
            pod("demo-dataprep-c", "dataprep"),
            pod("demo-trainer-0", "trainer", runs=True),
        ]
        self.breaks, self.port = False, 0
        self.forwarded, self.listening = (
            list[tuple[str, int]](),
            dict[str, int](),
        )  # pod and port; pod -> port where it actually listens
        self.secrets: dict[str, dict[str, str]] = {}
        certificate, key = folder / "ca.crt", folder / "ca.key"
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
             "-keyout", str(key), "-out", str(certificate), "-subj", "/CN=kubernetes", "-addext", "subjectAltName=IP:127.0.0.1"],
            check=True, capture_output=True,
        )  # fmt: skip
        self._loop, self._up = asyncio.new_event_loop(), threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(certificate, key), daemon=True)
        self._thread.start()
        assert self._up.wait(30)
        clusters = [
            {"name": "west", "cluster": {"server": f"https://127.0.0.1:{self.port}", "certificate-authority": str(certificate)}}
        ]
        self.kubeconfig = folder / "kubeconfig"
        contexts = [
            {"name": name, "context": {"cluster": "west", "user": user, "namespace": "ml"}}
            for name, user in (("west", "me"), ("stranger", "nobody"))
        ]
        users = [{"name": "me", "user": {"token": TOKEN}}, {"name": "nobody", "user": {"token": "unknown"}}]
        written = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": clusters,
            "contexts": contexts,
            "users": users,
            "current-context": "west",
        }
        self.kubeconfig.write_text(yaml.safe_dump(written))

    def _serve(self, certificate: Path, key: Path) -> None:
        asyncio.set_event_loop(self._loop)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        app, runners = web.Application(), list[web.AppRunner]()
        app.router.add_get("/api/v1/namespaces/{namespace}/pods", self._list)
        app.router.add_get("/api/v1/namespaces/{namespace}/pods/{name}/exec", self._execute)
        app.router.add_get("/api/v1/namespaces/{namespace}/pods/{name}/portforward", self._forward)
        app.router.add_get("/api/v1/namespaces/{namespace}/secrets/{name}", self._secret)

        async def begin() -> None:
            runner = web.AppRunner(app)
            runners.append(runner)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
            await site.start()
            self.port = runner.addresses[0][1]

        async def end() -> None:
            await runners[0].cleanup()

        self._loop.run_until_complete(begin())
        self._loop.call_soon(self._up.set)  # in the loop that `close` stops, because a stop before the loop runs would be lost
        self._loop.run_forever()
        self._loop.run_until_complete(end())
        self._loop.close()

    async def _list(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return web.json_response({"kind": "Status", "message": "Unauthorized"}, status=401)
        wanted = dict(each.split("=") for each in request.query["labelSelector"].split(","))
        there = self.pods if request.match_info["namespace"] == "ml" else []
        found = [each for each in there if wanted.items() <= each["metadata"]["labels"].items()]
        return web.json_response({"kind": "PodList", "apiVersion": "v1", "items": found})

    async def _execute(self, request: web.Request) -> web.WebSocketResponse:
        assert request.headers["Authorization"] == f"Bearer {TOKEN}"
        socket = web.WebSocketResponse(protocols=[PROTOCOL])
        await socket.prepare(request)
        command = request.query.getall("command")
        assert command[:1] == ["env"]
        at = command.index("grpo")
        self.variables = dict(word.split("=") for word in command[1:at])
        self.executed.append((request.match_info["name"], request.query["container"], command[at + 1 :]))
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "services.console", *command[at + 1 :], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=os.environ | self.environ | self.variables,
        )  # fmt: skip
        out, err = await process.communicate()
        for channel, data in ((1, out), (2, err)):
            if data:
                await socket.send_bytes(bytes([channel]) + data)
        if not self.breaks:
            cause = {"reason": "ExitCode", "message": str(process.returncode)}
            failed = {"status": "Failure", "reason": "NonZeroExitCode", "details": {"causes": [cause]}}
            await socket.send_bytes(b"\x03" + json.dumps(failed if process.returncode else {"status": "Success"}).encode())
        await socket.close()
        return socket

    async def _forward(self, request: web.Request) -> web.WebSocketResponse:
        """Forward one port by the kubelet's protocol: each channel starts with the port. The pod listens on this machine."""
        socket, name = web.WebSocketResponse(protocols=[PROTOCOL]), request.match_info["name"]
        await socket.prepare(request)
        self.forwarded.append((name, int(request.query["ports"])))
        for channel in (0, 1):
            await socket.send_bytes(bytes([channel]) + int(request.query["ports"]).to_bytes(2, "little"))
        if name not in self.listening:
            await socket.send_bytes(b"\x01no route to the pod")
            await socket.close()
            return socket
        reader, writer = await asyncio.open_connection("127.0.0.1", self.listening[name])

        async def answers() -> None:
            while data := await reader.read(1000):
                await socket.send_bytes(b"\x00" + data)
            await socket.close()

        answering = asyncio.create_task(answers())
        async for message in socket:
            writer.write(message.data[1:])
        answering.cancel()
        writer.close()
        return socket

    async def _secret(self, request: web.Request) -> web.Response:
        held = self.secrets.get(request.match_info["name"])
        if held is None:
            return web.json_response({"kind": "Status", "message": "Forbidden"}, status=403)
        data = {key: base64.b64encode(value.encode()).decode() for key, value in held.items()}
        return web.json_response({"kind": "Secret", "apiVersion": "v1", "metadata": {"name": "demo-auth"}, "data": data})

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


@pytest.fixture
def cluster(store: Store, server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    config = small_config(tmp_path, server, f"run.name={store.keys.name}")
    tree = tomllib.loads(to_toml(config))
    del tree["fleet"]  # the chart's configuration omits sections without keys
    (tmp_path / "run.toml").write_bytes(msgspec.toml.encode(tree))
    found = Cluster(tmp_path, {CONFIG_ENV: str(tmp_path / "run.toml")})
    monkeypatch.setenv("KUBECONFIG", str(found.kubeconfig))
    yield found
    found.close()


async def test_commands_run_in_the_pod_that_has_what_they_need(
    cluster: Cluster, store: Store, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.run.create("config", "data", 4, 8)
    monkeypatch.setenv("LOGNAME", "me")

    async def grpo(*words: str) -> tuple[int, str, str]:
        code = await asyncio.to_thread(main, words)
        output = capfdbinary.readouterr()
        return code, output.out.decode(), output.err.decode()

    code, out, _ = await grpo("status", "--kube-context", "west", "demo", "--json")
    assert (code, json.loads(out)["state"]["steps"]) == (0, 4)
    assert cluster.variables == {"LOGNAME": "me"}, "COLUMNS would make tables look as on a terminal"
    with monkeypatch.context() as terminal:
        terminal.setattr(sys.stdout, "isatty", lambda: True)
        terminal.setenv("COLUMNS", "99")
        await grpo("status", "demo", "--kube-context", "west")
    assert (cluster.variables, cluster.executed.pop()[2]) == ({"LOGNAME": "me", "COLUMNS": "99"}, ["status"])
    code, out, _ = await grpo("pause", "demo", "--why", "demo", "--kube-context=west", "-n", "ml")
    assert code == 0
    state = await store.run.state()
    assert state is not None
    assert set(state.paused.values()) == {"me: demo"}
    code, out, _ = await grpo("--kube-context", "west", "scale", "generators", "3", "demo")
    assert code == 0
    code, out, err = await grpo("restore", "7", "demo", "--kube-context", "west")
    assert (code, "error: " in err) == (2, True)
    assert cluster.executed == [
        ("demo-dataprep-c", "dataprep", ["status", "--json"]),
        ("demo-dataprep-c", "dataprep", ["pause", "--why", "demo"]),
        ("demo-dataprep-c", "dataprep", ["scale", "generators", "3"]),
        ("demo-trainer-0", "trainer", ["restore", "7"]),
    ]
    code, out, err = await grpo("replay", "requeue", "demo", "1790000000000-0", "--kube-context", "west")
    assert (code, cluster.executed.pop()[2]) == (1, ["replay", "requeue", "1790000000000-0"]), err
    cluster.breaks = True
    code, _, err = await grpo("audit", "demo", "--kube-context", "west")
    assert (code, "ended before the command did" in err) == (1, True)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["status", "demo", "--kube-context", "east"], 2, "--kube-context east:"),
        (["status", "other", "--kube-context", "west"], 1, "release other has no running pod of its dataprep in namespace ml"),
        (["status", "demo", "--kube-context", "west", "-n", "none"], 1, "kubectl -n none get pods shows why"),
        (["status", "demo", "--kube-context", "stranger"], 1, "the cluster refused: 401"),
        (["status", "--kube-context", "west"], 2, "needs the name of a release"),
        (["init", "--kube-context", "west"], 2, "works on files of this machine"),
        (["web", "demo", "--kube-context", "west"], 1, "no running pod of its web console: set web.enabled = true"),
        (["web", "demo", "--redis-url", "redis://a", "--kube-context", "west"], 2, "leave out --redis-url"),
        (["logs", "-n", "5", "--kube-context", "west", "demo"], 2, "kubectl logs --prefix --selector"),
        (["samples", "other", "--kube-context", "west"], 1, "release other has no running pod of its trainer in namespace ml"),
        (["status", "demo", "--kube-context"], 2, "--kube-context needs a value"),
        (["status", "demo", "--kube-context", "west", "-n", "--json"], 2, "-n needs a value"),
        (["stauts", "demo", "--kube-context", "west"], 2, "stauts"),
    ],
)  # fmt: skip
def test_commands_that_cannot_run_in_a_pod_say_why(
    words: list[str], code: int, message: str, cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == code
    assert message in capsys.readouterr().err
    assert cluster.executed == []


TRAINER, LOADING = pod("demo-trainer-0", "trainer", runs=True), pod("demo-trainer-1", "trainer", ready=False, runs=True)
TRACKER, LOST = pod("demo-tracker-a", "tracker", runs=True), pod("demo-tracker-b", "tracker", phase="Failed", runs=True)
CONSOLE, BLIND = pod("demo-web-a", "web", runs=True), pod("demo-web-b", "web")
DATAPREP = pod("demo-dataprep-a", "dataprep")


@pytest.mark.parametrize(
    ("verb", "pods", "chosen"),
    [
        ("checkpoints", [CONSOLE, TRACKER, TRAINER], "demo-trainer-0"),
        ("checkpoints", [CONSOLE, TRACKER, LOADING], "demo-tracker-a"),
        ("checkpoints", [LOADING, BLIND], "demo-trainer-1"),
        ("samples", [BLIND, TRACKER, LOST], "demo-tracker-a"),
        ("cost", [LOST, BLIND, CONSOLE], "demo-web-a"),
        ("export", [CONSOLE, TRACKER, LOADING], "demo-trainer-1"),
    ],
)  # fmt: skip
def test_the_volume_is_read_in_a_pod_that_mounts_it(verb: str, pods: list[dict[str, Any]], chosen: str, cluster: Cluster) -> None:
    cluster.pods = [DATAPREP, *pods]
    main([verb, "demo", "--kube-context", "west"])
    assert [(name, container) for name, container, _ in cluster.executed] == [(chosen, chosen.split("-")[1])]


@pytest.mark.parametrize(("verb", "console_too"), [("samples", True), ("restore", False)])
def test_a_missing_pod_with_the_volume_has_a_remedy(
    verb: str, console_too: bool, cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.pods = [DATAPREP, LOST, BLIND]
    assert main([verb, *(["7"] if verb == "restore" else []), "demo", "--kube-context", "west"]) == 1
    errors = capsys.readouterr().err
    assert "kubectl -n ml scale statefulset/demo-trainer --replicas=1" in errors
    assert ("web.runs" in errors) == console_too
    assert cluster.executed == []


def test_a_status_without_an_exit_code_is_an_error() -> None:
    assert exit_code(b'{"status": "Success"}') == 0
    with pytest.raises(ConsoleError, match="no such file or directory"):
        exit_code(b'{"status": "Failure", "message": "exec: \\"grpo\\": no such file or directory"}')
    with pytest.raises(ConsoleError, match="did not run"):
        exit_code(b"[]")


def console_pod(name: str) -> dict[str, Any]:
    """Return a pod of the web console as the chart defines it, with a sidecar that the cluster injected."""
    made = pod(name, "web")
    probe = {"httpGet": {"path": "/health/ready", "port": "api", "scheme": "HTTP"}}
    made["spec"]["containers"][0] |= {"ports": [{"name": "api", "containerPort": 8080}], "readinessProbe": probe}
    made["spec"]["containers"].insert(0, {"name": "proxy"})
    tokens = {"name": "demo-auth", "items": [{"key": "api-token", "path": "api-token"}]}
    made["spec"]["volumes"] = [{"name": "tmp"}, {"name": "secrets", "projected": {"sources": [{"secret": tokens}]}}]
    return made


@contextlib.contextmanager
def page(name: str) -> Iterator[int]:
    """Yield the port of a server that returns its name, or the body of a POST request."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(name.encode())

        def do_POST(self) -> None:
            self.answer(self.rfile.read(int(self.headers["Content-Length"])))

        def answer(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


@contextlib.contextmanager
def grpo_web(*words: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, str]]]:
    """Run `grpo web demo --kube-context west --json`; yield the process and its decoded first line."""
    command = [sys.executable, "-m", "services.console", "web", "demo", "--kube-context", "west", "--json", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ) as process:
        assert process.stdout is not None
        try:
            yield process, json.loads(process.stdout.readline())
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0


def test_the_page_of_a_release_is_forwarded_and_follows_its_pod(cluster: Cluster) -> None:
    cluster.pods = [console_pod("demo-web-a")]
    cluster.secrets["demo-auth"] = {"api-token": "operates", "api-read-token": "reads"}
    body = os.urandom(1 << 20)
    with page("a") as first, page("b") as second, grpo_web() as (_, printed):
        cluster.listening = {"demo-web-a": first, "demo-web-b": second}
        url = printed["url"]
        assert (printed["control"], printed["view"]) == (f"{url}/#token=operates", f"{url}/#token=reads")
        with httpx.Client(timeout=60) as one, httpx.Client(timeout=60) as another:
            assert (one.get(url).text, another.get(url).text) == ("a", "a")
            assert one.post(url, content=body).content == body
        cluster.pods = [console_pod("demo-web-b")]
        assert httpx.get(url, timeout=60).text == "b"
        cluster.listening = {}
        with pytest.raises(httpx.HTTPError):
            httpx.get(url, timeout=60)
        cluster.listening = {"demo-web-b": second}
        assert httpx.get(url, timeout=60).text == "b", "one failed connection must not end the forwarding"
    assert set(cluster.forwarded) == {("demo-web-a", 8080), ("demo-web-b", 8080)}


def test_without_rights_to_the_tokens_the_secret_is_named(cluster: Cluster) -> None:
    cluster.pods = [console_pod("demo-web-a")]
    with grpo_web("--port", str(free_port(""))) as (_, printed):
        assert (printed["control"], printed["view"]) == ("", printed["url"])
        assert printed["note"] == "log in with a token of Secret demo-auth, which you may not read"


def test_a_port_in_use_is_rejected(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.pods = [console_pod("demo-web-a")]
    with page("a") as taken:
        assert main(["web", "demo", "--kube-context", "west", "--port", str(taken)]) == 2
    assert f"--port {taken}: cannot listen on 127.0.0.1 (Address already in use); choose another" in capsys.readouterr().err
