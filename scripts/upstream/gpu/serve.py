"""Both trees' servers on one GPU with the same random weights, and the same greedy requests to each."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ENVIRONMENT = {
    "SGLANG_DISABLE_CUDNN_CHECK": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "FLASHINFER_DISABLE_VERSION_CHECK": "1",
    "PYTHONUNBUFFERED": "1",
}
FLAGS = (
    "--attention-backend triton --sampling-backend pytorch --grammar-backend none --cuda-graph-max-bs 8 "
    # Half of the GPU as the limit and few tokens in it: two servers measure what is free while the other one starts.
    "--mem-fraction-static 0.5 --max-total-tokens 65536 --max-running-requests 16 "
    # A prompt of more than 256 tokens attends to its own beginning in the cache.
    "--chunked-prefill-size 256 --random-seed 1"
).split()
WHERE_KNOWN = ("--disable-piecewise-cuda-graph",)
"""Flags that only make the start faster, and that not every release has."""
START_LIMIT_S = 210
OUTPUT_TOKENS = 32
PROMPT_LENGTHS = (5, 31, 64, 129, 300, 700)
SHARED_PREFIX = 300
"""The last two prompts begin with those of PROMPT_LENGTHS[-2], and find them in the prefix cache."""


class ServerError(RuntimeError):
    """A server did not start, or did not answer."""


def write_checkpoint(config_dir: Path, out: Path, device: str) -> None:
    """A checkpoint of the model with random weights, always the same on one kind of device, in `out`.

    The dummy weights that upstream makes are no use here: they are so small that attention changes no logit. These
    are normal with 0.02, and norms of one, so that every layer counts. Raises ValueError for another model than Qwen3.
    """
    from safetensors.torch import save_file

    config = json.loads((config_dir / "config.json").read_text())
    if config["model_type"] != "qwen3":
        raise ValueError(
            f"--model has model_type {config['model_type']}; only qwen3 (dense) can be given random weights"
        )
    generator = torch.Generator(device).manual_seed(1)
    hidden, inter, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        of_layer = {
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries),
            "self_attn.q_norm": (dim,),
            "self_attn.k_norm": (dim,),
            "mlp.gate_proj": (inter, hidden),
            "mlp.up_proj": (inter, hidden),
            "mlp.down_proj": (hidden, inter),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in of_layer.items()}
    weights = {name: _weight(name, shape, generator, device) for name, shape in shapes.items()}
    shutil.copytree(config_dir, out, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors*"))
    save_file(weights, str(out / "model.safetensors"), metadata={"format": "pt"})


def _weight(name: str, shape: tuple[int, ...], generator: torch.Generator, device: str) -> torch.Tensor:
    if len(shape) == 1:
        size = 1.5 if name.endswith(("q_norm.weight", "k_norm.weight")) else 1.0  # 1.5: attention that chooses
        return torch.full(shape, size, dtype=torch.bfloat16)
    return (0.02 * torch.randn(shape, generator=generator, device=device)).bfloat16().cpu()


def requests(vocabulary: int) -> list[dict[str, Any]]:
    """Bodies for /generate. The prompts' log probabilities are asked for, but where they would bypass the cache."""
    chosen = random.Random(1)
    prompts = [[chosen.randrange(vocabulary) for _ in range(length)] for length in PROMPT_LENGTHS]
    shared = next(prompt for prompt in prompts if len(prompt) == SHARED_PREFIX)
    bodies = [_body(prompt, start=0) for prompt in prompts]
    for length in (20, 90):
        bodies.append(_body(shared + [chosen.randrange(vocabulary) for _ in range(length)], start=-1))
    return bodies


def _body(prompt: list[int], start: int) -> dict[str, Any]:
    return {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0.0, "max_new_tokens": OUTPUT_TOKENS, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": start,
        "top_logprobs_num": 5,
    }


def answer(reply: dict[str, Any]) -> dict[str, Any]:
    """The part of a reply of /generate that `judge.compare_answers` compares."""
    meta = reply["meta_info"]
    output = meta["output_token_logprobs"]
    return {
        "output_ids": [token for _, token, *_ in output],
        "output": [value for value, *_ in output],
        "input": [value for value, *_ in meta.get("input_token_logprobs") or [] if value is not None],
        "top": [{token: value for value, token, *_ in step or ()} for step in meta["output_top_logprobs"]],
        "cached_tokens": meta.get("cached_tokens", 0),
    }


@dataclass
class Server:
    """One tree's server. `path`: its PYTHONPATH; `tree`: the folder of its package."""

    name: str
    tree: Path
    path: str
    env: dict[str, str]
    port: int
    log: Path
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0

    def start(self, model: Path) -> None:
        known = (self.tree / "sglang/srt/server_args.py").read_text(encoding="utf-8")
        optional = [flag for flag in WHERE_KNOWN if f'"{flag}"' in known]
        command = [sys.executable, "-W", "ignore", "-m", "sglang.launch_server", "--model-path", str(model)]
        self.started = time.monotonic()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, *FLAGS, *optional, "--host", "127.0.0.1", "--port", str(self.port)],
                env={**os.environ, **ENVIRONMENT, **self.env, "PYTHONPATH": self.path},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait(self) -> float:
        """Seconds from its start until it was seen healthy. Raises ServerError with the end of its log."""
        assert self.process
        while time.monotonic() - self.started < START_LIMIT_S:
            if self.process.poll() is not None:
                break
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5) as reply:
                    if reply.status == 200:
                        return time.monotonic() - self.started
            except OSError:
                time.sleep(0.5)
        raise ServerError(f"the {self.name} server did not start:\n{self.log.read_text(errors='replace')[-3000:]}")

    def post(self, endpoint: str, body: dict[str, Any] | None = None) -> Any:
        data = json.dumps(body or {}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/{endpoint}", data, {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=90) as reply:
                text = reply.read()
        except OSError as error:
            end = self.log.read_text(errors="replace")[-3000:]
            raise ServerError(f"the {self.name} server on /{endpoint}: {error}\n{end}") from error
        return json.loads(text) if endpoint == "generate" else text

    def stop(self) -> None:
        if self.process is None:
            return
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # its scheduler and detokenizer
        self.process.wait()


def ask(server: Server, bodies: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The answers one after the other, and to all of them at once: the GEMMs then have other shapes."""
    alone = [answer(server.post("generate", body)) for body in bodies]
    with contextlib.suppress(ServerError):  # refused while it is not idle; what was cached is then used again
        server.post("flush_cache")
    with ThreadPoolExecutor(len(bodies)) as pool:
        together = [answer(reply) for reply in pool.map(lambda body: server.post("generate", body), bodies)]
    return {"alone": alone, "together": together}
