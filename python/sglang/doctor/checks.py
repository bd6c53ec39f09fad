"""Checks of a machine: each takes a `Machine` and says what it found, why it matters, and what to do.

Facts that could not be read (None) give no finding. An error keeps a server from starting, or makes it hang or give
wrong results; a warning makes it slow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

from sglang.doctor.facts import MIB, Gpu, Machine
from sglang.srt.environ import IGNORED
from sglang.srt.hardware.products import ARCHS, NEEDS_TRITON, product_of_device_name

GIB = 1024**3
ERROR, WARNING = "error", "warning"

MIN_DRIVER: Mapping[str, int] = {"sm_120": 570, "sm_121": 580, "sm_100": 570, "sm_103": 575}
"""The first driver branch that serves an architecture (NVIDIA's CUDA release notes)."""
MIN_SHM = GIB
MIN_LOCKED = 64 * MIB
MIN_DISK = 20 * GIB
SLOW_COPY = 5e9
"""Bytes a second; PCIe 4 x8 moves 14e9, PCIe 5 x16 about 50e9."""
LANE_RATE = 55e9 / 16
"""Bytes a second of a lane of PCIe 5 that copies reach."""
BUS_SHARE = 0.7
"""The share of a link's rate below which something is in the way."""
BUSY_MEMORY = 0.03
CLOCK_SHARE = 0.9
"""The share of the card's clock below which a limit is taken for one that someone forgot."""

HARMFUL: Mapping[str, tuple[str, str]] = {
    "CUDA_LAUNCH_BLOCKING": ("1", "every kernel is waited for, so nothing overlaps"),
    "NCCL_P2P_DISABLE": ("1", "GPUs then exchange data through main memory, at a fraction of the rate"),
    "NCCL_SHM_DISABLE": ("1", "ranks then exchange data through sockets"),
    "PYTORCH_CUDA_ALLOC_CONF": ("expandable_segments:True", "memory of such segments cannot be shared between ranks"),
    "PYTORCH_ALLOC_CONF": ("expandable_segments:True", "memory of such segments cannot be shared between ranks"),
}
"""Variable -> a value, and what it does."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem of the machine, with its reason and remedy."""

    check: str
    severity: str
    what: str
    why: str
    remedy: str


Check = Callable[[Machine], Iterator[tuple[str, str, str, str]]]
"""Yields severity, what, why, remedy."""


def driver_serves_cards(machine: Machine) -> Iterator[tuple[str, str, str, str]]:
    """Yields an error if nvidia-smi fails, or GPUs on the bus have no driver."""
    if machine.smi_problem:
        what = f"nvidia-smi fails: {machine.smi_problem.splitlines()[0]}"
        remedy = "reboot after a driver update; otherwise reinstall the driver, or give the container the GPUs"
        yield ERROR, what, "nothing can use the GPUs", remedy
    elif machine.pci_gpus and not machine.gpus:
        what = f"{len(machine.pci_gpus)} NVIDIA GPUs on the PCI bus, but none that a driver serves"
        remedy = "install the driver (open kernel modules for Blackwell), or start the container with --gpus all"
        yield ERROR, what, "nothing can use the GPUs", remedy


def driver_is_new_enough(machine: Machine) -> Iterator[tuple[str, str, str, str]]:
    """Yields an error for each architecture that the driver is too old for."""
    if machine.driver is None:
        return
    branch = int(machine.driver.split(".")[0])
    for arch in sorted({gpu.arch for gpu in machine.gpus if gpu.arch}):
        minimum = MIN_DRIVER.get(arch, 0)
        if branch < minimum:
            what = f"driver {machine.driver} with an {arch} GPU"
            yield ERROR, what, f"{arch} needs driver {minimum} or newer", f"install driver {minimum} or newer"


def driver_runs_torchs_cuda(machine: Machine) -> Iterator[tuple[str, str, str, str]]:
    """Yields an error if torch is built for a newer CUDA than the driver runs."""
    torch, newest = machine.torch, machine.driver_cuda
    if torch is None or torch.cuda is None or newest is None:
        return
    if int(torch.cuda.split(".")[0]) > newest[0]:
        what = f"torch {torch.version} is built for CUDA {torch.cuda}, the driver runs CUDA {newest[0]}.{newest[1]}"
        yield ERROR, what, "torch sees no GPU", "install a newer driver, or torch for the driver's CUDA"


def torch_sees_gpus(machine: Machine) -> Iterator[tuple[str, str, str, str]]:
    """Yields errors if torch cannot be imported, has no CUDA, or sees other GPUs than nvidia-smi."""
    torch = machine.torch
    if torch is None:
        if machine.torch_problem:
            why = "the server does not start"
            yield ERROR, f"torch cannot be imported: {machine.torch_problem}", why, "reinstall torch"
        return
    if not machine.gpus:
        return
    if torch.cuda is None:
        what = f"torch {torch.version} is a build without CUDA"
        yield ERROR, what, "the server would run on the CPU", "pip install --force-reinstall torch, from the CUDA index"
    elif torch.devices < len(machine.gpus) and "CUDA_VISIBLE_DEVICES" not in machine.environ:
        reason = f": {torch.problem}" if torch.problem else ""
        what = f"torch sees {torch.devices} of {len(machine.gpus)} GPUs{reason}"
        yield (
            ERROR,
            what,
            "the server cannot use the others",
            "compare nvidia-smi -L; restart after Xid errors in dmesg",
        )


def torch_has_kernels(machine: Machine) -> Iterator[tuple[str, str, str, str]]:
    """Yields an error for each architecture without kernels in torch."""
    torch = machine.torch
    if torch is None or not torch.archs:
        return
    newest = {arch.removeprefix("sm_").removeprefix("compute_").rstrip("af") for arch in torch.archs}
    for arch in sorted({gpu.arch for gpu in machine.gpus if gpu.arch}):
        number = arch.removeprefix("sm_")
        # Kernels of a lower minor version of the same major one run.
        if not any(built[:-1] == number[:-1] and int(built[-1]) <= int(number[-1]) for built in newest):
            what = f"torch {torch.version} has no kernels for {arch} (it has {', '.join(torch.archs)})"
            yield ERROR, what, "no kernel image is available for execution", "install torch 2.9 or newer for CUDA 12.8+"


def ptxas_knows_cards(machine: Machine) -> Iterator[tuple[str, str, str, str]]:
    """Yields an error for each architecture that Triton's assembler does not know."""
    if machine.ptxas is None or machine.ptxas_archs is None:
        return
    for arch in sorted({gpu.arch for gpu in machine.gpus if gpu.arch}):
        if not machine.ptxas_archs & {arch, f"{arch}a"}:
            what = f"{machine.ptxas} does not know {arch}"
            remedy = "upgrade triton, or set TRITON_PTXAS_BLACKWELL_PATH to the ptxas of a newer CUDA (13 for sm_121)"
            yield ERROR, what, f"Triton's kernels do not assemble (ptxas fatal: {arch}a not defined)", remedy


def triton_knows_cards(machine: Machine) -> Iterator[tuple[str, str, str, str]]:
    """Yields a warning for each feature of a card that needs a newer Triton."""
    if machine.triton is None:
        return
    major, minor = (int(part) for part in machine.triton.split(".")[:2])
    for arch in sorted({gpu.arch for gpu in machine.gpus if gpu.arch}):
        for feature, minimum in NEEDS_TRITON.get(arch, {}).items():
            if (major, minor) < minimum:
                what = f"Triton {machine.triton} has no {feature} for {arch}"
                remedy = f"pip install 'triton>={minimum[0]}.{minimum[1]}'"
                yield WARNING, what, "FP4 weights are widened to 16 bits, at half the speed or less", remedy


def link_is_whole(machine: Machine) -> Iterator[tuple[str, str, str, str]]:
    """Yields warnings for PCIe links that are narrower or slower than their card."""
    for gpu in machine.gpus:
        name = f"GPU {gpu.index} ({gpu.bus_id})"
        if gpu.link_width and gpu.card_width and gpu.link_width < gpu.card_width:
            what = f"{name} runs x{gpu.link_width:.0f} of its x{gpu.card_width:.0f} lanes"
            remedy = "another slot, seat the card or riser anew, or the slot's bifurcation in the firmware"
            yield WARNING, what, "all-reduces and loading take that much longer", remedy
        if gpu.link_generation and gpu.card_generation and gpu.link_generation < gpu.card_generation:
            what = f"{name} runs PCIe {gpu.link_generation:.0f}, the card can do {gpu.card_generation:.0f}"
            remedy = "the slot's link speed in the firmware; a riser or switch that is made for the generation"
            yield WARNING, what, "each generation less halves what all-reduces and loading move", remedy


def copies_arrive(machine: Machine) -> Iterator[tuple[str, str, str, str]]:
    """Yields errors if copies between GPUs hang, fail or change data."""
    boot = "boot with iommu=pt or the IOMMU off, and switch ACS off (see the findings on them)"
    if machine.copy_problem:
        yield ERROR, machine.copy_problem, "NCCL would hang in the same way", f"{boot}; NCCL_P2P_DISABLE=1 until then"
    wrong = [f"{copy.source}->{copy.target}" for copy in machine.copies if copy.equal is False]
    if wrong:
        what = f"data arrives changed between GPUs {', '.join(wrong)}"
        yield ERROR, what, "all-reduces add up garbage, silently", f"{boot}; NCCL_P2P_DISABLE=1 until then"
    failed = [copy for copy in machine.copies if copy.problem]
    if failed:
        what = f"a copy from GPU {failed[0].source} to GPU {failed[0].target} fails: {failed[0].problem}"
        yield ERROR, what, "tensor parallelism cannot work", "look for Xid errors in dmesg"


def peers_have_access(machine: Machine) -> Iterator[tuple[str, str, str, str]]:
    """Yields warnings for pairs of GPUs without peer access, or with slow copies."""
    without = [f"{copy.source}->{copy.target}" for copy in machine.copies if not copy.access]
    if without:
        what = f"no peer access between GPUs {', '.join(without)}"
        why = "their all-reduces go through main memory; custom all-reduce kernels cannot be used"
        yield WARNING, what, why, "a driver with peer access for these cards; all cards on one machine's root complexes"
    slow = [copy for copy in machine.copies if copy.access and copy.rate is not None and copy.rate < SLOW_COPY]
    if slow:
        worst = min(slow, key=lambda copy: copy.rate or 0.0)
        what = f"GPU {worst.source} to GPU {worst.target} moves {(worst.rate or 0) / 1e9:.1f} GB/s"
        yield WARNING, what, "all-reduces wait for the slowest pair", "compare lanes and ACS; nvidia-smi topo -m"


def main_memory_feeds_cards(machine: Machine) -> Iterator[tuple[str, str, str, str]]:
    """Yields warnings for copies out of main memory that fail, or are slower than the bus or than all cards together
    need."""
    why = "experts in main memory, and prefixes that are loaded from there, come as slowly"
    for copy in machine.host_copies:
        gpu = next((gpu for gpu in machine.gpus if gpu.index == copy.gpu), None)
        if copy.problem:
            yield (
                WARNING,
                f"page-locked memory cannot be copied to GPU {copy.gpu}: {copy.problem}",
                "experts and prefixes cannot lie in main memory",
                "ulimit -l unlimited; docker run --ulimit memlock=-1; free memory",
            )
        elif copy.rate and gpu and gpu.link_generation and gpu.link_width:
            best = LANE_RATE * 2 ** (gpu.link_generation - 5) * gpu.link_width
            if copy.rate < BUS_SHARE * best:
                what = f"main memory to GPU {copy.gpu} moves {copy.rate / 1e9:.1f} GB/s, its link {best / 1e9:.0f}"
                yield WARNING, what, why, "a slot at the CPU whose memory is used; all channels of memory filled"
    together = sum(copy.rate or 0.0 for copy in machine.host_copies)
    if machine.memory_rate is not None and len(machine.host_copies) > 1 and machine.memory_rate < together:
        what = f"main memory moves {machine.memory_rate / 1e9:.0f} GB/s, the links of all GPUs {together / 1e9:.0f}"
        yield WARNING, what, f"{why} to several cards at once", "fill all channels of memory; one module a channel"


def memory_may_be_locked(machine: Machine) -> Iterator[tuple[str, str, str, str]]:
    """Yields warnings for machines that lock much less of main memory than there is."""
    memory = machine.memory
    if memory is None or not machine.gpus:
        return
    why = "experts in main memory, and prefixes, have room for that much alone"
    if memory.windows:
        what = f"WSL2 locks half of its {memory.total / GIB:.0f} GiB"
        yield WARNING, what, why, "raise memory= in .wslconfig, or start the server on Linux"
    if memory.limit is not None and memory.limit < memory.total / 2:
        what = f"the container's limit is {memory.limit / GIB:.0f} GiB of the machine's {memory.total / GIB:.0f}"
        yield WARNING, what, why, "a higher limit of the container (docker run --memory)"


def iommu_is_out_of_the_way(machine: Machine) -> Iterator[tuple[str, str, str, str]]:
    """Yields a warning if the IOMMU translates the traffic between GPUs."""
    translated = [gpu for gpu in machine.gpus if (gpu.iommu_type or "").startswith("DMA")]
    if translated and len(machine.gpus) > 1:
        what = f"the IOMMU translates what {_indices(translated)} send ({translated[0].iommu_type})"
        why = "copies between GPUs go through the root complex; NCCL hangs on some machines"
        yield WARNING, what, why, "boot with iommu=pt, or switch the IOMMU off in the firmware"


def acs_is_off(machine: Machine) -> Iterator[tuple[str, str, str, str]]:
    """Yields a warning if ACS redirects the traffic between GPUs."""
    bridges = sorted({bridge for gpu in machine.gpus for bridge in gpu.redirecting_bridges or ()})
    if bridges and len(machine.gpus) > 1:
        what = f"ACS redirects peer traffic at the PCI bridges {', '.join(bridges)}"
        why = "copies between GPUs take the way over the CPU, or hang"
        commands = "; ".join(f"setpci -s {bridge} ECAP_ACS+6.w=0000" for bridge in bridges[:2])
        yield WARNING, what, why, f"switch ACS off in the firmware, or after every boot as root: {commands}"


def numa_is_known(machine: Machine) -> Iterator[tuple[str, str, str, str]]:
    """Yields a warning if the NUMA node of a GPU is not known."""
    if len(machine.numa_nodes) < 2:
        return
    unplaced = [gpu for gpu in machine.gpus if gpu.numa_node == -1]
    if unplaced:
        what = f"the firmware does not say on which NUMA node {_indices(unplaced)} lie"
        yield (
            WARNING,
            what,
            "ranks may run far from their GPU",
            "update the firmware, or set NUMA nodes per socket to 1",
        )
    allowed = machine.allowed_nodes
    far = [gpu for gpu in machine.gpus if allowed and (gpu.numa_node or 0) >= 0 and gpu.numa_node not in allowed]
    far = [gpu for gpu in far if gpu.numa_node is not None]
    if far:
        nodes = ", ".join(str(node) for node in allowed or ())
        what = f"{_indices(far)} lie on another NUMA node than the CPUs of this process (node {nodes})"
        why = "launches and pinned copies cross the socket link"
        yield WARNING, what, why, "do not pin the server to one node (numactl, cpuset of the container)"


def power_is_whole(machine: Machine) -> Iterator[tuple[str, str, str, str]]:
    """Yields a warning for each GPU with a power limit below its default."""
    for gpu in machine.gpus:
        if gpu.power_limit and gpu.power_default and gpu.power_limit < 0.95 * gpu.power_default:
            what = f"GPU {gpu.index} is limited to {gpu.power_limit:.0f} W of its {gpu.power_default:.0f} W"
            remedy = f"nvidia-smi -i {gpu.index} -pl {gpu.power_default:.0f}, unless you want it so"
            yield WARNING, what, "prompts are computed slower; the slowest card holds up the others", remedy


def clocks_are_free(machine: Machine) -> Iterator[tuple[str, str, str, str]]:
    """Yields warnings for GPUs that are throttled or whose clock is limited."""
    for gpu in machine.gpus:
        if gpu.slowed_by:
            what = f"GPU {gpu.index} slows down: {', '.join(gpu.slowed_by)}"
            yield WARNING, what, "the slowest card holds up the others", "check cooling and the power cables"
        if gpu.clock_limit and gpu.clock_max and gpu.clock_limit < CLOCK_SHARE * gpu.clock_max:
            what = f"GPU {gpu.index} is set to {gpu.clock_limit:.0f} MHz of {gpu.clock_max:.0f} MHz"
            remedy = f"nvidia-smi -i {gpu.index} -rgc -rac"
            yield WARNING, what, "everything that computes is slower by as much", remedy


def cards_are_alike(machine: Machine) -> Iterator[tuple[str, str, str, str]]:
    """Yields a warning if GPUs differ in kind or in error correction."""
    names = sorted({gpu.name for gpu in machine.gpus})
    if len(names) > 1:
        what = f"GPUs of several kinds: {', '.join(names)}"
        why = "a layout over them is as fast, and has as much memory, as the least of them"
        yield WARNING, what, why, "serve each kind with a server of its own: CUDA_VISIBLE_DEVICES"
        return
    # Error correction takes memory: cards of one name that differ in it differ in what fits.
    ecc = {gpu.ecc for gpu in machine.gpus if gpu.ecc is not None}
    if len(ecc) > 1:
        off = [gpu for gpu in machine.gpus if gpu.ecc == "Disabled"]
        what = f"error correction is off on {_indices(off)} only"
        yield WARNING, what, "the cards have different memory and speed", "nvidia-smi -e 1 (or 0) on all; then reboot"


def cards_are_known(machine: Machine) -> Iterator[tuple[str, str, str, str]]:
    """Yields warnings for cards for which no kernels or tiles were verified."""
    for name, group in groupby(sorted(machine.gpus, key=lambda gpu: gpu.name), key=lambda gpu: gpu.name):
        arch = next(group).arch
        if arch is not None and arch not in ARCHS:
            yield WARNING, f"{name} is an {arch}", "no kernel was verified for it", "sglang plan lists what is known"
        elif product_of_device_name(name) is None and arch is not None:
            why = "tiles of its architecture are used, and no tuned file is found"
            yield WARNING, f"{name} is not a card that is known here", why, "tune its expert kernels; see the docs"


def memory_is_sound(machine: Machine) -> Iterator[tuple[str, str, str, str]]:
    """Yields an error for each GPU with uncorrected memory errors."""
    for gpu in machine.gpus:
        if gpu.ecc_errors:
            what = f"GPU {gpu.index} has {gpu.ecc_errors:.0f} memory errors that were not corrected"
            remedy = f"nvidia-smi -i {gpu.index} --gpu-reset, or reboot; replace the card if they come back"
            yield ERROR, what, "processes die with Xid errors, results may be wrong", remedy


def memory_is_free(machine: Machine) -> Iterator[tuple[str, str, str, str]]:
    """Yields a warning for each GPU whose memory others use."""
    for gpu in machine.gpus:
        if gpu.memory and gpu.memory_used and gpu.memory_used > BUSY_MEMORY * gpu.memory:
            what = f"GPU {gpu.index} has {gpu.memory_used / 1024:.1f} GiB in use"
            yield WARNING, what, "the KV cache gets that much less", "nvidia-smi shows whose processes they are"


def cards_are_whole(machine: Machine) -> Iterator[tuple[str, str, str, str]]:
    """Yields a warning if MIG divides a card."""
    divided = [gpu for gpu in machine.gpus if gpu.mig == "Enabled"]
    if divided:
        what = f"MIG is on for {_indices(divided)}"
        yield WARNING, what, "slices cannot share a layer over peer access", "nvidia-smi -mig 0"


def shared_memory_is_enough(machine: Machine) -> Iterator[tuple[str, str, str, str]]:
    """Yields a finding if /dev/shm is too small; an error if there are several GPUs."""
    if machine.shm is not None and machine.shm < MIN_SHM:
        severity = ERROR if len(machine.gpus) > 1 else WARNING
        what = f"/dev/shm has {machine.shm // MIB} MiB"
        why = "NCCL's ranks exchange data through it: 'unhandled system error' or bus errors"
        yield severity, what, why, "docker run --shm-size 16g (or --ipc host); in compose shm_size"


def locked_memory_is_enough(machine: Machine) -> Iterator[tuple[str, str, str, str]]:
    """Yields a warning if too little memory may be locked."""
    limit = machine.locked_memory
    if machine.gpus and limit is not None and 0 <= limit < MIN_LOCKED:
        what = f"at most {limit // 1024:,} KiB of memory may be locked"
        why = "pinned buffers of NCCL and of copies to the GPU may be refused"
        yield WARNING, what, why, "ulimit -l unlimited; docker run --ulimit memlock=-1"


def disk_is_free(machine: Machine) -> Iterator[tuple[str, str, str, str]]:
    """Yields a warning for each directory with little free disk space."""
    for path, size in machine.disk_free:
        if size < MIN_DISK:
            what = f"{path} has {size / GIB:.1f} GiB free"
            yield WARNING, what, "checkpoints and compiled kernels are stored there", "HF_HOME and SGLANG_CACHE_DIR"


def variables_are_harmless(machine: Machine) -> Iterator[tuple[str, str, str, str]]:
    """Yields warnings for environment variables that harm or have no effect here."""
    for name, (value, why) in HARMFUL.items():
        if value in machine.environ.get(name, ""):
            yield WARNING, f"{name}={machine.environ[name]}", why, f"unset {name}"
    for name, reason in IGNORED.items():
        if name in machine.environ:
            yield WARNING, f"{name} is set", f"it has no effect: {reason}", f"unset {name}"


def _indices(gpus: list[Gpu]) -> str:
    return ("GPU " if len(gpus) == 1 else "GPUs ") + ", ".join(str(gpu.index) for gpu in gpus)


CHECKS: tuple[Check, ...] = (
    driver_serves_cards,
    driver_is_new_enough,
    driver_runs_torchs_cuda,
    torch_sees_gpus,
    torch_has_kernels,
    ptxas_knows_cards,
    triton_knows_cards,
    copies_arrive,
    peers_have_access,
    main_memory_feeds_cards,
    memory_may_be_locked,
    iommu_is_out_of_the_way,
    acs_is_off,
    link_is_whole,
    numa_is_known,
    power_is_whole,
    clocks_are_free,
    cards_are_alike,
    cards_are_known,
    memory_is_sound,
    memory_is_free,
    cards_are_whole,
    shared_memory_is_enough,
    locked_memory_is_enough,
    disk_is_free,
    variables_are_harmless,
)


def examine(machine: Machine) -> list[Finding]:
    """Returns the findings of all checks, errors first."""
    findings = [Finding(check.__name__, *result) for check in CHECKS for result in check(machine)]
    return sorted(findings, key=lambda finding: finding.severity != ERROR)
