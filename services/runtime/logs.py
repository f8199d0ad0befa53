"""JSON logs on standard error: ours, vLLM's, uvicorn's and other packages' in one stream, one object per line.

Guarantees: `run` and `pod` are on every line; bound context (`step`, `ticket`) is on every line written inside it, including
lines of other packages and of tasks started inside.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

import structlog
from structlog.typing import EventDict, Processor

RUN, POD = "GRPO_LOG_RUN", "GRPO_LOG_POD"
"""Environment variables through which child processes of a service learn their run and pod."""
GUESTS = ("DeepSpeed", "huggingface_hub", "transformers")
"""Packages with their own handlers. vLLM's are in generator/engines/vllm_logging.json, because it has its own processes."""
VLLM_LEVEL = os.environ.get("VLLM_LOGGING_LEVEL", "WARNING").upper()
"""Level of vLLM's loggers, which generator/engines/vllm_logging.json refers to."""


def configure(run: str, pod: str, level: str = "INFO") -> None:
    """Route structlog and the standard library's loggers to one JSON line per event."""
    os.environ |= {RUN: run, POD: pod}
    os.environ.setdefault("TQDM_DISABLE", "1")  # a progress bar is not a log line
    _adopt(GUESTS)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(inherited_formatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it would log a line for every request
    logging.captureWarnings(True)
    structlog.configure(
        processors=[*_shared(), structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(level)),
        cache_logger_on_first_use=True,
    )


def inherited_formatter() -> logging.Formatter:
    """Return a formatter for records of this process, or of the service that started it."""
    run, pod = os.environ.get(RUN, ""), os.environ.get(POD, "")

    def origin(_: object, __: str, event: EventDict) -> EventDict:
        event.pop("color_message", None)  # uvicorn's, for terminals
        return {**event, "run": run, "pod": pod}

    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=_shared(),
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            origin,
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(default=str),
        ],
    )


class _Guest(logging.Logger):
    """Logger of a package that would write its own lines. Its records go to the common stream, whatever handlers it installs."""

    def addHandler(self, hdlr: logging.Handler) -> None:
        pass

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, True if name == "propagate" else value)


def _adopt(names: Sequence[str]) -> None:
    usual = logging.getLoggerClass()
    logging.setLoggerClass(_Guest)
    for name in names:
        logging.getLogger(name)
    logging.setLoggerClass(usual)


def _shared() -> list[Processor]:
    return [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.stdlib.ExtraAdder(),
    ]
