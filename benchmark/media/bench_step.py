#!/usr/bin/env python3
"""An encoder step as the scheduler runs it for one new image, in stages: milliseconds of the host and of the GPU.

    python benchmark/media/bench_step.py [--only Qwen3-VL-8B] [--directory /dev/shm]

The patches of a square image lie in a shared array, as a process that decodes leaves them. `read`: into pinned memory;
`places`: of the patches, on the host; `sent`: both by the thread that sends them, with what it waits for; `begun` and
`launched`: what the scheduler's thread takes for the step, during which it launches nothing else; `done`: from the
beginning until the features are there. Medians behind two first steps, of which `first` is the first one.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tower_configs import TOWERS

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python")]

from bench_encoders import SIDES, cases, encoder_of  # noqa: E402

from sglang.srt.model_executor.media_features import MediaFeatures  # noqa: E402
from sglang.srt.models.vision.patch_places import num_patches  # noqa: E402
from sglang.srt.plan.media import describe_media  # noqa: E402
from sglang.srt.utils import shared_array  # noqa: E402
from sglang.srt.utils.media_item import MediaItem  # noqa: E402

STEPS = 7
STAGES = ("read", "places", "sent", "begun", "launched", "done")


class Stages:
    """Times by stage, of one step after the other."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {stage: [] for stage in STAGES}

    def timed(self, stage: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.times[stage].append(1e3 * (time.perf_counter() - began))

        return run


def steps(encoder: Any, config: dict[str, Any], grid: tuple[int, int, int], folder: Path) -> Stages:
    description = describe_media(config)
    assert description is not None
    tower, stages = encoder.tower, Stages()
    dtype = tower.pixel_dtype("bfloat16")
    features = MediaFeatures(description, tower.features_size, torch.bfloat16, 1 << 30, encoder.device, encoder, folder)
    uploads = features._uploads
    assert uploads is not None
    uploads._fill = stages.timed("sent", uploads._fill)  # type: ignore[method-assign]
    encoder.places = stages.timed("places", type(encoder).places.__get__(encoder))
    values = np.zeros((num_patches([grid]), tower.patch_values), np.float32 if dtype == "float32" else np.int16)
    for number in range(STEPS + 2):
        pixels = shared_array.write(folder, values, "pixels", dtype)
        item = MediaItem(kind="image", digest=bytes([number] * 32), spans=[(0, 1)], grid=grid, pixels=pixels)
        reader_of = features._reader

        def reader(items: Any, reader_of: Any = reader_of) -> Any:
            opened = reader_of(items)
            opened.fill = stages.timed("read", opened.fill)
            return opened

        features._reader = reader  # type: ignore[method-assign]
        began = time.perf_counter()
        stages.timed("begun", features.begin)([item])
        stages.timed("launched", features.advance)(whole=True)
        if encoder.device != "cpu":
            torch.cuda.synchronize()
        stages.times["done"].append(1e3 * (time.perf_counter() - began))
        features._reader = reader_of  # type: ignore[method-assign]
        features.clear()
        shared_array.remove(folder, pixels)
    return stages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="Qwen3-VL-8B", help="towers, by name")
    parser.add_argument("--directory", default="/dev/shm", help="where the folder of the shared arrays is")
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    print(f"| tower | input | patches | {' | '.join(STAGES)} | first |\n|{'---|' * (4 + len(STAGES))}", flush=True)
    for name in args.only.split(","):
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir=args.directory) as shared:
            encoder = encoder_of(TOWERS[name], Path(folder), "cuda" if on_gpu else "cpu")
            for case, grid in list(cases(encoder, 1 if on_gpu else 8))[: len(SIDES)]:
                times = steps(encoder, TOWERS[name], grid, Path(shared)).times
                medians = [statistics.median(times[stage][2:]) for stage in STAGES]
                text = " | ".join(f"{value:.1f}" for value in [*medians, times["done"][0]])
                print(f"| {name} | {case} | {num_patches([grid]):,} | {text} |", flush=True)


if __name__ == "__main__":
    main()
