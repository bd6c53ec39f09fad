"""Answers with prefixes from main memory beside those of a server without any prefix cache, greedy.

A pool of 1,536 tokens evicts nearly every prefix of the 24 prompts before it comes again. In float32 answers must be
equal; in 16 bits rounding differs with the length of chunks and batches.
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any

from sessions import new_tokens


def main() -> None:
    options = json.loads(sys.argv[1])
    from sglang import Engine

    rng = random.Random(0)
    prompts = [new_tokens(rng, rng.randrange(100, 400)) for _ in range(options["prompts"])]
    prompts = [[token % options["vocabulary"] for token in prompt] for prompt in prompts]
    order = [rng.choice(prompts) for _ in range(options["requests"])]
    sampling = {"temperature": 0.0, "max_new_tokens": options["output"], "ignore_eos": True}
    answers: dict[str, list[list[int]]] = {}
    rows: list[dict[str, Any]] = []
    for name, flags in options["servers"].items():
        engine = Engine(model_path=options["model_path"], skip_tokenizer_init=True, **flags)
        try:
            answers[name], loaded = [], 0
            for first in range(0, len(order), 4):
                for result in engine.generate(input_ids=order[first : first + 4], sampling_params=sampling):
                    answers[name].append(result["output_ids"])
                    details = result["meta_info"].get("cached_tokens_details") or {}
                    loaded += details.get("host", 0)
        finally:
            engine.shutdown()
        reference = next(iter(answers.values()))
        equal = sum(one == other for one, other in zip(answers[name], reference, strict=True))
        rows.append({"server": name, "equal": equal, "of": len(order), "loaded_tokens": loaded})
    print("\n" + json.dumps(rows), flush=True)


if __name__ == "__main__":
    main()
