"""The part of a cluster's API that creates, changes, deletes and executes in pods, over TLS; pods are local processes.

A pod's processes are those that carry its uid in a variable; its disk is a folder, which is HOME there. Commands are executed by
the kubelet's protocol v4.channel.k8s.io. As on a node, a command keeps running when its connection ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import os
import secrets
import shutil
import signal
import ssl
import threading
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from aiohttp import WSMsgType, web

from tests.kubernetes.support.api_server import mount_account

ADDRESS, NAMESPACE, PROTOCOL = "127.0.0.1", "ml", "v4.channel.k8s.io"
MARK = "POD_CLUSTER_UID"
RUNNING = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}],
           "containerStatuses": [{"name": "sandbox", "state": {"running": {}}}]}  # fmt: skip
Pod = dict[str, Any]


class PodCluster:
    """A cluster with one namespace. `calls` holds the received verbs, by resource; `executed` the pods of commands."""

    def __init__(self, folder: Path, template: Pod) -> None:
        """Start the cluster. `folder`/account becomes the mount of a service account; `template` is the only PodTemplate."""
        self.folder, self.template = folder, {**template, "metadata": {**template["metadata"], "uid": secrets.token_hex(8)}}
        self.account, self._own = folder / "account", secrets.token_hex(4)
        self.token = mount_account(self.account, NAMESPACE, ADDRESS)
        self.pods, self.calls, self.executed = dict[str, Pod](), set[tuple[str, str]](), list[str]()
        self.start_s, self.away, self.stuck = 0.0, False, ""
        """How long pods take to start; whether every call fails; why pods are not scheduled."""
        self.before: Callable[[str, Pod], None] = lambda verb, pod: None
        """Called before a pod is changed."""
        self._version, self._sockets = 0, set[web.WebSocketResponse]()
        self._tasks, self._processes = set[asyncio.Task[None]](), list[asyncio.subprocess.Process]()
        self._loop, self._up, self.port = asyncio.new_event_loop(), threading.Event(), 0
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        assert self._up.wait(30)
        self.environ = {"KUBERNETES_SERVICE_HOST": ADDRESS, "KUBERNETES_SERVICE_PORT": str(self.port)}

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.account / "ca.crt", self.account.with_suffix(".key"))
        app, runners = web.Application(middlewares=[self._authorized]), list[web.AppRunner]()
        root = f"/api/v1/namespaces/{NAMESPACE}"
        app.router.add_get(f"{root}/podtemplates/{{name}}", self._template)
        app.router.add_get(f"{root}/pods", self._list)
        app.router.add_post(f"{root}/pods", self._create)
        app.router.add_get(f"{root}/pods/{{name}}", self._get)
        app.router.add_patch(f"{root}/pods/{{name}}", self._patch)
        app.router.add_delete(f"{root}/pods/{{name}}", self._delete)
        app.router.add_get(f"{root}/pods/{{name}}/exec", self._execute)

        async def begin() -> None:
            runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
            runners.append(runner)
            await runner.setup()
            await web.TCPSite(runner, ADDRESS, 0, ssl_context=context).start()
            self.port = runner.addresses[0][1]

        async def end() -> None:
            for name in list(self.pods):
                self._gone(name)
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await runners[0].cleanup()
            for process in self._processes:
                if process.returncode is None:
                    process.kill()
                await process.wait()

        self._loop.run_until_complete(begin())
        self._loop.call_soon(self._up.set)  # in the loop that `close` stops: a stop before it would be lost
        self._loop.run_forever()
        self._loop.run_until_complete(end())
        self._loop.close()

    def close(self) -> None:
        """Stop, and kill every pod."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def do(self, what: Callable[..., Any], *given: Any) -> Any:
        """Call a function in the cluster's thread."""

        async def called() -> Any:
            return what(*given)

        return asyncio.run_coroutine_threadsafe(called(), self._loop).result(30)

    def lose(self, name: str) -> None:
        """Lose a node: remove its pod from the API."""
        self.do(self._gone, name)

    def cut(self) -> None:
        """End every connection to a command."""

        async def close() -> None:
            for socket in list(self._sockets):
                assert socket._req is not None
                assert socket._req.transport is not None
                socket._req.transport.abort()

        asyncio.run_coroutine_threadsafe(close(), self._loop).result(30)

    def end(self, name: str, reason: str, message: str = "", container: str = "Error") -> None:
        """End a pod: with the container's reason, or evicted by the node if the pod has a reason."""

        def ended() -> None:
            pod = self.pods[name]
            status = {
                "phase": "Failed",
                "containerStatuses": [{"name": "sandbox", "state": {"terminated": {"reason": container}}}],
            }
            pod["status"] = {**status, **({"reason": reason, "message": message} if reason else {})}
            self._touched(pod)
            kill(pod["metadata"]["uid"])

        self.do(ended)

    def uninstall(self) -> None:
        """Delete the template; the garbage collector deletes what it owns."""

        def collect() -> None:
            uid = self.template["metadata"]["uid"]
            for name, pod in list(self.pods.items()):
                if uid in [each["uid"] for each in pod["metadata"]["ownerReferences"]]:
                    self._gone(name)

        self.do(collect)

    def held(self) -> list[str]:
        """Return the names of the pods held by rollouts."""
        return self.of_state("held")

    def processes(self) -> list[int]:
        """Return the processes of all pods."""
        return processes(f"{self._own}.")

    def of_state(self, state: str) -> list[str]:
        """Return the names of the pods in a state, by their label, that are not being deleted."""
        found = self.do(lambda: copy.deepcopy(list(self.pods.values())))
        here = [pod["metadata"] for pod in found if "deletionTimestamp" not in pod["metadata"]]
        return sorted(each["name"] for each in here if each["labels"].get("grpo/state") == state)

    @web.middleware
    async def _authorized(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if request.headers.get("Authorization", "").lower() != f"bearer {self.token}".lower():
            return _status(401, "Unauthorized")
        if self.away:
            return _status(500, "etcdserver: request timed out")
        return await handler(request)

    async def _template(self, request: web.Request) -> web.Response:
        self.calls.add(("get", "podtemplates"))
        return web.json_response(self.template) if request.match_info["name"] == self.template["metadata"]["name"] else _none()

    async def _list(self, request: web.Request) -> web.Response:
        self.calls.add(("list", "pods"))
        wanted = dict(each.split("=") for each in request.query["labelSelector"].split(","))
        found = [pod for _, pod in sorted(self.pods.items()) if wanted.items() <= pod["metadata"]["labels"].items()]
        first = int(request.query.get("continue") or 0)
        last = first + min(2, int(request.query["limit"]))  # short pages, as a server may return
        metadata = {"continue": str(last)} if last < len(found) else {}
        return web.json_response({"kind": "PodList", "apiVersion": "v1", "metadata": metadata, "items": found[first:last]})

    async def _get(self, request: web.Request) -> web.Response:
        self.calls.add(("get", "pods"))
        pod = self.pods.get(request.match_info["name"])
        return web.json_response(pod) if pod else _none()

    async def _create(self, request: web.Request) -> web.Response:
        self.calls.add(("create", "pods"))
        pod: Pod = await request.json()
        metadata = pod["metadata"]
        if metadata["name"] in self.pods:
            return _status(409, "already exists")
        metadata |= {
            "uid": f"{self._own}.{secrets.token_hex(8)}",
            "creationTimestamp": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        pod["status"] = {"phase": "Pending", "conditions": []}
        if self.stuck:
            placed = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": self.stuck}
            pod["status"]["conditions"].append(placed)
        self.pods[metadata["name"]] = self._touched(pod)
        answer = web.json_response(pod, status=201)
        if not self.stuck:
            self._begin(self._live(pod))
        return answer

    async def _patch(self, request: web.Request) -> web.Response:
        self.calls.add(("patch", "pods"))
        given = (await request.json())["metadata"]
        pod = self.pods.get(request.match_info["name"])
        if pod is None:
            return _none()
        self.before("patch", pod)
        if given.pop("resourceVersion") != pod["metadata"]["resourceVersion"]:
            return _status(409, "the object has been modified")
        for part in ("labels", "annotations"):
            pod["metadata"][part] |= given.get(part, {})
        return web.json_response(self._touched(pod))

    async def _delete(self, request: web.Request) -> web.Response:
        self.calls.add(("delete", "pods"))
        only = (await request.json())["preconditions"]
        pod = self.pods.get(request.match_info["name"])
        if pod is None:
            return _none()
        if any(pod["metadata"][key] != value for key, value in only.items()):
            return _status(409, "the precondition failed")
        if "deletionTimestamp" not in pod["metadata"]:
            pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
            self._touched(pod)
            self._begin(self._terminate(pod))
        return web.json_response(pod)

    async def _execute(self, request: web.Request) -> web.StreamResponse:
        self.calls |= {("get", "pods/exec"), ("create", "pods/exec")}  # the latter for websockets since Kubernetes 1.35
        pod = self.pods.get(request.match_info["name"])
        if pod is None:
            return _none()
        if pod["status"]["phase"] != "Running" or request.query["container"] != "sandbox":
            return _status(500, "container not found")
        socket = web.WebSocketResponse(protocols=[PROTOCOL])
        await socket.prepare(request)
        self.executed.append(pod["metadata"]["name"])
        process = await asyncio.create_subprocess_exec(
            *request.query.getall("command"), **self._place(pod),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        self._processes.append(process)
        self._sockets.add(socket)
        feeding = asyncio.ensure_future(_feed(socket, process))
        try:
            await asyncio.gather(_pump(socket, process.stdout, 1), _pump(socket, process.stderr, 2))
            code = await process.wait()
            cause = {"reason": "ExitCode", "message": str(code)}
            failed = {"status": "Failure", "reason": "NonZeroExitCode", "details": {"causes": [cause]}}
            with contextlib.suppress(ConnectionError):
                await socket.send_bytes(b"\x03" + json.dumps(failed if code else {"status": "Success"}).encode())
            await socket.close()
        finally:
            feeding.cancel()
            self._sockets.discard(socket)
        return socket

    def _place(self, pod: Pod) -> dict[str, Any]:
        """Return the folder in which a pod's processes run."""
        uid = pod["metadata"]["uid"]
        disk = self.folder / "disks" / uid
        disk.mkdir(parents=True, exist_ok=True)
        return {"env": {"PATH": os.environ["PATH"], "HOME": str(disk), MARK: uid}, "cwd": disk, "start_new_session": True}

    async def _live(self, pod: Pod) -> None:
        """Start a pod, and wait for its main process to exit."""
        await asyncio.sleep(self.start_s)
        metadata, container = pod["metadata"], pod["spec"]["containers"][0]
        if self.pods.get(metadata["name"]) is not pod or "deletionTimestamp" in metadata:
            return
        process = await asyncio.create_subprocess_exec(*container["command"], **self._place(pod))
        self._processes.append(process)
        pod["status"] = copy.deepcopy(RUNNING)
        self._touched(pod)
        try:
            await process.wait()
        finally:
            kill(metadata["uid"])
        if self.pods.get(metadata["name"]) is pod and pod["status"]["phase"] == "Running":
            ended = {"name": "sandbox", "state": {"terminated": {"reason": "Error"}}}
            pod["status"] = {"phase": "Failed", "containerStatuses": [ended]}
            self._touched(pod)

    async def _terminate(self, pod: Pod) -> None:
        await asyncio.sleep(0.05)
        if self.pods.get(pod["metadata"]["name"]) is pod:
            self._gone(pod["metadata"]["name"])

    def _gone(self, name: str) -> None:
        pod = self.pods.pop(name)
        kill(pod["metadata"]["uid"])
        shutil.rmtree(self.folder / "disks" / pod["metadata"]["uid"], ignore_errors=True)

    def _touched(self, pod: Pod) -> Pod:
        self._version += 1
        pod["metadata"]["resourceVersion"] = str(self._version)
        return pod

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _feed(socket: web.WebSocketResponse, process: asyncio.subprocess.Process) -> None:
    """Feed a command from channel 0."""
    assert process.stdin is not None
    with contextlib.suppress(ConnectionError):
        async for message in socket:
            if message.type is WSMsgType.BINARY and message.data[:1] == b"\x00":
                process.stdin.write(message.data[1:])
                await process.stdin.drain()


async def _pump(socket: web.WebSocketResponse, stream: asyncio.StreamReader | None, channel: int) -> None:
    assert stream is not None
    with contextlib.suppress(ConnectionError):
        await socket.send_bytes(bytes([channel]))  # as a kubelet does, when the stream is open
    while data := await stream.read(32 << 10):
        with contextlib.suppress(ConnectionError):  # a command keeps running when its connection ends
            await socket.send_bytes(bytes([channel]) + data)


def processes(uid: str = "") -> list[int]:
    """Return the processes of a pod, or of all pods whose uid starts with this."""
    found: list[int] = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                if f"{MARK}={uid}".encode() in Path(f"/proc/{name}/environ").read_bytes():
                    found.append(int(name))
    return found


def kill(uid: str) -> None:
    """Kill the processes of a pod, including those that start meanwhile."""
    while found := processes(uid):
        for process in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def _status(code: int, message: str) -> web.Response:
    return web.json_response({"kind": "Status", "message": message, "code": code}, status=code)


def _none() -> web.Response:
    return _status(404, "not found")
