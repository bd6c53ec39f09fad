"""What a step of SGLang's Triton experts asks of an SM, counted by executing them: features for the cost model.

    python lab/kernels/card/count_experts.py FILE    # its fused_moe_triton_kernels.py; a minute, no GPU

Compiles the kernel for sm_120 with the tiles that it has there (`sglang.tuning.upstream_experts`), executes one block
of full rows over two depths, and prints the difference for a step: instructions of warps, turns of shared memory, and
sectors of global memory. `fit_counted.py` has the figures and fits with them.
"""

from __future__ import annotations

import argparse
import json
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from sglang.ledger.ptx.counts import Counts
from sglang.ledger.ptx.driver import Launch, executing
from sglang.tuning.upstream_experts import COSTS

STUBS = {
    "sglang.srt.batch_invariant_ops": ("is_batch_invariant_mode_enabled",),
    "sglang.srt.layers.moe.utils": ("get_moe_padding_size",),
    "sglang.srt.layers.quantization.fp8_kernel": (),
    "sglang.srt.layers.quantization.int8_kernel": (),
    "sglang.srt.utils": (),
}
"""What the file imports besides Triton, of which the kernel needs nothing."""
STEPS = 4, 12


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    kernel = load(parser.parse_args(argv).file)
    found: list[Launch] = []
    with executing("sm_120", found.append, lambda form, blocks: True):
        for (name, kind), (tile, _) in COSTS.items():
            for steps in STEPS:
                launch(kernel, name, kind, tile, steps)
            few, many = (one.done.counts for one in found[-2:])
            assert few is not None and many is not None
            print(f"{name} {kind}: {json.dumps(per_step(few, many))}", flush=True)
    return 0


def load(file: Path) -> Any:
    """Returns the kernel of the file, with stubs for what else it imports."""

    class Anything(types.ModuleType):
        __path__: tuple[str, ...] = ()

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return lambda *_, **__: False

    before = {name: sys.modules.get(name) for name in STUBS}
    sys.modules |= {name: Anything(name) for name in STUBS}
    module = types.ModuleType("upstream_kernels")
    module.__file__ = str(file)
    try:
        import importlib.util

        spec = importlib.util.spec_from_file_location("upstream_kernels", file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["upstream_kernels"] = module
        spec.loader.exec_module(module)
    finally:
        for name, real in before.items():
            sys.modules.pop(name)
            if real is not None:
                sys.modules[name] = real
    return module.fused_moe_kernel


def launch(kernel: Any, name: str, kind: str, tile: Mapping[str, int], steps: int) -> None:
    """Executes one block of full rows, and checks its sums."""
    import triton.language as tl

    m, n, k = tile["BLOCK_M"], tile["BLOCK_N"], tile["BLOCK_K"] * steps
    top_k = 1 if kind == "down" else 2
    fp8 = name == "fp8_block"
    dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
    a = torch.ones(m // top_k, k).to(dtype)
    b, c = torch.ones(1, n, k).to(dtype), torch.zeros(m, n, dtype=torch.bfloat16)
    a_scale, b_scale = torch.ones(m // top_k, k // 128 or 1), torch.ones(1, max(n // 128, 1), k // 128 or 1)
    group = 128 if fp8 else 0
    scales = (a_scale, b_scale) if fp8 else (None, None)
    strides = (*a_scale.stride(), b_scale.stride(0), b_scale.stride(2), b_scale.stride(1)) if fp8 else (0,) * 5
    kernel[(1,)](
        a, None, b, None, None, c, *scales, torch.ones(m), torch.arange(m, dtype=torch.int32),
        torch.zeros(1, dtype=torch.int32), torch.full((1,), m, dtype=torch.int32), None,
        n, k, m, m, a.stride(0), 1, b.stride(0), 1, b.stride(1), 0, 0, c.stride(0), 1, *strides, group, group,
        BLOCK_SIZE_M=m, BLOCK_SIZE_N=n, BLOCK_SIZE_K=tile["BLOCK_K"], GROUP_SIZE_M=tile["GROUP_M"],
        MUL_ROUTED_WEIGHT=kind == "down", top_k=top_k, compute_type=tl.bfloat16, use_fp8_w8a8=fp8,
        use_int8_w8a8=False, use_int8_w8a16=False, per_channel_quant=False, even_Ks=True, c_sorted=False,
        filter_expert=False, swap_ab=False, FUSE_ADD_TO_OUTPUT=False, MASK_OUTPUT=False, FUSE_SUM_ALL_REDUCE=False,
        LORA_PRESERVE_BASE=False, ROUTER_TOPK=top_k, num_warps=tile["num_warps"], num_stages=tile["num_stages"],
    )  # fmt: skip
    assert float(c.float().sub(k).abs().max()) <= k / 100


def per_step(few: Counts, many: Counts) -> dict[str, float]:
    """Returns what a step adds."""
    steps = STEPS[1] - STEPS[0]
    classes = {name: (many.classes[name] - few.classes[name]) / steps for name in sorted(many.classes)}
    return {
        "instructions": sum(number for name, number in classes.items() if name != "move"),
        "mma": classes.get("mma", 0.0),
        "turns": (many.turns - few.turns) / steps,
        "conflicts": (many.conflicts - few.conflicts) / steps,
        "sectors": (many.sectors - few.sectors) / steps,
    }


if __name__ == "__main__":
    raise SystemExit(main())
