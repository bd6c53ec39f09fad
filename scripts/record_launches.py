"""Makes the rows of the ledger from the launches of the census, on meta tensors. No GPU.

    python scripts/record_launches.py       # prints what changes, and writes python/sglang/ledger/*.forms.json
    python -m sglang.ledger update          # measures the new rows

Run it after a change of a kernel, a launcher, a tile or the census. Takes a minute for each lock file.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "test")]

from srt.kernels import census  # noqa: E402
from srt.kernels.census import between  # noqa: E402

from sglang.ledger.forms import facts_of, read_forms, write_forms  # noqa: E402
from sglang.ledger.launch_form import recording  # noqa: E402
from sglang.ledger.record import recorded  # noqa: E402
from sglang.srt.hardware.arch import arch_by_name  # noqa: E402

GPUS = {"sm120": "rtx-pro-6000-server", "sm90": "sm_90"}
"""Lock file -> the GPU that launches are recorded for."""


def main() -> None:
    for lock, gpu in GPUS.items():
        arch, done = arch_by_name(gpu), set[object]()
        with recording(arch.name) as launches:
            census.launch_published(arch, done)
            between.launch_between(arch, done)
        before = read_forms(lock)
        table = recorded(lock, before, launches)
        for sign, rows, others in (("-", before, table), ("+", table, before)):
            for row in rows:
                if row not in others or facts_of(rows[row]) != facts_of(others[row]):
                    print(sign, lock, "/".join(row))
        write_forms(lock, table)
        print(f"{lock}: {len(launches)} forms, {len(table)} rows")


if __name__ == "__main__":
    main()
