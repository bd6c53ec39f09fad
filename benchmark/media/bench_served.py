#!/usr/bin/env python3
"""Images served, and what they do to text beside them: a server of Qwen3-VL-8B with random weights, and upstream SGLang
in the same run.

    python benchmark/media/bench_served.py --logs DIR [--peer-site DIR] [--flags=...] [--peer-flags=...]

The tables say the time to the first token of one image request (every image is new), and the times between tokens of
64 streams of text: alone, beside 16 requests of as many tokens of text, beside 16 requests with images that are
encoded already, and beside 16 requests with a new image, all of which arrive together a little later. The bound: the
99th percentile beside new images is at most 1.5 times that alone. What it is made of is printed behind it: pictures
that are decoded and chunks of prompts (encoded images beside none), patches that travel and slices of the encoder (new
images beside encoded ones), and of our server how it cuts slices and chunks.
Both servers start together and stay, each with its own memory; one is idle while the other is measured. Takes 4
minutes at most (`--limit-seconds`), of which the start is half. `--tiny` tries all of it without a GPU.
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
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tower_configs import QWEN3_VL_8B

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "benchmark" / "peers")]

from compare import PEER_ENV, Side, healthy, peer_path  # noqa: E402

from sglang.bench.http_client import Endpoint, HttpError, send  # noqa: E402

OURS, PEER = "sm120-sglang", "SGLang 0.5.15"
PORTS = {OURS: 31000, PEER: 31001}
MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
PROMPT = "".join(MARKS[i] for i in (0, 2, 1)) + " What is in this picture?"
BOUND = 1.5


@dataclass(frozen=True, slots=True)
class Sizes:
    """`sides`: of the images of single requests, and the last one of those beside text. Lengths are in tokens."""

    sides: tuple[int, ...] = (448, 1024)
    repeats: int = 9
    streams: int = 64
    prompt: int = 256
    output: int = 512
    images: int = 16
    image_output: int = 16
    later_s: float = 1.0


TINY = Sizes(sides=(64, 96), repeats=2, streams=4, prompt=16, output=24, images=2, image_output=2, later_s=0.1)


def write_model(folder: Path, tiny: bool) -> Path:
    """The config, a tokenizer and the settings of the processors. Placeholders have the ids behind the tokenizer's."""
    embedded = ROOT / "python" / "sglang" / "embedded" / "tiny"
    tokenizer = json.loads((embedded / "tokenizer.json").read_text())
    first = max(token["id"] for token in tokenizer["added_tokens"]) + 1
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer["added_tokens"] += [{"id": first + i, "content": mark, **plain} for i, mark in enumerate(MARKS)]
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
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = json.loads((embedded / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"model_max_length": 32768}))
    shutil.copy(embedded / "chat_template.jinja", folder)
    pixels = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2, "image_mean": [0.5] * 3}
    pixels |= {"image_std": [0.5] * 3, "size": {"shortest_edge": 65536, "longest_edge": 16777216}}
    if tiny:
        pixels["size"] = {"shortest_edge": 1024, "longest_edge": 65536}
    of_image = pixels | {"image_processor_type": "Qwen2VLImageProcessorFast", "processor_class": "Qwen3VLProcessor"}
    of_video = pixels | {"video_processor_type": "Qwen3VLVideoProcessor", "processor_class": "Qwen3VLProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(of_image))
    (folder / "video_preprocessor_config.json").write_text(json.dumps(of_video))
    return folder


# --- requests ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Answer:
    """`times`: when each event with a token came, in seconds since the request was sent."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    times: list[float] = field(default_factory=list)

    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False)]


async def ask(port: int, body: dict[str, Any], tokens: int) -> Answer:
    """Raises HttpError, also for an answer that ends too early."""
    answer = Answer()
    params = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
    began = time.perf_counter()

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
    rows, columns = np.mgrid[:side, :side]
    shift = rng.integers(0, 256, 3)
    values = np.stack([rows * 200 // side, columns * 200 // side, (rows + columns) * 100 // side], -1) + shift
    values = (values + rng.integers(0, 20, values.shape)) % 256
    file = io.BytesIO()
    Image.fromarray(values.astype(np.uint8)).save(file, "JPEG", quality=90)
    data = base64.b64encode(file.getvalue()).decode()
    return {"text": before + PROMPT, "image_data": [f"data:image/jpeg;base64,{data}"]}


def text_body(length: int, seed: int) -> dict[str, Any]:
    """A prompt of random tokens, which are words in every vocabulary."""
    rng = random.Random(seed)
    return {"input_ids": [rng.randrange(300, 4000) for _ in range(length)]}


async def first_tokens(port: int, sizes: Sizes, seed: int) -> list[dict[str, Any]]:
    """One request after the other; the first of each size only warms up."""
    rows = []
    for side in sizes.sides:
        bodies = [image_body(side, seed + i) for i in range(sizes.repeats + 1)]
        answers = [await ask(port, body, 2) for body in bodies]
        of_text = [await ask(port, text_body(answers[0].prompt_tokens, seed + i), 2) for i in range(sizes.repeats + 1)]
        rows.append(
            {
                "side": side,
                "tokens": answers[0].prompt_tokens,
                "ms": 1e3 * statistics.median(answer.times[0] for answer in answers[1:]),
                "text_ms": 1e3 * statistics.median(answer.times[0] for answer in of_text[1:]),
            }
        )
    return rows


async def beside(port: int, sizes: Sizes, others: Sequence[dict[str, Any]], seed: int) -> dict[str, Any]:
    """The times between tokens of the streams, while `others` are asked for together."""

    async def later(body: dict[str, Any]) -> Answer:
        await asyncio.sleep(sizes.later_s)
        return await ask(port, body, sizes.image_output)

    streams = [ask(port, text_body(sizes.prompt, seed + i), sizes.output) for i in range(sizes.streams)]
    answers = await asyncio.gather(*streams, *map(later, others))
    texts, rest = answers[: sizes.streams], answers[sizes.streams :]
    gaps = sorted(1e3 * gap for answer in texts for gap in answer.gaps())
    return {
        "p50": gaps[len(gaps) // 2],
        "p99": gaps[int(len(gaps) * 0.99)],
        "max": gaps[-1],
        "seconds": max(answer.times[-1] for answer in texts),
        "first_ms": 1e3 * statistics.median(answer.times[0] for answer in rest) if rest else None,
        "last_ms": 1e3 * max(answer.times[-1] for answer in rest) if rest else None,
    }


async def measure(name: str, sizes: Sizes) -> None:
    """Prints the two tables of a server as they fill."""
    port = PORTS[name]
    print(f"\n{name}\n| image | prompt tokens | first token, ms | of as much text, ms |\n|---|---|---|---|", flush=True)
    rows = await first_tokens(port, sizes, 1000)
    for row in rows:
        print(f"| {row['side']} | {row['tokens']} | {row['ms']:.1f} | {row['text_ms']:.1f} |", flush=True)
    side, length, number = sizes.sides[-1], rows[-1]["tokens"], range(sizes.images)
    known = max(1, sizes.images // 2)  # so many fit into the budget for features
    for seed in (0, 1):
        await beside(
            port, sizes, [image_body(side, 10 + seed * 100 + i) for i in number], 5000 + seed * 100
        )  # warms up
    runs = {
        "alone": [],
        f"beside {sizes.images} prompts of {length} tokens": [text_body(length, 7000 + i) for i in number],
        f"beside {sizes.images} encoded images of {side}": [
            image_body(side, 10 + 100 + i % known, f"{i}. ") for i in number
        ],
        f"beside {sizes.images} images of {side}": [image_body(side, 8000 + i) for i in number],
    }
    for i in range(known):  # encoded last, so that they are there
        await ask(port, image_body(side, 10 + 100 + i, "Once more. "), sizes.image_output)
    print(
        f"| {sizes.streams} streams | median, ms | p99, ms | longest, ms | p99 to alone | first token of the others, ms"
        " | last, ms |\n|---|---|---|---|---|---|---|",
        flush=True,
    )
    p99: list[float] = []
    for number_of_run, (what, others) in enumerate(runs.items()):
        row = await beside(port, sizes, others, 20_000 + 100 * number_of_run)
        p99.append(row["p99"])
        first, last = (f"{row[key]:.0f}" if row[key] else "" for key in ("first_ms", "last_ms"))
        times = f"{row['p50']:.2f} | {row['p99']:.2f} | {row['max']:.2f}"
        print(f"| {what} | {times} | {row['p99'] / p99[0]:.2f} | {first} | {last} |", flush=True)
    alone, _, encoded, new = p99
    ratio = new / alone
    print(f"p99 beside images: {ratio:.2f} of that alone, {'within' if ratio <= BOUND else 'NOT within'} {BOUND}")
    print(
        f"of p99, ms: steps that decode {alone:.2f}, pictures decoded and chunks of prompts {encoded - alone:+.2f},"
        f" patches that travel and slices of the encoder {new - encoded:+.2f}"
    )


def how_it_cuts(log: Path) -> str:
    """What our server's log says of slices and chunks."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if "Images beside requests" in line]
    return lines[-1] if lines else "The log does not say how slices and chunks are cut: no times are measured here."


# --- servers ----------------------------------------------------------------------------------------------------------


def start(side: Side, model: Path) -> subprocess.Popen[bytes]:
    words = side.command("launch_server", str(model), "--port", str(PORTS[side.name]))
    with side.log.open("wb") as log:
        return subprocess.Popen(words, env=side.env, stdout=log, stderr=log, start_new_session=True)


def comes_up(side: Side, process: subprocess.Popen[bytes], began: float, limit_s: float) -> bool:
    """Prints the end of its log if it does not."""
    while not healthy(PORTS[side.name]):
        if process.poll() is not None or time.monotonic() - began > limit_s:
            print(f"{side.name} did not start; {side.log} ends:\n{side.log.read_text()[-4000:]}", flush=True)
            return False
        time.sleep(0.5)
    print(f"{side.name}: up after {time.monotonic() - began:.0f} s", flush=True)
    return True


def end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def sides_of(args: argparse.Namespace) -> list[Side]:
    sizes = ["--max-running-requests", "96"]
    if args.tiny:
        sizes += ["--max-total-tokens", "4096", "--device", "cpu", "--skip-server-warmup"]
    else:
        sizes += ["--max-total-tokens", "73728", "--cuda-graph-max-bs", "96", "--dtype", "bfloat16"]
    our_path = os.pathsep.join([str(ROOT / "python"), *filter(None, [os.environ.get("PYTHONPATH")])])
    sides = [Side(OURS, our_path, {}, [*sizes, *shlex.split(args.flags)], args.logs)]
    if args.peer_site:
        flags = ["--sampling-backend", "pytorch", "--grammar-backend", "none", "--mem-fraction-static", "0.8"]
        flags += ["--attention-backend", args.peer_backend, "--mm-attention-backend", "triton_attn"]
        flags += ["--enable-multimodal"]
        more = shlex.split(args.peer_flags)
        sides.append(Side(PEER, peer_path(args.peer_site), PEER_ENV, [*sizes, *flags, *more], args.logs))
    return sides


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--logs", type=Path, default=Path(os.environ.get("OUT", ".")), help="folder of both logs")
    parser.add_argument("--peer-site", help="folder with upstream and its dependencies; without it only our server")
    parser.add_argument("--peer-backend", default="flashinfer", help="the peer's attention of the text model")
    parser.add_argument("--flags", default="", help="more flags of our server, in one argument")
    parser.add_argument("--peer-flags", default="", help="more flags of the peer")
    parser.add_argument("--start-seconds", type=float, default=150, help="a server that is not up then is left out")
    parser.add_argument("--limit-seconds", type=float, default=240, help="of everything")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU, to try the script")
    args = parser.parse_args(argv)
    began, done = time.monotonic(), 0
    processes: dict[str, subprocess.Popen[bytes]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder), args.tiny)
        sides = sides_of(args)
        try:
            for side in sides:
                processes[side.name] = start(side, model)
            for side in sides:
                if not comes_up(side, processes[side.name], began, args.start_seconds):
                    end(processes[side.name])
                    continue
                left = args.limit_seconds - (time.monotonic() - began)
                try:
                    asyncio.run(asyncio.wait_for(measure(side.name, TINY if args.tiny else Sizes()), max(left, 1)))
                    if side.name == OURS:
                        print(how_it_cuts(side.log), flush=True)
                    done += 1
                except (HttpError, asyncio.TimeoutError, KeyError, IndexError) as error:
                    print(
                        f"{side.name} failed: {error!r}; {side.log} ends:\n{side.log.read_text()[-4000:]}", flush=True
                    )
        finally:
            for process in processes.values():
                end(process)
            print(f"{time.monotonic() - began:.0f} s", flush=True)
    return 0 if done == len(sides) else 1


if __name__ == "__main__":
    sys.exit(main())
