"""The ledger's rules, its file format, and the compiler behind it (no GPU needed)."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from sglang.ledger import command as ledger
from sglang.ledger import compile as compiling
from sglang.ledger import rules as ledger_rules
from sglang.ledger.lock_writer import write_lock
from sglang.ledger.measure import row_key, variant_of, variant_table
from sglang.ledger.variant import Variant
from sglang.srt.hardware.arch import arch_by_name
from sglang.srt.kernels import tiles
from sglang.srt.kernels.ledger_file import LOCKS, Ledger, LedgerRows, Row, read_lock, tile_key

KEY = ("extend_attention", "576x512/bfloat16/bfloat16/plain", "M32 N64 w8 s1")


def rows_with(smem: int = 1000, spills: int = 0, target: str = "3.9.0/sm_120") -> LedgerRows:
    return {KEY: Row("code", {target: (smem, 128, spills, 0, ("m16n8k16 bf16",))})}


def variant(default: bool = True) -> Variant:
    return Variant(KEY[0], KEY[1], None, {}, {}, (), {}, default)


def test_the_documented_figures_are_those_of_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert ledger.main(["report"]) == 0
    said = capsys.readouterr().out
    text = (Path(__file__).parents[3] / "docs" / "kernels.md").read_text()
    for lock in said.split("sm90 ("):
        rows, measurements = re.findall(r"([0-9]+) \(kernel, variant, tile\) rows, ([0-9]+) measurements", lock)[0]
        assert f"| {int(rows):,} |" in text and f"| {int(measurements):,} |" in text
        (spilling,) = re.findall(r"default tiles that spill: (\d+ of \d+)", lock)
        (most,) = re.findall(r"most shared memory: ([\d,]+ B)", lock)
        assert f"| {spilling}, " in text and f"| {most} of " in text
    experts, linear = (
        dict(re.findall(rf"^  {op} +(\w+) +(\d+ +[\d,]+ +\d+) ", said.split("sm90 (")[0], re.MULTILINE))
        for op in ("fused_moe", "linear")
    )
    assert len(experts) == 15 and experts.keys() == linear.keys()
    for scheme in experts:
        figures = [", ".join(found[scheme].split()) for found in (experts, linear)]
        assert f"| {scheme} | {' | '.join(figures)} |" in text, scheme


# --- rules ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("smem", [101_377, 106_496, 147_456])
def test_too_much_shared_memory_is_a_problem(smem: int) -> None:
    assert f"needs {smem:,} B on 3.9.0/sm_120, limit 101,376 B" in "".join(
        ledger_rules.over_limit("sm120", rows_with(smem))
    )
    assert not list(ledger_rules.over_limit("sm90", rows_with(smem, target="3.9.0/sm_90")))


def test_the_limit_itself_is_allowed() -> None:
    assert not list(ledger_rules.over_limit("sm120", rows_with(101_376)))


def test_a_default_tile_must_not_spill() -> None:
    rows = rows_with(spills=4)
    assert "spills 4 B" in "".join(ledger_rules.over_spill_budget("sm120", rows, {KEY: variant()}))
    assert not list(ledger_rules.over_spill_budget("sm120", rows, {KEY: variant(default=False)}))
    assert not list(ledger_rules.over_spill_budget("sm120", rows_with(spills=0), {KEY: variant()}))


def test_an_accepted_spill_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    accepted = ledger_rules.AcceptedSpill("sm120", KEY[0], "576x512/", 64, "test")
    monkeypatch.setattr(ledger_rules, "ACCEPTED_SPILLS", (accepted,))
    assert not list(ledger_rules.over_spill_budget("sm120", rows_with(spills=64), {KEY: variant()}))
    assert list(ledger_rules.over_spill_budget("sm120", rows_with(spills=65), {KEY: variant()}))


def test_targets_that_are_not_native_are_exempt_from_the_spill_budget_only() -> None:
    rows = rows_with(smem=101_377, spills=999, target="3.6.0/sm_121")
    assert not list(ledger_rules.over_spill_budget("sm120", rows, {KEY: variant()}))
    assert list(ledger_rules.over_limit("sm120", rows))


def test_a_tile_that_was_never_measured_is_a_problem() -> None:
    assert "is not in the lock for 3.6.0/sm_90, 3.9.0/sm_90" in "".join(
        ledger_rules.missing("sm90", {}, {KEY: variant()})
    )
    assert "not in the lock for 3.6.0/sm_120, 3.6.0/sm_121, 3.9.0/sm_121" in "".join(
        ledger_rules.missing("sm120", rows_with(), {KEY: variant()})
    )


def test_a_row_of_a_tile_that_is_gone_is_a_problem() -> None:
    assert "in the lock, but not in the table" in "".join(ledger_rules.missing("sm120", rows_with(), {}))


def test_a_table_row_without_a_fitting_tile_is_a_problem() -> None:
    problems = list(ledger_rules.rows_without_tile(Ledger({})))
    assert any(p.startswith("sm_120: no tile fits extend_attention with head dim 576/512") for p in problems)


def test_a_changed_number_is_drift(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    triton = pytest.importorskip("triton")
    version = triton.__version__
    found = variant()
    monkeypatch.setattr(ledger, "TRITON_VERSIONS", (version,))
    monkeypatch.setattr(ledger, "variant_table", lambda lock: {KEY: found})
    monkeypatch.setattr(ledger, "variant_hash", lambda v: "code")
    now = (2000, 128, 0, 0, ("m16n8k16 bf16",))
    monkeypatch.setattr(ledger, "measure", lambda jobs, processes, progress: {job: {"sm_120": now} for job in jobs})
    args = ledger.argparse.Namespace(all=True, sample=0, only="", processes=1)
    assert ledger._drift("sm120", rows_with(2000, target=f"{version}/sm_120"), args) == []
    problems = ledger._drift("sm120", rows_with(1999, target=f"{version}/sm_120"), args)
    assert len(problems) == 1 and "recorded (1999," in problems[0] and "now (2000," in problems[0]
    monkeypatch.setattr(ledger, "variant_hash", lambda v: "other")
    assert "the kernel changed" in ledger._drift("sm120", rows_with(), args)[0]


# --- file -------------------------------------------------------------------------------------------------------------


def test_the_lock_file_keeps_what_was_written(tmp_path: Path) -> None:
    rows = rows_with()
    rows[KEY].by_target["3.9.0/sm_121"] = rows[KEY].by_target["3.9.0/sm_120"]
    rows[KEY].by_target["3.6.0/sm_121"] = (1, 2, 3, 4, ())
    rows["fused_moe", "up", "M16 w4"] = Row("other", {"3.9.0/sm_120": (5, 6, 7, 8, ("a b", "c"))})
    write_lock("sm120", rows, tmp_path)
    assert read_lock("sm120", tmp_path) == rows
    first = (tmp_path / "sm120.lock.json").read_text()
    write_lock("sm120", dict(reversed(rows.items())), tmp_path)
    assert (tmp_path / "sm120.lock.json").read_text() == first, "the file does not depend on the order of rows"


def test_tile_key() -> None:
    tile = {"num_stages": 2, "BLOCK_N": 32, "BLOCK_M": 64, "num_warps": 4, "ctas_per_sm": 2, "waves": 4}
    assert tile_key(tile) == "M64 N32 w4 s2"


# --- the shipped lock files -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lock", LOCKS)
def test_the_shipped_lock_obeys_the_rules(lock: str) -> None:
    pytest.importorskip("triton")
    rows, table = read_lock(lock), variant_table(lock)
    assert rows
    assert list(ledger_rules.over_limit(lock, rows)) == []
    assert list(ledger_rules.over_spill_budget(lock, rows, table)) == []
    assert list(ledger_rules.missing(lock, rows, table)) == []


def test_every_table_row_has_a_tile_on_every_gpu() -> None:
    assert list(ledger_rules.rows_without_tile(Ledger.load())) == []


def test_candidate_tiles_fit_the_small_gpus_without_the_preferred_ones() -> None:
    """What sm_86/89/120/121 may use is measured to fit; tiles that only larger GPUs get may exceed their limit."""
    ledger_rows = read_lock("sm120")
    for row in tiles.ROWS:
        for tile in row.tiles:
            measured = [r for (op, _, name), r in ledger_rows.items() if op == row.op and name == tile_key(tile)]
            assert measured, f"{row.op} {tile}"
            assert all(m[0] <= 101_376 for r in measured for m in r.by_target.values())


def test_the_lock_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    """Every kernel is the one that was measured, and a sample of rows compiles to the recorded numbers."""
    pytest.importorskip("triton")
    assert ledger.main(["check", "--sample", "2", "--processes", "1"]) == 0, capsys.readouterr().out


# --- compiling --------------------------------------------------------------------------------------------------------


def test_ptxas_log() -> None:
    log = """ptxas info    : Compiling entry function 'k' for 'sm_120a'
    24 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 24 bytes cumulative stack size"""
    assert compiling.parse_ptxas(log) == (168, 20, 24)
    with pytest.raises(compiling.CompileFailed):
        compiling.parse_ptxas("nothing")


def test_matrix_instructions() -> None:
    ptx = """
    mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 { %r1 }, { %r2 };
    mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 { %r3 }, { %r4 };
    mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 { %r1 };
    mma.sync.aligned.kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue4m3 { %r1 };
    wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 { %r1 };
    """
    assert compiling.matrix_instructions(ptx) == (
        "m16n8k16 bf16",
        "m16n8k32 e4m3",
        "m16n8k64 mxf4nvf4 4X",
        "wgmma m64n128k16 bf16",
    )


def moe_variant(block_m: int, block_n: int, block_k: int, stages: int) -> Variant:
    found = variant_of("sm120", "fused_moe", "gate_up/bf16/even")
    return found.with_tile(
        found.tile | {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "num_stages": stages}
    )


@pytest.mark.parametrize("stages", [4, 2])
def test_the_check_bites_on_a_fused_moe_tile_of_the_published_size(stages: int) -> None:
    """64x64x128 with 4 stages takes the very 147,456 B of the published crash; with 2 stages it fits."""
    pytest.importorskip("triton")
    found = moe_variant(64, 64, 128, stages)
    result = compiling.compile_variant(found, "sm_120")
    assert result[0] == {4: 147_456, 2: 49_152}[stages]
    problems = list(ledger_rules.over_limit("sm120", {row_key(found): Row("x", {"3.9.0/sm_120": result})}))
    assert len(problems) == (1 if stages == 4 else 0)


def test_the_check_bites_on_the_mla_tile_of_the_published_crash() -> None:
    pytest.importorskip("triton")
    tile = {"BLOCK_M": 32, "BLOCK_N": 64, "num_warps": 8, "num_stages": 2}
    found = variant_of("sm120", "extend_attention", "576x512/bfloat16/bfloat16/plain")
    result = compiling.compile_variant(found.with_tile(tile), "sm_120")
    assert result[0] > arch_by_name("sm_120").smem_per_block
    assert list(ledger_rules.over_limit("sm120", {KEY: Row("x", {"3.9.0/sm_120": result})}))


def test_sm_121_gets_the_ptx_of_sm_120() -> None:
    """What lets the ledger assemble for sm_121 what it compiled for sm_120."""
    pytest.importorskip("triton")
    if not compiling.shares_ptx("sm_121"):
        pytest.skip("this Triton makes its own PTX for sm_121")
    found = moe_variant(16, 32, 64, 2)
    base, own = compiling.compile_for(found, "sm_120"), compiling.compile_for(found, "sm_121")
    assert base.ptx.replace("sm_120", "sm_121") == own.ptx
    assert compiling.assemble_for(found, base, "sm_120", "sm_121") == own.measurement


def test_the_hash_follows_the_code_and_not_its_comments() -> None:
    pytest.importorskip("triton")
    a, b = moe_variant(64, 64, 128, 4), moe_variant(64, 64, 128, 3)
    assert compiling.variant_hash(a) == compiling.variant_hash(moe_variant(64, 64, 128, 4))
    assert compiling.variant_hash(a) != compiling.variant_hash(b)
    assert compiling.variant_hash(a) != compiling.variant_hash(dataclasses.replace(a, divisible_by_16=()))


def test_the_hash_does_not_follow_the_folder_of_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from sglang.srt.layers.triton_ops import norm

    kernel = norm.rmsnorm_kernel.fn
    before = compiling.source_hash.__wrapped__(norm.rmsnorm_kernel)
    monkeypatch.setattr(kernel, "__module__", "sglang.srt.blocks.anything.kernels.norm")
    assert compiling.source_hash.__wrapped__(norm.rmsnorm_kernel) == before
    monkeypatch.setattr(kernel, "__module__", "sglang.srt.layers.triton_ops.other")
    assert compiling.source_hash.__wrapped__(norm.rmsnorm_kernel) != before
