"""This server and upstream SGLang serve the same model with the same drafts over HTTP, one after the other on one GPU,
or each on a GPU of its own where two are visible.

Each has the flags and the forced accept length of a case of `draft_shapes`. Requests of random tokens are sent
together, once with short and once with long answers; the difference is decoding alone. The peer computes prompts
without graphs: capturing them takes up to 165 s before it serves, and what is compared does not contain prompts.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draft_shapes import Case

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "benchmark" / "peers")]

from compare import PEER_ENV, PORT, Side, healthy, peer_path  # noqa: E402
from processors import write_processors, write_tokenizer  # noqa: E402

from sglang.bench.http_client import Endpoint, HttpError, send  # noqa: E402

OURS, PEER = "sm120-sglang", "SGLang 0.5.15"
PORTS = {OURS: PORT, PEER: PORT + 1}
PROMPT, SHORT, LONG = 512, 16, 144
"""In tokens."""
TRITON_FP8 = {"SGLANG_ENABLE_JIT_DEEPGEMM": "0"}
"""The peer's products of FP8 blocks are Triton's, as on SM120, where DeepGEMM does not run; compiling that takes
minutes."""
REAL_TOKENS = {"SGLANG_SIMULATE_ACC_TOKEN_MODE": "real-draft-token"}
"""Without it the peer accepts one and the same token everywhere, which sends all rows to the same experts."""

WORKSPACE = {"SGLANG_FLASHINFER_WORKSPACE_SIZE": str(1 << 30)}
"""In bytes: its default is too small to verify with 96 heads."""


@dataclass(slots=True)
class Rate:
    """`tokens_per_s`: of all requests, behind their first tokens."""

    tokens_per_s: float
    accept_length: float


async def rate(port: int, requests: int, seed: int) -> Rate:
    """Raises HttpError, also for an answer that ends too early."""
    short, _ = await _together(port, requests, SHORT, seed)
    seconds, answers = await _together(port, requests, LONG, seed + 1)
    verified = sum(answer["meta_info"].get("spec_verify_ct", 0) for answer in answers)
    length = requests * (LONG - 1) / verified if verified else 1.0
    return Rate(requests * (LONG - SHORT) / (seconds - short), length)


async def _together(port: int, requests: int, tokens: int, seed: int) -> tuple[float, list[dict[str, Any]]]:
    rng, began = random.Random(seed), time.perf_counter()
    prompts = [[rng.randrange(300, 4000) for _ in range(PROMPT)] for _ in range(requests)]
    answers = await asyncio.gather(*(_ask(port, prompt, tokens) for prompt in prompts))
    return time.perf_counter() - began, list(answers)


async def _ask(port: int, prompt: list[int], tokens: int) -> dict[str, Any]:
    params = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": params}
    reply = await send(Endpoint.parse(f"http://127.0.0.1:{port}", {}), "POST", "/generate", body, timeout_s=60)
    answer: dict[str, Any] = json.loads(reply)
    if answer["meta_info"]["completion_tokens"] != tokens:
        raise HttpError(f"{answer['meta_info']['completion_tokens']} tokens came of {tokens}")
    return answer


def sides_of(name: str, case: Case, sizes: list[int], device: str, peer_site: str, logs: Path) -> list[Side]:
    """Returns both servers, without the paths of the model and the draft. The peer has the last of the GPUs that are
    visible."""
    tokens = 1024 * max(sizes)
    flags = ["--max-running-requests", str(max(sizes)), "--max-total-tokens", str(tokens), "--skip-tokenizer-init"]
    flags += ["--cuda-graph-bs", *map(str, sizes), "--context-length", "2048", "--disable-radix-cache"]
    flags += ["--skip-server-warmup", "--device", device, *case.flags]
    env = {"SGLANG_SIMULATE_ACC_LEN": str(case.accept_length)}
    of_peer = ["--sampling-backend", "pytorch", "--grammar-backend", "none", "--attention-backend", "flashinfer"]
    of_peer += ["--mem-fraction-static", "0.85", "--disable-prefill-cuda-graph"]
    if "quantization_config" in case.target(True):
        of_peer += ["--moe-runner-backend", "triton"]
    our_path = os.pathsep.join([str(ROOT / "python"), *filter(None, [os.environ.get("PYTHONPATH")])])
    peer_env = {**PEER_ENV, **TRITON_FP8, **REAL_TOKENS, **WORKSPACE, "PYTHONFAULTHANDLER": "1", **env}
    if gpus := visible_gpus():
        peer_env["CUDA_VISIBLE_DEVICES"] = gpus[-1]
        env["CUDA_VISIBLE_DEVICES"] = gpus[0]
    folder = logs / name
    return [
        Side(OURS, our_path, env, flags, folder),
        Side(PEER, peer_path(peer_site), peer_env, [*flags, *of_peer], folder),
    ]


def visible_gpus() -> list[str]:
    """Returns the GPUs that CUDA_VISIBLE_DEVICES names."""
    return [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]


class Server:
    """One of the two servers while it runs."""

    def __init__(self, side: Side, model: str) -> None:
        self.side, self.port, self.began = side, PORTS[side.name], time.monotonic()
        side.log.parent.mkdir(parents=True, exist_ok=True)
        words = side.command("launch_server", model, "--port", str(self.port))
        with side.log.open("wb") as log:
            self.process = subprocess.Popen(words, env=side.env, stdout=log, stderr=log, start_new_session=True)

    def rates(self, sizes: list[int], start_seconds: float) -> dict[int, Rate]:
        """Prints tokens a second by number of requests, once the server is up, and ends it. start_seconds: as long it
        may take until it is."""
        rates, name = {}, self.side.name
        try:
            while not healthy(self.port):
                if self.process.poll() is not None or time.monotonic() - self.began > start_seconds:
                    self._say_where()
                    raise HttpError(f"not up after {time.monotonic() - self.began:.0f} s")
                time.sleep(0.5)
            print(f"{name}: up {time.monotonic() - self.began:.0f} s after its start", flush=True)
            for size in sizes:
                asyncio.run(rate(self.port, size, 1000 * size))  # warms up
                rates[size] = asyncio.run(rate(self.port, size, 1000 * size + 100))
                text = f"{rates[size].tokens_per_s:.1f} tokens/s, accept length {rates[size].accept_length:.2f}"
                print(f"{name} at {size}: {text}", flush=True)
        except (HttpError, OSError, KeyError, ValueError) as error:
            text = self.side.log.read_text(errors="replace")
            print(f"{name} failed: {error!r}; {self.side.log} ends:\n{text[-4000:]}", flush=True)
        finally:
            self.end()
        return rates

    def _say_where(self) -> None:
        """Has its processes write to the log where they are, and end."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGABRT)
            time.sleep(2)

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            time.sleep(3)  # the driver takes a moment to give the memory back


class Comparison:
    """Both servers with one model. Where two GPUs are visible the peer starts at once, on one of its own, while
    this server is measured; otherwise behind it."""

    def __init__(self, name: str, case: Case, sizes: list[int], device: str, peer_site: str, logs: Path) -> None:
        self.name, self.sizes = name, sizes
        self.folder = tempfile.TemporaryDirectory()
        self.model, *draft = case.write(Path(self.folder.name), few_layers=False)[1:]
        if "vision_config" in case.target(True):
            write_tokenizer(Path(self.model))  # the peer asks for these, whatever is sent
            write_processors(Path(self.model))
        self.ours, self.peer = sides_of(name, case, sizes, device, peer_site, logs)
        for side in (self.ours, self.peer):
            side.flags += draft[len(case.flags) :]
        self.peer_server: Server | None = None
        if not (Path(peer_site) / "sglang").is_dir():
            print(f"{peer_site} holds no sglang: nothing to compare with", flush=True)
            self.sizes = []
        elif len(visible_gpus()) > 1:
            self.peer_server = Server(self.peer, self.model)

    def close(self) -> None:
        if self.peer_server is not None:
            self.peer_server.end()
        self.folder.cleanup()

    def run(self, start_seconds: float) -> dict[str, Any]:
        """Prints tokens a second of both servers by number of requests, and returns them. A server that does not start
        costs its own column only."""
        if not self.sizes:
            return {}
        print(
            f"\n{self.name} over HTTP, with drafts: tokens/s at {', '.join(map(str, self.sizes))} requests", flush=True
        )
        ours = Server(self.ours, self.model).rates(self.sizes, start_seconds)
        if self.peer_server is None:
            self.peer_server = Server(self.peer, self.model)
        peer = self.peer_server.rates(self.sizes, start_seconds)
        for size in sorted(ours.keys() & peer.keys()):
            print(f"at {size}: {ours[size].tokens_per_s / peer[size].tokens_per_s:.2f} times upstream", flush=True)
        return {
            side: {size: [value.tokens_per_s, value.accept_length] for size, value in row.items()}
            for side, row in ((OURS, ours), (PEER, peer))
        }
