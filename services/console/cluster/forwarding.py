"""Serves the web console of a release on this machine, for `grpo web --kube-context CONTEXT -n NAMESPACE RELEASE`.

Guarantees: every connection to the local port is passed on through the cluster's API to a pod of the release's web console, as
`kubectl port-forward` does, and once that pod is gone, to the next one. The tokens for the login links are read from the
release's Secret if the user may read it, and from nowhere else.
Waits for: connections, and data on them. Unblocked by: Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.console.cluster.access import chosen, opened, pods_of
from services.console.errors import EXIT_CONFIG, EXIT_FAILED, EXIT_OK, ConsoleError
from services.http.credentials import ApiTokens

COMPONENT = "web"
DATA, ERROR = 0, 1
"""Channels of the protocol for a single port (v4.channel.k8s.io): the first byte of each message."""
CHUNK = 64 << 10


@dataclass(frozen=True)
class ConsolePod:
    """A pod of the web console."""

    name: str
    port: int
    scheme: str
    secret: str
    """Name of the Secret with the tokens; empty: it has none."""

    @classmethod
    def of(cls, pod: Any) -> ConsolePod:
        """Return the pod's manifest."""
        container = next(each for each in pod.spec.containers if each.name == COMPONENT)  # others may have been injected
        port = next(each.container_port for each in container.ports if each.name == "api")
        sources = (source for volume in pod.spec.volumes or [] if volume.projected for source in volume.projected.sources)
        secrets = (
            source.secret.name
            for source in sources
            if source.secret and any(item.key == "api-token" for item in source.secret.items or [])
        )
        return cls(pod.metadata.name, port, str(container.readiness_probe.http_get.scheme).lower(), next(secrets, ""))


class Forwarder:
    """Passes connections on to the web console of a release."""

    def __init__(self, configuration: Any, namespace: str, release: str) -> None:
        self._configuration, self._namespace, self._release = configuration, namespace, release
        self._connections = set[asyncio.Task[None]]()

    async def pod(self) -> ConsolePod:
        """Return the pod to connect to. Raises `ConsoleError` if there is none."""
        pods = await pods_of(self._configuration, self._namespace, self._release)
        place = chosen(pods, (COMPONENT,))
        if place is None:
            raise ConsoleError(
                f"release {self._release} has no running pod of its web console: set web.enabled = true and upgrade, or see "
                f"kubectl -n {self._namespace} get pods",
                EXIT_FAILED,
            )
        return ConsolePod.of(next(pod for pod in pods if pod.metadata.name == place[1]))

    async def tokens(self, secret: str) -> ApiTokens | None:
        """Return the release's tokens, or None if the user may not read its Secret."""
        from kubernetes.aio.client.api.core_v1_api import CoreV1Api
        from kubernetes.aio.client.api_client import ApiClient
        from kubernetes.aio.client.exceptions import ApiException

        if not secret:
            return None
        async with ApiClient(self._configuration) as client:
            core: Any = CoreV1Api(client)
            try:
                held: Mapping[str, str] = (await core.read_namespaced_secret(secret, self._namespace)).data or {}
            except ApiException:
                return None
        named = {name: base64.b64decode(held.get(name, "")).decode() for name in ("api-token", "api-read-token")}
        return ApiTokens(named["api-token"], named["api-read-token"]) if named["api-token"] else None

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection to the local port."""
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            await self._forward(reader, writer)
        except Exception as error:  # the client's or the server's: a new connection reaches the next pod
            print(f"a connection to the web console ended: {error or type(error).__name__}", file=sys.stderr, flush=True)
        finally:
            self._connections.discard(task)
            writer.close()

    async def close(self) -> None:
        """End all connections."""
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pod = await self.pod()
        path = f"/api/v1/namespaces/{self._namespace}/pods/{pod.name}/portforward"
        async with opened(self._configuration, path, [("ports", str(pod.port))]) as socket:
            sending = asyncio.create_task(_send(reader, socket))
            try:
                await _receive(socket, writer)
            finally:
                sending.cancel()
                with contextlib.suppress(asyncio.CancelledError, ConnectionError):
                    await sending


async def _send(reader: asyncio.StreamReader, socket: Any) -> None:
    while data := await reader.read(CHUNK):
        await socket.send_bytes(bytes([DATA]) + data)
    await socket.close()


async def _receive(socket: Any, writer: asyncio.StreamWriter) -> None:
    """Write what comes. Raises `ConsoleError` if the pod refuses the connection."""
    begun = set[int]()
    async for message in socket:
        channel, data = message.data[0], message.data[1:]
        if channel not in begun:  # its first message has the number of the port
            begun.add(channel)
            data = data[2:]
        if channel == ERROR and data:
            raise ConsoleError(data.decode(errors="replace"), EXIT_FAILED)
        if channel == DATA and data:
            writer.write(data)
            await writer.drain()


async def serve(configuration: Any, namespace: str, release: str, given: Mapping[str, Any]) -> int:
    """Serve the page until Ctrl-C. `given` has the options of `grpo web`. Raises `ConsoleError`."""
    from services.console.commands.web import interrupted, links_of, shown
    from services.console.printable import print_json

    forwarder = Forwarder(configuration, namespace, release)
    pod, told = await forwarder.pod(), interrupted()
    tokens = await forwarder.tokens(pod.secret)
    host = given["host"] or "127.0.0.1"
    try:
        server = await asyncio.start_server(forwarder.connected, host, given["port"])
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else str(error)
        raise ConsoleError(
            f"--port {given['port']}: cannot listen on {host} ({why}); choose another port, or 0 for a free one", EXIT_CONFIG
        ) from None
    async with server:
        url = f"{pod.scheme}://{host}:{server.sockets[0].getsockname()[1]}"
        links = links_of(url, tokens) if tokens else {"url": url, "control": "", "view": url}
        note = "" if tokens else f"log in with a token of Secret {pod.secret}, which you may not read"
        if given["as_json"]:
            print_json({"run": release, **links, "note": note}, line=True)
        else:
            print(f"release {release}{f': {note}' if note else ''}", *shown(links), sep="\n  ", flush=True)
        await told.wait()
        server.close()
        await forwarder.close()
    return EXIT_OK
