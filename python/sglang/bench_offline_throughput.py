"""Throughput of the in-process engine: all prompts at once.

    python -m sglang.bench_offline_throughput --model-path DIR --dataset-name random --num-prompts 100

Other options are the server's.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang.bench.dataset_flags import add_dataset_flags, dataset_args, json_object
from sglang.bench.datasets import DatasetError, Prompt, make_prompts
from sglang.bench.summary import WIDTH, heading, row
from sglang.bench.tokenizer import load_prompt_tokenizer
from sglang.srt.environ import adopt_environment
from sglang.srt.errors import UserError
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.log import configure_logging

if TYPE_CHECKING:
    from sglang.srt.entrypoints.engine import Engine

WARMUP_PROMPTS = 16


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, ServerArgs]:
    """Our options from the command line, and the server's from the rest. Raises UserError."""
    parser = argparse.ArgumentParser(
        prog="sglang.bench_offline_throughput", allow_abbrev=False, epilog="All options of the server are accepted too."
    )
    parser.add_argument("--backend", choices=["engine"], default="engine")
    add_dataset_flags(parser)
    parser.add_argument("--disable-ignore-eos", action="store_true", help="Let outputs end by themselves.")
    parser.add_argument(
        "--extra-request-body", type=json_object, default={}, metavar="JSON", help="Sampling parameters."
    )
    parser.add_argument("--skip-warmup", action="store_true")
    parser.add_argument("--result-filename", default="", help="A line of JSON is appended.")
    options, rest = parser.parse_known_args(list(argv))
    return options, ServerArgs.from_cli(rest, "python -m sglang.bench_offline_throughput")


def _generate(engine: Engine, prompts: Sequence[Prompt], options: argparse.Namespace) -> tuple[list[Any], float]:
    """The results of all prompts, and the seconds it took."""
    params = [
        {
            "temperature": 0.0,
            "max_new_tokens": p.output_len,
            "ignore_eos": not options.disable_ignore_eos,
            **options.extra_request_body,
        }
        for p in prompts
    ]
    start = time.perf_counter()
    results = engine.generate(input_ids=[p.ids or [] for p in prompts], sampling_params=params)
    duration = time.perf_counter() - start
    assert isinstance(results, list)
    return results, duration


def benchmark(engine: Engine, prompts: Sequence[Prompt], options: argparse.Namespace) -> dict[str, Any]:
    """The numbers of one run."""
    if not options.skip_warmup:
        _generate(engine, prompts[:WARMUP_PROMPTS], options)
        engine.flush_cache()
    results, duration = _generate(engine, prompts, options)
    state = engine.get_server_info()["internal_states"][0]
    total_input = sum(r["meta_info"]["prompt_tokens"] for r in results)
    total_output = sum(r["meta_info"]["completion_tokens"] for r in results)
    return {
        "backend": options.backend,
        "successful_requests": len(results),
        "total_latency": duration,
        "total_input_tokens": total_input,
        "total_output_tokens": total_output,
        "last_gen_throughput": float(state.get("last_gen_throughput", 0.0)),
        "request_throughput": len(results) / duration,
        "input_throughput": total_input / duration,
        "output_throughput": total_output / duration,
        "total_throughput": (total_input + total_output) / duration,
    }


ROWS = {
    "Backend:": "backend",
    "Successful requests:": "successful_requests",
    "Benchmark duration (s):": "total_latency",
    "Total input tokens:": "total_input_tokens",
    "Total generated tokens:": "total_output_tokens",
    "Last generation throughput (tok/s):": "last_gen_throughput",
    "Request throughput (req/s):": "request_throughput",
    "Input token throughput (tok/s):": "input_throughput",
    "Output token throughput (tok/s):": "output_throughput",
    "Total token throughput (tok/s):": "total_throughput",
}


def report(result: dict[str, Any]) -> str:
    """Returns the printed table of a result."""
    lines = [heading(" Offline Throughput Benchmark Result ", "=")]
    return "\n".join([*lines, *(row(name, result[key]) for name, key in ROWS.items()), "=" * WIDTH])


def run(options: argparse.Namespace, args: ServerArgs) -> dict[str, Any]:
    """Starts an engine, measures, prints. Raises UserError, DatasetError."""
    from sglang.srt.entrypoints.engine import Engine

    configure_logging(args.log_level)
    tokenizer = load_prompt_tokenizer(args.tokenizer_path or args.model_path, args.trust_remote_code)
    prompts = make_prompts(dataset_args(options, as_ids=True), tokenizer)
    with Engine(server_args=args) as engine:
        result = benchmark(engine, prompts, options)
    print("\n" + report(result), flush=True)
    if options.result_filename:
        with Path(options.result_filename).open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark and returns the exit status."""
    adopt_environment()
    try:
        run(*parse(sys.argv[1:] if argv is None else argv))
    except (UserError, DatasetError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
