#!/usr/bin/env python3
"""Images served, and what they do to text beside them: a server of Qwen3-VL-8B with random weights, and upstream SGLang
in the same run.

    python lab/media/bench_served.py --logs DIR [--peer-site DIR] [--flags=...] [--peer-flags=...]

The tables say the time to the first token of one image request (every image is new), of one whose image is encoded
already, and of as many tokens of text; and the times between tokens of 64 streams of text: alone, beside 16 requests
with a new image, beside 3 with a large one, beside 16 requests of as many tokens of text, and beside 16 requests with
images that are encoded already; all of these arrive together a little later. The bound: the 99th percentile beside new
images is at most 1.5 times that alone. It is printed twice: of all times from a stream's first token on, some of which
are long because other streams begin, and of those while all streams decode. What it is made of is printed behind it:
pictures that are decoded and chunks of prompts (encoded images beside none), patches that travel and slices of the
encoder (new images beside encoded ones), and of our server how it cuts slices and chunks.
Both servers begin to start together. After some seconds, in which upstream imports its modules, its processes are
stopped until ours was measured and has ended, as ours measures its own steps when it starts, too; then they go on. A
row is printed as soon as it is there, and what does not fit `--limit-seconds` is left out by name. `--tiny` tries all
of it without a GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import os
import random
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tower_configs import QWEN3_VL_8B

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "benchmark" / "peers")]

from compare import PEER_ENV, PORT, Side, healthy, peer_path  # noqa: E402
from processors import MARKS, write_processors, write_tokenizer  # noqa: E402

from sglang.bench.http_client import Endpoint, HttpError, send  # noqa: E402

OURS, PEER = "sm120-sglang", "SGLang 0.5.15"
PORTS = {OURS: PORT, PEER: PORT + 1}
PROMPT = "".join(MARKS[i] for i in (0, 2, 1)) + " What is in this picture?"
BOUND = 1.5
HEAD_START_S = 20.0
"""So long upstream starts beside our server."""
MAIN_MEMORY_S = 30.0
RUN_S = 12.0
"""A run of the streams is not begun if less time is left."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """`sides`: of the images of single requests; `side`: of those beside text, and the last of `sides` of the large
    ones. Lengths are in tokens."""

    sides: tuple[int, ...] = (448, 1024, 2048)
    repeats: int = 7
    streams: int = 64
    prompt: int = 256
    output: int = 512
    side: int = 1024
    images: int = 16
    large: int = 3
    image_output: int = 16
    warm_output: int = 160
    later_s: float = 1.0


TINY = Sizes((64, 96), 2, 4, 16, 24, side=64, images=2, large=1, image_output=2, warm_output=24, later_s=0.1)


def write_model(folder: Path, tiny: bool) -> Path:
    """The config, a tokenizer and the settings of the processors. Placeholders have the ids behind the tokenizer's."""
    first = write_tokenizer(folder)
    start, end, image, video = range(first, first + len(MARKS))
    config = QWEN3_VL_8B | {"image_token_id": image, "video_token_id": video}
    config |= {"vision_start_token_id": start, "vision_end_token_id": end}
    text = config["text_config"] | {"max_position_embeddings": 32768}
    if tiny:
        config |= {"vision_config": config["vision_config"] | {"depth": 3, "deepstack_visual_indexes": [0, 1, 2]}}
        config["vision_config"] |= {"hidden_size": 64, "num_heads": 2, "intermediate_size": 96, "out_hidden_size": 128}
        text |= {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
        text |= {"head_dim": 128, "intermediate_size": 96, "vocab_size": first + 64}
    (folder / "config.json").write_text(json.dumps(config | {"text_config": text}))
    write_processors(folder, *((1024, 65536) if tiny else ()))
    return folder


# --- requests ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Answer:
    """`times`: when each event with a token came, in seconds since the request was sent at `began`."""

    began: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    times: list[float] = field(default_factory=list)

    def gaps(self, first: float = float("-inf"), last: float = float("inf")) -> list[float]:
        """Returns the times between events that came from `first` to `last` of the clock of `began`."""
        times = [time for time in self.times if first <= self.began + time <= last]
        return [later - earlier for earlier, later in pairwise(times)]


async def ask(port: int, body: dict[str, Any], tokens: int) -> Answer:
    """Raises HttpError, also for an answer that ends too early."""
    answer = Answer()
    params = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
    began = answer.began = time.perf_counter()

    def on_event(data: bytes, at: float) -> None:
        if data.startswith(b"[DONE]"):
            return
        event = json.loads(data)
        if "error" in event:
            raise HttpError(str(event["error"])[:500])
        usage = event["meta_info"]
        answer.prompt_tokens, answer.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        answer.times.append(at - began)

    endpoint = Endpoint.parse(f"http://127.0.0.1:{port}", {})
    request = body | {"sampling_params": params, "stream": True}
    await send(endpoint, "POST", "/generate", request, on_event, timeout_s=90)
    if answer.output_tokens != tokens:
        raise HttpError(f"{answer.output_tokens} tokens came of {tokens}")
    return answer


def image_body(side: int, seed: int, before: str = "") -> dict[str, Any]:
    """A request with an image, behind the text `before`: smooth colours with some noise, as a JPEG file."""
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 20, (side, side, 3), np.uint8)
    values += rng.integers(0, 256, 3, np.uint8)  # sums are those of bytes
    along = np.arange(side)
    values[..., 0] += (along[:, None] * 200 // side).astype(np.uint8)
    values[..., 1] += (along * 200 // side).astype(np.uint8)
    values[..., 2] += (np.add.outer(along, along) * 100 // side).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(values).save(file, "JPEG", quality=90)
    data = base64.b64encode(file.getvalue()).decode()
    return {"text": before + PROMPT, "image_data": [f"data:image/jpeg;base64,{data}"]}


def text_body(length: int, seed: int) -> dict[str, Any]:
    """A prompt of random tokens, which are words in every vocabulary."""
    rng = random.Random(seed)
    return {"input_ids": [rng.randrange(300, 4000) for _ in range(length)]}


async def first_tokens(port: int, sizes: Sizes, side: int, seed: int) -> tuple[int, list[float]]:
    """Tokens of the prompt, and milliseconds to the first one with a new image, with the last of these behind another
    text, and with text alone. One request after the other; the first of each kind only warms up."""
    number = range(sizes.repeats + 1)
    answers = [await ask(port, image_body(side, seed + i), 2) for i in number]
    tokens, known = answers[0].prompt_tokens, image_body(side, seed + sizes.repeats)["image_data"]
    encoded = [await ask(port, {"text": f"{i}, once more. {PROMPT}", "image_data": known}, 2) for i in number]
    of_text = [await ask(port, text_body(tokens, seed + side + i), 2) for i in number]
    kinds = (answers, encoded, of_text)
    return tokens, [1e3 * statistics.median(answer.times[0] for answer in row[1:]) for row in kinds]


def percentiles(gaps: list[float]) -> tuple[float, float, float]:
    """The median, the 99th percentile and the longest, in milliseconds."""
    ordered = sorted(1e3 * gap for gap in gaps) or [float("nan")]
    return ordered[len(ordered) // 2], ordered[int(len(ordered) * 0.99)], ordered[-1]


async def beside(port: int, sizes: Sizes, others: Sequence[dict[str, Any]], seed: int) -> dict[str, Any]:
    """The times between tokens of the streams, while `others` are asked for together."""

    async def later(body: dict[str, Any]) -> Answer:
        await asyncio.sleep(sizes.later_s)
        return await ask(port, body, sizes.image_output)

    streams = [ask(port, text_body(sizes.prompt, seed + i), sizes.output) for i in range(sizes.streams)]
    answers = await asyncio.gather(*streams, *map(later, others))
    texts, rest = answers[: sizes.streams], answers[sizes.streams :]
    all_begun = max(answer.began + answer.times[0] for answer in texts)
    one_ends = min(answer.began + answer.times[-1] for answer in texts)
    return {
        "all": percentiles([gap for answer in texts for gap in answer.gaps()]),
        "decoding": percentiles([gap for answer in texts for gap in answer.gaps(all_begun, one_ends)]),
        "first_ms": 1e3 * statistics.median(answer.times[0] for answer in rest) if rest else None,
        "last_ms": 1e3 * max(answer.times[-1] for answer in rest) if rest else None,
    }


FIRST_TOKENS = (
    "| image | prompt tokens | first token, ms | of an encoded image, ms | of as much text, ms |\n|---|---|---|---|---|"
)
BESIDE = (
    "| {streams} streams of text | median, ms | p99, ms | longest, ms | p99 to alone | p99 while all decode, ms"
    " | to alone | first token of the others, ms | last, ms |\n|---|---|---|---|---|---|---|---|---|"
)


@dataclass(slots=True)
class Measured:
    """`first_ms`: side of an image -> milliseconds to the first token. `p99_ms`: run -> the 99th percentile between
    tokens of the streams while all decode, and of all times."""

    first_ms: dict[int, float] = field(default_factory=dict)
    p99_ms: dict[str, tuple[float, float]] = field(default_factory=dict)


def compared(name: str, ours: Measured, theirs: Measured) -> Iterator[str]:
    """Yields what both servers say beside one another. name: of the other one."""
    for side in ours.first_ms.keys() & theirs.first_ms.keys():
        one, other = ours.first_ms[side], theirs.first_ms[side]
        yield f"first token of an image of {side}: {one:.0f} ms, {name} {other:.0f} ms ({one / other:.2f})"
    for run in (run for run in ours.p99_ms if run in theirs.p99_ms):
        one, other = ours.p99_ms[run][0], theirs.p99_ms[run][0]
        yield f"p99 between tokens while all decode, {run}: {one:.1f} ms, {name} {other:.1f} ms ({one / other:.2f})"


async def measure(name: str, sizes: Sizes, ends: float, measured: Measured) -> None:
    """Prints the tables of a server as they fill, and leaves in `measured` what is compared. ends: when the time is
    over, by the monotonic clock."""
    port = PORTS[name]
    print(f"\n{name}\n{FIRST_TOKENS}", flush=True)
    length = 0
    for side in sizes.sides:
        tokens, milliseconds = await first_tokens(port, sizes, side, 1000)
        length = tokens if side == sizes.side else length
        measured.first_ms[side] = milliseconds[0]
        print(f"| {side} | {tokens} | {' | '.join(f'{ms:.1f}' for ms in milliseconds)} |", flush=True)
    side, number, known = sizes.side, range(sizes.images), max(1, sizes.images // 2)  # so many features are kept
    warm = replace(sizes, output=sizes.warm_output, later_s=sizes.later_s / 4)
    await beside(port, warm, [image_body(side, 10 + i) for i in number], 5000)
    print(BESIDE.format(streams=sizes.streams), flush=True)
    encoded = [image_body(side, 110 + i % known, f"{i}. ") for i in number]
    large = [image_body(sizes.sides[-1], 9000 + i) for i in range(sizes.large)]
    runs = {
        "alone": [],
        f"beside {sizes.images} images of {side}": [image_body(side, 8000 + i) for i in number],
        f"beside {sizes.large} images of {sizes.sides[-1]}": large,
        f"beside {sizes.images} prompts of {length} tokens": [text_body(length, 7000 + i) for i in number],
        f"beside {sizes.images} encoded images of {side}": encoded,
    }
    rows: list[dict[str, Any]] = []
    for run, (what, others) in enumerate(runs.items()):
        if time.monotonic() > ends - RUN_S:
            print(f"| {what} | left out: the time is over |", flush=True)
            continue
        if others is encoded:
            for i in range(known):  # so that their features are there
                await ask(port, image_body(side, 110 + i, "Once more. "), sizes.image_output)
        row = await beside(port, sizes, others, 20_000 + 100 * run)
        rows.append(row)
        measured.p99_ms[what] = row["decoding"][1], row["all"][1]
        (middle, p99, longest), (_, decoding, _) = row["all"], row["decoding"]
        ratios = [row[kind][1] / max(rows[0][kind][1], 1e-3) for kind in ("all", "decoding")]
        first, last = (f"{row[key]:.0f}" if row[key] else "" for key in ("first_ms", "last_ms"))
        print(
            f"| {what} | {middle:.2f} | {p99:.2f} | {longest:.2f} | {ratios[0]:.2f} | {decoding:.2f} | {ratios[1]:.2f}"
            f" | {first} | {last} |",
            flush=True,
        )
        if len(rows) == 2:
            says = ["within" if ratio <= BOUND else "NOT within" for ratio in ratios]
            bound = f"p99 beside new images: {ratios[0]:.2f} of that alone, {says[0]} {BOUND}; while all decode"
            bound += f" {ratios[1]:.2f}, {says[1]}"
    if len(rows) > 1:
        print(bound)
    if len(rows) == len(runs):
        alone, new, _, _, of_encoded = (row["decoding"][1] for row in rows)
        print(
            f"of p99 while all decode, ms: steps that decode {alone:.2f}, pictures decoded and chunks of prompts"
            f" {of_encoded - alone:+.2f}, patches that travel and slices of the encoder {new - of_encoded:+.2f}",
            flush=True,
        )


def waits_for_main_memory(port: int) -> None:
    """Our server page-locks its main memory in the seconds after its start; what allocates meanwhile is held up."""
    ends = time.monotonic() + MAIN_MEMORY_S
    while time.monotonic() < ends:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/get_server_info", timeout=10) as reply:
            (state, *_) = json.load(reply)["internal_states"]
        if state["memory_usage"].get("host", {}).get("ready", True):
            break
        time.sleep(0.5)


def how_it_cuts(log: Path) -> str:
    """What our server's log says of slices and chunks."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if "Images beside requests" in line]
    return lines[-1] if lines else "The log does not say how slices and chunks are cut: no times are measured here."


# --- servers ----------------------------------------------------------------------------------------------------------


class Server:
    """A server that starts in the background."""

    def __init__(self, side: Side, model: Path) -> None:
        words = side.command("launch_server", str(model), "--port", str(PORTS[side.name]))
        self.side, self.began, self._stopped_s, self.measured = side, time.monotonic(), 0.0, Measured()
        with side.log.open("wb") as log:
            self.process = subprocess.Popen(words, env=side.env, stdout=log, stderr=log, start_new_session=True)

    @property
    def seconds(self) -> float:
        """Since the start, less those in which it was stopped."""
        return time.monotonic() - self.began - self._stopped_s

    def comes_up(self, limit_s: float, ends: float) -> bool:
        """Waits; prints the end of its log if it does not."""
        while not healthy(PORTS[self.side.name]):
            if self.process.poll() is not None or self.seconds > limit_s or time.monotonic() > ends:
                print(f"{self.side.name} did not start in {self.seconds:.0f} s; {self.log_end()}", flush=True)
                return False
            time.sleep(0.5)
        print(f"{self.side.name}: up after {self.seconds:.0f} s", flush=True)
        return True

    def log_end(self) -> str:
        return f"{self.side.log} ends:\n{self.side.log.read_text(errors='replace')[-3000:]}"

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Its processes stand still meanwhile: nothing of it is launched on the GPU."""
        began = time.monotonic()
        self._signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._signal(signal.SIGCONT)
            self._stopped_s += time.monotonic() - began

    def end(self) -> None:
        self._signal(signal.SIGKILL)
        self.process.wait()

    def _signal(self, number: int) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, number)


def sides_of(args: argparse.Namespace) -> list[Side]:
    sizes = ["--max-running-requests", "96"]
    if args.tiny:
        sizes += ["--max-total-tokens", "4096", "--device", "cpu", "--skip-server-warmup"]
    else:
        sizes += ["--max-total-tokens", "73728", "--cuda-graph-max-bs", "96", "--dtype", "bfloat16"]
    our_path = os.pathsep.join([str(ROOT / "python"), *filter(None, [os.environ.get("PYTHONPATH")])])
    sides = [Side(OURS, our_path, {}, [*sizes, *shlex.split(args.flags)], args.logs)]
    if args.peer_site and not (Path(args.peer_site) / "sglang").is_dir():
        print(f"{PEER} is left out: {args.peer_site} has no sglang", flush=True)
    elif args.peer_site:
        flags = ["--sampling-backend", "pytorch", "--grammar-backend", "none", "--mem-fraction-static", "0.8"]
        flags += ["--attention-backend", args.peer_backend, "--mm-attention-backend", "triton_attn"]
        flags += ["--enable-multimodal"]
        more = shlex.split(args.peer_flags)
        sides.append(Side(PEER, peer_path(args.peer_site), PEER_ENV, [*sizes, *flags, *more], args.logs))
    return sides


def run(args: argparse.Namespace, names: Sequence[str], between: Callable[[], None] = lambda: None) -> int:
    """Measures the servers with these names one after the other. `between` is called when the first has ended, or
    without it, while the others go on starting. Returns how many failed."""
    ends, done = time.monotonic() + args.limit_seconds, 0
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder), args.tiny)
        servers = [Server(side, model) for side in sides_of(args) if side.name in names]
        sizes = TINY if args.tiny else Sizes()
        try:
            with ExitStack() as standing:
                first = [server for server in servers if server.side.name == OURS]
                rest = [server for server in servers if server not in first]
                if first and rest:
                    time.sleep(1 if args.tiny else HEAD_START_S)
                for server in rest:
                    standing.enter_context(server.stopped())
                for server in first:
                    done += server.comes_up(args.start_seconds, ends - RUN_S) and measured(server, sizes, ends)
                    server.end()
            between()
            for server in rest:
                done += server.comes_up(args.start_seconds, ends - RUN_S) and measured(server, sizes, ends)
                for line in compared(server.side.name, first[0].measured, server.measured) if first else ():
                    print(line, flush=True)
        finally:
            for server in servers:
                server.end()
    return len(servers) - done


def measured(server: Server, sizes: Sizes, ends: float) -> bool:
    """Whether its tables were printed."""
    name = server.side.name
    try:
        if name == OURS:
            waits_for_main_memory(PORTS[name])
        work = measure(name, sizes, ends, server.measured)
        asyncio.run(asyncio.wait_for(work, max(ends - time.monotonic(), 1)))
    except Exception:  # the other parts are measured all the same
        print(f"{name} failed: {traceback.format_exc()[-1500:]}{server.log_end()}", flush=True)
        return False
    if name == OURS:
        print(how_it_cuts(server.side.log), flush=True)
    return True


def add_options(parser: argparse.ArgumentParser, limit_s: float) -> None:
    parser.add_argument("--logs", type=Path, default=Path(os.environ.get("OUT", ".")), help="folder of all logs")
    parser.add_argument("--peer-site", help="folder with upstream and its dependencies; without it only our server")
    parser.add_argument("--peer-backend", default="flashinfer", help="the peer's attention of the text model")
    parser.add_argument("--flags", default="", help="more flags of our server, in one argument")
    parser.add_argument("--peer-flags", default="", help="more flags of the peer")
    parser.add_argument("--start-seconds", type=float, default=260, help="a server that is not up then is left out")
    parser.add_argument("--limit-seconds", type=float, default=limit_s, help="of everything")
    parser.add_argument("--tiny", action="store_true", help="tiny models on the CPU, to try the script")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, 240)
    args = parser.parse_args(argv)
    began = time.monotonic()
    failed = run(args, (OURS, PEER))
    print(f"{time.monotonic() - began:.0f} s", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
