"""Measures a running server: `python -m sglang.bench_serving --backend sglang --dataset-name random ...`.

TTFT is the time from sending a request to its first token, ITL the gaps between the chunks that follow, TPOT the time
from the first to the last token divided by the number of tokens after the first.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from sglang.bench.backends import BACKENDS, Backend, CallOptions, RequestResult, run_request
from sglang.bench.dataset_flags import add_dataset_flags, dataset_args, json_object
from sglang.bench.datasets import DatasetArgs, DatasetError, Prompt, make_prompts
from sglang.bench.http_client import Endpoint, HttpError, get_json, send
from sglang.bench.load import arrival_times, run_load
from sglang.bench.summary import Summary, report
from sglang.bench.tokenizer import load_prompt_tokenizer
from sglang.srt.errors import UserError

T = TypeVar("T")


class BenchError(Exception):
    """The run cannot go on; the message says why."""


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command."""
    parser = argparse.ArgumentParser(
        prog="sglang.bench_serving", description="Benchmark of a running server: throughput and latencies."
    )
    server = parser.add_argument_group("server")
    server.add_argument("--backend", choices=list(BACKENDS), default="sglang")
    server.add_argument("--base-url", help="Such as http://127.0.0.1:30000; replaces --host and --port.")
    server.add_argument("--host", default="127.0.0.1")
    server.add_argument("--port", type=int, help="Default: 30000 for sglang, 8000 for vllm.")
    server.add_argument("--model", help="Default: what the server says.")
    server.add_argument("--served-model-name", help="Name in the requests. Default: what the server says.")
    server.add_argument("--tokenizer", help="Directory or Hugging Face id. Default: the server's.")
    server.add_argument("--trust-remote-code", action="store_true", help="For a tokenizer that brings its own code.")
    server.add_argument("--header", nargs="+", default=[], metavar="NAME=VALUE", help="Further request headers.")
    server.add_argument("--ready-check-timeout-sec", type=float, default=60.0, help="How long to wait for the server.")
    add_dataset_flags(parser)
    load = parser.add_argument_group("load")
    load.add_argument("--tokenize-prompt", action="store_true", help="Send token ids instead of text.")
    load.add_argument(
        "--request-rate", type=float, default=float("inf"), help="Requests a second, Poisson. Default: inf."
    )
    load.add_argument("--max-concurrency", type=int, help="Requests in flight at most.")
    load.add_argument("--warmup-requests", type=int, default=1)
    load.add_argument("--flush-cache", action="store_true", help="Empty the server's prefix cache after the warm-up.")
    load.add_argument("--disable-stream", action="store_true")
    load.add_argument("--disable-ignore-eos", action="store_true", help="Let outputs end by themselves.")
    load.add_argument("--return-logprob", action="store_true")
    load.add_argument(
        "--extra-request-body", type=json_object, default={}, metavar="JSON", help="Merged into requests."
    )
    load.add_argument("--profile", action="store_true", help="Start and stop the server's profiler around the run.")
    output = parser.add_argument_group("output")
    output.add_argument("--output-file", help="A line of JSON is appended for each run.")
    output.add_argument("--output-details", action="store_true", help="With lengths, times and texts of all requests.")
    output.add_argument("--tag", help="Any text; goes to the output file.")
    output.add_argument("--disable-tqdm", action="store_true")
    return parser


def _endpoint(args: argparse.Namespace, backend: Backend) -> Endpoint:
    headers = {}
    key = os.environ.get("OPENAI_API_KEY") or os.environ.get("API_KEY")
    if key:
        headers["Authorization"] = f"Bearer {key}"
    for entry in args.header:
        name, equals, value = entry.partition("=")
        if not equals:
            raise BenchError(f"--header takes NAME=VALUE, got {entry!r}")
        headers[name] = value
    url = args.base_url or f"http://{args.host}:{args.port or backend.default_port}"
    return Endpoint.parse(url, headers)


def _dataset_args(args: argparse.Namespace, backend: Backend) -> DatasetArgs:
    if args.tokenize_prompt and args.backend.endswith("-chat"):
        raise BenchError("--tokenize-prompt: the chat endpoint takes text only")
    are_ids = args.dataset_name == "random-ids" or (args.dataset_name == "random" and args.dataset_path is None)
    return dataset_args(args, as_ids=args.tokenize_prompt or (are_ids and backend.takes_ids))


@dataclass(frozen=True, slots=True)
class _Served:
    """The facts of the server that is measured."""

    name: str
    tokenizer: str


async def _ask_server(endpoint: Endpoint, backend: Backend, args: argparse.Namespace) -> _Served:
    """Waits until the server answers, then asks for its model and tokenizer where the command line does not say."""
    deadline = time.monotonic() + args.ready_check_timeout_sec
    while True:
        try:
            models = (await get_json(endpoint, "/v1/models"))["data"]
            break
        except HttpError as error:
            if time.monotonic() > deadline or str(error).startswith("HTTP 4"):
                raise BenchError(f"the server is not ready: {error}") from None
            await asyncio.sleep(0.5)
    name = args.served_model_name or args.model or models[0]["id"]
    tokenizer = args.tokenizer or args.model
    if tokenizer is None and backend.is_sglang:
        tokenizer = (await get_json(endpoint, "/get_model_info")).get("tokenizer_path")
    return _Served(name, tokenizer or models[0].get("root") or name)


async def _flush_cache(endpoint: Endpoint) -> None:
    """Retried for a moment, since a server refuses while it still cleans up after the last request."""
    for attempt in range(10):
        try:
            await send(endpoint, "POST", "/flush_cache", timeout_s=30)
            return
        except HttpError as error:
            if attempt == 9:
                raise BenchError(f"--flush-cache failed: {error}") from None
            await asyncio.sleep(0.3)


async def _drafts(endpoint: Endpoint, backend: Backend) -> dict[str, Any]:
    """Returns a server's figures on its drafts; none if it does not draft, or does not report them."""
    if not backend.is_sglang:
        return {}
    try:
        info = await get_json(endpoint, "/server_info")
    except HttpError:
        return {}
    states = info.get("internal_states") or [{}]
    return {name: states[0][name] for name in ("avg_spec_accept_length", "spec_totals") if states[0].get(name)}


def _accept_length(before: dict[str, Any], after: dict[str, Any]) -> float | None:
    """Tokens that a request got from a step of this run; since the start, of a server that does not say more."""
    if "spec_totals" not in after:
        value: float | None = after.get("avg_spec_accept_length")
        return value
    earlier = before.get("spec_totals", {"requests": 0, "correct": 0})
    requests = after["spec_totals"]["requests"] - earlier["requests"]
    return 1 + (after["spec_totals"]["correct"] - earlier["correct"]) / requests if requests else None


async def _warm_up(
    backend: Backend, endpoint: Endpoint, prompts: Sequence[Prompt], options: CallOptions, count: int
) -> None:
    if not count:
        return
    first = replace(prompts[0], output_len=min(prompts[0].output_len, 32))
    results = await asyncio.gather(*(run_request(backend, endpoint, first, options) for _ in range(count)))
    failed = [r for r in results if not r.success]
    if failed:
        raise BenchError(f"the warm-up request failed: {failed[0].error}")


async def benchmark(args: argparse.Namespace) -> dict[str, Any]:
    """Runs it, prints the report, appends to --output-file. Returns the numbers."""
    backend = BACKENDS[args.backend]
    dataset = _dataset_args(args, backend)
    endpoint = _endpoint(args, backend)
    served = await _ask_server(endpoint, backend, args)
    prompts = make_prompts(dataset, load_prompt_tokenizer(served.tokenizer, args.trust_remote_code))
    options = CallOptions(
        model=served.name,
        stream=not args.disable_stream,
        ignore_eos=not args.disable_ignore_eos,
        return_logprob=args.return_logprob,
        keep_text=args.output_details,
        extra_body=args.extra_request_body,
    )
    await _warm_up(backend, endpoint, prompts, options, args.warmup_requests)
    if args.flush_cache:
        await _flush_cache(endpoint)
    if args.profile:
        await send(endpoint, "POST", "/start_profile")
    drafts = await _drafts(endpoint, backend)
    arrivals = arrival_times(len(prompts), args.request_rate, np.random.default_rng(args.seed))
    results, duration = await run_load(
        backend, endpoint, prompts, options, arrivals, args.max_concurrency, progress=not args.disable_tqdm
    )
    if args.profile:
        await send(endpoint, "POST", "/stop_profile", timeout_s=600)
    return _conclude(args, results, duration, _accept_length(drafts, await _drafts(endpoint, backend)))


def _conclude(
    args: argparse.Namespace, results: list[RequestResult], duration: float, accept_length: float | None
) -> dict[str, Any]:
    summary = replace(Summary.of(results, duration), accept_length=accept_length)
    print("\n" + report(summary, args.backend, args.request_rate, args.max_concurrency))
    failed = [r for r in results if not r.success]
    if failed:
        print(f"{len(failed)} of {len(results)} requests failed; the first: {failed[0].error}", file=sys.stderr)
    record = {
        "tag": args.tag,
        "backend": args.backend,
        "dataset_name": args.dataset_name,
        "request_rate": "inf" if args.request_rate == float("inf") else args.request_rate,
        "max_concurrency": args.max_concurrency,
        "num_prompts": len(results),
        "sharegpt_output_len": args.sharegpt_output_len,
        "random_input_len": args.random_input_len,
        "random_output_len": args.random_output_len,
        "random_range_ratio": args.random_range_ratio,
        **summary.as_dict(),
    }
    details = {
        "input_lens": [r.prompt_len for r in results],
        "output_lens": [r.output_len for r in results],
        "ttfts": [r.ttft for r in results],
        "itls": [r.itl for r in results],
        "generated_texts": [r.text for r in results],
        "errors": [r.error for r in results],
    }
    if args.output_file:
        with Path(args.output_file).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record | details if args.output_details else record) + "\n")
    return record | details


def run_benchmark(args: argparse.Namespace) -> dict[str, Any]:
    """Runs the benchmark like the command, for callers in Python; `args` comes from
    `build_parser().parse_args(...)`."""
    return _run(benchmark(args))


def _run(main: Coroutine[Any, Any, T]) -> T:
    import uvloop

    loop = uvloop.new_event_loop()
    try:
        return loop.run_until_complete(main)
    finally:
        loop.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark and returns the exit status: 1 if no request completed, 2 for an error."""
    args = build_parser().parse_args(argv)
    try:
        result = run_benchmark(args)
    except (BenchError, DatasetError, HttpError, UserError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0 if result["completed"] else 1


if __name__ == "__main__":
    sys.exit(main())
