"""Kernels of gated residual streams, of a gated sum and of n-gram embeddings against plain torch."""

from __future__ import annotations

import interpreter
import pytest
import torch

from sglang.srt.blocks.gated_streams import reference as native_streams
from sglang.srt.blocks.gated_streams.kernels import gated_streams
from sglang.srt.blocks.gated_sum import reference as native_sum
from sglang.srt.blocks.gated_sum.kernels import gated_sum
from sglang.srt.blocks.ngram_embedding import reference as native
from sglang.srt.blocks.ngram_embedding.kernels import ngram_embedding as kernels
from sglang.srt.blocks.ngram_embedding.ngram_kernels import NgramHash
from sglang.srt.blocks.ngram_embedding.spec import NgramEmbedding
from sglang.srt.blocks.short_convolution import reference as native_convolution
from sglang.srt.blocks.short_convolution.kernels import short_convolution
from sglang.srt.layers.compressed_step import TokenRequests

CLOSE = {"rtol": 2e-2, "atol": 2e-2}
DEVICE = interpreter.DEVICE
END = 7


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


@interpreter.kernel_test
@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize(("num", "size", "rank"), [(4, 256, 320), (2, 96, 12), (3, 64, 5)])
def test_between_two_blocks(tokens: int, num: int, size: int, rank: int) -> None:
    torch.manual_seed(tokens)
    streams, weight = random(tokens, num, size), random(num, size, dtype=torch.float32)
    out, placement = random(tokens, size + 8)[:, :size], torch.rand(tokens, num, device=DEVICE)
    for given in ((None, None), (out, placement)):
        want_streams, got_streams = streams.clone(), streams.clone()
        want = native_streams.place_and_norm(want_streams, *given, weight, 1e-6)
        got = gated_streams.place_and_norm(got_streams, *given, weight, 1e-6)
        torch.testing.assert_close(got_streams, want_streams, **CLOSE)
        torch.testing.assert_close(got, want, **CLOSE)
    for width in (rank + num, rank):  # behind the last block nothing is placed
        products = random(tokens, width + 3)[:, :width]
        for got, want in zip(
            gated_streams.bend(products, rank, num), native_streams.bend(products, rank, num), strict=True
        ):
            torch.testing.assert_close(got, want, **CLOSE)
    gates = random(tokens, num * size)
    torch.testing.assert_close(
        gated_streams.mix_streams(gates, streams), native_streams.mix_streams(gates, streams), **CLOSE
    )


@interpreter.kernel_test
@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize("size", [256, 100])
def test_a_gated_sum(tokens: int, size: int) -> None:
    """Gates reach the least factor of the stream, and rows lie apart."""
    torch.manual_seed(tokens)
    stream, out = random(tokens, size + 4)[:, :size], random(tokens, size + 8)[:, :size]
    gate = 6 * torch.randn(size, device=DEVICE)
    for scale in (None, 1 + torch.randn(size, device=DEVICE)):
        for dtype in (torch.float32, torch.bfloat16):
            weight = random(size, dtype=dtype)
            streams = [stream.clone(), stream.clone()]
            both = (native_sum.gated_sum, gated_sum.gated_sum)
            want, got = (f(x, out, scale, gate, 1e-8, weight, 1e-5) for f, x in zip(both, streams, strict=True))
            torch.testing.assert_close(streams[1], streams[0], **CLOSE)
            torch.testing.assert_close(got, want, **CLOSE)


LENGTHS = ((0, 9), (1, 4), (30, 3), (8, 1), (2, 7))
"""(tokens in the state, new tokens) of the requests 1, 2, ...; then a token of padding."""


def requests_of_a_step() -> TokenRequests:
    rows = [
        (slot, first + i, first, first + new) for slot, (first, new) in enumerate(LENGTHS, start=1) for i in range(new)
    ]
    rows.append((0, 0, 0, 1))
    return TokenRequests(*(torch.tensor(column, device=DEVICE) for column in zip(*rows, strict=True)))


def embedding(longest: int, taps: int) -> NgramEmbedding:
    return NgramEmbedding(
        longest=longest, heads=4, dim=20, base_rows=1000, row_multiple=8, number=1, seed=1234, vocab_size=1 << 18,
        end_token=END, taps=taps, streams=3, stream_size=64, parts=2, table_dtype="",
    )  # fmt: skip


@interpreter.kernel_test
@pytest.mark.pairs
@pytest.mark.parametrize("longest", [2, 3, 4])
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_rows_of_ngrams(longest: int, quantized: bool, rank: int) -> None:
    torch.manual_seed(longest)
    spec, requests = embedding(longest, 4), requests_of_a_step()
    count = spec.num_heads // 2
    heads = slice(rank * count, (rank + 1) * count)
    sizes = torch.tensor(spec.head_rows[heads], device=DEVICE)
    hashed = NgramHash(
        torch.tensor(spec.multipliers, device=DEVICE), sizes, sizes.cumsum(0) - sizes, heads.start, spec.heads, END
    )
    ids = torch.randint(1 << 17, 1 << 18, (len(requests.slots),), device=DEVICE)
    ids[::4] = END
    kept = torch.randint(0, 9, (len(LENGTHS) + 1, longest - 1), dtype=torch.int32, device=DEVICE)
    table = random(int(sizes.sum()), spec.dim)
    scale = torch.tensor([0.37], device=DEVICE) if quantized else None
    table = table.to(torch.float8_e4m3fn) if quantized else table
    want = torch.zeros(len(ids), count * spec.dim, dtype=torch.bfloat16, device=DEVICE)
    got = torch.ones_like(want)
    native.ngram_rows(ids, kept, requests, hashed, table, scale, want)
    kernels.ngram_rows(ids, kept, requests, hashed, table, scale, got)
    assert torch.equal(got, want)


@interpreter.kernel_test
@pytest.mark.parametrize("group", [4, 20])
def test_rows_with_scales_of_their_own(group: int) -> None:
    """Another token than that which ends n-grams stands for it, and before the first token."""
    spec, requests = embedding(4, 1), requests_of_a_step()
    sizes = torch.tensor(spec.head_rows, device=DEVICE)
    hashed = NgramHash(
        torch.tensor(spec.multipliers, device=DEVICE), sizes, sizes.cumsum(0) - sizes, 0, spec.heads, -1, END
    )
    ids = torch.randint(0, 9, (len(requests.slots),), device=DEVICE)
    kept = torch.randint(0, 9, (len(LENGTHS) + 1, 3), dtype=torch.int32, device=DEVICE)
    ids[::5], kept[::2, 1] = -1, -1
    table = random(int(sizes.sum()), spec.dim).to(torch.float8_e4m3fn)
    scale = torch.randint(120, 132, (len(table), spec.dim // group), dtype=torch.uint8, device=DEVICE)
    want = torch.zeros(len(ids), len(sizes) * spec.dim, dtype=torch.bfloat16, device=DEVICE)
    got = torch.ones_like(want)
    native.ngram_rows(ids, kept, requests, hashed, table, scale, want)
    kernels.ngram_rows(ids, kept, requests, hashed, table, scale, got)
    assert torch.equal(got, want) and want.float().std() > 0.1


@interpreter.kernel_test
@pytest.mark.parametrize(("longest", "taps"), [(3, 4), (2, 3), (4, 2)])
def test_values_and_the_state_that_they_leave(longest: int, taps: int) -> None:
    torch.manual_seed(longest)
    spec, requests = embedding(longest, taps), requests_of_a_step()
    num, size, tokens = spec.streams, spec.stream_size, len(requests.slots)
    weights = [random(num, size, dtype=torch.float32) for _ in range(3)]
    products, streams = random(tokens, (num + 1) * size), random(tokens, num, size)
    want = native.gate_values(products, streams, *weights, 1e-6)
    got = kernels.gate_values(products, streams, *weights, 1e-6)
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)
    values, normed = want
    convolution = random(num * size, taps)
    kept = random(len(LENGTHS) + 1, spec.kept_tokens, num * size)
    convolved = values.clone()
    native.convolve_values(values, normed, convolution, longest, kept, requests)
    kernels.convolve_values(convolved, normed, convolution, longest, kept, requests)
    torch.testing.assert_close(convolved, values, **CLOSE)
    ids = torch.randint(0, 1 << 18, (tokens,), device=DEVICE)
    kept_ids = torch.zeros(len(LENGTHS) + 1, longest - 1, dtype=torch.int32, device=DEVICE)
    states = [(kept_ids.clone(), kept.clone()) for _ in range(2)]
    for keep, (ids_of_last, rows_of_last) in zip((native.keep_last, kernels.keep_last), states, strict=True):
        keep(ids, ids_of_last, requests)
        keep(normed, rows_of_last, requests)
    for ours, theirs in zip(*states, strict=True):
        assert torch.equal(ours[1:], theirs[1:])  # what lies in slot 0 is nobody's


@interpreter.kernel_test
@pytest.mark.parametrize(("taps", "width"), [(4, 300), (2, 256)])
def test_short_convolutions_and_what_they_leave(taps: int, width: int) -> None:
    """Rows of the output lie apart, as k and v do among products."""
    torch.manual_seed(taps)
    requests = requests_of_a_step()
    rows, weight = random(len(requests.slots), width), random(width, taps)
    kept = random(len(LENGTHS) + 1, taps - 1, width)
    wide = torch.zeros(len(rows), 2 * width, dtype=rows.dtype, device=DEVICE)
    states, outs = [kept.clone(), kept.clone()], [torch.empty_like(rows), wide[:, width:]]
    both = (native_convolution.KERNELS, short_convolution.KERNELS)
    for kernel, state, out in zip(both, states, outs, strict=True):
        kernel.convolve(rows, weight, state, requests, out)
        kernel.keep(rows, state, requests)
    torch.testing.assert_close(outs[1], outs[0], **CLOSE)
    assert torch.equal(states[1][1:], states[0][1:]) and not wide[:, :width].any()


def test_the_published_table_has_as_many_rows_as_the_checkpoint() -> None:
    spec = NgramEmbedding(
        longest=3, heads=8, dim=160, base_rows=20_000_000, row_multiple=128, number=0, seed=1234, vocab_size=248320,
        end_token=248044, taps=4, streams=4, stream_size=2560, parts=128, table_dtype="fp8_e4m3",
    )  # fmt: skip
    assert sum(spec.head_rows) == 320_001_446 and spec.rows == 128 * 2_500_012
    assert all(factor % 2 and factor * spec.vocab_size < 1 << 63 for factor in spec.multipliers)


@interpreter.in_two_parts
def test_in_interpreter(part: str) -> None:
    interpreter.run_file(__file__, part)
