"""Large products by torch's scaled product: by row on this CPU's, in blocks on one that holds callers to the layout."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from srt.layers.quantization import test_quant_linear
from srt.layers.quantization.test_quant_linear import (
    WIDENS,
    activations,
    assert_close,
    copy_of,
    expected,
    weight_of,
)

from sglang.srt.configs.quant_scheme import Scheme
from sglang.srt.hardware.arch import arch_by_name
from sglang.srt.kernels.spec import Need
from sglang.srt.kernels.tile_configs import TileConfigs
from sglang.srt.layers.attention import flash_varlen
from sglang.srt.layers.quantization import reference, scaled_mm
from sglang.srt.layers.quantization.activations import QuantizedActivations
from sglang.srt.layers.quantization.linear_weight import LinearWeight
from sglang.srt.layers.triton_ops import linear_tiles
from sglang.srt.layers.triton_ops.linear_products import PackedWeight, pack
from sglang.srt.managers.scheduler import scheduler_setup

ROWS = 18
"""From how many on the tests hand over."""
HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"


def rounded(x: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, torch.Tensor]:
    """What `quantize_activation` gives, by its reference."""
    group = {"tensor": (0, 0), "token": (1, 0), "group128": (1, 128)}[scheme.activation or ""]
    made = reference.quantize(x, dataclasses.replace(scheme, group=group))
    return made.data, made.scale


def tile_configs_of(weight: LinearWeight, has_bias: bool) -> TileConfigs:
    shape = (*weight.shape, has_bias)
    made = Need("linear", quant=weight.scheme.name, shapes=(shape,))
    return linear_tiles.library_tile_configs(made, WIDENS).by_shape[shape]


@pytest.fixture(autouse=True)
def early(monkeypatch: pytest.MonkeyPatch) -> None:
    def operand(x: Any, matrix: PackedWeight) -> tuple[torch.Tensor, torch.Tensor, int, None]:
        if isinstance(x, QuantizedActivations):
            return x.data, x.scale, 1, None
        fixed = matrix.weight.input_scale
        if fixed is not None:
            return (x.float() / fixed).to(torch.float8_e4m3fn), fixed, 0, None
        return *rounded(x, dataclasses.replace(matrix.weight.scheme, activation=matrix.product.activation)), 1, None

    monkeypatch.setattr(test_quant_linear, "DEVICE", DEVICE)
    monkeypatch.setattr(linear_tiles, "SCALED_MM_ROWS", ROWS)
    scaled_mm._problem.cache_clear()
    if not HAS_GPU:
        monkeypatch.setattr(scaled_mm, "operand", operand)


def blockwise(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    kind_a: Any,
    scale_b: torch.Tensor,
    kind_b: Any,
    bias: torch.Tensor | None = None,
    output_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """What cuBLAS's 1 x 128 by 128 x 128 product demands, and computes."""
    (m, k), n = a.shape, b.shape[1]
    assert (kind_a, kind_b) == (F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128) and bias is None
    blocks = -(-k // 128)
    room = -(-blocks // 4) * 4
    assert a.stride() == (k, 1) and b.stride() == (1, k) and k % 16 == n % 16 == 0
    assert scale_a.shape == (m, blocks) and scale_a.stride() == (1, m) and m % 4 == 0, "columns at 16 bytes"
    assert scale_b.shape == (room, -(-n // 128)) and scale_b.stride() == (1, room)
    left = a.float() * scale_a.repeat_interleave(128, 1)[:, :k]
    right = b.float() * scale_b.repeat_interleave(128, 0).repeat_interleave(128, 1)[:k, :n]
    return (left @ right).to(output_dtype)


@pytest.mark.parametrize("name", ["fp8_channel", "fp8_tensor", "fp8_tensor_static", "fp8_block"])
def test_many_rows_are_the_librarys(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = (160,) if name == "fp8_block" else (96, 64)
    weight, x = weight_of(name, parts, 384), activations(ROWS, 384)
    held = pack(copy_of(weight), WIDENS)
    want = expected(x, weight, held, rounded=True)
    if name == "fp8_block" and not HAS_GPU:
        monkeypatch.setattr(F, "scaled_mm", blockwise)
    monkeypatch.setattr(scaled_mm, "packed_linear", lambda matrix, configs: None)
    run = scaled_mm.quantized_linear(copy_of(weight), WIDENS, tile_configs_of(weight, False))
    assert_close(run(x, None), want, 4e-3)
    assert torch.equal(run(x.view(3, 6, -1), None).view(ROWS, -1), run(x, None))
    if name != "fp8_tensor_static":
        form = "group128" if name == "fp8_block" else "token"
        data, scale = rounded(x, dataclasses.replace(weight.scheme, activation=form))
        assert_close(run(QuantizedActivations(torch.full_like(x, torch.nan), data, scale, form), None), want, 4e-3)
    if name != "fp8_block":
        bias = torch.randn(160, generator=torch.Generator().manual_seed(3)).bfloat16().to(DEVICE)
        assert_close(run(x, bias), want + bias.float(), 4e-3)


@pytest.mark.parametrize(
    ("name", "rows", "columns", "tokens", "dtype", "has_bias"),
    [
        ("fp8_channel", 32, 64, ROWS - 1, None, False),
        ("fp8_channel", 32, 64, ROWS, torch.float32, False),
        ("fp8_channel", 40, 64, ROWS, None, False),
        ("fp8_channel", 32, 72, ROWS, None, False),
        ("fp8_block", 32, 128, ROWS, None, True),
        ("fp8_block", 32, 192, ROWS, None, False),
    ],
    ids=["few rows", "logits", "odd rows", "odd columns", "a bias on blocks", "part of a block"],
)
def test_the_rest_is_tritons(
    name: str,
    rows: int,
    columns: int,
    tokens: int,
    dtype: torch.dtype | None,
    has_bias: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(scaled_mm, "packed_linear", lambda matrix, configs: lambda *call: calls.append(call))
    monkeypatch.setattr(F, "scaled_mm", None)
    x, bias = activations(tokens, columns), torch.ones(rows, device=DEVICE) if has_bias else None
    weight = weight_of(name, (rows,), columns)
    scaled_mm.quantized_linear(weight, WIDENS, tile_configs_of(weight, has_bias))(x, bias, dtype)
    assert len(calls) == 1 and calls[0][0] is x and calls[0][1] is bias and calls[0][2] is dtype


def need(scheme: str, dtype: str = "bfloat16") -> Need:
    return Need("linear", q_dtype=dtype, quant=scheme)


def test_a_library_that_is_right_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype in ("bfloat16", "float16"):
        assert scaled_mm.problem_of(need("fp8_channel", dtype)) == scaled_mm.problem_of(need("fp8_tensor", dtype)) == ""
    if not HAS_GPU:
        monkeypatch.setattr(F, "scaled_mm", blockwise)
    assert scaled_mm.problem_of(need("fp8_block")) == ""


def test_a_library_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **more: Any) -> torch.Tensor:
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasLtMatmulAlgoGetHeuristic`\nand a trace")

    monkeypatch.setattr(F, "scaled_mm", fails)
    said = scaled_mm.problem_of(need("fp8_channel"))
    assert said.startswith("torch.nn.functional.scaled_mm fails here: CUBLAS_STATUS_NOT_SUPPORTED") and "\n" not in said


@pytest.mark.parametrize("mistake", ["padding", "order", "weights"])
def test_a_library_that_reads_scales_wrongly_is_noticed(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch 2.9 did where four did not divide the blocks of K, and other confusions."""

    def wrong(a: Any, b: Any, scale_a: Any, kind_a: Any, scale_b: Any, kind_b: Any, **more: Any) -> torch.Tensor:
        if mistake == "padding":
            blocks = -(-a.shape[1] // 128)
            flat = scale_b.t().flatten()[: blocks * scale_b.shape[1]].view(-1, blocks)
            scale_b = F.pad(flat, (0, -blocks % 4)).t()
        elif mistake == "order":
            scale_a = scale_a.flip(0).t().contiguous().t()
        else:
            scale_b = scale_b.t().roll(1, 0).t()
        return blockwise(a, b, scale_a, kind_a, scale_b, kind_b, **more)

    monkeypatch.setattr(F, "scaled_mm", wrong)
    assert "is wrong here" in scaled_mm.problem_of(need("fp8_block"))


def test_an_old_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(F, "scaled_mm")
    assert "has no torch.nn.functional.scaled_mm (2.10 has)" in scaled_mm.problem_of(need("fp8_channel"))


def test_only_gpus_that_might_choose_the_library_try_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaled_mm, "problem_of", lambda need: f"tried {need.op}")
    monkeypatch.setattr(flash_varlen, "problem_of", lambda need: f"tried {need.op}")
    linear, image = need("fp8_channel"), Need("prefill_attention", 72, 72)
    for product, tries in (("h200", "tried linear"), ("rtx-pro-6000-server", "")):
        probe = scheduler_setup._library_probe(arch_by_name(product))
        assert probe is not None
        assert (probe(linear), probe(image)) == (tries, "tried prefill_attention")
    assert scheduler_setup._library_probe(arch_by_name("cpu")) is None
