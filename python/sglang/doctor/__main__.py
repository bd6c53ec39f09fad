"""Runs `python -m sglang.doctor [--json] [--no-copies]`."""

import sys

from sglang.cli import main

if __name__ == "__main__":
    sys.exit(main(["doctor", *sys.argv[1:]]))
