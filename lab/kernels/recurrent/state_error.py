"""The error of fp32 states after many tokens, against the recurrence in fp64; token after token, on a CPU.

    PYTHONPATH=python:test python lab/kernels/recurrent/state_error.py [--tokens 32768]

Takes minutes. Of the kernels on a GPU: `bench_recurrent.py --only "error of the state"`.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch
from srt.layers.recurrent.problems import DELTA, SSD, Problem, judge, problem, relative

from sglang.srt.blocks.recurrent_state import reference

SHAPES = ((DELTA, (128, 128)), (SSD, (128, 64)))
"""Dims of a key and a value in Qwen3.5 and Nemotron 3; two heads of each."""


def in_fp32(given: Problem) -> Problem:
    names = ("q", "k", "v", "a", "b", "out")
    return replace(given, **{name: value.float() for name in names if (value := getattr(given, name)) is not None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32_768)
    tokens = parser.parse_args().tokens
    print("| rule | decay | state | outputs |\n|---|---|---|---|")
    for kind, dims in SHAPES:
        for decay in ("some", "none"):
            torch.manual_seed(0)
            given = problem(kind, (tokens,), (0,), (2, 2), dims, torch.bfloat16, decay=decay)
            out, states = in_fp32(given).extend(reference.recurrence_extend)
            exact_out, exact_states = judge(given)
            errors = relative(states[given.slots], exact_states[given.slots]), relative(out, exact_out)
            print(f"| {kind} | {decay} | {errors[0]:.1e} | {errors[1]:.1e} |", flush=True)


if __name__ == "__main__":
    main()
