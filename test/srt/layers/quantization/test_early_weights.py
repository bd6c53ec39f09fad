"""Weights that a dependent launch loads before it waits for the kernel ahead, read from the PTX. No GPU."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import pytest

pytest.importorskip("triton")

from sglang.srt.hardware.arch import arch_by_name
from sglang.srt.kernels.compile import compile_for
from sglang.srt.kernels.variant import Variant
from sglang.srt.layers.triton_ops import quant_variants

FEATURES = tuple(sorted(arch_by_name("sm_120").features))
WAIT = "griddepcontrol.wait"
MARGIN = 40
"""Registers of a thread that a dependent launch may take beyond those on record, which are of other launches."""
_PARAMETER = re.compile(r"ld\.param\.\w+\s+(%\w+), \[\w+_param_(\d+)\]")
_LOAD = re.compile(r"ld\.global\S*\s+\{?([^[]*?)\}?,\s*\[\s*(%\w+)")
_ACTION = re.compile(r"(?:@!?%p\d+ )?[\w.:]+\s+(%\w+), (.*);")


@dataclass(frozen=True)
class Load:
    """`sources`: the kernel's parameters that its address is computed from."""

    sources: frozenset[str]
    early: bool


def global_loads(ptx: str, names: tuple[str, ...]) -> list[Load]:
    """In the order of the text, for a kernel whose run-time parameters have these names."""
    sources: dict[str, frozenset[str]] = {}
    loads, early = [], WAIT in ptx
    for line in ptx.splitlines():
        if match := _PARAMETER.search(line):
            sources[match[1]] = frozenset({names[int(match[2])]} if int(match[2]) < len(names) else ())
        elif match := _LOAD.search(line):
            loads.append(Load(sources.get(match[2], frozenset()), early))
            for register in re.findall(r"%\w+", match[1]):
                sources[register] = loads[-1].sources
        elif match := _ACTION.search(line):
            operands = (sources.get(register, frozenset()) for register in re.findall(r"%\w+", match[2]))
            sources[match[1]] = frozenset().union(*operands)
        early = early and WAIT not in line
    return loads


def run_time_names(variant: Variant) -> tuple[str, ...]:
    return tuple(name for name, kind in variant.signature.items() if kind != "constexpr")


def as_dependent(variant: Variant) -> Variant:
    return replace(variant, constexprs={**variant.constexprs, "PDL": True})


@pytest.mark.parametrize("scheme", ["fp8_block", "fp8_channel", "mxfp8"])
def test_weights_of_a_byte_are_loaded_before_a_product_waits(scheme: str) -> None:
    """And nothing of x is. The record is of launches that do not wait, and costs about as much."""
    plain = next(v for v in quant_variants.variants("linear", FEATURES) if v.key == f"few/{scheme}")
    dependent = compile_for(as_dependent(plain), "sm_120")
    loads = global_loads(dependent.ptx, run_time_names(plain))
    steps = plain.constexprs["EARLY"]
    assert steps >= 8 and sum(load.early and "w" in load.sources for load in loads) >= steps
    assert sum(load.early and "w_scale" in load.sources for load in loads) >= (
        1 if scheme.endswith("channel") else steps
    )
    assert all("x" in load.sources for load in loads if not load.early and not load.sources & {"w", "w_scale"})
    assert any("x" in load.sources for load in loads) and not any(load.early and "x" in load.sources for load in loads)
    before = dependent.ptx.partition(WAIT)[0]
    assert "st.global" not in before and "cvt.rn.f16x2.e4m3x2" not in before, "what is loaded is not used before"
    _, registers, spills, stack, _ = compile_for(plain, "sm_120").measurement
    assert dependent.measurement[1] <= registers + MARGIN and dependent.measurement[2:4] == (spills, stack) == (0, 0)
