"""`sglang tune MODEL [--minutes 2] [flags of the server]`: measures kernels and tiles on this GPU before a server
does."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence

from sglang.measuring.tune import target_here, tune
from sglang.srt.environ import adopt_environment
from sglang.srt.errors import UserError
from sglang.srt.server_args import ServerArgs

MINUTES = 1.0
MOST_MINUTES = 60.0


def run_tune(argv: Sequence[str]) -> int:
    """Runs the command. Returns the exit status. Raises UserError."""
    parser = argparse.ArgumentParser(
        prog="sglang tune",
        usage="sglang tune MODEL [--minutes MINUTES] [--again] [flags of the server]",
        description="Measure the kernels and tiles that a model can use on this GPU, the most valuable first. Servers"
        " on it choose by what was found, unless --no-measured-choices is given. Any other flag of the server may be"
        " given and counts.",
        allow_abbrev=False,
    )
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"at most; default: {MINUTES:g}")
    parser.add_argument("--again", action="store_true", help="measure what was measured before, too")
    options, rest = parser.parse_known_args(list(argv))
    if not 0 < options.minutes <= MOST_MINUTES:
        raise UserError(f"--minutes {options.minutes:g}: must be above 0, and {MOST_MINUTES:g} at most.")
    adopt_environment()
    logging.basicConfig(level=logging.WARNING)
    words = ["--model-path", *rest] if rest and not rest[0].startswith("-") else rest
    args = ServerArgs.from_cli(words, "sglang tune")
    tune(args, target_here(args.base_gpu_id), 60 * options.minutes, say, options.again)
    return 0


def say(text: str) -> None:
    """Prints a line at once."""
    print(text, flush=True)
