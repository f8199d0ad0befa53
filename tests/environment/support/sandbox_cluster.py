"""A cluster as k8s-agent-sandbox sees it: claims, the sandboxes that they get, and in each the runtime that executes commands."""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web
from k8s_agent_sandbox.async_sandbox_client import AsyncSandboxClient
from k8s_agent_sandbox.models import SandboxInClusterConnectionConfig
from kubernetes_asyncio.client import ApiClient, Configuration

from services.environment.programs.cluster_sandbox import ClusterSandboxes

CLAIMS = "/apis/extensions.agents.x-k8s.io/v1beta1/namespaces/sandboxes/sandboxclaims"
SANDBOXES = "/apis/agents.x-k8s.io/v1beta1/namespaces/sandboxes/sandboxes"


@dataclass
class SandboxCluster:
    """A cluster with one sandbox at a time, whose files are in `folder`."""

    folder: Path
    pools: set[str] = field(default_factory=lambda: {"python"})
    claims: dict[str, Any] = field(default_factory=dict[str, Any])
    calls: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    """Verb and resource of every request to the API."""
    commands: int = 0
    """Number of commands that the runtime has begun."""
    broken: bool = False
    """Whether the runtime loses the connection of each command."""
    port: int = 0
    clients: list[ApiClient] = field(default_factory=list[ApiClient])

    def sandboxes(self, pool: str = "python") -> ClusterSandboxes:
        """Return a worker's client of this cluster."""
        self.clients.append(ApiClient(Configuration(host=f"http://127.0.0.1:{self.port}")))
        config = SandboxInClusterConnectionConfig(server_port=self.port)
        client = AsyncSandboxClient(config, cleanup=False, api_client=self.clients[-1])
        return ClusterSandboxes(client, pool, "sandboxes")

    async def create(self, request: web.Request) -> web.Response:
        self.calls.add(("create", "sandboxclaims"))
        claim = await request.json()
        name, pool = claim["metadata"]["name"], claim["spec"]["warmPoolRef"]["name"]
        ready = {"type": "Ready", "status": "True"}
        missing = {"type": "Ready", "status": "False", "reason": "WarmPoolNotFound", "message": f"no pool {pool}"}
        claim["metadata"] |= {"uid": name, "resourceVersion": "1"}
        known = pool in self.pools
        claim["status"] = {"conditions": [ready if known else missing], "sandbox": {"name": "sandbox-1"} if known else {}}
        self.claims[name] = claim
        return web.json_response(claim, status=201)

    async def watch(self, request: web.Request) -> web.StreamResponse:
        self.calls |= {("list", "sandboxclaims"), ("watch", "sandboxclaims")}
        name = request.query["fieldSelector"].removeprefix("metadata.name=")
        answer = web.StreamResponse(headers={"Content-Type": "application/json"})
        await answer.prepare(request)
        await answer.write(json.dumps({"type": "ADDED", "object": self.claims[name]}).encode() + b"\n")
        return answer

    async def delete(self, request: web.Request) -> web.Response:
        self.calls.add(("delete", "sandboxclaims"))
        found = self.claims.pop(request.match_info["name"], None)
        return web.json_response(found or {}, status=200 if found else 404)

    async def get(self, request: web.Request) -> web.Response:
        self.calls.add(("get", "sandboxes"))
        return web.json_response({"metadata": {"name": "sandbox-1"}, "status": {"podIPs": ["127.0.0.1"]}})

    async def upload(self, request: web.Request) -> web.Response:
        part = (await request.post())["file"]
        assert isinstance(part, web.FileField)
        (self.folder / part.filename).write_bytes(part.file.read())
        return web.json_response({})

    async def execute(self, request: web.Request) -> web.Response:
        """Run a command as the project's runtime for Python does."""
        self.commands += 1
        if self.broken and request.transport:
            request.transport.close()
        command = shlex.split((await request.json())["command"])
        process = await asyncio.create_subprocess_exec(*command, cwd=self.folder, stdout=-1, stderr=-1)
        out, errors = await process.communicate()
        return web.json_response({"stdout": out.decode(), "stderr": errors.decode(), "exit_code": process.returncode})


@asynccontextmanager
async def sandbox_cluster(folder: Path) -> AsyncIterator[SandboxCluster]:
    """Serve a cluster."""
    cluster = SandboxCluster(folder)
    app = web.Application()
    app.router.add_post(CLAIMS, cluster.create)
    app.router.add_get(CLAIMS, cluster.watch)
    app.router.add_delete(CLAIMS + "/{name}", cluster.delete)
    app.router.add_get(SANDBOXES + "/{name}", cluster.get)
    app.router.add_post("/upload", cluster.upload)
    app.router.add_post("/execute", cluster.execute)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    (address,) = runner.addresses
    cluster.port = address[1]
    try:
        yield cluster
    finally:
        for client in cluster.clients:
            await client.close()
        await runner.cleanup()
