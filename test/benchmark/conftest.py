"""The scripts of a folder of benchmark/kernels import each other by name, as when one of them is run."""

from __future__ import annotations

import sys
from pathlib import Path

KERNELS = Path(__file__).parents[2] / "benchmark" / "kernels"
sys.path[:0] = [str(KERNELS / "fused_moe_triton"), str(KERNELS / "card")]
