"""`verify` on small trees that the tests write, and (marked `upstream`) on real releases."""

from __future__ import annotations

import os
import subprocess
import textwrap
from importlib import metadata
from pathlib import Path

import pytest

pytest.importorskip("triton")

import triton
from upstream import source, tritons
from upstream.cases import default_cases
from upstream.stub_import import Stub, StubUsed
from upstream.verify import (
    DEFAULT_CASES,
    LIMIT,
    Capture,
    Comparison,
    Launch,
    Report,
    VerifyError,
    capture,
    verify,
)

SERVER_ARGS = """
    class ServerArgs:
        def __init__(self, model_path):
            self.model_path = model_path

    published = []

    def set_global_server_args_for_scheduler(args):
        published.append(args)
"""

KERNELS = """
    import torch
    import triton
    import triton.language as tl
    from sgl_kernel import pack  # a package that is not installed

    from sglang.srt.broken import has_fast_path
    from sglang.srt.server_args import published


    @triton.jit
    def _product(A, B, C, k, stride, M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
        rows, columns, inner = tl.arange(0, M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
        total = tl.zeros((M, BLOCK_N), dtype=tl.float32)
        for start in range(0, k, BLOCK_K):
            a = tl.load(A + rows[:, None] * stride + start + inner[None, :])
            b = tl.load(B + columns[None, :] * stride + start + inner[:, None])
            total = tl.dot(a, b, total)
        tl.store(C + rows[:, None] * BLOCK_N + columns[None, :], total.to(C.dtype.element_ty))


    def _launch(a, b, stages):
        c = torch.empty(a.shape[0], b.shape[0], dtype=a.dtype, device=a.device)
        _product[(1,)](a, b, c, a.shape[1], a.stride(0), 64, 128, 64, num_warps=4, num_stages=stages)


    def by_capability(a, b):
        assert published[0].model_path
        major, minor = torch.cuda.get_device_capability()
        _launch(a, b, STAGES if (major, minor) == (12, 0) else 1)


    def by_shared_memory(a, b):
        fits = torch.cuda.get_device_properties(0).shared_memory_per_block_optin // (128 * (64 + 128) + 1)
        _launch(a, b, fits)


    @triton.jit
    def _refuses(A, REFUSED: tl.constexpr):
        tl.static_assert(REFUSED == 0, "this kernel refuses")
        tl.store(A, 0.0)


    def never_compiles(a, b):
        _refuses[(1,)](a, 1)


    def breaks(a, b):
        _refuses[(1,)](a, BROKEN)


    def by_stub(a, b):
        _launch(a, b, 2 if has_fast_path() else 1)


    def wants_more(a, b, answer):
        _launch(a, b, 1)


    def launches_nothing(a, b):
        return a


    _configs = [triton.Config({"BLOCK_N": 128, "BLOCK_K": 64}, num_warps=4, num_stages=s) for s in (6, 3)]
    _tuned = triton.autotune(_configs, key=["k"])(_product)
    _too_big = triton.autotune(_configs[:1], key=["k"])(_product)


    def tuned(a, b):
        _tuned[(1,)](a, b, torch.empty(64, 128, dtype=a.dtype, device=a.device), a.shape[1], a.stride(0), 64)


    def tuned_in_vain(a, b):
        _too_big[(1,)](a, b, torch.empty(64, 128, dtype=a.dtype, device=a.device), a.shape[1], a.stride(0), 64)
"""

CASES = """
    from upstream.cases import Case, tensor


    def arguments(module):
        return {"a": tensor(64, 512), "b": tensor(128, 512), "unused": 1}


    def case(launcher, required=True):
        return Case(launcher, "64 x 128 x 512", launcher, "kernels.py", arguments, required)


    def all_cases():
        chosen = "by_capability by_shared_memory by_stub tuned tuned_in_vain"
        failing = "never_compiles breaks wants_more launches_nothing gone"
        return [*map(case, f"{chosen} {failing}".split()), case("never_there", required=False)]
"""


def write_tree(root: Path, stages: int, broken: int) -> Path:
    """A package that looks like upstream's: an __init__ that must not run, a module that does not import."""
    files = {
        "__init__.py": "raise AssertionError('the client library is imported')",
        "srt/__init__.py": "",
        "srt/server_args.py": SERVER_ARGS,
        "srt/broken.py": "import no_such_package",
        "srt/ops/kernels.py": KERNELS.replace("STAGES", str(stages)).replace("BROKEN", str(broken)),
        "srt/ops/other/kernels.py": "def by_capability(a, b):\n    return 'another backend, no triton'",
    }
    for name, text in files.items():
        path = root / "sglang" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return root


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    """Before: six stages, 122,880 bytes. After: three."""
    root = tmp_path_factory.mktemp("verify")
    (root / "synthetic_cases.py").write_text(textwrap.dedent(CASES))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]))
        patch.setenv("SGLANG_CACHE_DIR", str(root / "cache"))
        patch.setenv("SGLANG_FORCE_ARCH", "sm_90")  # ours; must not reach upstream's code
        before, after = write_tree(root / "before", 6, broken=0), write_tree(root / "after", 3, broken=1)
        (comparison,) = verify(before, after, [triton.__version__], "synthetic_cases:all_cases").comparisons
        return comparison


def problems(*comparisons: Comparison) -> list[str]:
    return Report(comparisons).problems


def shared(found: Capture, op: str) -> int:
    (launch,) = [launch for launch in found.launches if launch.op == op]
    assert not launch.failure
    return launch.shared


def test_the_tile_is_the_one_that_upstream_picks_on_sm120(report: Comparison) -> None:
    assert shared(report.before, "by_capability") > LIMIT
    assert shared(report.after, "by_capability") == 2 * 64 * (64 + 128) * 2  # stages in flight, bf16
    assert shared(report.after, "by_shared_memory") == 3 * 64 * (64 + 128) * 2


def test_a_tree_that_overflows_fails_and_says_where(report: Comparison) -> None:
    unfixed = Report((Comparison(report.before, report.before),))
    assert unfixed.exit_code == 1
    (problem,) = [text for text in unfixed.problems if text.startswith("by_capability")]
    assert f"{shared(report.before, 'by_capability'):,} B" in problem and "w4 s6" in problem and "64 x 128" in problem
    assert not [text for text in problems(report) if text.startswith("by_capability")]


def test_registers_and_spills_come_from_ptxas(report: Comparison) -> None:
    launches = [launch for launch in report.after.launches if launch.op == "by_capability"]
    assert 32 < launches[0].registers <= 255


def test_an_autotuner_only_needs_one_config_that_fits(report: Comparison) -> None:
    assert shared(report.after, "tuned") <= LIMIT < shared(report.after, "tuned_in_vain")
    assert any(problem.startswith("tuned_in_vain") for problem in problems(report))
    (launch,) = [launch for launch in report.after.launches if launch.op == "tuned"]
    assert "of 2 tuned" in launch.tile


@pytest.mark.parametrize(
    ("op", "why"),
    [
        ("by_stub", "StubUsed: a condition depends on sglang.srt.broken.has_fast_path"),
        ("wants_more", "now requires answer"),
        ("launches_nothing", "launched no Triton kernel"),
        ("gone", "no kernels.py of this tree defines gone"),
    ],
)
def test_what_cannot_be_checked_is_a_failure(report: Comparison, op: str, why: str) -> None:
    (unchecked,) = [case for case in report.after.unchecked if case.op == op]
    assert why in unchecked.why
    assert any(problem.startswith(f"{op}: not checked") for problem in problems(report))


def test_a_change_that_breaks_a_kernel_and_a_launch_that_nothing_compiles_are_failures(report: Comparison) -> None:
    (broken,) = [problem for problem in problems(report) if "does not compile" in problem]
    assert broken.startswith("breaks: `_refuses`") and "this kernel refuses" in broken
    (other,) = [problem for problem in problems(report) if "not measured" in problem]
    assert other.startswith("never_compiles: not measured, no Triton here compiles it: `_refuses`")
    assert "Compiled by this Triton in neither tree:\n\n- never_compiles: `_refuses`" in report.markdown()
    assert "| never_compiles | 1 | 1 | 0 | 0 | 0 |" in report.markdown()


def by(version: str, *, failure: str = "", shared: int = 0, fails_before: bool = True) -> Comparison:
    """One launch in both trees, by a Triton of that version."""
    after = Launch("op", "case", "kernel", "w4 s3", shared, failure=failure)
    before = after if fails_before else Launch("op", "case", "kernel", "w4 s3")
    return Comparison(*(Capture([launch], [], [], version, {}) for launch in (before, after)))


def test_a_launch_is_measured_if_one_of_the_tritons_compiles_it() -> None:
    measured = Report((by("3.6.0", shared=LIMIT), by("3.9.0", failure="block pointers")))
    assert measured.exit_code == 0 and measured.not_measured == []
    text = measured.markdown()
    assert "Compiled for sm_120: 1 of 1" in text and "Compiled for sm_120: 0 of 1" in text and "block pointers" in text
    assert "All 1 launches were compiled, by Triton 3.6.0 or 3.9.0, and fit with each" in text

    neither = Report((by("3.6.0", failure="other words"), by("3.9.0", failure="block pointers")))
    assert neither.exit_code == 1
    assert neither.problems == ["op: not measured, no Triton here compiles it: `kernel`: block pointers (case)"]
    assert "and fit with each" not in neither.markdown()


def test_a_launch_must_fit_with_each_triton_and_a_change_may_break_it_with_none() -> None:
    (wide,) = problems(by("3.6.0"), by("3.9.0", shared=LIMIT + 1))
    assert "needs 101,377 B" in wide and "(Triton 3.9.0)" in wide
    (broken,) = problems(by("3.6.0"), by("3.9.0", failure="our mistake", fails_before=False))
    assert "does not compile: our mistake" in broken and "(Triton 3.9.0)" in broken


def test_a_feature_that_the_release_lacks_is_no_failure(report: Comparison) -> None:
    assert report.after.absent == ["never_there"]
    assert not any("never_there" in problem for problem in problems(report))
    assert "no_such_package" in report.after.failed_imports["sglang.srt.broken"]


def test_the_table_shows_both_sides(report: Comparison) -> None:
    table = report.markdown()
    (row,) = [line for line in table.splitlines() if line.startswith("| by_capability | `_product`")]
    before, after = (f"{shared(side, 'by_capability'):,}" for side in (report.before, report.after))
    assert row.index(f"**{before} /") < row.index(f": {after} /")
    assert f"| by_capability | 1 | 0 | 1 → 0 | 0 | {before} → {after} |" in table
    assert "by_shared_memory | `_product`" not in table  # neither changed nor noteworthy
    rows = Report((report,)).as_json()["comparisons"][0]["after"]["launches"]
    assert [row["shared"] for row in rows if row["op"] == "by_capability"] == [shared(report.after, "by_capability")]


def test_a_directory_without_the_package_is_refused(tmp_path: Path) -> None:
    with pytest.raises(VerifyError, match="no directory `sglang`"):
        capture(tmp_path, triton.__version__)


def test_a_tree_that_cannot_be_loaded_says_so(tmp_path: Path) -> None:
    (tmp_path / "sglang").mkdir()
    with pytest.raises(VerifyError, match=r"server_args"):
        capture(tmp_path, triton.__version__)


def test_the_triton_that_compiles_is_the_one_that_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cases_of_none.py").write_text("def none():\n    return []\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(metadata, "version", lambda name: "0.0.1")
    with pytest.raises(VerifyError, match=rf"Triton 0.0.1 was to compile .* found {triton.__version__}"):
        capture(write_tree(tmp_path, 1, 0), "0.0.1", "cases_of_none:none")


def test_another_triton_is_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def pip(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        calls.append(command[-1])
        return subprocess.CompletedProcess(command, int(command[-1] == "triton==0.0.2"), "", "no such version")

    monkeypatch.setenv("SM120_UPSTREAM_CACHE", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", pip)
    assert tritons.path_of(triton.__version__) is None and calls == []
    assert tritons.path_of("0.0.1") == tritons.path_of("0.0.1") and calls == ["triton==0.0.1"]
    with pytest.raises(source.SourceError, match="no triton==0.0.2"):
        tritons.path_of("0.0.2")


def test_a_stub_decides_nothing() -> None:
    stub = Stub("package")
    assert stub.register(test_a_stub_decides_nothing) is test_a_stub_decides_nothing
    assert not isinstance(1, stub.Type)
    with pytest.raises(StubUsed, match=r"package\.fast"):
        bool(stub.fast)
    with pytest.raises(TypeError):
        _ = stub.version >= (1, 2)


def test_default_cases_are_distinct() -> None:
    names = [(case.op, case.key) for case in default_cases()]
    assert len(names) == len(set(names))
    assert DEFAULT_CASES == f"{default_cases.__module__}:{default_cases.__name__}"


@pytest.mark.upstream
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("version", "overflows"),
    [
        ("0.5.8", {"extend": 122_880, "prefill": 163_840, "moe": 147_456}),
        ("0.5.23", {"prefill": 163_840, "inkling moe": 110_592}),
    ],
)
def test_known_overflows_of_pristine_releases_are_found(version: str, overflows: dict[str, int]) -> None:
    found = capture(source.fetch(version), triton.__version__)
    assert not found.unchecked
    most: dict[str, int] = {}
    for launch in found.launches:
        if launch.overflows:
            most[launch.op] = max(most.get(launch.op, 0), launch.shared)
    assert {op: bytes_ for op, bytes_ in most.items() if op != "extend, tree mask"} == overflows
    if version == "0.5.8":  # the crash that was published first
        assert any(launch.shared == 106_496 and launch.case.startswith("576/512") for launch in found.launches)
