#!/usr/bin/env python3
"""`sglang bench sweep` over this server and upstream SGLang on the same GPU, for a report of both.

    python benchmark/peers/sweep.py --peer-site DIR --model DIR --results FILE
        [--concurrency 1,16,64] [--lengths 1024:128] [--repeats 3] [--limit-seconds 200]

Takes about two minutes on an H200 with Qwen3-8B. Both servers start together and stay, each with the same number of KV
tokens, since starting takes as long as measuring; one is idle while the other is measured. `--model` needs a
config.json; weights are random, and without a tokenizer the embedded model's is used. Logs lie beside FILE. Afterwards,
on any machine:

    sglang bench report FILE --html report.html --pdf report.pdf
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from compare import PEER_ENV, PORT, ROOT, Side, healthy, peer_path

PORTS = {"sm120-sglang": PORT, "SGLang 0.5.15": PORT + 1}
KV_TOKENS = 131_072
PEER_FLAGS = ["--sampling-backend", "pytorch", "--grammar-backend", "none", "--attention-backend"]
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def with_tokenizer(model: Path, folder: Path) -> Path:
    """The model's folder, or a copy of its config beside the embedded model's tokenizer."""
    if (model / "tokenizer.json").exists():
        return model
    copy = folder / model.name
    copy.mkdir()
    shutil.copy(model / "config.json", copy)
    for name in TOKENIZER:
        shutil.copy(ROOT / "python/sglang/embedded/tiny" / name, copy)
    return copy


def start(side: Side, model: Path) -> subprocess.Popen[bytes]:
    sizes = ("--max-total-tokens", str(KV_TOKENS), "--mem-fraction-static", "0.85", "--max-running-requests", "128")
    words = side.command(
        "launch_server", str(model), "--port", str(PORTS[side.name]), "--cuda-graph-max-bs", "64", *sizes
    )
    with side.log.open("wb") as log:
        return subprocess.Popen(words, env=side.env, stdout=log, stderr=log, start_new_session=True)


def comes_up(side: Side, process: subprocess.Popen[bytes], began: float, limit_s: float) -> bool:
    """Prints the end of its log if it does not."""
    while not healthy(PORTS[side.name]):
        if process.poll() is not None or time.monotonic() - began > limit_s:
            print(f"{side.name} did not start; {side.log} ends:\n{side.log.read_text()[-3000:]}", flush=True)
            return False
        time.sleep(0.5)
    print(f"{side.name}: up after {time.monotonic() - began:.0f} s", flush=True)
    return True


def sweep(args: argparse.Namespace, names: list[str], model: Path, env: dict[str, str], limit_s: float) -> int:
    """The exit status. A sweep that runs out of time has measured each point as often as it says."""
    words = [sys.executable, "-m", "sglang.cli", "bench", "sweep", "--results", str(args.results)]
    for name in names:
        words += ["--server", f"{name}=http://127.0.0.1:{PORTS[name]}"]
    words += ["--concurrency", args.concurrency, "--lengths", args.lengths, "--repeats", str(args.repeats)]
    words += ["--requests", "4", "--requests-per-slot", "2", "--tokenizer", str(model)]
    try:
        return subprocess.run(words, env=env, timeout=limit_s).returncode
    except subprocess.TimeoutExpired:
        print(f"out of time; {args.results} has what was measured", flush=True)
        return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-site", help="folder with upstream and its dependencies; without it only our server")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--concurrency", default="1,16,64")
    parser.add_argument("--lengths", default="1024:128")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peer-backend", default="flashinfer", help="the peer's attention")
    parser.add_argument("--start-seconds", type=float, default=130, help="a server that is not up then is left out")
    parser.add_argument("--limit-seconds", type=float, default=200, help="of everything")
    args = parser.parse_args()
    began = time.monotonic()
    our_path = os.pathsep.join([str(ROOT / "python"), *filter(None, [os.environ.get("PYTHONPATH")])])
    logs = args.results.parent
    sides = [Side("sm120-sglang", our_path, {}, [], logs)]
    if args.peer_site:
        sides.append(Side("SGLang 0.5.15", peer_path(args.peer_site), PEER_ENV, [*PEER_FLAGS, args.peer_backend], logs))
    processes: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory() as folder:
        model = with_tokenizer(args.model, Path(folder))
        try:
            processes += [start(side, model) for side in sides]
            pairs = zip(sides, processes, strict=True)
            names = [side.name for side, process in pairs if comes_up(side, process, began, args.start_seconds)]
            left = args.limit_seconds - (time.monotonic() - began)
            return sweep(args, names, model, sides[0].env, left) if names else 1
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
            print(f"{time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
