"""The encoder of Qwen3-VL-8B with its layers in main memory, beside the same encoder resident: features and times.

    python lab/gpu/streamed_encoder.py    # GPU; half a minute

Random weights. Prints for images of some sizes the ms of an encoder step resident and streamed, the bytes that come
over the bus, and whether the features are equal, also where two steps are mixed. The last line says what failed.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from sglang.embedded import DEFAULT_MODEL_PATH
from sglang.srt.managers.scheduler.scheduler_setup import create_plan
from sglang.srt.model_loader.loader import load_tower
from sglang.srt.plan.host_tables import with_encoder
from sglang.srt.server_args import ServerArgs
from sglang.srt.towers.base.encoder import VisionEncoder, whole
from sglang.srt.towers.base.pieces import Cuts

CONFIG = Path(__file__).parents[2] / "test/srt/kernels/published/Qwen3-VL-8B-Instruct/config.json"
IMAGES = {"224 x 224": (1, 14, 14), "448 x 448": (1, 28, 28), "1120 x 1120": (1, 70, 70)}
TIMES = 5


def towers(folder: Path) -> list[VisionEncoder[Any]]:
    """Returns the resident encoder, and the one with layers in main memory."""
    config = json.loads(CONFIG.read_text())
    config["text_config"]["num_hidden_layers"] = 2
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(DEFAULT_MODEL_PATH) / name, folder)
    args = ServerArgs.from_kwargs(
        model_path=str(folder), load_format="dummy", skip_tokenizer_init=True, max_total_tokens=4096,
        max_running_requests=4, disable_hierarchical_cache=True,
    )  # fmt: skip
    plan = create_plan(args)
    streamed = replace(plan, description=with_encoder(plan.description))
    return [tower for each in (plan, streamed) if isinstance(tower := load_tower(each, "dummy"), VisionEncoder)]


def milliseconds(tower: VisionEncoder[Any], pixels: torch.Tensor, grid: tuple[int, int, int]) -> float:
    """Returns the time of a whole encoder step, the fastest of some."""
    fastest = float("inf")
    for _ in range(TIMES):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        tower.encode(pixels, [grid])
        torch.cuda.synchronize()
        fastest = min(fastest, 1e3 * (time.perf_counter() - begin))
    return fastest


@torch.inference_mode()
def main() -> None:
    wrong, folder = [], Path(tempfile.mkdtemp())
    resident, streamed = towers(folder)
    assert streamed.streamed is not None
    layers = 2 * sum(streamed.tower.layer_sizes())
    for name, grid in IMAGES.items():
        count = grid[1] * grid[2]
        pixels = torch.randn(count, resident.tower.patch_values, device="cuda").to(resident.dtype)
        want, got = resident.encode(pixels, [grid]), streamed.encode(pixels, [grid])
        equal = torch.equal(want[0], got[0])
        steps = [streamed.encoding(streamed.sent(pixels, [grid]), [grid], Cuts(2, 2)) for _ in range(2)]
        for number in (0, 0, 0, 1, 0, 1):
            next(steps[number])
        cut = whole(resident.encoding(resident.sent(pixels, [grid]), [grid], Cuts(2, 2)))
        mixed = all(torch.equal(whole(step)[0], cut[0]) for step in steps)
        row = {
            "image": name, "patches": count, "resident_ms": milliseconds(resident, pixels, grid),
            "streamed_ms": milliseconds(streamed, pixels, grid), "layers_mb": layers / 1e6,
            "bus_ms_at_55": layers / 55e6, "equal": equal, "mixed_equal": mixed,
        }  # fmt: skip
        print(json.dumps(row), flush=True)
        wrong += [name] * (not (equal and mixed))
    shutil.rmtree(folder)
    print(f"Other features: {', '.join(wrong)}" if wrong else "All features are equal.")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
