"""The scripts of a folder of benchmark/ import each other by name, as when one of them is run."""

from __future__ import annotations

import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[2] / "benchmark"
sys.path[:0] = [str(BENCHMARK / name) for name in ("kernels/fused_moe_triton", "parallel", "peers", "host")]
