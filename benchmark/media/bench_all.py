#!/usr/bin/env python3
"""Everything about images that only a GPU can show, in one call: encoders alone, then served beside text, and beside
upstream SGLang where it is installed.

    python benchmark/media/bench_all.py --logs DIR [--peer-site DIR] [--limit-seconds 480]

The served part goes first, so that a call that ends early has it, and takes six tenths of the time at most; the
encoders have what is left. Each prints as it goes (`bench_served.py`, `bench_encoders.py`), and a part that fails does
not stop the other. Exits with 1 if one failed.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import bench_encoders
import bench_served

SERVED_SHARE = 0.6
LEAST_S = 30.0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--logs", type=Path, required=True, help="folder of logs and of the encoders' rows as JSON")
    parser.add_argument("--peer-site", help="folder with upstream and its dependencies")
    parser.add_argument("--limit-seconds", type=float, default=480, help="of everything")
    parser.add_argument("--tiny", action="store_true", help="tiny models on the CPU, to try the script")
    args = parser.parse_args(argv)
    began = time.monotonic()
    served = ["--logs", str(args.logs), "--limit-seconds", str(args.limit_seconds * SERVED_SHARE)]
    served += ["--peer-site", args.peer_site] if args.peer_site else []
    failed = bench_served.main([*served, *(["--tiny"] if args.tiny else [])])
    left = max(LEAST_S, args.limit_seconds - (time.monotonic() - began))
    encoders = ["--results", str(args.logs / "encoders.json"), "--limit-seconds", str(left)]
    failed += bench_encoders.main([*encoders, *(["--layers", "3"] if args.tiny else [])])
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
