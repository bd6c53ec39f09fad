"""The attention kernels against fp32 references: interpreted here, natively (and with larger shapes) on a GPU.

Set SGLANG_FORCE_ARCH=sm_120 on another GPU to run it with the tiles that sm_120 gets.

Errors are measured on fp32 outputs, because rounding the result to bfloat16 is an error of 1.7e-3 by itself, whatever
the kernel does. What remains is the rounding of the softmax weights before the second product, up to 1.6e-3 for long
sequences. That a bfloat16 output is the rounded fp32 one is a test of its own.
"""

from __future__ import annotations

import itertools

import interpreter
import pytest
import torch
from pairs import some, some_of

from sglang.srt.hardware.arch import arch_by_name, current_arch
from sglang.srt.kernels.tiles import HEAD_DIMS, MLA_LATENTS, MLA_WIDE, AttentionTile, _split, attention_tiles
from sglang.srt.layers.attention.triton_ops.decode_attention import (
    DecodePlan,
    DecodeWorkspace,
    combine_constants,
    decode_attention_fwd,
    merge_pieces,
    plan_decode,
)
from sglang.srt.layers.attention.triton_ops.decode_biased import decode_biased_fwd
from sglang.srt.layers.attention.triton_ops.extend_attention import (
    extend_attention_fwd,
)
from sglang.srt.layers.attention.triton_ops.extend_biased import extend_biased_fwd
from sglang.srt.layers.attention.triton_ops.prefill_attention import context_attention_fwd
from srt.layers.attention.decode_plans import plan_ahead
from srt.layers.attention.reference import Problem, reference_decode, reference_extend, relative_error

BF16_BOUND = 2e-3
FP8_BOUND = 2e-2
NAMES = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float8_e4m3fn: "fp8_e4m3",
    torch.float8_e5m2: "fp8_e5m2",
}
QUICK_DIMS = ((64, 64), (72, 72), (128, 128), (192, 128), (288, 256))
"""A power of two and none, values that are narrower than keys, and latents. Guesses and latents have tests with the
largest ones."""
# Small enough for the interpreter to finish a grid, ragged enough for every boundary: empty and tiny prefixes, one new
# token, lengths off and on the multiples of the tiles.
EXTEND_SHAPES = ([0, 37, 70, 64], [40, 5, 1, 32])
DECODE_LENS = [0, 99, 31, 130]
if not interpreter.ON_CPU:
    EXTEND_SHAPES = ([0, 517, 1000, 64, 4096], [700, 130, 1, 512, 257])
    DECODE_LENS = [0, 99, 31, 5000, 1023, 64, 17000]


def first_tile(op: str, head_dim: int, v_head_dim: int, kv_dtype: torch.dtype) -> AttentionTile:
    arch = arch_by_name("sm_120") if interpreter.ON_CPU else current_arch()
    return attention_tiles(op, head_dim, v_head_dim, NAMES[kv_dtype], arch.features)[0]


def heads_of(head_dims: tuple[int, int]) -> tuple[int, int]:
    return (16, 1) if head_dims in MLA_LATENTS else (6, 2)


def bound(p: Problem) -> float:
    return FP8_BOUND if p.k_cache.element_size() == 1 else BF16_BOUND


def poisoned_output(p: Problem, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((p.q.shape[0], p.num_heads, p.v_head_dim), float("nan"), dtype=dtype, device=p.device)


def run_extend(
    p: Problem, tile: AttentionTile | None = None, out_dtype: torch.dtype = torch.float32, **kwargs: object
) -> torch.Tensor:
    out = poisoned_output(p, out_dtype)
    tile = tile or first_tile("extend_attention", p.head_dim, p.v_head_dim, p.k_cache.dtype)
    attend = extend_biased_fwd if "bias" in kwargs else extend_attention_fwd
    attend(
        p.q, p.k, p.v, out, p.k_cache, p.v_cache, p.req_to_token, p.req_pool_indices, p.prefix, p.start_loc,
        scale=p.head_dim**-0.5, tile=tile, k_scale=p.k_scale, v_scale=p.v_scale, **kwargs,
    )  # fmt: skip
    return out


def run_decode(
    p: Problem,
    tile: AttentionTile | None = None,
    out_dtype: torch.dtype = torch.float32,
    num_sms: int = 8,
    **kwargs: object,
) -> torch.Tensor:
    out = poisoned_output(p, out_dtype)
    tile = tile or first_tile("decode_attention", p.head_dim, p.v_head_dim, p.k_cache.dtype)
    workspace = DecodeWorkspace.allocate(
        len(p.prefix_lens) + 3, p.num_heads, p.num_kv_heads, p.v_head_dim, num_sms, tile, p.device
    )
    workspace.part_o.fill_(float("nan"))
    workspace.part_lse.fill_(float("nan"))
    seq_lens = p.prefix + 1
    plan = plan_ahead(seq_lens, workspace, tile)
    attend = decode_biased_fwd if "bias" in kwargs else decode_attention_fwd
    attend(
        p.q, out, p.k_cache, p.v_cache, p.req_to_token, p.req_pool_indices, seq_lens, plan, scale=p.head_dim**-0.5,
        tile=tile, k_scale=p.k_scale, v_scale=p.v_scale, **kwargs,
    )  # fmt: skip
    return out


def extend_problem(head_dims: tuple[int, int] = (64, 64), **kwargs: object) -> Problem:
    heads = heads_of(head_dims)
    return Problem(
        *EXTEND_SHAPES, *heads, *head_dims, v_in_k=head_dims in MLA_LATENTS, device=interpreter.DEVICE, **kwargs
    )


def decode_problem(head_dims: tuple[int, int] = (64, 64), **kwargs: object) -> Problem:
    heads, latent = heads_of(head_dims), head_dims in MLA_LATENTS
    new = [1] * len(DECODE_LENS)
    return Problem(DECODE_LENS, new, *heads, *head_dims, v_in_k=latent, device=interpreter.DEVICE, **kwargs)


@interpreter.kernel_test
@pytest.mark.parametrize("head_dims", some(HEAD_DIMS, QUICK_DIMS), ids=str)
def test_extend_head_dims(head_dims: tuple[int, int]) -> None:
    p = extend_problem(head_dims)
    assert relative_error(run_extend(p), reference_extend(p, head_dims[0] ** -0.5)) < BF16_BOUND


@interpreter.kernel_test
@pytest.mark.parametrize("head_dims", some(HEAD_DIMS, QUICK_DIMS), ids=str)
def test_decode_head_dims(head_dims: tuple[int, int]) -> None:
    p = decode_problem(head_dims)
    assert relative_error(run_decode(p), reference_decode(p, head_dims[0] ** -0.5)) < BF16_BOUND


@interpreter.kernel_test
@pytest.mark.parametrize("window", [1, 20])
def test_windows_over_latents(window: int) -> None:
    """Of dots3. Slots before a window may hold anything."""
    for problem, run, reference in (
        (extend_problem(MLA_WIDE), run_extend, reference_extend),
        (decode_problem(MLA_WIDE), run_decode, reference_decode),
    ):
        expected = reference(problem, MLA_WIDE[0] ** -0.5, window=window)
        for i, prefix in enumerate(problem.prefix_lens):
            stale = problem.req_to_token[problem.req_pool_indices[i], : max(0, prefix - window + 1)].long()
            problem.k_cache[stale] = float("nan")
        assert relative_error(run(problem, sliding_window=window), expected) < BF16_BOUND


@interpreter.kernel_test
@pytest.mark.parametrize("dtype", some([torch.bfloat16, torch.float16], [torch.bfloat16]))
def test_outputs_are_rounded_to_nearest(dtype: torch.dtype) -> None:
    p = extend_problem(dtype=dtype)
    assert torch.equal(run_extend(p, out_dtype=dtype), run_extend(p).to(dtype))
    p = decode_problem(dtype=dtype)
    assert torch.equal(run_decode(p, out_dtype=dtype), run_decode(p).to(dtype))


@interpreter.kernel_test
@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "page_size"),
    some_of(
        itertools.product((torch.bfloat16, torch.float16), (None, torch.float8_e4m3fn, torch.float8_e5m2), (1, 16, 64)),
        {
            (torch.bfloat16, None, 16),
            (torch.bfloat16, torch.float8_e4m3fn, 64),
            (torch.bfloat16, torch.float8_e5m2, 1),
            (torch.float16, None, 64),
            (torch.float16, torch.float8_e4m3fn, 16),
        },
    ),
)
def test_dtypes_and_pages(dtype: torch.dtype, kv_dtype: torch.dtype | None, page_size: int) -> None:
    scales = (0.5, 1.75) if kv_dtype else (1.0, 1.0)
    options = {"dtype": dtype, "kv_dtype": kv_dtype, "page_size": page_size, "k_scale": scales[0], "v_scale": scales[1]}
    p = extend_problem(**options)
    assert relative_error(run_extend(p), reference_extend(p, 64**-0.5)) < bound(p)
    p = decode_problem(**options)
    assert relative_error(run_decode(p), reference_decode(p, 64**-0.5)) < bound(p)


@interpreter.kernel_test
@pytest.mark.parametrize(
    "heads", some([(4, 4), (8, 1), (12, 1), (10, 2), (40, 2)], [(4, 4), (12, 1), (10, 2)]), ids=str
)
def test_groupings(heads: tuple[int, int]) -> None:
    p = Problem(*EXTEND_SHAPES, *heads, 64, 64, device=interpreter.DEVICE)
    assert relative_error(run_extend(p), reference_extend(p, 64**-0.5)) < BF16_BOUND
    p = Problem(DECODE_LENS, [1] * len(DECODE_LENS), *heads, 64, 64, device=interpreter.DEVICE)
    assert relative_error(run_decode(p), reference_decode(p, 64**-0.5)) < BF16_BOUND


def sink_logits(p: Problem) -> torch.Tensor:
    return torch.linspace(-1.0, 4.0, p.num_heads, device=p.device)


@interpreter.kernel_test
@pytest.mark.parametrize(
    ("window", "with_sinks"),
    some_of(
        itertools.product((1, 20, 64, 1 << 20), (False, True)), {(1, True), (20, False), (64, True), (1 << 20, False)}
    ),
)
def test_window_and_sinks(window: int, with_sinks: bool) -> None:
    p = extend_problem()
    sinks = sink_logits(p) if with_sinks else None
    expected = reference_extend(p, 64**-0.5, window=window, sinks=sinks)
    assert relative_error(run_extend(p, sliding_window=window, sinks=sinks), expected) < BF16_BOUND
    p = decode_problem()
    expected = reference_decode(p, 64**-0.5, window=window, sinks=sinks)
    assert relative_error(run_decode(p, sliding_window=window, sinks=sinks), expected) < BF16_BOUND


@interpreter.kernel_test
@pytest.mark.parametrize("size", [20, 66])
def test_chunks(size: int) -> None:
    """Of every sequence some blocks lie in two chunks; a decoding token is the first or the last of one, or between.
    Slots before the chunk of the first new token hold anything."""
    for problem, run, reference in (
        (extend_problem(), run_extend, reference_extend),
        (decode_problem(), run_decode, reference_decode),
    ):
        expected = reference(problem, 64**-0.5, window=size, chunked=True)
        for i, prefix in enumerate(problem.prefix_lens):
            stale = problem.req_to_token[problem.req_pool_indices[i], : prefix // size * size].long()
            problem.k_cache[stale] = problem.v_cache[stale] = float("nan")
        assert relative_error(run(problem, sliding_window=size, chunked=True), expected) < BF16_BOUND


@interpreter.kernel_test
@pytest.mark.parametrize(("extent", "window"), some_of(itertools.product((33, 300), (0, 20)), {(33, 20), (300, 0)}))
def test_biases_by_distance(extent: int, window: int) -> None:
    """Tile configs that end within a block of keys, at the window, and behind the longest context; of fp32 and 16
    bits."""
    for problem, run, reference, dtype in (
        (extend_problem(), run_extend, reference_extend, torch.bfloat16),
        (decode_problem(), run_decode, reference_decode, torch.float32),
    ):
        bias = 3 * torch.randn(len(problem.q), problem.num_heads, extent, device=problem.device).to(dtype)
        expected = reference(problem, 64**-0.5, window=window, bias=bias)
        assert relative_error(expected, reference(problem, 64**-0.5, window=window)) > 10 * BF16_BOUND
        assert relative_error(run(problem, sliding_window=window, bias=bias), expected) < BF16_BOUND


@interpreter.kernel_test
@pytest.mark.parametrize(
    ("window", "head_dims"),
    some_of(itertools.product((1, 20, 64), ((64, 64), (256, 256))), {(1, (64, 64)), (20, (256, 256)), (64, (64, 64))}),
    ids=str,
)
def test_images_that_see_themselves_both_ways(window: int, head_dims: tuple[int, int]) -> None:
    """Each is a sequence of its own, over a prefix of which the window hides a part."""
    p = extend_problem(head_dims)
    expected = reference_extend(p, head_dims[0] ** -0.5, causal=False, window=window)
    assert relative_error(run_extend(p, sliding_window=window, causal=False), expected) < BF16_BOUND


@interpreter.kernel_test
@pytest.mark.parametrize("window", [1, 20, 45])
def test_what_lies_before_a_window_does_not_matter(window: int) -> None:
    """Slots behind a window are handed on while the request runs: they may hold anything, another request's NaN too."""
    for problem, run, reference in (
        (extend_problem(), run_extend, reference_extend),
        (decode_problem(), run_decode, reference_decode),
    ):
        expected = reference(problem, 64**-0.5, window=window)
        for i, prefix in enumerate(problem.prefix_lens):
            stale = problem.req_to_token[problem.req_pool_indices[i], : max(0, prefix - window + 1)].long()
            problem.k_cache[stale] = problem.v_cache[stale] = float("nan")
        assert relative_error(run(problem, sliding_window=window), expected) < BF16_BOUND


@interpreter.kernel_test
@pytest.mark.parametrize("cap", [1.0, 30.0])
def test_logit_cap(cap: float) -> None:
    p = extend_problem()
    assert relative_error(run_extend(p, logit_cap=cap), reference_extend(p, 64**-0.5, logit_cap=cap)) < BF16_BOUND
    p = decode_problem()
    assert relative_error(run_decode(p, logit_cap=cap), reference_decode(p, 64**-0.5, logit_cap=cap)) < BF16_BOUND


@interpreter.kernel_test
def test_sinks_without_window() -> None:
    p = extend_problem()
    sinks = sink_logits(p)
    assert relative_error(run_extend(p, sinks=sinks), reference_extend(p, 64**-0.5, sinks=sinks)) < BF16_BOUND
    p = decode_problem()
    assert relative_error(run_decode(p, sinks=sinks), reference_decode(p, 64**-0.5, sinks=sinks)) < BF16_BOUND


@interpreter.kernel_test
def test_custom_mask() -> None:
    p = extend_problem()
    masks = [
        torch.rand(new, prefix + new, device=p.device) < 0.5
        for prefix, new in zip(p.prefix_lens, p.new_lens, strict=True)
    ]
    masks[1][2] = False  # a row that sees nothing
    offsets = torch.tensor([0, *(m.numel() for m in masks)], device=p.device).cumsum(0)
    packed = torch.cat([m.flatten() for m in masks]).to(torch.uint8)
    actual = run_extend(p, custom_mask=packed, mask_offsets=offsets)
    assert relative_error(actual, reference_extend(p, 64**-0.5, masks=masks)) < BF16_BOUND


@interpreter.kernel_test
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dims", [(64, 64), (72, 72), (80, 80)], ids=str)
def test_prefill(head_dims: tuple[int, int], causal: bool) -> None:
    lens = EXTEND_SHAPES[1]
    p = Problem([0] * len(lens), lens, 4, 4, *head_dims, device=interpreter.DEVICE)
    out = poisoned_output(p, torch.float32)
    tile = first_tile("prefill_attention", *head_dims, torch.bfloat16)
    context_attention_fwd(p.q, p.k, p.v, out, p.start_loc, is_causal=causal, tile=tile)
    assert relative_error(out, reference_extend(p, head_dims[0] ** -0.5, causal=causal)) < BF16_BOUND


@interpreter.kernel_test
@pytest.mark.parametrize("shares", [2, 5])
def test_shares_of_a_prefill_are_its_bits(shares: int) -> None:
    lens = EXTEND_SHAPES[1]
    p = Problem([0] * len(lens), lens, 2, 2, 72, 72, device=interpreter.DEVICE)
    whole, parts = poisoned_output(p, torch.float32), poisoned_output(p, torch.float32)
    tile = first_tile("prefill_attention", 72, 72, torch.bfloat16)
    context_attention_fwd(p.q, p.k, p.v, whole, p.start_loc, is_causal=False, tile=tile)
    for i in range(shares):
        assert bool(torch.isnan(parts).any())
        context_attention_fwd(p.q, p.k, p.v, parts, p.start_loc, is_causal=False, share=(i, shares), tile=tile)
    assert torch.equal(parts, whole)


@interpreter.kernel_test
def test_extend_without_prefix_equals_empty_prefixes() -> None:
    lens = EXTEND_SHAPES[1]
    p = Problem([0] * len(lens), lens, 6, 2, 64, 64, device=interpreter.DEVICE)
    assert torch.equal(run_extend(p, has_prefix=False), run_extend(p, has_prefix=True))


@interpreter.kernel_test
def test_extend_skips_empty_sequences() -> None:
    p = Problem([5, 20, 0, 9], [3, 0, 4, 1], 6, 2, 64, 64, device=interpreter.DEVICE)
    assert relative_error(run_extend(p), reference_extend(p, 64**-0.5)) < BF16_BOUND


@interpreter.kernel_test
def test_large_scores_do_not_overflow() -> None:
    p = extend_problem()
    p.q *= 100
    assert relative_error(run_extend(p), reference_extend(p, 64**-0.5)) < BF16_BOUND
    p = decode_problem()
    p.q *= 100
    assert relative_error(run_decode(p), reference_decode(p, 64**-0.5)) < BF16_BOUND


@interpreter.kernel_test
@pytest.mark.pairs
@pytest.mark.parametrize("num_sms", [1, 4, 300])
@pytest.mark.parametrize(
    "lens",
    [[1], [64], [65], [1000, 1, 1, 1, 1], [300] * 9, [1 + 7 * i for i in range(300)], [9000], [5000, 70], [3000] * 7],
)
@pytest.mark.parametrize("waves", [2, 4])
def test_decode_pieces_cover_every_token_once(waves: int, lens: list[int], num_sms: int) -> None:
    """With as many programs as the longest sequence needs."""
    tile: AttentionTile = {"BLOCK_H": 16, "BLOCK_N": 64, "num_warps": 4, "num_stages": 2, "ctas_per_sm": 2}
    tile["waves"] = waves
    workspace = DecodeWorkspace.allocate(len(lens), 8, 2, 64, num_sms, tile, interpreter.DEVICE, max(lens))
    plan = plan_decode(torch.tensor(lens, dtype=torch.int32, device=interpreter.DEVICE), workspace, tile)
    work, pieces = plan.work.tolist(), plan.pieces.tolist()
    for seq, length in enumerate(lens):
        mine = [row for row in work if row[0] == seq]
        first, count = pieces[seq]
        assert work[first : first + count] == mine and all(row[3] == count for row in mine)
        assert [row[1] for row in mine] == [0, *(row[2] for row in mine[:-1])] and mine[-1][2] == length
        assert all(row[1] < row[2] for row in mine)
    assert {row[0] for row in work} <= {-1, *range(len(lens))}


def test_no_more_programs_start_than_a_context_has_pieces() -> None:
    """Of an H200 and one kv head: 2,113 for a sequence of any length, of which most would only start and end."""
    tile = _split(16, 64, 2, 3, ctas_per_sm=4)
    any_length, limited = (
        DecodeWorkspace.allocate(64, 12, 1, 128, 132, tile, "meta", *limit) for limit in ((), (202_752,))
    )
    assert [any_length.num_pieces(batch) for batch in (1, 4, 64)] == [2113, 2116, 2176]
    assert [limited.num_pieces(batch) for batch in (1, 4, 64)] == [529, 1588, 2176]


@interpreter.kernel_test
@pytest.mark.parametrize(
    ("batch", "head_dim"),
    some_of(
        [("small", 64), ("small", 72), ("large", 64), ("large", 72), ("large", 512)], {("small", 72), ("large", 64)}
    ),
)
def test_pieces_are_merged_whatever_their_number(batch: str, head_dim: int) -> None:
    """1 to 400 of them, of which some lie outside the window, with sinks and without; a row of one piece is left as it
    is."""
    counts = [1, 2, 15, 16, 17, 255, 257, 400] if batch == "small" else [1, 2, 8, 9, 16, 17, 31, 33, 63, 65, 130]
    heads, total, generator = 2, sum(counts), torch.Generator().manual_seed(0)
    small = combine_constants(head_dim, heads, len(counts))["BLOCK_DV"] < 64
    assert small == (batch == "small")
    lse = torch.randn(total, heads, generator=generator) * 3
    part = torch.randn(total, heads, head_dim, generator=generator)
    firsts = [sum(counts[:i]) for i in range(len(counts))]
    outside = torch.rand(total, generator=generator) < 0.3
    outside[firsts] = False
    lse[outside], part[outside] = float("-inf"), float("nan")
    tile = _split(16, 64, 4, 3, ctas_per_sm=2)
    workspace = DecodeWorkspace.allocate(len(counts), heads, 1, head_dim, total, tile, interpreter.DEVICE)
    workspace.part_o.fill_(float("nan"))
    workspace.part_lse.fill_(float("nan"))
    workspace.part_o[:total], workspace.part_lse[:total] = part, lse
    pieces = torch.tensor(list(zip(firsts, counts, strict=True)), dtype=torch.int32, device=interpreter.DEVICE)
    plan = DecodePlan(len(counts), tile, pieces, pieces, workspace.part_o, workspace.part_lse)
    for sinks in (None, torch.tensor([0.5, -1.0], device=interpreter.DEVICE)):
        out = torch.full((len(counts), heads, head_dim), -7.0, device=interpreter.DEVICE)
        merge_pieces(out, plan, sinks)
        assert (out[0] == -7.0).all()
        for row, (first, count) in enumerate(zip(firsts, counts, strict=True)):
            mine = slice(first, first + count)
            weights = torch.exp2(lse[mine].double())
            rest = 0.0 if sinks is None else sinks.cpu().double().exp()
            expected = (weights[..., None] * part[mine].nan_to_num(0.0).double()).sum(0)
            expected /= (weights.sum(0) + rest)[:, None]
            assert count == 1 or relative_error(out[row].cpu(), expected.float()) < 1e-6


@interpreter.kernel_test
@pytest.mark.parametrize(("batch", "num_sms", "pieces"), [(16, 188, 11), (16, 132, 8), (1, 188, 128), (300, 188, 1)])
def test_pieces_fill_the_waves_of_a_card(batch: int, num_sms: int, pieces: int) -> None:
    """A program an SM, 8,192 tokens: of 16 sequences eleven pieces each are one wave of 188, sixteen would be two."""
    tile = _split(16, 64, 8, 3, ctas_per_sm=1, waves=2)
    workspace = DecodeWorkspace.allocate(batch, 16, 1, 512, num_sms, tile, interpreter.DEVICE)
    plan = plan_decode(torch.full((batch,), 8192, dtype=torch.int32, device=interpreter.DEVICE), workspace, tile)
    assert plan.pieces[:, 1].tolist() == [pieces] * batch


@interpreter.kernel_test
def test_uint8_storage_must_be_viewed() -> None:
    p = extend_problem(kv_dtype=torch.float8_e4m3fn)
    p.k_cache = p.k_cache.view(torch.uint8)
    tile = first_tile("extend_attention", 64, 64, torch.float8_e4m3fn)
    with pytest.raises(TypeError, match="view"):
        run_extend(p, tile)


@interpreter.kernel_test
def test_strided_queries_and_keys() -> None:
    """q, k and v as slices of one projection output."""
    p = extend_problem()
    expected = reference_extend(p, 64**-0.5)
    packed = torch.cat([p.q.flatten(1), p.k.flatten(1), p.v.flatten(1)], dim=1)
    q, k, v = packed.split([p.num_heads * 64, p.num_kv_heads * 64, p.num_kv_heads * 64], dim=1)
    p.q, p.k, p.v = q.unflatten(1, (-1, 64)), k.unflatten(1, (-1, 64)), v.unflatten(1, (-1, 64))
    assert not p.q.is_contiguous() and relative_error(run_extend(p), expected) < BF16_BOUND


@interpreter.in_two_parts
def test_in_interpreter(part: str) -> None:
    interpreter.run_file(__file__, part)
