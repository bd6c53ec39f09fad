"""Cached prefixes that several programs of a prompt's attention share: the kernels against the fp32 reference, how many
parts there are, and which steps have them."""

from __future__ import annotations

import itertools

import interpreter
import pytest
import torch

from sglang.srt.kernels.tiles import HEAD_DIMS
from sglang.srt.layers.attention.triton_ops import prefix_parts
from sglang.srt.layers.attention.triton_ops.extend_attention import extend_attention_fwd
from sglang.srt.layers.attention.triton_ops.prefix_parts import MAX_PARTS, MIN_PART, PrefixParts, count_parts
from srt.layers.attention.reference import Problem, reference_extend, relative_error
from srt.layers.attention.test_attention_kernels import (
    BF16_BOUND,
    bound,
    extend_problem,
    first_tile,
    poisoned_output,
    run_extend,
)

TILE = {"BLOCK_M": 64, "BLOCK_N": 32, "num_warps": 4, "num_stages": 2}


def parts_of(p: Problem, count: int, first_token: int = 0) -> PrefixParts:
    first = torch.tensor([first_token], dtype=torch.int32, device=p.device)
    parts = PrefixParts.allocate(count, len(p.q), first, p.num_heads, p.v_head_dim)
    parts.part_o.fill_(float("nan"))
    parts.part_lse.fill_(float("nan"))
    return parts


@interpreter.kernel_test
@pytest.mark.parametrize("count", [2, 7])
@pytest.mark.parametrize("head_dims", [(64, 64), (80, 80)] if interpreter.ON_CPU else HEAD_DIMS)
def test_parts_of_prefixes(head_dims: tuple[int, int], count: int) -> None:
    """More parts than some prefixes have tiles, and prefixes without a token."""
    p = extend_problem(head_dims)
    out = run_extend(p, parts=parts_of(p, count))
    assert relative_error(out, reference_extend(p, head_dims[0] ** -0.5)) < BF16_BOUND


@interpreter.kernel_test
@pytest.mark.parametrize(
    ("kv_dtype", "sinks", "cap"), [(None, True, 0.0), (torch.float8_e4m3fn, False, 20.0), (None, True, 20.0)]
)
def test_parts_with_what_else_a_layer_has(kv_dtype: torch.dtype | None, sinks: bool, cap: float) -> None:
    p = extend_problem(kv_dtype=kv_dtype, page_size=16)
    bias = torch.linspace(-2, 6, p.num_heads, device=p.device) if sinks else None
    out = run_extend(p, parts=parts_of(p, 3), sinks=bias, logit_cap=cap)
    assert relative_error(out, reference_extend(p, p.head_dim**-0.5, sinks=bias, logit_cap=cap)) < bound(p)


@interpreter.kernel_test
def test_rows_of_requests_that_decode_are_left_alone() -> None:
    p = extend_problem()
    skipped, tile = int(p.start_loc[1]), first_tile("extend_attention", p.head_dim, p.v_head_dim, p.k_cache.dtype)
    out = poisoned_output(p, torch.float32)
    extend_attention_fwd(
        p.q, p.k, p.v, out, p.k_cache, p.v_cache, p.req_to_token, p.req_pool_indices[1:], p.prefix[1:], p.start_loc[1:],
        scale=1.0, tile=tile, parts=parts_of(p, 3, skipped),
    )  # fmt: skip
    assert out[:skipped].isnan().all() and not out[skipped:].isnan().any()


def count(new: list[int], prefix: list[int], heads: int, kv_heads: int, sms: int = 188) -> int:
    return count_parts(new, prefix, heads, kv_heads, 128, sms, TILE)


def test_short_prompts_behind_long_prefixes_are_shared_out() -> None:
    assert count([256], [0], 32, 8) == count([256], [2 * MIN_PART - 1], 32, 8) == 1
    assert count([8192], [100_000], 32, 8) == 1, "enough blocks of queries"
    few = count([64], [100_000], 12, 1)  # 12 blocks for 376 programs at once
    assert few == MAX_PARTS
    assert count([64], [3 * MIN_PART], 12, 1) == 3, "parts are not shorter"
    assert count([256], [100_000], 32, 8) == 5, "640 programs in two turns; 256 leave a third of one turn idle"


def test_parts_stay_within_their_bytes() -> None:
    for new, heads, dim in itertools.product((1, 64, 256, 1024, 4096), (1, 16, 128), (64, 128, 512)):
        parts = count_parts([new], [1 << 20], heads, 1, dim, 188, TILE)
        assert parts == 1 or parts * new * heads * (dim + 1) * 4 <= prefix_parts.PART_BYTES
        assert 1 <= parts <= MAX_PARTS


def test_parts_shorten_the_longest_program() -> None:
    for blocks in range(1, 400):
        parts = count([blocks * 64], [1 << 20], 1, 1)
        turns = -(-blocks * parts // 376) / parts
        assert parts == 1 or turns < -(-blocks // 376) / 1.05
