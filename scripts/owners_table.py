"""Makes a table of the repository from a file that an owner of a card sent.

    python scripts/owners_table.py FILE --from "Jane Doe, 2026-12-01, workstation with one card"

FILE is what `sglang tune` keeps in the cache, or what `python -m sglang.bench.card` wrote. It is read as strictly as a
server reads it. The table goes to `python/sglang/tuning/tables/owners/`, with the setting and the provenance in it; a
second file of the same setting adds its records. `explain --measured TABLE` plans with it, and
`lab/kernels/card/refit_records.py TABLE` fits the cost model on it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from sglang.srt.kernels.measured.records import RecordFile, by_key, from_bytes, to_bytes
from sglang.srt.kernels.measured.store import path_of

TABLES = Path(__file__).parents[1] / "python" / "sglang" / "tuning" / "tables" / "owners"
IN_CARD_FILES = "measured"
"""Key of the records in a file of `sglang.bench.card`."""


def read_sent(path: Path) -> RecordFile:
    """Returns the records of a file. Raises OSError or ValueError."""
    content = path.read_bytes()
    whole = json.loads(content)
    if isinstance(whole, dict) and "rows" in whole:
        if IN_CARD_FILES not in whole:
            raise ValueError("it has no records: it was written on another machine's predictions, or before 0.2.0")
        content = json.dumps(whole[IN_CARD_FILES]).encode()
    return from_bytes(content)


def write_table(sent: RecordFile, provenance: str, folder: Path) -> Path:
    """Writes the table, with the records that it had before. Returns its path. Raises OSError or ValueError."""
    path = folder / path_of(sent.setting).name
    before = from_bytes(path.read_bytes()) if path.exists() else RecordFile(sent.form, sent.setting)
    if before.setting != sent.setting:
        raise ValueError(f"{path} is of another setting")
    who = "; ".join(dict.fromkeys(filter(None, (*before.provenance.split("; "), provenance))))
    folder.mkdir(parents=True, exist_ok=True)
    path.write_bytes(to_bytes(sent.setting, {**by_key(before), **by_key(sent)}, who))
    return path


def main(argv: Sequence[str] | None = None, folder: Path = TABLES) -> int:
    """Runs the command line. Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--from", dest="provenance", required=True, metavar="TEXT", help="who measured it, and when")
    options = parser.parse_args(argv)
    try:
        sent = read_sent(options.file)
        path = write_table(sent, options.provenance.strip(), folder)
    except (OSError, ValueError) as error:
        print(f"error: {options.file}: {error}", file=sys.stderr)
        return 2
    print(f"{path}: {len(sent.records)} records of {sent.setting.gpu}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
