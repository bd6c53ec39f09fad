"""A sample of kernel tests over the PTX for SM120, executed here: one launch of each kind of code.

`python scripts/execute_kernels.py` runs all of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LAYERS = "test/srt/layers"
SAMPLE = [
    f"{LAYERS}/test_triton_ops.py::test_fused_add_rmsnorm",  # sums of a block through shared memory
    f"{LAYERS}/quantization/test_quant_linear.py::test_every_scheme[1-nvfp4-native]",  # block scales, of four bits
    f"{LAYERS}/quantization/test_quant_linear.py::test_every_scheme[40-mxfp8-native]",  # block scales, of eight bits
    f"{LAYERS}/attention/test_attention_kernels.py::test_extend_head_dims[(64, 64)]",  # bf16, copies, loops
    # A row of the ledger, with its own tile: scales of groups, of a depth that is split over blocks.
    "test/ledger/rows/rows_of_linear.py::test_tiles[linear/tiles/int4_g64/split/K128 M16 N64 w4 s2 GROUP_M1]",
]


def test_sample(tmp_path: Path) -> None:
    environment = os.environ | {
        "SGLANG_EXECUTE_PTX": "sm_120", "TRITON_DEFAULT_FP_FUSION": "1", "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": str(ROOT / "python"), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    unneeded = ("cacheprovider", "schemathesis", "hypothesispytest", "anyio", "xdist", "xdist.looponfail")
    words = [word for name in unneeded for word in ("-p", f"no:{name}")]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "thorough or not thorough", *words, *SAMPLE]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
