"""The grouped products of e4m3 by e2m1 against dequantized fp32: the CUDA kernel compiled for the CPU, its PTX for
SM120 executed, and on a GPU as installed."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import interpreter
import pytest
import torch
from srt.layers.moe.moe_harness import NATIVE, Case, assert_close, expected, make_case, tile_configs_of

from sglang.srt.configs.activation import GPT_OSS_SWIGLU, SILU, Activation
from sglang.srt.hardware.arch import arch_by_name
from sglang.srt.kernels.spec import Need
from sglang.srt.kernels.tile_configs import ANY, TileConfig, config_for
from sglang.srt.layers.moe import mixed_moe
from sglang.srt.layers.moe.fused_moe_triton.expert_tile_configs import mixed_tile_configs
from sglang.srt.layers.moe.fused_moe_triton.tiles import MIXED

BLOCK_M = (64, 128)
BOUND = 6e-3
"""What rounding to bfloat16 between the steps explains."""


@pytest.fixture(autouse=True)
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted, the CUDA kernels are those for the CPU. Scratch memory holds NaN, so that nothing that was never
    written can go unnoticed."""
    if interpreter.INTERPRETED:
        on_cpu = request.getfixturevalue("library_module").Library(request.getfixturevalue("cpu_library"))
        monkeypatch.setattr(mixed_moe, "_library", lambda: on_cpu)
        monkeypatch.setattr(mixed_moe, "_stream", lambda x: 0)
    elif interpreter.EXECUTED:
        monkeypatch.setattr(mixed_moe, "_library", lambda: request.getfixturevalue("executed_mixed_moe"))
        monkeypatch.setattr(mixed_moe, "_stream", lambda x: 0)
    elif torch.cuda.is_available() and importlib.util.find_spec("sm120_sgl_kernel") is None:
        pytest.skip("needs sgl-kernel: pip install ./sgl-kernel")
    empty = torch.empty

    def poisoned(*args, **kwargs):
        tensor = empty(*args, **kwargs)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() and tensor.element_size() > 1 else tensor

    monkeypatch.setattr(torch, "empty", poisoned)


def run(case: Case, block_m: int, activation: Activation = SILU) -> torch.Tensor:
    configs = (TileConfig(ANY, MIXED, (({"BLOCK_M": block_m},),)),)
    return mixed_moe.fused_moe(case.x, case.w13, case.w2, case.weights, case.ids, activation, configs)


def case_of(num_tokens: int, **sizes) -> Case:
    return make_case("mxfp4_mxfp8", num_tokens, features=NATIVE, device=interpreter.DEVICE, **sizes)


@interpreter.kernel_test
@pytest.mark.parametrize("block_m", BLOCK_M)
def test_absent_pairs_and_several_steps(block_m: int) -> None:
    """Depths of more steps than stages, so that stages are written again."""
    case = case_of(8, num_experts=2, hidden=544, inter=32)
    case.ids[0] = -1
    case.ids[7, 0] = -1
    actual = run(case, block_m)
    assert_close(actual, expected(case), BOUND)
    assert not actual[0].any()


@interpreter.kernel_test
@pytest.mark.parametrize("block_m", BLOCK_M)
def test_sizes_that_no_block_divides(block_m: int) -> None:
    """Rows of scales begin at odd addresses, and an expert has more pairs than a block."""
    case = case_of(block_m + 3, num_experts=1, top_k=1, hidden=160, inter=96)
    assert_close(run(case, block_m), expected(case), BOUND)


@interpreter.kernel_test
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_clamped_swiglu_with_biases(dtype: torch.dtype) -> None:
    """GPT-OSS. Inputs are large enough that both clamps matter."""
    case = case_of(16, num_experts=2, bias=True, dtype=dtype)
    case.x *= 8
    wanted = expected(case, GPT_OSS_SWIGLU)
    assert (wanted - expected(case, Activation(1.702, 1.0))).norm() > 0.1 * wanted.norm()
    assert_close(run(case, 64, GPT_OSS_SWIGLU), wanted, BOUND)


def test_few_pairs_are_left_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed_moe.streamed, "fused_moe", lambda *args: args)
    case = make_case("mxfp4_mxfp8", 3, num_experts=16, features=NATIVE)
    configs = tile_configs_of(case.w13, case.w2, case.ids, NATIVE)
    args = (case.x, case.w13, case.w2, case.weights, case.ids, GPT_OSS_SWIGLU, configs, NATIVE)
    assert mixed_moe.fused_moe(*args, waves=None) == (*args, None, None, None)  # no waves, no adapters, no norm


def test_blocks_follow_the_pairs_of_an_expert(library_module: ModuleType) -> None:
    shapes = ((5760, 2880, True), (2880, 2880, True))
    need = Need("fused_moe", quant="mxfp4_mxfp8", shapes=shapes, experts=(128, 4, 1))
    configs = mixed_tile_configs(need, arch_by_name("sm_120")).by_shape[None]
    rows = {1: None, 47: None, 48: 64, 71: 64, 72: 128, 4096: 128}
    found = {each: config_for(configs, 32 * each) for each in rows}
    assert {
        each: config.tiles[0]["BLOCK_M"] if config.variant == MIXED else None for each, config in found.items()
    } == rows
    assert set(BLOCK_M) == set(library_module.MIXED_BLOCK_M)


@interpreter.in_two_parts
def test_in_interpreter(part: str) -> None:
    interpreter.run_file(__file__, part)
