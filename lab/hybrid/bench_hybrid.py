"""A hybrid model with random weights: decoding, prompts, and the second turn of a conversation.

    python lab/hybrid/bench_hybrid.py [--model-path DIR] [--turn 16384] [flags of the server]

DIR needs a config.json only (default: Qwen3.5-35B-A3B's). Prints what a decode step must read and how long that takes
at the memory's bandwidth, then the measured steps beside it (`sglang.bench_one_batch`), then the time to the first
token of a first turn, of a second one that extends it by `--more` tokens, and of that one without the prefix cache;
with `--peer-site` (see `benchmark/peers/compare.py`) also upstream's.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmark" / "peers"))
import compare  # noqa: E402

CONFIG = ROOT / "test" / "srt" / "kernels" / "configs" / "qwen35.json"
TURNS = Path(__file__).with_name("turns.py")
BATCHES = (1, 16, 64)
INPUT_LEN, OUTPUT_LEN = 1024, 33
ONE_REQUEST = {"max_running_requests": 8, "cuda_graph_max_bs": 4}
"""Of turns, which come one after the other: fewer graphs."""
PEER_OPTIONS = {"attention_backend": "triton", "sampling_backend": "pytorch", "grammar_backend": "none"}


def floors(flags: Sequence[str]) -> dict[int, float]:
    """Milliseconds of a decode step of so many requests, if it reads what it must and nothing else."""
    from sglang.explain import explain
    from sglang.plan.floors import StepFloors
    from sglang.srt.hardware.arch import current_arch
    from sglang.srt.kernels.resolve import installed_packages
    from sglang.srt.kernels.spec import Choice
    from sglang.srt.plan.model_planner import parallel_config_of
    from sglang.srt.server_args import ServerArgs

    args = ServerArgs.from_cli(list(flags), "bench_hybrid")
    arch = current_arch(device=args.device)
    if arch.device == "cpu":
        return {}
    explained = explain(args, arch, installed_packages(), None)
    model = explained.model
    choices = {outcome.need.key: outcome for outcome in explained.outcomes if isinstance(outcome, Choice)}
    steps = StepFloors(model, parallel_config_of(args, model.dtype, model.quantization), arch, choices)
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


def turns(name: str, model: str, engine: dict[str, Any], options: argparse.Namespace, peer_site: str = "") -> None:
    """A side's rows of the table: of this server, or with `peer_site` of upstream."""
    command = [sys.executable, "-W", "ignore", str(TURNS), "--model-path", model, "--engine", json.dumps(engine)]
    command += ["--turn", str(options.turn), "--more", str(options.more), "--repeats", str(options.repeats)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "python"), os.environ.get("PYTHONPATH", "")])}
    if peer_site:
        env |= compare.PEER_ENV | {"PYTHONPATH": compare.peer_path(peer_site)}
    log = Path(os.environ.get("OUT") or tempfile.gettempdir()) / f"turns_{name}.log"
    with (
        log.open("w") as stderr,
        subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=stderr, text=True, start_new_session=True
        ) as process,
    ):
        try:
            printed, _ = process.communicate(timeout=options.limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            print(f"{name}: stopped after {options.limit} s; see {log}", flush=True)
            return
    results = [line for line in printed.splitlines() if line.startswith('{"start_s"')]
    if not results:
        print(f"{name}: ended with {process.returncode}; see {log}\n{log.read_text()[-1500:]}", flush=True)
        return
    result = json.loads(results[0])
    for row in result["rows"]:
        print(f"| {name} | {row['turn']} | {row['tokens']} | {row['cached']} | {row['ttft_ms']:.1f} |")
    _, second, cold = (row["ttft_ms"] for row in result["rows"])
    share, start = second / cold, result["start_s"]
    print(f"\n{name}: a hit costs {share:.3f} of the whole prompt; up after {start:.0f} s\n", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", default="", help="A directory with a config.json.")
    parser.add_argument("--turn", type=int, default=16_384, help="Tokens of the first turn.")
    parser.add_argument("--more", type=int, default=200, help="Tokens that the second turn adds to prompt and output.")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--peer-site", default="", help="A folder with upstream and its dependencies.")
    parser.add_argument("--limit", type=float, default=180.0, help="Seconds that a side's turns may take.")
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
            engine = {"device": options.device, "page_size": options.page_size} | ONE_REQUEST
            print("| | turn | tokens | cached | TTFT ms |\n|---|---|---|---|---|")
            turns("ours", model, engine, options)
            if options.peer_site:
                turns("peer", model, PEER_OPTIONS | ONE_REQUEST, options, options.peer_site)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
