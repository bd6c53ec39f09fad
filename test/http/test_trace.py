"""`--enable-trace` from a client's header to a collector."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from live_server import live_server
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.fixture
def collector() -> Iterator[tuple[str, list[Any]]]:
    """The address of an OTLP collector, and the spans that it gets."""
    spans: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            body = gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                spans.extend(span for scope in resource.scope_spans for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}/v1/traces", spans
        running.shutdown()


def test_requests_become_spans_of_the_clients_trace(
    collector: tuple[str, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")  # milliseconds; at its end a server has one second to send
    endpoint, spans = collector
    flags = ("--served-model-name", "tiny", "--enable-trace", "--otlp-traces-endpoint", endpoint)
    body = {"model": "tiny", "messages": [{"role": "user", "content": "What is 15+27?"}], "temperature": 0}
    with live_server(*flags) as server:
        for stream in (False, True):
            answer = httpx.post(
                f"{server.url}/v1/chat/completions",
                json={**body, "stream": stream},
                headers={"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"},
            )
            assert answer.status_code == 200
        while len(ours := [span for span in spans if span.trace_id.hex() == TRACE]) < 10:
            time.sleep(0.05)
    assert [span.name for span in ours] == ["received", "queued", "prefill", "decode", "request"] * 2
    for *children, root in (ours[:5], ours[5:]):
        assert root.parent_span_id.hex() == "b7ad6b7169203331"
        assert {child.parent_span_id for child in children} == {root.span_id}
        edges = [root.start_time_unix_nano, *(child.end_time_unix_nano for child in children)]
        assert edges == sorted(edges) and edges[-1] == root.end_time_unix_nano
    assert b"15+27" not in b"".join(span.SerializeToString() for span in spans)
