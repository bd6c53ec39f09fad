"""A hybrid model with random weights: decoding, prompts, and the second turn of a conversation.

    python benchmark/hybrid/bench_hybrid.py [--model-path DIR] [--turn 16384] [flags of the server]

DIR needs a config.json only (default: Qwen3.5-35B-A3B's). Prints what a decode step must read and how long that takes
at the memory's bandwidth, then the measured steps beside it (`sglang.bench_one_batch`), then the time to the first
token of a first turn, of a second one that extends it by `--more` tokens, and of that one without the prefix cache.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CONFIG = Path(__file__).parents[2] / "test" / "srt" / "kernels" / "configs" / "qwen35.json"
BATCHES = (1, 16, 64)
INPUT_LEN, OUTPUT_LEN = 1024, 33
TOKEN_LIMIT = 10_000
"""Token ids of prompts lie below."""


def floors(flags: Sequence[str]) -> dict[int, float]:
    """Milliseconds of a decode step of so many requests, if it reads what it must and nothing else."""
    from sglang.explain import explain
    from sglang.plan.floors import StepFloors
    from sglang.srt.hardware.arch import current_arch
    from sglang.srt.kernels.resolve import installed_packages
    from sglang.srt.kernels.spec import Choice
    from sglang.srt.plan.plan import serving_of
    from sglang.srt.server_args import ServerArgs

    args = ServerArgs.from_cli(list(flags), "bench_hybrid")
    arch = current_arch(device=args.device)
    if arch.device == "cpu":
        return {}
    explained = explain(args, arch, installed_packages(), None)
    model = explained.model
    choices = {outcome.need.key: outcome for outcome in explained.outcomes if isinstance(outcome, Choice)}
    steps = StepFloors(model, serving_of(args, model.dtype, model.quantization), arch, choices)
    assert explained.plan is not None, explained.refused
    print(f"weights {explained.plan['memory']['weights'] / 1e9:.1f} GB, {arch.name}")
    found = {}
    for size in BATCHES:
        floor = steps.decode(size, INPUT_LEN)
        found[size] = 1e3 * floor.read_seconds
        print(f"decode of {size}: reads {floor.read_bytes / 1e9:.2f} GB, {found[size]:.2f} ms at the full bandwidth")
    return found


def steps(flags: Sequence[str], least: dict[int, float], folder: Path) -> None:
    results = folder / "steps.jsonl"
    command = [sys.executable, "-m", "sglang.bench_one_batch", *flags, "--result-filename", str(results)]
    command += ["--batch-size", *map(str, BATCHES), "--input-len", str(INPUT_LEN), "--output-len", str(OUTPUT_LEN)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    print("| batch | decode ms | floor ms | tok/s | prefill tok/s |\n|---|---|---|---|---|")
    for line in results.read_text().splitlines():
        row = json.loads(line)
        size, median = row["batch_size"], 1e3 * row["median_decode_latency"]
        print(
            f"| {size} | {median:.2f} | {least.get(size, 0.0):.2f} | {row['median_decode_throughput']:,.0f}"
            f" | {row['prefill_throughput']:,.0f} |",
            flush=True,
        )


def turns(flags: dict[str, Any], first: int, more: int, repeats: int) -> None:
    from sglang import Engine

    rng, config = random.Random(0), json.loads((Path(flags["model_path"]) / "config.json").read_text())
    limit = min(TOKEN_LIMIT, config.get("text_config", config)["vocab_size"])
    print("| | tokens | cached | TTFT ms |\n|---|---|---|---|")
    with Engine(**flags) as engine:

        def turn(ids: list[int], output: int) -> tuple[float, int, list[int]]:
            """Seconds to the first token, cached tokens, and the output."""
            ttft, last = 0.0, {}
            sampling = {"temperature": 0.0, "max_new_tokens": output, "ignore_eos": True}
            start = time.perf_counter()
            for result in engine.generate(input_ids=ids, sampling_params=sampling, stream=True):
                ttft, last = ttft or time.perf_counter() - start, result
            return ttft, last["meta_info"]["cached_tokens"], last["output_ids"]

        def tokens(count: int) -> list[int]:
            return [rng.randrange(1, limit) for _ in range(count)]

        rows: dict[str, list[tuple[int, int, float]]] = {"first turn": [], "second turn": [], "second, not cached": []}
        for attempt in range(repeats + 1):
            engine.flush_cache()
            prompt = tokens(first)
            ttft, cached, output = turn(prompt, 64)
            longer = prompt + output + tokens(more)
            again, hit, _ = turn(longer, 8)
            engine.flush_cache()
            cold, nothing, _ = turn(longer, 8)
            if attempt:  # the first one warms up
                rows["first turn"].append((first, cached, ttft))
                rows["second turn"].append((len(longer), hit, again))
                rows["second, not cached"].append((len(longer), nothing, cold))
        for name, values in rows.items():
            count, cached, _ = values[0]
            print(f"| {name} | {count} | {cached} | {1e3 * statistics.median(v[2] for v in values):.1f} |", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", default="", help="A directory with a config.json.")
    parser.add_argument("--turn", type=int, default=16_384, help="Tokens of the first turn.")
    parser.add_argument("--more", type=int, default=200, help="Tokens that the second turn adds to prompt and output.")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--only", choices=("steps", "turns"))
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = options.model_path
        if not model:
            shutil.copy(CONFIG, folder / "config.json")
            model = name
        common: dict[str, Any] = {
            "model_path": model,
            "load_format": "dummy",
            "device": options.device,
            "page_size": options.page_size,
        }
        flags = [word for key, value in common.items() for word in ("--" + key.replace("_", "-"), str(value))]
        if options.only != "turns":
            steps(flags, floors(flags), folder)
        if options.only != "steps":
            turns(common | {"skip_tokenizer_init": True}, options.turn, options.more, options.repeats)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
