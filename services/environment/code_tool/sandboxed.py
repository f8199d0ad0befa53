"""The tool `python` of one rollout on a cluster: runs code that the policy writes in the rollout's own pod.

Guarantees: a call is made at most once, however often it is requested: the pod identifies it by its number. If its result is
unknown, because the pod or the sandbox service was lost, `SandboxLost` is raised; it is never an answer to the policy. No pod is
shared with another rollout, nor with another program of the same one; one that is not closed here is swept when the ticket is no
longer held.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import ssl
import time
from typing import Any, TypeVar

import msgspec

from services.environment.code_tool.replies import PythonTool, code_of, told
from services.environment.posting import NoReply, Poster
from services.environment.programs.frames import SandboxAccess
from services.protocol.sandboxes import (
    CLOSE,
    OPEN,
    RUN,
    CloseSandbox,
    CodeDone,
    OpenSandbox,
    RunCode,
    SandboxName,
    SandboxOpened,
)

PAUSES_S = (0.1, 0.2, 0.5, 1.0, 2.0)
"""Seconds between requests to a service that is unavailable, as it is for seconds while it restarts."""
OPEN_WAIT_S = 20.0
"""Seconds for which the service waits for a pod in one request: a lost request costs no more."""
OPEN_MARGIN_S = 5.0
"""Seconds beyond the wait for a pod for the reply, which says why there is no pod."""
CALL_MARGIN_S = 30.0
"""Seconds beyond the code's own for a call: a restart of the service and the round trip."""
CLOSE_LIMIT_S = 5.0
UNAVAILABLE = 503

T = TypeVar("T")


class SandboxLost(Exception):
    """A rollout's sandbox was lost, or none was available; the call's result is unknown."""

    def __init__(self, message: str, suspected: bool = False) -> None:
        """`suspected`: the code may be the cause."""
        super().__init__(message)
        self.suspected = suspected


class SandboxService:
    """A worker process's client of the sandbox service."""

    def __init__(self, access: SandboxAccess) -> None:
        verified = access.url.startswith("https://")
        trusted = (
            ssl.create_default_context(cafile=access.ca_file or None) if verified else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        )
        self._url, self._poster = access.url, Poster(access.token, trusted, access.server_name)

    async def ask(self, path: str, message: Any, reply: type[T], limit_s: float) -> T:
        """Return the reply, repeating the request while the service is unavailable. Raises `SandboxLost`."""
        deadline, asked, why = time.monotonic() + limit_s, 0, "no reply"
        while (left := deadline - time.monotonic()) > 0:
            try:
                async with asyncio.timeout(left):
                    found = await self._poster.post(self._url, path, msgspec.msgpack.encode(message))
                if found.status == 200:
                    return msgspec.msgpack.decode(found.body, type=reply)
                why = found.body[:500].decode(errors="replace")
                if found.status != UNAVAILABLE:
                    raise SandboxLost(f"the sandbox service refused a request: {why}")
            except NoReply as error:
                why = str(error)
            except msgspec.DecodeError as error:
                raise SandboxLost(f"the sandbox service sent an invalid reply: {error}") from None
            except TimeoutError:
                break
            await asyncio.sleep(PAUSES_S[min(asked, len(PAUSES_S) - 1)])
            asked += 1
        raise SandboxLost(f"the sandbox service did not reply within {limit_s:g} s: {why}")

    def close(self) -> None:
        """Close the connections."""
        self._poster.close()


class SandboxTool(PythonTool):
    """Runs the code in the rollout's own pod."""

    def __init__(self, rollout: str, limit_s: float, memory_mib: int, service: SandboxService, open_limit_s: float) -> None:
        """`rollout` is the name of the rollout; `open_limit_s`: how long it may wait for a sandbox."""
        self._rollout, self._limit_s, self._memory_mib = rollout, limit_s, memory_mib
        self._service, self._open_limit_s = service, open_limit_s
        self._sandbox, self._pod, self._calls = self._new(), "", 0
        self._files: dict[str, str] | None = {}
        self._asked = self._closed = False

    async def call(self, arguments: object) -> str:
        """Return the code's output, or the fault. Raises `SandboxLost`."""
        code, wrong = code_of(arguments)
        if wrong:
            return wrong
        if self._closed:
            return "Error: the rollout has ended"
        files = None
        if not self._pod:
            files, self._pod = self._files, await self._opened()
        self._calls += 1
        code = code.encode("utf-8", "replace").decode()
        call = RunCode(self._sandbox, self._pod, self._calls, code, self._limit_s, self._memory_mib, files)
        done = await self._service.ask(RUN, call, CodeDone, self._limit_s + CALL_MARGIN_S)
        if done.lost:
            raise SandboxLost(f"the sandbox was lost: {done.lost}", done.suspected)
        if done.ended:
            await self._abandon()
            return f"Error: the code has ended its sandbox ({done.ended}); the files in it are gone"
        self._files = done.files
        return told(done.output, done.fault, self._limit_s)

    async def _opened(self) -> str:
        """Return the pod of a sandbox in which nothing has run. Raises `SandboxLost`."""
        self._asked = True
        deadline, opened = time.monotonic() + self._open_limit_s, SandboxOpened(why_not="there was no time to wait")
        while (left := deadline - time.monotonic()) > 0:
            request = OpenSandbox(self._sandbox, min(OPEN_WAIT_S, left))
            opened = await self._service.ask(OPEN, request, SandboxOpened, left + OPEN_MARGIN_S)
            if opened.pod:
                return opened.pod
            await asyncio.sleep(PAUSES_S[0])
        raise SandboxLost(f"no sandbox within {self._open_limit_s:g} s: {opened.why_not}")

    async def _abandon(self) -> None:
        """Leave a sandbox that has ended; the next call has another one."""
        await self._delete()
        self._sandbox, self._pod, self._calls, self._files = self._new(), "", 0, {}

    async def _delete(self) -> None:
        with contextlib.suppress(SandboxLost):  # it is swept when nobody holds the ticket
            await self._service.ask(CLOSE, CloseSandbox(self._sandbox), type(None), CLOSE_LIMIT_S)

    def _new(self) -> SandboxName:
        return SandboxName(self._rollout, secrets.token_hex(4))

    def snapshot(self) -> Any:
        """Return the files, or None if there are too many of them."""
        return self._files

    def restore(self, state: Any) -> None:
        """Have the files of a snapshot written before the first call."""
        self._files = state

    async def close(self) -> None:
        """Delete the sandbox."""
        self._closed = True
        if self._asked:
            await self._delete()
