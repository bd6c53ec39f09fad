"""Experts and quantized products on a GPU that has less room than the ledger says: interpreted, and natively.

The kernels are real; one of them refuses tiles as Triton would, with its own error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import interpreter
import pytest
import torch
from triton.runtime.errors import OutOfResources

from sglang.srt.configs.activation import SILU
from sglang.srt.hardware.arch import arch_by_name
from sglang.srt.kernels import launch
from sglang.srt.kernels.ledger_file import tile_key
from sglang.srt.kernels.tile_configs import ANY, TileConfig
from sglang.srt.layers.moe.fused_moe_triton import fused_moe as moe
from sglang.srt.layers.moe.fused_moe_triton import kernels
from sglang.srt.layers.moe.fused_moe_triton import tiles as moe_tiles
from sglang.srt.layers.moe.fused_moe_triton.tiles import TILES, MoeTiles, tile
from sglang.srt.layers.triton_ops import linear_products, linear_tiles
from sglang.srt.layers.triton_ops.linear_products import many_rows, pack, packed_linear, quantized_linear
from srt.layers.moe.moe_harness import Case, assert_close, expected, make_case, tile_configs_of
from srt.layers.quantization.test_quant_linear import activations, weight_of

ARCH = arch_by_name("sm_90")
SCHEMES = [None, "fp8_channel", "fp8_block", "int4_g32"]
Launch = Mapping[str, Any]


class Limited:
    """A kernel for tiles that fit; what it launched and refused is kept by BLOCK_M."""

    def __init__(self, kernel: Any, fits: Callable[[Launch], bool]) -> None:
        self.kernel, self.fits = kernel, fits
        self.launched: list[int] = []
        self.refused: list[int] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def run(*args: Any, **named: Any) -> None:
            if not self.fits(named):
                self.refused.append(named["BLOCK_M"])
                raise OutOfResources(147456, 101376, "shared memory")
            self.launched.append(named["BLOCK_M"])
            self.kernel[grid](*args, **named)

        return run


def at_most(rows: int) -> Callable[[Launch], bool]:
    return lambda named: named["BLOCK_M"] <= rows


def forget() -> None:
    """As a new process, but for the file."""
    launch._step_downs.clear()
    launch._fallbacks.clear()


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("SGLANG_CACHE_DIR", str(tmp_path))
    forget()
    yield tmp_path
    forget()


def limit(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, fits: Callable[[Launch], bool]) -> Limited:
    limited = Limited(getattr(module, name), fits)
    monkeypatch.setattr(module, name, limited)
    return limited


def experts(scheme: str | None, num_tokens: int = 40) -> Case:
    """20 pairs an expert with 40 tokens: the row of 32."""
    return make_case(scheme, num_tokens, 4, 2, hidden=256, inter=128, device=interpreter.DEVICE)


def run(case: Case, tiles: MoeTiles | None = None) -> torch.Tensor:
    configs = tile_configs_of(case.w13, case.w2, case.ids, tiles=tiles)
    return moe.fused_moe(case.x, case.w13, case.w2, case.weights, case.ids, SILU, configs)


def key_of(tiles: MoeTiles) -> str:
    return f"{tile_key(tiles.gate_up)} / {tile_key(tiles.down)}"


@interpreter.kernel_test
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", ["gate_up_kernel", "down_kernel"])
def test_experts_step_down_with_a_new_grouping(scheme: str | None, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, kind = experts(scheme), moe.product_for(experts(scheme).w13).tile_kind
    groupings: list[int] = []
    align = moe.align
    monkeypatch.setattr(
        moe, "align", lambda ids, num, block_m: (groupings.append(block_m), align(ids, num, block_m))[1]
    )
    limited = limit(monkeypatch, kernels, name, at_most(16))
    first = run(case)
    assert_close(first, expected(case), case.bound)
    assert torch.equal(run(case), first)
    assert groupings == [32, 16, 16] and limited.refused == [32] and limited.launched == [16, 16]
    (step,) = launch.step_downs()
    assert step == {
        "op": f"fused_moe/{scheme or 'bf16'}",
        "failed": key_of(TILES[kind][1]),
        "used": key_of(TILES[kind][0]),
        "reason": str(OutOfResources(147456, 101376, "shared memory")),
    }
    case.x[3] *= 2  # the tiles it stepped down to are used for what comes now, not for what was
    assert_close(run(case), expected(case), case.bound)


@interpreter.kernel_test
def test_experts_start_where_an_earlier_process_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    case = experts("fp8_channel")
    limited = limit(monkeypatch, kernels, "gate_up_kernel", at_most(16))
    run(case)
    forget()
    assert_close(run(case), expected(case), case.bound)
    assert limited.refused == [32] and len(launch.step_downs()) == 1
    other = experts("fp8_block")
    run(other)
    assert limited.refused == [32, 32], "another scheme is another kernel"


@interpreter.kernel_test
def test_tuned_tiles_step_down_to_those_of_every_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    case = experts("fp8_channel")
    tuned = MoeTiles(float("inf"), tile(32, 32, 256, 1, 4, 5), tile(32, 64, 256, 1, 4, 5))
    limited = limit(monkeypatch, kernels, "down_kernel", lambda named: named["BLOCK_K"] <= 128)
    assert_close(run(case, tuned), expected(case), case.bound)
    assert limited.refused == [32] and limited.launched == [32]
    assert [(s["failed"], s["used"]) for s in launch.step_downs()] == [(key_of(tuned), key_of(TILES["scaled"][1]))]
    run(case)
    assert len(launch.step_downs()) == 1, "the table's own tiles launch"


@interpreter.kernel_test
def test_experts_with_no_tile_left_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    limited = limit(monkeypatch, kernels, "gate_up_kernel", at_most(8))
    with pytest.raises(OutOfResources, match="101376"):
        run(experts(None))
    assert limited.refused == [32, 16, 16]


@interpreter.kernel_test
@pytest.mark.parametrize("scheme", ["fp8_channel", "fp8_block", "int4_g32", "nvfp4"])
def test_quantized_products_step_down(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """K is split as well: more and smaller tiles arrive at the same counters."""
    held, x = pack(weight_of(scheme, (128, 128), 1280), ARCH), activations(40, 1280)
    bias = torch.linspace(-1, 1, 256, device=interpreter.DEVICE).bfloat16()
    first = next(row.tile for row in linear_tiles.TILES[held.product.kind] if row.max_rows >= 40)
    candidates = [first, *linear_tiles.smaller_tiles(first, held.product.kind)[:-1]]
    configs = (TileConfig(ANY, linear_tiles.MANY, tuple((candidate,) for candidate in candidates)),)
    monkeypatch.setattr(linear_products, "num_splits", lambda *sizes: 2)
    wanted = many_rows(x, held, candidates[-1], bias)
    limited = limit(monkeypatch, linear_products, "tiles_kernel", at_most(16))
    for _ in range(2):
        assert torch.equal(packed_linear(held, configs)(x, bias), wanted) and not held.arrivals.any()
    assert limited.refused == [64, 32] and limited.launched == [16, 16]
    assert [(s["op"], s["failed"], s["used"]) for s in launch.step_downs()] == [
        (f"linear/{scheme}", tile_key(candidates[i]), tile_key(candidates[i + 1])) for i in range(2)
    ]
    forget()
    assert torch.equal(packed_linear(held, configs)(x, bias), wanted)
    assert limited.refused == [64, 32] and len(launch.step_downs()) == 2, "recalled"


@interpreter.kernel_test
def test_a_layer_steps_down_and_a_forced_tile_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = weight_of("fp8_channel", (64,), 256)
    layer = quantized_linear(weight, ARCH, linear_tiles.tile_configs_of(weight.scheme, (64, 256, False), ARCH))
    x = activations(20, 256)
    wanted = layer(x)
    limited = limit(monkeypatch, linear_products, "tiles_kernel", at_most(16))
    torch.testing.assert_close(layer(x), wanted, rtol=2e-2, atol=2e-2)
    assert (limited.refused, limited.launched) == ([32], [16])
    held = pack(weight_of("fp8_channel", (64,), 256), ARCH)
    with pytest.raises(OutOfResources):
        many_rows(x, held, linear_tiles.TILES["scaled"][-1].tile)
    assert limited.refused == [32, 128] and len(launch.step_downs()) == 1


@pytest.mark.parametrize("table", [moe_tiles.TILES, moe_tiles.WIDE_TILES])
def test_smaller_tiles_of_experts(table: Mapping[str, tuple[MoeTiles, ...]]) -> None:
    for kind, rows in table.items():
        everybodys = moe_tiles.TILES[kind]
        for row in rows:
            smaller = moe_tiles.smaller_tiles(row, kind)
            heights = [s.gate_up["BLOCK_M"] for s in (row, *smaller)]
            assert row not in smaller and all(s in everybodys for s in smaller[:-1])
            assert heights == sorted(heights, reverse=True), "a grouping by more tokens is never stepped down to"
            for part in ("gate_up", "down"):
                assert getattr(smaller[-1], part) == getattr(everybodys[0], part) | {"num_stages": 2}


@pytest.mark.parametrize("table", [linear_tiles.TILES, linear_tiles.WIDE_TILES])
def test_smaller_tiles_of_quantized_products(table: Mapping[str, tuple[linear_tiles.LinearTile, ...]]) -> None:
    for kind, rows in table.items():
        for row in rows:
            candidates = (row.tile, *linear_tiles.smaller_tiles(row.tile, kind))
            sizes = [candidate["BLOCK_M"] * candidate["BLOCK_N"] for candidate in candidates]
            assert sizes == sorted(sizes, reverse=True) and candidates.count(row.tile) == 1
            assert candidates[-1] == linear_tiles.TILES[kind][0].tile | {"num_stages": 2}


@pytest.mark.gpu
@pytest.mark.skipif(interpreter.INTERPRETED or not torch.cuda.is_available(), reason="needs a GPU")
def test_a_failure_during_capture_leaves_a_graph_that_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    case = experts("fp8_channel")
    for tiles in TILES["scaled"][:2]:
        run(case, tiles)  # compiled before the capture, as by the model runner
    forget()
    limited = limit(monkeypatch, kernels, "down_kernel", at_most(16))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(case)
    case.x.copy_(case.x.flip(0))
    graph.replay()
    assert limited.refused == [32]
    assert_close(out, expected(case), case.bound)


@pytest.mark.thorough
def test_in_interpreter() -> None:
    interpreter.run_file(__file__, interpreter.EVERY_CASE)
