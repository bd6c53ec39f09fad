#!/usr/bin/env python3
"""Everything about images that only a GPU can show, in one call: the time to the first token of an image and 16 of them
beside 64 streams of text, encoders alone at 448, 1,024 and 2,048 pixels and a video of 64 frames, and upstream SGLang
where it is installed.

    python lab/media/bench_all.py --logs DIR [--peer-site DIR] [--parts served,encoders,peer]

Our server is measured first (`bench_served.py`), then the encoders (`bench_encoders.py`), then upstream, which begins
to start with our server, stands still while that is measured, and goes on while the encoders are: 150 s, most of which
it compiles on the host, while the encoders take some GB of the GPU and their medians. So a call that ends early has
what matters most, and a peer that does not start in 260 s costs its own table alone. Every row is printed as soon as it
is there, and a part that fails does not stop the others. Lines at the end say what both servers took. Takes 6.5 minutes
at most (`--limit-seconds`), about 110 s of them for our server, as many for the encoders, and 120 s more for upstream.
Exits with 1 if a part failed. Whether text is as fast as without eyes says `bench_text.py`.
"""

from __future__ import annotations

import argparse
import sys
import time

import bench_encoders
import bench_served

ENCODERS_S, LIMIT_S = 100.0, 385.0
PARTS = ("served", "encoders", "peer")


def parsed(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help="what is measured")
    parser.add_argument("--only", help="towers, by name; without it all")
    parser.add_argument("--encoder-seconds", type=float, default=ENCODERS_S, help="of the encoders, at most")
    bench_served.add_options(parser, LIMIT_S)
    args = parser.parse_args(argv)
    args.parts = args.parts.split(",")
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"--parts: {', '.join(sorted(unknown))} is none of {', '.join(PARTS)}")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parsed(argv)
    ends, failed = time.monotonic() + args.limit_seconds, 0

    def encoders() -> None:
        nonlocal failed
        if "encoders" in args.parts:
            left = min(args.encoder_seconds, ends - time.monotonic())
            words = ["--results", str(args.logs / "encoders.json"), "--limit-seconds", str(left)]
            words += ["--only", args.only] if args.only else []
            failed += bench_encoders.main([*words, *(["--layers", "3"] if args.tiny else [])])

    names = [(bench_served.OURS, "served" in args.parts)]
    names += [(bench_served.PEER, "peer" in args.parts and args.peer_site is not None)]
    failed += bench_served.run(args, [name for name, wanted in names if wanted], encoders)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
