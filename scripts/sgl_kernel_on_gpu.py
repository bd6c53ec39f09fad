"""Builds sgl-kernel for this machine's GPU and holds it to the reference. Needs nvcc; takes about two minutes.

    python scripts/sgl_kernel_on_gpu.py [--case gpt-oss]

On sm_120 and sm_121 these are the instructions themselves, beside their emulation. Any other GPU emulates them, which
checks everything but the instructions: layouts of fragments (against a product of e4m3 that sm_89 and later have),
copies, barriers, results. Prints a row for each check and exits with 1 if one fails. Times say nothing there.

    compute-sanitizer --tool racecheck python scripts/sgl_kernel_on_gpu.py --case ragged     # also memcheck
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "test"), str(ROOT / "sgl-kernel")]

from nvcc_build import compile_library  # noqa: E402
from srt.layers.moe.moe_harness import NATIVE, expected, make_case  # noqa: E402

from sglang.srt.configs.activation import GPT_OSS_SWIGLU, SILU, Activation  # noqa: E402
from sglang.srt.kernels.tile_configs import ANY, TileConfig  # noqa: E402
from sglang.srt.layers.moe import mixed_moe  # noqa: E402
from sglang.srt.layers.moe.fused_moe_triton.tiles import MIXED  # noqa: E402

BOUND = 6e-3
"""The bound of the error's norm, as a part of the result's: what rounding to 16 bits between the steps explains."""


@dataclass(frozen=True, slots=True)
class Shape:
    name: str
    hidden: int
    intermediate: int
    tokens: int
    experts: int = 4
    top_k: int = 2
    bias: bool = False
    activation: Activation = SILU
    dtype: torch.dtype = torch.bfloat16


SHAPES = (
    Shape("gpt-oss", 2880, 2880, 256, bias=True, activation=GPT_OSS_SWIGLU),
    Shape("gpt-oss-2-ranks", 2880, 1440, 300, bias=True, activation=GPT_OSS_SWIGLU),  # scales at odd addresses
    Shape("gpt-oss-4-ranks", 2880, 768, 300, bias=True, activation=GPT_OSS_SWIGLU),
    Shape("deepseek-v4-2-ranks", 4096, 1024, 256, 8, 6),
    Shape("qwen3-30b", 2048, 768, 700, 16, 4),
    Shape("float16", 2048, 512, 200, dtype=torch.float16),
    Shape("ragged", 160, 96, 131),
    Shape("one-expert", 544, 32, 77, 1, 1),
)


def arch_of_device() -> str:
    major, minor = torch.cuda.get_device_capability()
    return "120f" if major == 12 else f"{major}{minor}{'a' if major >= 9 else ''}"


def fragments(folder: Path, arch: str) -> Iterator[tuple[str, float, float]]:
    """(what, error, bound) of the instructions alone: worst difference, as a part of the largest value."""
    library = folder / "fragments.so"
    compile_library(library, arch, [ROOT / "test" / "sgl_kernel" / "on_gpu" / "fragments.cu"])
    generator = torch.Generator(device="cuda").manual_seed(0)

    def random(*shape: int, low: int = 0, high: int = 256) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, device="cuda", dtype=torch.int32).to(torch.uint8)

    a, rows = random(32, 16), random(32, 16)
    a[a % 128 == 127] = 0  # not a number
    b, one = random(32, 8, high=16) << 2, torch.full((32, 4), 127, dtype=torch.uint8, device="cuda")
    for name, scales in (("scaled", random(2, 32, 4, low=120, high=135)), ("unscaled", torch.stack((one, one)))):
        here, emulated, plain = (torch.zeros(32, 4, device="cuda") for _ in range(3))
        nibbles, wanted = (torch.zeros(32, 4, dtype=torch.int32, device="cuda") for _ in range(2))
        tensors = (a, b, scales[0].contiguous(), scales[1].contiguous(), rows, here, emulated, plain, nibbles, wanted)
        code = ctypes.CDLL(str(library)).compare_fragments(*(ctypes.c_void_p(t.data_ptr()) for t in tensors))
        if code:
            raise SystemExit(f"compare_fragments: CUDA error {code}")
        size = float(emulated.abs().max())
        yield f"instruction, {name}", float((here - emulated).abs().max()) / size, 1e-5
        if name == "unscaled":
            # The unscaled instruction sums in fewer bits than fp32 on some GPUs.
            yield "fragments, as plain e4m3", float((plain - emulated).abs().max()) / size, 1e-3
        yield f"load of nibbles, {name}", float((nibbles != wanted).sum()), 0.0


def products(shape: Shape) -> Iterator[tuple[str, float, float]]:
    """(what, error, bound) with both sizes of blocks."""
    case = make_case(
        "mxfp4_mxfp8", shape.tokens, shape.experts, shape.top_k, shape.hidden, shape.intermediate, NATIVE, shape.bias,
        dtype=shape.dtype, device="cuda",
    )  # fmt: skip
    case.ids = case.ids.to(torch.int32)
    case.ids[0] = -1
    wanted = expected(case, shape.activation)
    for block_m in (64, 128):
        configs = (TileConfig(ANY, MIXED, (({"BLOCK_M": block_m},),)),)
        started = time.perf_counter()
        actual = mixed_moe.fused_moe(case.x, case.w13, case.w2, case.weights, case.ids, shape.activation, configs)
        error = float((actual.float() - wanted).norm() / wanted.norm())
        seconds = time.perf_counter() - started
        finite = bool(torch.isfinite(actual.float()).all()) and not bool(actual[0].any())
        yield f"{shape.name}, blocks of {block_m} ({seconds:.2f} s)", error if finite else float("nan"), BOUND


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=[shape.name for shape in SHAPES], help="one shape only")
    only, arch = parser.parse_args().case, arch_of_device()
    torch.backends.cuda.matmul.allow_tf32 = False
    print(f"{torch.cuda.get_device_name()}, sm_{arch}; {'native' if arch == '120f' else 'emulated'}")
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "kernels.so"
        compile_library(library, arch)
        spec = importlib.util.spec_from_file_location(
            "sgl_kernel_library", ROOT / "sgl-kernel" / "sm120_sgl_kernel" / "library.py"
        )
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        loaded = module.Library(library)
        mixed_moe._library = lambda: loaded
        checks = [() if only else fragments(Path(folder), arch)]
        checks += [products(shape) for shape in SHAPES if only in (None, shape.name)]
        for check in checks:
            for what, error, bound in check:
                good = error <= bound
                failed += not good
                print(f"{'ok' if good else 'FAILED':<7}{what:<52}{error:.2e}  at most {bound:.0e}", flush=True)
    print(f"{failed} failed" if failed else "all hold")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
