"""Spellings of other SGLang releases, as data: what we rename, what means nothing here, what we do not have.

Flags are written without the leading dashes. `upstream_interface.json` lists the flags that are no options here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sglang.srt.upstream_interface import ACCEPTED, REFUSED, FlagGroup

RENAMED_FLAGS: Mapping[str, str] = {
    "cuda-graph-max-bs-decode": "cuda-graph-max-bs",
    "cuda-graph-bs-decode": "cuda-graph-bs",
    "disable-decode-cuda-graph": "disable-cuda-graph",
    "stream-output": "incremental-streaming-output",
    "schedule-heuristic": "schedule-policy",
}

VALUE_ALIASES: Mapping[tuple[str, str], str] = {
    ("dtype", "half"): "float16",
    ("dtype", "fp16"): "float16",
    ("dtype", "bf16"): "bfloat16",
    ("dtype", "float"): "float32",
    ("dtype", "fp32"): "float32",
    ("kv_cache_dtype", "bfloat16"): "bf16",
    ("attention_backend", "torch"): "torch_native",
    ("prefill_attention_backend", "torch"): "torch_native",
    ("decode_attention_backend", "torch"): "torch_native",
    ("tool_call_parser", "qwen"): "qwen25",
    ("tool_call_parser", "qwen3"): "qwen25",
    ("tool_call_parser", "glm"): "glm45",
}
"""(field, value) -> our name of the same thing."""


@dataclass(frozen=True, slots=True)
class TuningValues:
    """Values of an option that other releases have and that only tune: accepted with one warning, read as `instead`."""

    instead: str
    reason: str
    values: frozenset[str]


TUNING_VALUES: Mapping[str, TuningValues] = {
    "moe_runner_backend": TuningValues(
        "auto",
        "that kernel is not part of sm120-sglang, and the plan chooses one; see `python -m sglang.explain`",
        frozenset(
            (
                "aiter cutlass deep_gemm experimental_sgl_marlin experimental_sgl_trtllm flashinfer_cutedsl"
                " flashinfer_cutlass flashinfer_megamoe flashinfer_mxfp4 flashinfer_trtllm flashinfer_trtllm_routed"
                " hpc_ops humming intel_xpu lora_cutedsl lora_marlin lora_triton marlin megamoe triton_kernel"
            ).split()
        ),
    ),
    "fp8_gemm_backend": TuningValues(
        "auto",
        "that kernel is not part of sm120-sglang, and the plan chooses one; see `python -m sglang.explain`",
        frozenset(
            (
                "aiter cutlass deep_gemm flashinfer_cutedsl flashinfer_cutlass flashinfer_deepgemm flashinfer_trtllm"
            ).split()
        ),
    ),
    "load_format": TuningValues(
        "auto",
        "safetensors are read in one way",
        frozenset({"fastsafetensors", "instanttensor", "layered", "runai_streamer"}),
    ),
}


@dataclass(frozen=True, slots=True)
class NoEffect:
    """A published flag that only tunes and has nothing to switch here; accepted with one warning."""

    reason: str
    max_values: int
    """How many words after the flag are its values."""


@dataclass(frozen=True, slots=True)
class NotImplementedFlag:
    """A published flag that asks for what we do not have. `reason` says what to do instead."""

    reason: str
    harmless: frozenset[str]
    """Values that ask for nothing: such a flag is accepted."""

    def asks_for_nothing(self, value: Any) -> bool:
        """Also of values from Python and YAML, where None and False leave a feature off."""
        return value is None or value is False or str(value) in self.harmless


ANY_NUMBER = 1 << 30
"""Of values: as many as follow."""
_NUM_VALUES = {"": 1, "...": ANY_NUMBER}


def _words(groups: tuple[FlagGroup, ...]) -> Iterator[tuple[str, bool, str, str]]:
    """Of each name: itself, whether `=` follows, what follows that, the group's reason."""
    for group in groups:
        for word in group.names:
            name, equals, rest = word.partition("=")
            yield name, bool(equals), rest, group.reason


NO_EFFECT: Mapping[str, NoEffect] = {
    name: NoEffect(reason, _NUM_VALUES[rest] if takes_value else 0)
    for name, takes_value, rest, reason in _words(ACCEPTED)
}
UNIMPLEMENTED: Mapping[str, NotImplementedFlag] = {
    name: NotImplementedFlag(reason, frozenset(rest.split("|") if has_harmless else ()))
    for name, has_harmless, rest, reason in _words(REFUSED)
}
