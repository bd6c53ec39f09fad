"""`rebase_upstream.py drift --upstream SPEC`: where an upstream interface and ours differ, and what was decided.

A row of `drift_allow/<kind>.toml` decides a difference and gives the reason. The command fails while one is undecided.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from upstream.interface import KINDS, Interface, our_interface, upstream_interface

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ALLOW_LIST = Path(__file__).with_name("drift_allow")
_PATTERN = re.compile(r"[*?\[]")
SIDES = {"upstream": "upstream only", "ours": "only ours", "both": "different"}


class AllowListError(Exception):
    """The allow-list cannot be read; the text names the row."""


@dataclass(frozen=True, slots=True, order=True)
class Difference:
    """A name that one side lacks, or whose value differs. `side`: a key of SIDES."""

    kind: str
    name: str
    side: str
    upstream: str = ""
    ours: str = ""

    def text(self) -> str:
        return f"`{self.name}`" + (f": upstream {self.upstream}, ours {self.ours}" if self.side == "both" else "")


@dataclass(frozen=True, slots=True)
class Decision:
    """A row of the allow-list: names and why. There are no patterns, which would decide names that nobody has seen."""

    kind: str
    side: str
    names: tuple[str, ...]
    reason: str

    def covers(self, difference: Difference) -> bool:
        same = (self.kind, self.side) == (difference.kind, difference.side)
        return same and difference.name in self.names


def compare(upstream: Interface, ours: Interface, answered: Interface) -> list[Difference]:
    """All differences. `answered`: names that we answer, so that upstream may have them or not."""
    found: list[Difference] = []
    for kind in KINDS:
        theirs, mine, extra = (side.get(kind, {}) for side in (upstream, ours, answered))
        if kind == "default":
            common = sorted(theirs.keys() & mine.keys())
            found += [Difference(kind, n, "both", theirs[n], mine[n]) for n in common if theirs[n] != mine[n]]
            continue
        missing, added = theirs.keys() - mine.keys() - extra.keys(), mine.keys() - theirs.keys()
        if kind == "choice":  # a flag that takes anything on one side has no choices to miss
            listed = {_flag(name) for name in theirs} & {_flag(name) for name in mine}
            missing, added = ({name for name in names if _flag(name) in listed} for names in (missing, added))
        found += [Difference(kind, name, "upstream") for name in missing]
        found += [Difference(kind, name, "ours") for name in added]
    return sorted(found)


def _flag(choice: str) -> str:
    return choice.partition("=")[0]


def read_decisions(directory: Path = ALLOW_LIST) -> list[Decision]:
    """Raises AllowListError for a file that is named after no kind, and a row without side, names or reason."""
    found: list[Decision] = []
    for path in sorted(directory.glob("*.toml")):
        if path.stem not in KINDS:
            raise AllowListError(f"{path}: the name must be one of {', '.join(KINDS)}")
        try:
            rows = tomllib.loads(path.read_text(encoding="utf-8")).get("decision", [])
        except tomllib.TOMLDecodeError as error:
            raise AllowListError(f"{path}: {error}") from None
        found += [_decision(path, number, row) for number, row in enumerate(rows, 1)]
    return found


def _decision(path: Path, number: int, row: dict[str, Any]) -> Decision:
    where = f"{path}: decision {number}"
    if wrong := sorted(row.keys() ^ {"side", "names", "reason"}):
        raise AllowListError(f"{where} must have side, names and reason, and nothing else; see {', '.join(wrong)}")
    if row["side"] not in SIDES:
        raise AllowListError(f"{where}: side is one of {', '.join(SIDES)}")
    if not row["names"] or not str(row["reason"]).strip():
        raise AllowListError(f"{where}: names and reason must not be empty")
    if patterns := [name for name in row["names"] if _PATTERN.search(name)]:
        raise AllowListError(f"{where}: a pattern decides names that nobody has seen; list them: {', '.join(patterns)}")
    return Decision(path.stem, row["side"], tuple(row["names"]), row["reason"])


@dataclass(frozen=True, slots=True)
class Drift:
    """The differences between `release` and us, with the reason of each decided one."""

    release: str
    decided: list[tuple[Difference, str]]
    undecided: list[Difference]

    @property
    def exit_code(self) -> int:
        return 1 if self.undecided else 0

    def as_json(self) -> dict[str, Any]:
        return {
            "release": self.release,
            "undecided": [asdict(difference) for difference in self.undecided],
            "decided": [asdict(difference) | {"reason": reason} for difference, reason in self.decided],
        }

    def markdown(self) -> str:
        lines = [f"## Interface of upstream {self.release} and ours", ""]
        lines += [f"Undecided: {len(self.undecided)}. Decided: {len(self.decided)}.", ""]
        lines += ["| | undecided | decided |", "|---|---|---|"]
        for kind, title in KINDS.items():
            undecided = sum(difference.kind == kind for difference in self.undecided)
            decided = sum(difference.kind == kind for difference, _ in self.decided)
            lines.append(f"| {title} | {undecided} | {decided} |")
        for kind, title in KINDS.items():
            for side, label in SIDES.items():
                names = [d.text() for d in self.undecided if (d.kind, d.side) == (kind, side)]
                if names:
                    lines += ["", f"### Undecided {title}: {label}", "", *(f"- {name}" for name in names)]
        return "\n".join(lines) + "\n"


def drift(tree: Path, release: str, decisions: Sequence[Decision] | None = None) -> Drift:
    """Compare the upstream package in the directory `tree` with ours; `decisions` are the allow-list's if None."""
    decisions = read_decisions() if decisions is None else decisions
    decided: list[tuple[Difference, str]] = []
    undecided: list[Difference] = []
    for difference in compare(upstream_interface(tree), *our_interface()):
        reason = next((decision.reason for decision in decisions if decision.covers(difference)), None)
        if reason is None:
            undecided.append(difference)
        else:
            decided.append((difference, reason))
    return Drift(release, decided, undecided)


def main(tree: Path, release: str, as_json: bool) -> int:
    """Prints the report; the exit code says whether anything is undecided."""
    found = drift(tree, release)
    print(json.dumps(found.as_json(), indent=1) if as_json else found.markdown())
    return found.exit_code
