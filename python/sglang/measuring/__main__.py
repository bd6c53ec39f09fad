"""`python -m sglang.measuring`: what a server with --measure-seconds runs before it starts. Reads the server's options
as JSON from standard input, and always ends with status 0: a server starts without measured times, too."""

from __future__ import annotations

import json
import sys

from sglang.measuring.command import say
from sglang.measuring.tune import target_here, tune
from sglang.srt.errors import UserError
from sglang.srt.server_args import ServerArgs


def main() -> None:
    """Runs the command."""
    args = ServerArgs.from_kwargs(**json.load(sys.stdin))
    try:
        tune(args, target_here(args.base_gpu_id), args.measure_seconds, say)
    except UserError as error:
        say(f"Nothing is measured: {error}")


if __name__ == "__main__":
    main()
