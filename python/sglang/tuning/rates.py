"""Rates of a GPU's units, for the cost model: dense matrix rates by instruction, clock, L2. Data only.

Matrix rates are those of data sheets with fp32 accumulation, but for the ones marked as measured. GeForce parts run
plain products with fp32 accumulation at half the rate of the block-scaled forms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from sglang.srt.errors import UserError
from sglang.srt.hardware.arch import ArchTraits

TERA = 1e12
MIB = 1024**2

_OPERANDS: Mapping[str, str] = {
    "bf16": "half",
    "f16": "half",
    "tf32": "tf32",
    "e4m3": "fp8",
    "e5m2": "fp8",
    "s8": "int8",
    "u8": "int8",
    "mxf8f6f4": "mxfp8",
    "mxf4": "fp4",
    "mxf4nvf4": "fp4",
}
"""Type or kind of a matrix instruction, as the ledger writes it -> the rate that it runs at."""


@dataclass(frozen=True, slots=True)
class Rates:
    """The rates of one product. `matrix` in operations a second, `clock` in Hz, `l2_bytes` of cache and what an SM
    reads of it.

    `mma_sync_share`: what `mma.sync` reaches of those rates; on Hopper only `wgmma` reaches them.
    """

    matrix: Mapping[str, float]
    clock: float
    l2_bytes: int
    max_threads_per_sm: int
    max_blocks_per_sm: int
    l2_bytes_per_clock: float = 20.0  # others measured 16 to 24 on large GPUs
    mma_sync_share: float = 1.0

    def of_instructions(self, instructions: tuple[str, ...]) -> float:
        """Operations a second of the slowest of a kernel's matrix instructions ("m16n8k32 e4m3", "wgmma ... bf16").

        Raises UserError for one that the product has no rate for.
        """
        return min(self._of(instruction) for instruction in instructions)

    def _of(self, instruction: str) -> float:
        words = instruction.split()
        kind = next((_OPERANDS[word] for word in words if word in _OPERANDS), None)
        if kind is None or kind not in self.matrix:
            raise UserError(f"no rate is known for the matrix instruction {instruction!r}; add it to tuning/rates.py")
        return self.matrix[kind] * (1.0 if words[0] == "wgmma" else self.mma_sync_share)


def _matrix(half: float, fp8: float, fp4: float = 0.0, mxfp8: float = 0.0, int8: float = 0.0) -> dict[str, float]:
    """Returns operations per second by type, from rates in units of 10**12 a second."""
    rates = {"half": half, "tf32": half / 2, "fp8": fp8, "int8": int8 or fp8, "mxfp8": mxfp8, "fp4": fp4}
    return {name: rate * TERA for name, rate in rates.items() if rate}


_HOPPER_L2 = 5120 / 132
"""An A100's 5,120 bytes a clock; no newer figure is published. The fit on an H200 comes to all of that."""
_PRO_6000 = Rates(_matrix(504, 1008, 2015, 1008), 2.4e9, 128 * MIB, 1536, 24)
RATES: Mapping[str, Rates] = {
    "rtx-pro-6000-server": _PRO_6000,
    "rtx-pro-6000-workstation": _PRO_6000,
    "rtx-pro-6000-max-q": replace(_PRO_6000, matrix=_matrix(439, 878, 1755, 878), clock=2.1e9),
    "rtx-5090": Rates(_matrix(210, 420, 2004, 840, 840), 2.4e9, 96 * MIB, 1536, 24),  # half, mxfp8 and fp4: measured
    "gb10": Rates(_matrix(125, 250, 500, 250), 2.4e9, 24 * MIB, 1536, 24),  # fp4: published; the others by its ratios
    "h200": Rates(_matrix(989, 1979), 1.75e9, 50 * MIB, 2048, 32, _HOPPER_L2, mma_sync_share=0.62),
    "h100": Rates(_matrix(989, 1979), 1.75e9, 50 * MIB, 2048, 32, _HOPPER_L2, mma_sync_share=0.62),
}


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The best that anyone measured on a product, which data sheets promise more of: bytes read a second, operations a
    second of large products by operand, and seconds of the fastest all-reduce of up to 16 KiB by ranks."""

    read: float
    products: Mapping[str, float]
    all_reduce: Mapping[int, float]
    source: str

    def floor(self, num_bytes: float, operations: float = 0.0, operand: str = "half") -> float:
        """Seconds that no kernel is known to undercut."""
        rate = self.products.get(operand, self.products["half"])
        return max(num_bytes / self.read, operations / rate)


_SERVER_CEILINGS = Ceilings(
    read=1.536e12,  # decode attention over caches beyond the L2; FP8 products with one row read 1.530
    products={
        "half": 458.8 * TERA,  # torch, 32768 x 65536 x 51200
        "fp8": 864.1 * TERA,  # vLLM's CUTLASS, a scale a channel, 1024 x 65536 x 16384; blocks of 128 reach 632
        "mxfp8": 864.1 * TERA,  # not measured: as fp8
        "int8": 864.1 * TERA,  # likewise
        "fp4": 1536.9 * TERA,  # NVFP4, TensorRT-LLM, 4096 x 65536 x 16384
    },
    all_reduce={2: 4.14e-6, 4: 12.5e-6, 8: 23.6e-6},  # vLLM's, TensorRT-LLM's and vLLM's kernels, 256 and 512 bytes
    source="ai-dynamo/aiconfigurator, rtx_pro_6000_server, August 2026 (benchmark/kernels/card/ceilings.py finds them)",
)
CEILINGS: Mapping[str, Ceilings] = {
    "rtx-pro-6000-server": _SERVER_CEILINGS,
    "rtx-pro-6000-workstation": _SERVER_CEILINGS,
    "h200": Ceilings(
        read=4.48e12,
        products={"half": 714 * TERA, "fp8": 1259 * TERA},
        all_reduce={},
        source="this project's benchmarks on one H200, benchmark/results/2026-11-21-attention-h200.md and -h200-moe.md",
    ),
}


def ceilings_of(arch: ArchTraits) -> Ceilings:
    """Raises UserError for a product on which nobody measured them."""
    if arch.product is None or arch.product not in CEILINGS:
        known = ", ".join(CEILINGS)
        raise UserError(f"nobody measured what {arch.product or arch.name} reaches; known: {known} (tuning/rates.py)")
    return CEILINGS[arch.product]


def operand_of(element: str, activation: str | None) -> str:
    """The operand of `Ceilings.products` for weights of `element` (of quant_scheme.Scheme) and activations that are
    quantized so; widened weights are multiplied in 16 bits."""
    if activation is None:
        return "half"
    return {"nvfp4": "fp4", "mxfp8": "mxfp8"}.get(activation, "int8" if element == "int8" else "fp8")


def rates_of(arch: ArchTraits) -> Rates:
    """Raises UserError for a product that is not listed."""
    if arch.product is None or arch.product not in RATES:
        known = ", ".join(RATES)
        raise UserError(f"no rates are known for {arch.product or arch.name}; known: {known} (tuning/rates.py)")
    return RATES[arch.product]
