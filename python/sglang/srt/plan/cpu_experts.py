"""Plans CPUs that compute some of the experts in main memory which a decode step lacks. No torch.

The GPU copies the others meanwhile, so both read main memory at once. That pays where it delivers clearly more than the
bus takes: with eight channels, not with two.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sglang.srt.configs.quant_scheme import Scheme
from sglang.srt.errors import UserError
from sglang.srt.plan.equal_layers import interned
from sglang.srt.plan.expert_slot_plan import FETCHED, ExpertSlotPlan, MainMemory
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
"""Main memory has the bandwidth where it delivers so many times the bytes that copies take, besides them."""
SPARE_CORES = 2
"""Physical cores of each rank that compute no experts without a flag: the server and its libraries need them."""
GAIN = 0.9
"""CPUs compute without a flag where a step of eight requests takes at most this part of its time, and one of a request
no longer."""
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


def why_not_this_model(model: ModelDescription, dtype: str) -> str:
    """Returns why CPUs cannot compute the model's experts; "" if they can, or if it has none."""
    quant = model.expert_quant
    if any(experts.latent_norms is not None for experts in model.kinds_of_experts):
        return "CPUs add up outputs of experts, and each output of this model's is normed before"
    return "" if model.experts is None else why_not_on_cpus(quant.format if quant else None, dtype)


def check_experts(model: ModelDescription, dtype: str) -> None:
    """Raises UserError for experts that CPUs have no kernel for."""
    if problem := why_not_this_model(model, dtype):
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
    if main_memory.rate:
        share = main_memory.rate / processes
        computed = min(computed, READ_SHARE * share)
        return CpuRate(threads, max(rate, min(rate + computed, BOTH_SHARE * share)))
    return CpuRate(threads, rate + computed)


def threads_by_default(rate: float, main_memory: MainMemory, processes: int) -> int:
    """Returns the threads of each rank that compute experts where no flag says how many, beside copies of `rate` bytes
    a second: those that use up main memory, or all that there are cores for. 0 where main memory's rate is not known,
    or not clearly above that of the bus."""
    share = main_memory.rate / processes
    room = min(READ_SHARE * share, BOTH_SHARE * share - rate)
    if room < WORTH * rate / FETCHED:
        return 0
    threads = min(-int(-room // THREAD_RATE), MAX_THREADS)
    return min(threads, max(0, main_memory.cores // processes - SPARE_CORES)) if main_memory.cores else threads


def pays(with_cpus: ExpertSlotPlan, without: ExpertSlotPlan) -> bool:
    """Returns whether CPUs that no flag asks for are worth their launches: where slots hold nearly all experts that
    steps need, they are not."""
    one, eight = with_cpus.decode_one <= without.decode_one, with_cpus.decode_eight <= GAIN * without.decode_eight
    return one and eight
