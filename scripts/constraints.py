"""Prints the constraints that hold beside the installed torch: those of constraints.txt, but for packages that the
arguments (`transformers==5.17.0`) pin themselves.

torch is there already, so it needs no pin. Triton's is for torch's CPU build, which brings none; every other build
requires the Triton that fits it, and a pin of another version could not be met.

    .venv/bin/python scripts/constraints.py transformers==5.17.0 > .venv/constraints.txt
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

PINNED = Path(__file__).parents[1] / "constraints.txt"


def constraints(pinned: str, others: Sequence[str], torch: str) -> list[str]:
    """Returns the lines. pinned: the text of constraints.txt; others: pins instead of those there; torch: its installed
    version. Raises ValueError for a pin without ==, and one of a package that constraints.txt does not pin."""
    lines = [line for line in pinned.splitlines() if line and not line.startswith("#")]
    known = {_name(line) for line in lines}
    if wrong := [pin for pin in others if "==" not in pin or _name(pin) not in known]:
        raise ValueError(f"{wrong[0]} is no NAME==VERSION of a package in constraints.txt")
    installed = {"torch"} if torch.endswith("+cpu") else {"torch", "triton"}
    left_out = installed.union(map(_name, others))
    return [*(line for line in lines if _name(line) not in left_out), *others]


def _name(pin: str) -> str:
    return pin.partition("==")[0].lower().replace("_", "-")


if __name__ == "__main__":
    print("\n".join(constraints(PINNED.read_text(), sys.argv[1:], version("torch"))))
