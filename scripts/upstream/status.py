"""The ledger: which change has which outcome on which release, and why."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from upstream.change import Outcome, Result

LINE = 120
"""Longest line of prose, in characters."""
_HEAD = """\
# Upstream status

What becomes of every SM120 change on a release of SGLang. Written by a command, not by hand:

    python scripts/rebase_upstream.py status {releases} --write docs/upstream_status.md

[The changes for SM120](upstream.md) says how it works.

"""


def table(results: Mapping[str, Sequence[Result]]) -> str:
    """Markdown: release x change, then the reasons for everything that is not simply applied."""
    releases = list(results)
    changes = [result.change for result in results[releases[0]]]
    by_name = {release: {result.change.name: result for result in results[release]} for release in releases}
    lines = ["| change | " + " | ".join(releases) + " |", "|---" * (len(releases) + 1) + "|"]
    for change in changes:
        cells = (_cell(by_name[release][change.name]) for release in releases)
        lines.append(f"| {change.name} | " + " | ".join(cells) + " |")
    lines += ["", *_totals(results), "", "## Each change", ""]
    for change in changes:
        lines += [
            f"### {change.name}",
            "",
            _wrapped(f"{change.title}. {change.why}"),
            "",
            _wrapped(f"Done upstream when: {change.merged}."),
            "",
        ]
        notes = list(_reasons([(release, by_name[release][change.name]) for release in releases]))
        lines += [*notes, ""] if notes else []
    return _HEAD.format(releases=" ".join(releases)) + "\n".join(lines).rstrip() + "\n"


def _wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(text, LINE, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _cell(result: Result) -> str:
    return f"**{result.outcome.value}**" if result.outcome.needs_work else result.outcome.value


def _reasons(results: Sequence[tuple[str, Result]]) -> Iterator[str]:
    """Yields a line for each run of neighbouring releases on which a change has one outcome and one reason."""
    for (outcome, detail), run in groupby(results, key=lambda item: (item[1].outcome, item[1].detail)):
        if outcome is not Outcome.APPLIED:
            releases = [release for release, _ in run]
            name = releases[0] if len(releases) == 1 else f"{releases[0]} to {releases[-1]}"
            yield _wrapped(f"- {name}: {outcome.value}: {detail}.", "  ")


def _totals(results: Mapping[str, Sequence[Result]]) -> Iterator[str]:
    """Yields a line for each release, with the number of changes of each outcome."""
    for release, outcomes in results.items():
        counts = (f"{n} {outcome.value}" for outcome in Outcome if (n := _count(outcomes, outcome)))
        yield f"- {release}: " + ", ".join(counts) + "."


def _count(results: Sequence[Result], outcome: Outcome) -> int:
    return sum(result.outcome is outcome for result in results)


def report(results: Sequence[Result]) -> str:
    """Plain text for a terminal, a line a change."""
    width = max(len(result.change.name) for result in results)
    return "\n".join(
        f"{result.change.name:{width}}  {result.outcome.value}" + (f": {result.detail}" if result.detail else "")
        for result in results
    )
