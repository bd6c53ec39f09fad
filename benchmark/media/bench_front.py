#!/usr/bin/env python3
"""What a process that decodes images does with one: each stage in milliseconds, without a GPU and without torch.

    python benchmark/media/bench_front.py [--sides 448,1024,2048] [--directory /dev/shm]

JPEG files in base64, as `bench_served.py` sends them, to the patches of Qwen3-VL in bfloat16. `whole` is the job as the
server gives it to the process; `piped` is the same over the pipe to a process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
REPEATS = 7
STAGES = ("base64", "decoded", "patches", "digest", "written", "whole", "piped")


def milliseconds(call: Callable[[], Any]) -> tuple[float, Any]:
    """The median behind a first call, and what the last one returned."""
    times, result = [], call()
    for _ in range(REPEATS):
        began = time.perf_counter()
        result = call()
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times), result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sides", default="448,1024,2048")
    parser.add_argument("--directory", default="/dev/shm", help="where the folder of the shared arrays is")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir=args.directory) as shared:
        from bench_served import image_body, write_model

        model = write_model(Path(folder), tiny=False)
        files = {
            side: image_body(side, side)["image_data"][0].partition(",")[2] for side in map(int, args.sides.split(","))
        }
        print(f"| side | {' | '.join(STAGES)} |\n|{'---|' * (1 + len(STAGES))}")
        for side, text in files.items():
            rows = stages(model, Path(shared), text.encode())
            print(f"| {side} | {' | '.join(f'{rows[stage]:.1f}' for stage in STAGES)} |", flush=True)


def stages(model: Path, shared: Path, data: bytes) -> dict[str, float]:
    from sglang.srt.managers.front.media import decoding, worker
    from sglang.srt.managers.front.media.messages import MediaJob
    from sglang.srt.managers.front.media.pool import MediaPool
    from sglang.srt.managers.front.media.processor_files import read_processor_files
    from sglang.srt.managers.front.media.processors import image_processor
    from sglang.srt.utils import shared_array

    files = read_processor_files(model, "qwen3_vl", "{}")
    settings = worker.WorkerSettings(str(shared), files, 1 << 26, pixel_dtype="bfloat16")
    process, job = image_processor(files, "bfloat16"), MediaJob(name="one", kind="image", data=data, is_base64=True)
    of_worker, rows = worker._Worker(settings), {}
    rows["base64"], raw = milliseconds(lambda: decoding.file_bytes(data, True, 1 << 26))
    rows["decoded"], picture = milliseconds(lambda: decoding.decode_image(raw))
    rows["patches"], patches = milliseconds(lambda: process(picture))
    rows["digest"], _ = milliseconds(lambda: hashlib.sha256(picture.tobytes()).digest())

    def removed(array: Any) -> None:
        shared_array.remove(shared, array)

    rows["written"], _ = milliseconds(lambda: removed(shared_array.write(shared, patches.pixels, "one", "bfloat16")))
    rows["whole"], _ = milliseconds(lambda: removed(of_worker.answer(job).arrays()[0]))

    async def piped() -> float:
        pool, times = MediaPool(settings, 1, 60.0), []
        for _ in range(REPEATS + 1):
            began = time.perf_counter()
            removed((await pool.decode(job)).arrays()[0])
            times.append(1e3 * (time.perf_counter() - began))
        pool.close()
        return statistics.median(times[1:])

    rows["piped"] = asyncio.run(piped())
    return rows


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "python"), str(ROOT / "benchmark" / "peers")]
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # as in the process itself
    main()
