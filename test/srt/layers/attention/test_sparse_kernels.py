"""The kernels of sparse attention against `native_sparse_ops`: interpreted here, natively and larger on a GPU.

Set SGLANG_FORCE_ARCH=sm_120 on another GPU to run them with the tiles that sm_120 gets. Tolerances are those of
`test_attention_kernels`: 2e-3 of the output's norm for entries in bfloat16, whose reference is taken in fp64; packed
entries are dequantized for the reference, so that theirs is the same. Choices are compared as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import interpreter
import pytest
import torch
import triton

from sglang.srt.blocks.shared_sparse import candidates
from sglang.srt.blocks.shared_sparse.triton_candidates import TritonCandidateBlocks
from sglang.srt.hardware.arch import arch_by_name, current_arch
from sglang.srt.kernels.tiles import attention_tiles
from sglang.srt.layers import native_sparse_ops as native
from sglang.srt.layers.attention.entry_shares import num_shares
from sglang.srt.layers.attention.selection import EntryRows, Selection
from sglang.srt.layers.attention.sparse import TritonSparseIndexer
from sglang.srt.layers.attention.triton_ops.index_logits import index_logits
from sglang.srt.layers.attention.triton_ops.select_entries import launch_for, select_entries
from sglang.srt.layers.attention.triton_ops.sparse_attention import MIN_SHARES, sparse_attention_fwd
from sglang.srt.layers.triton_ops import index_store
from sglang.srt.model_executor.model_runner import SHARED_PROMPTS, selection_lengths
from srt.layers.attention.reference import relative_error

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
BOUND = 2e-3
NUM_SMS = 4 if interpreter.ON_CPU else 100
DEVICE = interpreter.DEVICE
SLOTS = 700 if interpreter.ON_CPU else 40_000
CONTEXT = 320 if interpreter.ON_CPU else 18_000


def tiles_of(op: str, dims: tuple[int, int], kv_dtype: str) -> tuple[dict[str, int], ...]:
    arch = arch_by_name("sm_120") if interpreter.ON_CPU else current_arch()
    return attention_tiles(op, *dims, kv_dtype, arch.features)


def entry_rows(counts: list[int], requests: list[int], rate: int = 1, run: int = 1) -> EntryRows:
    """Requests have rows of the table out of order; slots are scattered, those of one entry together."""
    generator = torch.Generator().manual_seed(len(counts))
    places = torch.stack([torch.randperm(SLOTS // rate, generator=generator)[: CONTEXT // rate] for _ in range(7)])
    table = (places[:, :, None] * rate + torch.arange(rate)).flatten(1).int()
    return EntryRows(
        table.to(DEVICE),
        torch.tensor(requests, device=DEVICE),
        torch.tensor(counts, dtype=torch.int32, device=DEVICE),
        CONTEXT // rate,
        rate,
        run,
    )


# --- keys and queries -------------------------------------------------------------------------------------------------


def assert_same_numbers(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """e4m3 numbers that are equal but for the order of sums before they were rounded."""
    actual, expected = actual.float(), expected.float()
    assert ((actual - expected).abs() <= expected.abs() / 8 + 2**-9).all()
    assert (actual == expected).float().mean() > 0.99


@interpreter.kernel_test
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_keys_are_turned_quantized_and_stored(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    keys = (torch.randn(37, 200) * torch.randn(37, 1).exp()).to(dtype).to(DEVICE)[:, :128]
    keys[3] = 0.0
    places = torch.randperm(90, device=DEVICE)[:37]
    places[5] = -1
    caches = [(torch.ones(90, 1, 128, device=DEVICE).to(E4M3), torch.ones(90, 1, device=DEVICE)) for _ in range(2)]
    index_store.index_key_store(keys, *caches[0], places)
    native.index_key_store(keys, *caches[1], places)
    torch.testing.assert_close(caches[0][1], caches[1][1], rtol=1e-5, atol=0)
    assert_same_numbers(caches[0][0], caches[1][0])
    untouched = torch.ones(90, dtype=torch.bool, device=DEVICE)
    untouched[places[places >= 0]] = False
    assert untouched.sum() == 54 and (caches[0][0].float()[untouched] == 1).all()


@interpreter.kernel_test
def test_keys_of_16_bits_are_stored_as_they_are() -> None:
    keys, cache = torch.randn(5, 128, device=DEVICE).to(BF16), torch.zeros(9, 1, 128, device=DEVICE, dtype=BF16)
    places = torch.tensor([3, 8, -1, 0, 1], device=DEVICE)
    index_store.index_key_store(keys, cache, None, places)
    stored = [3, 8, 0, 1]
    assert torch.equal(cache[stored, 0], keys[[0, 1, 3, 4]]) and cache.abs().sum() == cache[stored].abs().sum()
    with pytest.raises(TypeError, match="only e4m3 has scales"):
        index_store.index_key_store(keys, cache, torch.ones(9, 1, device=DEVICE), places)


@interpreter.kernel_test
@pytest.mark.parametrize("heads", [32, 64])
def test_queries_are_turned_and_their_scales_go_to_the_weights(heads: int) -> None:
    torch.manual_seed(1)
    q = torch.randn(5, heads + 3, 128, device=DEVICE).to(BF16)[:, :heads]
    weights = torch.randn(5, heads + 1, device=DEVICE)[:, 1:]
    numbers, scaled = index_store.index_queries(q, weights, 0.01, E4M3)
    expected, expected_scaled = native.index_queries(q, weights, 0.01, E4M3)
    assert_same_numbers(numbers, expected)
    torch.testing.assert_close(scaled, expected_scaled, rtol=1e-5, atol=1e-9)
    same, plain = index_store.index_queries(q, weights, 0.01, BF16)
    assert torch.equal(same, q) and torch.equal(plain, weights * 0.01)


def test_the_turn_changes_no_product() -> None:
    matrix = native.hadamard(128)
    torch.testing.assert_close(matrix @ matrix, torch.eye(128), atol=1e-6, rtol=0)


# --- logits -----------------------------------------------------------------------------------------------------------

DECODED = ([150, 20, 0, 65], [3, 6, 0, 2])
PROMPTS = (list(range(61, 68)) + list(range(290, 296)) + [0], [4] * 7 + [1] * 6 + [0])
"""Two runs that no block of tokens divides, and a row of padding."""


@interpreter.kernel_test
@pytest.mark.parametrize(
    ("heads", "dtype", "rows", "run", "rate", "tile", "dim"),
    [
        (64, E4M3, DECODED, 1, 1, 0, 128),
        (64, E4M3, PROMPTS, 4, 1, 0, 128),
        (32, E4M3, PROMPTS, 1000, 1, 0, 128),
        (32, E4M3, DECODED, 1, 1, 1, 128),
        (64, BF16, PROMPTS, 4, 1, 0, 128),
        (32, BF16, DECODED, 1, 1, 1, 128),
        (64, E4M3, ([60, 74, 75, 3], [5, 2, 2, 1]), 4, 4, 0, 128),
        (4, BF16, DECODED, 2, 1, 0, 256),
        (4, BF16, PROMPTS, 8, 1, 1, 256),
    ],
)
def test_logits(
    heads: int, dtype: torch.dtype, rows: tuple[list[int], list[int]], run: int, rate: int, tile: int, dim: int
) -> None:
    torch.manual_seed(2)
    top_k = 40
    entries = entry_rows(*rows, rate=rate, run=run)
    keys, scales = torch.zeros(SLOTS, 1, dim, device=DEVICE, dtype=dtype), None
    if dtype == E4M3:
        scales = torch.zeros(SLOTS, 1, device=DEVICE)
    native.index_key_store(
        torch.randn(SLOTS, dim, device=DEVICE).to(BF16), keys, scales, torch.arange(SLOTS, device=DEVICE)
    )
    q, weights = native.index_queries(
        torch.randn(len(entries), heads, dim, device=DEVICE).to(BF16),
        torch.randn(len(entries), heads, device=DEVICE),
        (dim * heads) ** -0.5,
        dtype,
    )
    expected = native.index_logits(q, weights, keys, scales, entries)
    width = -(-entries.max_count // 16) * 16
    logits = torch.full((len(entries), width), float("nan"), device=DEVICE)
    choice = tiles_of("sparse_indexer", (dim, dim), "fp8_e4m3" if dtype == E4M3 else "bfloat16")[tile]
    index_logits(q, weights, keys, scales, entries, top_k, logits, tile=choice, num_sms=NUM_SMS)
    written = (torch.arange(width, device=DEVICE) < entries.counts[:, None]) & (entries.counts > top_k)[:, None]
    assert torch.equal(~logits.isnan(), written)
    at = written[:, : entries.max_count]
    # Matrix units add products of e4m3 with fewer bits than fp32 has.
    bound = 1e-3 if dtype == E4M3 and not interpreter.ON_CPU else 1e-4
    largest = expected[at].abs().max().item()
    torch.testing.assert_close(logits[:, : entries.max_count][at], expected[at], rtol=bound, atol=bound * largest)


@interpreter.kernel_test
def test_types_that_do_not_belong_together_are_refused() -> None:
    entries = entry_rows([9], [0])
    q, keys = torch.zeros(1, 32, 128, device=DEVICE).to(BF16), torch.zeros(9, 1, 128, device=DEVICE).to(E4M3)
    tile = tiles_of("sparse_indexer", (128, 128), "bfloat16")[0]
    with pytest.raises(TypeError, match="queries are torch.bfloat16, keys torch.float8_e4m3fn"):
        index_logits(q, q[..., 0].float(), keys, None, entries, 4, q, tile=tile, num_sms=1)


# --- the choice -------------------------------------------------------------------------------------------------------


def chosen_by_kernel(logits: torch.Tensor, rows: EntryRows, top_k: int, tile: int) -> tuple[torch.Tensor, ...]:
    slots = torch.full((len(rows), top_k), -7, dtype=torch.int32, device=DEVICE)
    chosen = torch.full((len(rows),), -7, dtype=torch.int32, device=DEVICE)
    select_entries(logits, rows, top_k, slots, chosen, launches=({"TILE": tile, "num_warps": 4},))
    return slots, chosen


LOGITS = {
    "normal": lambda shape: torch.randn(shape),
    "ties": lambda shape: torch.randint(-3, 4, shape).float() / 2,
    "zeros": lambda shape: torch.where(torch.rand(shape) < 0.5, -0.0, 0.0),
    "wide": lambda shape: torch.randn(shape).exp().pow(20) * torch.randn(shape).sign(),
    "close": lambda shape: 1.0 + torch.randint(0, 40, shape) * 2.0**-23,
    "infinite": lambda shape: torch.where(torch.rand(shape) < 0.3, float("-inf"), torch.randn(shape)),
}


@interpreter.kernel_test
@pytest.mark.parametrize("kind", LOGITS)
@pytest.mark.parametrize(("top_k", "tile"), [(16, 512), (16, 128), (4, 32)])
def test_choices_are_exact_and_in_order(kind: str, top_k: int, tile: int) -> None:
    """In one, two and three levels for the longest row."""
    torch.manual_seed(3)
    counts = [0, 1, top_k, top_k + 1, 64, 200, 320]
    rows = replace(entry_rows(counts, [0, 1, 2, 3, 4, 5, 3]), max_count=320)
    logits = LOGITS[kind]((len(counts), 320)).to(DEVICE)
    for row, count in enumerate(counts):
        logits[row, count:] = float("nan")
    expected = rows.slots_of(native.top_entries(logits.nan_to_num(0.0, neginf=float("-inf")), rows.counts, top_k))
    slots, chosen = chosen_by_kernel(logits, rows, top_k, tile)
    assert torch.equal(slots, expected)
    assert torch.equal(chosen, rows.counts.clamp(max=top_k))


@interpreter.kernel_test
@pytest.mark.parametrize("top_k", [512, 1024, 2048])
def test_choices_of_published_sizes(top_k: int) -> None:
    """Rows of up to a million logits natively."""
    torch.manual_seed(4)
    counts = [top_k, 2500] if interpreter.ON_CPU else [top_k + 1, 70_001, 1_000_000]
    table = torch.randperm(max(counts)).int()[None].to(DEVICE)
    rows = EntryRows(
        table,
        torch.zeros(len(counts), dtype=torch.int64, device=DEVICE),
        torch.tensor(counts, dtype=torch.int32, device=DEVICE),
        max(counts),
    )
    logits = torch.randn(len(counts), max(counts) // 16 * 16 + 16, device=DEVICE)
    expected = rows.slots_of(native.top_entries(logits[:, : max(counts)], rows.counts, top_k))
    slots = torch.empty((len(counts), top_k), dtype=torch.int32, device=DEVICE)
    chosen = torch.empty(len(counts), dtype=torch.int32, device=DEVICE)
    select_entries(logits, rows, top_k, slots, chosen)
    assert torch.equal(slots, expected)


@interpreter.kernel_test
def test_short_contexts_need_no_logits() -> None:
    rows = entry_rows([5, 0, 64], [1, 2, 3])
    rows = EntryRows(rows.req_to_token, rows.req_pool_indices, rows.counts, 64)
    logits = torch.full((1, 16), float("nan"), device=DEVICE)
    slots, chosen = chosen_by_kernel(logits, rows, 64, 128)
    assert torch.equal(slots, rows.all().slots) and torch.equal(chosen, rows.counts)


# --- attention --------------------------------------------------------------------------------------------------------


class _Plan:
    """What the indexer's kernels ask a plan for."""

    arch = replace(arch_by_name("sm_120"), num_sms=NUM_SMS)

    def fallbacks(self, op: str) -> _Plan:
        return self

    def run(self, launch: Callable[[dict[str, int]], None]) -> None:
        launch(tiles_of("sparse_indexer", (128, 128), "bfloat16")[0])


@interpreter.kernel_test
@pytest.mark.parametrize("rate", [1, 2])
@pytest.mark.parametrize(("top", "quantized"), [(1, False), (4, False), (4, True)])
def test_runs_by_their_best_entry_and_the_choice_in_them(rate: int, top: int, quantized: bool) -> None:
    """Of few entries all runs, of more those with the best ones and the token's own, which may be unfinished."""
    torch.manual_seed(top)
    block, heads, top_k = 8, 32, 6
    counts, requests = [0, 3, 8, 9, 31, 70, 100, 101], [0, 1, 1, 1, 2, 2, 3, 3]
    whole = entry_rows([1] * 8, requests, rate * block)
    rows = EntryRows(whole.req_to_token, whole.req_pool_indices, torch.tensor(counts, device=DEVICE).int(), CONTEXT // rate, rate)  # noqa: E501  # fmt: skip
    q = torch.randn(len(counts), heads, 128, device=DEVICE).bfloat16()
    weights = torch.randn(len(counts), heads, device=DEVICE)
    keys = torch.randn(SLOTS // rate, 1, 128, device=DEVICE).bfloat16()
    scales = None
    if quantized:
        stored = torch.zeros(len(keys), 1, 128, device=DEVICE).to(E4M3), torch.zeros(len(keys), 1, device=DEVICE)
        native.index_key_store(keys[:, 0], *stored, torch.arange(len(keys), device=DEVICE))
        (keys, scales), (q, weights) = stored, native.index_queries(q, weights, 1.0, E4M3)
    want = candidates.candidate_blocks(q, weights, keys, scales, rows, block, top)
    got = TritonCandidateBlocks(_Plan())(q, weights, keys, scales, rows, block, top)  # type: ignore[arg-type]
    assert torch.equal(got.counts, want.counts) and torch.equal(got.slots, want.slots)
    theirs = candidates.choose_within(native.sparse_indexer, q, weights, keys, scales, rows, want, block, top_k)
    ours = candidates.choose_within(TritonSparseIndexer(_Plan()), q, weights, keys, scales, rows, got, block, top_k)  # type: ignore[arg-type]
    assert torch.equal(ours.counts, theirs.counts)
    assert torch.equal(ours.slots[:, :top_k], theirs.slots)


def random_selection(counts: list[int], width: int, holes: bool) -> Selection:
    slots = torch.stack([torch.randperm(SLOTS)[:width] for _ in counts]).int()
    if holes:
        slots[torch.rand(slots.shape) < 0.3] = -1
    beyond = torch.arange(width) >= torch.tensor(counts)[:, None]
    slots[beyond] = SLOTS + 1000  # nobody may read there
    return Selection(slots.to(DEVICE), torch.tensor(counts, dtype=torch.int32, device=DEVICE))


def check_attention(
    dims: tuple[int, int],
    heads: int,
    counts: list[list[int]],
    *,
    packed: bool = False,
    sinks: bool = False,
    num_sms: int = NUM_SMS,
    tile: int = 0,
    holes: bool = True,
    dtype: torch.dtype = BF16,
) -> None:
    """Against fp64 with the entries as they are stored; whatever is not selected is not a number."""
    torch.manual_seed(5)
    head_dim, rank = dims
    num_tokens = len(counts[0])
    sources, exact = [], []
    for own in counts:
        selection = random_selection(own, max(64, max(own)), holes)
        entries = torch.randn(SLOTS, head_dim, device=DEVICE) * torch.randn(SLOTS, 1, device=DEVICE).exp()
        kept = selection.slots[(selection.slots >= 0) & (selection.slots < SLOTS)].long()
        stored = native.pack_latents(entries) if packed else entries.to(dtype)
        poison = torch.full_like(stored, 0xFF if packed else float("nan"))
        poison[kept] = stored[kept]
        sources.append((poison[:, None], selection))
        values = native.unpack_latents(stored) if packed else stored
        clean = torch.where(torch.arange(width_of(selection), device=DEVICE) < selection.counts[:, None],
                            selection.slots, -1)  # fmt: skip
        exact.append((values[:, None].double(), Selection(clean, selection.counts)))
    q = torch.randn(num_tokens, heads, head_dim, device=DEVICE).to(dtype)
    sink = torch.randn(heads, device=DEVICE) if sinks else None
    out = torch.full((num_tokens, heads, rank), float("nan"), device=DEVICE)
    lse = torch.full((num_tokens, heads), float("nan"), device=DEVICE)
    expected, expected_lse = out.double(), lse.double()
    native.attend_selected(q.double(), exact, expected, scale=0.05, sinks=sink, lse=expected_lse)
    choice = tiles_of("sparse_attention", dims, "fp8_e4m3" if packed else "bfloat16")[tile]
    options = {"scale": 0.05, "tile": choice, "num_sms": num_sms, "sinks": sink}
    sparse_attention_fwd(q, sources, out, **options, lse=lse)
    assert relative_error(out, expected) < BOUND
    torch.testing.assert_close(lse, expected_lse.float(), rtol=1e-4, atol=1e-3)
    rounded = torch.full((num_tokens, heads, rank), float("nan"), device=DEVICE, dtype=dtype)
    sparse_attention_fwd(q, sources, rounded, **options)
    assert torch.equal(rounded, out.to(dtype))


def width_of(selection: Selection) -> int:
    return selection.slots.shape[1]


MLA, V4 = (576, 512), (512, 512)
COUNTS = [70, 0, 33]
"""Entries of three tokens."""


@interpreter.kernel_test
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("heads", "num_sms"), [(8, 1), (16, 9), (40, 1), (24, 6)])
def test_latents(heads: int, packed: bool, num_sms: int) -> None:
    """In one share of entries and in several."""
    check_attention(MLA, heads, [COUNTS], packed=packed, num_sms=num_sms, tile=0 if heads > 16 else 1)


@interpreter.kernel_test
@pytest.mark.parametrize("packed", [False, True])
def test_latents_with_sinks_and_smaller_tiles(packed: bool) -> None:
    for num_sms in (1, 3):
        check_attention(MLA, 12, [COUNTS], packed=packed, sinks=True, num_sms=num_sms, tile=-1)


@interpreter.kernel_test
@pytest.mark.parametrize(("heads", "num_sms"), [(40, 1), (16, 6)])
def test_one_softmax_over_two_caches_with_sinks(heads: int, num_sms: int) -> None:
    more = [40, 0, 70]
    check_attention(V4, heads, [COUNTS, more], sinks=True, num_sms=num_sms, tile=0 if heads > 16 else 1)


@interpreter.kernel_test
def test_keys_that_are_values_without_sinks() -> None:
    check_attention(V4, 8, [COUNTS], num_sms=7, tile=1, dtype=torch.float16)


@interpreter.kernel_test
def test_wrong_caches_are_refused() -> None:
    selection = random_selection([3], 64, False)
    q, out = torch.zeros(1, 8, 576, device=DEVICE).to(BF16), torch.zeros(1, 8, 512, device=DEVICE)
    options = {"scale": 1.0, "tile": tiles_of("sparse_attention", MLA, "bfloat16")[1], "num_sms": 1}
    packed = torch.zeros(9, 1, 656, dtype=torch.uint8, device=DEVICE)
    with pytest.raises(ValueError, match="one cache"):
        sparse_attention_fwd(q, [(packed, selection)] * 2, out, **options)
    with pytest.raises(TypeError, match=r"neither packed \(uint8\) nor torch.bfloat16"):
        sparse_attention_fwd(q, [(packed.view(E4M3), selection)], out, **options)
    with pytest.raises(ValueError, match="656 bytes apart, not 672"):
        wide = torch.zeros(9, 1, 672, dtype=torch.uint8, device=DEVICE)
        sparse_attention_fwd(q, [(wide, selection)], out, **options)


def test_shares_fill_the_gpu_and_stay_within_bounds() -> None:
    assert num_shares(1, 64, 188) == 64  # one token of 2,048 entries
    assert num_shares(8192, 64, 188) == 1  # a prompt
    for programs in (1, 2, 7, 64, 100, 188, 189, 1000, 100_000):
        for tiles in (1, 3, 64, 128):
            shares = num_shares(programs, tiles, 188)
            assert 1 <= shares <= min(64, tiles) and (shares == 1 or programs * shares <= 4 * 188)


@interpreter.in_two_parts
def test_in_interpreter(part: str) -> None:
    interpreter.run_file(__file__, part)


@pytest.mark.parametrize(("rate", "top_k"), [(1, 2048), (4, 512), (128, 16)])
@pytest.mark.parametrize("context_len", [2000, 5000, 32_768, 163_840, 1 << 20])
def test_a_start_meets_every_launch_of_a_selection(rate: int, top_k: int, context_len: int) -> None:
    """What `select_entries` launches depends on the length of the longest request alone."""

    def launches(length: int) -> tuple[int, int]:
        cells, levels = max(length // rate, top_k), 1
        tile = launch_for(cells, top_k)["TILE"]
        while cells > tile:
            cells, levels = -(-cells // tile) * top_k, levels + 1
        return tile, levels

    warm = {launches(length) for length in (1, *selection_lengths(context_len))}
    assert {launches(length) for length in range(1, context_len, 61)} <= warm


@pytest.mark.parametrize("arch", ["sm_90", "sm_120", "sm_121"])
@pytest.mark.parametrize("tiles", [8, 32, 66])
@pytest.mark.parametrize("head_tiles", [1, 2, 8])
def test_a_start_meets_every_merge_of_shares(head_tiles: int, tiles: int, arch: str) -> None:
    def merges(tokens: int) -> int:
        count = num_shares(tokens * head_tiles, tiles, 2 * arch_by_name(arch).num_sms)
        return max(MIN_SHARES, triton.next_power_of_2(count)) if count > 1 else 0

    assert {merges(tokens) for tokens in range(1, 3000)} == {merges(tokens) for tokens in (*SHARED_PROMPTS, 3000)}
