"""Logs are one stream of JSON lines: ours, uvicorn's, those of all vLLM's processes and of packages with their own handlers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

PREAMBLE = """
import logging, structlog
from services.runtime import logs
logs.configure("run-1", "pod-1")
log = structlog.get_logger()
"""


def lines_of(code: str, **environ: str) -> list[dict[str, Any]]:
    """Return the events logged by a process that runs `code` after the preamble; every line must be JSON."""
    done = subprocess.run(
        [sys.executable, "-c", PREAMBLE + code], capture_output=True, text=True, check=True, env={**os.environ, **environ}
    )
    assert done.stdout == ""
    events = [json.loads(line) for line in done.stderr.splitlines()]
    for event in events:
        assert (event["run"], event["pod"]) == ("run-1", "pod-1")
        assert {"event", "level", "logger", "timestamp"} <= event.keys()
    return events


def test_our_logs_standard_logs_and_warnings_are_json() -> None:
    events = lines_of(
        """
import warnings
log.info("committed", step=3)
logging.getLogger("somebody").error("broken: %s", "it", extra={"where": "here"})
warnings.warn("old", DeprecationWarning)
try:
    1 / 0
except ZeroDivisionError:
    log.warning("failed", exc_info=True)
log.info("strange", value=object())
""",
        PYTHONWARNINGS="always",
    )
    assert [event["event"].split(" ")[0] for event in events[:2]] == ["committed", "broken:"]
    assert (events[0]["step"], events[0]["level"]) == (3, "info")
    assert (events[1]["where"], events[1]["level"], events[1]["logger"]) == ("here", "error", "somebody")
    assert events[2]["logger"] == "py.warnings"
    assert "ZeroDivisionError" in events[3]["exception"]
    assert "object" in events[4]["value"]


def test_bound_context_is_on_every_line_in_tasks_and_threads() -> None:
    events = lines_of("""
import asyncio, threading
from services.runtime.portal import Portal

async def rollout(ticket):
    structlog.contextvars.bind_contextvars(ticket=ticket)
    await asyncio.sleep(0)
    logging.getLogger("package").warning("inside")

async def main():
    await asyncio.gather(rollout("0-1"), rollout("0-2"))
    logging.getLogger("package").warning("outside")

asyncio.run(main())

async def later():
    log.info("portal")

portal = Portal()
with structlog.contextvars.bound_contextvars(step=7):
    portal.call(later())
    asyncio.run(asyncio.to_thread(log.info, "thread"))
log.info("after")
portal.close()
""")
    assert [(event["event"], event.get("ticket")) for event in events[:3]] == [
        ("inside", "0-1"), ("inside", "0-2"), ("outside", None)
    ]  # fmt: skip
    assert [(event["event"], event.get("step")) for event in events[3:]] == [("portal", 7), ("thread", 7), ("after", None)]


def test_uvicorns_logs_are_json() -> None:
    events = lines_of("""
import asyncio, uvicorn
from fastapi import FastAPI

async def main():
    server = uvicorn.Server(uvicorn.Config(FastAPI(), port=0, log_config=None, lifespan="off"))
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    server.should_exit = True
    await task

asyncio.run(main())
""")
    assert {event["logger"] for event in events} == {"uvicorn.error"}
    assert events[0]["event"].startswith("Started server process")
    assert "color_message" not in events[0]


@pytest.mark.slow
@pytest.mark.timeout(600)  # it imports vLLM
def test_vllms_logs_are_json_in_all_its_processes() -> None:
    """The environment configures its child processes; in this process its loggers have no handlers."""
    child = """
import gc
gc.disable()  # a quarter of the import's time
from vllm.config.logging import LoggingConfig
from vllm.logger import configure_logging, init_logger
configure_logging(LoggingConfig())  # as each of them does
init_logger("vllm.v1.engine.core").warning("loaded %d weights", 3)
init_logger("vllm.v1.engine.core").info("not shown")
"""
    events = lines_of(f"""
import os, subprocess, sys
from services.generator.engines.vllm_arguments import VLLM_LOGGING
os.environ |= {{"VLLM_LOGGING_CONFIG_PATH": str(VLLM_LOGGING), "VLLM_LOGGING_LEVEL": "WARNING"}}
with structlog.contextvars.bound_contextvars(ticket="0-7"):
    logging.getLogger("vllm.engine").warning("here")
subprocess.run([sys.executable, "-c", {child!r}], check=True)
""")
    of_vllm = [event for event in events if event["logger"].startswith("vllm.")]
    assert [(event["logger"], event["event"], event.get("ticket")) for event in of_vllm] == [
        ("vllm.engine", "here", "0-7"), ("vllm.v1.engine.core", "loaded 3 weights", None)
    ]  # fmt: skip


def test_packages_with_their_own_handlers_are_adopted() -> None:
    events = lines_of("""
import sys
logger = logging.getLogger("DeepSpeed")
logger.addHandler(logging.StreamHandler(sys.stdout))
logger.propagate = False
logger.setLevel(logging.WARNING)
logger.info("not shown")
logger.warning("Setting accelerator to CPU")
from transformers.utils import logging as theirs
theirs.get_logger("transformers.models").warning("odd")
""")
    assert [(event["logger"], event["event"]) for event in events] == [
        ("DeepSpeed", "Setting accelerator to CPU"), ("transformers.models", "odd")
    ]  # fmt: skip
