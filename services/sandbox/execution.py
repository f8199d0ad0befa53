"""Executes one call of code in a pod, over the websocket by which `kubectl exec` does (v4.channel.k8s.io).

Guarantees: however much the pod sends, a bounded part is read; whatever it sends is decoded into fixed types or refused. What
runs in the pod (inside.py) is sent along, so a pod needs only Python.
"""

from __future__ import annotations

import asyncio
import inspect
from functools import cache
from typing import Any

import aiohttp
import msgspec
from kubernetes.aio.client.exceptions import ApiException

from services.protocol.sandboxes import CodeDone, RunCode
from services.runtime.cluster.account import FAILURES
from services.sandbox import inside
from services.sandbox.pods import PodsApi
from services.verifiers.sandbox import folder, guard, scratch, script

STDIN, STDOUT, STDERR, STATUS = 0, 1, 2, 3
"""Channels of the protocol: the first byte of each message."""
CHUNK = 32 << 10  # of standard input in one message, as kubectl sends it
REPLY_BYTES = 2 << 20  # maximum that is read: files of 256 KiB in base85 as JSON, and the output
ERROR_BYTES = 2000
CONTAINER = "sandbox"
BOOT = """
import json, sys, types
given = json.loads(sys.stdin.buffer.readline())
for name, code in given["modules"]:
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__, module.__file__ = [], name
    parent, _, last = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], last, module)
    exec(compile(code, name, "exec"), module.__dict__)
module.main(given["task"])
"""
COMMAND = ("python3", "-I", "-B", "-c", BOOT)


class NotExecuted(Exception):
    """The connection ended without a result, or could not be opened: it is unknown whether the code has run."""

    def __init__(self, message: str, suspected: bool = False) -> None:
        """`suspected`: the code may be the cause."""
        super().__init__(message)
        self.suspected = suspected


class Garbled(Exception):
    """The output is not a result: the code has replaced the process that should send it."""


class _Result(msgspec.Struct):
    output: str = ""
    fault: str = ""
    files: dict[str, str] | None = None
    ended: str = ""
    lost: str = ""


async def execute(pods: PodsApi, call: RunCode, limit_s: float) -> CodeDone:
    """Begin a call in its pod, or attach to it, and return its result within `limit_s`. Raises `NotExecuted` and `Garbled`."""
    attached = False
    place = pods.place(call.pod)
    query = [("container", CONTAINER), ("stdin", "true"), ("stdout", "true"), ("stderr", "true")]
    query += [("command", word) for word in COMMAND]
    try:
        async with asyncio.timeout(limit_s):
            opened: Any = await pods.client.request(
                "GET", place, query_params=query, headers=await pods.credentials(place), _preload_content=False
            )
            async with opened as socket:
                attached = True
                sending = asyncio.ensure_future(_send(socket, _input(call)))
                try:
                    output = await _received(socket)
                finally:
                    sending.cancel()
                    await asyncio.gather(sending, return_exceptions=True)
    except TimeoutError:  # the node may be gone, or the code has stopped the process that sends its result
        raise NotExecuted("nothing came" if attached else "no connection", suspected=attached) from None
    except (*FAILURES, ApiException) as error:
        raise NotExecuted(f"{type(error).__name__}: {error}"[:300]) from None
    return _read(output)


async def _send(socket: aiohttp.ClientWebSocketResponse, data: bytes) -> None:
    for at in range(0, len(data), CHUNK):
        await socket.send_bytes(bytes([STDIN]) + data[at : at + CHUNK])


async def _received(socket: aiohttp.ClientWebSocketResponse) -> bytes:
    """Return the command's output, if it succeeds. Raises `NotExecuted` and `Garbled`."""
    output, errors = bytearray(), bytearray()
    async for message in socket:
        data = message.data if isinstance(message.data, bytes) else str(message.data).encode()
        channel, body = data[:1], data[1:]
        if channel == bytes([STDOUT]):
            output += body
            if len(output) > REPLY_BYTES:
                raise Garbled(f"more than {REPLY_BYTES} bytes")
        elif channel == bytes([STDERR]):
            errors += body[: ERROR_BYTES - len(errors)]
        elif channel == bytes([STATUS]):
            if _succeeded(body):
                return bytes(output)
            why = f"{body[:300].decode(errors='replace')} {errors.decode(errors='replace')}"
            raise NotExecuted(why, suspected=b"NonZeroExitCode" in body)  # the command found the pod unusable
    raise NotExecuted("the connection ended before the command did")


def _succeeded(body: bytes) -> bool:
    try:
        return msgspec.json.decode(body).get("status") == "Success"
    except (ValueError, RecursionError, AttributeError):
        return False


def _read(output: bytes) -> CodeDone:
    """Return the result that a pod has sent. Raises `Garbled`."""
    try:
        found = msgspec.json.decode(output, type=_Result)
    except (ValueError, RecursionError) as error:
        raise Garbled(str(error)[:200]) from None
    files = found.files
    if files is not None and (sum(map(len, files.values())) > 2 * folder.KEPT_BYTES or not all(map(folder.inside, files))):
        files = None
    kept = found.output[: script.KEPT_BYTES], found.fault[:100], files, found.ended[:600], found.lost[:200]
    return CodeDone(*kept, suspected=bool(found.lost))  # the code may have written that it was lost


def _input(call: RunCode) -> bytes:
    """Return the line that the command reads."""
    task = {
        "call": call.call, "code": call.code, "limit_s": call.limit_s, "memory_mib": call.memory_mib, "files": call.files,
        "output_bytes": script.OUTPUT_BYTES, "kept_bytes": script.KEPT_BYTES,
        "folder_bytes": folder.FOLDER_BYTES, "folder_entries": folder.FOLDER_ENTRIES,
    }  # fmt: skip
    return msgspec.json.encode({"modules": _modules(), "task": task}) + b"\n"


@cache
def _modules() -> list[tuple[str, str]]:
    """Return the modules that run in a pod, by name, in the order of their imports."""
    shipped = (folder, guard, scratch, script, inside)
    packages = ("services", "services.verifiers", "services.verifiers.sandbox", "services.sandbox")
    return [*((name, "") for name in packages), *((each.__name__, inspect.getsource(each)) for each in shipped)]
