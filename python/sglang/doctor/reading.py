"""Reads a `Machine` from nvidia-smi, the PCI tree under /sys, limits, and a child process that imports torch."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sglang.doctor.facts import Copy, Gpu, HostCopy, Machine, MainMemory, Torch
from sglang.srt.environ import envs
from sglang.srt.hardware.arch import free_main_memory, lockable_bytes

NVIDIA = "0x10de"
DISPLAY_CLASSES = ("0x0300", "0x0302")
COPY_SECONDS = 120

_SMI_FIELDS: Mapping[str, str] = {
    "name": "name",
    "pci.bus_id": "bus_id",
    "compute_cap": "capability",
    "memory.total": "memory",
    "memory.used": "memory_used",
    "pcie.link.gen.max": "link_generation",
    "pcie.link.gen.gpumax": "card_generation",
    "pcie.link.width.current": "link_width",
    "pcie.link.width.max": "card_width",
    "power.limit": "power_limit",
    "power.default_limit": "power_default",
    "clocks.applications.graphics": "clock_limit",
    "clocks.max.graphics": "clock_max",
    "ecc.mode.current": "ecc",
    "ecc.errors.uncorrected.volatile.total": "ecc_errors",
    "mig.mode.current": "mig",
    "clocks_event_reasons.hw_slowdown": "hardware slowdown",
    "clocks_event_reasons.hw_thermal_slowdown": "thermal slowdown",
    "clocks_event_reasons.hw_power_brake_slowdown": "power brake",
    "clocks_event_reasons.sw_thermal_slowdown": "thermal slowdown by the driver",
}
"""Field of nvidia-smi -> field of Gpu, or what slows it down where the value is "Active"."""
_TEXTS = frozenset({"name", "bus_id", "capability", "ecc", "mig"})
_INVALID = re.compile(r'[Ff]ield "([^"]+)" is not a valid field')


@dataclass(frozen=True)
class Sources:
    """Sources of facts about the machine; tests replace them. `run` returns (status, output), None for a missing
    program."""

    root: Path = Path("/")
    run: Callable[[Sequence[str], float], tuple[int, str] | None] = lambda words, seconds: run_program(words, seconds)
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    driver_cuda: Callable[[], tuple[int, int] | None] = lambda: newest_cuda_of_driver()
    total_bytes: Callable[[Path], int | None] = lambda path: _disk(path, 0)
    free_bytes: Callable[[Path], int | None] = lambda path: _disk(path, 2)
    locked_memory: Callable[[], int] = lambda: resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    ptxas: Callable[[], str | None] = lambda: find_ptxas()


def run_program(words: Sequence[str], seconds: float) -> tuple[int, str] | None:
    """Returns the status and both outputs. A program that exceeds its time has status 124 and its output until then."""
    try:
        done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=seconds)
    except FileNotFoundError:
        return None
    except subprocess.TimeoutExpired as late:
        said = late.stdout or b""
        return 124, said.decode(errors="replace") if isinstance(said, bytes) else said
    return done.returncode, done.stdout


def read_machine(sources: Sources, with_copies: bool = True) -> Machine:
    """Returns all facts of this machine."""
    unread: list[str] = []
    gpus, driver, smi_problem = read_smi(sources)
    gpus = tuple(_with_pci(gpu, sources.root) for gpu in gpus)
    if any(gpu.redirecting_bridges is None for gpu in gpus):
        unread.append("ACS of the PCI bridges: reading it needs root")
    probe = _read_torch(sources, with_copies and bool(gpus))
    if len(gpus) > 1 and not probe.copies:
        unread.append(
            "copies between GPUs: not asked for" if not with_copies else "copies between GPUs: torch sees none"
        )
    ptxas = sources.ptxas()
    caches = [Path(sources.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser(), envs.SGLANG_CACHE_DIR]
    free = [(str(path), sources.free_bytes(path)) for path in caches]
    return Machine(
        gpus=gpus,
        pci_gpus=_pci_gpus(sources.root),
        smi_problem=smi_problem,
        driver=driver,
        driver_cuda=sources.driver_cuda(),
        torch=probe.torch,
        torch_problem=probe.torch_problem,
        triton=_version("triton"),
        ptxas=ptxas,
        ptxas_archs=_ptxas_archs(sources, ptxas),
        copies=probe.copies,
        copy_problem=probe.copy_problem,
        host_copies=probe.host_copies,
        memory_rate=probe.memory_rate,
        cores=probe.cores,
        memory=read_memory(sources.root),
        numa_nodes=_numbers(_text(sources.root / "sys/devices/system/node/online")),
        allowed_nodes=_allowed_nodes(sources.root),
        shm=sources.total_bytes(sources.root / "dev/shm"),
        locked_memory=sources.locked_memory(),
        disk_free=tuple((path, size) for path, size in free if size is not None),
        environ=dict(sources.environ),
        unread=tuple(unread),
    )


# --- nvidia-smi -------------------------------------------------------------------------------------------------------


def read_smi(sources: Sources) -> tuple[tuple[Gpu, ...], str | None, str]:
    """Returns GPUs, the driver's version, and what went wrong. Skips fields that an older nvidia-smi does not know."""
    fields = ["driver_version", *_SMI_FIELDS]
    while fields:
        result = sources.run(["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"], 60)
        if result is None:
            return (), None, ""
        status, output = result
        unknown = _INVALID.search(output)
        if unknown is None or unknown[1] not in fields:
            break
        fields.remove(unknown[1])
    if status:
        return (), None, output.strip() or f"nvidia-smi ended with status {status}"
    rows = [
        dict(zip(fields, (cell.strip() for cell in line.split(", ")), strict=False)) for line in output.splitlines()
    ]
    rows = [row for row in rows if row.get("name")]
    gpus = tuple(_gpu(i, row) for i, row in enumerate(rows))
    return gpus, rows[0].get("driver_version") if rows else None, ""


def _gpu(index: int, row: Mapping[str, str]) -> Gpu:
    gpu, slowed = Gpu(index, row["name"], _sysfs_name(row.get("pci.bus_id", ""))), []
    values: dict[str, str | float | None] = {}
    for key, name in _SMI_FIELDS.items():
        cell = row.get(key, "")
        if key.startswith("clocks_event_reasons"):
            slowed += [name] if cell == "Active" else []
        elif name in _TEXTS:
            values[name] = None if cell in ("", "[N/A]", "N/A") else cell
        else:
            values[name] = _number(cell)
    del values["name"], values["bus_id"]
    return replace(gpu, slowed_by=tuple(slowed), **values)  # type: ignore[arg-type]


def _sysfs_name(bus_id: str) -> str:
    """Converts "00000000:41:00.0" to "0000:41:00.0"."""
    return bus_id.lower()[-12:]


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None


def newest_cuda_of_driver() -> tuple[int, int] | None:
    """Returns the newest CUDA version that the driver supports, from libcuda, which needs no GPU context for it."""
    version = ctypes.c_int()
    try:
        status = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return None
    return None if status else (version.value // 1000, version.value % 1000 // 10)


# --- the PCI tree -----------------------------------------------------------------------------------------------------


def _pci_gpus(root: Path) -> tuple[str, ...]:
    devices = root / "sys/bus/pci/devices"
    names = sorted(path.name for path in devices.iterdir()) if devices.is_dir() else []
    return tuple(
        name
        for name in names
        if _text(devices / name / "vendor") == NVIDIA and _text(devices / name / "class").startswith(DISPLAY_CLASSES)
    )


def _with_pci(gpu: Gpu, root: Path) -> Gpu:
    device = root / "sys/bus/pci/devices" / gpu.bus_id
    if not device.exists():
        return gpu
    node = _text(device / "numa_node")
    return replace(
        gpu,
        numa_node=int(node) if node else None,
        iommu_type=_text(device / "iommu_group" / "type") or None,
        redirecting_bridges=_redirecting(device.resolve(), root.resolve()),
    )


def _redirecting(device: Path, root: Path) -> tuple[str, ...] | None:
    """Returns the bridges above a device whose ACS redirects requests or completions between peers; None if that is
    unreadable."""
    bridges = []
    for parent in device.parents:
        if parent == root or not re.fullmatch(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", parent.name):
            break
        try:
            config = (parent / "config").read_bytes()
        except OSError:
            return None
        if len(config) <= 256:  # without privileges only the first bytes are readable
            return None
        if acs_redirects(config):
            bridges.append(parent.name)
    return tuple(bridges)


def acs_redirects(config: bytes) -> bool:
    """Returns whether a PCI configuration space has the ACS control bits for redirection of peer-to-peer requests (2)
    or completions (3) set (PCI Express base specification, Access Control Services, capability 0x000D)."""
    at, seen = 256, set()
    while at and at not in seen and at + 8 <= len(config):
        seen.add(at)
        header = int.from_bytes(config[at : at + 4], "little")
        if header & 0xFFFF == 0x000D:
            return bool(int.from_bytes(config[at + 6 : at + 8], "little") & 0b1100)
        at = header >> 20
    return False


def _allowed_nodes(root: Path) -> tuple[int, ...] | None:
    status = _text(root / "proc/self/status")
    match = re.search(r"^Cpus_allowed_list:\s*(\S+)", status, re.MULTILINE)
    nodes = _numbers(_text(root / "sys/devices/system/node/online"))
    if match is None or not nodes:
        return None
    allowed = set(_numbers(match[1]))
    lists = {node: _numbers(_text(root / f"sys/devices/system/node/node{node}/cpulist")) for node in nodes}
    return tuple(node for node, cpus in lists.items() if allowed & set(cpus))


def _numbers(text: str) -> tuple[int, ...]:
    """Converts "0-2,5" to (0, 1, 2, 5)."""
    result: list[int] = []
    for part in filter(None, text.split(",")):
        low, _, high = part.partition("-")
        result += range(int(low), int(high or low) + 1)
    return tuple(result)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


# --- programs and limits ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Probe:
    """What a process with torch found; the problems as in `Machine`."""

    torch: Torch | None = None
    torch_problem: str = ""
    copies: tuple[Copy, ...] = ()
    copy_problem: str = ""
    host_copies: tuple[HostCopy, ...] = ()
    memory_rate: float | None = None
    cores: int = 0


def _read_torch(sources: Sources, with_copies: bool) -> _Probe:
    """Reads torch's facts in a child process, because a broken driver may hang or kill it."""
    words = [sys.executable, "-m", "sglang.doctor.torch_probe", *(["--copies"] if with_copies else [])]
    result = sources.run(words, COPY_SECONDS)
    status, output = result if result is not None else (127, "")
    rows = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    torch = next(
        (Torch(**row["torch"] | {"archs": tuple(row["torch"]["archs"])}) for row in rows if "torch" in row), None
    )
    memory: dict[str, Any] = next((row for row in rows if "memory_rate" in row), {})
    probe = _Probe(
        torch,
        copies=tuple(Copy(**row["copy"]) for row in rows if "copy" in row),
        host_copies=tuple(HostCopy(**row["host_copy"]) for row in rows if "host_copy" in row),
        memory_rate=memory.get("memory_rate"),
        cores=memory.get("cores", 0),
    )
    if not status:
        return probe
    what = f"did not end within {COPY_SECONDS} s" if status == 124 else f"ended with status {status}"
    if torch is None:
        lines = output.strip().splitlines()
        return _Probe(torch_problem=lines[-1] if lines else what)
    started = next((row["copying"] for row in reversed(rows) if "copying" in row), None)
    if started is None:
        return replace(probe, copy_problem=what)
    source = started[0] if isinstance(started[0], str) else f"GPU {started[0]}"
    return replace(probe, copy_problem=f"a copy from {source} to GPU {started[1]} {what}")


def read_memory(root: Path) -> MainMemory | None:
    """Returns the sizes of main memory; None where the system does not say."""
    total = re.search(r"^MemTotal:\s*(\d+)", _text(root / "proc/meminfo"), re.MULTILINE)
    if total is None:
        return None
    limit, free = _text(root / "sys/fs/cgroup/memory.max"), free_main_memory(root)
    windows = "microsoft" in _text(root / "proc/version").lower()
    most = int(limit) if limit.isdecimal() else None
    return MainMemory(int(total[1]) * 1024, free, lockable_bytes(free, root), most, windows)


def find_ptxas() -> str | None:
    """Returns the assembler that Triton uses for Blackwell, without importing Triton."""
    for variable in ("TRITON_PTXAS_BLACKWELL_PATH", "TRITON_PTXAS_PATH"):
        if os.environ.get(variable):
            return os.environ[variable]
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        return None
    programs = Path(spec.origin).parent / "backends" / "nvidia" / "bin"
    return next((str(programs / name) for name in ("ptxas-blackwell", "ptxas") if (programs / name).exists()), None)


def _ptxas_archs(sources: Sources, ptxas: str | None) -> frozenset[str] | None:
    result = sources.run([ptxas, "--help"], 30) if ptxas is not None else None
    return None if result is None else frozenset(re.findall(r"\bsm_\d+[af]?\b", result[1]))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _disk(path: Path, which: int) -> int | None:
    """Returns bytes of the file system of the nearest existing directory: 0 for its size, 2 for free bytes."""
    place = next((p for p in (path, *path.parents) if p.is_dir()), None)
    return None if place is None else shutil.disk_usage(place)[which]
