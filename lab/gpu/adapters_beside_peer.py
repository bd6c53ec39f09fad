"""Decode steps with LoRA adapters, for the same run of this server and of upstream SGLang.

    python lab/gpu/adapters_beside_peer.py --folder /tmp/adapters     # GPU; three minutes an engine on an H200
    PYTHONPATH=UPSTREAM python lab/gpu/adapters_beside_peer.py --folder /tmp/adapters attention_backend=flashinfer

All layers of Qwen3-8B with random weights, and 32 adapters of rank 16 of all linear layers, written once into the
folder. Whichever `sglang` is found serves 1, 64 and 256 requests of 128 tokens: without adapters, with one, with 8 and
with 32, requests in turn. A line of JSON for each gives the time of a decode step: what 160 more tokens take. Words
NAME=VALUE become arguments of `sglang.Engine`; `--without` leaves LoRA off.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from adapters_on_gpu import CONFIG, SHAPES, prompts, save_weights, write_adapter, write_model

ADAPTERS, REQUESTS, RANK = (0, 1, 8, 32), (1, 64, 256), 16
FEWER, MORE, ROUNDS = 32, 192, 3


def write(folder: Path) -> None:
    """Writes the model's config and the adapters, unless they are there."""
    if (folder / "written").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    layers, vocabulary = (int(CONFIG[name]) for name in ("num_hidden_layers", "vocab_size"))  # type: ignore[call-overload]
    save_weights(folder / "model", write_model(folder / "model", layers, vocabulary))
    for number in range(max(ADAPTERS)):
        path = folder / f"a{number}"
        write_adapter(path, layers, RANK, seed=number)
        config = json.loads((path / "adapter_config.json").read_text())  # upstream takes a list of names alone
        config["target_modules"] = sorted({name.rpartition(".")[2] for name in SHAPES})
        (path / "adapter_config.json").write_text(json.dumps(config))
    (folder / "written").touch()


def value_of(word: str) -> Any:
    try:
        return json.loads(word)
    except ValueError:
        return word


def measure(engine: Any, adapters: int, requests: int) -> float:
    """Returns milliseconds of a decode step, the best of three rounds."""
    ids = prompts(requests, 150000)
    names = [f"a{number % adapters}" if adapters else None for number in range(requests)]
    chosen = {"lora_path": names} if adapters else {}

    def seconds(tokens: int) -> float:
        begin = time.perf_counter()
        engine.generate(
            input_ids=ids, sampling_params={"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}, **chosen
        )
        return time.perf_counter() - begin

    seconds(8)
    steps = [(seconds(MORE) - seconds(FEWER)) / (MORE - FEWER) for _ in range(ROUNDS)]
    return min(steps) * 1000


def main() -> None:
    """Starts one engine, and prints a line for each number of adapters and of requests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", required=True, type=Path)
    parser.add_argument("--without", action="store_true")
    parser.add_argument("words", nargs="*", metavar="NAME=VALUE")
    asked = parser.parse_args()
    write(asked.folder)
    import sglang

    lora: dict[str, Any] = {}
    if not asked.without:
        paths = [f"a{number}={asked.folder / f'a{number}'}" for number in range(max(ADAPTERS))]
        lora = {"enable_lora": True, "lora_paths": paths, "max_loras_per_batch": max(ADAPTERS)}
    more = {name: value_of(value) for name, value in (word.split("=", 1) for word in asked.words)}
    started = time.perf_counter()
    engine = sglang.Engine(
        model_path=str(asked.folder / "model"), skip_tokenizer_init=True, random_seed=1,
        disable_radix_cache=True, context_length=4096, mem_fraction_static=0.7, max_running_requests=max(REQUESTS),
        **lora, **more,
    )  # fmt: skip
    print(json.dumps({"version": sglang.__version__, "start_s": round(time.perf_counter() - started, 1)}), flush=True)
    for adapters in ADAPTERS[:1] if asked.without else ADAPTERS:
        for requests in REQUESTS:
            if adapters <= requests:
                milliseconds = round(measure(engine, adapters, requests), 3)
                print(json.dumps({"adapters": adapters, "requests": requests, "ms": milliseconds}), flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main()
