"""`python launches.py FOLDER|-`: launches kernels as on an sm_120, up to the point where the GPU would get them, and
prints for each form whether it was in Triton's cache: [[name, found], ...]. FOLDER: those of the start of this model;
-: two of layers."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from functools import partialmethod
from pathlib import Path
from unittest.mock import patch

import torch

ARCH = "sm_120"


def launch_two() -> None:
    """A norm and an activation."""
    from sglang.srt.configs.activation import SILU
    from sglang.srt.layers.triton_ops import activation, norm

    x = torch.empty(4, 1024, dtype=torch.bfloat16, device="meta")
    norm.rmsnorm(x, torch.empty(1024, dtype=torch.bfloat16, device="meta"), 1e-6)
    activation.activate(x, SILU)


def main(folder: str) -> None:
    import triton
    from triton.runtime import JITFunction

    from sglang.srt.kernels.noted_launches import as_on_gpu, meta_addresses

    found: list[tuple[str, bool]] = []
    triton.knobs.compilation.listener = lambda *, src, cache_hit, **_: found.append((src.name, cache_hit))
    with ExitStack() as stack:
        stack.enter_context(as_on_gpu(ARCH))
        stack.enter_context(meta_addresses())
        stack.enter_context(patch.object(JITFunction, "run", partialmethod(_run, JITFunction.run)))
        if folder == "-":
            launch_two()
        else:
            from srt.model_executor.test_rehearsal import forms_of_start, planned

            stack.enter_context(patch("srt.model_executor.test_rehearsal.recording", lambda arch: stack))
            forms_of_start(*planned(Path(folder)))
    print(json.dumps(found))


def _run(kernel: object, run: object, *args: object, grid: object, warmup: bool, **options: object) -> None:
    """Compiles or finds the kernel of a launch, and does not launch it."""
    run(kernel, *args, grid=grid, warmup=True, **options)  # type: ignore[operator]


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[3]))
    main(sys.argv[1])
