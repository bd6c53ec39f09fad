"""How long other requests wait while the API process decodes bodies of about 20 MB, on the event loop or in a thread.

    python benchmark/host/bench_long_bodies.py

Prints the longest pauses of the event loop in milliseconds, the median of several bodies of each kind.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time

from sglang.srt.entrypoints.http_body import Body, parse_body
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest

TICK_S = 0.001


def conversation(text: str, count: int = 1) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": text}] * count}).encode()


BODIES: dict[str, tuple[type[Body], bytes]] = {
    "one text": (ChatCompletionRequest, conversation("word " * 4_000_000)),
    "one text with escapes": (ChatCompletionRequest, conversation('w\u00e9\n"' * 1_600_000)),
    "16,000 messages": (ChatCompletionRequest, conversation("word " * 240, 16_000)),
    "3.3 million token ids": (CompletionRequest, json.dumps({"prompt": list(range(10_000, 99_999)) * 37}).encode()),
}


async def pause_ms(model: type[Body], raw: bytes, in_thread: bool) -> float:
    """Decodes a body and returns the longest time between two turns of another task."""
    longest, ends = 0.0, False

    async def tick() -> None:
        nonlocal longest
        last = time.perf_counter()
        while not ends:
            await asyncio.sleep(TICK_S)
            now = time.perf_counter()
            longest, last = max(longest, now - last), now

    ticking = asyncio.ensure_future(tick())
    await asyncio.sleep(10 * TICK_S)
    if in_thread:
        await asyncio.to_thread(parse_body, raw, model)
    else:
        parse_body(raw, model)
    await asyncio.sleep(TICK_S)
    ends = True
    await ticking
    return 1e3 * longest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    print(f"{'':<24} {'MB':>6} {'on the loop':>12} {'in a thread':>12}  ms")
    for name, (model, raw) in BODIES.items():
        pauses = [
            statistics.median(asyncio.run(pause_ms(model, raw, in_thread)) for _ in range(args.repeats))
            for in_thread in (False, True)
        ]
        print(f"{name:<24} {len(raw) / 1e6:>6.1f} {pauses[0]:>12.0f} {pauses[1]:>12.0f}")


if __name__ == "__main__":
    main()
