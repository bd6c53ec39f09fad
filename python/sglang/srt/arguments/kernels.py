"""Options that name kernels, and CUDA graphs."""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.arguments.groups import EFFECTIVE_IF_NONE, KERNELS
from sglang.srt.cli_args import option
from sglang.srt.compat import FOREIGN_KERNELS
from sglang.srt.kernels.attention_table import EXTEND_ATTENTION, SPARSE_ATTENTION
from sglang.srt.kernels.spec import KernelSpec
from sglang.srt.kernels.tables import FP8_GEMM_BACKENDS, FUSED_MOE


def _backend(field: str, *choices: str, tables: tuple[KernelSpec, ...] = ()) -> dict[str, tuple[str, ...]]:
    """Returns the `choices` of an option that names kernels, ours first, and as `explained` the names of other releases
    and forks, for which the plan says what serves instead."""
    ours = tuple(kernel.name for kernel in tables if kernel.not_here is None and not kernel.asked_as)
    others = {kernel.name for kernel in tables if kernel.name not in ours} | FOREIGN_KERNELS[field]
    return {"choices": (*choices, *ours), "explained": tuple(sorted(others - {*choices, *ours}))}


_ATTENTION = _backend("attention_backend", tables=EXTEND_ATTENTION)
_SPARSE = _backend("dsa_decode_backend", tables=SPARSE_ATTENTION)
_EXPERTS = _backend("moe_runner_backend", "auto", tables=FUSED_MOE)


@dataclass(kw_only=True)
class KernelArgs:
    """Options that name kernels, and options of CUDA graphs."""

    disable_shared_experts_fusion: bool = option(
        False, KERNELS, "Compute the shared expert apart instead of as one more of the routed ones."
    )
    attention_backend: str | None = option(None, KERNELS, f"Kernels of attention. {EFFECTIVE_IF_NONE}", **_ATTENTION)
    prefill_attention_backend: str | None = option(None, KERNELS, "As --attention-backend, for prefill.", **_ATTENTION)
    decode_attention_backend: str | None = option(None, KERNELS, "As --attention-backend, for decode.", **_ATTENTION)
    dsa_prefill_backend: str | None = option(
        None,
        KERNELS,
        "Kernel of attention to what an indexer selects, unless --dsa-decode-backend names one for both.",
        "--nsa-prefill-backend",
        **_SPARSE,
    )
    dsa_decode_backend: str | None = option(
        None,
        KERNELS,
        f"Kernel of attention to what an indexer selects. {EFFECTIVE_IF_NONE}",
        "--nsa-decode-backend",
        **_SPARSE,
    )
    moe_runner_backend: str = option(
        "auto",
        KERNELS,
        "Kernel of the experts.",
        "--moe-backend",
        **_EXPERTS,
    )
    fp8_gemm_backend: str = option(
        "auto",
        KERNELS,
        "Kernel of linear layers with FP8 weights.",
        "--fp8-gemm-runner-backend",
        **_backend("fp8_gemm_backend", "auto", *FP8_GEMM_BACKENDS),
    )
    sampling_backend: str | None = option(
        None, KERNELS, "Accepted, but there is one implementation.", **_backend("sampling_backend", "pytorch")
    )
    strict_backends: bool = option(
        False, KERNELS, "Refuse to start where a named kernel cannot serve, instead of taking the next one."
    )
    no_measured_choices: bool = option(
        False, KERNELS, "Choose kernels and tiles by the tables alone, whatever was measured on this GPU."
    )
    measure_seconds: float = option(
        0.0,
        KERNELS,
        "Seconds that the server may measure kernels and tiles before it starts, where this GPU has no times of this "
        "model's sizes yet; 0: it measures nothing. `sglang tune` does it by itself.",
        minimum=0,
        maximum=3600,
    )
    grammar_backend: str | None = option(
        None, KERNELS, "Structured output.", choices=("xgrammar", "llguidance", "none")
    )
    disable_compile_ahead: bool = option(
        False,
        KERNELS,
        "Compile each Triton kernel when it is first launched, not all in parallel processes while the weights are "
        "read.",
    )
    cuda_graph_max_bs: int | None = option(
        None, KERNELS, "Largest decode batch that runs from a CUDA graph.", minimum=1
    )
    cuda_graph_bs: list[int] | None = option(None, KERNELS, "Decode batch sizes to capture.", minimum=1)
    disable_cuda_graph: bool = option(False, KERNELS, "Launch every kernel from the host.")
