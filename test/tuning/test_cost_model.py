"""The cost model: what must hold of any estimate, whatever its constants are."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest

from sglang.srt.errors import UserError
from sglang.srt.hardware.arch import CPU, ArchTraits, arch_by_name
from sglang.srt.hardware.products import PRODUCTS
from sglang.srt.kernels.spec import TileRecord
from sglang.tuning import cost_model
from sglang.tuning.cost_model import DEFAULT, GroupedProduct, blocks_per_sm, estimate, used_blocks
from sglang.tuning.instructions import DequantizeCost
from sglang.tuning.rates import RATES, rates_of

SM120, H200 = arch_by_name("rtx-pro-6000-server"), arch_by_name("h200")
PRODUCT = GroupedProduct(128, 8, 768, 2048, 2, 2.0, 2.0, 2.0)
TILE = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64, "GROUP_M": 8, "num_warps": 4, "num_stages": 3}
RECORD = TileRecord(49_152, 128, 0, 0, ("m16n8k16 bf16",))


def seconds(
    product: GroupedProduct = PRODUCT,
    tokens: int = 256,
    arch: ArchTraits = SM120,
    record: TileRecord = RECORD,
    **tile: int,
) -> float:
    found = estimate(product, tokens, TILE | tile, record, arch)
    assert found is not None
    return found.total


# --- how tokens fall on experts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "block_m"), list(itertools.product((1, 7, 64), (8, 40), (2, 8), (16, 32)))
)
def test_blocks_of_rows_are_those_of_random_routing(tokens: int, experts: int, top_k: int, block_m: int) -> None:
    """Distinct experts for each token, all as likely: the mean of 400 draws, within 5 standard errors or so."""
    generator = random.Random(0)
    used, blocks = [], []
    for _ in range(400):
        counts = [0] * experts
        for _ in range(tokens):
            for expert in generator.sample(range(experts), top_k):
                counts[expert] += 1
        used.append(sum(count > 0 for count in counts))
        blocks.append(sum(-(-count // block_m) for count in counts))
    expected = used_blocks(tokens, experts, top_k, block_m)
    assert expected[0] == pytest.approx(sum(used) / 400, rel=0.03)
    assert expected[1] == pytest.approx(sum(blocks) / 400, rel=0.03)


@pytest.mark.parametrize("tokens", [1, 16, 4096, 16384])
def test_bounds_of_the_number_of_blocks(tokens: int) -> None:
    used, blocks = used_blocks(tokens, 256, 8, 64)
    pairs = tokens * 8
    assert max(used, pairs / 64) <= blocks * (1 + 1e-9) <= used + pairs / 64
    assert used <= min(256, pairs) * (1 + 1e-9)


def test_one_expert_takes_all() -> None:
    assert used_blocks(100, 1, 1, 64) == (1.0, 2.0)


# --- occupancy --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("smem", "registers", "warps", "blocks"),
    [
        (49_152, 128, 4, 2),  # shared memory: 100 KiB an SM, 1 KiB of which each block takes for itself
        (101_376, 32, 4, 1),
        (101_377, 32, 4, 0),
        (1_024, 128, 4, 4),  # registers: 65,536 an SM
        (1_024, 255, 8, 1),
        (1_024, 16, 4, 12),  # threads: 1,536 an SM
        (0, 16, 1, 24),  # blocks
    ],
)
def test_programs_that_share_an_sm_120(smem: int, registers: int, warps: int, blocks: int) -> None:
    record = TileRecord(smem, registers, 0, 0, ())
    assert blocks_per_sm(record, warps, SM120, rates_of(SM120)) == blocks


def test_the_published_tile_is_rejected_on_sm_120_and_accepted_on_sm_90() -> None:
    """64x64x128 in bf16 with 4 stages: the default of which servers on this hardware died."""
    record = replace(RECORD, smem=147_456)
    tile = TILE | {"BLOCK_K": 128, "num_stages": 4}
    assert estimate(PRODUCT, 256, tile, record, SM120) is None
    assert estimate(PRODUCT, 256, tile, record, H200) is not None


# --- monotonic facts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", [SM120, H200, arch_by_name("gb10")])
@pytest.mark.parametrize("block_m", [16, 64])
def test_more_tokens_never_take_less_time(arch: ArchTraits, block_m: int) -> None:
    """But for a little at the turn from one wave of programs to the next."""
    times = [seconds(tokens=2**i, arch=arch, BLOCK_M=block_m) for i in range(15)]
    assert all(later > 0.97 * earlier for earlier, later in itertools.pairwise(times))
    assert times[-1] > 20 * times[0]


@pytest.mark.parametrize("tokens", [1, 64, 4096])
@pytest.mark.parametrize(
    ("slower", "faster"),
    [
        (replace(PRODUCT, w_bytes=2.0), replace(PRODUCT, w_bytes=1.0)),
        (replace(PRODUCT, depth=4096), PRODUCT),
        (replace(PRODUCT, columns=1536), PRODUCT),
        (replace(PRODUCT, dequantize_cost=DequantizeCost(4.4, {})), PRODUCT),
        (replace(PRODUCT, scaled_every=128), PRODUCT),
    ],
)
def test_more_work_never_takes_less_time(slower: GroupedProduct, faster: GroupedProduct, tokens: int) -> None:
    assert seconds(slower, tokens) >= seconds(faster, tokens)


@pytest.mark.parametrize("tokens", [1, 64, 4096])
def test_spills_deeper_pipelines_and_wider_memory(tokens: int) -> None:
    assert seconds(tokens=tokens, record=replace(RECORD, spills=64)) > seconds(tokens=tokens)
    assert seconds(tokens=tokens, num_stages=2) >= seconds(tokens=tokens, num_stages=4)
    assert seconds(tokens=tokens, arch=replace(SM120, bandwidth=SM120.bandwidth / 4)) > seconds(tokens=tokens)
    assert seconds(tokens=tokens, arch=arch_by_name("gb10")) > seconds(tokens=tokens)


def test_few_tokens_are_bound_by_memory_and_many_by_the_matrix_unit() -> None:
    """With large blocks, that is: small ones read more from the L2 than it gives."""
    large = {"BLOCK_M": 128, "num_warps": 8, "num_stages": 4}
    few, many = (
        estimate(PRODUCT, 16, TILE | {"BLOCK_M": 16}, RECORD, SM120),
        estimate(PRODUCT, 16384, TILE | large, RECORD, SM120),
    )
    assert few is not None and many is not None
    assert many.chain > 2.5 * many.memory
    faster_instruction = replace(RECORD, mma=("m16n8k64 mxf4nvf4 4X",))
    assert seconds(tokens=16384, record=faster_instruction, **large) < 0.85 * many.total
    assert seconds(tokens=16, record=faster_instruction, BLOCK_M=16) > 0.8 * few.total


@pytest.mark.parametrize("tokens", [1, 64, 1024, 16384])
@pytest.mark.parametrize("arch", [SM120, H200])
def test_no_estimate_beats_the_ceilings(tokens: int, arch: ArchTraits) -> None:
    """Not the memory's bandwidth over the weights that must be read, and not the matrix unit's rate."""
    used, _ = used_blocks(tokens, 128, 8, 64)
    read = used * 2 * 768 * 2048 * 2.0 / arch.bandwidth
    multiplied = tokens * 8 * 2 * 2 * 768 * 2048 / rates_of(arch).matrix["half"]
    assert seconds(tokens=tokens, arch=arch) > max(read, multiplied)


WIDENED = replace(PRODUCT, w_bytes=0.5, dequantize_cost=DequantizeCost(4.4, {}))


@pytest.mark.parametrize(
    ("m", "n", "warps", "mma", "copies"),
    [
        (16, 64, 8, "m16n8k16 bf16", 1),  # warps along the weights, 8 rows each
        (16, 32, 8, "m16n8k16 bf16", 2),
        (32, 32, 4, "m16n8k16 bf16", 4),  # warps along the tokens
        (64, 64, 8, "m16n8k16 bf16", 8),
        (64, 128, 8, "m16n8k16 bf16", 1),
        (16, 64, 4, "wgmma m64n16k16 bf16", 1),  # 16 rows of weights a warp
        (16, 64, 8, "wgmma m64n8k16 bf16", 2),
        (128, 128, 8, "wgmma m64n128k16 bf16", 1),
        (128, 32, 8, "wgmma m64n32k16 bf16", 1),  # from shared memory
    ],
)
def test_warps_that_widen_the_same_weights(m: int, n: int, warps: int, mma: str, copies: int) -> None:
    """As counted in the code that Triton 3.6 and 3.9 make of these tiles."""
    tile = TILE | {"BLOCK_M": m, "BLOCK_N": n, "num_warps": warps}
    launch = cost_model._Launch(
        WIDENED, 64, tile, replace(RECORD, mma=(mma,)), H200, rates_of(H200), DEFAULT, 1, 64.0, 64.0
    )
    assert launch._copies() == copies


def test_copies_cost_time_only_where_weights_are_widened() -> None:
    many, four = seconds(WIDENED, 4096, num_warps=8), seconds(WIDENED, 4096, num_warps=4)
    assert many > 1.1 * four  # 64 x 64: every warp widens all of them
    assert seconds(WIDENED, 4096, num_warps=8, BLOCK_N=128) < 0.9 * many
    assert seconds(tokens=4096, num_warps=8) < 1.2 * seconds(tokens=4096, num_warps=4)


def test_a_large_stage_needs_others_on_their_way() -> None:
    """With two stages the next one is asked for when the last one is used up; large stages take long to arrive."""
    short, long = ({"BLOCK_M": 128, "BLOCK_N": 64, "BLOCK_K": k, "num_warps": 8} for k in (64, 128))
    record = replace(RECORD, smem=196_608, mma=("wgmma m64n64k16 bf16",))
    four_short = seconds(tokens=8192, arch=H200, record=record, num_stages=4, **short)
    two_long = seconds(tokens=8192, arch=H200, record=record, num_stages=2, **long)
    assert two_long > 1.2 * four_short


def test_height_of_the_block_follows_the_tokens() -> None:
    """16 rows for a few tokens, not for thousands, with what these tiles take."""
    tiles = {
        16: TileRecord(30_720, 80, 0, 0, RECORD.mma),
        128: TileRecord(65_536, 200, 0, 0, RECORD.mma),
    }

    def best(tokens: int) -> int:
        return min(
            tiles, key=lambda m: seconds(tokens=tokens, record=tiles[m], BLOCK_M=m, num_warps=4 if m == 16 else 8)
        )

    assert best(8) == 16
    assert best(8192) == 128


# --- rates ------------------------------------------------------------------------------------------------------------


def test_every_product_with_rates_exists_and_half_is_the_slowest() -> None:
    assert set(RATES) <= set(PRODUCTS)
    for rates in RATES.values():
        assert min(rates.matrix.values()) == rates.matrix["tf32"]
        assert all(rates.matrix["half"] <= rates.matrix[kind] for kind in ("fp8", "int8"))


@pytest.mark.parametrize(
    ("instructions", "rate"),
    [
        (("m16n8k16 bf16",), 504e12),
        (("m16n8k32 e4m3",), 1008e12),
        (("m16n8k64 mxf4nvf4 4X",), 2015e12),
        (("m16n8k32 mxf8f6f4 1X",), 1008e12),
        (("m16n8k16 bf16", "m16n8k32 e4m3"), 504e12),
    ],
)
def test_rates_of_instructions(instructions: tuple[str, ...], rate: float) -> None:
    assert rates_of(SM120).slowest_rate(instructions) == rate


def test_hopper_needs_wgmma_for_its_rate() -> None:
    rates = rates_of(H200)
    assert rates.slowest_rate(("m16n8k16 bf16",)) < 0.7 * rates.slowest_rate(("wgmma m64n64k16 bf16",))


def test_what_has_no_rate_is_an_error_that_says_so() -> None:
    with pytest.raises(UserError, match="m16n8k64 mxf4nvf4 4X"):
        rates_of(H200).slowest_rate(("m16n8k64 mxf4nvf4 4X",))
    with pytest.raises(UserError, match="no rates are known for cpu"):
        rates_of(CPU)


def test_constants_are_replaced_by_name() -> None:
    changed = DEFAULT.replaced({"launch": 1.0})
    assert changed.launch == 1.0
    assert replace(changed, launch=DEFAULT.launch) == DEFAULT
    slow = estimate(PRODUCT, 1, TILE, RECORD, SM120, changed)
    assert slow is not None and math.isclose(slow.total - cost_model.DEFAULT.launch, slow.total, rel_tol=1e-3)
    assert slow.total > 1.0
