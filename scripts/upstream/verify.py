"""Compiles for sm_120 what an upstream tree launches by default, before and after our changes, and compares.

    report = verify(pristine, produced, ["3.6.0", "3.9.0"])
    print(report.markdown())
    sys.exit(report.exit_code)

Each tree is loaded in a process of its own (`measure_tree`) that pretends to have an SM120 card (`stub_import`), calls
upstream's launchers (`cases`) and records what they would have launched. So tiles, warps and stages are those that
upstream's code picks. Triton then compiles every launch; registers and spills are what ptxas says. Several Tritons
take turns, since releases require different ones, and none compiles every kernel of every release: a launch counts as
measured if one of them compiles it, and must fit with each that does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from upstream.tritons import path_of

LIMIT = 101_376
"""Bytes of shared memory that a block can have on SM120."""
ARCH = "sm_120"
DEFAULT_CASES = "upstream.cases:default_cases"


class VerifyError(RuntimeError):
    """A tree could not be examined at all."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of one case, compiled. Shared memory and spills (loads + stores) in bytes."""

    op: str
    case: str
    kernel: str
    tile: str
    shared: int = 0
    registers: int = 0
    spills: int = 0
    failure: str = ""
    """Why it does not compile."""

    @property
    def overflows(self) -> bool:
        return self.shared > LIMIT

    @property
    def problem(self) -> str:
        if self.failure:
            return f"does not compile: {self.failure}"
        return f"needs {self.shared:,} B of shared memory" if self.overflows else ""


@dataclass(frozen=True, slots=True)
class Unchecked:
    """A case that could not be called: its launcher moved, changed, or needs what is not there."""

    op: str
    case: str
    why: str


@dataclass(frozen=True, slots=True)
class Capture:
    """The launches of one tree."""

    launches: list[Launch]
    unchecked: list[Unchecked]
    absent: list[str]
    """Operations that this release does not have."""
    triton: str
    failed_imports: dict[str, str]
    """Upstream modules that were loaded in part, with the error."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Both trees, by one Triton."""

    before: Capture
    after: Capture

    @property
    def refused(self) -> list[Launch]:
        """The launches that this Triton compiles in neither tree, for the same reason: no change of ours broke it."""
        known = {(one.op, one.case, one.kernel, one.failure) for one in self.before.launches if one.failure}
        return [one for one in self.after.launches if (one.op, one.case, one.kernel, one.failure) in known]

    @property
    def defects(self) -> list[tuple[str, str]]:
        """The defects of the produced tree, and in which case; `refused` is not among them."""
        refused = self.refused
        bad = [launch for launch in self.after.launches if launch.problem and launch not in refused]
        found = [(f"{one.op}: `{one.kernel}` {one.tile} {one.problem}", one.case) for one in bad]
        return found + [(f"{one.op}: not checked: {one.why}", one.case) for one in self.after.unchecked]

    def markdown(self) -> str:
        launches, refused = self.after.launches, _grouped(_refusals(self.refused))
        lines = [
            f"## Triton {self.after.triton}",
            "",
            f"Compiled for {ARCH}: {sum(not one.failure for one in launches)} of {len(launches)} launches of the "
            f"produced tree. A block can have {LIMIT:,} B of shared memory.",
            "",
            "| operation | launches | not compiled | over the limit | spilling | most shared memory |",
            "|---|---|---|---|---|---|",
            *_totals(self.before.launches, launches),
            *(f"| {op} | not in this release | | | | |" for op in self.after.absent),
            "",
            "What overflows, spills or was changed. Tile, warps, stages: shared memory (B) / registers / spilled (B).",
            "",
            "| operation | kernel | cases | before | after |",
            "|---|---|---|---|---|",
            *_rows(self.before.launches, launches),
        ]
        if refused:
            lines += ["", "Compiled by this Triton in neither tree:", "", *(f"- {launch}" for launch in refused)]
        return "\n".join(lines) + "\n"


@dataclass(frozen=True, slots=True)
class Report:
    """One comparison for each Triton."""

    comparisons: tuple[Comparison, ...]

    @property
    def problems(self) -> list[str]:
        """Why the produced tree is not known to fit SM120; empty if it is."""
        found = [
            (f"{text} (Triton {one.after.triton})" if len(self.comparisons) > 1 else text, case)
            for one in self.comparisons
            for text, case in one.defects
        ]
        return _grouped([*found, *_refusals(self.not_measured, "not measured, no Triton here compiles it: ")])

    @property
    def not_measured(self) -> list[Launch]:
        """Launches that none of the Tritons compiles in either tree."""
        measured: set[Place] = set()
        refused: dict[Place, Launch] = {}
        for one in self.comparisons:
            places, known = _by_place(one.after.launches), one.refused
            measured |= {place for place, launch in places.items() if not launch.failure}
            refused |= {place: launch for place, launch in places.items() if launch in known}
        return [launch for place, launch in refused.items() if place not in measured]

    @property
    def exit_code(self) -> int:
        return 1 if self.problems else 0

    def as_json(self) -> dict[str, Any]:
        comparisons = [asdict(comparison) for comparison in self.comparisons]
        return {"arch": ARCH, "limit": LIMIT, "problems": self.problems, "comparisons": comparisons}

    def markdown(self) -> str:
        versions = " or ".join(one.after.triton for one in self.comparisons)
        places = {place for one in self.comparisons for place in _by_place(one.after.launches)}
        fits = f"All {len(places)} launches were compiled, by Triton {versions}, and fit with each that compiles them."
        verdict = [f"- {problem}" for problem in self.problems] or [fits]
        return "\n".join([*(one.markdown() for one in self.comparisons), "## Verdict", "", *verdict]) + "\n"


def _refusals(launches: Iterable[Launch], prefix: str = "") -> list[tuple[str, str]]:
    return [(f"{one.op}: {prefix}`{one.kernel}`: {one.failure}", one.case) for one in launches]


def _totals(before: Sequence[Launch], after: Sequence[Launch]) -> list[str]:
    rows = []
    for op in dict.fromkeys(launch.op for launch in [*after, *before]):
        was, now = (_summary([launch for launch in side if launch.op == op]) for side in (before, after))
        cells = (new if old == new else f"{old} → {new}" for old, new in zip(was, now, strict=True))
        rows.append(f"| {op} | {' | '.join(cells)} |")
    return rows


def _summary(launches: Sequence[Launch]) -> tuple[str, ...]:
    failed = sum(bool(one.failure) for one in launches)
    over = sum(one.overflows for one in launches)
    spilling = sum(one.spills > 0 for one in launches)
    most = max((one.shared for one in launches), default=0)
    return str(len(launches)), str(failed), str(over), str(spilling), f"{most:,}"


def _rows(before: Sequence[Launch], after: Sequence[Launch]) -> list[str]:
    """One for each distinct pair of results; the cases that share it are counted."""
    old, new = _by_place(before), _by_place(after)
    pairs: dict[tuple[str, str, str, str], list[str]] = {}
    for place in dict.fromkeys([*old, *new]):
        was, now = old.get(place), new.get(place)
        shown = [launch for launch in (now, was) if launch is not None]
        if was != now or any(launch.problem or launch.spills for launch in shown):
            pairs.setdefault((place[0], shown[0].kernel, _cell(was), _cell(now)), []).append(place[1])
    return [
        f"| {op} | `{kernel}` | {_named(cases)} | {was} | {now} |" for (op, kernel, was, now), cases in pairs.items()
    ]


Place = tuple[str, str, int]
"""Operation, case, and which launch of the case."""


def _by_place(launches: Iterable[Launch]) -> dict[Place, Launch]:
    """By case and order in it: a change may put another kernel in place of upstream's."""
    counts: dict[tuple[str, str], int] = {}
    placed: dict[Place, Launch] = {}
    for launch in launches:
        case = (launch.op, launch.case)
        placed[(*case, counts.get(case, 0))] = launch
        counts[case] = counts.get(case, 0) + 1
    return placed


def _cell(launch: Launch | None) -> str:
    if launch is None:
        return "-"
    if launch.failure:
        return f"{launch.tile}: **does not compile**"
    figures = f"{launch.shared:,} / {launch.registers} / {launch.spills}"
    return f"{launch.tile}: {f'**{figures}**' if launch.problem else figures}"


def _grouped(found: Iterable[tuple[str, str]]) -> list[str]:
    """Pairs of a text and a case: each text once, with its cases."""
    cases: dict[str, list[str]] = {}
    for text, case in found:
        cases.setdefault(text, []).append(case)
    return [f"{text} ({_named(names)})" for text, names in cases.items()]


def _named(cases: Sequence[str]) -> str:
    distinct = list(dict.fromkeys(cases))
    return distinct[0] + (f", and {len(distinct) - 1} more" if len(distinct) > 1 else "")


def verify(before: Path, after: Path, tritons: Sequence[str], cases: str = DEFAULT_CASES) -> Report:
    """Examines both trees, each a directory that contains `sglang/`; the same one twice is examined once.

    `tritons`: versions. `cases`: "module:function" that lists what to call. Raises VerifyError and SourceError.
    """
    comparisons = []
    for triton in tritons:
        first = capture(before, triton, cases)
        second = first if before.resolve() == after.resolve() else capture(after, triton, cases)
        comparisons.append(Comparison(first, second))
    return Report(tuple(comparisons))


def capture(tree: Path, triton: str, cases: str = DEFAULT_CASES) -> Capture:
    """Capture the launches of `tree` in a process of its own. Raises VerifyError and SourceError."""
    if not (tree / "sglang").is_dir():
        raise VerifyError(f"{tree} has no directory `sglang`; give the directory that contains the package.")
    environment = _environment(path_of(triton))
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "capture.json"
        command = [sys.executable, "-m", "upstream.measure_tree", str(tree.resolve()), cases, str(out)]
        done = subprocess.run(command, env=environment, cwd=scratch, capture_output=True, text=True)
        if done.returncode != 0:
            raise VerifyError(f"{tree} could not be examined: {done.stderr.strip()[-2000:]}")
        found = json.loads(out.read_text())
    if found["triton"] != triton:
        raise VerifyError(f"Triton {triton} was to compile {tree}, but Python found {found['triton']} on its path.")
    found["launches"] = [Launch(**launch) for launch in found["launches"]]
    found["unchecked"] = [Unchecked(**case) for case in found["unchecked"]]
    return Capture(**found)


def _environment(triton: Path | None) -> dict[str, str]:
    """`triton`: a directory that holds one, or None for the installed one."""
    scripts = Path(__file__).parents[1]
    found = [str(triton or ""), str(scripts), str(scripts.parent / "python"), os.environ.get("PYTHONPATH", "")]
    kept = {  # without upstream's own settings: the defaults are what is checked
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SGLANG_", "SGL_")) or name == "SGLANG_CACHE_DIR"
    }
    return kept | {
        "PYTHONPATH": os.pathsep.join(path for path in found if path),
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",  # torch.compile'd helpers run as they are
        "TRITON_DEFAULT_FP_FUSION": "1",  # as today's launches; silences a notice of Triton 3.9
    }
