"""How fast a GPU's units are, for the cost model: dense matrix rates by instruction, clock, L2. Data only.

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
    """Of one product. `matrix` in operations a second, `clock` in Hz, `l2_bytes` of cache and what an SM reads of it.

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
    """In units of 10**12 a second."""
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


def rates_of(arch: ArchTraits) -> Rates:
    """Raises UserError for a product that is not listed."""
    if arch.product is None or arch.product not in RATES:
        known = ", ".join(RATES)
        raise UserError(f"no rates are known for {arch.product or arch.name}; known: {known} (tuning/rates.py)")
    return RATES[arch.product]
