"""`sglang doctor` on faked machines: a healthy one has no finding, and each defect is found by its check alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from sglang.cli import main
from sglang.doctor import reading
from sglang.doctor.checks import CHECKS, ERROR, examine
from sglang.doctor.command import to_text
from sglang.doctor.reading import Sources, acs_redirects, read_machine

GIB = 1024**3
BUSES = ("0000:01:00.0", "0000:02:00.0", "0000:81:00.0", "0000:82:00.0")
SERVER = "NVIDIA RTX PRO 6000 Blackwell Server Edition"


def smi_row(bus_id: str) -> dict[str, str]:
    """What a healthy card says, by the names of nvidia-smi's fields."""
    row = {field: "Not Active" for field in reading._SMI_FIELDS if field.startswith("clocks_event_reasons")}
    return row | {
        "driver_version": "580.95.05",
        "name": SERVER,
        "pci.bus_id": "0000" + bus_id.upper(),
        "compute_cap": "12.0",
        "memory.total": "97887",
        "memory.used": "4",
        "pcie.link.gen.max": "5",
        "pcie.link.gen.gpumax": "5",
        "pcie.link.width.current": "16",
        "pcie.link.width.max": "16",
        "power.limit": "600.00",
        "power.default_limit": "600.00",
        "clocks.applications.graphics": "[N/A]",
        "clocks.max.graphics": "2430",
        "ecc.mode.current": "Enabled",
        "ecc.errors.uncorrected.volatile.total": "0",
        "mig.mode.current": "[N/A]",
    }


def config_space(acs_control: int) -> bytes:
    """Of a bridge: at 0x100 error reporting (1), which points to ACS at 0x140."""
    space = bytearray(4096)
    space[0x100:0x104] = (0x0001 | 1 << 16 | 0x140 << 20).to_bytes(4, "little")
    space[0x140:0x144] = (0x000D | 1 << 16).to_bytes(4, "little")
    space[0x146:0x148] = acs_control.to_bytes(2, "little")
    return bytes(space)


@dataclass
class Fake:
    """A machine with four cards on two NUMA nodes. Defects change it before it is read."""

    root: Path
    rows: list[dict[str, str]] = field(default_factory=lambda: [smi_row(bus) for bus in BUSES])
    smi: tuple[int, str] | None = None  # in place of the rows
    torch: dict[str, Any] = field(
        default_factory=lambda: {
            "version": "2.9.1+cu128",
            "cuda": "12.8",
            "archs": ["sm_90", "sm_100", "sm_120"],
            "devices": 4,
            "problem": "",
        }
    )
    copies: dict[tuple[int, int], dict[str, Any]] = field(
        default_factory=lambda: {
            (i, j): {"source": i, "target": j, "access": True, "equal": True, "rate": 50e9}
            for i in range(4)
            for j in range(4)
            if i != j
        }
    )
    host_copies: list[dict[str, Any]] = field(default_factory=lambda: [{"gpu": i, "rate": 54e9} for i in range(4)])
    memory_rate: float = 400e9
    cores: int = 64
    hangs_at: tuple[int | str, int] | None = None
    torch_error: str = ""
    ptxas_archs: str = "sm_90 sm_120 sm_120a sm_121a"
    driver_cuda: tuple[int, int] = (13, 0)
    environ: dict[str, str] = field(default_factory=dict)
    shm: int = 16 * GIB
    free: int = 500 * GIB
    locked: int = -1
    triton: str = "3.6.0"

    def __post_init__(self) -> None:
        for node, cpus in enumerate(("0-31", "32-63")):
            self.write(f"sys/devices/system/node/node{node}/cpulist", cpus)
        self.write("sys/devices/system/node/online", "0-1")
        self.write("proc/meminfo", f"MemTotal: {1024 << 20} kB\nMemAvailable: {1000 << 20} kB")
        self.write("proc/version", "Linux version 6.8.0")
        self.write("sys/fs/cgroup/memory.max", "max")
        self.write("proc/self/status", "Name:\tx\nCpus_allowed_list:\t0-63\nMems_allowed_list:\t0-1\n")
        for i, bus in enumerate(BUSES):
            self.write(f"{self.device(i)}/vendor", "0x10de")
            self.write(f"{self.device(i)}/class", "0x030200")
            self.write(f"{self.device(i)}/numa_node", str(i // 2))
            self.write(f"{self.device(i)}/iommu_group/type", "identity")
            (self.root / self.bridge(i) / "config").write_bytes(config_space(0))
            link = self.root / "sys/bus/pci/devices" / bus
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(self.root / self.device(i))

    def bridge(self, i: int) -> str:
        return f"sys/devices/pci0000:{i // 2:02x}/0000:{i // 2:02x}:0{i % 2 + 1}.0"

    def device(self, i: int) -> str:
        return f"{self.bridge(i)}/{BUSES[i]}"

    def write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text + "\n")

    def run(self, words: Sequence[str], seconds: float) -> tuple[int, str] | None:
        if words[0] == "nvidia-smi":
            return self.smi or self._smi_rows(words[1].partition("=")[2].split(","))
        if words[-1] == "--help":
            return 0, self.ptxas_archs
        if self.torch_error:
            return 1, self.torch_error
        lines: list[dict[str, Any]] = [{"torch": self.torch}]
        copies = [("host_copy", ("main memory", row["gpu"]), row) for row in self.host_copies if self.torch["devices"]]
        copies += [("copy", pair, row) for pair, row in self.copies.items()]
        if "--copies" in words:
            lines.append({"memory_rate": self.memory_rate, "cores": self.cores})
        for kind, pair, row in copies if "--copies" in words else ():
            lines.append({"copying": pair})
            if pair == self.hangs_at:
                return 124, "\n".join(json.dumps(line) for line in lines)
            lines.append({kind: row})
        return 0, "\n".join(json.dumps(line) for line in lines)

    def _smi_rows(self, fields: list[str]) -> tuple[int, str]:
        unknown = next((name for name in fields if self.rows and name not in self.rows[0]), None)
        if unknown is not None:
            return 2, f'Field "{unknown}" is not a valid field to query.'
        return 0, "\n".join(", ".join(row[name] for name in fields) for row in self.rows)

    def sources(self) -> Sources:
        return Sources(
            root=self.root,
            run=self.run,
            environ=self.environ,
            driver_cuda=lambda: self.driver_cuda,
            total_bytes=lambda path: self.shm,
            free_bytes=lambda path: self.free,
            locked_memory=lambda: self.locked,
            ptxas=lambda: "/triton/ptxas-blackwell",
        )


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    machine = Fake(tmp_path)
    monkeypatch.setattr(reading, "_version", lambda package: machine.triton)
    return machine


def in_row(i: int, **values: str) -> Callable[[Fake], object]:
    """Changes fields of card `i`; "__" stands for a dot."""
    return lambda fake: fake.rows[i].update({name.replace("__", "."): value for name, value in values.items()})


def in_all(**values: str) -> Callable[[Fake], object]:
    return lambda fake: [in_row(i, **values)(fake) for i in range(len(fake.rows))]


def without_rows(fake: Fake) -> None:
    fake.rows = []
    fake.torch["devices"] = 0


def on_gb10(fake: Fake) -> None:
    in_all(name="NVIDIA GB10", compute_cap="12.1", driver_version="580.95.05")(fake)


def one_socket_only(fake: Fake) -> None:
    fake.write("proc/self/status", "Cpus_allowed_list:\t0-15")


Defect = tuple[Callable[[Fake], object], str, str]
DEFECTS: dict[str, Defect] = {
    "no driver": (without_rows, "driver_serves_cards", "4 NVIDIA GPUs on the PCI bus"),
    "driver and library differ": (
        lambda fake: (without_rows(fake), setattr(fake, "smi", (18, "Driver/library version mismatch"))),
        "driver_serves_cards",
        "version mismatch",
    ),
    "a card fell off the bus": (
        lambda fake: (without_rows(fake), setattr(fake, "smi", (15, "Unable to determine the device handle for GPU2"))),
        "driver_serves_cards",
        "device handle for GPU2",
    ),
    "old driver": (in_all(driver_version="560.35"), "driver_is_new_enough", "needs driver 570"),
    "torch for a newer CUDA": (
        lambda fake: (setattr(fake, "driver_cuda", (12, 8)), fake.torch.update(cuda="13.0")),
        "driver_runs_torchs_cuda",
        "CUDA 13.0, the driver runs CUDA 12.8",
    ),
    "torch for the CPU": (
        lambda fake: (fake.torch.update(cuda=None, archs=[], devices=0), fake.copies.clear()),
        "torch_sees_gpus",
        "without CUDA",
    ),
    "torch is broken": (
        lambda fake: setattr(fake, "torch_error", "ImportError: libcudart.so.12: cannot open"),
        "torch_sees_gpus",
        "cannot be imported: ImportError: libcudart",
    ),
    "torch without sm_120": (lambda fake: fake.torch.update(archs=["sm_90", "sm_100"]), "torch_has_kernels", "sm_120"),
    "old ptxas": (
        lambda fake: setattr(fake, "ptxas_archs", "sm_90 sm_90a"),
        "ptxas_knows_cards",
        "does not know sm_120",
    ),
    "old Triton on GB10": (on_gb10, "triton_knows_cards", "Triton 3.6.0 has no block_scaled_mma for sm_121"),
    "half of the lanes": (in_row(2, pcie__link__width__current="8"), "link_is_whole", "GPU 2 (0000:81:00.0) runs x8"),
    "slot of generation 4": (in_row(1, pcie__link__gen__max="4"), "link_is_whole", "PCIe 4, the card can do 5"),
    "copies arrive changed": (lambda fake: fake.copies[0, 2].update(equal=False), "copies_arrive", "0->2"),
    "a copy hangs": (
        lambda fake: setattr(fake, "hangs_at", (1, 3)),
        "copies_arrive",
        "from GPU 1 to GPU 3 did not end within 120 s",
    ),
    "a copy to a GPU hangs": (
        lambda fake: setattr(fake, "hangs_at", ("main memory", 1)),
        "copies_arrive",
        "from main memory to GPU 1 did not end",
    ),
    "a slow bus": (
        lambda fake: fake.host_copies[2].update(rate=21e9),
        "main_memory_feeds_cards",
        "main memory to GPU 2 moves 21.0 GB/s, its link 55",
    ),
    "memory that is not locked": (
        lambda fake: fake.host_copies[0].update(rate=None, problem="CUDA error: out of memory"),
        "main_memory_feeds_cards",
        "copied to GPU 0: CUDA error: out of memory",
    ),
    "one channel of memory": (
        lambda fake: setattr(fake, "memory_rate", 30e9),
        "main_memory_feeds_cards",
        "moves 30 GB/s, the links of all GPUs 216",
    ),
    "WSL2": (
        lambda fake: fake.write("proc/version", "Linux version 5.15.90.1-microsoft-standard-WSL2"),
        "memory_may_be_locked",
        "WSL2 locks half of its 1024 GiB",
    ),
    "a small container": (
        lambda fake: [
            fake.write(f"sys/fs/cgroup/memory.{name}", str(size * GIB)) for name, size in (("max", 64), ("current", 1))
        ],
        "memory_may_be_locked",
        "limit is 64 GiB of the machine's 1024",
    ),
    "no peer access": (lambda fake: fake.copies[0, 3].update(access=False), "peers_have_access", "0->3"),
    "a slow pair": (lambda fake: fake.copies[2, 1].update(rate=2.5e9), "peers_have_access", "GPU 2 to GPU 1 moves 2.5"),
    "IOMMU": (
        lambda fake: [fake.write(f"{fake.device(i)}/iommu_group/type", "DMA-FQ") for i in range(4)],
        "iommu_is_out_of_the_way",
        "GPUs 0, 1, 2, 3 send (DMA-FQ)",
    ),
    "ACS": (
        lambda fake: (fake.root / fake.bridge(3) / "config").write_bytes(config_space(0b11101)),
        "acs_is_off",
        "bridges 0000:01:02.0",
    ),
    "no NUMA node": (lambda fake: fake.write(f"{fake.device(2)}/numa_node", "-1"), "numa_is_known", "GPU 2 lie"),
    "pinned to a socket": (one_socket_only, "numa_is_known", "GPUs 2, 3 lie on another NUMA node"),
    "power limit": (in_row(0, power__limit="300.00"), "power_is_whole", "300 W of its 600 W"),
    "clock limit": (in_row(0, clocks__applications__graphics="1200"), "clocks_are_free", "1200 MHz of 2430"),
    "too hot": (
        in_row(3, clocks_event_reasons__hw_thermal_slowdown="Active"),
        "clocks_are_free",
        "GPU 3 slows down: thermal slowdown",
    ),
    "mixed editions": (
        in_row(1, name="NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition"),
        "cards_are_alike",
        "Max-Q",
    ),
    "ECC on some": (in_row(1, ecc__mode__current="Disabled"), "cards_are_alike", "off on GPU 1 only"),
    "unknown card": (in_all(name="NVIDIA RTX PRO 4000 Blackwell"), "cards_are_known", "RTX PRO 4000"),
    "memory errors": (in_row(2, ecc__errors__uncorrected__volatile__total="3"), "memory_is_sound", "3 memory errors"),
    "another process": (in_row(2, memory__used="40000"), "memory_is_free", "GPU 2 has 39.1 GiB in use"),
    "MIG": (in_row(0, mig__mode__current="Enabled"), "cards_are_whole", "MIG is on for GPU 0"),
    "small /dev/shm": (lambda fake: setattr(fake, "shm", 64 << 20), "shared_memory_is_enough", "64 MiB"),
    "little locked memory": (lambda fake: setattr(fake, "locked", 8 << 20), "locked_memory_is_enough", "8,192 KiB"),
    "full disk": (lambda fake: setattr(fake, "free", 3 * GIB), "disk_is_free", "3.0 GiB free"),
    "peer access switched off": (
        lambda fake: fake.environ.update(NCCL_P2P_DISABLE="1"),
        "variables_are_harmless",
        "NCCL_P2P_DISABLE=1",
    ),
    "cuDNN check": (
        lambda fake: fake.environ.update(SGLANG_DISABLE_CUDNN_CHECK="1"),
        "variables_are_harmless",
        "SGLANG_DISABLE_CUDNN_CHECK is set",
    ),
}


def test_nothing_is_found_on_a_healthy_machine(fake: Fake) -> None:
    machine = read_machine(fake.sources())
    assert examine(machine) == [] and machine.unread == ()
    assert len(machine.gpus) == 4 and len(machine.copies) == 12 and machine.allowed_nodes == (0, 1)
    text = to_text(machine, [])
    assert "found no problem" in text
    assert "Main memory: 1024 GiB, 1000 free, of which 1000 may be page-locked for experts and prefixes" in text
    assert "to a GPU: 54.0 to 54.0 GB/s, so experts there cost 21 ms a GB; inside main memory 400 GB/s" in text
    assert "CPUs compute no experts unless --kt-cpuinfer asks: main memory is not much faster than the buses" in text


def test_cpus_compute_experts_where_main_memory_is_much_faster_than_the_buses(fake: Fake) -> None:
    fake.memory_rate = 1200e9
    text = to_text(read_machine(fake.sources()), [])
    assert "CPUs: with experts there, 56 threads on 64 cores compute some that steps lack" in text
    fake.cores = 0
    assert "unless --kt-cpuinfer asks: there are no kernels for them" in to_text(read_machine(fake.sources()), [])


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_is_found_and_nothing_else(fake: Fake, name: str) -> None:
    break_it, check, text = DEFECTS[name]
    break_it(fake)
    found = examine(read_machine(fake.sources()))
    assert {finding.check for finding in found} == {check}, found
    assert text in " ".join(finding.what + finding.why for finding in found)
    assert all(finding.why and finding.remedy for finding in found)


def test_every_check_has_a_defect() -> None:
    assert {check for _, check, _ in DEFECTS.values()} == {check.__name__ for check in CHECKS}


def test_fields_that_an_old_nvidia_smi_does_not_know_are_left_out(fake: Fake) -> None:
    for row in fake.rows:
        del row["clocks_event_reasons.hw_slowdown"], row["mig.mode.current"]
    machine = read_machine(fake.sources())
    assert len(machine.gpus) == 4 and machine.gpus[0].mig is None
    assert examine(machine) == []


def test_what_only_root_reads_is_said_to_be_unread(fake: Fake) -> None:
    (fake.root / fake.bridge(0) / "config").write_bytes(bytes(64))
    machine = read_machine(fake.sources())
    assert examine(machine) == [] and "needs root" in machine.unread[0]


def test_a_machine_without_gpus_is_no_defect(tmp_path: Path) -> None:
    sources = Sources(
        root=tmp_path,
        run=lambda words, seconds: None,
        environ={},
        driver_cuda=lambda: None,
        total_bytes=lambda path: None,
        free_bytes=lambda path: None,
        locked_memory=lambda: 0,
        ptxas=lambda: None,
    )
    machine = read_machine(sources)
    assert [f.check for f in examine(machine)] == ["torch_sees_gpus"], "its probe did not run"
    assert "No NVIDIA driver answers here" in to_text(machine, [])


def test_a_container_may_see_some_of_the_cards(fake: Fake) -> None:
    """The PCI tree is the host's."""
    fake.rows = fake.rows[:2]
    fake.torch["devices"], fake.copies = 2, {pair: row for pair, row in fake.copies.items() if max(pair) < 2}
    assert examine(read_machine(fake.sources())) == []


def test_acs_is_read_from_the_list_of_capabilities() -> None:
    assert not acs_redirects(config_space(0b10011)) and not acs_redirects(bytes(4096))
    assert acs_redirects(config_space(0b00100)) and acs_redirects(config_space(0b01000))
    loop = bytearray(4096)
    loop[0x100:0x104] = (0x0001 | 0x100 << 20).to_bytes(4, "little")
    assert not acs_redirects(bytes(loop))


def test_it_runs_on_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["doctor", "--json", "--no-copies"])
    said = json.loads(capsys.readouterr().out)
    assert status == int(any(finding["severity"] == ERROR for finding in said["findings"]))
    assert said["machine"]["torch"]["version"] and said["machine"]["ptxas_archs"]


def test_a_program_that_hangs_is_ended() -> None:
    assert reading.run_program(["sh", "-c", "echo '{}'; exec sleep 60"], 3.0) == (124, "{}\n")


def test_the_probe_says_what_torch_is() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sglang.doctor.torch_probe", "--copies"],
        capture_output=True,
        text=True,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )
    row, rate = (json.loads(line) for line in done.stdout.splitlines())
    assert rate["memory_rate"] > 0
    assert row["torch"]["version"] and row["torch"]["devices"] == 0
