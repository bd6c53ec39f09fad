"""Writes docs/comparison.md: the features of this server beside those of SGLang 0.5.23 and vLLM 0.33.

python scripts/comparison_page.py

A row of FEATURES names a flag, a route or a command. Whether this server has it follows from its own tables, so a
feature that arrives changes its row by itself. The evidence of a row is a page or a test. SGLang knows the name if it
is an option or a route of both, or one that `upstream_interface.json` refuses or accepts. The names of vLLM are those
in the source of its release.
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

This page is for owners of a server who want to know, before they move it, whether a feature that they use exists here.

- **Here**: "yes" links to the page or to the test that shows it; "no" is followed by what to do instead.
- **SGLang 0.5.23** and **vLLM 0.33**: the flag or route that asks for the feature there, from the source of the
  release. A dash means that we found none.

[Performance](performance.md) compares speed. The releases measured there are older: SGLang 0.5.15 and vLLM 0.26.0.

A script writes the page from the tables of the code, and a test fails when the page is stale:

    python scripts/comparison_page.py
"""


@dataclass(frozen=True, slots=True)
class Feature:
    """One row. `name` is a flag (`--x`), a route (`/x`) or a command (`sglang x`, `python -m sglang.x`) of this server.

    evidence: a page, as docs/ links to it, or the path of a test; "" for a feature that is not here.
    sglang, vllm: the cells of the others; an empty `sglang` is `name`.
    """

    title: str
    name: str
    evidence: str
    vllm: str
    sglang: str = ""


FEATURES: dict[str, tuple[Feature, ...]] = {
    "API": (
        Feature("Chat completions", "/v1/chat/completions", "api.md#routes", "`/v1/chat/completions`"),
        Feature("Completions", "/v1/completions", "api.md#routes", "`/v1/completions`"),
        Feature("Responses", "/v1/responses", "outputs.md#api-forms", "`/v1/responses`"),
        Feature("Anthropic's messages", "/v1/messages", "outputs.md#api-forms", "`/v1/messages`"),
        Feature("Ollama's API", "/api/chat", "test/http/test_ollama.py", "-"),
        Feature("Embeddings", "/v1/embeddings", "api.md#embeddings-scores-and-ranks", "`/v1/embeddings`"),
        Feature("Classification", "/classify", "api.md#embeddings-scores-and-ranks", "`/classify`"),
        Feature("Rerank", "/v1/rerank", "api.md#embeddings-scores-and-ranks", "`/v1/rerank`"),
        Feature("SGLang's native API", "/generate", "test/http/test_native_api.py", "-"),
        Feature("Tool calls", "--tool-call-parser", "api.md#tools-and-reasoning", "`--tool-call-parser`"),
        Feature("Reasoning", "--reasoning-parser", "api.md#tools-and-reasoning", "`--reasoning-parser`"),
        Feature("Structured output", "--grammar-backend", "api.md#structured-output", "`--structured-outputs-config`"),
        Feature("Sessions that continue an earlier request", "--enable-streaming-session", "api.md#conversations", "-"),
        Feature("API key", "--api-key", "api.md#keys-and-browsers", "`--api-key`"),
        Feature("TLS in the server", "--ssl-keyfile", "", "`--ssl-keyfile`"),
    ),
    "Models and weights": (
        Feature("Quantized weights", "--quantization", "quantization.md", "`--quantization`"),
        Feature("FP8 and FP4 KV cache", "--kv-cache-dtype", "quantization.md#kv-cache", "`--kv-cache-dtype`"),
        Feature(
            "Scales of the KV cache in a file",
            "--quantization-param-path",
            "quantization.md#scales-of-the-cache",
            "in checkpoints only",
        ),
        Feature("LoRA adapters", "--enable-lora", "lora.md", "`--enable-lora`"),
        Feature("Images and video", "--limit-mm-data-per-request", "multimodal.md", "`--limit-mm-per-prompt`"),
        Feature(
            "New weights in a running server",
            "/update_weights_from_disk",
            "weight_updates.md",
            "`--weight-transfer-config`",
        ),
        Feature("Memory given back while idle", "--enable-memory-saver", "several_models.md", "`--enable-sleep-mode`"),
        Feature("Experts in CPU memory", "--enable-paged-experts", "expert_offload.md", "`--cpu-offload-gb`"),
        Feature("Experts computed by CPUs", "--kt-cpuinfer", "expert_offload.md#experts-on-cpus", "no"),
    ),
    "Speed": (
        Feature(
            "Prefix cache in GPU memory",
            "--disable-radix-cache",
            "caches.md",
            "on by default; `--no-enable-prefix-caching` turns it off",
            sglang="on by default; `--disable-radix-cache` turns it off",
        ),
        Feature(
            "Prefix cache in CPU memory",
            "--enable-hierarchical-cache",
            "caches.md#prefixes-in-main-memory",
            "`--kv-offloading-size`",
        ),
        Feature(
            "Prefix cache in files, by NIXL, Mooncake and LMCache",
            "--hicache-storage-backend",
            "caches.md#in-files-or-another-store",
            "`--kv-transfer-config`",
        ),
        Feature("Speculative decoding", "--speculative-algorithm", "speculative_decoding.md", "`--speculative-config`"),
        Feature(
            "CUDA graphs",
            "--cuda-graph-max-bs",
            "test/srt/model_executor/test_graph_runner.py",
            "on by default; `--max-cudagraph-capture-size` limits them",
            sglang="on by default; `--cuda-graph-max-bs` limits them",
        ),
        Feature("Prefill and decode on different servers", "--disaggregation-mode", "", "`--kv-transfer-config`"),
    ),
    "Several GPUs": (
        Feature("Tensor parallelism", "--tp-size", "parallelism.md", "`--tensor-parallel-size`"),
        Feature("Pipeline parallelism", "--pp-size", "parallelism.md#stages", "`--pipeline-parallel-size`"),
        Feature(
            "Expert parallelism",
            "--ep-size",
            "parallelism.md#experts-shares-or-whole-experts",
            "`--enable-expert-parallel`",
        ),
        Feature("Replicas behind one address", "--dp-size", "parallelism.md#replicas", "`--data-parallel-size`"),
        Feature(
            "Data-parallel attention",
            "--enable-dp-attention",
            "parallelism.md#data-parallel-attention",
            "`--data-parallel-size`",
        ),
        Feature(
            "Decode context parallelism (DCP)",
            "--dcp-size",
            "parallelism.md#decode-context-parallelism",
            "`--decode-context-parallel-size`",
        ),
        Feature(
            "Prefill context parallelism",
            "--attention-context-parallel-size",
            "",
            "`--prefill-context-parallel-size`",
        ),
        Feature(
            "Two-batch overlap", "--enable-two-batch-overlap", "parallelism.md#two-batch-overlap", "`--enable-dbo`"
        ),
    ),
    "Operation": (
        Feature(
            "Prometheus metrics",
            "--enable-metrics",
            "observability.md#metrics-and-the-dashboard",
            "on by default, at `/metrics`",
        ),
        Feature("OpenTelemetry traces", "--enable-trace", "observability.md#traces", "`--otlp-traces-endpoint`"),
        Feature("Web page for conversations", "/", "observability.md#the-page", "-", sglang="-"),
        Feature(
            "Memory and predicted speed of every layout, from config.json",
            "sglang plan",
            "test/plan/test_plan_command.py",
            "-",
            sglang="-",
        ),
        Feature("Diagnosis of the machine", "sglang doctor", "troubleshooting.md", "-", sglang="-"),
        Feature("Start without loading, to check a command", "--dry-run", "test/test_dry_run.py", "-", sglang="-"),
        Feature(
            "Kernels with the reasons of their choice",
            "python -m sglang.explain",
            "kernels.md#see-the-choice",
            "-",
            sglang="-",
        ),
        Feature(
            "Record of the resources of every kernel",
            "python -m sglang.ledger",
            "kernels.md#the-ledger",
            "-",
            sglang="-",
        ),
    ),
}


def page() -> str:
    """The text of docs/comparison.md."""
    tables = [
        f"## {title}\n\n" + _table(("feature", "here", "SGLang 0.5.23", "vLLM 0.33"), map(_row, rows))
        for title, rows in FEATURES.items()
    ]
    return "\n".join([INTRODUCTION, *tables, _numbers(), _flags()])


def _row(feature: Feature) -> tuple[str, ...]:
    reason = not_served(feature.name)
    return (
        feature.title,
        reason or f"yes: {_link(feature.evidence)}",
        feature.sglang or f"`{feature.name}`",
        feature.vllm,
    )


def _link(evidence: str) -> str:
    if evidence.startswith("test/"):
        return f"[test](../{evidence})"
    title = (PAGE.parent / evidence.partition("#")[0]).read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
    return f"[{title}]({evidence})"


def not_served(name: str) -> str:
    """Returns why a flag, route or command is not served here, and what to do instead; "" for one that is.

    Raises ValueError for a name that no table knows.
    """
    if name == "--dry-run":  # read by `sglang serve` itself
        return ""
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
    return ""


def _flag(name: str) -> str:
    if name in TABLE.names:
        return ""
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
    return "## Counts\n\n" + _table(("what", "number here"), rows)


def _flags() -> str:
    options = sum(len(group.names) for group in ACCEPTED), sum(len(group.names) for group in REFUSED)
    text = (
        "## SGLang's flags that are no option here\n\n"
        f"- {options[0]} flags only tune what the plan decides here. They are accepted with a warning.\n"
        f"- {options[1]} flags are refused: they would change answers, or ask for a feature that does not exist.\n"
        "\n[Flags](flags.md) lists each of them.\n\n"
    )
    return text + _table(("refused", "flags", "what to do"), (_group(group) for group in REFUSED))


def _group(group: FlagGroup) -> tuple[str, ...]:
    return group.title, str(len(group.names)), group.reason


def _table(titles: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [titles, tuple("---" for _ in titles), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
