"""Plans CPUs that compute some of the experts in main memory which a decode step lacks. No torch.

The GPU copies the others meanwhile, so both read main memory at once. That pays where it delivers clearly more than the
bus takes: with eight channels, not with two.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sglang.srt.configs.quant_scheme import Scheme
from sglang.srt.errors import UserError
from sglang.srt.plan.equal_layers import interned
from sglang.srt.plan.expert_slot_plan import CHANNEL_RATE, FETCHED, MainMemory
from sglang.srt.plan.model_description import ModelDescription

FLAG = "--kt-cpuinfer"
DTYPE = "bfloat16"
MAX_THREADS = 256
"""Of a rank, as in pool.c."""
THREAD_RATE = 5e9
"""Bytes of weights a second that a thread computes with, of four bits each; of others it is more."""
READ_SHARE, BOTH_SHARE = 0.7, 0.85
"""Shares of main memory's rate that CPUs reach, and CPUs and copies together."""
LAYER_S = 40e-6
"""Seconds by which a layer takes longer."""
WORTH = 2.0
"""CPUs are advised where they compute so many times the bytes that copies take."""
ELEMENTS = {"e4m3": (0, 128), "e2m1": (16, 32), "int4": (32, 64, 128)}
"""Elements of weights that CPUs have kernels for, and columns that may share a scale; 0: all of a row."""


@dataclass(frozen=True, slots=True)
class CpuRate:
    """Predicted bytes of missing experts a second, with `threads` on CPUs: what both sides reach together."""

    threads: int
    together: float


def why_not_on_cpus(scheme: Scheme | None, dtype: str) -> str:
    """Returns why CPUs cannot compute experts of this form; "" if they can."""
    if dtype != DTYPE:
        return f"CPUs compute experts of models in {DTYPE}, not {dtype}"
    if scheme is not None and scheme.group[1] not in ELEMENTS.get(scheme.element, ()):
        return f"CPUs have no kernel for experts in {scheme.name}"
    return ""


def check_experts(model: ModelDescription, dtype: str) -> None:
    """Raises UserError for experts that CPUs have no kernel for."""
    if model.experts is None:
        return
    quant = model.expert_quant
    if problem := why_not_on_cpus(quant.format if quant else None, dtype):
        advice = f"Add --dtype {DTYPE}, or remove the flag" if dtype != DTYPE else "Remove the flag, or pass 0"
        raise UserError(f"{FLAG}: {problem}. {advice}.")


def with_cpus(model: ModelDescription, threads: int) -> ModelDescription:
    """Returns the model with some experts in main memory computed by so many threads of a rank."""
    layers = (replace(layer, ffn=layer.ffn.with_cpu_threads(threads)) for layer in model.layers)
    return replace(model, layers=interned(layers))


def threads_of_rank(asked: int | None, processes: int) -> int:
    """Returns the threads of each of the ranks of a machine of those that a flag asks for. Raises UserError for more
    than a rank can have."""
    threads = max(1, asked // processes) if asked else 0
    if threads > MAX_THREADS:
        most = (MAX_THREADS + 1) * processes - 1
        raise UserError(f"{FLAG} {asked}: a rank has at most {MAX_THREADS} threads; use at most {most}.")
    return threads


def with_threads(rate: float, threads: int, main_memory: MainMemory, processes: int) -> CpuRate:
    """Predicts the rate with so many threads of each rank beside copies of `rate` bytes a second."""
    computed = threads * THREAD_RATE
    if main_memory.channels:
        share = main_memory.channels * CHANNEL_RATE / processes
        computed = min(computed, READ_SHARE * share)
        return CpuRate(threads, max(rate, min(rate + computed, BOTH_SHARE * share)))
    return CpuRate(threads, rate + computed)


def advised(rate: float, main_memory: MainMemory, processes: int) -> CpuRate | None:
    """Returns the threads of each rank that are worth asking for where the channels of main memory are known; None: no
    threads are. `rate`: bytes a second of copies."""
    share = main_memory.channels * CHANNEL_RATE / processes
    room = min(READ_SHARE * share, BOTH_SHARE * share - rate)
    if room < WORTH * rate / FETCHED:
        return None
    return with_threads(rate, -int(-room // THREAD_RATE), main_memory, processes)
