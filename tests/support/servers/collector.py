"""A collector of traces that speaks OTLP over HTTP."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest, ExportTraceServiceResponse


@dataclass(frozen=True)
class Span:
    """A received span; times are in seconds."""

    service: str
    pod: str
    name: str
    trace: str
    id: str
    parent: str
    started: float
    ended: float
    attributes: dict[str, Any]


@dataclass
class Collector:
    """Stores received spans."""

    url: str
    spans: list[Span] = field(default_factory=list)

    def by_trace(self) -> dict[str, list[Span]]:
        """Return the spans of every trace, by start time."""
        traces: dict[str, list[Span]] = {}
        for span in sorted(self.spans, key=lambda span: span.started):
            traces.setdefault(span.trace, []).append(span)
        return traces

    def take(self, body: bytes) -> None:
        """Store the spans of a request."""
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            origin = _values(resource.resource.attributes)
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.spans.append(
                        Span(
                            origin["service.name"], origin["service.instance.id"], span.name, span.trace_id.hex(),
                            span.span_id.hex(), span.parent_span_id.hex(), span.start_time_unix_nano / 1e9,
                            span.end_time_unix_nano / 1e9, _values(span.attributes),
                        )
                    )  # fmt: skip


@contextmanager
def collecting() -> Iterator[Collector]:
    """Run a collector on a free port."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            collector.take(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.end_headers()
            self.wfile.write(ExportTraceServiceResponse().SerializeToString())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    collector = Collector(f"http://127.0.0.1:{server.server_port}/v1/traces")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _values(attributes: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in attributes}
