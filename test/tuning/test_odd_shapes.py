"""`--shape` takes any size, and what it says is sane: finite, not below what the card can do, no less for more work."""

from __future__ import annotations

import itertools
import math

import pytest

from sglang.srt.errors import UserError
from sglang.srt.hardware.arch import arch_by_name
from sglang.tuning.best_times import best
from sglang.tuning.ops import floor, parse_shape
from sglang.tuning.predicted_times import predicted
from sglang.tuning.rates import ceilings_of
from sglang.tuning.report import shape_json
from sglang.tuning.sglang_times import time_by_sglang

CARD, H200 = arch_by_name("rtx-pro-6000-server"), arch_by_name("h200")
ODD = (
    *(
        f"linear tokens={m} rows={n} cols={k}{scheme}"
        for (m, n, k), scheme in itertools.product(
            ((1, 1, 1), (1, 7, 33), (3, 5001, 777), (17, 129, 100000), (1000003, 4096, 4096), (5, 200000, 300)),
            ("", " scheme=fp8_block", " scheme=fp8_channel", " scheme=nvfp4", " scheme=int4_g32"),
        )
    ),
    *(
        f"fused_moe tokens={m} num_experts={e} top_k={k} hidden={h} intermediate={i}{scheme}"
        for (m, e, k, h, i), scheme in itertools.product(
            ((1, 1, 1, 64, 16), (3, 7, 3, 1000, 90), (1, 1000, 31, 7168, 2048), (100001, 160, 8, 5120, 1536)),
            ("", " scheme=fp8_block", " scheme=nvfp4", " scheme=int4_g32", " scheme=mxfp4"),
        )
    ),
    "decode_attention batch=1 context=1 heads=1 kv_heads=1 head_dim=64",
    "decode_attention batch=1 context=1048576 heads=96 kv_heads=1 head_dim=128",
    "decode_attention batch=4096 context=3 heads=7 kv_heads=7 head_dim=128 kv=fp8",
    "decode_attention batch=3 context=100000 heads=64 kv_heads=8 head_dim=80",
    "decode_attention batch=1 context=1000000 heads=128 kv_heads=1 head_dim=576 v_head_dim=512 latent=1",
    "extend_attention batch=1 new=1 heads=1 kv_heads=1 head_dim=128",
    "extend_attention batch=1 new=1000000 heads=8 kv_heads=1 head_dim=128",
    "extend_attention batch=7 new=333 heads=12 kv_heads=4 head_dim=192 v_head_dim=128 window=100",
    "extend_attention batch=1 new=77 heads=16 kv_heads=2 head_dim=256 prefix=1000000",
    "latent_absorb tokens=1 heads=1 rows=512 cols=128",
    "latent_absorb tokens=99999 heads=128 rows=256 cols=512",
    "gated_delta_rule batch=1 tokens=1 heads=1 key_heads=1",
    "gated_delta_rule batch=3000 tokens=1 heads=48 key_heads=16",
    "gated_delta_rule batch=1 tokens=1000000 heads=10 key_heads=5",
    "hyper_connection tokens=1 hidden=4096",
    "hyper_connection tokens=1000000 hidden=3000",
    "sparse_attention tokens=1 entries=1 stored=1 heads=1 head_dim=576 v_head_dim=512",
    "sparse_attention tokens=99999 entries=2048 stored=99999 heads=128 head_dim=576 v_head_dim=512 kv=fp8",
    "sparse_attention tokens=77 entries=640 stored=5000000 heads=33 head_dim=512",
    "sparse_indexer tokens=1 entries=1 requests=1 heads=1",
    "sparse_indexer tokens=8192 entries=1000000 requests=3 heads=64",
    "compressed_attention batch=1 context=1 heads=8 rate=4",
    "compressed_attention batch=77 context=1048576 heads=16 rate=4 scheme=fp8_block",
    "compressed_attention batch=3 context=3 heads=64 rate=128",
    "compressed_attention batch=1 context=1048576 heads=8 rate=128 new=5000",
    *(f"all_reduce size={size} ranks={ranks}" for size in (1, 1000, 99999999999) for ranks in (2, 4, 8)),
    "all_gather size=12345 ranks=8",
)


@pytest.mark.parametrize("shape", ODD)
def test_odd_sizes_have_sane_times(shape: str) -> None:
    op, ceilings = parse_shape(shape), ceilings_of(CARD)
    ours, known, others = predicted(op, CARD), time_by_sglang(op, CARD), best(op, CARD)
    assert ours is not None or op.kind == "hyper_connection" or "head_dim=80" in shape
    multiplied = op.operations / ceilings.products.get(op.operand, ceilings.products["half"])
    if ours is not None:
        assert math.isfinite(ours.seconds) and 0 < ours.error <= 0.5
        assert ours.seconds > 0.97 * floor(op, ceilings), "faster than anything measured"
    for seconds in (known and known[0], others and others.measured, others and others.served):
        if seconds is not None:
            assert math.isfinite(seconds) and seconds > 1e-6
            # Blocks of DeepSeek-V4's are estimates; a table holds 1.7% steps.
            assert op.kind == "compressed_attention" or seconds > 0.95 * multiplied
    assert shape_json(shape, CARD)["floor_us"] >= 0
    assert op.kind in ("all_reduce", "all_gather") or predicted(op, H200) is not None or ours is None


SERIES = (
    "linear tokens={} rows=5000 cols=3008 scheme=fp8_channel",
    "linear tokens={} rows=5000 cols=3000",
    "linear tokens={} rows=5000 cols=3000 scheme=nvfp4",
    "fused_moe tokens={} num_experts=100 top_k=5 hidden=3000 intermediate=700",
    "fused_moe tokens={} num_experts=100 top_k=5 hidden=3000 intermediate=700 scheme=nvfp4",
    "decode_attention batch={} context=5000 heads=24 kv_heads=3 head_dim=128",
    "decode_attention batch=3 context={} heads=24 kv_heads=3 head_dim=128",
    "decode_attention batch=3 context={} heads=24 kv_heads=3 head_dim=64",
    "extend_attention batch=1 new={} heads=24 kv_heads=3 head_dim=128",
    "gated_delta_rule batch={} tokens=1 heads=20 key_heads=10",
    "hyper_connection tokens={} hidden=5000",
    "compressed_attention batch={} context=5000 heads=12 rate=128",
    "latent_absorb tokens={} heads=12 rows=512 cols=128",
    "all_reduce size={}0000 ranks=8",
)


@pytest.mark.parametrize("series", SERIES)
def test_more_work_takes_no_less_time_but_for_what_measured_times_jump(series: str) -> None:
    """Of neighbours within a fifth, as measured times of more work are sometimes less; over a factor of 16 strictly."""
    columns = {"ours_us": [], "sglang_us": [], "best_us": []}  # type: dict[str, list[float]]
    for size in (1, 4, 16, 60, 250, 1000, 4000, 16000, 60000):
        row = shape_json(series.format(size), CARD)
        for name, column in columns.items():
            if row[name] is not None:
                column.append(row[name])
    for name, column in columns.items():
        for i, (less, more) in enumerate(itertools.pairwise(column)):
            assert more > less / 1.25, f"{name}: {less} us, then {more} us at {i + 1}"
        if column:
            assert column[-1] > 4 * column[0]
    assert columns["sglang_us"]


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ("compressed_attention batch=1 context=9 heads=8 rate=7", "rate 7"),
        ("compressed_attention batch=1 context=9 heads=8 rate=4 new=10", "new 10 of context 9"),
        ("gated_delta_rule batch=1 tokens=1 heads=5 key_heads=2", "5 heads do not share 2"),
        ("all_reduce size=4096 ranks=1", "2 ranks or more"),
        ("decode_attention batch=1 context=9 heads=4 kv_heads=1 head_dim=0", "needs head_dim, v_head_dim above 0"),
        ("decode_attention batch=1 context=9 heads=4 kv_heads=1 head_dim=64 latent=2", "'latent=2' is no size"),
        ("linear tokens=1 rows=2 cols=3 tokens=5", "'tokens=5' comes twice"),
        ("linear tokens=1e3 rows=2 cols=3", "'tokens=1e3' is no size"),
        ("linear tokens=\u0663 rows=2 cols=3", "is no size"),
    ],
)
def test_nonsense_says_what_to_do(shape: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_shape(shape)


def test_columns_that_16_divides_are_not_predicted_as_those_that_are_loaded_in_pieces() -> None:
    """The record of another variant, which spills, made products of FP8 look three times as slow."""
    aligned, pieces = (
        predicted(parse_shape(f"linear tokens=256 rows=1792 cols={cols} scheme=fp8_channel"), CARD)
        for cols in (5120, 5128)
    )
    assert aligned is not None and pieces is not None
    assert pieces.seconds > 1.5 * aligned.seconds


def test_windows_are_not_what_flashinfer_takes() -> None:
    """With windows SGLang has its own kernel, which takes several times as long at head dim 256, cut off or not."""
    sizes = "extend_attention batch=8 new=512 heads=16 kv_heads=8 head_dim=256"
    whole, windowed = (time_by_sglang(parse_shape(sizes + window), CARD) for window in ("", " window=1024"))
    assert whole is not None and windowed is not None
    assert windowed[0] > 3 * whole[0] and "Triton" in windowed[1]
    narrow = "extend_attention batch=8 new=512 heads=20 kv_heads=4 head_dim=128"
    assert time_by_sglang(parse_shape(narrow + " window=8192"), CARD) == time_by_sglang(parse_shape(narrow), CARD)
