"""The kernels that are added to the target, against plain torch: interpreted on a CPU, native on a GPU."""

from __future__ import annotations

import interpreter
import pytest
import torch

pytest.importorskip("libcst", reason="rewrites the sources of upstream")

from upstream.own_files import own

from sglang.srt.kernels.tiles import MIN_TOKENS, MLA_LATENT, ROWS

DEVICE = interpreter.DEVICE
FP8 = torch.float8_e4m3fn
flash_mla = own("flash_mla")
deep_gemm = own("deep_gemm")
topk = own("topk")


def randn(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def choose(rows: int, count: int, tokens: int, empty: float = 0.2) -> torch.Tensor:
    """[rows, count] token numbers, some of them -1."""
    generator = torch.Generator().manual_seed(rows)
    indices = torch.randint(0, tokens, (rows, count), generator=generator)
    return torch.where(torch.rand(rows, count, generator=generator) < empty, -1, indices).int()


def attention(q, keys_of_rows, sm_scale, sink=None):
    """keys_of_rows: a [n, key dims] tensor for every row of q [rows, heads, key dims]; values are the first 512."""
    outputs, lses = [], []
    for row, keys in zip(q.float(), keys_of_rows, strict=True):
        scores = row @ keys.float().T * sm_scale
        lse = scores.logsumexp(-1) if keys.shape[0] else torch.full(row.shape[:1], float("-inf"))
        bottom = lse if sink is None else torch.logaddexp(lse, sink)
        weights = (scores - bottom[:, None]).exp() if keys.shape[0] else scores
        outputs.append(weights @ keys[:, :512].float())
        lses.append(lse)
    return torch.stack(outputs), torch.stack(lses)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, bound: float = 8e-3) -> None:
    actual, expected = actual.float().cpu(), expected.float()
    assert torch.isfinite(actual).all()
    assert (actual - expected).norm() <= bound * expected.norm()


@interpreter.kernel_test
@pytest.mark.parametrize(("rows", "heads"), [(3, 16), (2, 5), (1, 40)])
def test_sparse_attention_over_a_bf16_cache(rows: int, heads: int) -> None:
    q, kv = randn(rows, heads, 576).bfloat16(), randn(200, 1, 576, seed=1).bfloat16()
    indices = choose(rows, 96, 200)
    out, _, lse = flash_mla.flash_mla_sparse_fwd(q.to(DEVICE), kv.to(DEVICE), indices[:, None].to(DEVICE), 0.05)
    expected, expected_lse = attention(q, [kv[i[i >= 0], 0] for i in indices.long()], 0.05)
    assert_close(out, expected)
    torch.testing.assert_close(lse.cpu(), expected_lse, rtol=1e-2, atol=1e-2)


@interpreter.kernel_test
def test_lengths_and_a_row_without_tokens() -> None:
    q, kv = randn(3, 16, 576).bfloat16(), randn(64, 1, 576, seed=1).bfloat16()
    indices = choose(3, 64, 64, empty=0.0)
    lengths = torch.tensor([64, 10, 0], dtype=torch.int32)
    out, _, lse = flash_mla.flash_mla_sparse_fwd(
        q.to(DEVICE), kv.to(DEVICE), indices[:, None].to(DEVICE), 0.05, topk_length=lengths.to(DEVICE)
    )
    chosen = [kv[i[:n], 0] for i, n in zip(indices.long(), lengths, strict=True)]
    assert_close(out, attention(q, chosen, 0.05)[0])
    assert not out[2].any() and torch.isneginf(lse[2]).all()


@interpreter.kernel_test
def test_parts_join_to_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_mla, "_num_sms", lambda *_: 12)
    q, kv = randn(3, 16, 576).bfloat16(), randn(300, 1, 576, seed=1).bfloat16()
    indices, sink = choose(3, 256, 300), randn(16, seed=2)
    out, _, lse = flash_mla.flash_mla_sparse_fwd(
        q.to(DEVICE), kv.to(DEVICE), indices[:, None].to(DEVICE), 0.05, attn_sink=sink.to(DEVICE)
    )
    expected, expected_lse = attention(q, [kv[i[i >= 0], 0] for i in indices.long()], 0.05, sink)
    assert_close(out, expected)
    torch.testing.assert_close(lse.cpu(), expected_lse, rtol=1e-2, atol=1e-2)


def v32_cache(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[tokens, 576] -> the 656 bytes of each token, and what they decode to."""
    groups = keys[:, :512].view(-1, 4, 128)
    scales = groups.abs().amax(-1, keepdim=True) / 448
    values = (groups / scales).to(FP8)
    rope = keys[:, 512:].bfloat16()
    packed = torch.cat(
        [values.view(torch.uint8).flatten(1), scales.flatten(1).view(torch.uint8), rope.view(torch.uint8)], dim=1
    )
    return packed, torch.cat([(values.float() * scales).flatten(1), rope.float()], dim=1).bfloat16()


def v4_cache(keys: torch.Tensor, page: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[tokens, 512] -> [pages, bytes of a page] with room at its end, and what they decode to."""
    groups = keys[:, :448].view(-1, 7, 64)
    exponents = (groups.abs().amax(-1, keepdim=True) / 448).log2().ceil()
    values = (groups / exponents.exp2()).to(FP8)
    rope = keys[:, 448:].bfloat16()
    body = torch.cat([values.view(torch.uint8).flatten(1), rope.view(torch.uint8)], dim=1).view(-1, page * 576)
    scales = torch.nn.functional.pad((exponents + 127).to(torch.uint8).flatten(1), (0, 1)).view(-1, page * 8)
    room = torch.full((body.shape[0], 64), 255, dtype=torch.uint8)
    decoded = torch.cat([(values.float() * exponents.exp2()).flatten(1), rope.float()], dim=1).bfloat16()
    return torch.cat([body, scales, room], dim=1), decoded


SMS = pytest.mark.parametrize("sms", [1, 12], ids=["whole", "in shares"])


@interpreter.kernel_test
@SMS
def test_decode_over_the_v32_cache(sms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_mla, "_num_sms", lambda *_: sms)
    packed, keys = v32_cache(randn(256, 576))
    q, indices = randn(3, 1, 16, 576, seed=1).bfloat16(), choose(3, 128, 256)
    cache = packed.view(4, 64, 1, 656).view(FP8).to(DEVICE)
    out, lse = flash_mla.flash_mla_with_kvcache(
        q.to(DEVICE), cache, softmax_scale=0.06, is_fp8_kvcache=True, indices=indices[:, None].to(DEVICE)
    )
    expected, expected_lse = attention(q[:, 0], [keys[i[i >= 0]] for i in indices.long()], 0.06)
    assert_close(out[:, 0], expected)
    torch.testing.assert_close(lse[..., 0].cpu(), expected_lse, rtol=1e-2, atol=1e-2)


@interpreter.kernel_test
@SMS
@pytest.mark.parametrize("extra", [False, True])
def test_decode_over_the_v4_cache(extra: bool, sms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_mla, "_num_sms", lambda *_: sms)

    def cache(tokens: int, page: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        packed, keys = v4_cache(randn(tokens, 512, seed=seed), page)
        usable = packed.to(DEVICE)[:, : page * 584].view(-1, page, 1, 584)
        assert not usable.is_contiguous()
        return usable, keys

    window, window_keys = cache(128, 32, seed=1)
    q, indices, sink = randn(2, 1, 16, 512).bfloat16(), choose(2, 64, 128), randn(16, seed=3)
    lengths = torch.tensor([64, 40], dtype=torch.int32)
    more = {}
    chosen = [window_keys[i[:n][i[:n] >= 0]] for i, n in zip(indices.long(), lengths, strict=True)]
    if extra:
        compressed, compressed_keys = cache(64, 16, seed=2)
        extra_indices = choose(2, 64, 64, empty=0.5)
        more = {"extra_k_cache": compressed, "extra_indices_in_kvcache": extra_indices[:, None].to(DEVICE)}
        chosen = [torch.cat([k, compressed_keys[i[i >= 0]]]) for k, i in zip(chosen, extra_indices.long(), strict=True)]
    out, lse = flash_mla.flash_mla_with_kvcache(
        q.to(DEVICE),
        window,
        softmax_scale=0.04,
        is_fp8_kvcache=True,
        indices=indices[:, None].to(DEVICE),
        topk_length=lengths.to(DEVICE),
        attn_sink=sink.to(DEVICE),
        **more,
    )
    expected, expected_lse = attention(q[:, 0], chosen, 0.04, sink)
    assert_close(out[:, 0], expected)
    torch.testing.assert_close(lse[..., 0].cpu(), expected_lse, rtol=1e-2, atol=1e-2)


@interpreter.kernel_test
def test_prompts_take_the_tile_of_many_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_mla, "MANY_TOKENS", 4)
    monkeypatch.setattr(flash_mla, "TILE", {})  # not read
    q, kv = randn(5, 40, 576).bfloat16(), randn(200, 1, 576, seed=1).bfloat16()
    indices = choose(5, 64, 200)
    out, _, _ = flash_mla.flash_mla_sparse_fwd(q.to(DEVICE), kv.to(DEVICE), indices[:, None].to(DEVICE), 0.05)
    assert_close(out, attention(q, [kv[i[i >= 0], 0] for i in indices.long()], 0.05)[0])


@pytest.mark.parametrize(("size", "dtype"), [(2, torch.bfloat16), (1, torch.uint8)])
def test_the_tiles_are_those_of_the_server_on_sm120(size: int, dtype: torch.dtype) -> None:
    (row,) = (
        row for row in ROWS if row.op == "sparse_attention" and row.head_dims == (MLA_LATENT,) and size in row.kv_bytes
    )
    many, few = row.tiles[:2]
    assert flash_mla.MANY_HEADS_TILES[dtype] | {MIN_TOKENS: flash_mla.MANY_TOKENS} == many
    assert few == flash_mla.TILE


def test_unknown_caches_are_refused() -> None:
    q, cache = torch.zeros(1, 1, 16, 576), torch.zeros(1, 64, 1, 600, dtype=torch.uint8)
    with pytest.raises(NotImplementedError, match="600 bytes a token"):
        flash_mla.flash_mla_with_kvcache(
            q, cache, is_fp8_kvcache=True, indices=torch.zeros(1, 1, 64, dtype=torch.int32)
        )
    with pytest.raises(NotImplementedError, match="float8 cache"):
        flash_mla.flash_mla_with_kvcache(q, cache, indices=torch.zeros(1, 1, 64, dtype=torch.int32))


def mqa_logits(q: torch.Tensor, k: torch.Tensor, scales: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """[rows, heads, d], [keys, d], [keys], [rows, heads] -> [rows, keys]"""
    return (torch.einsum("mhd,nd->mhn", q.float(), k.float()).relu() * weights[:, :, None]).sum(1) * scales


@interpreter.kernel_test
@pytest.mark.parametrize(("next_n", "per_query"), [(1, False), (2, False), (2, True)])
def test_paged_logits(next_n: int, per_query: bool) -> None:
    batch, heads, page, pages = 2, 20, 64, 3
    lengths = torch.tensor([100, 7], dtype=torch.int32)
    q = randn(batch, next_n, heads, 128).to(FP8)
    keys, scales = randn(8, page, 128, seed=1).to(FP8), randn(8, page, seed=2).abs()
    cache = torch.cat([keys.view(torch.uint8).flatten(1), scales.view(torch.uint8)], dim=1).view(8, page, 1, 132)
    weights = randn(batch * next_n, heads, seed=3)
    table = torch.tensor([[5, 0, 2], [7, 1, 3]], dtype=torch.int32)
    each = lengths[:, None] - next_n + 1 + torch.arange(next_n)
    logits = deep_gemm.fp8_paged_mqa_logits(
        q.to(DEVICE),
        cache.to(DEVICE),
        weights.to(DEVICE),
        (each.int() if per_query else lengths).to(DEVICE),
        table.to(DEVICE),
        None,
        page * pages - 10,
        clean_logits=False,
    ).cpu()
    for row in range(batch * next_n):
        of_sequence = table[row // next_n].long()
        expected = mqa_logits(
            q.flatten(0, 1)[row : row + 1],
            keys[of_sequence].flatten(0, 1),
            scales[of_sequence].flatten(),
            weights[row : row + 1],
        )
        length = int(each.flatten()[row])
        torch.testing.assert_close(logits[row, :length], expected[0, :length], rtol=1e-3, atol=1e-2)
        assert torch.isneginf(logits[row, length:]).all()


@interpreter.kernel_test
def test_ragged_logits() -> None:
    rows, heads, keys = 11, 32, 150
    q, k = randn(rows, heads, 128).to(FP8), randn(keys, 128, seed=1).to(FP8)
    scales, weights = randn(keys, seed=2).abs(), randn(rows, heads, seed=3)
    starts = torch.arange(rows, dtype=torch.int32) * 5
    ends = starts + torch.arange(rows, dtype=torch.int32) * 9
    logits = deep_gemm.fp8_mqa_logits(
        *(t.to(DEVICE) for t in (q,)),
        (k.to(DEVICE), scales.to(DEVICE)),
        *(t.to(DEVICE) for t in (weights, starts, ends)),
        clean_logits=False,
    ).cpu()
    expected = mqa_logits(q, k, scales, weights)
    columns = torch.arange(keys)
    valid = (columns >= starts[:, None]) & (columns < ends[:, None])
    torch.testing.assert_close(logits[valid], expected[valid], rtol=1e-3, atol=1e-2)
    assert torch.isneginf(logits[~valid]).all()


def test_schedules_have_the_shapes_that_callers_copy() -> None:
    lens = torch.ones(5, dtype=torch.int32)
    assert deep_gemm.get_paged_mqa_logits_metadata(lens, 64, 188).shape == (189, 2)
    assert flash_mla.get_mla_metadata(lens)[1].shape == (6,)
    assert flash_mla.get_mla_metadata()[0] is None


@interpreter.kernel_test
def test_topk_without_a_sort() -> None:
    score = randn(5, 112)[:, :100].to(DEVICE)
    lengths = torch.tensor([100, 30, 3, 0, 16], dtype=torch.int32)
    table = torch.randperm(300, generator=torch.Generator().manual_seed(1)).view(3, 100).int()
    rows = torch.tensor([2, 0, 1, 1, 2])
    slots = topk.slots_of_largest(score, lengths.to(DEVICE), 16, table.to(DEVICE), rows.to(DEVICE)).cpu()
    assert slots.dtype == torch.int32 and slots.shape == (5, 16)
    for row, length in enumerate(lengths.tolist()):
        largest = score[row, :length].cpu().topk(min(16, length)).indices
        assert sorted(slots[row][slots[row] >= 0].tolist()) == sorted(table[rows[row], largest].tolist())
        assert (slots[row] < 0).sum() == 16 - len(largest)


@interpreter.in_two_parts
def test_in_interpreter(part: str) -> None:
    interpreter.run_file(__file__, part)
