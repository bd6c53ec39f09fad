"""Command line of `sglang doctor`, and its output."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from sglang.doctor.checks import CHECKS, ERROR, Finding, examine
from sglang.doctor.facts import Machine
from sglang.doctor.reading import Sources, read_machine
from sglang.srt.plan.cpu_experts import threads_by_default
from sglang.srt.plan.expert_slot_plan import FETCHED, MainMemory

GIB = 1024**3


def run_doctor(argv: Sequence[str]) -> int:
    """Runs the checks. Returns the exit status: 1 if there is an error, else 0, with or without warnings."""
    parser = argparse.ArgumentParser(
        prog="sglang doctor",
        description="Find what makes a server hang, slow down or not start: drivers, PCIe, copies between GPUs, limits."
        " Exit status 1 if something keeps a server from working, 0 otherwise.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--no-copies", action="store_true", help="do not copy between GPUs and main memory")
    options = parser.parse_args(list(argv))
    machine = read_machine(Sources(), not options.no_copies)
    findings = examine(machine)
    print(json.dumps(to_json(machine, findings), indent=2) if options.json else to_text(machine, findings))
    return int(any(finding.severity == ERROR for finding in findings))


def to_json(machine: Machine, findings: Sequence[Finding]) -> dict[str, Any]:
    """Returns facts and findings; of environment variables, only those in findings."""
    facts = asdict(machine)
    del facts["environ"]
    facts["ptxas_archs"] = sorted(machine.ptxas_archs or ())
    return {"healthy": not findings, "findings": [asdict(finding) for finding in findings], "machine": facts}


def to_text(machine: Machine, findings: Sequence[Finding]) -> str:
    """Returns facts and findings as text."""
    lines = [*_summary(machine), ""]
    for finding in findings:
        lines += [f"{finding.severity}: {finding.what}", f"  why it matters: {finding.why}", f"  do: {finding.remedy}"]
    lines += [f"not read: {reason}" for reason in machine.unread]
    if findings:
        errors = sum(finding.severity == ERROR for finding in findings)
        lines.append(f"{errors} errors and {len(findings) - errors} warnings of {len(CHECKS)} checks.")
    else:
        lines.append(f"{len(CHECKS)} checks found no problem.")
    return "\n".join(lines)


def _summary(machine: Machine) -> list[str]:
    if not machine.gpus:
        lines = ["No NVIDIA driver answers here: the checks of GPUs are left out."]
    else:
        kinds: dict[str, int] = {}
        for gpu in machine.gpus:
            kinds[f"{gpu.name} ({gpu.arch})"] = kinds.get(f"{gpu.name} ({gpu.arch})", 0) + 1
        cuda = "unknown" if machine.driver_cuda is None else ".".join(map(str, machine.driver_cuda))
        lines = [
            ", ".join(f"{count} x {kind}" for kind, count in kinds.items()) + f"; driver {machine.driver}, CUDA {cuda}"
        ]
    torch = machine.torch
    built = "" if torch is None else f" for CUDA {torch.cuda}" if torch.cuda else " for the CPU"
    lines.append(
        f"torch {torch.version if torch else 'not usable'}{built}, Triton {machine.triton or 'not installed'},"
        f" ptxas {machine.ptxas or 'not found'}"
    )
    rates = [copy.rate for copy in machine.copies if copy.rate is not None]
    if rates:
        lines.append(f"{len(rates)} copies between GPUs: {min(rates) / 1e9:.1f} to {max(rates) / 1e9:.1f} GB/s")
    return [*lines, *_main_memory(machine)]


def _main_memory(machine: Machine) -> list[str]:
    """Says what main memory is good for."""
    memory, rates = machine.memory, [copy.rate for copy in machine.host_copies if copy.rate is not None]
    lines = []
    if memory is not None:
        lines.append(
            f"Main memory: {memory.total / GIB:.0f} GiB, {memory.free / GIB:.0f} free, of which"
            f" {memory.lockable / GIB:.0f} may be page-locked for experts and prefixes"
        )
    if rates and machine.memory_rate is not None:
        slowest, fastest, inside = (rate / 1e9 for rate in (min(rates), max(rates), machine.memory_rate))
        lines.append(
            f"Main memory to a GPU: {slowest:.1f} to {fastest:.1f} GB/s, so experts there cost"
            f" {1e3 / (FETCHED * slowest):.0f} ms a GB; inside main memory {inside:.0f} GB/s"
        )
        lines.append(_cpus(machine, min(rates), len(rates)))
    return lines


def _cpus(machine: Machine, slowest: float, gpus: int) -> str:
    """Says whether CPUs compute experts in main memory. slowest: bytes a second of the slowest copy to a GPU."""
    memory = MainMemory(rate=machine.memory_rate or 0.0, cores=machine.cores)
    if threads := machine.cores and threads_by_default(FETCHED * slowest, memory, gpus) * gpus:
        return f"CPUs: with experts there, {threads} threads on {machine.cores} cores compute some that steps lack"
    why = "main memory is not much faster than the buses" if machine.cores else "there are no kernels for them"
    return f"CPUs compute no experts unless --kt-cpuinfer asks: {why}"
