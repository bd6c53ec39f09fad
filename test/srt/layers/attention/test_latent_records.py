"""Records of latents in eight and in four bits: their bytes, what they lose, and the kernels that write and read them
against `native_latent_records` and `native_sparse_ops`, interpreted here and natively on a GPU."""

from __future__ import annotations

import interpreter
import pytest
import torch

from sglang.srt.blocks.mla.kernels.latent_prompt import gather_records
from sglang.srt.errors import UserError
from sglang.srt.hardware.arch import arch_by_name, current_arch
from sglang.srt.kernels.tiles import attention_tiles
from sglang.srt.layers import native_latent_records as native
from sglang.srt.layers import native_sparse_ops
from sglang.srt.layers.attention.selection import Selection
from sglang.srt.layers.attention.triton_ops.sparse_records import attention_fwd
from sglang.srt.layers.triton_ops import latent_records
from sglang.srt.plan.cache_spec import FULL
from sglang.srt.plan.latent_record import LatentRecord, entry_cache, latent_record
from srt.layers.attention.reference import relative_error

BF16 = torch.bfloat16
DEVICE = interpreter.DEVICE
SLOTS = 300 if interpreter.ON_CPU else 20_000
V4, FLASH, DSA = (448, 64), (512, 0), (512, 64)
SIZES = {(V4, 8): 592, (V4, 4): 384, (FLASH, 8): 528, (FLASH, 4): 288, (DSA, 4): 416}
RECORDS = [LatentRecord(*dims, bits) for dims, bits in SIZES]
ROUNDING = {8: 0.027, 4: 0.095}
"""RMS errors of the page of caches."""
names = pytest.mark.parametrize("record", RECORDS, ids=lambda record: f"{record.rank}+{record.rope}x{record.bits}")


def latents(count: int, record: LatentRecord) -> torch.Tensor:
    """Rows whose groups differ by a factor of thousands, with zeros, and one that saturates."""
    torch.manual_seed(record.size)
    groups = torch.randn(count, record.groups, 1).mul(2.5).exp()
    rows = torch.randn(count, record.groups, record.group) * groups.clamp(1e-4, 300.0)
    rows = torch.cat((rows.flatten(1)[:, : record.rank], torch.randn(count, record.rope)), dim=1)
    rows[0], rows[1, : record.group] = 0.0, 0.0
    rows[2, 5], rows[3, 3] = 1e5, -3e-7
    return rows.to(BF16)


@names
def test_sizes(record: LatentRecord) -> None:
    assert record.size == SIZES[(record.rank, record.rope), record.bits]
    dtype = {8: "fp8_e4m3", 4: "fp4_e2m1"}[record.bits]
    assert latent_record(dtype, record.rank, record.rope) == record
    assert entry_cache("kv", record.dim, dtype, record, lifetime=FULL).entry_bytes == record.size
    assert native.pack_records(latents(9, record), record).shape == (9, record.size)


def test_what_has_no_record() -> None:
    assert latent_record("bfloat16", *V4) is None
    with pytest.raises(UserError, match="e5m2.*stored in e4m3 with scales"):
        latent_record("fp8_e5m2", *V4)


@pytest.mark.parametrize("record", [*RECORDS, LatentRecord(12, 4, 8), LatentRecord(12, 4, 4)])
def test_errors_are_those_of_the_page(record: LatentRecord) -> None:
    """Whatever the scale of a row: 240 times between layers, and what a scale in e4m3 alone would lose."""
    rows = torch.randn(256, record.dim, generator=torch.Generator().manual_seed(1))
    for magnitude in (0.004, 1.0, 5.0):
        entries = rows * magnitude
        read = native.unpack_records(native.pack_records(entries, record), record)
        error = (read - entries)[:, : record.rank].norm(dim=1) / entries[:, : record.rank].norm(dim=1)
        assert float(error.mean()) == pytest.approx(ROUNDING[record.bits], rel=0.35 if record.rank < 64 else 0.06)
        assert torch.equal(read[:, record.rank :], entries[:, record.rank :].to(BF16).float())


@names
def test_what_is_stored_is_exact_in_float16_and_stays(record: LatentRecord) -> None:
    entries = latents(64, record)
    read = native.unpack_records(native.pack_records(entries, record), record)
    numbers = read[:, : record.rank]
    assert torch.equal(numbers.half().float(), numbers) and torch.isfinite(numbers).all()
    assert torch.equal(native.unpack_records(native.pack_records(read, record), record), read)


@names
def test_an_outer_scale_divides_numbers_alone(record: LatentRecord) -> None:
    entries = latents(64, record)
    divided = entries.float()
    divided[:, : record.rank] /= 0.25
    stored = native.pack_records(entries, record, 0.25)
    assert torch.equal(stored, native.pack_records(divided, record))
    assert torch.equal(native.unpack_records(stored, record, 0.25)[:, record.rank :], entries[:, record.rank :].float())


@interpreter.kernel_test
@names
def test_store(record: LatentRecord) -> None:
    for scale in (1.0, 0.3):
        entries = torch.cat((latents(37, record), torch.zeros(37, 8, dtype=BF16)), dim=1).to(DEVICE)[:, : record.dim]
        places = torch.randperm(89, device=DEVICE)[:37]
        places[5] = -1
        got, want = (torch.full((90, 1, record.size), 7, dtype=torch.uint8, device=DEVICE) for _ in range(2))
        latent_records.latent_record_store(entries, got, places, record, scale)
        native.latent_record_store(entries, want, places, record, scale)
        used = record.scales_at + record.groups
        assert torch.equal(got[..., :used], want[..., :used])
        assert (got[-1] == 7).all(), "negative places are skipped"


@interpreter.kernel_test
def test_a_cache_of_another_form_is_refused() -> None:
    record = RECORDS[0]
    wide = torch.zeros(9, 1, record.size + 16, dtype=torch.uint8, device=DEVICE)[..., : record.size]
    with pytest.raises(ValueError, match="records lie 592 bytes apart, not 608"):
        latent_records.latent_record_store(latents(4, record), wide, torch.zeros(4, dtype=torch.int64), record)


def selection(counts: list[int], width: int) -> Selection:
    slots = torch.stack([torch.randperm(SLOTS)[:width] for _ in counts]).int()
    slots[torch.rand(slots.shape) < 0.2] = -1
    slots[torch.arange(width) >= torch.tensor(counts)[:, None]] = SLOTS + 1000  # nobody may read there
    return Selection(slots.to(DEVICE), torch.tensor(counts, dtype=torch.int32, device=DEVICE))


def check_attention(
    record: LatentRecord, heads: int, counts: list[list[int]], num_sms: int, *, sinks: bool = False, tile: int = 0,
    dtype: torch.dtype = BF16, outer: float = 1.0, largest: float = 1.0,
) -> None:  # fmt: skip
    """Against fp64 over the values that are stored; whatever is not selected is not a number."""
    rope_values = record.rank == V4[0]
    width = record.dim if rope_values else record.rank
    sources, exact = [], []
    for own in counts:
        chosen = selection(own, max(64, max(own)))
        entries = torch.randn(SLOTS, record.dim) * torch.randn(SLOTS, 1).exp()
        stored = native.pack_records(entries, record, outer).to(DEVICE)
        kept = chosen.slots[(chosen.slots >= 0) & (chosen.slots < SLOTS)].long()
        poison = torch.full_like(stored, 0xFF)
        poison[kept] = stored[kept]
        sources.append((poison[:, None], chosen))
        clean = torch.where(
            torch.arange(chosen.slots.shape[1], device=DEVICE) < chosen.counts[:, None], chosen.slots, -1
        )
        values = native.unpack_records(stored, record, outer)
        exact.append((values[:, None].double(), Selection(clean, chosen.counts)))
    tokens = len(counts[0])
    q = (torch.randn(tokens, heads, record.dim, device=DEVICE) * largest).to(dtype)
    sink = torch.randn(heads, device=DEVICE) if sinks else None
    out = torch.full((tokens, heads, width), float("nan"), device=DEVICE)
    lse = torch.full((tokens, heads), float("nan"), device=DEVICE)
    expected, expected_lse = out.double(), lse.double()
    scale = 0.05 / largest
    native_sparse_ops.attend_selected(q.double(), exact, expected, scale=scale, sinks=sink, lse=expected_lse)
    arch = arch_by_name("sm_120") if interpreter.ON_CPU else current_arch()
    name = {8: "fp8_e4m3", 4: "fp4_e2m1"}[record.bits]
    choice = attention_tiles("sparse_attention", record.dim, width, name, arch.features)[tile]
    options = {"scale": scale, "tile": choice, "num_sms": num_sms, "sinks": sink, "record": record}
    attention_fwd(q, sources, out, **options, lse=lse, record_scale=outer)
    assert relative_error(out, expected) < 2e-3
    torch.testing.assert_close(lse, expected_lse.float(), rtol=1e-4, atol=2e-3)
    native_sparse_ops.attend_selected(
        q, sources, lse_free := torch.empty_like(out), scale=scale, sinks=sink, record=record, record_scale=outer
    )
    assert relative_error(lse_free, expected) < 1e-5, "the CPU's kernel reads the same bytes"


COUNTS, MORE = [70, 0, 33], [40, 0, 70]
"""Entries of three tokens in one cache, and in another."""


@interpreter.kernel_test
@names
def test_attention(record: LatentRecord) -> None:
    """In one share of entries and in several, of one cache and of two."""
    check_attention(record, 8, [COUNTS], 7, tile=-1)
    check_attention(record, 20, [COUNTS, MORE], 1, sinks=True)


@interpreter.kernel_test
def test_all_tokens_of_a_request_in_a_table() -> None:
    """Of draft tokens of two requests; slots behind what a token sees are not looked at."""
    record, heads, counts = RECORDS[4], 8, [5, 6, 70, 71, 72]
    rows = torch.tensor([2, 2, 1, 1, 1], device=DEVICE)
    table = torch.stack([torch.randperm(SLOTS)[:100] for _ in range(3)]).int().to(DEVICE)
    table[1, 72:], table[2, 6:] = SLOTS + 1000, -7
    lens = torch.tensor(counts, dtype=torch.int32, device=DEVICE)
    cache = native.pack_records(torch.randn(SLOTS, record.dim), record).to(DEVICE)[:, None]
    q = torch.randn(len(counts), heads, record.dim, device=DEVICE).to(BF16)
    arch = arch_by_name("sm_120") if interpreter.ON_CPU else current_arch()
    tile = attention_tiles("sparse_attention", *(record.dim, record.rank), "fp4_e2m1", arch.features)[0]
    chosen, wanted = Selection(table, lens, rows), torch.empty(len(counts), heads, record.rank, device=DEVICE)
    native_sparse_ops.attend_selected(q, [(cache, chosen)], wanted, scale=0.05, record=record)
    for num_sms in (1, 40):
        out = torch.empty_like(wanted)
        options = {"scale": 0.05, "tile": tile, "num_sms": num_sms}
        attention_fwd(q, [(cache, chosen)], out, **options, record=record)
        assert relative_error(out, wanted) < 2e-3
    with pytest.raises(ValueError, match="with records alone"):
        attention_fwd(q, [(cache.view(BF16), chosen)], out, **options)


@interpreter.kernel_test
def test_gathered_latents() -> None:
    record = RECORDS[4]
    entries = latents(50, record).to(DEVICE)
    cache = native.pack_records(entries, record, 0.3)[:, None]
    slots = torch.randperm(50, device=DEVICE)[:37]
    k = torch.zeros(37, 20, 128 + record.rope, dtype=BF16, device=DEVICE)
    got = gather_records(cache, slots, k, record, 0.3)
    want = native.unpack_records(cache[slots, 0], record, 0.3).to(BF16)
    assert torch.equal(got, want[:, : record.rank])
    assert torch.equal(k[..., 128:], want[:, None, record.rank :].expand(-1, 20, -1)) and not k[..., :128].any()


@interpreter.kernel_test
@pytest.mark.parametrize("record", [RECORDS[0], RECORDS[3]], ids=["V4", "Flash"])
def test_queries_of_any_size_and_an_outer_scale(record: LatentRecord) -> None:
    for dtype, largest in ((torch.float16, 1.0), (BF16, 1e4), (BF16, 1e-6)):
        check_attention(record, 16, [COUNTS], 3, dtype=dtype, outer=0.3, largest=largest)


@interpreter.in_two_parts
def test_in_interpreter(part: str) -> None:
    interpreter.run_file(__file__, part)
