"""Latent attention's own kernels against plain torch, interpreted here and natively on a GPU: the fused norm, rotation
and store; the gather of a prefix; prompts over expanded keys and values, whose chunks are one softmax. That absorbed
attention over the same latents gives the same is what the whole rests on.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import interpreter
import pytest
import torch
from pairs import some, some_of

from sglang.srt.blocks.mla import reference
from sglang.srt.blocks.mla.kernels import latent_prompt, latent_store
from sglang.srt.hardware.arch import arch_by_name, current_arch
from sglang.srt.kernels.tiles import AttentionTile, attention_tiles
from sglang.srt.layers import native_ops
from sglang.srt.layers.attention.latent_chunks import cut_prefixes
from sglang.srt.layers.attention.triton_ops.decode_attention import DecodeWorkspace, decode_attention_fwd
from sglang.srt.layers.attention.triton_ops.extend_attention import extend_attention_fwd
from srt.layers.attention.decode_plans import plan_ahead
from srt.layers.attention.reference import relative_error

DEVICE = interpreter.DEVICE
CACHE_TYPES = [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
RANK, ROT = 512, 64
PREFIX_LENS, NEW_LENS = [0, 37, 70, 64, 0], [40, 5, 1, 32, 1]
HEADS = 3
if not interpreter.ON_CPU:
    PREFIX_LENS, NEW_LENS, HEADS = [0, 517, 1000, 64, 4096], [700, 130, 1, 512, 257], 16
BF16_BOUND = 6e-3
"""Of outputs in bfloat16, over keys and values that were rounded to it."""


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def randn(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (torch.randn(*shape) * scale).to(dtype).to(DEVICE)


def tile_of(op: str, dims: tuple[int, int], cache: str = "bfloat16") -> AttentionTile:
    arch = arch_by_name("sm_120") if interpreter.ON_CPU else current_arch()
    return attention_tiles(op, *dims, cache, arch.features)[0]


# --- norm, rotary embedding, store ------------------------------------------------------------------------------------


def check_store(
    num_tokens: int,
    num_heads: int,
    dims: tuple[int, int, int],
    dtype: torch.dtype = torch.bfloat16,
    cache_dtype: torch.dtype | None = None,
    num_absorbed: int | None = None,
    is_neox_style: bool = False,
    norms_key: bool = False,
) -> None:
    nope, rank, rot = dims
    num_slots, cache_dtype = num_tokens + 9, cache_dtype or dtype
    q = randn(num_tokens, num_heads, nope + rot, dtype=dtype)
    # A slice of a wider product, far beyond the range of e4m3 after scaling: the store must saturate.
    latent = randn(num_tokens, 32 + rank + rot, scale=30.0, dtype=dtype)[:, 32:]
    weight = randn(rank, scale=20.0, dtype=torch.float32 if norms_key else dtype)
    key_weight = randn(rot, dtype=dtype) if norms_key else None
    positions = torch.randint(0, 50, (num_tokens,)).to(DEVICE)
    loc = torch.randperm(num_slots)[:num_tokens].to(DEVICE)
    angles = torch.rand(50, rot // 2) * 6.28
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1).to(DEVICE)

    def run(op):
        cache = torch.zeros(num_slots, 1, rank + rot, device=DEVICE).to(cache_dtype)
        absorbed = None
        if num_absorbed is not None:
            absorbed = torch.full((num_absorbed, num_heads, rank + rot), 7.0, dtype=dtype, device=DEVICE)
        own_q = q.clone()
        args = (positions, cos_sin, weight, 1e-6, cache, loc, 0.25, is_neox_style, key_weight)
        entries = op(own_q, latent, absorbed, *args)
        return own_q, entries, absorbed, cache

    got, want = run(latent_store.latent_norm_rope_store), run(reference.latent_norm_rope_store)
    tolerance = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}[dtype]
    for ours, wanted in zip(got[:2], want[:2], strict=True):
        torch.testing.assert_close(ours.float(), wanted.float(), rtol=tolerance, atol=tolerance)
    assert torch.equal(got[0][..., :nope], q[..., :nope])
    if num_absorbed is not None:
        torch.testing.assert_close(got[2].float(), want[2].float(), rtol=tolerance, atol=tolerance)
        assert (got[2][..., :rank] == 7.0).all()
    step = 0.26 if cache_dtype.itemsize == 1 else tolerance
    torch.testing.assert_close(got[3].float(), want[3].float(), rtol=step, atol=tolerance)
    if dtype != torch.float32:
        assert (got[3].float() == want[3].float()).float().mean() > 0.95


@interpreter.kernel_test
@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    some_of(
        itertools.product((torch.bfloat16, torch.float16), (None, torch.float8_e4m3fn, torch.float8_e5m2)),
        {(torch.bfloat16, None), (torch.float16, torch.float8_e4m3fn), (torch.bfloat16, torch.float8_e5m2)},
    ),
)
def test_store(dtype: torch.dtype, cache_dtype: torch.dtype | None) -> None:
    check_store(5, 16, (128, RANK, ROT), dtype, cache_dtype, num_absorbed=5)


@interpreter.kernel_test
@pytest.mark.parametrize("is_neox_style", [True, False])
@pytest.mark.parametrize(("num_tokens", "num_absorbed"), [(1, 1), (40, None), (40, 3), (260, 0)])
def test_store_of_other_shapes(num_tokens: int, num_absorbed: int | None, is_neox_style: bool) -> None:
    check_store(num_tokens, 5, (24, 40, 16), torch.float32, num_absorbed=num_absorbed, is_neox_style=is_neox_style)


@interpreter.kernel_test
@pytest.mark.parametrize("is_neox_style", [True, False])
def test_store_with_a_normed_rotary_key_and_fp32_weights(is_neox_style: bool) -> None:
    check_store(5, 5, (24, 40, 16), torch.float32, is_neox_style=is_neox_style, norms_key=True)
    check_store(3, 16, (128, RANK, ROT), num_absorbed=3, is_neox_style=is_neox_style, norms_key=True)


@interpreter.kernel_test
def test_store_of_nothing_and_into_untyped_bytes() -> None:
    q, latent, index = randn(0, 4, 24), randn(0, 40), torch.zeros(0, dtype=torch.int64, device=DEVICE)
    cos_sin, weight, cache = randn(9, 8, dtype=torch.float32), randn(32), randn(5, 1, 40)
    args = (q, latent, None, index, cos_sin, weight, 1e-6)
    assert latent_store.latent_norm_rope_store(*args, cache, index).shape == (0, 40)
    with pytest.raises(TypeError, match="view it as float8"):
        latent_store.latent_norm_rope_store(*args, cache.to(torch.uint8), index)


# --- prompts and decoding over one set of latents ---------------------------------------------------------------------


@dataclass
class Latents:
    """Sequences with cached prefixes in a scattered cache, and new tokens, which are cached too."""

    nope: int
    v_dim: int
    cache_dtype: torch.dtype = torch.bfloat16
    scale: float = 1.0

    def __post_init__(self) -> None:
        heads, total = HEADS, max(p + n for p, n in zip(PREFIX_LENS, NEW_LENS, strict=True))
        num_seqs, tokens = len(NEW_LENS), sum(NEW_LENS)
        self.q = randn(tokens, heads, self.nope + ROT, scale=0.5)
        self.w_uk = randn(heads, self.nope, RANK, scale=RANK**-0.5)
        self.w_uv = randn(heads, RANK, self.v_dim, scale=RANK**-0.5)
        self.table = (torch.randperm(num_seqs * total) + 1).view(num_seqs, total).int().to(DEVICE)
        self.rows = torch.randperm(num_seqs).to(DEVICE)
        values = randn(num_seqs * total + 1, 1, RANK + ROT, dtype=torch.float32) / self.scale
        self.cache = values.to(self.cache_dtype)
        loc = [self.table[self.rows[i], p : p + n] for i, (p, n) in enumerate(zip(PREFIX_LENS, NEW_LENS, strict=True))]
        self.entries = native_ops.load_cache(self.cache, torch.cat(loc).long(), self.scale)[:, 0].bfloat16()
        self.start_loc = torch.tensor([0, *NEW_LENS]).cumsum(0).int().to(DEVICE)
        self.prefix_lens = torch.tensor(PREFIX_LENS, dtype=torch.int32, device=DEVICE)
        self.softmax_scale = (self.nope + ROT) ** -0.5

    def chunks(self, tokens: int):
        return cut_prefixes(self.table, self.rows, PREFIX_LENS, tokens)

    def tails(self, window: int):
        """Returns what the first new token of each sequence sees of its prefix, and hides all before that."""
        lens = [min(prefix, window - 1) for prefix in PREFIX_LENS]
        begins = [prefix - length for prefix, length in zip(PREFIX_LENS, lens, strict=True)]
        for row, begin in zip(self.rows, begins, strict=True):
            self.cache[self.table[row, :begin].long()] = float("nan")
        return cut_prefixes(self.table, self.rows, lens, 1 << 20, begins=begins)

    def reference(self, window: int = 0, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """In fp32 throughout."""
        out = torch.empty(len(self.q), HEADS, self.v_dim, device=DEVICE)
        reference.expanded_latent_attention(
            self.q.float(), self.entries.float(), self.w_uk.float(), self.w_uv.float(), out, self.start_loc, self.cache,
            self.chunks(1 << 20), scale=self.softmax_scale, cache_scale=self.scale, window=window,
            sinks=sinks,
        )  # fmt: skip
        return out

    def absorbed_queries(self) -> torch.Tensor:
        q = torch.empty(len(self.q), HEADS, RANK + ROT, dtype=self.q.dtype, device=DEVICE)
        q[..., RANK:] = self.q[..., self.nope :]
        reference.latent_absorb(self.q[..., : self.nope], self.w_uk, q[..., :RANK])
        return q

    def values_of(self, attended: torch.Tensor) -> torch.Tensor:
        out = torch.empty(len(attended), HEADS, self.v_dim, dtype=self.q.dtype, device=DEVICE)
        return reference.latent_absorb(attended, self.w_uv, out)


@interpreter.kernel_test
@pytest.mark.parametrize(
    ("dims", "chunk_tokens"),
    some_of(itertools.product(((128, 128), (192, 256)), (16, 100, 1 << 20)), {((128, 128), 16), ((192, 256), 100)}),
    ids=str,
)
def test_prompts(dims: tuple[int, int], chunk_tokens: int) -> None:
    check_prompts(Latents(*dims), chunk_tokens)


@interpreter.kernel_test
@pytest.mark.parametrize("cache_dtype", some(CACHE_TYPES[1:], CACHE_TYPES[1:2]))
def test_prompts_over_a_quantized_prefix(cache_dtype: torch.dtype) -> None:
    check_prompts(Latents(128, 128, cache_dtype, 0.5), 64)


def check_prompts(problem: Latents, chunk_tokens: int) -> None:
    before = 2  # rows that belong to requests which decode in the same step
    tokens = sum(NEW_LENS)
    out = torch.full((before + tokens, HEADS, problem.v_dim), 7.0, dtype=torch.bfloat16, device=DEVICE)
    q, entries = (torch.cat((x[:before], x)) for x in (problem.q, problem.entries))
    latent_prompt.latent_prompt_attention(
        q, entries, problem.w_uk, problem.w_uv, out, problem.start_loc + before, problem.cache,
        problem.chunks(chunk_tokens), scale=problem.softmax_scale, cache_scale=problem.scale,
        tile=tile_of("latent_prompt_attention", (problem.nope + ROT, problem.v_dim)),
    )  # fmt: skip
    assert (out[:before] == 7.0).all()
    assert relative_error(out[before:], problem.reference()) < BF16_BOUND


@interpreter.kernel_test
@pytest.mark.parametrize(
    ("window", "dims"), some_of(itertools.product((1, 20, 66), ((192, 128), (128, 128))), {(1, (128, 128)),
    (20, (192, 128)), (66, (128, 128))}), ids=str,
)  # fmt: skip
def test_windows(window: int, dims: tuple[int, int]) -> None:
    """Prompts over expanded keys, and tokens that decode over latents. Slots before a window hold anything."""
    problem = Latents(*dims)
    want = problem.reference(window)
    assert relative_error(want, problem.reference()) > 10 * BF16_BOUND
    out = torch.full((len(problem.q), HEADS, problem.v_dim), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    latent_prompt.latent_prompt_attention(
        problem.q, problem.entries, problem.w_uk, problem.w_uv, out, problem.start_loc, problem.cache,
        problem.tails(window), scale=problem.softmax_scale, window=window,
        tile=tile_of("latent_prompt_attention", (problem.nope + ROT, problem.v_dim)),
    )  # fmt: skip
    assert relative_error(out, want) < BF16_BOUND
    last = (problem.start_loc[1:] - 1).long()
    q = problem.absorbed_queries()[last]
    got = decode(problem, q, decode_tile(problem.cache), sliding_window=window)
    assert relative_error(problem.values_of(got), want[last]) < BF16_BOUND


@interpreter.kernel_test
@pytest.mark.parametrize("cache_dtype", some(CACHE_TYPES, CACHE_TYPES[:1]))
def test_absorbed_prompts_equal_uncompressed_ones(cache_dtype: torch.dtype) -> None:
    problem = Latents(128, 128, cache_dtype, 1.0 if cache_dtype == torch.bfloat16 else 0.5)
    q, entries, cache = problem.absorbed_queries(), problem.entries[:, None], problem.cache
    out = torch.empty(len(q), HEADS, RANK, dtype=q.dtype, device=DEVICE)
    name = {1: "fp8_e4m3", 2: "bfloat16"}[cache.element_size()]
    extend_attention_fwd(
        q, entries, entries[..., :RANK], out, cache, cache[..., :RANK], problem.table, problem.rows,
        problem.prefix_lens, problem.start_loc, scale=problem.softmax_scale, k_scale=problem.scale,
        v_scale=problem.scale, tile=tile_of("extend_attention", (RANK + ROT, RANK), name),
    )  # fmt: skip
    assert relative_error(problem.values_of(out), problem.reference()) < BF16_BOUND


@interpreter.kernel_test
@pytest.mark.parametrize("chunk_tokens", [16, 1 << 20])
def test_sinks(chunk_tokens: int) -> None:
    """Prompts over expanded keys in several launches and few, absorbed ones, and decoding in pieces and in one."""
    problem, sinks = Latents(128, 128), torch.linspace(-1.0, 3.0, HEADS, device=DEVICE)
    want = problem.reference(sinks=sinks)
    assert relative_error(want, problem.reference()) > 10 * BF16_BOUND
    out = torch.full((len(problem.q), HEADS, problem.v_dim), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    latent_prompt.latent_prompt_attention(
        problem.q, problem.entries, problem.w_uk, problem.w_uv, out, problem.start_loc, problem.cache,
        problem.chunks(chunk_tokens), scale=problem.softmax_scale, sinks=sinks,
        tile=tile_of("latent_prompt_attention", (problem.nope + ROT, problem.v_dim)),
    )  # fmt: skip
    assert relative_error(out, want) < BF16_BOUND
    last, q = (problem.start_loc[1:] - 1).long(), problem.absorbed_queries()
    got = decode(problem, q[last], decode_tile(problem.cache), 1 if chunk_tokens > 16 else 8, sinks=sinks)
    assert relative_error(problem.values_of(got), want[last]) < BF16_BOUND
    keys, absorbed = problem.entries[:, None], torch.empty(len(q), HEADS, RANK, dtype=q.dtype, device=DEVICE)
    extend_attention_fwd(
        q, keys, keys[..., :RANK], absorbed, problem.cache, problem.cache[..., :RANK], problem.table, problem.rows,
        problem.prefix_lens, problem.start_loc, scale=problem.softmax_scale, sinks=sinks,
        tile=tile_of("extend_attention", (RANK + ROT, RANK)),
    )  # fmt: skip
    assert relative_error(problem.values_of(absorbed), want) < BF16_BOUND


def decode(
    problem: Latents, q: torch.Tensor, tile: AttentionTile, num_sms: int = 8, **features: object
) -> torch.Tensor:
    """Of the last token of each prompt: q [B, heads, rank + rope] -> [B, heads, rank]."""
    seq_lens = problem.prefix_lens + torch.tensor(NEW_LENS, dtype=torch.int32, device=DEVICE)
    workspace = DecodeWorkspace.allocate(len(q), q.shape[1], 1, RANK, num_sms, tile, DEVICE)
    out = torch.empty(len(q), q.shape[1], RANK, dtype=q.dtype, device=DEVICE)
    plan = plan_ahead(seq_lens, workspace, tile)
    decode_attention_fwd(
        q, out, problem.cache, problem.cache[..., :RANK], problem.table, problem.rows, seq_lens, plan,
        scale=problem.softmax_scale, k_scale=problem.scale, v_scale=problem.scale, tile=tile, **features,
    )  # fmt: skip
    return out


def decode_tile(cache: torch.Tensor) -> AttentionTile:
    return tile_of("decode_attention", (RANK + ROT, RANK), {1: "fp8_e4m3", 2: "bfloat16"}[cache.element_size()])


@interpreter.kernel_test
@pytest.mark.parametrize("cache_dtype", some(CACHE_TYPES, CACHE_TYPES[:2]))
def test_absorbed_decoding_equals_the_last_row_of_a_prompt(cache_dtype: torch.dtype) -> None:
    problem = Latents(128, 128, cache_dtype, 1.0 if cache_dtype == torch.bfloat16 else 0.5)
    last = (problem.start_loc[1:] - 1).long()
    out = decode(problem, problem.absorbed_queries()[last], decode_tile(problem.cache))
    assert relative_error(problem.values_of(out), problem.reference()[last]) < BF16_BOUND


@interpreter.kernel_test
@pytest.mark.parametrize("cache_dtype", some([torch.bfloat16, torch.float8_e4m3fn], [torch.bfloat16]))
def test_heads_that_fill_no_block_are_computed_alone_and_in_one_piece(cache_dtype: torch.dtype) -> None:
    problem = Latents(128, 128, cache_dtype, 1.0)
    last = (problem.start_loc[1:] - 1).long()
    q = problem.absorbed_queries()[last].repeat(1, 7, 1)[:, :20]
    out = decode(problem, q, decode_tile(problem.cache) | {"BLOCK_H": 16, "BLOCK_N": 32}, num_sms=1)
    assert relative_error(problem.values_of(out[:, :HEADS]), problem.reference()[last]) < BF16_BOUND
    for head in range(HEADS, 20):
        torch.testing.assert_close(out[:, head], out[:, head % HEADS], **interpreter.SAME_BITS)


@interpreter.kernel_test
@pytest.mark.parametrize("size", [2.0**-40, 2.0**30])
def test_queries_beyond_what_float16_holds_meet_float8_latents(size: float) -> None:
    problem = Latents(128, 128, torch.float8_e4m3fn, 1.0)
    last = (problem.start_loc[1:] - 1).long()
    q = problem.absorbed_queries()[last]
    wanted = decode(problem, q, decode_tile(problem.cache))
    problem.softmax_scale /= size
    out = decode(problem, q * size, decode_tile(problem.cache))
    torch.testing.assert_close(out, wanted, atol=0, rtol=0)
    q[0, 0] = float("nan")
    assert decode(problem, q, decode_tile(problem.cache))[0, 0].isnan().all()


@interpreter.kernel_test
def test_what_decoding_over_latents_cannot_do_is_refused() -> None:
    problem = Latents(128, 128)
    last = (problem.start_loc[1:] - 1).long()
    q, tile = problem.absorbed_queries()[last], decode_tile(problem.cache)
    for feature in ({"sliding_window": 8, "chunked": True}, {"logit_cap": 3.0}):
        with pytest.raises(ValueError, match="latents has neither chunks"):
            decode(problem, q, tile, **feature)
    problem.cache = problem.cache.half()
    with pytest.raises(TypeError, match="latents are torch.float16: neither float8 nor the queries' torch.bfloat16"):
        decode(problem, q, tile)


# --- what needs no kernel ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_tokens", [1, 4, 7, 100])
def test_chunks_cover_every_prefix_token_once(chunk_tokens: int) -> None:
    lens, table = [5, 0, 3, 8], torch.arange(100, 164, dtype=torch.int32).view(4, 16)
    rows = torch.tensor([2, 0, 3, 1])
    chunks = cut_prefixes(table, rows, lens, chunk_tokens)
    by_sequence: list[list[int]] = [[] for _ in lens]
    for chunk in chunks:
        starts, slots = chunk.key_start.tolist(), chunk.slots.tolist()
        assert len(slots) <= chunk_tokens and starts[0] == 0 and starts[-1] == len(slots)
        for parts, begin, end in zip(by_sequence, starts, starts[1:], strict=False):
            parts += slots[begin:end]
    assert by_sequence == [table[row, :length].tolist() for row, length in zip(rows, lens, strict=True)]
    assert cut_prefixes(table, rows, [0] * 4, 3) == ()
    assert [chunk.slots.tolist() for chunk in cut_prefixes(table, rows, [0, 0, 1, 0], 3)] == [[148]]
    (chunk,) = cut_prefixes(table, rows, [2, 0, 1, 3], 9, begins=[3, 0, 2, 5])
    assert chunk.slots.tolist() == [135, 136, 150, 121, 122, 123]


@interpreter.in_two_parts
def test_in_interpreter(part: str) -> None:
    interpreter.run_file(__file__, part)
