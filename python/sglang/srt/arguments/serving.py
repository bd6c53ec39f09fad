"""Options of the HTTP server, and of what it logs and counts."""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.arguments.groups import OBSERVE, SERVING
from sglang.srt.cli_args import option
from sglang.srt.configs.output_formats import REASONING_PARSERS, TOOL_CALL_PARSERS


@dataclass(kw_only=True)
class ServingArgs:
    """Options of the HTTP server."""

    host: str = option("127.0.0.1", SERVING, "Address to listen on; 0.0.0.0 for all.")
    port: int = option(30000, SERVING, "Port to listen on.", minimum=1, maximum=65535)
    api_key: str | None = option(
        None, SERVING, "Require `Authorization: Bearer KEY`, but for `/`, `/page/`, `/health`, `/ready` and `/metrics`."
    )
    admin_api_key: str | None = option(
        None,
        SERVING,
        "Require this key, and not --api-key's, of routes that abort, pause, flush, profile, or change corpora or the"
        " store of prefixes.",
    )
    weight_version: str = option(
        "default",
        SERVING,
        "Name of the weights in replies, until an update names others.",
    )
    weight_updates_without_key: bool = option(
        False,
        SERVING,
        "Clients without a key may replace the weights of a server without one, as trainers do that send none.",
    )
    allowed_origins: list[str] | None = option(
        None,
        SERVING,
        "Web pages that may use a server without a key, besides this machine's, and whose hosts are names of it:"
        " `https://HOST:PORT`; `*`: all.",
    )
    chat_template: str | None = option(None, SERVING, "Jinja file that replaces the tokenizer's chat template.")
    default_chat_template_kwargs: str = option(
        "{}",
        SERVING,
        "JSON object of template variables that requests leave out, such as enable_thinking.",
        json=True,
        metavar="JSON",
    )
    tool_call_parser: str | None = option(
        None,
        SERVING,
        "Format of the model's tool calls; auto: as its chat template shows. Without it calls stay in the text.",
        choices=TOOL_CALL_PARSERS,
    )
    reasoning_parser: str | None = option(
        None,
        SERVING,
        "Format of the model's reasoning; auto: as its chat template shows. Without it thoughts stay in the text.",
        choices=REASONING_PARSERS,
    )
    constrained_thinking_share: float = option(
        0.5,
        SERVING,
        "Share of an output that thoughts may take before an answer in a given format, unless the request has a budget "
        "for them; 1: no limit, 0: no thoughts.",
        minimum=0,
        maximum=1,
    )
    fold_system_messages: str | None = option(
        None,
        SERVING,
        "Where texts of system messages go that the chat template does not take where they are: in-place, into the "
        "text of the user or the result that is there, so that all before it stays cached; first, into the first "
        "system message. Left out: in-place in /v1/messages and /v1/responses; elsewhere such a conversation is "
        "refused.",
        choices=("first", "in-place"),
    )
    allow_auto_truncate: bool = option(
        False, SERVING, "Cut prompts and outputs that exceed the context instead of refusing."
    )
    incremental_streaming_output: bool = option(False, SERVING, "/generate streams new text only, not all text so far.")
    sampling_defaults: str = option(
        "model",
        SERVING,
        "Defaults of requests: the model's generation_config.json, or OpenAI's (temperature 1, top_p 1).",
        choices=("model", "openai"),
    )
    preferred_sampling_params: str | None = option(
        None, SERVING, "JSON object of sampling parameters that requests leave out.", json=True, metavar="JSON"
    )
    enable_streaming_session: bool = option(
        False, SERVING, "Sessions with `streaming`: each request goes on from the last one that ended well."
    )
    enable_return_hidden_states: bool = option(
        False, SERVING, "/generate returns final hidden states to requests with `return_hidden_states`."
    )
    dry_run: bool = option(False, SERVING, "Check flags, config, layout and memory, print the plan, and start nothing.")
    skip_server_warmup: bool = option(False, SERVING, "Start without a first prompt and a first request.")
    watchdog_timeout: float = option(300.0, SERVING, "Seconds after which a stuck step ends the server.", minimum=1)


@dataclass(kw_only=True)
class LoggingArgs:
    """Options of what the server logs and counts."""

    log_level: str = option(
        "info", OBSERVE, "Level of our messages.", choices=("debug", "info", "warning", "error", "critical")
    )
    log_level_http: str | None = option(
        None,
        OBSERVE,
        "Level of the HTTP server's messages; as --log-level if not given.",
        choices=("debug", "info", "warning", "error", "critical"),
    )
    log_requests: bool = option(False, OBSERVE, "Log every request.")
    log_requests_level: int = option(
        2,
        OBSERVE,
        "0: ids and counts, 1: and parameters, 2: and the beginnings of texts without credentials, 3: all texts.",
        minimum=0,
        maximum=3,
    )
    decode_log_interval: int = option(40, OBSERVE, "Decode steps between two log lines.", minimum=1)
    enable_metrics: bool = option(False, OBSERVE, "Serve Prometheus metrics at /metrics.")
    enable_trace: bool = option(False, OBSERVE, "Send OpenTelemetry traces of requests (needs the extra `trace`).")
    otlp_traces_endpoint: str = option(
        "localhost:4317", OBSERVE, "Collector of the traces: HOST:PORT over gRPC, or http(s)://HOST:PORT/v1/traces."
    )
    otlp_service_name: str = option("sglang", OBSERVE, "Name of this service in the traces.")
    enable_cache_report: bool = option(False, OBSERVE, "Say in `usage` how many prompt tokens were cached.")
