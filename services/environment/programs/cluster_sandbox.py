"""The tool `python` of one rollout on a cluster: runs code that the policy writes in a sandbox of kubernetes-sigs/agent-sandbox.

Guarantees: every rollout has a sandbox of its own, claimed with its first call and deleted at its end; one that outlives its
worker process is deleted by the cluster after `LIFE_S`. No call is sent twice. What the code does (it runs too long, prints too
much, ends its process) is the reply to the policy; a sandbox that cannot be claimed or reached fails the rollout, which starts
again.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import os
import shlex
from typing import TYPE_CHECKING, Any

from services.confined import script
from services.environment.programs.code_tool import LOUD, SLOW, PythonTool, code_of, signal_name, told
from services.environment.programs.loaded import BadReply
from services.runtime.own_code import Unusable

if TYPE_CHECKING:
    from k8s_agent_sandbox.async_sandbox import AsyncSandbox
    from k8s_agent_sandbox.async_sandbox_client import AsyncSandboxClient

POOL_ENV, NAMESPACE_ENV = "AGENT_SANDBOX_POOL", "AGENT_SANDBOX_NAMESPACE"
"""Variables with the name of the SandboxWarmPool from which sandboxes are claimed, and its namespace. Without a pool, code runs
in a confined process."""
INSTALL = "k8s-agent-sandbox[async]>=1.0.8,<2"
LIFE_S = 6 * 3600
"""Seconds after which the cluster deletes a sandbox, whoever uses it: longer than a rollout takes."""
CALL_MARGIN_S = 30
"""Seconds beyond the code's own for its result to arrive."""
CODE, OUTPUT = ".grpo-code.py", ".grpo-output"
RUN = f"""
import json, os, signal, subprocess, sys
with open({OUTPUT!r}, "wb+") as out:
    process = subprocess.Popen(
        [sys.executable, "-I", "-B", {CODE!r}], stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
    )
    try:
        status = process.wait(float(sys.argv[1]))
    except subprocess.TimeoutExpired:
        status = None
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    size = out.seek(0, 2)
    out.seek(0)
    print(json.dumps([out.read({script.KEPT_BYTES}).decode(errors="replace"), size, status]))
"""
"""What runs in the sandbox for each call: the code, in a process whose group ends with the call."""


class SandboxLost(BadReply):
    """A sandbox could not be claimed or reached: the rollout fails, and starts again."""


class ClusterSandboxes:
    """A worker process's client of the sandboxes of a cluster."""

    def __init__(self, client: AsyncSandboxClient[AsyncSandbox], pool: str, namespace: str) -> None:
        self._client, self._pool, self._namespace = client, pool, namespace

    async def claim(self, limit_s: float) -> AsyncSandbox:
        """Return a fresh sandbox. Raises whatever the library raises."""
        return await self._client.create_sandbox(self._pool, self._namespace, math.ceil(limit_s), shutdown_after_seconds=LIFE_S)

    async def delete(self, sandbox: AsyncSandbox) -> None:
        """Delete a sandbox. The library logs why one cannot be deleted; `LIFE_S` then ends it."""
        if sandbox.claim_name:
            await self._client.delete_sandbox(sandbox.claim_name, self._namespace)

    async def close(self) -> None:
        """Delete the sandboxes that are left, and close the connections."""
        await self._client.delete_all()
        await self._client.close()


def on_cluster() -> bool:
    """Return whether the environment variables name a pool of sandboxes."""
    return bool(os.environ.get(POOL_ENV))


def connected() -> ClusterSandboxes:
    """Return the client of the sandboxes that the environment variables name. Raises `Unusable` without the library."""
    try:
        from k8s_agent_sandbox.async_sandbox_client import AsyncSandboxClient
        from k8s_agent_sandbox.models import SandboxInClusterConnectionConfig
    except ModuleNotFoundError as error:
        raise Unusable(f"{POOL_ENV} needs the library {error.name}: run python -m pip install '{INSTALL}'") from None
    client: AsyncSandboxClient[AsyncSandbox] = AsyncSandboxClient(SandboxInClusterConnectionConfig(), cleanup=False)
    return ClusterSandboxes(client, os.environ[POOL_ENV], os.environ.get(NAMESPACE_ENV, "default"))


class SandboxTool(PythonTool):
    """Runs the code in the rollout's own sandbox."""

    def __init__(self, limit_s: float, cluster: ClusterSandboxes, claim_limit_s: float) -> None:
        """`limit_s` is the time limit of a call, `claim_limit_s` the limit for the wait for a sandbox."""
        self._limit_s, self._cluster, self._claim_limit_s = limit_s, cluster, claim_limit_s
        self._sandbox: AsyncSandbox | None = None
        self._closed = False

    async def call(self, arguments: object) -> str:
        """Return the code's output, or the fault. Raises `SandboxLost`."""
        code, wrong = code_of(arguments)
        if wrong or self._closed:
            return wrong or "Error: the rollout has ended"
        lost = f"no sandbox within {self._claim_limit_s:g} s"
        try:
            self._sandbox = self._sandbox or await self._cluster.claim(self._claim_limit_s)
            lost = "the sandbox was lost during a call"
            return await self._run(self._sandbox, code)
        except Exception as error:  # the library's own errors, and those of its clients of Kubernetes and HTTP
            raise SandboxLost(f"{lost}: {error!r}"[:500]) from None

    async def _run(self, sandbox: AsyncSandbox, code: str) -> str:
        assert sandbox.files is not None, "the sandbox is open"
        assert sandbox.commands is not None, "the sandbox is open"
        code = code.encode("utf-8", "replace").decode()
        await sandbox.files.write(CODE, f"{inspect.getsource(script)}\n\nrun({code!r})\n")
        command = shlex.join(("python3", "-I", "-B", "-c", RUN, str(self._limit_s)))
        async with asyncio.timeout(self._limit_s + CALL_MARGIN_S):
            done = await sandbox.commands.run(command, timeout=math.ceil(self._limit_s) + CALL_MARGIN_S)
        try:
            output, size, status = json.loads(done.stdout)
            fault = SLOW if status is None else LOUD if size > script.OUTPUT_BYTES else signal_name(-status) if status < 0 else ""
            return told(str(output)[: script.KEPT_BYTES], fault, self._limit_s)
        except (ValueError, TypeError, RecursionError):
            return "Error: the code has ended the process that runs it"

    def snapshot(self) -> Any:
        """Return an empty state before the first call; None after it, since what the sandbox holds is not copied."""
        return {} if self._sandbox is None else None

    def restore(self, state: Any) -> None:
        """Do nothing: no call has been made."""

    async def close(self) -> None:
        """Delete the sandbox."""
        self._closed = True
        if self._sandbox is not None:
            await self._cluster.delete(self._sandbox)
