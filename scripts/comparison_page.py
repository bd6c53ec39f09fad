"""Writes docs/comparison.md: the features of this server beside those of SGLang 0.5.23 and vLLM 0.32.

python scripts/comparison_page.py

A row of FEATURES names a flag, a route or a command. This server's state follows from its own tables, so a feature that
arrives changes its row by itself. SGLang knows the name if it is an option or a route of both, or one that
`upstream_interface.json` refuses or accepts. The names of vLLM are those of its documentation.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sglang.cli import COMMANDS
from sglang.srt.entrypoints.http_app import FORMS
from sglang.srt.function_call.registry import REASONING_FORMATS, TOOL_CALL_FORMATS
from sglang.srt.kernels.tables import TABLES
from sglang.srt.plan.families import SERVED_ARCHITECTURES
from sglang.srt.server_args import TABLE
from sglang.srt.upstream_interface import ACCEPTED, REFUSED, REFUSED_ROUTES, FlagGroup

PAGE = Path(__file__).parents[1] / "docs" / "comparison.md"

INTRODUCTION = """\
# SGLang and vLLM compared

Use this page to see whether something that you rely on exists here, before you move a server. It is generated from the
tables of the code, and a test fails when it is stale:

    python scripts/comparison_page.py

SGLang is release 0.5.23, with the flags and routes of its source. vLLM is release 0.32, with the names of its
documentation (November 2026). A dash means that we know of no flag or route for it. "No" is followed by what to do
instead.
"""


@dataclass(frozen=True, slots=True)
class Feature:
    """One row: `name` is a flag (`--x`), a route (`/x`) or a command (`sglang x`, `python -m sglang.x`)."""

    title: str
    name: str
    vllm: str
    only_here: bool = False


FEATURES: dict[str, tuple[Feature, ...]] = {
    "API": (
        Feature("Chat completions", "/v1/chat/completions", "`/v1/chat/completions`"),
        Feature("Completions", "/v1/completions", "`/v1/completions`"),
        Feature("Responses", "/v1/responses", "`/v1/responses`"),
        Feature("Anthropic's messages", "/v1/messages", "`/v1/messages`"),
        Feature("Ollama's API", "/api/chat", "-"),
        Feature("Embeddings", "/v1/embeddings", "`/v1/embeddings`"),
        Feature("Rerank", "/v1/rerank", "`/v1/rerank`"),
        Feature("SGLang's own form", "/generate", "-"),
        Feature("Tool calls", "--tool-call-parser", "`--tool-call-parser`"),
        Feature("Reasoning", "--reasoning-parser", "`--reasoning-parser`"),
        Feature("Structured output", "--grammar-backend", "`--structured-outputs-config`"),
        Feature("Sessions that go on from a request", "--enable-streaming-session", "-"),
        Feature("API key", "--api-key", "`--api-key`"),
        Feature("TLS in the server", "--ssl-keyfile", "`--ssl-keyfile`"),
    ),
    "Models and weights": (
        Feature("Quantization of weights", "--quantization", "`--quantization`"),
        Feature("FP8 and FP4 KV cache", "--kv-cache-dtype", "`--kv-cache-dtype`"),
        Feature("LoRA adapters", "--enable-lora", "`--enable-lora`"),
        Feature("Images and video", "--limit-mm-data-per-request", "`--limit-mm-per-prompt`"),
        Feature("Weights of a running server", "/update_weights_from_disk", "`--weight-transfer-config`"),
        Feature("Memory handed back while idle", "--enable-memory-saver", "`--enable-sleep-mode`"),
        Feature("Weights in CPU memory", "--kt-method", "`--cpu-offload-gb`"),
    ),
    "Speed": (
        Feature("Prefix cache", "--disable-radix-cache", "`--enable-prefix-caching`"),
        Feature("Prefix cache in CPU memory", "--enable-hierarchical-cache", "`--kv-offloading-size`"),
        Feature("Speculative decoding", "--speculative-algorithm", "`--speculative-config`"),
        Feature("CUDA graphs", "--cuda-graph-max-bs", "`--max-cudagraph-capture-size`"),
        Feature("Prefill and decode on different servers", "--disaggregation-mode", "`--kv-transfer-config`"),
    ),
    "Several GPUs": (
        Feature("Tensor parallelism", "--tp-size", "`--tensor-parallel-size`"),
        Feature("Pipeline parallelism", "--pp-size", "`--pipeline-parallel-size`"),
        Feature("Expert parallelism", "--ep-size", "`--enable-expert-parallel`"),
        Feature("Replicas behind one address", "--dp-size", "`--data-parallel-size`"),
        Feature("Attention by data parallelism", "--enable-dp-attention", "`--data-parallel-size`"),
        Feature("Tokens of the cache shared out over GPUs", "--dcp-size", "`--decode-context-parallel-size`"),
        Feature(
            "Prompts shared out over GPUs", "--attention-context-parallel-size", "`--prefill-context-parallel-size`"
        ),
    ),
    "Operation": (
        Feature("Prometheus metrics", "--enable-metrics", "`/metrics`"),
        Feature("OpenTelemetry traces", "--enable-trace", "`--otlp-traces-endpoint`"),
        Feature("Web page for conversations", "/", "-", only_here=True),
        Feature("Memory and speed of every layout, from config.json", "sglang plan", "-", only_here=True),
        Feature("Diagnosis of the machine", "sglang doctor", "-", only_here=True),
        Feature("Start without loading, to check a command", "--dry-run", "-", only_here=True),
        Feature("Kernels with the reasons of their choice", "python -m sglang.explain", "-", only_here=True),
        Feature("Record of the resources of every kernel", "python -m sglang.ledger", "-", only_here=True),
    ),
}


def page() -> str:
    """The text of docs/comparison.md."""
    tables = [
        f"## {title}\n\n" + _table(("feature", "here", "SGLang 0.5.23", "vLLM 0.32"), map(_row, rows))
        for title, rows in FEATURES.items()
    ]
    return "\n".join([INTRODUCTION, *tables, _numbers(), _flags()])


def _row(feature: Feature) -> tuple[str, ...]:
    upstream = "-" if feature.only_here else f"`{feature.name}`"
    return feature.title, here(feature.name), upstream, feature.vllm


def here(name: str) -> str:
    """The state of a flag, route or command in this server. Raises ValueError for a name that no table knows."""
    if name == "--dry-run":  # read by `sglang serve` itself
        return "yes, `--dry-run`"
    if name.startswith("--"):
        return _flag(name)
    if name.startswith("sglang "):
        known = name.partition(" ")[2] in COMMANDS
    elif name.startswith("python -m "):
        known = importlib.util.find_spec(name.removeprefix("python -m ")) is not None
    elif name in REFUSED_ROUTES:
        return f"no: {REFUSED_ROUTES[name]}"
    else:
        known = name in _routes()
    if not known:
        raise ValueError(f"{name} is neither served nor refused: correct the row of FEATURES")
    return f"yes, `{name}`"


def _flag(name: str) -> str:
    if name in TABLE.names:
        return f"yes, `{name}`"
    for groups, word in ((ACCEPTED, "not needed"), (REFUSED, "no")):
        for group in groups:
            if any(name == f"--{entry.partition('=')[0]}" for entry in group.names):
                return f"{word}: {group.reason}"
    raise ValueError(f"{name} is no option, and no table of SGLang's flags knows it: correct the row of FEATURES")


def _routes() -> frozenset[str]:
    from sglang.srt.entrypoints.page import routes as page_routes

    routers = (*(form.router for form in FORMS), page_routes.router)
    return frozenset(route.path for router in routers for route in router.routes)  # type: ignore[attr-defined]


def _numbers() -> str:
    rows = (
        ("architectures of models", str(len(SERVED_ARCHITECTURES))),
        ("formats of tool calls", str(len(TOOL_CALL_FORMATS))),
        ("formats of reasoning", str(len(REASONING_FORMATS))),
        ("values of `--quantization`", str(len(TABLE.spec("quantization").choices))),
        ("operations with a table of kernels", str(len(TABLES))),
        ("options of the server", str(len(TABLE.fields))),
    )
    return "## How much of it\n\n" + _table(("what", "number here"), rows)


def _flags() -> str:
    options = sum(len(group.names) for group in ACCEPTED), sum(len(group.names) for group in REFUSED)
    text = (
        "## SGLang's flags that are no option here\n\n"
        f"{options[0]} flags only tune what the plan decides here: they are accepted with a warning. {options[1]} flags"
        " are refused, because they would change answers or ask for a feature that does not exist. [Flags](flags.md)"
        " lists each of them.\n\n"
    )
    return text + _table(("refused", "flags", "what to do"), (_group(group) for group in REFUSED))


def _group(group: FlagGroup) -> tuple[str, ...]:
    return group.title, str(len(group.names)), group.reason


def _table(titles: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [titles, tuple("---" for _ in titles), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
