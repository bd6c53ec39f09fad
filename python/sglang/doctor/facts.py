"""Facts of a machine for the checks. None means that a fact could not be read: then nothing is concluded from it."""

from __future__ import annotations

from dataclasses import dataclass, field

MIB = 1024**2


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as nvidia-smi and the PCI tree describe it. Memory in MiB, power in watts, clocks in MHz."""

    index: int
    name: str
    bus_id: str  # as under /sys/bus/pci/devices: "0000:41:00.0"
    capability: str | None = None  # "12.0"
    memory: float | None = None
    memory_used: float | None = None
    link_generation: float | None = None  # the most that card and slot can do together
    card_generation: float | None = None  # the most that the card can do
    link_width: float | None = None
    card_width: float | None = None
    power_limit: float | None = None
    power_default: float | None = None
    clock_limit: float | None = None  # application clock limit that was set
    clock_max: float | None = None
    slowed_by: tuple[str, ...] = ()  # present reasons, such as heat or power supply
    ecc: str | None = None  # "Enabled", "Disabled"
    ecc_errors: float | None = None  # uncorrected, since the driver was loaded
    mig: str | None = None
    numa_node: int | None = None  # -1: the firmware does not say
    iommu_type: str | None = None  # of its group: "DMA", "DMA-FQ", "identity"
    redirecting_bridges: tuple[str, ...] | None = None  # above it, whose ACS sends peer traffic to the root

    @property
    def arch(self) -> str | None:
        """Returns the architecture, such as "sm_120"."""
        return None if self.capability is None else f"sm_{self.capability.replace('.', '')}"


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of some MiB from one GPU to another, by the driver's peer access. `rate` in bytes a second."""

    source: int
    target: int
    access: bool
    equal: bool | None = None
    rate: float | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class MainMemory:
    """Main memory in bytes. `limit`: of the container; `lockable`: what may be page-locked of what is free."""

    total: int
    free: int
    lockable: int
    limit: int | None = None
    windows: bool = False  # WSL2


@dataclass(frozen=True, slots=True)
class HostCopy:
    """A copy from page-locked main memory to a GPU. `rate` in bytes a second."""

    gpu: int
    rate: float | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Torch:
    """The installed torch."""

    version: str
    cuda: str | None  # CUDA version that it was built for; None: a CPU build
    archs: tuple[str, ...]  # architectures that it has kernels for
    devices: int  # number of GPUs that it sees
    problem: str = ""  # why it sees none


@dataclass(frozen=True, slots=True)
class Machine:
    """All facts. `pci_gpus`: bus ids of NVIDIA's display devices, with or without a driver."""

    gpus: tuple[Gpu, ...] = ()
    pci_gpus: tuple[str, ...] = ()
    smi_problem: str = ""  # nvidia-smi's error; empty also if it is not installed
    driver: str | None = None
    driver_cuda: tuple[int, int] | None = None  # the newest that the driver runs
    torch: Torch | None = None
    torch_problem: str = ""
    triton: str | None = None
    ptxas: str | None = None  # path
    ptxas_archs: frozenset[str] | None = None
    copies: tuple[Copy, ...] = ()
    copy_problem: str = ""  # copies that did not come to an end
    host_copies: tuple[HostCopy, ...] = ()
    memory_rate: float | None = None  # bytes a second that the CPUs read of main memory together
    cores: int = 0  # physical cores that could compute experts
    memory: MainMemory | None = None
    numa_nodes: tuple[int, ...] = ()
    allowed_nodes: tuple[int, ...] | None = None  # nodes with CPUs on which this process may run
    shm: int | None = None  # bytes of /dev/shm
    locked_memory: int | None = None  # bytes; -1: no limit
    disk_free: tuple[tuple[str, int], ...] = ()  # directory, bytes
    environ: dict[str, str] = field(default_factory=dict)
    unread: tuple[str, ...] = ()  # what could not be read, with the reason
