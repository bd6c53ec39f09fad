"""Attention of draft tokens, a few tokens of each sequence with the keys split between programs, against fp32
references: interpreted here, natively (and over longer sequences) on a GPU."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace

import interpreter
import pytest
import torch
from pairs import some_of

from sglang.srt.hardware.arch import arch_by_name, current_arch
from sglang.srt.kernels.tiles import HEAD_DIMS, MLA_LATENT, attention_tiles, fp4_head_dims
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.layers.attention.triton_ops.decode_attention import decode_attention_fwd
from sglang.srt.layers.attention.triton_ops.decode_biased import decode_biased_fwd
from sglang.srt.layers.attention.triton_ops.decode_fp4 import decode_fp4_fwd
from sglang.srt.layers.attention.triton_ops.decode_workspace import DecodeWorkspace
from sglang.srt.layers.step_rows import DecodeRows, ExtendRows, TokenSlots, VerifyRows
from sglang.srt.plan.attention_memory import AttentionSizes, attention_bytes
from sglang.srt.plan.step_widths import VERIFY_ROWS, StepWidths
from srt.layers.attention.backend_harness import layer_of, new_slots, plan_of, store_new_tokens
from srt.layers.attention.decode_plans import plan_ahead
from srt.layers.attention.reference import Problem, attend, biases_of_keys, relative_error, visible_keys
from srt.layers.test_fp4_cache import stored

BOUNDS = {None: 2e-3, torch.float8_e4m3fn: 2e-2, torch.float8_e5m2: 2e-2}
KV_NAMES = {None: "bfloat16", torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2"}
PREFIXES = [0, 70, 31, 62, 60]
"""Of which the draft tokens lie within a tile of keys, over the edge of one, and behind one."""
MISSING = [0, 1, 0, 0, 2]
"""Rows of each sequence that are padding: as in a graph, where every request has as many rows."""
DIMS = [(64, 64), (72, 72), (192, 128), MLA_LATENT]
if not interpreter.ON_CPU:
    PREFIXES, DIMS = [0, 99, 31, 5000, 17_000], list(HEAD_DIMS)


def run(
    p: Problem, rows: int, kv_name: str = "bfloat16", fp4: dict[str, torch.Tensor] | None = None, **features: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the output and the lengths up to which tokens count."""
    arch = arch_by_name("sm_120") if interpreter.ON_CPU else current_arch()
    tile = attention_tiles("decode_attention", p.head_dim, p.v_head_dim, kv_name, arch.features)[0]
    lens = (p.prefix + rows - torch.tensor(MISSING, device=p.device).clamp(max=rows - 1)).int()
    workspace = DecodeWorkspace.allocate(
        len(lens) + 2, p.num_heads * rows, p.num_kv_heads, p.v_head_dim, 8, tile, p.device
    )
    workspace.part_o.fill_(float("nan"))
    workspace.part_lse.fill_(float("nan"))
    plan = plan_ahead(lens, workspace, tile)
    out = torch.full((len(p.q), p.num_heads, p.v_head_dim), float("nan"), device=p.device)
    caches = fp4 or {"k_cache": p.k_cache, "v_cache": p.v_cache}
    usual = decode_biased_fwd if "bias" in features else decode_attention_fwd
    (decode_fp4_fwd if fp4 else usual)(
        p.q, out, req_to_token=p.req_to_token, req_pool_indices=p.req_pool_indices, seq_lens=lens, plan=plan,
        scale=p.head_dim**-0.5, tile=tile, k_scale=p.k_scale, v_scale=p.v_scale, prefix_lens=p.prefix, **caches,
        **features,
    )  # fmt: skip
    return out, lens


def check(p: Problem, rows: int, bound: float, fp4: dict[str, torch.Tensor] | None = None, **features: object) -> None:
    kv_name = "fp4_e2m1" if fp4 else KV_NAMES[p.kv_dtype]
    out, lens = run(p, rows, kv_name, fp4, **features)
    window, sinks = int(features.get("sliding_window", 0)), features.get("sinks")
    assert torch.isfinite(out).all(), "rows of padding must be finite, too"
    for i, (prefix, end) in enumerate(zip(p.prefix_lens, lens.tolist(), strict=True)):
        k, v = (cached.nan_to_num(0.0) for cached in p.cached(i, end))
        own = slice(i * rows, i * rows + end - prefix)
        seen = visible_keys(torch.arange(prefix, end, device=p.device), end, True, window, "chunked" in features)
        positions, bias = torch.arange(prefix, end, device=p.device), features.get("bias")
        biases = None if bias is None else biases_of_keys(bias[own], positions, end)
        want = attend(p.q[own], k, v, seen, p.head_dim**-0.5, features.get("logit_cap", 0.0), sinks, biases)
        assert relative_error(out[own], want) < bound, f"sequence {i}"


def problem(rows: int, heads: tuple[int, int], dims: tuple[int, int], **options: object) -> Problem:
    p = Problem(
        PREFIXES, [rows] * len(PREFIXES), *heads, *dims, v_in_k=dims == MLA_LATENT, device=interpreter.DEVICE, **options
    )
    for i, (prefix, missing) in enumerate(zip(PREFIXES, MISSING, strict=True)):
        # Behind a sequence's end lie slots of anybody.
        end = prefix + rows - min(missing, rows - 1)
        stale = p.req_to_token[p.req_pool_indices[i], end:].long()
        if p.k_cache.element_size() > 1:
            p.k_cache[stale] = p.v_cache[stale] = float("nan")
    return p


@interpreter.kernel_test
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_head_dims(dims: tuple[int, int]) -> None:
    heads = (16, 1) if dims == MLA_LATENT else (6, 2)
    check(problem(4, heads, dims), 4, BOUNDS[None])


@interpreter.kernel_test
@pytest.mark.parametrize("window", [2, 33])
def test_windows_over_latents(window: int) -> None:
    check(problem(3, (16, 1), MLA_LATENT), 3, BOUNDS[None], sliding_window=window)


@interpreter.kernel_test
@pytest.mark.parametrize(
    ("rows", "heads"),
    some_of([(2, (4, 4)), (3, (8, 1)), (16, (10, 2)), (4, (40, 2))], {(2, (4, 4)), (3, (8, 1)), (16, (10, 2))}),
    ids=str,
)
def test_groupings(rows: int, heads: tuple[int, int]) -> None:
    check(problem(rows, heads, (64, 64)), rows, BOUNDS[None])


@interpreter.kernel_test
@pytest.mark.parametrize(("extent", "window"), some_of([(5, 0), (40, 33)], {(40, 33)}))
def test_biases_by_distance(extent: int, window: int) -> None:
    p = problem(3, (6, 2), (64, 64))
    bias = 3 * torch.randn(len(p.q), 6, extent, device=p.device).to(torch.bfloat16)
    check(p, 3, BOUNDS[None], bias=bias, **({"sliding_window": window} if window else {}))


@interpreter.kernel_test
@pytest.mark.parametrize(
    ("dims", "kv_dtype"),
    some_of(
        itertools.product(((64, 64), MLA_LATENT), (torch.float8_e4m3fn, torch.float8_e5m2)),
        {((64, 64), torch.float8_e5m2), (MLA_LATENT, torch.float8_e4m3fn)},
    ),
    ids=str,
)
def test_float8_caches(dims: tuple[int, int], kv_dtype: torch.dtype) -> None:
    heads = (16, 1) if dims == MLA_LATENT else (6, 2)
    scale = {"k_scale": 0.5, "v_scale": 0.5 if dims == MLA_LATENT else 1.75}
    check(problem(4, heads, dims, kv_dtype=kv_dtype, page_size=16, **scale), 4, BOUNDS[kv_dtype])


@interpreter.kernel_test
@pytest.mark.parametrize(
    ("rows", "features"),
    [(2, {"sliding_window": 20}), (5, {"logit_cap": 5.0}), (2, {"sliding_window": 33, "chunked": True})],
    ids=str,
)
def test_four_bit_caches(rows: int, features: dict[str, float]) -> None:
    for dims in fp4_head_dims()[: 1 if interpreter.ON_CPU else None]:
        p = Problem(PREFIXES, [rows] * len(PREFIXES), 6, 2, *dims, device=interpreter.DEVICE, k_scale=0.5, v_scale=2.0)
        codes, p = stored(p)
        check(p, rows, 2e-3, codes, sinks=torch.linspace(-2, 3, 6, device=p.device), **features)


@interpreter.kernel_test
@pytest.mark.parametrize(
    ("with_sinks", "window"),
    some_of(
        itertools.product((False, True), (0, 1, 20, 64, 1 << 20)), {(True, 0), (False, 1), (True, 20), (False, 1 << 20)}
    ),
)
def test_windows_sinks_and_caps(window: int, with_sinks: bool) -> None:
    cap = 30.0 if with_sinks else 0.0
    p = problem(4, (6, 2), (64, 64))
    for i, prefix in enumerate(p.prefix_lens):  # handed on to other requests
        stale = p.req_to_token[p.req_pool_indices[i], : max(0, prefix + 1 - window) if window else 0].long()
        p.k_cache[stale] = p.v_cache[stale] = float("nan")
    sinks = torch.linspace(-1.0, 4.0, p.num_heads, device=p.device) if with_sinks else None
    check(p, 4, BOUNDS[None], sliding_window=window, sinks=sinks, logit_cap=cap)


@interpreter.kernel_test
@pytest.mark.parametrize("size", [3])
def test_chunks(size: int) -> None:
    """Guesses of one request lie in one chunk, in two, or in one each."""
    p = problem(4, (6, 2), (64, 64))
    for i, prefix in enumerate(p.prefix_lens):  # handed on to other requests
        stale = p.req_to_token[p.req_pool_indices[i], : prefix // size * size].long()
        p.k_cache[stale] = p.v_cache[stale] = float("nan")
    check(p, 4, BOUNDS[None], sliding_window=size, chunked=True)


@interpreter.kernel_test
def test_one_row_is_a_decoding_token() -> None:
    """To the last bit, whether it comes as a draft token or not."""
    p = problem(1, (6, 2), (64, 64))
    drafted, lens = run(p, 1)
    tile = attention_tiles("decode_attention", 64, 64, "bfloat16", current_arch().features)[0]
    if interpreter.ON_CPU:
        tile = attention_tiles("decode_attention", 64, 64, "bfloat16", arch_by_name("sm_120").features)[0]
    workspace = DecodeWorkspace.allocate(len(lens) + 2, 6, 2, 64, 8, tile, p.device)
    plan = plan_ahead(lens, workspace, tile)
    out = torch.empty_like(drafted)
    decode_attention_fwd(
        p.q, out, p.k_cache, p.v_cache, p.req_to_token, p.req_pool_indices, lens, plan, scale=64**-0.5, tile=tile
    )
    assert torch.equal(out, drafted)


@interpreter.kernel_test
def test_the_backend_attends_to_draft_tokens_as_to_prompts() -> None:
    """Through the builder of prompts, at the widths and numbers of requests that its one workspace is for."""
    choices = {op: SimpleNamespace(name="triton") for op in ("decode_attention", "extend_attention")}
    for width, count in ((4, 5), (2, 3)):
        p = problem(width, (6, 2), (64, 64))
        plan = plan_of(p, max_running_requests=5, verified_tokens=4, choices=choices, context_len=1 << 15)
        attention, layer = TritonAttnBackend(plan, p.device), layer_of(p)
        builder = attention.extend_builder(layer.site)
        store_new_tokens(p)
        slots, ends, part = new_slots(p)[: width * count], p.prefix + width, slice(width * count)
        starts = torch.arange(count + 1, dtype=torch.int32, device=p.device) * width
        rows = ExtendRows(
            p.req_pool_indices[:count], ends[:count], p.prefix[:count], starts, (TokenSlots(p.req_to_token, slots),),
            [width] * count, [1] * count, draft_tokens=VerifyRows(width, ends[:count]),
        )  # fmt: skip
        new = p.k[part], p.v[part]
        q, outs = p.q[: width * count], []
        for given in (rows, replace(rows, draft_tokens=None)):
            metadata = builder.build(given)
            # Behind the plan: its reader may begin before the launch ahead of it has ended.
            outs.append(torch.full_like(q, float("nan"), dtype=torch.float32))
            metadata.attend(q, *new, layer, outs[-1])
        assert relative_error(*outs) < BOUNDS[None]


@interpreter.kernel_test
@pytest.mark.parametrize("window", [0, 33])
def test_causal_blocks_of_drafts_attend_as_draft_tokens(window: int) -> None:
    """Through the builder of decoding requests, whose site counts the rows of a block as heads."""
    width, heads = 4, (6, 2)
    p = problem(width, heads, (64, 64))
    choices = {op: SimpleNamespace(name="triton") for op in ("decode_attention", "extend_attention")}
    plan = plan_of(p, max_running_requests=5, verified_tokens=1, choices=choices, context_len=1 << 15)
    layer = layer_of(p, sliding_window=window)
    shape = replace(layer.site.shape, num_heads=width * heads[0])
    builder = TritonAttnBackend(plan, p.device).decode_builder(replace(layer.site, shape=shape))
    store_new_tokens(p)
    want, lens = run(p, width, sliding_window=window)
    rows = DecodeRows(p.req_pool_indices, lens, (TokenSlots(p.req_to_token, new_slots(p)),))
    metadata = builder.build(rows)
    out = torch.full_like(p.q, float("nan"), dtype=torch.float32)
    metadata.attend(p.q, layer, out, starts=p.prefix)
    assert torch.equal(out, want)


@pytest.mark.pairs
@pytest.mark.parametrize("most", [2, 4, 9, 16])
@pytest.mark.parametrize("heads", [(32, 8), (40, 2), (6, 6), (128, 1)], ids=str)
@pytest.mark.parametrize("batch", [1, 64, 1024])
def test_the_plan_counts_the_workspace(heads: tuple[int, int], most: int, batch: int) -> None:
    """Of decoding and of draft tokens together, whichever of their widths takes most."""
    num_heads, kv_heads = heads
    dims = MLA_LATENT if kv_heads == 1 else (128, 128)
    tile = attention_tiles("decode_attention", *dims, "bfloat16", arch_by_name("sm_120").features)[0]
    shape = (num_heads, kv_heads, dims[1], 188, tile, "meta", 1 << 17)
    widths = StepWidths(tuple(range(1, most + 1))).limited(batch, ())
    batches = {tokens: widths.max_batch(tokens, batch) for tokens in range(2, most + 1)}
    one, several = DecodeWorkspace.allocate(batch, *shape), DecodeWorkspace.for_verify(batches, *shape)
    counts = ((one, batch), (several[most], batches[most]))
    plans = [torch.empty(each.num_pieces(count) * 4 + count * 2, dtype=torch.int32) for each, count in counts]
    buffers = [*plans, *(part for each in (one, several[most]) for part in (each.part_o, each.part_lse))]
    choice = SimpleNamespace(need=SimpleNamespace(op="decode_attention"), tile=tile, name="triton")
    drafts = {"verified_tokens": most, "verify_rows": widths.step_rows(batch)}
    sizes = AttentionSizes(((num_heads, dims[1]),), dims[1], 0, 188, batch, (), 1, 1, (0,), **drafts)
    assert sum(part.nbytes for part in buffers) <= attention_bytes({"decode_attention": choice}, sizes)
    for tokens, workspace in several.items():
        max_batch = batches[tokens]
        assert max_batch == batch or tokens not in widths.of(max_batch + 1), "a step of more has fewer tokens"
        rows = workspace.num_pieces(max_batch) * tokens * num_heads
        assert rows < (max(batch, VERIFY_ROWS) + workspace.num_slots * workspace.waves * tokens + tokens) * num_heads
        assert workspace.part_lse.numel() >= rows and workspace.part_o.numel() >= rows * dims[1]


@interpreter.in_two_parts
def test_in_interpreter(part: str) -> None:
    interpreter.run_file(__file__, part)
