"""Predicted times of ops and steps, and the tables of measured ones that ship."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from sglang import explain
from sglang.srt.configs.quant_scheme import SCHEMES
from sglang.srt.configs.quantization import quantization_of
from sglang.srt.errors import UserError
from sglang.srt.hardware.arch import ArchTraits, arch_by_name
from sglang.srt.kernels.scaled_product import product_of
from sglang.srt.plan.layer_spec import ParallelConfig
from sglang.srt.plan.model_description import ModelDescription, describe_model
from sglang.srt.plan.rank_weights import rank_weights
from sglang.srt.plan.ranks import ONE_RANK, RankLayout
from sglang.tuning import attention_model, measured, served_attention
from sglang.tuning.best_times import best
from sglang.tuning.grid import STEPS, Grid, code_of, decoded, encoded
from sglang.tuning.ops import (
    AllReduce,
    CompressedAttention,
    DecodeAttention,
    EntryChoice,
    Experts,
    HyperConnection,
    Linear,
    SelectedAttention,
    describe,
    floor,
    parse_shape,
)
from sglang.tuning.predicted_times import predicted
from sglang.tuning.rates import ceilings_of
from sglang.tuning.replays import FORM_BYTES
from sglang.tuning.sglang_times import gated, time_by_sglang
from sglang.tuning.step import Step, decode_step, prefill_step
from sglang.tuning.steps import ops_of, time_step, total, unserved_ops
from sglang.tuning.streaming import pair_kind

CARD, H200 = arch_by_name("rtx-pro-6000-server"), arch_by_name("h200")
CONFIGS = Path(__file__).parents[1] / "srt" / "kernels" / "configs"
RANKS = {"glm47": 8, "gpt_oss": 1, "kimi_k25": 8, "qwen35": 1, "qwen3": 1, "deepseek_v4": 4, "glm5": 16}


def model_of(name: str, tmp_path: Path) -> ModelDescription:
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    return describe_model(config, quantization_of(config, tmp_path, None, "default"), source=name)


# --- grids ------------------------------------------------------------------------------------------------------------


def test_a_grid_gives_its_entries_back_and_lies_between_them() -> None:
    codes = tuple(code_of(10.0 * m * n) for m, n in itertools.product((1, 4), (1, 16)))
    grid = Grid(("m", "n"), ((1, 4), (1, 16)), codes)
    assert grid.seconds(4, 16) == pytest.approx(640e-6, rel=0.01)
    assert grid.seconds(2, 4) == pytest.approx(80e-6, rel=0.02), "straight lines in logarithms"
    assert grid.seconds(8, 32) == pytest.approx(4 * 640e-6, rel=0.01), "beyond the end in proportion"
    assert grid.seconds(0.5, 0.1) == pytest.approx(10e-6, rel=0.01), "before the start as there"
    assert grid.holds(4, 1) and not grid.holds(2, 1)


def test_a_grid_of_the_wrong_size_is_refused() -> None:
    with pytest.raises(ValueError, match="3 times for 2 x 2"):
        Grid.from_json({"axes": {"m": [1, 2], "n": [1, 2]}, "codes": encoded((1, 2, 3))})
    with pytest.raises(ValueError, match="pairs of the digits"):
        Grid.from_json({"axes": {"m": [1]}, "codes": "0"})


def test_codes_come_back() -> None:
    codes = (0, 1, 63, 64, 960, 4095)
    assert decoded(encoded(codes)) == codes and code_of(0.5) == 0
    for microseconds in (1.0, 7.7, 1e6):
        assert 2 ** (code_of(microseconds) / STEPS) == pytest.approx(microseconds, rel=0.01)


def test_between_its_sizes_a_grid_follows_what_times_go_along_with() -> None:
    """A jump that no entry shows, as where a cache ends, and growth beyond the end."""

    def base(m: float) -> float:
        return (1e-5 if m <= 10 else 4e-5) * max(1.0, m / 32)

    grid = Grid(("m",), ((8, 16),), (code_of(20.0), code_of(80.0)))
    assert grid.seconds(10, base=base) == pytest.approx(20e-6, rel=0.02)
    assert grid.seconds(11, base=base) == pytest.approx(80e-6, rel=0.02)
    assert grid.seconds(64, base=base) == pytest.approx(160e-6, rel=0.02)
    assert grid.seconds(1, base=base) == pytest.approx(20e-6, rel=0.02)
    assert Grid(("m",), ((8,),), (5,)).covers(8) and not Grid(("m",), ((8,),), (5,)).covers(9)


def test_the_shipped_tables_are_small_sourced_and_whole() -> None:
    path = measured.table_path("rtx-pro-6000-server")
    content = json.loads(path.read_text())
    assert "aiconfigurator" in content["source"] and "derive_tables.py" in content["made by"]
    assert path.stat().st_size < 240_000
    for name, grid in measured.measured_times("rtx-pro-6000-server").items():
        assert all(list(axis) == sorted(set(axis)) for axis in grid.axes), name
        assert all(0 <= code < STEPS * 28 for code in grid.codes), f"{name}: beyond 1 us to 270 s"


def test_no_layer_was_faster_than_reading_the_experts_of_an_even_routing() -> None:
    """Rows whose routing leaves experts out would say so: half of the time. Weights beyond the L2, 256 tokens."""
    seen = 0
    for name, grid in measured.measured_times("rtx-pro-6000-server").items():
        kind, form, *sizes = name.split("/")
        if kind != "experts":
            continue
        hidden, count, top_k = map(int, sizes[0].split("x"))
        for inter in grid.axes[0]:
            matrices = 3 if gated(count, top_k) else 2
            weights = min(count, 256 * top_k) * matrices * inter * hidden * FORM_BYTES[form]
            if weights > 400e6:
                seen += 1
                assert grid.seconds(inter, 256) > 0.93 * weights / ceilings_of(CARD).read, (name, inter)
    assert seen > 100


def test_nobody_timed_other_cards() -> None:
    """Cards with SM120's instructions go by their data sheets (`test_other_shapes.py`)."""
    assert measured.measured_times("rtx-5090") == {}
    assert measured.measured_times("rtx-pro-6000-workstation") == measured.measured_times("rtx-pro-6000-server")
    with pytest.raises(UserError, match="nobody measured"):
        ceilings_of(arch_by_name("h100"))


# --- ops --------------------------------------------------------------------------------------------------------------

SHAPES = (
    "linear tokens=64 rows=4096 cols=7168 scheme=fp8_block",
    "linear tokens=1 rows=5000 cols=7168",
    "linear tokens=300 rows=5000 cols=7168 scheme=int4_g32",
    "linear tokens=16 rows=7168 cols=2048 scheme=nvfp4",
    "fused_moe tokens=64 num_experts=160 top_k=8 hidden=5120 intermediate=192 scheme=fp8_channel",
    "fused_moe tokens=2 num_experts=384 top_k=8 hidden=7168 intermediate=256 scheme=int4_g32",
    "decode_attention batch=16 context=4096 heads=40 kv_heads=8 head_dim=128",
    "decode_attention batch=3 context=777 heads=16 kv_heads=1 head_dim=576 v_head_dim=512 latent=1",
    "extend_attention batch=2 new=1000 heads=64 kv_heads=8 head_dim=64 kv=fp8",
    "extend_attention batch=1 new=512 heads=12 kv_heads=1 head_dim=128 prefix=8192",
    "latent_absorb tokens=7 heads=8 rows=512 cols=128",
    "gated_delta_rule batch=16 tokens=1 heads=32 key_heads=16",
    "all_reduce size=65536 ranks=4",
    "all_gather size=65536 ranks=8",
)


def test_large_sums_are_those_of_frameworks_where_they_were_timed_and_nccls_elsewhere() -> None:
    large = parse_shape("all_reduce size=33554432 ranks=4")
    own, h200 = predicted(large, CARD), predicted(large, H200)
    assert own is not None and own.seconds == pytest.approx(1.77e-3, rel=0.03), "SGLang's; NCCL's benchmark: 2.02 ms"
    assert h200 is not None and "a guess" not in h200.how


@pytest.mark.parametrize("shape", SHAPES)
def test_any_shape_has_a_time_above_its_floor(shape: str) -> None:
    op = parse_shape(shape)
    assert parse_shape(describe(op)) == op
    own = predicted(op, CARD)
    assert own is not None and 0 < own.error <= 0.5
    assert own.seconds > 0.97 * floor(op, ceilings_of(CARD)), "faster than anything measured"
    assert own.seconds < 300 * floor(op, ceilings_of(CARD)) + 200e-6


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ("", "the first word names an op"),
        ("conv tokens=1", "linear, fused_moe"),
        ("linear tokens=1 rows=2", "needs cols"),
        ("linear tokens=0 rows=2 cols=2", "needs tokens above 0"),
        ("linear tokens=1 rows=2 cols=-3", "'cols=-3' is no size"),
        ("linear tokens=1 rows=2 cols=3 scheme=fp3", "'scheme=fp3' is no size"),
        ("linear tokens=1 rows=2 cols=9999999999999", "is no size"),
        ("extend_attention batch=1 new=99999999 heads=1 kv_heads=1 head_dim=64", "'new=99999999' is no size"),
        ("decode_attention batch=1 context=9 heads=10 kv_heads=4 head_dim=64", "do not share 4 kv heads"),
        ("fused_moe tokens=1 num_experts=4 top_k=8 hidden=64 intermediate=64", "top_k 8 of 4"),
    ],
)
def test_a_shape_that_is_none_says_what_there_is(shape: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_shape(shape)


def test_more_work_takes_no_less_time() -> None:
    def seconds(**sizes: int) -> float:
        keys = {"batch": 16, "context": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, "v_head_dim": 128} | sizes
        found = predicted(DecodeAttention(attention_model.Keys(**keys)), CARD)
        assert found is not None
        return found.seconds

    assert seconds(batch=1) < seconds(batch=16) < seconds(batch=64)
    assert seconds(context=512) < seconds() < seconds(context=32768)
    for scheme in (None, "fp8_block", "nvfp4"):
        times = [predicted(Linear(m, 4096, 7168, scheme), CARD) for m in (4, 64, 1024, 8192)]
        found = [time.seconds for time in times if time is not None]
        assert found == sorted(found) and len(found) == 4
        times = [predicted(Experts(m, 128, 8, 2048, 768, scheme), CARD) for m in (1, 16, 256, 4096)]
        found = [time.seconds for time in times if time is not None]
        assert found == sorted(found) and len(found) == 4


@pytest.mark.parametrize("size", [65536, 1 << 27])
def test_ranks_that_nobody_timed_take_the_time_of_more(size: int) -> None:
    """A guess of their own would make five cards faster than eight."""
    found = [predicted(AllReduce(size, ranks), CARD) for ranks in (2, 3, 4, 5, 7, 8, 16)]
    times = [time.seconds for time in found if time is not None]
    assert times == sorted(times) and len(times) == 7
    assert [time.error for time in found if time is not None] == [0.1, 0.3, 0.1, 0.3, 0.3, 0.1, 1.0]


def test_exact_rows_say_so() -> None:
    exact, between = best(Linear(64, 4096, 7168), CARD), best(Linear(60, 4096, 7168), CARD)
    assert exact is not None and exact.exact
    assert between is not None and not between.exact
    assert best(Linear(64, 4096, 7168), H200) is None
    assert time_by_sglang(Linear(64, 4096, 7168), H200) is None


def test_pieces_are_cut_as_the_kernel_cuts_them() -> None:
    pytest.importorskip("triton")
    from sglang.srt.blocks.recurrent_state.kernels import register_scan
    from sglang.srt.layers.attention.triton_ops.decode_attention import combine_constants
    from sglang.srt.layers.attention.triton_ops.decode_workspace import SHORT_PIECE

    assert SHORT_PIECE == served_attention.SHORT_PIECE
    for dim, heads, seqs in itertools.product((64, 80, 128, 192, 256, 512), (1, 12, 64, 256), (1, 8, 9, 256)):
        keys = attention_model.Keys(seqs, 4096, heads, 1, dim, dim)
        assert combine_constants(dim, heads, seqs)["BLOCK_P"] == served_attention.merged_at_once(keys)
    scan = served_attention.SCAN
    assert (register_scan.CHUNK, tuple(tile["BLOCK_V"] for tile in register_scan.TILES)) == (scan.chunk, scan.columns)


@pytest.mark.parametrize(
    ("prompts", "tokens", "heads", "measured"),
    [(1, 8192, 32, 588), (4, 2048, 32, 403), (1, 8192, 16, 343), (4, 2048, 16, 218)],
)
def test_the_gated_delta_rule_takes_what_an_h100_took(prompts: int, tokens: int, heads: int, measured: float) -> None:
    """In microseconds; the model of an H200 has the same SMs and clock."""
    seconds = served_attention.delta_rule_seconds(prompts, tokens, heads, 128, H200)
    assert seconds * 1e6 == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("arch", [CARD, H200], ids=["sm_120", "h200"])
def test_schemes_are_multiplied_as_the_kernels_do(scheme: str, arch: ArchTraits) -> None:
    assert pair_kind(scheme, arch.features) == product_of(SCHEMES[scheme], arch.features).pair_kind
    rests_on = [predicted(Linear(tokens, 4096, 4096, scheme), arch) for tokens in (16, 32, 128, 512, 4096)]
    if arch is CARD or not product_of(SCHEMES[scheme], arch.features).weight_only:  # which have the card's tiles
        assert all(time is not None and "no record" not in time.how for time in rests_on)


# --- steps ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RANKS)
def test_steps_of_models(name: str, tmp_path: Path) -> None:
    model = model_of(name, tmp_path)
    parallel = ParallelConfig("bfloat16", "bfloat16", 1, RankLayout(RANKS[name]))
    last = 0.0
    for step in (decode_step(1), decode_step(16), decode_step(64), decode_step(256), prefill_step(8192)):
        time = total(time_step(model, parallel, step, CARD))
        assert time.floor < time.seconds and time.low < time.seconds < time.high
        assert time.best <= time.seconds
        assert time.seconds > last
        last = time.seconds


def test_a_decode_step_reads_every_weight_of_a_dense_model_once(tmp_path: Path) -> None:
    """The op list misses nothing that is large: Qwen3-8B in 16 bits has 8.19e9 parameters, 0.62e9 of them in the
    embedding, which is not multiplied."""
    model = model_of("qwen3", tmp_path)
    ops = [op for _, op in ops_of(model, ParallelConfig("bfloat16", "bfloat16"), decode_step(1, 1))]
    weights = sum(op.rows * op.cols for op in ops if isinstance(op, Linear))
    embedding = model.vocab_size * model.hidden_size
    dense = sum(m.rows * m.cols for m, _ in rank_weights(model, ONE_RANK).matrices())
    assert weights == dense + embedding


def test_what_nothing_computes_is_no_prediction(tmp_path: Path) -> None:
    """Where an op has no kernel, others' times or bytes stand in, and are said to."""
    model, parallel = model_of("deepseek_v4", tmp_path), ParallelConfig("bfloat16", "bfloat16", 4, RankLayout(4))
    rows = time_step(model, parallel, decode_step(16), CARD)
    missing = total(rows).missing
    unserved = unserved_ops(model, parallel, CARD)
    assert {name.partition(" ")[0] for name in missing} <= unserved
    for row in rows:
        assert (row.ours is None) == (row.name in missing)
    served = model_of("qwen3", tmp_path)
    assert unserved_ops(served, ParallelConfig("bfloat16", "bfloat16"), CARD) == frozenset()


def test_experts_by_rank_are_the_same_work(tmp_path: Path) -> None:
    model = model_of("glm47", tmp_path)
    whole, by_rank = (
        sum(
            row.count * row.floor
            for row in time_step(
                model, ParallelConfig("bfloat16", "bfloat16", 1, RankLayout(8, ep_size=ep)), decode_step(256), CARD
            )
            if row.name == "fused_moe"
        )
        for ep in (1, 8)
    )
    assert 0.8 < by_rank / whole < 1.3


def test_ranks_share_the_work(tmp_path: Path) -> None:
    model = model_of("glm47", tmp_path)
    one, eight = (
        total(time_step(model, ParallelConfig("bfloat16", "bfloat16", 1, RankLayout(tp)), decode_step(64), CARD)).floor
        for tp in (1, 8)
    )
    assert one / 8.5 < eight < one / 5


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_predicts_shapes_without_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert explain.main(["--arch", "rtx-pro-6000-server", "--shape", SHAPES[0], "--shape", SHAPES[6]]) == 0
    text = capsys.readouterr().out
    assert "Predicted microseconds" in text and SHAPES[0] in text
    assert explain.main(["--arch", "rtx-pro-6000-server", "--shape", SHAPES[0], "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["ours_us"] > row["floor_us"] and row["best_exact"]


def test_the_command_says_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert explain.main(["--arch", "rtx-pro-6000-server", "--shape", "linear rows=1"]) == 2
    assert "needs cols, tokens" in capsys.readouterr().err
    assert explain.main(["--arch", "l40s", "--shape", SHAPES[0]]) == 2
    assert "nobody measured" in capsys.readouterr().err


def test_the_command_predicts_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text((CONFIGS / "gpt_oss.json").read_text())
    argv = ["--arch", "rtx-pro-6000-server", "--model-path", str(tmp_path), "--time"]
    assert explain.main(argv) == 0
    text = capsys.readouterr().out
    assert "Predicted, not measured" in text and "decode 256 at 2048 tokens" in text
    assert explain.main([*argv, "--json", "--time-context", "512"]) == 0
    steps = json.loads(capsys.readouterr().out)["time"]
    assert explain.main([*argv, "--time-context", "0"]) == 2
    assert "--time-context 0" in capsys.readouterr().err
    assert steps["decode 1 at 512 tokens"]["low"] < steps["decode 1 at 512 tokens"]["seconds"]


# --- sparse attention -------------------------------------------------------------------------------------------------

LATENTS = {
    (2048, 64): 2484, (2048, 32): 1817, (2048, 16): 1279, (256, 64): 318, (256, 32): 230, (256, 16): 160, (64, 64): 143,
    (64, 32): 110, (64, 16): 60, (16, 64): 47, (16, 32): 33, (16, 16): 21, (1, 64): 12, (1, 16): 9,
}  # fmt: skip
ENTRIES = {
    (2048, 64): 912, (2048, 32): 607, (2048, 16): 419, (256, 64): 116, (256, 32): 74, (256, 16): 50, (64, 64): 47,
    (64, 32): 53, (64, 16): 32, (16, 64): 31, (16, 32): 22, (16, 16): 17, (1, 64): 11, (1, 16): 10,
}  # fmt: skip
"""(tokens, heads) -> microseconds on an H200, of 65,536 stored entries."""


@pytest.mark.parametrize(
    ("times", "entries", "dims"), [(LATENTS, 2048, (576, 512)), (ENTRIES, 640, (512, 512))], ids=["latents", "entries"]
)
def test_sparse_attention_takes_what_an_h200_took(
    times: dict[tuple[int, int], int], entries: int, dims: tuple[int, int]
) -> None:
    for (tokens, heads), us in times.items():
        row = predicted(SelectedAttention(tokens, entries, 65536, heads, *dims), H200)
        assert row is not None and row.seconds * 1e6 == pytest.approx(us, rel=row.error), (tokens, heads)


CHOICES = (
    (2048, 64512, 1, 64, 4253), (2048, 15360, 1, 64, 953), (1024, 65024, 1, 32, 1424), (64, 16384, 64, 64, 86),
    (16, 16384, 16, 64, 42), (1, 131072, 1, 64, 50),
)  # fmt: skip


@pytest.mark.parametrize(("tokens", "entries", "requests", "heads", "us"), CHOICES)
def test_the_choice_of_entries_takes_what_an_h200_took(
    tokens: int, entries: int, requests: int, heads: int, us: int
) -> None:
    row = predicted(EntryChoice(tokens, entries, requests, heads), H200)
    assert row is not None and row.seconds * 1e6 == pytest.approx(us, rel=row.error)


CONTEXTS = (2, 129, 1025, 8193, 65537, 524289)


@pytest.mark.parametrize("scheme", [None, "fp8_block"])
@pytest.mark.parametrize("heads", [8, 16, 32, 64])
def test_the_attention_of_v4_is_predicted_faster_than_it_was_measured(heads: int, scheme: str | None) -> None:
    """SGLang 0.5.14, whose kernels for this attention are the only ones that were timed on the card."""
    decodes = [
        CompressedAttention(b, c, heads, rate, 1, scheme) for rate in (4, 128) for b in (1, 4, 16) for c in CONTEXTS
    ]
    prompts = [CompressedAttention(b, n, heads, 128, n, scheme) for b in (1, 16) for n in (128, 1024, 8192)]
    for op in (*decodes, *prompts):
        ours, others = predicted(op, CARD), time_by_sglang(op, CARD)
        assert ours is not None and others is not None
        assert ours.seconds * (1 + ours.error) < 0.5 * others[0], describe(op)


@pytest.mark.parametrize("hidden", [4096, 7168])
def test_hyper_connections_are_predicted_at_most_as_slow_as_the_best_measured(hidden: int) -> None:
    for tokens in (1, 16, 64, 256, 1024, 4096, 8192):
        op = HyperConnection(tokens, hidden)
        ours, others = predicted(op, CARD), best(op, CARD)
        assert ours is not None and others is not None and ours.seconds < others.measured, tokens


def test_sums_in_eight_bits_are_predicted_where_they_are_asked_for(tmp_path: Path) -> None:
    """Half of the bytes: of prompts in any case, of steps that decode many requests where all steps are asked for."""
    model = model_of("glm47", tmp_path)

    def seconds(mode: str, step: Step) -> float:
        parallel = ParallelConfig("bfloat16", "bfloat16", ranks=RankLayout(8), quantized_sums=mode)
        names = {name for name, _ in ops_of(model, parallel, step)}
        assert ("all_reduce in e4m3" in names) != ("all_reduce" in names)
        return total(time_step(model, parallel, step, CARD)).seconds

    prompt, many, one = prefill_step(8192), decode_step(256), decode_step(1)
    assert seconds("prefill", prompt) == seconds("all", prompt) < 0.75 * seconds("off", prompt)
    assert seconds("all", many) < seconds("prefill", many) == seconds("off", many)
    assert seconds("all", one) == seconds("off", one), "its sums are small"
