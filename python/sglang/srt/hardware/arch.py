"""Reads the features of the GPU. This is the only module that asks a device; everything else uses the traits it
returns."""

from __future__ import annotations

import functools
import importlib.metadata
import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sglang.srt.environ import envs
from sglang.srt.errors import UserError
from sglang.srt.hardware.products import ARCHS, FAMILY_NAMES, NEEDS_TRITON, PRODUCTS, ArchFacts, product_of_device_name

logger = logging.getLogger(__name__)

INSTRUCTIONS = frozenset({"fp8_mma", "block_scaled_mma", "mma_sync_block_scale"})
"""Features that kernels need to compile."""


class UnknownArch(UserError):
    """Raised for a name that is neither a known architecture nor a known product."""


@dataclass(frozen=True, slots=True)
class ArchTraits:
    """One GPU, or the CPU. Shared memory and memory in bytes, bandwidth in bytes/s (0 where unknown)."""

    name: str  # "sm_120" ... or "cpu"
    capability: tuple[int, int] | None
    smem_per_block: int  # most that one block may have, after the opt-in
    smem_per_sm: int
    num_sms: int
    bandwidth: float
    memory: int
    features: frozenset[str]
    product: str | None = None  # key of PRODUCTS
    gpus_per_machine: int = 0  # 0: any number
    unified_memory: bool = False  # the GPU's memory is the machine's

    @property
    def device(self) -> str:
        """The torch device type."""
        return "cuda" if self.capability else "cpu"


CPU = ArchTraits("cpu", None, 0, 0, 0, 0.0, 0, frozenset())


def _letters(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))


def arch_by_name(name: str) -> ArchTraits:
    """Returns the traits of an architecture ("sm_120", with the numbers of its reference product, in any machine), of a
    product ("rtx-5090", in its own kind of machine) or of "cpu". Capitals, spaces and dashes do not matter. Raises
    UnknownArch."""
    known = ["cpu", *ARCHS, *FAMILY_NAMES, *PRODUCTS]
    if name not in known:
        name = {_letters(each): each for each in known}.get(_letters(name), name)
    if name == "cpu":
        return CPU
    product_key = ARCHS[name].reference_product if name in ARCHS else FAMILY_NAMES.get(name, name)
    if product_key not in PRODUCTS:
        raise UnknownArch(f"unknown architecture or product {name!r}; known: {', '.join(known)}")
    product = PRODUCTS[product_key]
    facts = ARCHS[product.arch]
    return ArchTraits(
        name=product.arch,
        capability=facts.capability,
        smem_per_block=facts.smem_per_block,
        smem_per_sm=facts.smem_per_sm,
        num_sms=product.num_sms,
        bandwidth=float(product.bandwidth),
        memory=product.memory,
        features=facts.features | ({"nvlink"} if product.nvlink else set()),
        product=product_key,
        gpus_per_machine=0 if name in ARCHS else product.gpus_per_machine,
        unified_memory=product.unified_memory,
    )


def current_arch(device_index: int = 0, device: str = "auto") -> ArchTraits:
    """Returns the traits of this machine's GPU, of the GPU that SGLANG_FORCE_ARCH names, or of the CPU.

    `device` is "auto", "cuda" or "cpu". SGLANG_FORCE_ARCH (an architecture or a product) wins over "auto" and "cuda",
    so that a GPU can run with another one's kernels and tiles. Features that the installed Triton or, for a forced one,
    this GPU cannot use are left out. Raises UnknownArch for a bad name, and UserError when CUDA is asked for and there
    is none.
    """
    if device == "cpu":
        return CPU
    if envs.SGLANG_FORCE_ARCH is not None:
        return _as_compiled(_limited_to_device(arch_by_name(envs.SGLANG_FORCE_ARCH), device_index))
    if cuda_available():
        return _as_compiled(_measured_arch(device_index))
    if device == "cuda":
        raise UserError("--device cuda, but torch sees no CUDA device; check nvidia-smi, or use --device cpu")
    return CPU


def _limited_to_device(forced: ArchTraits, device_index: int) -> ArchTraits:
    """Returns a forced GPU's traits as they can run in this machine: without instructions that this GPU does not
    have."""
    if not cuda_available():
        return forced
    measured = _measured_arch(device_index)
    lacking = (forced.features - measured.features) & INSTRUCTIONS
    if lacking:
        _warn_once(f"{measured.name} runs the choices for {forced.name} without {', '.join(sorted(lacking))}")
    return replace(
        forced,
        features=forced.features - lacking,
        gpus_per_machine=measured.gpus_per_machine,
        unified_memory=measured.unified_memory,
    )


def _as_compiled(traits: ArchTraits) -> ArchTraits:
    """Returns the traits without the features for which the installed Triton has no instructions."""
    installed, needed = triton_version(), NEEDS_TRITON.get(traits.name, {})
    lacking = {feature for feature, minimum in needed.items() if installed is not None and installed < minimum}
    return replace(traits, features=traits.features - lacking)


@functools.cache
def triton_version() -> tuple[int, int] | None:
    """Returns major and minor version of the installed Triton; None if there is none."""
    try:
        major, minor = importlib.metadata.version("triton").split(".")[:2]
    except importlib.metadata.PackageNotFoundError:
        return None
    return int(major), int(minor)


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning(message)


def _measured_arch(device_index: int) -> ArchTraits:
    import torch

    props = torch.cuda.get_device_properties(device_index)
    capability = (props.major, props.minor)
    name = f"sm_{props.major}{props.minor}"
    facts = _facts_for(capability)
    product_key = product_of_device_name(props.name)
    product = PRODUCTS[product_key] if product_key else None
    return ArchTraits(
        name=name,
        capability=capability,
        smem_per_block=props.shared_memory_per_block_optin,  # type: ignore[attr-defined]
        smem_per_sm=props.shared_memory_per_multiprocessor,
        num_sms=props.multi_processor_count,
        bandwidth=float(product.bandwidth) if product else 0.0,
        memory=props.total_memory,
        features=facts.features | ({"nvlink"} if product and product.nvlink else set()),
        product=product_key,
        gpus_per_machine=product.gpus_per_machine if product else 0,
        unified_memory=product is not None and product.unified_memory,
    )


def _facts_for(capability: tuple[int, int]) -> ArchFacts:
    """Returns the facts of a compute capability. An unlisted one gets those of the newest listed one of the same major
    version that is not above it."""
    same_major = [f for f in ARCHS.values() if f.capability[0] == capability[0] and f.capability <= capability]
    if same_major:
        return max(same_major, key=lambda f: f.capability)
    return ArchFacts(capability, 0, 0, frozenset({"cp_async"}) if capability >= (8, 0) else frozenset(), "")


def cuda_available() -> bool:
    """Returns whether torch sees a CUDA device."""
    import torch

    return torch.cuda.is_available()


def device_name(device_index: int = 0) -> str:
    """Returns the driver's name of the GPU, or "cpu"."""
    if not cuda_available():
        return "cpu"
    import torch

    return torch.cuda.get_device_name(device_index)


def pci_address(device_index: int) -> str | None:
    """Returns the PCI address of a CUDA device as sysfs writes it, "0000:c1:00.0"; None: this torch does not say."""
    import torch

    properties: Any = torch.cuda.get_device_properties(device_index)
    try:
        domain, bus, device = properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id
    except AttributeError:
        return None
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


def gpus_reach_one_another(devices: Sequence[int]) -> bool:
    """Returns whether each of these CUDA devices may write into the memory of each other one."""
    import torch

    pairs = itertools.permutations(devices, 2)
    return all(torch.cuda.can_device_access_peer(first, second) for first, second in pairs)


def device_count() -> int:
    """Returns the number of CUDA devices that this process may use."""
    import torch

    return torch.cuda.device_count()


def free_memory_bytes(device_index: int | None = 0, unified: bool = False) -> int:
    """Returns the bytes that can still be allocated on the GPU, or with `device_index` None in main memory (Linux;
    cgroup limits count). `unified`: the GPU's memory is the machine's; the driver then counts the page cache as taken,
    although it would be freed."""
    if device_index is None:
        return free_main_memory()
    import torch

    free, total = torch.cuda.mem_get_info(device_index)
    return min(int(total), max(int(free), free_main_memory())) if unified else int(free)


def free_main_memory(root: Path = Path("/")) -> int:
    """Returns the free bytes of main memory; in a container what its limit leaves, where cached files count as free."""
    meminfo = _numbers(root / "proc/meminfo", ":")
    available = meminfo["MemAvailable"] * 1024
    group = root / "sys/fs/cgroup"
    limit = group / "memory.max"
    if limit.exists() and (text := limit.read_text().strip()) != "max":
        stat = _numbers(group / "memory.stat", " ")
        files = stat.get("active_file", 0) + stat.get("inactive_file", 0)
        used = int((group / "memory.current").read_text()) - files
        available = min(available, max(0, int(text) - max(0, used)))
    return available


def lockable_bytes(free: int, root: Path = Path("/")) -> int:
    """Returns how many of the `free` bytes of main memory may be page-locked for a GPU: WSL2 locks up to half of its
    memory."""
    version = root / "proc/version"
    if not version.exists() or "microsoft" not in version.read_text().lower():
        return free
    return min(free, _numbers(root / "proc/meminfo", ":")["MemTotal"] * 1024 // 2)


def _numbers(path: Path, separator: str) -> dict[str, int]:
    """Reads lines of a name, the separator and a number; returns {} for a missing file."""
    lines = path.read_text().splitlines() if path.exists() else []
    pairs = (line.split(separator, 1) for line in lines)
    return {name: int(value.split()[0]) for name, value in pairs}


def is_sm120_supported(device_index: int = 0) -> bool:
    """Returns whether the device's major capability is 12 (sm_120 and sm_121). Has upstream's name, for ported code."""
    capability = current_arch(device_index).capability
    return capability is not None and capability[0] == 12
