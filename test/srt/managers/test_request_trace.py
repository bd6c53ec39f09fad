"""Spans of requests, with OpenTelemetry's own exporters at the other end."""

from __future__ import annotations

import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from sglang.srt.errors import UserError
from sglang.srt.managers.front import request_trace
from sglang.srt.managers.front.request_trace import RequestTracer, phases, trace_headers
from sglang.srt.managers.wire.io_struct import FinishReason
from sglang.srt.server_args import ServerArgs

from .ended_requests import ended, request

TRACE = "0af7651916cd43dd8448eb211c80319c"
HEADERS = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}


def spans_of(*requests: Any) -> list[Any]:
    exporter = InMemorySpanExporter()
    tracer = RequestTracer(SimpleSpanProcessor(exporter), "sglang", "tiny")
    for each in requests:
        tracer.finished(each)
    tracer.close()
    return list(exporter.get_finished_spans())


def seconds(span: Any) -> float:
    return round((span.end_time - span.start_time) / 1e9, 3)


def test_a_request_is_a_span_with_its_phases() -> None:
    *children, root = spans_of(ended(request("abc", temperature=0.5, max_new_tokens=9)))
    assert [(span.name, seconds(span)) for span in children] == [
        ("received", 0.5),
        ("queued", 1.5),
        ("prefill", 1.0),
        ("decode", 5.0),
    ]
    assert all(span.parent.span_id == root.context.span_id for span in children)
    assert (root.name, seconds(root), root.parent) == ("request", 8.0, None)
    assert [event.name for event in root.events] == ["received", "finished"]
    attributes = dict(root.attributes)
    assert attributes["gen_ai.request.id"] == "abc" and attributes["gen_ai.response.model"] == "tiny"
    assert (attributes["gen_ai.usage.input_tokens"], attributes["gen_ai.usage.output_tokens"]) == (3, 7)
    assert round(attributes["gen_ai.latency.time_in_queue"], 3) == 2.0
    assert round(attributes["gen_ai.latency.time_to_first_token"], 3) == 3.0
    assert root.resource.attributes["service.name"] == "sglang"


def test_spans_hold_no_text() -> None:
    params = {"stop": ["a secret"], "stop_regex": ["secret+"], "json_schema": '{"const": "secret"}'}
    failed = FinishReason("abort", message="The server is shutting down.", status_code=503)
    spans = spans_of(
        ended(request(**params), text="the secret"), ended(request(**params), text="secret", finish=failed)
    )
    assert len(spans) == 10 and not any("secret" in span.to_json() for span in spans)


@pytest.mark.parametrize(
    ("times", "names"),
    [
        ((1.0, 0, 0, 0, 2.0), ["received"]),
        ((1.0, 1.5, 0, 0, 2.0), ["received", "queued"]),
        ((1.0, 1.5, 1.7, 0, 2.0), ["received", "queued", "prefill"]),
    ],
)
def test_a_request_that_ends_early_has_the_phases_that_it_came_to(times: Any, names: list[str]) -> None:
    early = ended(times=times, finish=FinishReason("abort", message="too late", status_code=503))
    assert [name for name, _, _ in phases(early)] == names
    assert [end for _, _, end in phases(early)][-1] == early.end_time
    root = spans_of(early)[-1]
    assert root.status.status_code is StatusCode.ERROR and root.status.description == "too late"


def test_an_abort_by_the_client_is_no_error() -> None:
    root = spans_of(ended(finish=FinishReason("abort", message="Aborted", status_code=499)))[-1]
    assert root.status.status_code is StatusCode.UNSET


def test_it_joins_the_trace_of_the_client() -> None:
    tracer = RequestTracer(SimpleSpanProcessor(InMemorySpanExporter()), "sglang", "tiny")
    assert tracer.parent() is None
    token = trace_headers.set(HEADERS)
    try:
        parent = tracer.parent()
    finally:
        trace_headers.reset(token)
    spans = spans_of(ended(trace_parent=parent))
    assert {f"{span.context.trace_id:032x}" for span in spans} == {TRACE}
    assert f"{spans[-1].parent.span_id:016x}" == "b7ad6b7169203331"


@pytest.mark.parametrize("header", ["", "nonsense", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "é" * 3000])
def test_a_broken_header_begins_a_trace_of_its_own(header: str) -> None:
    tracer = RequestTracer(SimpleSpanProcessor(InMemorySpanExporter()), "sglang", "tiny")
    token = trace_headers.set({"traceparent": header})
    try:
        parent = tracer.parent()
    finally:
        trace_headers.reset(token)
    assert spans_of(ended(trace_parent=parent))[-1].parent is None


def test_a_collector_that_never_answers_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_trace, "CLOSE_LIMIT_S", 0.01, raising=False)
    answers, ended = threading.Event(), list[int]()

    class Hanging(SimpleSpanProcessor):
        def shutdown(self) -> None:
            answers.wait(300)
            ended.append(1)

    tracer = RequestTracer(Hanging(InMemorySpanExporter()), "sglang", "tiny")
    tracer.close()
    assert not ended
    answers.set()


def test_it_is_off_unless_asked_for() -> None:
    assert RequestTracer.from_args(ServerArgs(model_path="m")) is None


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace.export", None)
    with pytest.raises(UserError, match=r'pip install "sm120-sglang\[trace\]"'):
        RequestTracer.from_args(ServerArgs(model_path="m", enable_trace=True))


class _Collector(BaseHTTPRequestHandler):
    received: list[ExportTraceServiceRequest]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            import gzip

            body = gzip.decompress(body)
        self.received.append(ExportTraceServiceRequest.FromString(body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


def test_spans_reach_a_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_trace, "CLOSE_LIMIT_S", 300.0)
    _Collector.received = []
    with HTTPServer(("127.0.0.1", 0), _Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{collector.server_port}/v1/traces"
        args = ServerArgs(
            model_path="m",
            served_model_name="tiny",
            enable_trace=True,
            otlp_traces_endpoint=endpoint,
            otlp_service_name="s",
        )
        tracer = RequestTracer.from_args(args)
        assert tracer is not None
        tracer.finished(ended())
        tracer.close()
        collector.shutdown()
    (message,) = _Collector.received
    (resource,) = message.resource_spans
    names = [span.name for scope in resource.scope_spans for span in scope.spans]
    assert names == ["received", "queued", "prefill", "decode", "request"]
