#!/usr/bin/env python3
"""What several GPUs must still show, a part a command. Each prints a table, and ends with status 1 if a row is wrong.

    python benchmark/parallel/parts.py answers --out DIR                       2 or 4 GPUs,  60 s
    python benchmark/parallel/parts.py kill    --out DIR                       2 GPUs, 150 s
    python benchmark/parallel/parts.py slice   --out DIR --model SLICE ...     2 GPUs, 150 s
    python benchmark/parallel/parts.py stages  --out DIR --model EXPERTS       2 GPUs, 300 s
    python benchmark/parallel/parts.py three   --out DIR --model EXPERTS       3 or 4 GPUs, 150 s
    python benchmark/parallel/parts.py sums    --out DIR --model DENSE         2 GPUs, 540 s
    python benchmark/parallel/parts.py halves  --out DIR --model DENSE         2 GPUs, 200 s
    python benchmark/parallel/parts.py load    --out DIR --model EXPERTS --peer-site DIR   2 GPUs, 600 s

`--ranks 4` or `8` (default: 2) tries slice, sums, halves and load on so many GPUs, in place of two. With `--turn FILE`
slice and load start what they measure, and measure when there is a FILE, so that starts of minutes pass beside others.

The seconds are estimates for H200s whose Triton caches are empty; nothing waits behind --limit. EXPERTS is a mixture of
experts such as Qwen3-30B-A3B-FP8, DENSE a model such as Qwen3-32B-FP8, SLICE a few layers of GLM-4.7-FP8; weights are
random, only config.json and tokenizer are read. Without --model both are the embedded model. --peer-site is a folder
with upstream and its dependencies. sgl-kernel is installed into a folder of --out, and taken from there the next time.
With `--device cpu` the same is done over gloo, with fewer and shorter requests: that shows whether a part runs, and no
times that count.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "evals"), str(HERE.parent / "peers")]

import compare  # noqa: E402
import requirements  # noqa: E402
import two_gpus  # noqa: E402
from served import first_gpu  # noqa: E402
from two_gpus import EMBEDDED, QUANTIZED_SUMS, Server, Servers, StepTimes, Window, answers_of, kill_a_rank, load, rounds  # noqa: E402

PEER_START_S, SHARED_MEMORY_S = 580.0, 20.0
SAME_TEXTS = 0.9
"""Of the answers in bf16; where two tokens are as likely, the order of a sum decides. On CPUs all are the same."""
EMBEDDED_HEADS = 4
RATIO = 1.2
LONG_PROMPTS, LONG_LOAD, SHORTEST = (2048, 16), ((64, 128),), 0.5
"""Of prompts from half of these tokens on, so many that steps are as large as they may be, with short answers: what
halves and sums in eight bits are for."""
SHORT_LOAD = ((64, 128),)
"""Of short prompts with long answers, whose steps are too small for either: to lose nothing."""
MIN_GAIN, MIN_KEPT = 1.3, 0.95
"""Of both beside neither under these loads, where sums travel through memory of the host."""
WHOLE_CHUNK = (8192, 2)
HALVED_SERVER = ("--max-running-requests", "64", "--cuda-graph-max-bs", "64")
ALONE, ALONE_LENGTHS = 16, (1024, 128)
"""Requests one after the other, and their tokens: how long a prompt takes, and a step of one request."""
PEER = ("--load-format", "dummy", "--chunked-prefill-size", "8192", "--grammar-backend", "none")
PEER = (*PEER, "--attention-backend", "flashinfer", "--sampling-backend", "pytorch", "--max-total-tokens", "220000")
PEER_GRAPHS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
"""Of upstream's 36 sizes: each takes it two to twelve seconds to capture. Batches between are padded."""
PEER = (*PEER, "--mem-fraction-static", "0.6", "--cuda-graph-bs", *map(str, PEER_GRAPHS))
SLICE_STEPS = ("--batch-sizes", "1,64,256", "--max-total-tokens", "300000", "--context-length", "16384")


@dataclass(frozen=True, slots=True)
class Row:
    """`right` None: nothing is asked of it."""

    name: str
    value: str
    wanted: str = ""
    right: bool | None = None


@dataclass(frozen=True, slots=True)
class Prompts:
    """What a server has counted of its steps with prompts since its start."""

    prompt_steps: int
    prompt_launch_seconds: float
    halved_steps: int
    halved_tokens: int

    @staticmethod
    def of(server: Server) -> Prompts:
        (state,) = server.info()["internal_states"]
        return Prompts(**{name: state[name] for name in Prompts.__dataclass_fields__})


@dataclass
class Bench:
    """Where parts run, and with what."""

    window: Window
    model: Path
    cpu: bool
    peer_site: str | None = None
    ranks: int = 2
    models: Sequence[Path] = ()
    turn: Path | None = None
    rows: list[Row] = field(default_factory=list)

    @property
    def tp(self) -> tuple[str, str]:
        return ("--tp", str(self.ranks))

    @property
    def tp_of_embedded(self) -> tuple[str, str]:
        return ("--tp", str(min(self.ranks, EMBEDDED_HEADS)))

    def row(self, name: str, value: str, wanted: str = "", right: bool | None = None) -> None:
        self.rows.append(Row(name, value, wanted, right))

    def tiny(self, *flags: str) -> tuple[str, ...]:
        """Flags of a server of the embedded model."""
        if self.cpu:
            return ("--device", "cpu", "--max-total-tokens", "16384", "--max-running-requests", "8", *flags)
        return (*two_gpus.SMALL_SERVER, *flags)

    def large(self, *flags: str) -> tuple[str, ...]:
        """Flags of a server of `model`."""
        return self.tiny(*flags) if self.cpu else (*two_gpus.SERVER, *flags)

    def steps(self, name: str, *flags: str, model: Path | None = None) -> StepTimes:
        small = ("--device", "cpu", "--batch-sizes", "1,3", "--lengths", "40,6") if self.cpu else ()
        return StepTimes.start(name, self.window, str(model or self.model), *small, *flags)

    def loads(self) -> tuple[tuple[int, int], ...]:
        return ((2, 4), (4, 8)) if self.cpu else two_gpus.LOADS

    def wait_for_turn(self) -> None:
        """Until the file is there, or no time is left."""
        while self.turn is not None and not self.turn.exists() and time.monotonic() < self.window.end:
            time.sleep(0.1)

    def measured(self, run: StepTimes) -> None:
        """A row for each way of a process of step_times.py."""
        with self.window.part(run.name):
            run.wait_until_ready(time.monotonic() + self.window.left(two_gpus.READY_LIMIT_S))
            found = run.measure()
            two_gpus.say_steps(self.window, run.name, found)
            for way, times in found.items():
                if "decode_ms" in times:
                    name = f"{run.name}, {way}: decode, prefill, one prompt"
                    steps = ["/".join(f"{ms:.2f}" for ms in times[key]) for key in ("decode_ms", "prefill_ms")]
                    self.row(name, f"{', '.join(steps)}, {times['prompt_ms']:.2f} ms")

    def compared(self, one: Server, others: dict[str, Server]) -> None:
        """Answers of the embedded model by several layouts beside those of one rank."""
        each = 1 if self.cpu else 6
        score, wanted = answers_of(one, each)
        self.row("one rank: right answers", f"{score.right} of {score.count}", "no errors", not score.errors)
        for name, server in others.items():
            score, texts = answers_of(server, each)
            same, minimum = sum(a == b for a, b in zip(wanted, texts, strict=True)), 1.0 if self.cpu else SAME_TEXTS
            self.row(f"{name}: right answers", f"{score.right} of {score.count}", "no errors", not score.errors)
            enough = same >= minimum * len(texts)
            self.row(f"{name}: texts as one rank's", f"{same} of {len(texts)}", f"{minimum:.0%}", enough)

    def served(
        self,
        name: str,
        server: Server,
        loads: Sequence[tuple[int, int]] | None = None,
        lengths: tuple[int, int] = two_gpus.SERVER_LENGTHS,
        shortest: float = 0.0,
        counted: bool = False,
    ) -> list[float]:
        """Output tokens a second under each load when it is sent the second time: a server that compiles for numbers
        of tokens has them then. loads: as `loads`, which are taken without. lengths: of prompts and answers, at most;
        shortest: as a part of these. counted: also a row of what the server, which is ours, counts."""
        found = []
        lengths = (48, 8) if self.cpu else lengths
        for concurrency, prompts in self.loads() if loads is None or self.cpu else loads:
            load(self.window, server, concurrency, prompts, lengths, shortest)
            before = Prompts.of(server) if counted else None
            row = load(self.window, server, concurrency, prompts, lengths, shortest)
            if before is not None:
                self.say_prompts(f"{name}, {concurrency} at a time", before, Prompts.of(server))
            tokens, first, between = (row[key] for key in ("output_throughput", "mean_ttft_ms", "median_itl_ms"))
            text = f"{tokens:.0f} tok/s, first {first:.0f} ms, between {between:.2f} ms"
            self.window.say(f"{name}, {concurrency} at a time: {text}")
            self.row(f"{name}, {concurrency} at a time", text, f"{prompts} answers", row["completed"] == prompts)
            found.append(tokens)
        return found

    def say_prompts(self, name: str, before: Prompts, after: Prompts) -> None:
        """What the server says of its steps with prompts between two times."""
        steps = max(1, after.prompt_steps - before.prompt_steps)
        halves = after.halved_steps - before.halved_steps
        launch_ms = 1e3 * (after.prompt_launch_seconds - before.prompt_launch_seconds) / steps
        text = f"{halves} as halves, {launch_ms:.0f} ms of the host to launch each"
        self.row(f"{name}: {steps} steps with prompts", text)
        self.window.say(f"{name}: {steps} steps with prompts, {text}")

    def alone(
        self, name: str, server: Server, count: int = ALONE, lengths: tuple[int, int] = ALONE_LENGTHS
    ) -> tuple[float, float]:
        """Milliseconds until the first token and from token to token, of a request that has the server for itself."""
        count, lengths = (2, (48, 8)) if self.cpu else (count, lengths)
        load(self.window, server, 1, 2, lengths, 1.0)
        row = load(self.window, server, 1, count, lengths, 1.0)
        first, between = row["median_ttft_ms"], row["median_tpot_ms"]
        text = f"first {first:.1f} ms, between {between:.2f} ms"
        self.window.say(f"{name}, one of {lengths[0]:,} at a time: {text}")
        self.row(f"{name}, one of {lengths[0]:,} at a time", text, f"{count} answers", row["completed"] == count)
        return first, between


def tiny_servers(bench: Bench, servers: Servers, layouts: dict[str, Sequence[str]]) -> dict[str, Future[Server]]:
    """Of the embedded model, with one rank and with each of the layouts."""
    started = {"one": servers.start("one", EMBEDDED, *bench.tiny(), **first_gpu())}
    for name, flags in layouts.items():
        started[name] = servers.start(name.replace(" ", "_"), EMBEDDED, *bench.tiny(*flags))
    return started


def answers_by(bench: Bench, layouts: dict[str, Sequence[str]]) -> None:
    with ExitStack() as stack, bench.window.part("answers"):
        started = tiny_servers(bench, Servers(bench.window, stack), layouts)
        up = {name: future.result(bench.window.left(two_gpus.SERVER_LIMIT_S)) for name, future in started.items()}
        bench.compared(up.pop("one"), up)


def answers(bench: Bench) -> None:
    """Over HTTP: tensor shards, whole experts and, with four GPUs, a mix of both answer as one rank does."""
    layouts: dict[str, Sequence[str]] = {"TP2": ("--tp", "2"), "TP2 EP2": ("--tp", "2", "--ep-size", "2")}
    if not bench.cpu and two_gpus.num_gpus() >= 4:
        four = {name: ("--tp", "4", "--ep-size", size) for name, size in (("TP4 EP2", "2"), ("TP4 EP4", "4"))}
        layouts |= {"TP4": ("--tp", "4"), **four}
    answers_by(bench, layouts)


def kill(bench: Bench) -> None:
    """Each process of each layout of two ranks, while it decodes."""
    layouts = {"TP2": ("--tp", "2"), "EP2": ("--tp", "2", "--ep-size", "2"), "PP2": ("--pp-size", "2")}
    before = set(Path("/dev/shm").iterdir())
    for layout, flags in layouts.items():
        with ExitStack() as stack, bench.window.part(f"kill, {layout}"):
            servers = Servers(bench.window, stack)
            processes = ("first rank", "second rank", "detokenizer")
            names = [f"kill_{layout}_{number}" for number in range(len(processes))]
            if bench.cpu:  # one after the other
                started = dict.fromkeys(names)
            else:
                started = {name: servers.start(name, EMBEDDED, *bench.tiny(*flags)) for name in names}
            for number, (name, future) in enumerate(started.items()):
                future = future or servers.start(name, EMBEDDED, *bench.tiny(*flags))
                server = future.result(bench.window.left(two_gpus.SERVER_LIMIT_S))
                took, right = kill_a_rank(bench.window, server, bench.window.out / f"server_{name}.log", number)
                what = f"{layout}, {processes[number]} killed"
                bench.row(what, f"all gone after {took:.1f} s", "named, all gone", right)
    left, end = set(Path("/dev/shm").iterdir()) - before, time.monotonic() + bench.window.left(SHARED_MEMORY_S)
    while left and time.monotonic() < end:  # what stays is ours, what comes and goes is other processes'
        time.sleep(0.2)
        left &= set(Path("/dev/shm").iterdir())
    names = ", ".join(sorted(path.name for path in left))
    bench.row("left in /dev/shm", names or "nothing", "nothing", not left)


def slice_(bench: Bench) -> None:
    """Steps of slices of large models, with the sum in the norm's kernel, before it, and by NCCL; of several models as
    the server has chosen. All start side by side."""
    several = ("--one-way",) if len(bench.models) > 1 else ()
    started = []
    for model in bench.models:
        name = f"slice{f' {model.name}' if len(bench.models) > 1 else ''} TP{bench.ranks}"
        started.append(
            bench.steps(name, *(() if bench.cpu else SLICE_STEPS), *bench.tp, "--profile", *several, model=model)
        )
    bench.wait_for_turn()
    for run in started:
        bench.measured(run)


def stages(bench: Bench) -> None:
    """Two stages: answers, steps beside one rank and two, and what turns bring under load."""
    answers_by(bench, {"PP2": ("--pp-size", "2")})
    for name, flags in {"one rank": (), "PP2": ("--pp-size", "2"), "TP2": ("--tp", "2")}.items():
        bench.measured(bench.steps(name, *flags))
    found: dict[str, list[float]] = {}
    for name, flags in {"PP2, in turns": (), "PP2, a step at a time": ("--disable-overlap-schedule",)}.items():
        with ExitStack() as stack, bench.window.part(name):
            server = Servers(bench.window, stack).start(
                name.replace(" ", "_").replace(",", ""), bench.model, *bench.large("--pp-size", "2", *flags)
            )
            found[name] = bench.served(name, server.result(bench.window.left(two_gpus.SERVER_LIMIT_S)))
    if len(found) == 2:
        turns, alone = found.values()
        ratios = [a / b for a, b in zip(turns, alone, strict=True)]
        right = None if bench.cpu else min(ratios) >= 1
        bench.row("turns beside a step at a time", "/".join(f"{ratio:.2f}x" for ratio in ratios), "1.0x", right)


def three(bench: Bench) -> None:
    """Ranks that heads and experts do not divide by: answers, sums, steps; stages of two ranks where there are four."""
    layouts: dict[str, Sequence[str]] = {"TP3": ("--tp", "3")}
    if not bench.cpu and two_gpus.num_gpus() >= 4:
        layouts["TP2 PP2"] = ("--tp", "2", "--pp-size", "2")
    answers_by(bench, layouts)
    if not bench.cpu:
        with bench.window.part("sums of three ranks"):
            before = len(bench.window.failures)
            rounds(bench.window, 2000, 3, 60, "--no-times", "--no-host-memory")
            right = len(bench.window.failures) == before
            bench.row("sums of three ranks", "2,000 rounds", "exact", right)
    bench.measured(bench.steps("TP3", "--tp", "3"))


def served_load(bench: Bench) -> None:
    """Our ranks and upstream's, which lie on the same GPUs; one idles while the other is measured."""
    cpu = bench.cpu
    throughput, times = dict[str, list[float]](), dict[str, tuple[float, float]]()
    with ExitStack() as stack:
        servers, ready = Servers(bench.window, stack), dict[str, Server]()
        name = f"TP{bench.ranks}"
        started = {name: servers.start("ours", bench.model, *bench.large(*bench.tp))}
        if bench.peer_site:
            environment = {**compare.PEER_ENV, "TRITON_CACHE_DIR": str(bench.window.out / "triton_peer")}
            flags = (*PEER, *bench.tp, *(("--device", "cpu", "--attention-backend", "torch_native") if cpu else ()))
            path = compare.peer_path(bench.peer_site)
            started[f"peer {name}"] = servers.start(
                "peer", bench.model, *flags, limit_s=PEER_START_S, PYTHONPATH=path, **environment
            )
        for name, future in started.items():
            with bench.window.part(f"start, {name}"):
                ready[name] = future.result(bench.window.left(PEER_START_S))
                bench.window.say(f"{name} was up after {ready[name].start_seconds:.0f} s")
        bench.wait_for_turn()
        for name, server in ready.items():
            with bench.window.part(f"load, {name}"):
                times[name], throughput[name] = bench.alone(name, server), bench.served(name, server)
    if len(throughput) < 2:
        return
    for (concurrency, _), a, b in zip(bench.loads(), *throughput.values(), strict=True):
        bench.row(
            f"{concurrency} at a time, ours / peer", f"{a / b:.2f}x", f"{RATIO}x", None if cpu else a / b >= RATIO
        )
    for what, a, b in zip(("first token", "between tokens"), *times.values(), strict=True):
        bench.row(f"one at a time, {what}, peer / ours", f"{b / a:.2f}x", "1.0x", None if cpu else b >= a)


QUANTIZED = ("--enable-quantized-all-reduce",)
THROUGH_HOST = ("--disable-custom-all-reduce",)
NO_PEERS = {"NCCL_P2P_DISABLE": "1", "NCCL_NVLS_ENABLE": "0"}


def sums(bench: Bench) -> None:
    """Sums in eight bits: bits and times, answers, and load beside exact sums, from GPU to GPU and through memory of
    the host, as cards without peer-to-peer copies have it."""
    if not bench.cpu:
        with bench.window.part("bits and times"):
            before = len(bench.window.failures)
            rounds(bench.window, 10_000, bench.ranks, 200, "--ranks", str(bench.ranks), lines=24, script=QUANTIZED_SUMS)
            bench.row("bits of the reference", "10,000 rounds", "exact", len(bench.window.failures) == before)
    every = (*QUANTIZED, "all", "--quantized-all-reduce-min-bytes", "0")
    with ExitStack() as stack, bench.window.part("answers"):
        servers = Servers(bench.window, stack)
        started = {
            name: servers.start(name, EMBEDDED, *bench.tiny(*bench.tp_of_embedded, *flags))
            for name, flags in {"exact": (), "e4m3": every}.items()
        }
        up = {name: future.result(bench.window.left(two_gpus.SERVER_LIMIT_S)) for name, future in started.items()}
        scores = {name: answers_of(server, 1 if bench.cpu else 6) for name, server in up.items()}
        for name, (score, texts) in scores.items():
            same = sum(a == b for a, b in zip(scores["exact"][1], texts, strict=True))
            text = f"{score.right} of {score.count}, {same} of {len(texts)} texts as with exact sums"
            bench.row(f"{name}: right answers", text, "no errors", not score.errors)
    for way, (more, environment) in {"GPU to GPU": ((), {}), "through the host": (THROUGH_HOST, NO_PEERS)}.items():
        found: dict[str, list[float]] = {}
        for name, flags in {"exact": (), "prefill": (*QUANTIZED, "prefill")}.items():
            with ExitStack() as stack, bench.window.part(f"{name}, {way}"):
                label = f"{name}_{way.replace(' ', '_')}"
                future = Servers(bench.window, stack).start(
                    label, bench.model, *bench.large(*bench.tp, *flags, *more), **environment
                )
                server = future.result(bench.window.left(two_gpus.SERVER_LIMIT_S))
                bench.alone(f"{name}, {way}", server)
                found[name] = bench.served(f"{name}, {way}", server)
        if len(found) == 2:
            ratios = [b / a for a, b in zip(*found.values(), strict=True)]
            bench.row(f"{way}: e4m3 beside exact sums", "/".join(f"{ratio:.2f}x" for ratio in ratios))


def halves(bench: Bench) -> None:
    """Prompts as two halves and sums in eight bits beside neither, through memory of the host: a prompt of a whole
    chunk, a load of long prompts and one of short ones; then answers. Which steps are halves the server decides."""
    apart = ("--two-batch-overlap-min-tokens", "2") if bench.cpu else ("--attention-backend", "triton")
    both = (*QUANTIZED, "prefill", "--enable-two-batch-overlap", *apart)
    neither = ("--disable-two-batch-overlap", *(() if bench.cpu else apart))
    settings: dict[str, tuple[str, ...]] = {"neither": neither, "both": both}
    smaller = () if bench.cpu else HALVED_SERVER
    found: dict[str, tuple[float, ...]] = {}
    for name, flags in settings.items():
        with ExitStack() as stack, bench.window.part(f"{name}, through the host"):
            label = f"{name}_through_the_host"
            future = Servers(bench.window, stack).start(
                label, bench.model, *bench.large(*bench.tp, *flags, *smaller, *THROUGH_HOST), **NO_PEERS
            )
            server = future.result(bench.window.left(two_gpus.SERVER_LIMIT_S))
            long = bench.served(f"{name}, long prompts", server, LONG_LOAD, LONG_PROMPTS, SHORTEST, counted=True)
            first_ms, _ = bench.alone(name, server, 4, WHOLE_CHUNK)
            short = bench.served(f"{name}, short prompts", server, SHORT_LOAD, counted=True)
            found[name] = (long[0], 1e3 / first_ms, short[0])
            compiled = two_gpus.log_lines(bench.window.out / f"server_{label}.log", "was compiled while requests")
            bench.row(f"{name}: kernels compiled under load", str(len(compiled)), "0 behind the first run")
    if len(found) == 2:
        wanted = {"long prompts": MIN_GAIN, "a prompt alone": MIN_GAIN, "short prompts": MIN_KEPT}
        for (what, minimum), neither_s, both_s in zip(wanted.items(), *found.values(), strict=True):
            enough = None if bench.cpu else both_s >= minimum * neither_s
            bench.row(f"both beside neither, {what}", f"{both_s / neither_s:.2f}x", f"{minimum}x", enough)
    with ExitStack() as stack, bench.window.part("answers"):
        servers = Servers(bench.window, stack)
        started = {
            name: servers.start(name, EMBEDDED, *bench.tiny(*bench.tp_of_embedded, *flags))
            for name, flags in settings.items()
        }
        for name, future in started.items():
            score, _ = answers_of(future.result(bench.window.left(two_gpus.SERVER_LIMIT_S)), 1 if bench.cpu else 6)
            bench.row(f"{name}: right answers", f"{score.right} of {score.count}", "no errors", not score.errors)


PARTS: dict[str, tuple[Callable[[Bench], None], float]] = {
    "answers": (answers, 150),
    "kill": (kill, 260),
    "slice": (slice_, 240),
    "stages": (stages, 540),
    "three": (three, 300),
    "sums": (sums, 580),
    "halves": (halves, 235),
    "load": (served_load, 780),
}
"""What each does, and the seconds behind which nothing waits."""


def table(rows: Sequence[Row]) -> str:
    widths = [max((len(getattr(row, column)) for row in rows), default=0) for column in ("name", "value", "wanted")]
    said = {True: "ok", False: "WRONG", None: ""}
    lines = []
    for row in rows:
        cells = (text.ljust(width) for text, width in zip((row.name, row.value, row.wanted), widths, strict=True))
        lines.append("  ".join((*cells, said[row.right])).rstrip())
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", type=Path, nargs="+", default=[EMBEDDED], help="slice takes several")
    parser.add_argument("--turn", type=Path, help="file that slice and load wait for before they measure")
    parser.add_argument("--peer-site")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--limit", type=float, help="seconds")
    args = parser.parse_args(argv)
    if why := requirements.complaint():
        print(why, flush=True)
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    run, limit = PARTS[args.part]
    window = Window(args.out.resolve(), args.limit or limit)
    cpu, models = args.device == "cpu", args.model
    bench = Bench(window, models[0], cpu, args.peer_site, args.ranks, models, args.turn)
    if not bench.cpu and run is not halves:  # its sums pass through main memory, by NCCL
        with window.part("sgl-kernel"):
            two_gpus.install_kernels(window)
    run(bench)
    print(f"\n{table(bench.rows)}\n\n{args.part}: {time.monotonic() - window.started:.0f} s", flush=True)
    print("\n".join(window.failures) or "nothing failed", flush=True)
    return 1 if window.failures or any(row.right is False for row in bench.rows) or not bench.rows else 0


if __name__ == "__main__":
    sys.exit(main())
