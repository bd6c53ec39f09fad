"""Published facts of GPUs: what an architecture can do, and what each product of it measures.

Numbers: NVIDIA's CUDA programming guide (shared memory), product data sheets (SM count, bandwidth), and what
nvidia-smi shows of the cards (memory).
"""

from __future__ import annotations

from dataclasses import dataclass

KIB = 1024
MIB = 1024**2
GB = 10**9
GIB = 1024**3

FEATURES = frozenset(
    {"cp_async", "tma", "wgmma", "tcgen05", "fp8_mma", "block_scaled_mma", "mma_sync_block_scale", "pdl", "nvlink"}
)
"""All features that a kernel may require. There is no feature "Blackwell": sm_100 has tcgen05, sm_120 does not. Both
multiply with block scales, sm_120 with `mma.sync` (mma_sync_block_scale)."""

_AMPERE = frozenset({"cp_async"})
_ADA = _AMPERE | {"fp8_mma"}
_HOPPER = _ADA | {"tma", "wgmma", "pdl"}
_DATACENTER_BLACKWELL = _ADA | {"tma", "tcgen05", "block_scaled_mma", "pdl"}
_SM12X = _ADA | {"tma", "block_scaled_mma", "mma_sync_block_scale", "pdl"}


@dataclass(frozen=True, slots=True)
class ArchFacts:
    """Facts that hold for every product of one compute capability. Shared memory in bytes, after the opt-in."""

    capability: tuple[int, int]
    smem_per_block: int
    smem_per_sm: int
    features: frozenset[str]
    reference_product: str


@dataclass(frozen=True, slots=True)
class GpuProduct:
    """A card. `name_parts` are lower-case fragments of the driver's device name, all of which must occur in it."""

    arch: str
    num_sms: int
    bandwidth: float  # bytes/s
    memory: int  # bytes, as the driver reports them: error correction and firmware take some of the data sheet's
    name_parts: tuple[str, ...]
    nvlink: bool = False
    gpus_per_machine: int = 0  # 0: any number
    unified_memory: bool = False  # the machine's main memory


ARCHS: dict[str, ArchFacts] = {
    "sm_80": ArchFacts((8, 0), 163 * KIB, 164 * KIB, _AMPERE, "a100-80gb"),
    "sm_86": ArchFacts((8, 6), 99 * KIB, 100 * KIB, _AMPERE, "rtx-3090"),
    "sm_89": ArchFacts((8, 9), 99 * KIB, 100 * KIB, _ADA, "l40s"),
    "sm_90": ArchFacts((9, 0), 227 * KIB, 228 * KIB, _HOPPER, "h200"),
    "sm_100": ArchFacts((10, 0), 227 * KIB, 228 * KIB, _DATACENTER_BLACKWELL, "b200"),
    "sm_103": ArchFacts((10, 3), 227 * KIB, 228 * KIB, _DATACENTER_BLACKWELL, "b300"),
    "sm_120": ArchFacts((12, 0), 99 * KIB, 100 * KIB, _SM12X, "rtx-pro-6000-server"),
    "sm_121": ArchFacts((12, 1), 99 * KIB, 100 * KIB, _SM12X, "gb10"),
}

NEEDS_TRITON: dict[str, dict[str, tuple[int, int]]] = {"sm_121": {"block_scaled_mma": (3, 8)}}
"""Architecture -> feature -> the first Triton that has instructions for it. With older ones products of packed FP4
operands do not compile."""

# Searched in this order, so that the more specific name comes first.
PRODUCTS: dict[str, GpuProduct] = {
    "rtx-pro-6000-max-q": GpuProduct("sm_120", 188, 1792 * GB, 97_887 * MIB, ("rtx pro 6000", "max-q")),
    "rtx-pro-6000-server": GpuProduct("sm_120", 188, 1597 * GB, 97_887 * MIB, ("rtx pro 6000", "server")),
    "rtx-pro-6000-workstation": GpuProduct("sm_120", 188, 1792 * GB, 97_887 * MIB, ("rtx pro 6000",)),
    "rtx-5090": GpuProduct("sm_120", 170, 1792 * GB, 32_607 * MIB, ("rtx 5090",)),
    "rtx-pro-5000-72gb": GpuProduct("sm_120", 110, 1344 * GB, 73_415 * MIB, ("rtx pro 5000", "72gb")),
    "rtx-pro-5000": GpuProduct("sm_120", 110, 1344 * GB, 48_935 * MIB, ("rtx pro 5000",)),
    "rtx-pro-4500": GpuProduct("sm_120", 82, 896 * GB, 32_623 * MIB, ("rtx pro 4500",)),
    "rtx-5080": GpuProduct("sm_120", 84, 960 * GB, 16_303 * MIB, ("rtx 5080",)),
    "rtx-5070-ti": GpuProduct("sm_120", 70, 896 * GB, 16_303 * MIB, ("rtx 5070 ti",)),
    "rtx-5060-ti": GpuProduct("sm_120", 36, 448 * GB, 16_311 * MIB, ("rtx 5060 ti",)),
    "gb10": GpuProduct("sm_121", 48, 273 * GB, 121 * GIB, ("gb10",), gpus_per_machine=1, unified_memory=True),
    "h200": GpuProduct("sm_90", 132, 4800 * GB, 143_771 * MIB, ("h200",), nvlink=True),
    "h100": GpuProduct("sm_90", 132, 3350 * GB, 81_559 * MIB, ("h100",), nvlink=True),
    "b200": GpuProduct("sm_100", 148, 8000 * GB, 183_359 * MIB, ("b200",), nvlink=True),
    "b300": GpuProduct("sm_103", 148, 8000 * GB, 268 * GIB, ("b300",), nvlink=True),
    "a100-80gb": GpuProduct("sm_80", 108, 2039 * GB, 80 * GIB, ("a100",), nvlink=True),
    "rtx-3090": GpuProduct("sm_86", 82, 936 * GB, 24 * GIB, ("rtx 3090",)),
    "l40s": GpuProduct("sm_89", 142, 864 * GB, 46_068 * MIB, ("l40s",)),
}

FAMILY_NAMES: dict[str, str] = {"rtx-pro-6000": "rtx-pro-6000-server", "dgx-spark": "gb10"}
"""Usual name of a card without its edition -> product; of several editions the one with the least bandwidth."""


def product_of_device_name(device_name: str) -> str | None:
    """Returns the key of PRODUCTS for a driver's device name such as "NVIDIA GeForce RTX 5090"; None for an unknown
    card."""
    lowered = device_name.lower()
    if "laptop" in lowered:
        return None  # the same name on another chip
    for key, product in PRODUCTS.items():
        if all(part in lowered for part in product.name_parts):
            return key
    return None
