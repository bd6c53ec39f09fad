"""Rates of a GPU's units for the cost model: dense matrix rates by instruction, clock, L2. Data only.

Matrix rates are those of data sheets, dense with fp32 accumulation, except where marked as measured: 1,024 operations a
clock and SM in 16 bits, half of it on GeForce cards; their block-scaled forms run at the full rate.
"""

from __future__ import annotations

import functools
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
    """Rates of one product. `matrix` in operations a second, `clock` in Hz, `l2_bytes` of cache, and the bytes that an
    SM reads of it a clock.

    `mma_sync_share`: share of the matrix rates that `mma.sync` reaches; on Hopper only `wgmma` reaches them.
    """

    matrix: Mapping[str, float]
    clock: float
    l2_bytes: int
    max_threads_per_sm: int
    max_blocks_per_sm: int
    l2_bytes_per_clock: float = 20.0  # others measured 16 to 24 on large GPUs
    mma_sync_share: float = 1.0

    def slowest_rate(self, instructions: tuple[str, ...]) -> float:
        """Returns the operations a second of the slowest of a kernel's matrix instructions ("m16n8k32 e4m3", "wgmma ...
        bf16").

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
    "rtx-pro-5000-72gb": Rates(_matrix(258, 516, 1032, 516), 2.29e9, 96 * MIB, 1536, 24),
    "rtx-pro-5000": Rates(_matrix(258, 516, 1032, 516), 2.29e9, 96 * MIB, 1536, 24),
    "rtx-pro-4500": Rates(_matrix(211, 422, 843, 422), 2.51e9, 64 * MIB, 1536, 24),
    "rtx-5090": Rates(_matrix(210, 420, 2004, 840, 840), 2.4e9, 96 * MIB, 1536, 24),  # half, mxfp8 and fp4: measured
    "rtx-5080": Rates(_matrix(112.6, 225, 900, 450, 450), 2.62e9, 64 * MIB, 1536, 24),
    "rtx-5070-ti": Rates(_matrix(87.9, 175.8, 703, 351.6, 351.6), 2.45e9, 48 * MIB, 1536, 24),
    "rtx-5060-ti": Rates(_matrix(47.4, 94.9, 379.6, 189.7, 189.7), 2.57e9, 32 * MIB, 1536, 24),
    "gb10": Rates(_matrix(125, 250, 500, 250), 2.4e9, 24 * MIB, 1536, 24),  # fp4: published; the others by its ratios
    "h200": Rates(_matrix(989, 1979), 1.75e9, 50 * MIB, 2048, 32, _HOPPER_L2, mma_sync_share=0.62),
    "h100": Rates(_matrix(989, 1979), 1.75e9, 50 * MIB, 2048, 32, _HOPPER_L2, mma_sync_share=0.62),
}


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Best measured rates of a product, below those of data sheets: bytes read a second, operations a second of large
    products by operand, and seconds of the fastest all-reduce of up to 16 KiB by number of ranks."""

    read: float
    products: Mapping[str, float]
    all_reduce: Mapping[int, float]
    source: str
    measured: bool = True
    """False: what a data sheet promises, times the shares that another card reached."""

    def floor(self, num_bytes: float, operations: float = 0.0, operand: str = "half") -> float:
        """Returns the seconds below which no kernel is known to run."""
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
    source="ai-dynamo/aiconfigurator, rtx_pro_6000_server, August 2026 (lab/kernels/card/ceilings.py finds them)",
)
CEILINGS: Mapping[str, Ceilings] = {
    "rtx-pro-6000-server": _SERVER_CEILINGS,
    "rtx-pro-6000-workstation": _SERVER_CEILINGS,
    "h200": Ceilings(
        read=4.48e12,
        products={"half": 714 * TERA, "fp8": 1259 * TERA},
        all_reduce={},
        source="this project's benchmarks on one H200, benchmark/results/attention.md and experts.md",
    ),
}


READ_SHARE = 0.9
"""Of a data sheet's bandwidth, where nobody measured reading: others' streams on an RTX PRO 6000 Workstation reach 0.88
to 0.91 of 1,792 GB/s, decode attention on the Server edition 0.96 of 1,597."""
READ: Mapping[str, float] = {"gb10": 0.233e12}
"""Bytes a second that streams of others were seen to read: 231 to 234 of 273 GB/s."""
UNMEASURED = 0.3
"""Relative error, one standard deviation, of a time by a data sheet, besides the op's own. The shares of 0.76 to 0.96
that the Server edition reaches are the least of it: an RTX 5090 was measured at 1.2 times its data sheet's FP4, a GB10
reads 0.85 of its own, and clocks follow the power that a card is given."""


def ceilings_of(arch: ArchTraits) -> Ceilings:
    """Returns the ceilings of a card. For an unmeasured one with SM120's instructions: its data sheet's rates times the
    shares that an RTX PRO 6000 Server reaches. Raises UserError for other unmeasured cards."""
    if arch.product is not None and arch.product in CEILINGS:
        return CEILINGS[arch.product]
    if has_ceilings(arch):
        return _by_data_sheet(arch)
    known = ", ".join([*CEILINGS, *(name for name in RATES if name not in CEILINGS and name != "h100")])
    raise UserError(f"nobody measured what {arch.product or arch.name} reaches; known: {known} (tuning/rates.py)")


def has_ceilings(arch: ArchTraits) -> bool:
    """Returns whether `ceilings_of` knows the card, measured or by its data sheet."""
    return arch.product in CEILINGS or (arch.product in RATES and "mma_sync_block_scale" in arch.features)


@functools.cache
def _by_data_sheet(arch: ArchTraits) -> Ceilings:
    promised = RATES["rtx-pro-6000-server"].matrix
    products = {
        name: rate * _SERVER_CEILINGS.products[name] / promised[name]
        for name, rate in rates_of(arch).matrix.items()
        if name in _SERVER_CEILINGS.products
    }
    read = READ.get(arch.product or "", arch.bandwidth * READ_SHARE)
    return Ceilings(read, products, {}, "its data sheet, with the shares of an RTX PRO 6000 Server", measured=False)


def operand_of(element: str, activation: str | None) -> str:
    """Returns the key of `Ceilings.products` for weights of `element` (of quant_scheme.Scheme) and activations
    quantized to `activation`; dequantized weights are multiplied in 16 bits."""
    if activation is None:
        return "half"
    return {"nvfp4": "fp4", "mxfp8": "mxfp8"}.get(activation, "int8" if element == "int8" else "fp8")


def rates_of(arch: ArchTraits) -> Rates:
    """Returns the rates of a product. Raises UserError if it is not listed."""
    if arch.product is None or arch.product not in RATES:
        known = ", ".join(RATES)
        raise UserError(f"no rates are known for {arch.product or arch.name}; known: {known} (tuning/rates.py)")
    return RATES[arch.product]
