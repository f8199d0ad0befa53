"""A reward service and judge, in a separate process, that misbehaves on request: `python -m … PORT`.

Each request takes the next behaviour from a list; once the list is empty, the service responds correctly.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Self

import httpx
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

from services.runtime.process_tools import free_port

LONG_S = 30.0


def make_app() -> FastAPI:
    """Return the service's ASGI application."""
    app, behaviours, seen, loads = FastAPI(), list[str](), list[dict[str, Any]](), [[0, 0]]

    @app.post("/behave")
    async def behave(given: list[str]) -> None:
        behaviours[:] = given
        seen.clear()
        loads[0] = [0, 0]

    @app.get("/seen")
    async def report() -> dict[str, Any]:
        return {"requests": seen, "most": loads[0][1]}

    @app.post("/{path:path}")
    async def answer(path: str, request: Request) -> Response:
        body = await request.json()
        seen.append(
            {"path": f"/{path}", "authorization": request.headers.get("Authorization", ""), "body": body, "at": time.time()}
        )
        load = loads[0]  # a request from before the last `behave` may still be open
        load[0] += 1
        load[1] = max(load)
        try:
            behaviour, _, detail = (behaviours.pop(0) if behaviours else "ok").partition(":")
            return await carry_out(behaviour, detail, path, body, request)
        finally:
            load[0] -= 1

    return app


async def carry_out(behaviour: str, detail: str, path: str, body: Any, request: Request) -> Response:
    match behaviour:
        case "ok":
            return _reply(path, "Score: 0.75" if "chat" in path else "", body)
        case "slow":
            await asyncio.sleep(float(detail))
            return _reply(path, "Score: 0.75", body)
        case "say":
            return _reply(path, detail, body)
        case "cut":
            choice = {"message": {"content": detail}, "finish_reason": "length"}
            return Response(_json({"choices": [choice]}), media_type="application/json")
        case "raw":
            return Response(detail, media_type="application/json")
        case "status":
            status, _, text = detail.partition(":")
            return Response(text, int(status))
        case "echo":
            return Response(f"no: {request.headers['Authorization']}", int(detail))
        case "retry":
            return Response("busy", 429, {"Retry-After": detail})
        case "redirect":
            return Response("", 307, {"Location": detail})
        case "zip":
            return Response(b"\x1f\x8b", headers={"Content-Encoding": "gzip"})
        case "unless":  # the token is correct
            return _reply(path, "", body) if request.headers["Authorization"] == f"Bearer {detail}" else Response("who?", 401)
        case "hang":
            await asyncio.sleep(LONG_S)
            return Response("late")
        case "endless":
            return StreamingResponse(_endless(), media_type="application/json")
        case "close":
            return Response(b"{", headers={"Content-Length": "1000"})
        case "die":
            os._exit(1)
        case _:
            raise AssertionError(behaviour)


def _reply(path: str, text: str, body: Any) -> Response:
    """Score completions by length, or at `digits` by whether they have a small digit, or reply with `text` as a judge."""
    if "chat" in path:
        return Response(_json({"choices": [{"message": {"content": text}, "finish_reason": "stop"}]}))
    if path == "digits":
        return Response(_json({"scores": [float(re.search("[0-4]", one["text"]) is not None) for one in body["completions"]]}))
    return Response(_json({"scores": [1 / (1 + len(one["text"])) for one in body["completions"]]}))


async def _endless() -> AsyncIterator[bytes]:
    for _ in range(1000):  # uvicorn continues silently after the client has disconnected
        yield b" " * 65536
        await asyncio.sleep(0)


def _json(value: Any) -> bytes:
    import msgspec

    return msgspec.json.encode(value)


class FlakyServer:
    """The service's process, controlled by a test. It keeps its port when it restarts."""

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None
        self._http = httpx.Client(base_url=self.url, timeout=60)

    def start(self) -> None:
        """Start or restart the process, and wait until it serves."""
        self.kill()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.verifiers.remote.flaky_server", str(self.port)], stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 60
        while True:
            try:
                self._http.get("/seen")
                return
            except httpx.TransportError:
                assert self.process.poll() is None, "the server exited"
                assert time.monotonic() < deadline, "the server does not serve"
                time.sleep(0.05)

    def kill(self) -> None:
        """Kill the process if it is still running, and reap it."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    @property
    def died(self) -> bool:
        return self.process is not None and self.process.poll() is not None

    def behave(self, *behaviours: str) -> None:
        """Set the behaviours for the next requests, and forget the previous requests."""
        self._http.post("/behave", json=behaviours).raise_for_status()

    @property
    def requests(self) -> list[dict[str, Any]]:
        """Return the requests since `behave`."""
        return self._http.get("/seen").json()["requests"]

    @property
    def most(self) -> int:
        """Return the highest number of concurrent requests since `behave`."""
        return self._http.get("/seen").json()["most"]

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._http.close()
        self.kill()


if __name__ == "__main__":
    uvicorn.run(make_app(), host="127.0.0.1", port=int(sys.argv[1]), log_level="critical")
