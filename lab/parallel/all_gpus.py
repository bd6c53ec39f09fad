#!/usr/bin/env python3
"""As many ranks as there are GPUs beside one: right answers, sums, times of steps. Under two minutes.

    python lab/parallel/all_gpus.py --experts DIR --out DIR [--limit 80] [--gpus 4]

Takes sgl-kernel from --out if two_gpus.py has installed it there. The tiny mixture of experts has random weights, so
that its logits lie close together: a few answers may part where rounding decides.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import urllib.request
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT / "test"), *(str(ROOT / "benchmark" / name) for name in ("parallel", "evals"))]

import two_gpus  # noqa: E402
from served import first_gpu  # noqa: E402
from two_gpus import EMBEDDED, SMALL_SERVER, Server, Servers, StepTimes, Window, log_lines, rounds  # noqa: E402

PROMPTS, TOKENS = 16, 24


def greedy(server: Server) -> list[list[int]]:
    """Tokens of prompts that are random ids."""
    import numpy as np

    rng = np.random.default_rng(0)
    body = {
        "input_ids": [rng.integers(1, 250, 20).tolist() for _ in range(PROMPTS)],
        "sampling_params": {"temperature": 0.0, "max_new_tokens": TOKENS, "ignore_eos": True},
    }
    request = urllib.request.Request(
        f"{server.url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        return [answer["output_ids"] for answer in json.load(reply)]


def same_tokens(window: Window, one: Server, many: Server) -> None:
    pairs = list(zip(greedy(one), greedy(many), strict=True))
    same = sum(next((i for i, (a, b) in enumerate(zip(*pair, strict=True)) if a != b), len(pair[0])) for pair in pairs)
    total = sum(len(pair[0]) for pair in pairs)
    window.say(
        f"tiny mixture of experts: {same} of {total} tokens are those of one rank, up to each answer's first other"
    )
    if same < total / 2:
        window.fail("the tiny mixture of experts answers otherwise")


def save_mixture(folder: Path) -> Path:
    from srt.models.harness import save_tiny

    folder.mkdir(exist_ok=True)
    save_tiny("qwen3_moe_wide", folder)
    return folder


def run(window: Window, experts: str, gpus: int, stack: ExitStack, pool: ThreadPoolExecutor) -> None:
    ranks = ("--tp", str(gpus))
    steps = StepTimes.start("experts_tp4", window, experts, *ranks, "--ep-size", str(gpus), "--profile")
    sums = pool.submit(rounds, window, 2000, gpus, 45, "--no-times", "--no-host-memory")
    servers = Servers(window, stack)
    started: dict[str, Future[Server]] = {
        "one rank": servers.start("tiny_one", EMBEDDED, *SMALL_SERVER, **first_gpu()),
        "all ranks": servers.start("tiny_all", EMBEDDED, *ranks, *SMALL_SERVER),
    }
    with window.part("tiny mixture of experts"):
        mixture, flags = save_mixture(window.out / "mixture"), ("--skip-tokenizer-init", "--dtype", "bfloat16")
        started["mixture, one rank"] = servers.start("mixture_one", mixture, *SMALL_SERVER, *flags, **first_gpu())
        started["mixture, all ranks"] = servers.start("mixture_all", mixture, *ranks, *SMALL_SERVER, *flags)
    with window.part("answers"):
        pair = {name: started[name].result(window.left(60)) for name in ("one rank", "all ranks")}
        for line in log_lines(window.out / "server_tiny_all.log", r"all_reduce|through NCCL alone"):
            window.say(f"  log: {line}")
        two_gpus.same_answers(window, pair)
    with window.part("tiny mixture of experts"):
        same_tokens(window, *(started[f"mixture, {name}"].result(window.left(60)) for name in pair))
    with window.part("sums"):
        sums.result()
    with window.part("times of steps"):
        steps.wait_until_ready(time.monotonic() + window.left(60))
        two_gpus.say_steps(window, "experts_tp4", steps.measure())


def main() -> int:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=float, default=80.0, help="seconds")
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count())
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    window = Window(args.out.resolve(), args.limit)
    with window.part("sgl-kernel"):
        two_gpus.install_kernels(window)
    with ExitStack() as stack, ThreadPoolExecutor(1) as pool:
        run(window, args.experts, args.gpus, stack, pool)
    with window.part("times of sums"):
        rounds(window, 25, args.gpus, 40, "--no-host-memory", lines=30)
    print("\n".join(window.failures) or "nothing failed", flush=True)
    return 1 if window.failures else 0


if __name__ == "__main__":
    sys.exit(main())
