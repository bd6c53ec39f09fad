# SPDX-License-Identifier: Apache-2.0
"""Whether FlashInfer can fuse all-reduce, residual and norm on this SM12x machine."""

import functools
import re
from importlib import metadata

from sglang.srt.sm120.hardware import is_sm12x

FIRST_WITH_SM12X = (0, 6, 18)
"""Earlier versions compile the kernel for majors 9 and 10 only and fail at the first call."""


@functools.cache
def fusion_runs_on_sm12x() -> bool:
    """True on SM12x with a FlashInfer that has the kernel. It is never turned on by itself there: over PCIe the plain
    all-reduce may win, and GPUs may lack peer access, so the user asks for it."""
    if not is_sm12x():
        return False
    for name in ("flashinfer-python", "flashinfer_python"):
        try:
            parts = re.findall(r"\d+", metadata.version(name))
        except metadata.PackageNotFoundError:
            continue
        return tuple(int(part) for part in parts[:3]) >= FIRST_WITH_SM12X
    return False


SM12X_FUSION = fusion_runs_on_sm12x()
"""Decided once: the predicate that reads it is traced by torch.compile."""
