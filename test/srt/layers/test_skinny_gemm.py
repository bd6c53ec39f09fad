"""Products with few rows against fp64, interpreted on a CPU and natively on a GPU; rows that do not depend on their
number; graphs."""

from __future__ import annotations

import interpreter
import pytest
import torch
import torch.nn.functional as F

from sglang.srt.layers.triton_ops import gemv, norm, pdl, skinny_gemm

DEVICE = interpreter.DEVICE
SMALL_TILE = {"BLOCK_N": 16, "BLOCK_K": 64, "AHEAD": 64, "num_warps": 4, "num_stages": 3}


def operands(rows: int, cols: int, size: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(cols)
    x = torch.randn(rows, size, generator=generator).to(DEVICE, dtype)
    w = (torch.randn(cols, size, generator=generator) * size**-0.5).to(DEVICE, dtype)
    return x, w


def followed_by_nan(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, with memory behind them of which nothing may be read."""
    memory = torch.full((x.numel() + 8192,), float("nan"), dtype=x.dtype, device=x.device)
    memory[: x.numel()] = x.flatten()
    return memory[: x.numel()].view(x.shape)


def assert_exact_but_for_rounding(out: torch.Tensor, exact: torch.Tensor, of_sums: float = 1e-5) -> None:
    """Sums are in fp32, to `of_sums` where they cancel, and rounded once."""
    rounding = {torch.float32: 1e-5, torch.float16: 2**-11, torch.bfloat16: 2**-8}[out.dtype]
    torch.testing.assert_close(out.double(), exact, rtol=1.01 * rounding, atol=of_sums)


@interpreter.kernel_test
@pytest.mark.pairs
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 5, 16])
@pytest.mark.parametrize(("cols", "size"), [(64, 256), (70, 208)])
def test_rows_against_fp64(rows: int, cols: int, size: int, dtype: torch.dtype) -> None:
    x, w = operands(rows, cols, size, dtype)
    bias = torch.randn(cols, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    exact = x.double() @ w.double().T
    x, w = followed_by_nan(x), followed_by_nan(w)
    assert_exact_but_for_rounding(skinny_gemm.skinny_gemm(x, w, SMALL_TILE), exact)
    out = skinny_gemm.skinny_gemm(x, w, SMALL_TILE, torch.float32, bias)
    assert out.dtype == torch.float32
    assert_exact_but_for_rounding(out, exact + bias.double())


@interpreter.kernel_test
@pytest.mark.parametrize("tile", skinny_gemm.TILES)
def test_tiles_against_fp64(tile: skinny_gemm.SkinnyTile) -> None:
    x, w = operands(3, 35, 528)
    exact = x.double() @ w.double().T
    out = skinny_gemm.skinny_gemm(followed_by_nan(x), followed_by_nan(w), tile, torch.float32)
    assert_exact_but_for_rounding(out, exact)


@pytest.mark.parametrize("shape", [(2048, 512), (4096, 12288), (151936, 4096), (151936, 8192)])
def test_a_tile_for_every_shape(shape: tuple[int, int]) -> None:
    assert skinny_gemm.tile_for(*shape) in skinny_gemm.TILES
    assert shape[0] <= skinny_gemm.WIDE_COLS or skinny_gemm.tile_for(*shape) == skinny_gemm.WIDE_TILE


@interpreter.kernel_test
def test_rows_of_a_wider_tensor_and_more_dims() -> None:
    x, w = operands(6, skinny_gemm.MIN_COLS, 512)
    wide = torch.cat([x, torch.full_like(x, float("nan"))], dim=1)[:, :512]
    expected = skinny_gemm.skinny_gemm(x, w)
    assert torch.equal(gemv.linear(wide, w), expected)
    assert torch.equal(gemv.linear(x.view(2, 3, 512), w), expected.view(2, 3, len(w)))


@interpreter.kernel_test
@pytest.mark.parametrize("tile", skinny_gemm.TILES)
def test_a_row_does_not_depend_on_the_others(tile: skinny_gemm.SkinnyTile) -> None:
    """Neither on their number nor on what they are: the draft tokens of a step change nothing about the tokens beside
    them."""
    x, w = operands(16, 33, 528)
    whole = skinny_gemm.skinny_gemm(x, w, tile, torch.float32)
    for rows in (1, 2, 7):
        others = torch.full_like(x[1:rows], 3.0e4)
        for i in (0, 5, 15):
            out = skinny_gemm.skinny_gemm(torch.cat([x[i : i + 1], others]), w, tile, torch.float32)
            assert torch.equal(out[0], whole[i])


@interpreter.kernel_test
@pytest.mark.parametrize(("rows", "cols", "size"), [(17, 2048, 512), (2, 2048, 96), (2, 2048, 520), (2, 2032, 512)])
def test_what_does_not_fit_goes_to_torch(rows: int, cols: int, size: int) -> None:
    x, w = operands(rows, cols, size)
    assert not skinny_gemm.supports(x, w) and not skinny_gemm.supports(x[:0], w)
    apart = torch.cat([x[:2], x[:2, :8]], dim=1)[:, :size]
    assert not skinny_gemm.supports(apart, w), "rows at multiples of 8"
    assert torch.equal(gemv.linear(x, w), F.linear(x, w))


SHAPES = [(6144, 4096), (4096, 12288), (34816, 5120), (151936, 1024), (5120, 2880), (2051, 7168)]


@pytest.mark.gpu
@pytest.mark.skipif(interpreter.INTERPRETED or not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dependent_launch", [False, True])
@pytest.mark.parametrize(("cols", "size"), SHAPES)
def test_published_shapes(cols: int, size: int, dependent_launch: bool) -> None:
    pdl.enable(dependent_launch)
    try:
        for dtype in (torch.bfloat16, torch.float16):
            x, w = operands(16, cols, size, dtype)
            exact = torch.cat([x.double() @ part.double().T for part in w.split(16384)], dim=1)
            whole = gemv.linear(x, w)
            for rows in range(2, 17):
                out = gemv.linear(x[:rows], w)
                assert_exact_but_for_rounding(out, exact[:rows], 2e-4)  # of 12,288 products about 1
                assert torch.equal(out, whole[:rows])
    finally:
        pdl.enable(False)


@pytest.mark.gpu
@pytest.mark.skipif(interpreter.INTERPRETED or not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("rows", [2, 4, 16])
def test_dependent_launches_keep_the_order_of_a_graph(rows: int) -> None:
    """Every product reads what the norm before it wrote, which reads what the product before that wrote."""
    x, w = operands(rows, 4096, 4096)
    residual, weight = torch.randn_like(x), torch.ones(4096, device=DEVICE).bfloat16()

    def chain() -> torch.Tensor:
        h, r = x.clone(), residual.clone()
        for _ in range(20):
            h, r = norm.fused_add_rmsnorm(h, r, weight, 1e-6)
            h = skinny_gemm.skinny_gemm(skinny_gemm.skinny_gemm(h, w), w)
        return h

    expected = chain()
    pdl.enable(True)
    try:
        chain()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = chain()
        for _ in range(50):
            graph.replay()
            assert torch.equal(result, expected)
    finally:
        pdl.enable(False)


@interpreter.in_two_parts
def test_in_interpreter(part: str) -> None:
    interpreter.run_file(__file__, part)
