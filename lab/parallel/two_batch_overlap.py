#!/usr/bin/env python3
"""Prompts as two microbatches and sums in eight bits, each without and with the other, on several GPUs. About four
minutes.

    python lab/parallel/two_batch_overlap.py [--shapes glm,dense] [--tokens 8192] [--device cuda] [--links host,peers]
        [--ranks 2] [--kernels] [--skip-tokens]

For each way between the GPUs (host: NCCL without peer-to-peer copies, as a stand-in for PCIe cards that have none): the
embedded model's greedy tokens in all four settings, then the time of a prompt of a few layers of GLM-4.7-FP8 and of a
dense FP8 model of Qwen3-32B's shapes with random weights. Beside it stands what the time of the same prompt without
sums and the time of a sum predict (`sglang.tuning.two_batch_overlap.alternating_seconds`), and how long the host takes
to launch it: what is not shorter than the whole is bound by the host. `--kernels` adds the kernels whose time differs
most between the prompt whole and in microbatches, without sums. Ends with status 1 if microbatches change more answers
of the embedded model than roundings explain. `--device cpu` shows over gloo that it runs, with small shapes and times
that do not count.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "python"))

from sglang.bench.direct import DirectBatch, direct_table  # noqa: E402
from sglang.embedded import DEFAULT_MODEL_PATH  # noqa: E402
from sglang.srt.distributed import parallel_state  # noqa: E402
from sglang.srt.environ import adopt_environment  # noqa: E402
from sglang.srt.managers.scheduler.scheduler_setup import create_runner  # noqa: E402
from sglang.srt.mem_cache.kv_table import KVTable  # noqa: E402
from sglang.srt.model_executor.model_runner import ModelRunner  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402
from sglang.srt.utils.log import configure_logging  # noqa: E402
from sglang.tuning.two_batch_overlap import LAUNCH_S, SLOWDOWN, Stretch, alternating_seconds  # noqa: E402

CONFIGS = ROOT / "test" / "srt" / "kernels" / "configs"
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "glm": ("glm47", {"num_hidden_layers": 7, "num_nextn_predict_layers": 0}),
    "dense": ("qwen3", {
        "num_hidden_layers": 16, "hidden_size": 5120, "intermediate_size": 25600, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 128, "quantization_config": FP8,
    }),
}  # fmt: skip
SMALL: dict[str, Any] = {
    "num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 256,
    "num_attention_heads": 4, "num_key_value_heads": 2, "n_routed_experts": 8, "vocab_size": 1024,
}  # fmt: skip
"""Of each on CPUs."""
LINKS = {
    "host": ({"NCCL_P2P_DISABLE": "1", "NCCL_NVLS_ENABLE": "0"}, {"disable_custom_all_reduce": True}),
    "peers": ({}, {}),
}
MIN_TOKENS, TIMES, NEW_TOKENS, LIMIT_S = 1024, 5, 24, 280
KERNELS_SHOWN = 14
SAME_ANSWERS = 0.6
"""In bf16: a prompt that is cut attends to its first part in the cache, so that sums of another order decide ties."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Of both a server may leave sums of microbatches as they are; `always`: in eight bits anyway."""

    microbatches: bool
    eight_bits: bool
    always: bool = False

    def __str__(self) -> str:
        if self.always:
            return "always both"
        return {(False, False): "neither", (False, True): "eight bits", (True, False): "microbatches"}.get(
            (self.microbatches, self.eight_bits), "both"
        )


SETTINGS = [Setting(microbatches, eight_bits) for eight_bits in (False, True) for microbatches in (False, True)]
SETTINGS.append(Setting(True, True, always=True))


@contextmanager
def applied(runner: ModelRunner, setting: Setting, least: int) -> Iterator[None]:
    groups = parallel_state.groups().layer_groups
    quantized = [group._quantized for group in groups]
    for group in groups if not setting.eight_bits else ():
        group._quantized = None
    assert runner.two_batch_overlap is not None
    ping_pong, exact = runner.two_batch_overlap.ping_pong, runner.two_batch_overlap.ping_pong.exact
    ping_pong.exact = exact and not setting.always
    try:
        with runner.with_min_overlap_tokens(least if setting.microbatches else None):
            yield
    finally:
        for group, sums in zip(groups, quantized, strict=True):
            group._quantized = sums
        ping_pong.exact = exact


@contextmanager
def without_sums() -> Iterator[None]:
    """Inside the block ranks keep their summands, so that only what each of them computes takes time."""
    group = parallel_state.groups().tp
    group._summed = lambda x, exact: x  # type: ignore[method-assign]
    try:
        yield
    finally:
        del group._summed  # type: ignore[attr-defined]


def tokens_of(runner: ModelRunner, kv: KVTable, prompts: list[list[int]], chunk: int) -> list[list[int]]:
    batch = DirectBatch(runner, kv, prompts, NEW_TOKENS)
    rows = [batch.prefill(chunk)]
    rows += [batch.decode() for _ in range(NEW_TOKENS - 1)]
    batch.close()
    return [list(column) for column in zip(*rows, strict=True)]


def median_ms(run: Callable[[], object]) -> float:
    """Of TIMES runs behind one that does not count; a run ends when the device is through."""
    found = []
    for _ in range(TIMES + 1):
        synchronize()
        started = time.perf_counter()
        run()
        synchronize()
        found.append(1e3 * (time.perf_counter() - started))
    return float(np.median(found[1:]))


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def compare_tokens(runner: ModelRunner, vocab: int) -> dict[str, Any]:
    kv, rng = direct_table(runner), np.random.default_rng(0)
    prompts = [rng.integers(1, vocab, size).tolist() for size in (700, 130, 64, 9, 300, 41)]
    found = {}
    for setting in SETTINGS:
        with applied(runner, setting, 2):
            found[str(setting)] = tokens_of(runner, kv, prompts, 512)
    return {"tokens": found}


class Prompt:
    """One of so many tokens with slots of its own: padding has a single one, which all SMs would read at once."""

    def __init__(self, runner: ModelRunner, num_tokens: int) -> None:
        self.runner, self.kv, self.num_tokens = runner, direct_table(runner), num_tokens
        self.ids = np.random.default_rng(1).integers(1, runner.plan.model.vocab_size, num_tokens).tolist()

    def compute(self) -> None:
        batch = DirectBatch(self.runner, self.kv, [self.ids], 1)
        batch.prefill(self.num_tokens)
        batch.close()

    def launch_ms(self) -> float:
        """Median of the milliseconds until the host has launched it, whatever the device still has to do."""
        found = []
        for _ in range(TIMES):
            batch = DirectBatch(self.runner, self.kv, [self.ids], 1)
            synchronize()
            started = time.perf_counter()
            _, result = batch._prefill_step([self.num_tokens], self.num_tokens)
            found.append(1e3 * (time.perf_counter() - started))
            result.wait()
            batch.close()
        return float(np.median(found))

    def kernel_ms(self) -> dict[str, tuple[float, int]]:
        """Milliseconds and launches of its kernels, by name."""
        synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            self.compute()
            synchronize()
        return {
            event.key: (event.self_device_time_total / 1e3, event.count)
            for event in profile.key_averages()
            if event.self_device_time_total > 0
        }


def time_prompt(runner: ModelRunner, num_tokens: int, kernels: bool) -> dict[str, Any]:
    group, hidden = parallel_state.groups().tp, runner.plan.description.hidden_size
    prompt = Prompt(runner, num_tokens)
    found: dict[str, Any] = {"measured": {}, "sums": {}, "launched": {}, "blocks": 2 * len(runner.model.layers)}
    found["exact"] = runner.two_batch_overlap is not None and runner.two_batch_overlap.ping_pong.exact
    for setting in SETTINGS:
        with applied(runner, setting, MIN_TOKENS):
            found["measured"][str(setting)] = median_ms(prompt.compute)
            found["launched"][str(setting)] = prompt.launch_ms()
            rows = num_tokens // 2 if setting.microbatches else num_tokens
            x = torch.zeros((rows, hidden), dtype=runner.model.dtype, device=runner.device)
            found["sums"][str(setting)] = median_ms(lambda x=x: group.all_reduce(x))
    for setting in SETTINGS[:2]:
        with applied(runner, setting, MIN_TOKENS), without_sums():
            found["sums"][f"{setting} without"] = median_ms(prompt.compute)
            found["launched"][f"{setting} without"] = prompt.launch_ms()
            if kernels and torch.cuda.is_available():
                found.setdefault("kernels", {})[str(setting)] = prompt.kernel_ms()
    return found


def predicted_ms(found: dict[str, Any], setting: Setting) -> float:
    """Of the times without sums, in as many equal stretches as there are blocks, and of a sum."""
    blocks, sums = found["blocks"], found["sums"]
    alone, as_they_are = sums["neither without"], found["exact"] and not setting.always
    if not setting.microbatches:
        return float(alone + blocks * sums[str(setting)])
    each = sums["microbatches" if as_they_are else str(setting)]
    microbatch = [Stretch(alone / 2 / blocks, each)] * blocks + [Stretch(0.0, 0.0)]
    return alternating_seconds(microbatch, microbatch, SLOWDOWN, 1e3 * LAUNCH_S)


def rank_process(rank: int, args: ServerArgs, num_tokens: int, meeting: str, output: Path, kernels: bool) -> None:
    configure_logging("warning", f"TP{rank}")
    with torch.inference_mode():
        runner = create_runner(args, rank, meeting)
        if num_tokens:
            found = time_prompt(runner, num_tokens, kernels)
        else:
            found = compare_tokens(runner, runner.plan.model.vocab_size)
    if rank == 0:
        output.write_text(json.dumps(found))
    parallel_state.wait_for_all_ranks()
    parallel_state.shutdown()


def run(
    folder: Path, config: Path, num_tokens: int, links: str, device: str, ranks: int, kernels: bool = False
) -> dict[str, Any] | None:
    """What rank 0 has seen; None if a rank failed or time was over."""
    environment, flags = LINKS[links]
    small: dict[str, Any] = {"max_total_tokens": 4096} if device == "cpu" else {"mem_fraction_static": 0.8}
    args = ServerArgs.from_kwargs(
        model_path=str(config), load_format="dummy" if num_tokens else "auto", tp_size=ranks, skip_tokenizer_init=True,
        skip_server_warmup=True, chunked_prefill_size=max(num_tokens, 512), max_running_requests=8,
        context_length=num_tokens + 64 if num_tokens else None,
        attention_backend="torch_native" if device == "cpu" else "triton", disable_cuda_graph=True,
        enable_two_batch_overlap=True, two_batch_overlap_min_tokens=MIN_TOKENS, enable_quantized_all_reduce="prefill",
        quantized_all_reduce_min_bytes=0, device=device, random_seed=1, **flags, **small,
    )  # fmt: skip
    output = folder / f"{config.name}.{links}.json"
    os.environ.update(environment)
    context = multiprocessing.get_context("spawn")
    meeting = f"file://{folder}/{config.name}.{links}"
    processes = [
        context.Process(target=rank_process, args=(rank, args, num_tokens, meeting, output, kernels))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + LIMIT_S
    for process in processes:
        process.join(max(1.0, deadline - time.monotonic()))
    for process in processes:
        if process.is_alive():
            process.kill()
    for name in environment:
        del os.environ[name]
    return json.loads(output.read_text()) if output.exists() else None


def write_config(name: str, device: str, folder: Path) -> Path:
    file, changes = SHAPES[name]
    config = json.loads((CONFIGS / f"{file}.json").read_text()) | changes
    if device == "cpu":
        config |= {key: value for key, value in SMALL.items() if key in config}
        config.pop("quantization_config", None)
    target = folder / name
    target.mkdir(exist_ok=True)
    (target / "config.json").write_text(json.dumps(config))
    return target


def show_tokens(found: dict[str, Any], links: str, least: float) -> bool:
    """Prints how many answers microbatches leave equal, with exact sums and with eight bits; returns whether enough."""
    tokens, right = found["tokens"], True
    for one, other in (("neither", "microbatches"), ("eight bits", "always both"), ("neither", "eight bits")):
        pairs = list(zip(tokens[one], tokens[other], strict=True))
        alike = sum(a == b for a, b in pairs)
        right &= other == "eight bits" or alike >= least * len(pairs)
        print(f"{links}, embedded model, {other}: {alike} of {len(pairs)} answers as with {one}", flush=True)
    return right


def show_times(found: dict[str, Any], name: str, links: str) -> None:
    print(f"\n{links}, {name}, ms of a prompt | measured | launched | predicted | times as fast | a sum", flush=True)
    for setting in SETTINGS:
        measured, launched = found["measured"][str(setting)], found["launched"][str(setting)]
        neither = found["measured"]["neither"]
        print(
            f"{setting!s:>12} | {measured:9.2f} | {launched:9.2f} | {predicted_ms(found, setting):9.2f}"
            f" | {neither / measured:5.2f} | {found['sums'][str(setting)]:7.3f}",
            flush=True,
        )
    whole, microbatches = (found["sums"][f"{setting} without"] for setting in SETTINGS[:2])
    launched = (found["launched"][f"{setting} without"] for setting in SETTINGS[:2])
    print(f"without sums | {whole:9.2f} whole, {microbatches:9.2f} in microbatches", flush=True)
    print("    launched | {:9.2f} whole, {:9.2f} in microbatches".format(*launched), flush=True)
    if "kernels" in found:
        show_kernels(found["kernels"])


def show_kernels(found: dict[str, dict[str, tuple[float, int]]]) -> None:
    whole, microbatches = (found[str(setting)] for setting in SETTINGS[:2])
    totals = [sum(ms for ms, _ in kernels.values()) for kernels in (whole, microbatches)]
    print("     kernels | {:9.2f} whole, {:9.2f} in microbatches".format(*totals), flush=True)
    none = (0.0, 0)
    more = {name: microbatches.get(name, none)[0] - whole.get(name, none)[0] for name in whole | microbatches}
    for name in sorted(more, key=lambda name: -abs(more[name]))[:KERNELS_SHOWN]:
        (one, count), (other, times) = whole.get(name, none), microbatches.get(name, none)
        print(f"{one:9.2f} ms in {count:4}, {other:9.2f} ms in {times:4}: {name[:90]}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="glm,dense")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--links", default="host,peers")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--skip-tokens", action="store_true", help="of the embedded model")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    adopt_environment()
    right = True
    num_tokens = min(options.tokens, 2048) if options.device == "cpu" else options.tokens
    with tempfile.TemporaryDirectory(prefix="microbatches-") as directory:
        folder = Path(directory)
        for links in options.links.split(","):
            if not options.skip_tokens:
                found = run(folder, Path(DEFAULT_MODEL_PATH), 0, links, options.device, options.ranks)
                least = 1.0 if options.device == "cpu" else SAME_ANSWERS
                right &= found is not None and show_tokens(found, links, least)
            for name in options.shapes.split(","):
                config = write_config(name, options.device, folder)
                found = run(folder, config, num_tokens, links, options.device, options.ranks, options.kernels)
                if found is None:
                    print(f"{links}, {name}: no result", flush=True)
                    right = False
                else:
                    show_times(found, name, links)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
