"""Traces of groups: one trace per group, whose context travels in its ticket, its header and the plans of its steps.

Guarantees: without `tracing.endpoint` nothing is imported, kept or sent, and a ticket carries an empty context. With it,
recording a span puts it into a queue: it never waits, fails or raises; a span that finds the queue full is dropped and counted.
One thread sends, however long the collector takes, and `close` abandons it after `CLOSE_S`.
Waits for: nothing; the sending thread waits for spans and for the collector.

A group's trace begins with the span `issue`, the parent of all others: `claim`, `generate`, `verify`, `submit` (generator),
`settle`, `plan` (dataprep), `train` (trainer); in an environment also `turn`, `environment`, `rollout`. A group that is resampled
or retrained has several of them. An evaluation round is one trace too: `issue`, then the spans of its tickets, and `evaluate`
from its opening to its end.
"""

from __future__ import annotations

import importlib.util
import logging
import queue
import random
import re
import threading
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import structlog

from services.config import ConfigError, RunConfig
from services.runtime.tracing.gen_ai import Attribute

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

log = structlog.get_logger()

CLIENT = frozenset({"turn"})
"""Spans that wait for another process."""
NOTHING: Mapping[str, Attribute] = {}
OUTCOMES = ("sent", "failed", "dropped")
QUEUED = 4096  # spans that may be queued, some MB; a step of 256 groups makes about 2,000
BATCH = 512  # spans in one request
PERIOD_S = 1.0  # a batch is sent this long after its first span, or when it is full
POLL_S = 0.1  # how late the thread notices that it must end
TIMEOUT_S = 10.0  # of one request
CLOSE_S = 3.0  # for queued spans when the process ends
_CONTEXT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-01")  # W3C traceparent, sampled


class TraceRecorder:
    """Records nothing: the run has no tracing. Base class of the recorders."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = dict.fromkeys(OUTCOMES, 0)
        """Spans by outcome."""

    def begin(self, always: bool = False) -> str:
        """Begin the trace of a ticket about to be issued. Returns its context, empty without tracing. `always` ignores
        `samples.share`.
        """
        return ""

    def issued(self, contexts: Iterable[str], done: bool) -> None:
        """End the `issue` spans of started traces, or drop them if their tickets were not issued."""

    def record(
        self,
        name: str,
        context: str,
        started: float,
        ended: float | None = None,
        gen_ai: Mapping[str, Attribute] = NOTHING,
        **attributes: str | int | float,
    ) -> None:
        """Record a span of a group's trace, from `started` to `ended` (now), in seconds of `time.monotonic`.

        `gen_ai` has attributes under the names of OpenTelemetry's conventions; `attributes` are the project's own, `grpo.…`.
        """

    def close(self) -> None:
        """Send queued spans, within `CLOSE_S`."""


def open_tracing(config: RunConfig, kind: str, pod: str) -> TraceRecorder:
    """Open tracing as the run configures it. Raises `ConfigError` if its package is missing."""
    check_tracing(config)
    return OtlpTracing(config, kind, pod) if config.tracing.endpoint else TraceRecorder()


def check_tracing(config: RunConfig) -> None:
    """Raise `ConfigError` if traces cannot be sent from here. Does not import the package that sends them."""
    if not config.tracing.endpoint:
        return
    for package in ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"):
        try:
            found = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            found = None
        if found is None:
            raise ConfigError(
                f"tracing.endpoint = {config.tracing.endpoint!r} needs the package {package}, which is not installed: "
                "pip install 'grpo[tracing]', or remove the key"
            )


class OtlpTracing(TraceRecorder):
    """Sends spans to a collector, by OTLP over HTTP. Safe to use from several threads."""

    def __init__(self, config: RunConfig, kind: str, pod: str) -> None:
        super().__init__()
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # it would log every failed request; we log the first
        self._share, self._random = config.samples.share, random.Random()  # not the process's own, which may be seeded
        self._begun: dict[str, Span] = {}
        self._model = config.model.path
        self._queue: queue.Queue[ReadableSpan] = queue.Queue(QUEUED)
        self._closing = threading.Event()
        self._provider = _provider(config.run.name, kind, pod, self._random, self._take)
        self._tracer = self._provider.get_tracer("grpo")
        exporter = OTLPSpanExporter(endpoint=config.tracing.endpoint, timeout=TIMEOUT_S)
        self._thread = threading.Thread(target=self._send, args=(exporter,), name="tracing", daemon=True)
        self._thread.start()

    def begin(self, always: bool = False) -> str:
        if not always and self._random.random() >= self._share:
            return ""
        from opentelemetry.context import Context

        span = self._tracer.start_span("issue", Context())
        ids = span.get_span_context()
        context = f"00-{ids.trace_id:032x}-{ids.span_id:016x}-01"
        self._begun[context] = span
        return context

    def issued(self, contexts: Iterable[str], done: bool) -> None:
        for context in contexts:
            span = self._begun.pop(context, None)
            if span is not None and done:
                span.end()

    def record(
        self,
        name: str,
        context: str,
        started: float,
        ended: float | None = None,
        gen_ai: Mapping[str, Attribute] = NOTHING,
        **attributes: str | int | float,
    ) -> None:
        if not (context and (ids := _CONTEXT.fullmatch(context))):
            return
        from opentelemetry.context import Context
        from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, TraceFlags, set_span_in_context

        parent = SpanContext(int(ids[1], 16), int(ids[2], 16), is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))
        if not parent.is_valid:
            return
        offset = time.time() - time.monotonic()
        around = set_span_in_context(NonRecordingSpan(parent), Context())
        given: dict[str, Attribute] = {**gen_ai, **{f"grpo.{key}": value for key, value in attributes.items()}}
        if "gen_ai.usage.output_tokens" in gen_ai:
            given["gen_ai.request.model"] = self._model
        kind = SpanKind.CLIENT if name in CLIENT else SpanKind.INTERNAL
        span = self._tracer.start_span(name, around, kind, given, start_time=_nanoseconds(started + offset))
        span.end(_nanoseconds((time.monotonic() if ended is None else ended) + offset))

    def close(self) -> None:
        self._closing.set()
        self._thread.join(CLOSE_S)
        self._provider.shutdown()

    def _take(self, span: ReadableSpan) -> None:
        try:
            self._queue.put_nowait(span)
        except queue.Full:
            self.counts["dropped"] += 1

    def _send(self, exporter: SpanExporter) -> None:
        """Run the thread: send queued spans until `close` is called and the queue is empty."""
        from opentelemetry.sdk.trace.export import SpanExportResult

        failing = False
        while batch := self._batch():
            try:
                why = "" if exporter.export(batch) is SpanExportResult.SUCCESS else "see the log of the OpenTelemetry package"
            except Exception as error:  # errors of the collector or the package must not end the thread
                why = f"{type(error).__name__}: {error}"
            self.counts["failed" if why else "sent"] += len(batch)
            if why and not failing:
                log.warning("losing spans: the collector does not accept them", error=why)
            elif failing and not why:
                log.info("the collector accepts spans again")
            failing = bool(why)
        exporter.shutdown()

    def _batch(self) -> list[ReadableSpan]:
        """Return the next spans to send; none when it is time to end."""
        batch: list[ReadableSpan] = []
        until = float("inf")
        while len(batch) < BATCH and time.monotonic() < until:
            try:
                span = self._queue.get(timeout=POLL_S)
            except queue.Empty:
                if self._closing.is_set():
                    break
                continue
            if not batch:
                until = time.monotonic() + PERIOD_S
            batch.append(span)
        return batch


def _provider(run: str, kind: str, pod: str, source: random.Random, take: Any) -> TracerProvider:
    """Return a provider that passes every ended span to `take`, and draws its ids from `source`."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
    from opentelemetry.sdk.trace.id_generator import IdGenerator
    from opentelemetry.sdk.trace.sampling import ALWAYS_ON

    class Ids(IdGenerator):
        def generate_span_id(self) -> int:
            return source.getrandbits(64) or 1

        def generate_trace_id(self) -> int:
            return source.getrandbits(128) or 1

    class EndedSpans(SpanProcessor):
        def on_end(self, span: ReadableSpan) -> None:
            take(span)

    resource = Resource({"service.name": f"grpo-{kind}", "service.instance.id": pod, "grpo.run": run})
    provider = TracerProvider(sampler=ALWAYS_ON, resource=resource, id_generator=Ids(), shutdown_on_exit=False)
    provider.add_span_processor(EndedSpans())
    return provider


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
