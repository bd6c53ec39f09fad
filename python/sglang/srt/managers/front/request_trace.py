"""OpenTelemetry traces of requests: `--enable-trace`. The package is optional (`pip install "sm120-sglang[trace]"`).

A request that has ended becomes a span with one child for each of its phases: `received` (checked and tokenized),
`queued`, `prefill`, `decode`. Its start and its end are the events `received` and `finished`. They are made at the end,
so that a running request costs nothing; they hold counts and parameters, never text. A `traceparent` header makes the
span a part of the client's trace. A thread of OpenTelemetry sends them, and drops what its bounded queue cannot hold.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from sglang.srt.errors import UserError
from sglang.srt.managers.front.request_record import EndedRequest
from sglang.srt.server_args import ServerArgs
from sglang.version import __version__

trace_headers: ContextVar[dict[str, str] | None] = ContextVar("trace_headers", default=None)
"""`traceparent` and `tracestate` of the HTTP request that is being answered."""

EXPORT_TIMEOUT_S = 5
CLOSE_LIMIT_S = 1.0
"""Seconds for the last spans at the end of the server; those that the collector has not taken by then are dropped."""
_INSTALL = '--enable-trace needs OpenTelemetry: pip install "sm120-sglang[trace]"'


class RequestTracer:
    """Turns ended requests into spans for `processor`."""

    def __init__(self, processor: Any, service_name: str, model_name: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider

        resource = Resource.create({"service.name": service_name, "service.version": __version__})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("sglang", __version__)
        self._model_name = model_name

    @classmethod
    def from_args(cls, args: ServerArgs) -> RequestTracer | None:
        """Returns the tracer; None without --enable-trace. Raises UserError if a package is missing."""
        if not args.enable_trace:
            return None
        try:
            from opentelemetry.sdk.trace.export import BatchSpanProcessor

            exporter = _exporter(args.otlp_traces_endpoint)
        except ImportError as error:
            raise UserError(f"{_INSTALL} ({error})") from None
        model_name = args.served_model_name or args.model_path
        return cls(BatchSpanProcessor(exporter), args.otlp_service_name, model_name)

    def parent(self) -> Any:
        """Returns the client's trace as an OpenTelemetry context; None if it sent none."""
        headers = trace_headers.get()
        if headers is None:
            return None
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        return TraceContextTextMapPropagator().extract(headers)

    def finished(self, ended: EndedRequest) -> None:
        """Emits the spans of a sequence that has ended."""
        from opentelemetry import trace

        to_wall = time.time_ns() - int(time.monotonic() * 1e9)

        def wall(seconds: float) -> int:
            return int(seconds * 1e9) + to_wall

        start, end = wall(ended.created_time), wall(ended.end_time)
        span = self._tracer.start_span(
            "request", ended.trace_parent, trace.SpanKind.SERVER, self._attributes(ended), start_time=start
        )
        span.add_event("received", timestamp=start)
        inside = trace.set_span_in_context(span)
        for name, begin, finish in phases(ended):
            self._tracer.start_span(name, inside, start_time=wall(begin)).end(wall(finish))
        span.add_event("finished", {"reason": ended.finish.type}, timestamp=end)
        if (ended.finish.status_code or 0) >= 500:
            span.set_status(trace.StatusCode.ERROR, ended.finish.message)
        span.end(end)

    def close(self) -> None:
        """Sends pending spans, for at most CLOSE_LIMIT_S."""
        thread = threading.Thread(target=self._provider.shutdown, name="last-spans", daemon=True)
        thread.start()
        thread.join(CLOSE_LIMIT_S)

    def _attributes(self, ended: EndedRequest) -> dict[str, Any]:
        """Returns attributes, named by OpenTelemetry's conventions for generative models where these have a name."""
        params, meta = ended.request.sampling_params, ended.meta
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": "generate",
            "gen_ai.request.id": ended.request.rid,
            "gen_ai.response.model": self._model_name,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.usage.input_tokens": meta.prompt_tokens,
            "gen_ai.usage.output_tokens": meta.completion_tokens,
            "gen_ai.usage.cached_tokens": meta.cached_tokens,
            "gen_ai.response.finish_reasons": [ended.finish.type],
            "gen_ai.latency.e2e": ended.seconds,
        }
        if params.max_new_tokens is not None:
            attributes["gen_ai.request.max_tokens"] = params.max_new_tokens
        if ended.queue_seconds is not None:
            attributes["gen_ai.latency.time_in_queue"] = ended.queue_seconds
        if ended.first_token_time:
            attributes["gen_ai.latency.time_to_first_token"] = ended.first_token_time - ended.created_time
        if meta.num_retractions:
            attributes["sglang.num_retractions"] = meta.num_retractions
        return attributes


def phases(ended: EndedRequest) -> Iterator[tuple[str, float, float]]:
    """Yields (name, begin, end) of each phase that the request reached; each begins where the one before ends."""
    begin = ended.created_time
    ends = (ended.sent_time, ended.started_time, ended.first_token_time, ended.end_time)
    for name, end in zip(("received", "queued", "prefill", "decode"), ends, strict=True):
        if not end:  # the request ended in this phase
            yield name, begin, ended.end_time
            return
        yield name, begin, max(begin, end)
        begin = max(begin, end)


def _exporter(endpoint: str) -> Any:
    """Returns the exporter: `http(s)://host:port/v1/traces` is OTLP over HTTP, `host:port` (and `grpc://...`) OTLP over
    gRPC. Raises ImportError."""
    if endpoint.startswith(("http://", "https://")):
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

        return HttpExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S)
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

    return GrpcExporter(endpoint=endpoint.removeprefix("grpc://"), insecure=True, timeout=EXPORT_TIMEOUT_S)
