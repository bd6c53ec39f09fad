"""The ledger: which change has which outcome on which release, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from upstream.change import Outcome, Result

_HEAD = """\
# Upstream status

What becomes of every SM120 change on a release of SGLang. Written by a command, not by hand:

    python scripts/rebase_upstream.py status {releases} --write docs/upstream_status.md

[upstream.md](upstream.md) says how it works.

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
    lines += ["", _totals(results), "", "## Each change", ""]
    for change in changes:
        lines += [
            f"### {change.name}",
            "",
            f"{change.title}. {change.why}",
            "",
            f"Done upstream when: {change.merged}.",
            "",
        ]
        reasons = [(release, by_name[release][change.name]) for release in releases]
        notes = [
            f"- {release}: {r.outcome.value}: {r.detail}." for release, r in reasons if r.outcome is not Outcome.APPLIED
        ]
        lines += [*notes, ""] if notes else []
    return _HEAD.format(releases=" ".join(releases)) + "\n".join(lines).rstrip() + "\n"


def _cell(result: Result) -> str:
    return f"**{result.outcome.value}**" if result.outcome.needs_work else result.outcome.value


def _totals(results: Mapping[str, Sequence[Result]]) -> str:
    counts = (
        f"{release}: " + ", ".join(f"{n} {outcome.value}" for outcome in Outcome if (n := _count(outcomes, outcome)))
        for release, outcomes in results.items()
    )
    return "; ".join(counts) + "."


def _count(results: Sequence[Result], outcome: Outcome) -> int:
    return sum(result.outcome is outcome for result in results)


def report(results: Sequence[Result]) -> str:
    """Plain text for a terminal, a line a change."""
    width = max(len(result.change.name) for result in results)
    return "\n".join(
        f"{result.change.name:{width}}  {result.outcome.value}" + (f": {result.detail}" if result.detail else "")
        for result in results
    )
