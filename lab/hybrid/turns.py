"""The time to the first token of a first turn, of a second one that extends it, and of that one without prefix cache.

    python lab/hybrid/turns.py --model-path DIR --turn 16384 --more 200 --repeats 5 --engine '{"device": "cuda"}'

DIR needs a config.json only: weights are random. Measures whichever `sglang` is on PYTHONPATH, upstream's too: both
have an `Engine`. Prints one JSON object: `rows`, each with the median over the repeats.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

TOKEN_LIMIT = 10_000
"""Token ids of prompts lie below."""
OUTPUT = 64
"""Tokens of the first turn's answer."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--turn", type=int, default=16_384, help="Tokens of the first turn.")
    parser.add_argument("--more", type=int, default=200, help="Tokens that the second turn adds to prompt and output.")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--engine", type=json.loads, default={}, help="Options of the engine, as JSON.")
    return parser.parse_args()


def measure(engine: Any, ids: list[int], output: int) -> tuple[float, int, list[int]]:
    """Seconds to the first token, cached tokens, and the output."""
    ttft, cached, tokens = 0.0, 0, []
    sampling = {"temperature": 0.0, "max_new_tokens": output, "ignore_eos": True}
    start = time.perf_counter()
    for result in engine.generate(input_ids=ids, sampling_params=sampling, stream=True):
        ttft = ttft or time.perf_counter() - start
        cached, new = result["meta_info"]["cached_tokens"], result["output_ids"]
        # All tokens so far, or those since the last result.
        tokens = list(new) if len(new) >= result["meta_info"]["completion_tokens"] else [*tokens, *new]
    return ttft, cached, tokens


def turns(engine: Any, limit: int, first: int, more: int, repeats: int) -> list[dict[str, Any]]:
    rng = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(1, limit) for _ in range(count)]

    seen: dict[str, list[tuple[int, int, float]]] = {"first turn": [], "second turn": [], "second, not cached": []}
    for attempt in range(repeats + 1):
        engine.flush_cache()
        prompt = tokens(first)
        ttft, cached, output = measure(engine, prompt, OUTPUT)
        longer = prompt + output + tokens(more)
        again, hit, _ = measure(engine, longer, 8)
        engine.flush_cache()
        cold, nothing, _ = measure(engine, longer, 8)
        if attempt:  # the first one warms up
            seen["first turn"].append((first, cached, ttft))
            seen["second turn"].append((len(longer), hit, again))
            seen["second, not cached"].append((len(longer), nothing, cold))
    return [
        {
            "turn": name,
            "tokens": values[0][0],
            "cached": values[0][1],
            "ttft_ms": 1e3 * statistics.median(value for *_, value in values),
        }
        for name, values in seen.items()
    ]


def main() -> None:
    options = arguments()
    from sglang import Engine

    config = json.loads((Path(options.model_path) / "config.json").read_text())
    limit = min(TOKEN_LIMIT, config.get("text_config", config)["vocab_size"])
    started = time.perf_counter()
    engine = Engine(model_path=options.model_path, load_format="dummy", skip_tokenizer_init=True, **options.engine)
    ready = time.perf_counter() - started
    try:
        rows = turns(engine, limit, options.turn, options.more, options.repeats)
        print("\n" + json.dumps({"start_s": ready, "rows": rows}), flush=True)
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main()
