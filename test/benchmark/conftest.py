"""The scripts of benchmark/kernels/fused_moe_triton import each other by name, as when one of them is run."""

from __future__ import annotations

import sys
from pathlib import Path

SCRIPTS = Path(__file__).parents[2] / "benchmark" / "kernels" / "fused_moe_triton"
sys.path.insert(0, str(SCRIPTS))
