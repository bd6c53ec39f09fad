"""The kernels of block-sparse attention against plain torch: interpreted here, natively and larger on a GPU.

Set SGLANG_FORCE_ARCH=sm_120 on another GPU to run them with the tiles that sm_120 gets. The bound of the outputs' error
is 3e-3 of their norm: rounding weights and outputs to bfloat16 makes 2.3e-3 of it. Choices are compared as they are.
"""

from __future__ import annotations

from types import SimpleNamespace

import interpreter
import pytest
import torch

from sglang.srt.blocks.block_selection import reference as native
from sglang.srt.blocks.block_selection.indexer import TritonBlockIndexer
from sglang.srt.blocks.block_selection.kernels.block_scores import block_scores
from sglang.srt.hardware.arch import arch_by_name, current_arch
from sglang.srt.kernels.tiles import attention_tiles
from sglang.srt.layers import native_sparse_ops
from sglang.srt.layers.attention.selection import EntryRows, Selection
from sglang.srt.layers.attention.triton_ops.block_attention import block_attention_fwd
from srt.layers.attention.reference import relative_error

BF16 = torch.bfloat16
BOUND = 3e-3
NUM_SMS = 4 if interpreter.ON_CPU else 100
DEVICE = interpreter.DEVICE
BLOCK, DIM = 16, 128
SLOTS = 768 if interpreter.ON_CPU else 40_960
CONTEXT = 384 if interpreter.ON_CPU else 18_048

DECODED = ([150, 20, 0, 65, 33], [3, 6, 0, 2, 1])
PROMPTS = (list(range(61, 68)) + list(range(290, 296)) + [0], [4] * 7 + [1] * 6 + [0])
"""Two runs that no block of tokens divides, and a row of padding."""


def tiles_of(op: str, kv_dtype: str = "bfloat16", dims: tuple[int, int] = (DIM, DIM)) -> tuple[dict[str, int], ...]:
    arch = arch_by_name("sm_120") if interpreter.ON_CPU else current_arch()
    return attention_tiles(op, *dims, kv_dtype, arch.features)


def entry_rows(counts: list[int], requests: list[int], run: int = 1, block: int = BLOCK) -> EntryRows:
    """Requests have rows of the table out of order; blocks are scattered, the slots of one lie together."""
    generator = torch.Generator().manual_seed(len(counts))
    places = torch.stack([torch.randperm(SLOTS // block, generator=generator)[: CONTEXT // block] for _ in range(7)])
    table = (places[:, :, None] * block + torch.arange(block)).flatten(1).int()
    return EntryRows(
        table.to(DEVICE),
        torch.tensor(requests, device=DEVICE),
        torch.tensor(counts, dtype=torch.int32, device=DEVICE),
        CONTEXT // block * block,
        run=run,
    )


def queries(num_tokens: int, heads: int) -> torch.Tensor:
    """Heads side by side, behind which every token has its key."""
    return torch.randn(num_tokens, heads + 1, DIM, device=DEVICE).to(BF16)[:, :heads]


# --- scores and choices -----------------------------------------------------------------------------------------------


@interpreter.kernel_test
@pytest.mark.parametrize(
    ("heads", "rows", "run", "block", "local", "tile"),
    [
        (4, DECODED, 1, 16, 1, 0),
        (1, DECODED, 1, 16, 2, 1),
        (2, PROMPTS, 7, 16, 1, 0),
        (4, PROMPTS, 1000, 16, 3, 1),
        (3, PROMPTS, 2, 64, 1, 0),
    ],
)
def test_scores(heads: int, rows: tuple[list[int], list[int]], run: int, block: int, local: int, tile: int) -> None:
    torch.manual_seed(2)
    top_blocks = 2
    entries = entry_rows(*rows, run=run, block=block)
    q, keys = queries(len(entries), heads), torch.randn(SLOTS, 1, DIM, device=DEVICE).to(BF16)
    want = native.block_scores(q, keys, entries, block, local)
    got = torch.full((len(entries), heads, want.shape[2] + 3), -3.0, device=DEVICE)
    launch = tiles_of("block_indexer")[tile]
    block_scores(q, keys, entries, block, top_blocks, local, got, tile=launch, num_sms=NUM_SMS)
    blocks = entries.blocks(block, heads).counts.view(len(entries), heads)
    number = torch.arange(got.shape[2], device=DEVICE)
    written = (number < blocks[..., None]) & (blocks > top_blocks)[..., None]
    assert (got[~written] == -3.0).all() and written.any()
    inside = written[..., : want.shape[2]]
    torch.testing.assert_close(got[..., : want.shape[2]][inside], want[inside].float(), rtol=2e-4, atol=2e-3)
    assert torch.isinf(want[inside]).any() and not torch.isinf(want[inside]).all()


@interpreter.kernel_test
@pytest.mark.parametrize("at_once", [None, 2], ids=["whole", "in parts"])
@pytest.mark.parametrize(("rows", "run"), [(DECODED, 1), (PROMPTS, 7)], ids=["decoded", "prompts"])
def test_choices(
    rows: tuple[list[int], list[int]], run: int, at_once: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Integers, so that sums are exact and some are equal: choices agree to the last one."""
    torch.manual_seed(3)
    heads, top_blocks = 2, 3
    entries = entry_rows(*rows, run=run)
    q = torch.randint(-2, 3, (len(entries), heads, DIM), device=DEVICE).to(BF16)
    keys = torch.randint(-2, 3, (SLOTS, 1, DIM), device=DEVICE).to(BF16)
    if at_once is not None:
        monkeypatch.setattr("sglang.srt.blocks.block_selection.indexer.rows_at_once", lambda *_: at_once)
    tile = tiles_of("block_indexer")[0]
    fallbacks = SimpleNamespace(run=lambda launch: launch(tile))
    plan = SimpleNamespace(fallbacks=lambda op: fallbacks, arch=SimpleNamespace(num_sms=NUM_SMS))
    blocks = entries.blocks(BLOCK, heads)
    got = TritonBlockIndexer(plan)(q, keys, entries, blocks, top_blocks, 1)
    want = native.block_indexer(q, keys, entries, blocks, top_blocks, 1)
    assert torch.equal(got.counts, want.counts) and torch.equal(got.slots, want.slots)
    seen = entries.counts > 0
    own = entries.blocks(BLOCK, 1).slots_of((entries.counts[:, None] - 1) // BLOCK)[:, 0]
    last = want.slots.gather(1, (want.counts.long() - 1).clamp(min=0)[:, None])[:, 0].view(-1, heads)
    assert (last[seen] == own[seen, None]).all(), "the block of the token itself is always among them"


@interpreter.kernel_test
def test_no_more_blocks_than_are_chosen_need_no_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the lengths are: no scores are launched."""
    plan = SimpleNamespace(fallbacks=lambda op: None, arch=SimpleNamespace(num_sms=NUM_SMS))
    called: list[tuple[int, ...]] = []
    monkeypatch.setattr(
        "sglang.srt.blocks.block_selection.indexer.select_entries", lambda scores, *_: called.append(scores.shape)
    )
    entries = entry_rows(*DECODED)
    blocks = entries.blocks(BLOCK, 2)
    TritonBlockIndexer(plan)(queries(5, 2), torch.zeros(1), entries, blocks, CONTEXT // BLOCK, 1)
    assert len(called) == 1 and called[0][0] == 2


# --- attention --------------------------------------------------------------------------------------------------------


def selected(entries: EntryRows, groups: int, width: int, block: int) -> Selection:
    """Some blocks of each token and KV head in ascending order, its own as the last one."""
    blocks = entries.blocks(block, groups)
    chosen = torch.full((len(blocks), width), -1, dtype=torch.int32)
    for row, count in enumerate(blocks.counts.tolist()):
        others = torch.randperm(max(0, count - 1))[: width - 1].sort().values.tolist()
        some = [*others, count - 1][: width if count else 0]
        chosen[row, : len(some)] = torch.tensor(some, dtype=torch.int32)
    return Selection(blocks.slots_of(chosen.to(DEVICE)), blocks.counts.clamp(max=width))


@interpreter.kernel_test
@pytest.mark.parametrize(
    ("heads", "kv_heads", "groups", "block", "kv_dtype", "tile", "sms", "rows", "dims"),
    [
        (16, 1, 1, 16, "bfloat16", 0, 4, DECODED, (DIM, DIM)),
        (8, 2, 2, 16, "bfloat16", 1, 4, PROMPTS, (DIM, DIM)),
        (8, 2, 1, 4, "bfloat16", 0, 4, DECODED, (DIM, DIM)),
        (6, 2, 2, 128, "bfloat16", 0, 4, DECODED, (DIM, DIM)),
        (40, 2, 2, 16, "bfloat16", 0, 1, PROMPTS, (DIM, DIM)),
        (8, 2, 2, 16, "fp8_e4m3", 0, 4, PROMPTS, (DIM, DIM)),
        (8, 2, 1, 16, "fp8_e5m2", 1, 40, DECODED, (DIM, DIM)),
        (8, 2, 1, 1, "bfloat16", 0, 40, DECODED, (192, 128)),
        (8, 2, 2, 8, "bfloat16", 1, 40, PROMPTS, (192, 192)),
        (8, 1, 1, 1, "fp8_e4m3", 1, 4, DECODED, (192, 128)),
    ],
)
def test_attention(
    heads: int,
    kv_heads: int,
    groups: int,
    block: int,
    kv_dtype: str,
    tile: int,
    sms: int,
    rows: tuple[list[int], list[int]],
    dims: tuple[int, int],
) -> None:
    torch.manual_seed(4)
    entries = entry_rows(*rows, block=block)
    selection = selected(entries, groups, 5 if block > 1 else 75, block)
    q = torch.randn(len(entries), heads + 2, dims[0], device=DEVICE).to(BF16)[:, :heads]
    stored = {"bfloat16": BF16, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}[kv_dtype]
    caches = [torch.randn(SLOTS, kv_heads, dim, device=DEVICE).to(stored) for dim in dims]
    scales = {} if kv_dtype == "bfloat16" else {"k_scale": 0.7, "v_scale": 1.3}
    if kv_dtype == "bfloat16":
        unread = torch.ones(SLOTS // block, dtype=torch.bool, device=DEVICE)
        unread[selection.slots[selection.slots >= 0].long()] = False
        for cache in caches:
            cache.unflatten(0, (-1, block))[unread] = float("nan")
    got = torch.full((len(entries), heads, dims[1]), float("nan"), device=DEVICE, dtype=BF16)
    arguments = (*caches, selection, entries.counts, block)
    launch = tiles_of("block_attention", kv_dtype, dims)[tile]
    block_attention_fwd(q, *arguments, got, scale=0.05, tile=launch, num_sms=sms, **scales)
    want = torch.empty(len(entries), heads, dims[1], device=DEVICE, dtype=torch.float64)
    native_sparse_ops.attend_blocks(q.double(), *arguments, want, scale=0.05, **scales)
    assert relative_error(got, want) < BOUND
    assert (got[entries.counts == 0] == 0).all()


@interpreter.in_two_parts
def test_in_interpreter(part: str) -> None:
    interpreter.run_file(__file__, part)
