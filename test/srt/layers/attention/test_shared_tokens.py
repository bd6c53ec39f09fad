"""Attention to tokens that ranks share out: the parts that each makes of its own are one softmax, and tokens that come
together on every rank are found where the index says."""

from __future__ import annotations

import interpreter
import pytest
import torch

from sglang.srt.distributed.groups import Group
from sglang.srt.kernels.tiles import MLA_LATENT
from sglang.srt.layers import native_ops
from sglang.srt.layers.attention.part_merge import _weighted, _weights
from sglang.srt.layers.attention.selection import Selection
from sglang.srt.layers.attention.token_shares import (
    GatheredTokens,
    Tokens,
    own_rows,
    own_rows_before_replay,
    own_slots,
    with_own_table,
)
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.layers.step_rows import DecodeRows, TokenSlots
from sglang.srt.layers.triton_ops import part_rows
from srt.layers.attention.part_problems import merged
from srt.layers.attention.reference import Problem, reference_decode, relative_error

LENS = [0, 400, 2, 1]
SHORT = [0, 9, 2, 1]
"""Of the tokens before the new one: some ranks have none, and of the first there are several pieces. The interpreter
takes long for latents, whose every head is merged by 32 programs: on a CPU there are four heads."""


def problem(latent: bool, kv_dtype: torch.dtype | None, page_size: int, device: str) -> Problem:
    heads, dims = ((4 if device == "cpu" else 16, 1), MLA_LATENT) if latent else ((6, 2), (64, 64))
    lens = SHORT if latent else LENS
    options = {"kv_dtype": kv_dtype, "k_scale": 0.5, "v_scale": 0.5} if kv_dtype else {}
    return Problem(lens, [1] * len(lens), *heads, *dims, v_in_k=latent, page_size=page_size, device=device, **options)


@interpreter.kernel_test
@pytest.mark.parametrize(
    ("size", "latent", "kv_dtype"),
    [(3, False, torch.float8_e4m3fn), (2, True, None)],
    ids=str,
)
def test_parts_of_ranks_are_one_softmax(size: int, latent: bool, kv_dtype: torch.dtype | None) -> None:
    p = problem(latent, kv_dtype, 12, interpreter.DEVICE)
    got = merged(p, size, TritonAttnBackend)
    assert relative_error(got, reference_decode(p, p.head_dim**-0.5)) < (2e-2 if kv_dtype else 2e-3)


@pytest.mark.parametrize("latent", [False, True])
def test_parts_of_the_reference_are_one_softmax(latent: bool) -> None:
    p = problem(latent, None, 4, "cpu")
    assert relative_error(merged(p, 4, TorchNativeAttnBackend), reference_decode(p, p.head_dim**-0.5)) < 2e-3


@interpreter.kernel_test
@pytest.mark.parametrize(
    ("size", "heads", "dims", "dtype"),
    [(2, 3, 512, torch.bfloat16), (3, 1, 80, torch.float16), (8, 2, 64, torch.float32)],
    ids=str,
)
def test_messages_of_parts(size: int, heads: int, dims: int, dtype: torch.dtype) -> None:
    """What each rank packs, exchanged and merged: in both forms of the kernels, beside the softmax over the tokens of
    all. Of the first token one rank has nothing, of the second nobody has."""
    torch.manual_seed(size)
    parts = torch.randn((size, 3, size * heads, dims), device=interpreter.DEVICE).to(dtype)
    lse = torch.randn((size, 3, size * heads), device=interpreter.DEVICE) * 9
    lse[0, 0], lse[:, 1] = float("-inf"), float("-inf")
    parts[0, 0], parts[:, 1] = float("nan"), float("nan")
    sinks = torch.randn(heads, device=interpreter.DEVICE)
    weights = _weighted(parts.float(), _weights(lse, None)[..., None])
    for ops in (native_ops, part_rows):
        sent = [ops.pack_parts(parts[rank], lse[rank], size) for rank in range(size)]
        for rank in range(size):
            received = torch.stack([message[rank] for message in sent])
            own = slice(rank * heads, (rank + 1) * heads)
            for more in (None, sinks):
                out = torch.full((3, 2 * heads, dims), float("nan"), device=interpreter.DEVICE, dtype=dtype)[:, :heads]
                ops.merge_parts(received, more, out)
                wanted = weights[:, :, own].sum(0)
                if more is not None:
                    both = torch.logaddexp(lse[..., own].logsumexp(0), more)
                    wanted = wanted * (lse[..., own].logsumexp(0) - both).exp()[..., None]
                torch.testing.assert_close(
                    out.float(), wanted, rtol=2e-2, atol=2e-2 if dtype != torch.float32 else 1e-5
                )


@interpreter.kernel_test
def test_logarithms_arrive_as_they_were_sent() -> None:
    """Within 24 bits, also in 16-bit messages; what is no number stays none."""
    lse = torch.tensor([[83.123456, -0.001234567, float("nan"), float("-inf")]], device=interpreter.DEVICE)
    for ops in (native_ops, part_rows):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            parts = torch.zeros((1, 4, 16), dtype=dtype, device=interpreter.DEVICE)
            arrived = ops.pack_parts(parts, lse, 1)[0, 0, :, 16:19].float().sum(-1)
            torch.testing.assert_close(arrived, lse[0], rtol=1e-6, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_tokens_come_together(size: int) -> None:
    """Also a part of them, as chunks are cut."""
    page, lens, generator = 2 * size, [5, 0, 17, 1, 8], torch.Generator().manual_seed(size)
    cache = torch.randn(40 * page, 2, 3, generator=generator)
    pages = torch.randperm(39, generator=generator) + 1
    table = (pages[:35].view(5, 7, 1) * page + torch.arange(page)).flatten(1)
    tokens = Tokens.of(lens, torch.device("cpu"))
    assert tokens.bounds.tolist() == [0, 5, 5, 22, 23, 31]
    slots = table[tokens.rows, tokens.positions]
    for run in (slice(0, 31), slice(3, 20), slice(20, 31)):
        ranks = [
            GatheredTokens.of(slots[run], tokens.positions[run], len(lens), Group(rank, size)) for rank in range(size)
        ]
        together = torch.cat([cache[rank::size][gathered.local] for rank, gathered in enumerate(ranks)])
        for gathered in ranks:
            assert torch.equal(together[gathered.index], cache[slots[run]])


@pytest.mark.parametrize("size", [2, 4])
def test_the_table_before_a_replay_has_the_new_tokens(size: int) -> None:
    """Which the row table gets in the graph; also at the end of the context, of padding, and of ranks without any."""
    generator = torch.Generator().manual_seed(size)
    page = 2 * size
    lens = [1, 2, page, page + 1, 3 * page - 1, 0]
    begins = torch.randperm(24, generator=generator).view(6, 4) + 1
    after = (begins[:, :, None] * page + torch.arange(page)).flatten(1)[:, : 3 * page - 1].int()
    before = after.clone()
    new = torch.zeros(6, dtype=torch.int64)
    for i, length in enumerate(lens):
        if length:
            new[i] = after[i, length - 1]
            before[i, length - 1 :] = 999
        after[i, length:] = 999
    lens[-1] = 1  # of padding, whose slot is 0
    after[-1, 0], before[-1] = 0, 999
    requests, seq_lens = torch.arange(6), torch.tensor(lens, dtype=torch.int32)
    for rank in range(size):
        found, wanted = (
            make(DecodeRows(requests, seq_lens, (TokenSlots(table.clone(), new),) * 2, lens), Group(rank, size))
            for make, table in ((own_rows_before_replay, before), (own_rows, after))
        )
        assert found.seq_lens_cpu == wanted.seq_lens_cpu == found.seq_lens.tolist()
        for i, length in enumerate(wanted.seq_lens_cpu):
            tables = [rows.token_slots[-1].req_to_token[i, :length] for rows in (found, wanted)]
            assert torch.equal(*tables), f"rank {rank}, request {i}"


def test_each_slot_is_one_ranks() -> None:
    slots = torch.arange(24)
    own = torch.stack([own_slots(slots, Group(rank, 4)) for rank in range(4)])
    assert torch.equal(own.sum(0), slots // 4) and ((own > 0).sum(0) == (slots >= 4)).all()
    selection = Selection(torch.tensor([[5, -1, 8, 3, 0]]), torch.tensor([4]))
    assert selection.select_rank(0, 4).slots.tolist() == [[-1, -1, 2, -1, 0]]
    assert selection.select_rank(1, 4).slots.tolist() == [[1, -1, -1, -1, -1]]
    both = (TokenSlots(slots, slots),) * 2
    assert with_own_table(both, own)[0] is both[0] and with_own_table(both, own)[1].req_to_token is own


@interpreter.in_two_parts
def test_in_interpreter(part: str) -> None:
    interpreter.run_file(__file__, part)
