"""Makes upstream SGLang with the SM120 changes in place, from a pristine upstream tree. See docs/upstream.md.

    python scripts/rebase_upstream.py --upstream 0.5.15 --out ../sglang-sm120 [--verify]
    python scripts/rebase_upstream.py status 0.5.8 0.5.15 [--write docs/upstream_status.md]
    python scripts/rebase_upstream.py drift --upstream 0.5.23 [--json]

--upstream takes a directory, a release by version, `newest` for the newest one, or GIT-URL@REF. The default command is
`rebase`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from upstream import drift, rebase, status, tritons
from upstream.changes import ALL
from upstream.drift import AllowListError
from upstream.source import SourceError, resolve
from upstream.verify import VerifyError, verify

COMMANDS = ("rebase", "status", "drift")


def main(arguments: Sequence[str]) -> int:
    """0: all is well; 1: a change moved or failed, a launch does not fit, or there is drift; 2: bad input."""
    named = arguments and (arguments[0] in COMMANDS or arguments[0] in ("-h", "--help"))
    options = _parser().parse_args(list(arguments) if named else ["rebase", *arguments])
    try:
        return int(options.run(options))
    except (SourceError, rebase.RebaseError, VerifyError, AllowListError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _rebase(options: argparse.Namespace) -> int:
    source = resolve(options.upstream)
    made = rebase.rebase(source, options.out, ALL)
    print(status.report(made.results))
    print(f"\n{made.stat}\n{options.out}: branch {rebase.BRANCH}, package in {made.package_parent}")
    code = made.exit_code
    if options.verify:
        compared = verify(source.package_parent, made.package_parent, options.triton or tritons.VERSIONS)
        print(compared.markdown())
        code = code or compared.exit_code
    return code


def _status(options: argparse.Namespace) -> int:
    sources = [resolve(release) for release in options.releases]
    results = {source.label: rebase.probe(source, ALL) for source in sources}
    text = status.table(results)
    if options.write:
        options.write.write_text(text, encoding="utf-8")
    else:
        print(text)
    return int(any(result.outcome.needs_work for each in results.values() for result in each))


def _drift(options: argparse.Namespace) -> int:
    source = resolve(options.upstream)
    return drift.main(source.package_parent, source.label, options.json)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="{rebase,status,drift}")
    making = commands.add_parser("rebase", help="write a tree with the changes applied (the default command)")
    making.add_argument("--upstream", required=True, metavar="PATH|VERSION|GIT-URL@REF")
    making.add_argument("--out", required=True, type=Path, metavar="DIR", help="a directory that does not exist yet")
    making.add_argument("--verify", action="store_true", help="compile both trees' kernels for sm_120 and compare")
    versions = f"the Triton to compile with; may be repeated (default: {' and '.join(tritons.VERSIONS)})"
    making.add_argument("--triton", action="append", metavar="VERSION", help=versions)
    making.set_defaults(run=_rebase)
    table = commands.add_parser("status", help="what would become of every change on releases")
    table.add_argument("releases", nargs="+", metavar="PATH|VERSION|GIT-URL@REF")
    table.add_argument("--write", type=Path, metavar="FILE", help="write the table there instead of printing it")
    table.set_defaults(run=_status)
    drifting = commands.add_parser("drift", help="interface differences between a release and this project")
    drifting.add_argument("--upstream", required=True, metavar="PATH|VERSION|GIT-URL@REF")
    drifting.add_argument("--json", action="store_true")
    drifting.set_defaults(run=_drift)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
