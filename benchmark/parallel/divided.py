#!/usr/bin/env python3
"""Two GPUs that hold different tokens: replicas, groups with requests of their own (DP attention), shared-out latents
(DCP), beside two ranks that hold the same ones (TP2), and beside upstream's same layouts. Planned for nine minutes.
--layouts "TP4,DCP4" has the same of four ranks, on four GPUs.

    python benchmark/parallel/divided.py --out DIR --dense DIR [--limit 535] [--skip slice,replicas,answers]
        [--peer-site DIR | --peer-command COMMAND] [--layouts NAMES] [--peer-layouts NAMES] [--flags="FLAGS"]

1. slice     four layers of DeepSeek-V3's shapes: output tokens a second with 64 and 256 requests, decode steps behind
             65,536 tokens, and the bytes of a GPU that a token of the cache takes
2. replicas  two replicas of `--dense` (Qwen3-8B) beside one of them
3. answers   the embedded model's texts in every layout, beside those of one rank; `layouts.py` compares tokens

Upstream comes from --peer-site (see `benchmark/peers/compare.py`), or from a command behind which flags can be put. Its
servers of the slice have their turn first; one that does not start costs its own rows. They take up to seven minutes
with nothing compiled and one with it, in which 3 is done, where no time counts. What does not fit in --limit seconds is
left out, and said. `--flags="--attention-backend flashinfer"` gives our servers of the slice flags, which may have to
compile what they name.

Weights of 1 and 2 are random; only the config.json and tokenizer of --dense are read. Prints a table, and ends with
status 1 if a row is wrong; figures are in results.json of --out, too, beside the servers' logs. With `--device cpu` it
tries itself over gloo, with small models and few requests: that shows whether it runs, and no times that count.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "evals"), str(HERE.parent / "peers")]

import compare as peers  # noqa: E402
import latent_slice  # noqa: E402
import requirements  # noqa: E402
import two_gpus  # noqa: E402
from parts import Bench, table  # noqa: E402
from served import first_gpu  # noqa: E402
from two_gpus import EMBEDDED, SERVER_LIMIT_S, Server, Servers, Window, load  # noqa: E402

TP2, TP4 = ("--tp", "2"), ("--tp", "4")
DCP2, DCP4 = (*TP2, "--dcp-size", "2"), (*TP4, "--dcp-size", "4")
GROUPS = (*TP2, "--enable-dp-attention", "--attn-dp-size", "2")
SMALL = ("--max-total-tokens", "32768", "--max-running-requests", "32", "--cuda-graph-max-bs", "16")
SMALL_CPU = ("--device", "cpu", "--max-total-tokens", "8192", "--max-running-requests", "8")
SLICE = ("--load-format", "dummy", "--max-total-tokens", "600000", "--chunked-prefill-size")
SLICE = (*SLICE, "8192", "--max-running-requests", "512", "--cuda-graph-max-bs", "256")
LAYOUTS = {"TP2": TP2, "DP attention 2": GROUPS, "DCP2": DCP2, "TP4": TP4, "DCP4": DCP4}
OF_PEER = {**LAYOUTS, "DP attention 2": (*TP2, "--dp", "2", "--enable-dp-attention")}
"""The same layouts, as upstream's flags have them."""
BESIDE = {"DP attention 2": "TP2", "DCP2": "TP2", "DCP4": "TP4"}
"""What a layout stands beside: as many ranks, all of which hold the same tokens."""
OF_TWO_GPUS = ("TP2", "DP attention 2", "DCP2")
PEER = ("--attention-backend", "flashinfer", "--sampling-backend", "pytorch", "--grammar-backend", "none")
PEER_GRAPHS = (1, 8, 64, 256)
"""The loads' sizes, of upstream's 36: each takes it up to ten seconds to capture. Batches between are padded."""
PEER = (*PEER, "--mem-fraction-static", "0.85", "--trust-remote-code", "--cuda-graph-bs", *map(str, PEER_GRAPHS))
COMMAND = (sys.executable, "-W", "ignore", "-m", "sglang.launch_server")
PEER_CPU = ("--attention-backend", "torch_native", "--trust-remote-code")
START_LIMIT_S, MIN_S = 560.0, 45.0
"""Seconds for a start of the slice, which may have to compile kernels, and that a part needs to begin."""
LONG = 65536
LONG_AT_ONCE, LONG_OUTPUT = (1, 8), 256
TOKENS_HELD, FASTER, OF_TWO = {"DCP2": 1.9, "DCP4": 3.8}, 1.0, 1.9
"""Wanted: tokens that DCP holds beside TP, decode steps behind long contexts, and replicas beside one."""


@dataclass(frozen=True)
class Slices:
    """Which servers of the slice there are. `peer`: upstream's command and environment; None: there is no upstream."""

    layouts: tuple[str, ...]
    peer_layouts: tuple[str, ...] = ()
    peer: tuple[Sequence[str], Mapping[str, str]] | None = None
    more: tuple[str, ...] = ()
    """Flags of our servers, beside those of the layout."""

    def start_peer(self, bench: Bench, servers: Servers, model: Path) -> dict[str, Future[Server]]:
        if self.peer is None:
            return {}
        command, environment = self.peer
        flags = (*self.flags(bench), *(PEER_CPU if bench.cpu else PEER))
        return {
            f"upstream {name}": servers.start(
                f"upstream_{name.replace(' ', '_')}", model, *flags, *OF_PEER[name], limit_s=START_LIMIT_S,
                command=command, **environment,
            )
            for name in self.peer_layouts
        }  # fmt: skip

    def ours(self, bench: Bench, servers: Servers, model: Path) -> dict[str, Future[Server]]:
        return {
            name: servers.start(
                f"slice_{name.replace(' ', '_')}", model, *self.flags(bench), *LAYOUTS[name], *self.more,
                limit_s=START_LIMIT_S,
            )
            for name in self.layouts
        }  # fmt: skip

    @staticmethod
    def flags(bench: Bench) -> tuple[str, ...]:
        return (*SMALL_CPU, "--load-format", "dummy") if bench.cpu else SLICE


def answers(bench: Bench) -> None:
    """Texts of the embedded model; `layouts.py` compares tokens of every kind of model."""
    small = SMALL_CPU if bench.cpu else SMALL
    layouts = {"TP2": TP2, "DP attention 2": GROUPS, "DP2": ("--dp-size", "2")}
    with ExitStack() as stack, bench.window.part("answers"):
        servers = Servers(bench.window, stack)
        texts = {"one": servers.start("one", EMBEDDED, *small, **first_gpu())}
        for name, flags in layouts.items():
            texts[name] = servers.start(name.replace(" ", "_"), EMBEDDED, *small, *flags)
        up = {name: future.result(bench.window.left(SERVER_LIMIT_S)) for name, future in texts.items()}
        bench.compared(up.pop("one"), up)


def bytes_a_token(server: Server) -> float:
    """Bytes of a GPU that its caches take, by the tokens that both GPUs hold together."""
    (state, *_) = server.info()["internal_states"]
    found: float = state["memory_usage"]["kv_cache_bytes"] / state["max_total_num_tokens"]
    return found


def slice_(
    bench: Bench, slices: Slices, before_ours: Callable[[], None], meanwhile: Sequence[Callable[[], None]] = ()
) -> None:
    """Upstream's servers, then ours: together they need more memory than a GPU has. Those of one side start side by
    side, and each ends with its turn. before_ours: what our servers need and upstream's do not. meanwhile: what is done
    while upstream's start, of which no time counts."""
    model = latent_slice.save_slice(bench.window.out / "slice", EMBEDDED, small=bench.cpu)
    measured = Measured({}, {}, {})
    with bench.window.part("slice"), ExitStack() as stack:
        started = slices.start_peer(bench, Servers(bench.window, stack), model)
        before_ours()
        for part in meanwhile:
            part()
        measured.add(bench, started)
        measured.add(bench, slices.ours(bench, Servers(bench.window, stack), model))
    with bench.window.part("beside one another"):
        compare(bench, measured)
        compare_with_peer(bench, measured)


@dataclass(frozen=True)
class Measured:
    """By names of layouts. held: bytes of a GPU a token. long: milliseconds between tokens behind long contexts, for
    each of LONG_AT_ONCE. served: output tokens a second, for each load."""

    held: dict[str, float]
    long: dict[str, list[float]]
    served: dict[str, list[float]]

    def add(self, bench: Bench, started: Mapping[str, Future[Server]]) -> None:
        """Measures each server, when all of them are up."""
        ready: dict[str, Server] = {}
        for name, future in started.items():
            with bench.window.part(f"start, slice, {name}"):
                ready[name] = future.result(bench.window.left(START_LIMIT_S))
                bench.window.say(f"slice, {name} was up after {ready[name].start_seconds:.0f} s")
        for name, server in ready.items():
            with bench.window.part(f"slice, {name}"):
                if name in LAYOUTS:
                    self.held[name] = bytes_a_token(server)
                    bench.row(f"slice, {name}: bytes of a GPU a token", f"{self.held[name]:,.0f}")
                self.served[name] = bench.served(f"slice, {name}", server)
                self.long[name] = time_long_contexts(bench, name, server)
            server.kill()


def compare(bench: Bench, measured: Measured) -> None:
    """Rows of each layout beside that whose ranks hold the same tokens."""
    held, long, served = measured.held, measured.long, measured.served
    for name, other in BESIDE.items():
        beside = f"{name} beside {other}"
        if name in held and other in held:
            ratio, minimum = held[other] / held[name], TOKENS_HELD.get(name, 1.0)
            bench.row(f"{beside}: tokens held", f"{ratio:.2f}x", f"{minimum}x", ratio >= minimum)
        for at_once, ours, theirs in zip(LONG_AT_ONCE, long.get(name, ()), long.get(other, ()), strict=False):
            what = f"{beside}: steps of {at_once} behind {LONG:,} tokens, speed"
            wanted = name in TOKENS_HELD
            right = None if bench.cpu or not wanted else theirs / ours >= FASTER
            bench.row(what, f"{theirs / ours:.2f}x", f"{FASTER}x" if wanted else "", right)
        for (at_once, _), ours, theirs in zip(bench.loads(), served.get(name, ()), served.get(other, ()), strict=False):
            bench.row(f"{beside}: tok/s, {at_once} at a time", f"{ours / theirs:.2f}x")


def compare_with_peer(bench: Bench, measured: Measured) -> None:
    """Rows of each layout beside upstream's same one."""
    long, served = measured.long, measured.served
    for name in LAYOUTS:
        peer = f"upstream {name}"
        for at_once, ours, theirs in zip(LONG_AT_ONCE, long.get(name, ()), long.get(peer, ()), strict=False):
            bench.row(f"{name} beside upstream's: steps of {at_once} behind {LONG:,} tokens", f"{theirs / ours:.2f}x")
        for (at_once, _), ours, theirs in zip(bench.loads(), served.get(name, ()), served.get(peer, ()), strict=False):
            bench.row(f"{name} beside upstream's: tok/s, {at_once} at a time", f"{ours / theirs:.2f}x")


def time_long_contexts(bench: Bench, name: str, server: Server) -> list[float]:
    """Milliseconds between the tokens of requests of so many tokens, behind a warm-up of one."""
    found = []
    lengths = (64, 8) if bench.cpu else (LONG, LONG_OUTPUT)
    load(bench.window, server, 1, 1, lengths, 1.0)
    for at_once in LONG_AT_ONCE:
        row = load(bench.window, server, at_once, at_once, lengths, 1.0)
        step: float = row["median_itl_ms"] or row["median_tpot_ms"]  # 0: tokens that came together
        text = f"{step:.2f} ms between tokens, first {row['mean_ttft_ms']:.0f} ms"
        bench.window.say(f"slice, {name}, {at_once} of {lengths[0]:,} tokens: {text}")
        bench.row(
            f"slice, {name}: {at_once} of {lengths[0]:,} tokens",
            text,
            f"{at_once} answers",
            row["completed"] == at_once,
        )
        found.append(step)
    return found


def replicas(bench: Bench) -> None:
    """One server under two loads, and two replicas under the larger one."""
    each = bench.loads()[-1][0] // 2
    flags = bench.tiny() if bench.cpu else two_gpus.SERVER
    flags = (*flags, "--max-total-tokens", "8192" if bench.cpu else "150000")
    found: dict[str, dict[int, float]] = {}
    loads: dict[str, tuple[tuple[str, ...], tuple[int, ...]]]
    loads = {"one": ((), (each, 2 * each)), "DP2": (("--dp-size", "2"), (2 * each,))}
    for name, (words, of_name) in loads.items():
        with ExitStack() as stack, bench.window.part(f"replicas, {name}"):
            gpu = first_gpu() if name == "one" else {}
            future = Servers(bench.window, stack).start(f"dense_{name}", bench.model, *flags, *words, **gpu)
            server = future.result(bench.window.left(SERVER_LIMIT_S))
            lengths = (48, 8) if bench.cpu else two_gpus.SERVER_LENGTHS
            found[name] = {}
            for at_once in of_name:
                load(bench.window, server, at_once, at_once, lengths)
                row: dict[str, Any] = load(bench.window, server, at_once, 4 * at_once, lengths)
                found[name][at_once] = row["output_throughput"]
                text = f"{row['output_throughput']:.0f} tok/s"
                bench.window.say(f"replicas, {name}, {at_once} at a time: {text}")
                right = row["completed"] == 4 * at_once
                bench.row(f"replicas, {name}, {at_once} at a time", text, f"{4 * at_once} answers", right)
    if all(len(found.get(name, ())) == len(of_name) for name, (_, of_name) in loads.items()):
        ratio, same = found["DP2"][2 * each] / found["one"][each], found["DP2"][2 * each] / found["one"][2 * each]
        right = None if bench.cpu else ratio >= OF_TWO
        bench.row(f"DP2 with {2 * each} beside one with {each}", f"{ratio:.2f}x", f"{OF_TWO}x", right)
        bench.row(f"DP2 beside one, both with {2 * each}", f"{same:.2f}x")


PARTS = ("slice", "replicas", "answers")


def peer_of(args: argparse.Namespace) -> tuple[Sequence[str], Mapping[str, str]] | None:
    """Upstream's command and environment, which has nothing of this project; None: no upstream."""
    environment = {**peers.PEER_ENV, "TRITON_CACHE_DIR": str(args.out.resolve() / "triton_upstream")}
    if args.peer_command:
        return shlex.split(args.peer_command), environment | {"PYTHONPATH": ""}
    if args.peer_site:
        return COMMAND, environment | {"PYTHONPATH": peers.peer_path(args.peer_site)}
    return None


def names_of(text: str) -> tuple[str, ...]:
    """Names of layouts, between commas. Raises argparse.ArgumentTypeError for one that there is not."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if unknown := [name for name in names if name not in LAYOUTS]:
        raise argparse.ArgumentTypeError(f"no layout is named {', '.join(unknown)}; there are {', '.join(LAYOUTS)}")
    return names


def flags_of(text: str) -> tuple[str, ...]:
    return tuple(shlex.split(text))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dense", type=Path, default=EMBEDDED)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--limit", type=float, default=535.0, help="seconds")
    parser.add_argument("--skip", default="", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--layouts", type=names_of, default=OF_TWO_GPUS, help=f"of the slice: {', '.join(LAYOUTS)}")
    parser.add_argument("--peer-site", help="folder with upstream and its dependencies")
    parser.add_argument("--peer-command", help="as `sglang serve`: starts a server when flags are put behind it")
    parser.add_argument("--peer-layouts", type=names_of, default=("TP2", "DP attention 2"))
    parser.add_argument("--flags", type=flags_of, default=(), help="of our servers of the slice, in one word")
    args = parser.parse_args(argv)
    if args.peer_site and args.peer_command:
        parser.error("--peer-site and --peer-command: give one of them")
    if why := requirements.complaint():
        print(why, flush=True)
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    window = Window(args.out.resolve(), args.limit)
    bench = Bench(window, args.dense, args.device == "cpu")

    def kernels() -> None:
        if not bench.cpu:
            with window.part("sgl-kernel"):
                two_gpus.install_kernels(window)

    slices = Slices(args.layouts, args.peer_layouts, peer_of(args), args.flags)
    skipped = args.skip.split(",")
    if "slice" in skipped:
        kernels()
    meanwhile = [] if slices.peer is None or {"slice", "answers"} & {*skipped} else [partial(answers, bench)]
    parts = {"slice": partial(slice_, bench, slices, kernels, meanwhile), "replicas": partial(replicas, bench)}
    parts["answers"] = partial(answers, bench)
    for name in PARTS:
        if name in skipped or (name == "answers" and meanwhile):
            continue
        if window.end - time.monotonic() < MIN_S:
            window.say(f"{name}: left out, no time is left")
            continue
        parts[name]()
    (args.out / "results.json").write_text(json.dumps([asdict(row) for row in bench.rows], indent=1))
    print(f"\n{table(bench.rows)}\n\n{time.monotonic() - window.started:.0f} s", flush=True)
    print("\n".join(window.failures) or "nothing failed", flush=True)
    return 1 if window.failures or any(row.right is False for row in bench.rows) or not bench.rows else 0


if __name__ == "__main__":
    sys.exit(main())
