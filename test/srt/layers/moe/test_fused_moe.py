"""The experts' products of every scheme against dequantized fp32, interpreted on a CPU and natively on a GPU.

Scratch memory holds NaN before every test, so that nothing that was never written can go unnoticed.
"""

from __future__ import annotations

import interpreter
import pytest
import torch
from pairs import some, some_of

from sglang.srt.configs.activation import GPT_OSS_SWIGLU, SILU, Activation
from sglang.srt.configs.quant_scheme import SCHEMES
from sglang.srt.hardware.arch import current_arch
from sglang.srt.layers.moe.fused_moe_triton import tiles as tiles_data
from sglang.srt.layers.moe.fused_moe_triton.fused_moe import fused_moe
from sglang.srt.layers.moe.fused_moe_triton.tiles import MoeTiles, few_pairs, tile
from srt.layers.moe.moe_harness import NATIVE, Case, assert_close, expected, make_case, tile_configs_of

DEVICE = interpreter.DEVICE
HAS_NATIVE = interpreter.ON_CPU or "block_scaled_mma" in current_arch().features
PLANES = ("int4_g32", "int4_g64", "int4_g128", "mxfp4", "mxfp4_mxfp8", "nvfp4")
LAYOUTS = [
    *((None, frozenset()), *((name, frozenset()) for name in SCHEMES if SCHEMES[name].bits == 8 or name in PLANES)),
    *((name, NATIVE) for name in ("mxfp4_mxfp8", "nvfp4")),
]
"""(scheme, features of the GPU that its weights were repacked for)."""
OF_EACH_KIND = [
    layout
    for layout in LAYOUTS
    if layout[0] in (None, "fp8_block", "int8_channel", "int4_g64", "int8_g32", "mxfp4", "nvfp4")
]
"""One of each way to store numbers: `make test` has every scheme in `test_grouped`, and these elsewhere."""
HALF_EXACT = 6e-3
"""What rounding to bfloat16 between the steps explains."""


@pytest.fixture(autouse=True)
def poisoned_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty

    def poisoned(*args, **kwargs):
        tensor = empty(*args, **kwargs)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() and tensor.element_size() > 1 else tensor

    monkeypatch.setattr(torch, "empty", poisoned)


def small(block_m: int = 16, block_n: int = 32, block_k: int = 64) -> MoeTiles:
    one = tile(block_m, block_n, block_k, 2, 4, 2)
    return MoeTiles(float("inf"), one, one)


def run(
    case: Case,
    tiles: MoeTiles | None = None,
    activation: Activation = SILU,
    features: frozenset[str] = frozenset(),
) -> torch.Tensor:
    configs = tile_configs_of(case.w13, case.w2, case.ids, features, tiles)
    return fused_moe(case.x, case.w13, case.w2, case.weights, case.ids, activation, configs, features)


def bound_of(scheme: str | None) -> float:
    """Where a sum that differs in its last bit is rounded to the next e2m1, the result differs by more."""
    return 1e-2 if scheme == "nvfp4" else HALF_EXACT


def group_of(scheme: str | None) -> int:
    """Columns of a row that share a scale, which sizes must be multiples of."""
    rows, cols = SCHEMES[scheme].group if scheme else (0, 0)
    return cols if rows == 1 else 0


def needs(features: frozenset[str]) -> None:
    if features and not HAS_NATIVE:
        pytest.skip("needs block-scaled matrix instructions")


@interpreter.kernel_test
@pytest.mark.parametrize("scheme", some(["int4_g32", "mxfp4"], ["mxfp4"]))
def test_two_strips_in_a_step(scheme: str) -> None:
    """Of 320 columns the second step has half a strip, and none behind it."""
    case = make_case(scheme, 3, num_experts=2, top_k=1, hidden=320, inter=64, bias=scheme == "mxfp4", device=DEVICE)
    assert_close(run(case, small(block_n=64, block_k=256)), expected(case), HALF_EXACT)


@interpreter.kernel_test
@pytest.mark.parametrize(("scheme", "features"), LAYOUTS)
def test_grouped(scheme: str | None, features: frozenset[str]) -> None:
    needs(features)
    case = make_case(scheme, 24, hidden=256, inter=128, features=features, device=DEVICE)
    case.ids[0] = -1
    case.ids[12, 0] = -1
    actual = run(case, small(block_k=128))
    assert actual.shape == case.x.shape and actual.dtype == case.x.dtype
    assert_close(actual, expected(case), bound_of(scheme))
    assert not actual[0].any()


@interpreter.kernel_test
@pytest.mark.parametrize(("scheme", "features"), some_of(LAYOUTS, OF_EACH_KIND))
def test_few_pairs_keep_activations_in_16_bits(scheme: str | None, features: frozenset[str]) -> None:
    inter = max(32, group_of(scheme))
    case = make_case(scheme, 3, num_experts=16, hidden=128, inter=inter, features=features, device=DEVICE)
    case.ids[1] = -1
    case.ids[2, 1] = -1
    assert few_pairs(case.ids.numel(), 16)
    actual = run(case)
    assert_close(actual, expected(case, rounded=False), HALF_EXACT)
    assert not actual[1].any()


@interpreter.kernel_test
@pytest.mark.parametrize(
    ("scheme", "hidden", "inter", "dtype", "tall"),
    some_of(
        [
            ("int4_g32", 256, 128, torch.bfloat16, False),
            ("int4_g32", 160, 96, torch.float16, False),
            ("int4_g64", 320, 192, torch.bfloat16, False),
            ("int4_g128", 256, 128, torch.bfloat16, True),
            ("int4_g128", 384, 128, torch.float16, False),
        ],
        {("int4_g32", 160, 96, torch.float16, False), ("int4_g128", 256, 128, torch.bfloat16, True)},
    ),
)
def test_zero_points(scheme: str, hidden: int, inter: int, dtype: torch.dtype, tall: bool) -> None:
    """Grouped, also with the weights as the tall operand, and pair by pair; of sizes that blocks divide and do not."""
    sizes = {"hidden": hidden, "inter": inter, "dtype": dtype, "device": DEVICE, "zero_points": True}
    case = make_case(scheme, 8, **sizes)
    case.ids[0] = -1
    case.ids[5, 0] = -1
    tiles = small(16, 64, 128) if tall else small(block_k=128)
    actual = run(case, tiles, features=frozenset({"wgmma"} if tall else ()))
    assert_close(actual, expected(case), HALF_EXACT)
    assert not actual[0].any()
    few = make_case(scheme, 2, num_experts=12, **sizes)
    few.ids[1, 1] = -1
    assert_close(run(few), expected(few, rounded=False), HALF_EXACT)


@interpreter.kernel_test
@pytest.mark.parametrize("scheme", some([None, "fp8_block"], ["fp8_block"]))
def test_weights_loaded_early_change_no_bit(scheme: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """All tiles of all choices, some, and none; the last tile of a choice is cut short."""
    case = make_case(scheme, 2, num_experts=12, hidden=32, inter=640, bias=True, device=DEVICE)
    case.ids[1, 0] = -1
    results = []
    for early in (0, 4, 16):
        monkeypatch.setitem(tiles_data.EARLY_TILES, "plain" if scheme is None else "group128", early)
        results.append(run(case))
    assert_close(results[0], expected(case, rounded=False), HALF_EXACT)
    assert torch.equal(results[1], results[0]) and torch.equal(results[2], results[0])


@interpreter.kernel_test
@pytest.mark.parametrize(("scheme", "features"), some_of(LAYOUTS, OF_EACH_KIND))
def test_sizes_that_no_block_divides(scheme: str | None, features: frozenset[str]) -> None:
    needs(features)
    hidden, inter = {64: (320, 64), 128: (384, 128)}.get(group_of(scheme), (160, 96))
    case = make_case(scheme, 20, hidden=hidden, inter=inter, features=features, device=DEVICE)
    assert_close(run(case, small(block_n=64, block_k=128)), expected(case), bound_of(scheme))
    few = make_case(scheme, 1, num_experts=8, hidden=hidden, inter=inter, features=features, device=DEVICE)
    assert_close(run(few), expected(few, rounded=False), HALF_EXACT)


@interpreter.kernel_test
@pytest.mark.parametrize("dtype", some([torch.bfloat16, torch.float16], [torch.bfloat16]))
def test_large_blocks_widen_a_plane_at_a_time(dtype: torch.dtype) -> None:
    case = make_case("mxfp4", 20, hidden=160, inter=96, dtype=dtype, device=DEVICE)
    assert_close(run(case, small(32, 32, 128)), expected(case), HALF_EXACT)


@interpreter.kernel_test
@pytest.mark.parametrize(
    "scheme",
    some([None, "fp8_block", "fp8_channel", "int8_channel", "int4_g32", "mxfp4"], [None, "fp8_block", "int4_g32"]),
)
def test_weights_as_the_tall_operand(scheme: str | None) -> None:
    """As on GPUs with wgmma."""
    case = make_case(scheme, 10, hidden=256, inter=128, device=DEVICE)
    actual = run(case, small(16, 64, 128), features=frozenset({"wgmma"}))
    assert_close(actual, expected(case), HALF_EXACT)


@interpreter.kernel_test
@pytest.mark.parametrize(
    ("scheme", "features", "few"),
    some_of(
        [
            (*layout, few)
            for layout in ((None, frozenset()), ("mxfp4", frozenset()), ("mxfp4_mxfp8", NATIVE))
            for few in (True, False)
        ],
        [(None, frozenset(), False), ("mxfp4", frozenset(), True), ("mxfp4_mxfp8", NATIVE, False)],
    ),
)
def test_clamped_swiglu_with_biases(scheme: str | None, features: frozenset[str], few: bool) -> None:
    """GPT-OSS. Inputs are large enough that both clamps matter."""
    needs(features)
    num_tokens, num_experts = (2, 12) if few else (16, 4)
    case = make_case(scheme, num_tokens, num_experts, features=features, bias=True, device=DEVICE)
    case.x *= 8
    wanted = expected(case, GPT_OSS_SWIGLU, rounded=not few)
    assert (wanted - expected(case, Activation(1.702, 1.0), rounded=not few)).norm() > 0.1 * wanted.norm()
    assert_close(run(case, None if few else small(), GPT_OSS_SWIGLU), wanted, HALF_EXACT)


@interpreter.kernel_test
def test_static_activation_scale_is_one_for_all_experts() -> None:
    case = make_case("fp8_tensor", 24, static=True, device=DEVICE)
    assert case.w13.input_scale.shape == (1,)
    assert_close(run(case, small()), expected(case), HALF_EXACT)


@interpreter.kernel_test
@pytest.mark.parametrize("scheme", some([None, "int4_g32", "mxfp4", "fp8_channel"], [None, "mxfp4"]))
def test_float16(scheme: str | None) -> None:
    case = make_case(scheme, 12, dtype=torch.float16, device=DEVICE)
    assert_close(run(case, small()), expected(case), 2e-3)
    few = make_case(scheme, 2, 12, dtype=torch.float16, device=DEVICE)
    assert_close(run(few), expected(few, rounded=False), 2e-3)


@interpreter.kernel_test
@pytest.mark.parametrize("scheme", some([None, "fp8_block", "int4_g32"], ["int4_g32"]))
def test_all_tokens_at_one_expert_and_none(scheme: str | None) -> None:
    case = make_case(scheme, 40, 8, 1, inter=128, device=DEVICE)
    case.ids.fill_(3)
    assert_close(run(case), expected(case), case.bound)
    case.ids.fill_(-1)
    assert not run(case).any()
    empty = Case(case.x[:0], case.w13, case.w2, case.weights[:0], case.ids[:0])
    assert run(empty).shape == (0, 128)


@interpreter.kernel_test
def test_a_row_does_not_depend_on_the_other_rows() -> None:
    """Of the grouped kernels, schemes with an activation scale a row."""
    case = make_case("fp8_channel", 24, device=DEVICE)
    whole = run(case, small())
    part = Case(case.x[:5], case.w13, case.w2, case.weights[:5], case.ids[:5])
    assert torch.equal(run(part, small()), whole[:5])


@pytest.mark.gpu
@pytest.mark.skipif(interpreter.INTERPRETED or not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("scheme", "features"), LAYOUTS)
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 16, 300, 16384])
def test_tiles_of_a_server(scheme: str | None, features: frozenset[str], num_tokens: int, wide: bool) -> None:
    """Default tiles, those that fit every GPU and those of this one, over the batch sizes of a server."""
    needs(features)
    own = current_arch().features if wide else frozenset()
    case = make_case(scheme, num_tokens, 32, 4, 1024, 384, features, device=DEVICE)
    case.ids[num_tokens // 2, 0] = -1
    actual = run(case, features=own)
    few = few_pairs(case.ids.numel(), 32)
    assert_close(actual, expected(case, rounded=not few), case.bound)


@pytest.mark.gpu
@pytest.mark.skipif(interpreter.INTERPRETED or not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("scheme", [None, "fp8_block", "int4_g32"])
@pytest.mark.parametrize("num_tokens", [2, 200])
def test_in_a_cuda_graph(scheme: str | None, num_tokens: int) -> None:
    case = make_case(scheme, num_tokens, 16, 2, 256, 128, device=DEVICE)
    run(case)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(case)
    case.x.copy_(case.x.flip(0))
    case.ids.copy_(case.ids.flip(0))
    graph.replay()
    few = few_pairs(case.ids.numel(), 16)
    assert_close(out, expected(case, rounded=not few), case.bound)


@interpreter.in_two_parts
def test_in_interpreter(part: str) -> None:
    interpreter.run_file(__file__, part)
