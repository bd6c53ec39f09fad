"""Products with a quantized weight against its own dequantized values, interpreted on a CPU and natively on a GPU.

`make thorough` has three sizes that no block divides of every scheme: `make test` has them of each kind of product, and
one of the others."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

import interpreter
import pytest
import torch
import triton
import triton.language as tl
from pairs import some_of

from sglang.srt.configs.quant_rules import ModuleQuant
from sglang.srt.configs.quant_scheme import SCHEMES
from sglang.srt.hardware.arch import ArchTraits, arch_by_name
from sglang.srt.kernels.tile_configs import config_for
from sglang.srt.layers.quantization import reference
from sglang.srt.layers.quantization.dense import shifted
from sglang.srt.layers.quantization.linear_weight import LinearWeight, QuantizedProduct, held_scheme
from sglang.srt.layers.triton_ops import linear_products, linear_tiles
from sglang.srt.layers.triton_ops.linear_products import PackedWeight, few_rows, many_rows, pack, quantized_linear
from sglang.srt.layers.triton_ops.scaled_dot import E4M3_OF_E2M1, _e4m3_of_e2m1

DEVICE = interpreter.DEVICE
WIDENS, NATIVE = arch_by_name("sm_90"), arch_by_name("sm_120")
STATIC = ("fp8_tensor_static", "nvfp4")
NAMES = (*SCHEMES, "fp8_tensor_static")
SMALL = {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 128, "GROUP_M": 2, "num_warps": 4, "num_stages": 2}


def weight_of(name: str, parts: tuple[int, ...], cols: int) -> LinearWeight:
    """Modules of these rows, of different magnitudes, stacked as the loader does it."""
    quant = ModuleQuant(name.removesuffix("_static"), "compressed-tensors", name in STATIC)
    scheme, generator = held_scheme(quant), torch.Generator().manual_seed(cols)
    made = []
    for i, rows in enumerate(parts):
        w = torch.randn(rows, cols, generator=generator) * cols**-0.5 * (1 + i)
        made.append(reference.quantize(w, scheme))
        if quant.format.group == (0, 0):
            one = reference.quantize(w, quant.format)
            made[-1] = reference.Quantized(one.data, one.scale.repeat(rows))
    data = torch.cat([m.data.view(torch.uint8) for m in made]).view(made[0].data.dtype)
    scale = torch.cat([m.scale.view(torch.uint8) for m in made]).view(made[0].scale.dtype)
    factor = None
    if scheme.global_scale:
        factor = torch.cat([m.global_scale.expand(rows) for m, rows in zip(made, parts, strict=True)])
    input_scale = torch.tensor([0.01 if scheme.global_scale else 0.02]) if name in STATIC else None
    tensors = {"data": data, "scale": scale, "row_factor": factor, "input_scale": input_scale}
    held = {key: None if tensor is None else tensor.contiguous().to(DEVICE) for key, tensor in tensors.items()}
    return LinearWeight(scheme=scheme, **held)


def copy_of(weight: LinearWeight) -> LinearWeight:
    return dataclasses.replace(weight, data=weight.data.clone(), scale=weight.scale.clone())


def runs_here(arch: ArchTraits) -> bool:
    """The interpreter runs everything."""
    packed = "block_scaled_mma" in arch.features
    return interpreter.ON_CPU or not packed or torch.cuda.get_device_capability() >= (10, 0)


def activations(rows: int, cols: int) -> torch.Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(rows)).bfloat16().to(DEVICE)


def linear_of(weight: LinearWeight, arch: ArchTraits) -> QuantizedProduct:
    configs = linear_tiles.tile_configs_of(weight.scheme, (*weight.shape, False), arch)
    return quantized_linear(copy_of(weight), arch, configs)


def tile_for(held: PackedWeight, rows: int) -> Mapping[str, int]:
    """Of the table, also for so few rows that they need none."""
    table = linear_tiles.tile_rows(linear_tiles.table_of(held.product), held.arch.features)
    return next(row.tile for row in table if rows <= row.max_rows)


def few_cut(held: PackedWeight) -> Mapping[str, int]:
    return linear_tiles.few_cut(held.product, held.weight.scheme.bits, len(held.weight.data), held.cols)


def expected(x: torch.Tensor, weight: LinearWeight, held: PackedWeight, rounded: bool) -> torch.Tensor:
    scheme = dataclasses.replace(weight.scheme, activation=held.product.activation if rounded else None)
    scale = None if weight.input_scale is None else weight.input_scale.squeeze(0)
    return reference.round_activation(x, scheme, scale) @ weight.dequantized().T


def assert_close(
    actual: torch.Tensor, want: torch.Tensor, limit: float = 1e-2, dtype: torch.dtype = torch.bfloat16
) -> None:
    assert actual.shape == want.shape and actual.dtype == dtype
    error = (actual.double() - want.double()).norm() / want.double().norm()
    assert error < limit, f"relative error {error:.2e}"


@interpreter.kernel_test
@pytest.mark.pairs
@pytest.mark.parametrize("arch", [WIDENS, NATIVE], ids=["widens", "native"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rows", [1, 40])
def test_every_scheme(name: str, arch: ArchTraits, rows: int) -> None:
    if not runs_here(arch):
        pytest.skip("this GPU has no block-scaled products")
    few = rows <= linear_tiles.FEW_ROWS
    # The interpreter takes as long for each row of the kernel of few rows as for a block of the other one.
    weight = weight_of(name, (32, 32) if few and not name.startswith("fp8_block") else (128, 128), 384)
    x = activations(rows, 384)
    bias = torch.randn(len(weight.data), generator=torch.Generator().manual_seed(3)).bfloat16().to(DEVICE)
    held = pack(copy_of(weight), arch)
    want = expected(x, weight, held, rounded=not few) + bias.float()
    assert_close(linear_of(weight, arch)(x, bias), want)
    # In 16 bits the result is the weight's own, and the activations' rounding is all that tells the two apart.
    exact = expected(x, weight, held, rounded=False)
    limit = {"nvfp4": 0.15, "mxfp4_mxfp8": 0.05}.get(name, 0.04)
    assert_close(many_rows(x, held, tile_for(held, rows)), exact, limit)


@interpreter.kernel_test
@pytest.mark.pairs
@pytest.mark.parametrize("name", ["int4_g32", "int4_g64", "int4_g128"])
@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("mean", [0.0, 1.0])
def test_zero_points(name: str, rows: int, mean: float) -> None:
    """With inputs of one sign, products and their corrections are larger than their sum."""
    weight = weight_of(name, (32, 32), 384)
    generator = torch.Generator().manual_seed(5)
    shift = torch.randint(-7, 9, weight.scale.shape, generator=generator).bfloat16().to(DEVICE)
    weight, x = dataclasses.replace(weight, shift=shift), activations(rows, 384) + mean
    bias = torch.randn(64, generator=generator).bfloat16().to(DEVICE)
    # Codes of 0 to 15 around zero points of 0 to 15.
    group = weight.scheme.group[1]
    zeros = (8 - shift.double()).repeat_interleave(group, -1)
    by_hand = (reference.unpack_nibbles(weight.data) - zeros) * weight.scale.double().repeat_interleave(group, -1)
    assert torch.equal(weight.dequantized().double(), by_hand)
    product = linear_of(dataclasses.replace(weight, shift=None), NATIVE)
    want = x.double() @ by_hand.T + bias.double()
    assert_close(shifted(product, shift * weight.scale * group, group)(x, bias), want)
    several = shifted(product, shift * weight.scale * group, group)(x.view(1, *x.shape), bias)
    assert_close(several, want[None])


ODD_SIZES = [((40,), 416, 1), ((40,), 416, 18), ((8, 8, 8), 672, 3)]
OF_EACH_KIND = ("fp8_channel", "fp8_block", "int8_channel", "mxfp8", "nvfp4", "int4_g32", "mxfp4", "int8_g32")
"""Schemes whose products are computed and whose weights are read in ways of their own."""


@interpreter.kernel_test
@pytest.mark.parametrize(
    ("name", "parts", "cols", "rows"),
    some_of(
        [(name, *sizes) for name in NAMES for sizes in ODD_SIZES],
        [(name, *sizes) for name in NAMES for sizes in (ODD_SIZES if name in OF_EACH_KIND else ODD_SIZES[2:])],
    ),
)
def test_sizes_that_no_block_divides(name: str, parts: tuple[int, ...], cols: int, rows: int) -> None:
    if max(SCHEMES[name.removesuffix("_static")].group) in (64, 128) and not name.startswith("fp8_block"):
        cols = cols // 128 * 128
    if name.startswith("fp8_block"):
        parts = parts[:1]
    weight = weight_of(name, parts, cols)
    x = activations(rows, cols)
    held = pack(copy_of(weight), NATIVE if interpreter.ON_CPU else WIDENS)
    assert_close(many_rows(x, held, SMALL), expected(x, weight, held, rounded=True))
    assert_close(few_rows(x[:2], held, few_cut(held)), expected(x[:2], weight, held, rounded=False))


@interpreter.kernel_test
@pytest.mark.parametrize(
    ("name", "cols"), [("fp8_block", 1152), ("fp8_channel", 4224), ("mxfp8", 2336), ("int8_g32", 2336)]
)
def test_weights_loaded_early_change_no_bit(name: str, cols: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In as many steps as are loaded early and in more, the last of them cut short."""
    weight, x = weight_of(name, (8,), cols), activations(2, cols)
    held = pack(copy_of(weight), NATIVE if interpreter.ON_CPU else WIDENS)
    kind, tile = held.product.kind, linear_tiles.few_tile(held.product, 8)
    results = []
    for early in (0, 2, tile.early):
        monkeypatch.setitem(linear_tiles.FEW_TILES, (kind, 8), dataclasses.replace(tile, early=early))
        results.append(few_rows(x, held, few_cut(held)))
    assert_close(results[0], expected(x, weight, held, rounded=False))
    assert torch.equal(results[1], results[0]) and torch.equal(results[2], results[0])


@interpreter.kernel_test
@pytest.mark.parametrize("name", ["fp8_block", "int8_channel", "nvfp4", "int8_g128"])
def test_split_columns_are_summed_in_order(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = weight_of(name, (96,), 1280)
    held = pack(copy_of(weight), NATIVE if interpreter.ON_CPU else WIDENS)
    x = activations(19, 1280)
    monkeypatch.setattr(linear_products, "num_splits", lambda *sizes: 5)  # more than are loaded at once
    first = many_rows(x, held, SMALL)
    assert_close(first, expected(x, weight, held, rounded=True))
    assert torch.equal(many_rows(x, held, SMALL), first) and not held.arrivals.any()


@interpreter.kernel_test
@pytest.mark.parametrize("cols", [512, 640])
@pytest.mark.parametrize("scheme", ["int4_g32", "int4_g128", "mxfp4", "nvfp4_a16"])
def test_steps_of_two_strips_add_what_steps_of_one_do(scheme: str, cols: int) -> None:
    """In the same order; also where the last step has one."""
    held, x = pack(weight_of(scheme, (48, 16), cols), NATIVE), activations(7, cols)
    assert held.product.kind == "planes"
    assert torch.equal(many_rows(x, held, {**SMALL, "BLOCK_K": 256}), many_rows(x, held, SMALL))


@triton.jit
def converted_kernel(words, out, WORDS: tl.constexpr):
    values = _e4m3_of_e2m1(tl.load(words + tl.arange(0, WORDS)[None, :])).to(tl.float32) * E4M3_OF_E2M1
    tl.store(out + tl.arange(0, WORDS * 8)[None, :], values)


@interpreter.kernel_test
def test_every_pair_of_codes_is_converted_exactly() -> None:
    """All 256 bytes, at every place of a word."""
    codes = torch.arange(256, dtype=torch.uint8)
    data = torch.cat([codes.roll(shift) for shift in range(4)]).to(DEVICE)
    out = torch.full((1, 2 * len(data)), float("nan"), device=DEVICE)
    converted_kernel[(1,)](data.view(torch.int32), out, WORDS=len(data) // 4)
    assert torch.equal(out[0], reference.decode_e2m1(reference.unpack_nibbles(data[None])[0]))


@interpreter.kernel_test
@pytest.mark.parametrize("rows", [1, 19])
def test_logits_are_the_sums_as_they_are(rows: int) -> None:
    """Rounded to bfloat16 they would differ by up to 2**-9."""
    weight, x = weight_of("nvfp4_a16", (200,), 384), activations(rows, 384)
    want = expected(x, weight, pack(copy_of(weight), NATIVE), rounded=False)
    got = linear_of(weight, NATIVE)(x, out_dtype=torch.float32)
    assert_close(got, want, 1e-5 if rows == 1 else 2e-3, torch.float32)
    assert not torch.equal(got.bfloat16().float(), got)


@interpreter.kernel_test
def test_any_leading_shape_and_no_rows() -> None:
    run = linear_of(weight_of("fp8_channel", (64,), 128), WIDENS)
    x = activations(6, 128)
    assert torch.equal(run(x.view(2, 3, 128), None), run(x, None).view(2, 3, 64))
    assert run(x[:0], None).shape == (0, 64)


def test_splits_fill_the_gpu_and_no_more() -> None:
    from sglang.srt.layers.triton_ops.linear_tiles import num_splits

    assert num_splits(8, 32, 4096, 188) == 8 and num_splits(8, 512, 4096, 188) == 1
    assert num_splits(8, 32, 1024, 188) == 2, "a part has 512 columns at least"
    assert num_splits(600, 4, 8192, 188) == 1, "many rows"


def test_products_of_few_columns_leave_no_sm_idle() -> None:
    """65 to 512 rows: tiles of fewer columns, and K in parts, until each SM has a program; H200s' stay as measured."""
    from sglang.srt.layers.triton_ops.linear_tiles import num_splits

    def tile_for(kind: str, columns: int, features: Collection[str] = (), num_sms: int = 188) -> Mapping[str, int]:
        scheme = SCHEMES[{"scaled": "fp8_channel", "planes": "int4_g32"}[kind]]
        arch = dataclasses.replace(arch_by_name("sm_80"), features=frozenset(features), num_sms=num_sms)
        return config_for(linear_tiles.tile_configs_of(scheme, (columns, 4096, False), arch), 256).tiles[0]

    assert num_splits(128, 56, 5120, 188) == 4 and num_splits(256, 112, 5120, 188) == 2
    assert num_splits(256, 160, 5120, 188) == 1, "two for some SMs would wait for one"
    assert num_splits(128, 56, 1536, 188) == 1, "a part has 1,024 columns at least"
    assert num_splits(128, 56, 5120, 132, {"wgmma"}) == 1
    wide, narrow = tile_for("scaled", 65_536), tile_for("scaled", 1792)
    assert (wide["BLOCK_N"], narrow["BLOCK_N"]) == (128, 64)
    assert tile_for("scaled", 8192) == wide, "256 tiles"
    assert tile_for("scaled", 1792, {"wgmma"}, 132)["BLOCK_N"] == 128
    assert tile_for("planes", 1792)["BLOCK_N"] == 128, "whose narrow tile widens weights twice"


@interpreter.in_two_parts
def test_in_interpreter(part: str) -> None:
    interpreter.run_file(__file__, part)
