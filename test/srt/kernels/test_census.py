"""Ledger coverage of compiled kernels: every launcher, with the sizes of the published models and others, against the
ledger.

Nothing is compiled but where a test says so. With every tile, sizes that are alike to launches are launched once;
`make thorough` launches all of them and compares. Five seeded defects at the end show that each kind is caught by name.
"""

from __future__ import annotations

import importlib
import itertools
import json
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from sglang.ledger import checked_server
from sglang.ledger import command as ledger
from sglang.ledger import compile as compiling
from sglang.ledger import coverage as covering
from sglang.ledger import rules as ledger_rules
from sglang.ledger.coverage import Coverage, UncoveredLaunch, check_launches, coverage
from sglang.ledger.form_rules import FORM_RULES
from sglang.ledger.launch_form import Form, Launches, kernel_name, recording
from sglang.ledger.lock_writer import write_lock
from sglang.ledger.measure import variant_of, variant_table
from sglang.ledger.record import recorded
from sglang.ledger.variant import Variant
from sglang.srt import blocks, layers
from sglang.srt.configs.activation import SILU
from sglang.srt.hardware.arch import arch_by_name
from sglang.srt.kernels.ledger_file import LOCK_DIR, Row, RowKey, read_lock
from sglang.srt.layers.attention.triton_ops import decode_attention
from sglang.srt.layers.moe.fused_moe_triton import fused_moe as moe
from sglang.srt.layers.triton_ops import norm
from sglang.srt.managers import launch
from sglang.srt.managers.scheduler import scheduler_process
from sglang.srt.managers.wire.ipc import Ports
from sglang.srt.server_args import ServerArgs
from srt.kernels import census
from srt.kernels.census import between
from srt.kernels.census.inputs import empty
from srt.kernels.census.moe import expert_weights
from srt.layers.moe.moe_harness import tile_configs_of

ARCH = arch_by_name("rtx-pro-6000-server")


@pytest.fixture(scope="module")
def forms() -> Launches:
    """Of every model in every layout, and what is between their sizes, on an RTX PRO 6000."""
    done: set[object] = set()
    with recording("sm_120") as found:
        census.launch_published(ARCH, done)
        between.launch_between(ARCH, done)
    return found


@pytest.fixture(scope="module")
def rows(forms: Launches) -> dict[Form, RowKey | None]:
    """The row of each form."""
    table = coverage("sm120")
    return {form: table.row_of(form) for form in forms}


def kernels() -> Iterator[Any]:
    """Every Triton kernel that is launched from Python: their names end so."""
    found = (pkgutil.walk_packages(package.__path__, f"{package.__name__}.") for package in (blocks, layers))
    for module in itertools.chain.from_iterable(found):
        if "triton" not in module.name and ".kernels." not in module.name:
            continue
        for name, value in vars(importlib.import_module(module.name)).items():
            if name.endswith("_kernel") and hasattr(value, "arg_names") and value.fn.__module__ == module.name:
                yield value


# --- the census -------------------------------------------------------------------------------------------------------


def test_every_launch_has_a_row(rows: dict[Form, RowKey | None], capsys: pytest.CaptureFixture[str]) -> None:
    uncovered = [form for form, row in rows.items() if row is None]
    covering = len(set(rows.values()) - {None})
    with capsys.disabled():
        print(f"\ncensus: {len(rows)} forms, {len(rows) - len(uncovered)} covered by {covering} rows")
    assert not uncovered, "\n".join(map(coverage("sm120").problem, uncovered[:20]))


@pytest.mark.thorough
def test_sizes_that_are_alike_launch_the_same(forms: Launches) -> None:
    """What the census leaves out where another size stands for one."""
    done: set[object] = set()
    with recording("sm_120") as found:
        for model, tp_size in census.models():
            census.launch_all(model, tp_size, ARCH, done, alike=lambda size: size)
        between.launch_between(ARCH, done)
    assert found.keys() == forms.keys()


def test_rows_are_what_launches_need(forms: Launches) -> None:
    """None is left of what nobody launches any more, and the server finds those that it looks for by name."""
    table = variant_table("sm120")
    needed = recorded("sm120", table, forms)
    assert needed.keys() == table.keys(), "python scripts/record_launches.py makes them"


def test_the_documented_numbers_are_those_of_the_census(rows: dict[Form, RowKey | None]) -> None:
    text = (Path(__file__).parents[3] / "docs" / "kernels.md").read_text()
    for count, what in ((len(rows), "forms"), (len(set(rows.values())), "rows")):
        stated = re.search(rf"about ([\d,]+) {what}", text)
        assert stated is not None and abs(int(stated[1].replace(",", "")) / count - 1) < 0.05, (count, what)


def test_every_kernel_is_in_the_census(forms: Launches) -> None:
    names = {kernel_name(kernel) for kernel in kernels()}
    assert names - {form.kernel for form in forms} == set(), "a launcher that the census does not run"
    assert FORM_RULES.keys() <= names, "a rule for a kernel that does not exist"


def test_rules_name_parameters_that_exist() -> None:
    by_name = {kernel_name(kernel): set(kernel.arg_names) for kernel in kernels()}
    for name, rule in FORM_RULES.items():
        conditions = {condition.partition("=")[0] for condition in (*rule.absent, *rule.counts_where)}
        named = rule.free | rule.at_most | rule.at_least | rule.counts | rule.optional
        # Rules that several kernels share name what one of them does not have.
        assert named & by_name[name] and (conditions <= by_name[name] or len(conditions & by_name[name]) > 1), name


def test_a_row_covers_itself() -> None:
    table = coverage("sm120")
    for key, variant in variant_table("sm120").items():
        assert table.row_of(form_of_row(variant)) is not None, key


def form_of_row(variant: Variant) -> Form:
    return Form(
        variant.fn,
        tuple(variant.signature.items()),
        tuple(sorted(variant.constexprs.items())),
        frozenset(variant.divisible_by_16),
        frozenset(variant.ones),
        variant.tile["num_warps"],
        variant.tile.get("num_stages", 3),
    )


def test_a_covered_launch_costs_no_more_than_its_row(rows: dict[Form, RowKey | None]) -> None:
    """The rules of reduction, judged by the compiler: another launch with every commit."""
    lock = read_lock("sm120")
    version = compiling_version()
    target = f"{version}/sm_120"
    if version not in ledger.TRITON_VERSIONS:
        pytest.skip(f"Triton {version} is not on record")
    named = {(form.kernel, str(form), ""): form for form in rows}
    for key in ledger.sample(list(named), 2, ledger._commits()):
        form = named[key]
        row = rows[form]
        assert row is not None
        recorded = lock[row].by_target[target]
        own = compiling.compile_variant(form.variant("census", form.kernel), "sm_120")
        budget = max(recorded[2], ledger_rules.spill_budget("sm120", row[0], row[1]))
        assert own[0] <= recorded[0], f"{form}: {own[0]} B of shared memory, {'/'.join(row)} has {recorded[0]}"
        if variant_table("sm120")[row].default:
            assert own[2] <= budget, f"{form}: spills {own[2]} B, {'/'.join(row)} may {budget} B"


def compiling_version() -> str:
    import triton

    return str(triton.__version__)


# --- the recorder -----------------------------------------------------------------------------------------------------


def test_forms_tell_types_alignment_and_ones_apart() -> None:
    weight = empty(5120)
    with recording("sm_120") as found:
        norm.rmsnorm(empty(4, 5120), weight, 1e-6)
        norm.rmsnorm(empty(9, 5120), weight, 1e-6)  # the same form
        norm.rmsnorm(empty(4, 5121)[:, 1:], weight, 1e-6)
        norm.rmsnorm(empty(4, 5120).half(), weight.half(), 1e-6)
    aligned, shifted, half = found
    assert aligned.multiples - shifted.multiples == {"x", "row_stride"}
    assert dict(half.types)["x"] == "*fp16" and dict(aligned.types)["x"] == "*bf16"
    assert "8192" in str(aligned) and aligned.kernel == "norm.rmsnorm_kernel"


def test_a_recording_notes_what_an_earlier_one_noted() -> None:
    weight = empty(5120)
    noted = []
    for _ in range(2):
        with recording("sm_120") as found:
            norm.rmsnorm(empty(4, 5120), weight, 1e-6)
        noted.append(set(found))
    assert noted[0] == noted[1] and len(noted[0]) == 1


def test_tensors_have_addresses_of_their_own() -> None:
    one, other = empty(8, 16), empty(8, 16)
    with recording("sm_120"):
        assert one.data_ptr() != other.data_ptr() and one.data_ptr() % 256 == 0
        assert one[1:].data_ptr() - one.data_ptr() == 32
        real = torch.zeros(4)
        assert real.data_ptr() == real.untyped_storage().data_ptr()
    assert one.data_ptr() == other.data_ptr()


# --- the debug mode ---------------------------------------------------------------------------------------------------


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A server that compares its launches, on a GPU that is not there; what would be compiled is not."""
    triton = pytest.importorskip("triton")
    with recording("sm_120"):
        check_launches(ARCH)
        compare = triton.knobs.runtime.jit_cache_hook
        monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", lambda **launch: compare(**launch) or True)
        yield


@pytest.mark.usefixtures("watched")
def test_a_server_that_checks_refuses_a_launch_without_a_row() -> None:
    weight = empty(5120)
    norm.rmsnorm(empty(4, 5120), weight, 1e-6)
    with pytest.raises(UncoveredLaunch, match="norm.rmsnorm_kernel.*row_stride is not a multiple of 16"):
        norm.rmsnorm(empty(4, 5121)[:, 1:], weight, 1e-6)


def test_a_checked_server_compares_in_each_scheduler_process(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[Any] = []
    monkeypatch.setattr(launch, "SCHEDULER_ENTRY", launch.SCHEDULER_ENTRY)  # restored afterwards
    monkeypatch.setattr(checked_server, "serve", lambda argv, prog: served.append(argv))
    assert ledger.main(["serve", "--port", "31401"]) == 0
    assert served == [["--port", "31401"]]
    monkeypatch.setattr(scheduler_process, "run_scheduler", lambda *call: served.append(call))
    monkeypatch.setattr(checked_server, "check_launches", served.append)
    monkeypatch.setattr(checked_server, "current_arch", lambda index, device: {(1, "cuda"): ARCH}[index, device])
    module, _, function = launch.SCHEDULER_ENTRY.partition(":")
    call = (ServerArgs(model_path="model", device="cuda"), Ports("", "", "", "", "", ""), 1, None)
    getattr(importlib.import_module(module), function)(*call)
    assert served[1:] == [ARCH, call]


def test_where_rows_are_not_complete_it_only_warns(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(covering, "COMPLETE", frozenset())
    runtime = pytest.importorskip("triton").knobs.runtime
    with recording("sm_120"):
        check_launches(ARCH)
        compare = runtime.jit_cache_hook
        monkeypatch.setattr(runtime, "jit_cache_hook", lambda **launch: compare(**launch) or True)
        norm.rmsnorm(empty(4, 5121)[:, 1:], empty(5120), 1e-6)
    assert "row_stride is not a multiple of 16" in caplog.text


# --- seeded defects ---------------------------------------------------------------------------------------------------


def test_defect_a_falsified_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One figure edited in the file: named without compiling; with a digest to match, by the compiler."""
    path = LOCK_DIR / "sm120.lock.json"
    content = json.loads(path.read_text())
    entry = content["rows"]["silu_and_mul"]["small"]["w4 s3 BLOCK1024"]
    targets = next(name for name in entry if f"{compiling_version()}/sm_120" in name)
    entry[targets][1] //= 2
    (tmp_path / "sm120.lock.json").write_text(json.dumps(content))
    rows = read_lock("sm120", tmp_path)
    assert list(ledger_rules.edited("sm120", rows)) == [
        "sm120: silu_and_mul/small/w4 s3 BLOCK1024: its figures were edited after they were measured"
    ]
    write_lock("sm120", rows, tmp_path)  # forged
    forged = read_lock("sm120", tmp_path)
    assert list(ledger_rules.edited("sm120", forged)) == []
    key = ("silu_and_mul", "small", "w4 s3 BLOCK1024")
    args = ledger.argparse.Namespace(all=True, sample=1, turn=0, only="", processes=1)
    monkeypatch.setenv("SGLANG_CACHE_DIR", str(tmp_path))
    problems = ledger._drift("sm120", {key: forged[key]}, args)
    assert problems and all("silu_and_mul/small" in problem and "recorded" in problem for problem in problems)


def test_an_update_measures_edited_rows_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would otherwise write a digest for them."""
    rows = {key: Row("code", {"3.9.0/sm_120": (1, 2, 3, 4, ())}) for key in (("a", "b", "c"), ("a", "b", "d"))}
    write_lock("sm120", rows, tmp_path)
    path = tmp_path / "sm120.lock.json"
    first = path.read_text().replace("[1, 2, 3, 4", "[1, 9, 3, 4", 1)
    path.write_text(first)
    monkeypatch.setattr(ledger, "read_lock", lambda lock: read_lock(lock, tmp_path))
    assert list(ledger._unedited("sm120")) == [("a", "b", "d")]


def test_defect_a_launchers_constant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four times the block, in the launcher alone."""
    original = decode_attention.combine_constants
    monkeypatch.setattr(decode_attention, "combine_constants", lambda *of: original(*of) | {"BLOCK_P": 1024})
    problems = coverage("sm120").uncovered(launches_of("Qwen3-0.6B"))
    assert problems and all(
        "decode_attention.combine_kernel" in p and "BLOCK_P is 1024 and not " in p for p in problems
    )


def test_defect_a_missing_kernel() -> None:
    table = {key: v for key, v in variant_table("sm120").items() if v.fn is not decode_attention.combine_kernel}
    problems = Coverage(table).uncovered(launches_of("Qwen3-0.6B"))
    assert problems and all("decode_attention.combine_kernel" in problem for problem in problems)


def test_defect_an_unaligned_dimension() -> None:
    """Weights of 1,000 columns, which 16 does not divide."""
    with recording("sm_120") as found:
        x, ids = empty(1, 1000), empty(1, 8, dtype=torch.int32)
        w13 = expert_weights(128, 512, 1000, None, False, False, ARCH)
        w2 = expert_weights(128, 1000, 256, None, False, False, ARCH)
        configs = tile_configs_of(w13, w2, ids, ARCH.features)
        moe.fused_moe(x, w13, w2, empty(1, 8, dtype=torch.float32), ids, SILU, configs, ARCH.features)
    problems = coverage("sm120").uncovered(found)
    assert len(problems) == 2
    assert "gate_up_pairs_kernel" in problems[0] and "hidden is not a multiple of 16" in problems[0]
    assert "down_sum_kernel" in problems[1] and "hidden is not a multiple of 16" in problems[1]


def test_defect_a_feature_that_spills() -> None:
    """What the audit met: a float8 cache with a window, a cap and sinks, on the tile that serves it without."""
    tile = {"BLOCK_M": 64, "BLOCK_N": 32, "num_warps": 8, "num_stages": 2}
    variant = variant_of("sm120", "extend_attention", "256x256/bfloat16/fp8_e4m3/window_cap_sinks").with_tile(tile)
    key = (variant.op, variant.key, "M64 N32 w8 s2")
    rows = {key: Row("", {"3.9.0/sm_120": compiling.compile_variant(variant, "sm_120")})}
    (problem,) = ledger_rules.over_spill_budget("sm120", rows, {key: variant})
    assert "extend_attention/256x256/bfloat16/fp8_e4m3/window_cap_sinks default tile M64 N32 w8 s2 spills" in problem


def launches_of(model: str) -> Launches:
    with recording("sm_120") as found:
        for described, tp_size in census.models((model,), (1,)):
            census.launch_all(described, tp_size, ARCH, set())
    return found
