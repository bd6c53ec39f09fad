#!/usr/bin/env python3
"""This server and upstream SGLang on the same GPU in one run: latency of one batch, and throughput under load.

    python benchmark/peers/compare.py --peer-site DIR --model DIR [--model DIR] --out results.json
        [--stages latency,server] [--peer-backends triton,flashinfer] [--concurrency 64,256] [--context-length N]

`--peer-site` is a folder with upstream and its dependencies, put on PYTHONPATH for the peer's processes only. Models
need a config.json and a tokenizer; weights are random. One load generator (ours) drives both servers. Prints
a table with the ratio peer / ours of each time and ours / peer of each throughput: above 1 is better than the peer.

Upstream reads the type of DeepSeek-V4's experts from checkpoints and takes it for MXFP4 where weights are random;
SGLANG_DSV4_FP4_EXPERTS=0 in the environment makes them FP8. A peer that was packed without FlashAttention 3 knows
MiMo-V2 with PEER_STUBS=cutlass,quack,sgl_kernel.flash_ops, if another attention backend is named.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BATCH_SIZES = (1, 16, 64)
INPUT_LEN, OUTPUT_LEN = 1024, 64
SERVER_INPUT, SERVER_OUTPUT = 512, 128
PORT = int(os.environ.get("BENCHMARK_PORT", "31000"))
"""Of the first server; others take the next ones. Benchmarks beside each other need a range each."""
START_LIMIT_S = 400
"""The peer compiles for 290 s before it serves experts in FP8 blocks."""
PEER_ENV = {
    "SGLANG_DISABLE_CUDNN_CHECK": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "FLASHINFER_DISABLE_VERSION_CHECK": "1",
    "SGLANG_JIT_DEEPGEMM_PRECOMPILE": "0",
    "PEER_STUBS": os.environ.get("PEER_STUBS", "cutlass,quack"),
}


def peer_path(site: str) -> str:
    """PYTHONPATH of the peer's processes."""
    return os.pathsep.join((str(Path(__file__).parent / "site"), site))


class Side:
    """One of the two servers: how its processes are started."""

    def __init__(self, name: str, pythonpath: str, env: dict[str, str], flags: list[str], log_dir: Path) -> None:
        self.name = name
        self.env = {**os.environ, **env, "PYTHONPATH": pythonpath, "PYTHONUNBUFFERED": "1"}
        self.flags = flags
        self.log = log_dir / f"{name}.log"

    def command(self, module: str, model: str, *more: str) -> list[str]:
        return [
            *(sys.executable, "-W", "ignore", "-m", f"sglang.{module}"),
            *("--model-path", model, "--load-format", "dummy", *self.flags, *more),
        ]


IN_ONE_STEP = ("--chunked-prefill-size", str(max(BATCH_SIZES) * INPUT_LEN))
"""All prompts of a batch at once, which upstream's benchmark of batches does whatever its server would. Not -1: that
asks for memory for a step of a whole context, which for a million tokens no GPU has."""


def latency(side: Side, model: str, *flags: str) -> list[dict[str, float]]:
    """One row a batch size, from the benchmark's printed medians. Each size runs twice and the second run counts: in
    the first one a side may compile kernels."""
    sizes = [str(b) for b in BATCH_SIZES * 2]
    done = subprocess.run(
        side.command(
            *("bench_one_batch", model, "--batch-size", *sizes, "--cuda-graph-max-bs", "128"),
            *("--input-len", str(INPUT_LEN), "--output-len", str(OUTPUT_LEN), *flags),
        ),
        env=side.env,
        capture_output=True,
        text=True,
    )
    with side.log.open("a") as log:
        log.write(done.stdout + done.stderr)
    prefill = [float(x) for x in re.findall(r"Prefill\. latency: *([\d.]+) s", done.stdout)]
    decode = [float(x) for x in re.findall(r"Decode\. +median latency: *([\d.]+) s", done.stdout)]
    if done.returncode or len(decode) < len(sizes):
        raise RuntimeError(
            f"{side.name} bench_one_batch failed ({done.returncode}); see {side.log}\n{done.stderr[-2000:]}"
        )
    rows = zip(BATCH_SIZES, prefill[-len(BATCH_SIZES) :], decode[-len(BATCH_SIZES) :], strict=True)
    return [
        {"batch": b, "decode_ms": d * 1e3, "prefill_tok_s": b * INPUT_LEN / p, "prefill_ms": p * 1e3}
        for b, p, d in rows
    ]


def healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def server(
    side: Side, model: str, concurrencies: list[int], client_env: dict[str, str], port: int = PORT
) -> dict[str, Any]:
    """Throughput and latencies under random load, and the time between tokens of a full batch of equal requests. Each
    load runs twice and the second run counts, as in `latency`."""
    with side.log.open("a") as log:
        process = subprocess.Popen(
            side.command("launch_server", model, "--port", str(port)),
            env=side.env,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            started = time.time()
            while not healthy(port):
                if process.poll() is not None or time.time() - started > START_LIMIT_S:
                    raise RuntimeError(f"{side.name} server did not start; see {side.log}")
                time.sleep(0.5)
            print(f"  {side.name}: up after {time.time() - started:.0f} s", flush=True)
            load = Load(side.log.parent / f"{side.name}_{Path(model).name}", client_env, log, port)
            rows = []
            for concurrency in concurrencies:
                random_lengths = ("0.0", SERVER_INPUT, SERVER_OUTPUT)
                load.run(8 * concurrency, concurrency, *random_lengths)  # a side may compile kernels within it
                rows.append(load.run(8 * concurrency, concurrency, *random_lengths))
            full = load.run(BATCH_SIZES[-1], BATCH_SIZES[-1], "1.0", INPUT_LEN, 2 * OUTPUT_LEN)
            return {"load": rows, "full_batch": full}
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
            time.sleep(3)  # the driver takes a moment to give the memory back


class Load:
    """Runs of our load generator against the server on `port`."""

    KEEP = ("output_throughput", "mean_ttft_ms", "median_itl_ms", "mean_tpot_ms", "p99_itl_ms", "completed", "duration")

    def __init__(self, prefix: Path, env: dict[str, str], log: Any, port: int) -> None:
        self.prefix, self.env, self.log, self.port = prefix, env, log, port

    def run(self, prompts: int, concurrency: int, ratio: str, input_len: int, output_len: int) -> dict[str, float]:
        result = Path(f"{self.prefix}_{concurrency}.jsonl")
        result.unlink(missing_ok=True)
        subprocess.run(
            [
                *(sys.executable, "-m", "sglang.bench_serving", "--backend", "sglang", "--port", str(self.port)),
                *("--dataset-name", "random-ids", "--random-range-ratio", ratio, "--seed", str(prompts)),
                *("--random-input-len", str(input_len), "--random-output-len", str(output_len)),
                *("--num-prompts", str(prompts), "--max-concurrency", str(concurrency), "--flush-cache"),
                *("--output-file", str(result), "--disable-tqdm"),
            ],
            env=self.env,
            check=True,
            stdout=self.log,
            stderr=self.log,
            timeout=300,
        )
        row = json.loads(result.read_text().splitlines()[-1])
        result.unlink()
        return {"concurrency": concurrency, **{k: row[k] for k in self.KEEP}}


LOAD_COLUMNS = {
    "output_throughput": ("output tok/s", False),
    "mean_ttft_ms": ("mean first token, ms", True),
    "mean_tpot_ms": ("mean ms per token", True),
    "median_itl_ms": ("median between, ms", True),
    "p99_itl_ms": ("99th between, ms", True),
}
"""What a table says of a load: its unit, and whether less is better."""


def cell(name: str, ours: float, peer: float, better_low: bool) -> str:
    return f"{name} {peer:.2f} ({peer / ours if better_low else ours / peer:.3f}x)"


def table(results: dict[str, Any]) -> str:
    lines = []
    for model, sides in results.items():
        ours = sides["ours"]
        peers = {name: rows for name, rows in sides.items() if name != "ours"}
        lines.append(f"\n{Path(model).name}: ours, then each peer with the ratio (above 1: ours is better)")
        for key, unit, better_low in (("decode_ms", "decode ms", True), ("prefill_tok_s", "prefill tok/s", False)):
            for i, row in enumerate(ours.get("latency", [])):
                cells = [f"{unit:>14} batch {row['batch']:>3}: {row[key]:>10.2f}"]
                for name, peer in peers.items():
                    if "latency" in peer:
                        cells.append(cell(name, row[key], peer["latency"][i][key], better_low))
                lines.append("   ".join(cells))
        for i, row in enumerate(ours.get("server", {}).get("load", [])):
            for key, (unit, better_low) in LOAD_COLUMNS.items():
                cells = [f"{unit:>20} at {row['concurrency']:>3}: {row[key]:>10.1f}"]
                for name, peer in peers.items():
                    if "server" in peer:
                        cells.append(cell(name, row[key], peer["server"]["load"][i][key], better_low))
                lines.append("   ".join(cells))
        for name, side in sides.items():
            if "server" in side and "latency" in side:
                inter, step = side["server"]["full_batch"]["median_itl_ms"], side["latency"][-1]["decode_ms"]
                lines.append(
                    f"  {name}: {inter:.2f} ms between tokens at batch {BATCH_SIZES[-1]}, {inter / step:.3f} of a step"
                )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-site")
    parser.add_argument("--model", action="append", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stages", default="latency,server")
    parser.add_argument("--peer-backends", default="triton,flashinfer")
    parser.add_argument("--peer-server-backend", default="flashinfer")
    parser.add_argument("--peer-flags", default="", help="More flags of the peer, in one argument.")
    parser.add_argument("--our-flags", default="", help="More flags of this server, in one argument.")
    parser.add_argument("--context-length", help="Of both sides, in place of the model's own.")
    parser.add_argument("--concurrency", default="64,256")
    parser.add_argument("--port", type=int, default=PORT, help="One for each GPU that compares at the same time.")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a server under way is ended with it
    log_dir = args.out.parent
    concurrencies = [int(c) for c in args.concurrency.split(",")]
    our_path = os.pathsep.join([str(ROOT / "python"), *filter(None, [os.environ.get("PYTHONPATH")])])
    context = ["--context-length", args.context_length] if args.context_length else []
    ours = Side("ours", our_path, {}, [*context, *shlex.split(args.our_flags)], log_dir)
    sides = [ours]
    if args.peer_site:
        flags = [*context, "--sampling-backend", "pytorch", *shlex.split(args.peer_flags)]
        sides += [
            Side(f"peer_{b}", peer_path(args.peer_site), PEER_ENV, [*flags, "--attention-backend", b], log_dir)
            for b in args.peer_backends.split(",")
        ]
    results: dict[str, Any] = {}
    for model in args.model:
        results[model] = {}
        for side in sides:
            row = results[model].setdefault(side.name, {})
            started = time.time()
            if "latency" in args.stages:
                row["latency"] = latency(side, model, *(IN_ONE_STEP if side is ours else ()))
            if "server" in args.stages and (side is ours or side.name.endswith(args.peer_server_backend)):
                if side is not ours:
                    side.flags = [*side.flags, "--grammar-backend", "none"]
                row["server"] = server(side, model, concurrencies, ours.env, args.port)
            print(f"{Path(model).name} {side.name}: {time.time() - started:.0f} s {json.dumps(row)}", flush=True)
            args.out.write_text(json.dumps(results, indent=1))
    print(table(results))


if __name__ == "__main__":
    main()
