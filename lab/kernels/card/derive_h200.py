"""Writes the tables of times measured on an H200, from the rows of measured_h200.json.

    python lab/kernels/card/derive_h200.py

The least of this server's kernels and of those that the rows compare with. Sizes without a row are left out: these
tables hold for the sizes that they name, and between their tokens, contexts and bytes.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cells import Cells, Tables, grid, write

from sglang.tuning.measured import table_path
from sglang.tuning.ops import Experts, GatedDeltaRule, parse_shape
from sglang.tuning.sglang_times import expert_form

MEASURED = Path(__file__).with_name("measured_h200.json")
FORMS = {"bf16": "bf16", "fp8 128x128": "fp8_block", "fp8 per channel": "fp8", "int4, groups of 32": "int4"}
SOURCE = "this project's benchmarks on one NVIDIA H200 (two for all-reduce): rows of measured_h200.json"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=table_path("h200"))
    args = parser.parse_args(argv)
    tables = h200_tables()
    write(args.out, tables, SOURCE, "python lab/kernels/card/derive_h200.py")
    print(f"{args.out}: {len(tables)} tables, {args.out.stat().st_size:,} bytes")
    return 0


def h200_tables() -> Tables:
    return {**kit(), **attention(), **experts(), **all_reduce()}


def rows_of(what: str) -> list[list[Any]]:
    """Returns the rows of a table of measured_h200.json; its "columns" name their cells. Times are in microseconds."""
    rows: list[list[Any]] = json.loads(MEASURED.read_text())[what]["rows"]
    return rows


def attention() -> Tables:
    """GQA is 32 heads on 8 of dim 128, the latent's 128 heads; decoding `requests x context`."""
    shared: Cells = {}
    latent: Cells = {}
    prompts: Cells = {}
    for name, ours, peer in rows_of("attention"):
        shape = re.fullmatch(r"(extend|decode gqa|decode mla) (\d+)x(\d+)", name)
        if shape is None:
            continue
        batch, length, least = int(shape[2]), int(shape[3]), min(ours, peer)
        if shape[1] == "decode gqa":
            shared[8 * batch, length] = least
        elif shape[1] == "decode mla":
            latent[128, batch, length] = least
        elif batch == 1:
            prompts[32 * batch, length] = least
    streams, requests, contexts = (8, 128, 512, 2048), (1, 16, 64, 256), (1024, 8192, 32768)
    what = "bf16, least of this server's and SGLang 0.5.15's"
    return {
        "decode_attention/128/bf16": grid(shared, what, streams=streams, context=contexts),
        "decode_attention/latent/bf16": grid(latent, what, heads=(128,), batch=requests, context=contexts),
        "extend_attention/128/bf16": grid(prompts, what, streams=(32,), tokens=(8192,)),
    }


def experts() -> Tables:
    """Layers of one rank, top 8."""
    times: dict[str, Cells] = {}
    pattern = re.compile(r"E=(\d+) N=(\d+) H=(\d+) (.+)")
    for what, rows, ours, peer in rows_of("experts"):
        layer = pattern.fullmatch(what)
        assert layer is not None, what
        name = f"experts/{FORMS[layer[4]]}/{layer[3]}x{layer[1]}x8"
        times.setdefault(name, {})[int(layer[2]), rows] = min(ours, peer)
    tokens = (1, 8, 64, 512, 4096)
    return {
        name: grid(
            of_layer,
            "least of this server's and SGLang 0.5.15's",
            inter=sorted({i for i, _ in of_layer}),
            tokens=tokens,
        )
        for name, of_layer in times.items()
    }


def kit() -> Tables:
    """Layers of experts and recurrences of the owners' kit; what the other tables have besides is taken from those."""
    times: dict[str, Cells] = {}
    states: Cells = {}
    prompts: Cells = {}
    for shape, _, microseconds in rows_of("kit"):
        if not re.match(r"(fused_moe|gated_delta_rule) ", shape):
            continue
        op = parse_shape(shape)
        if isinstance(op, Experts):
            form = "fp8_block" if op.scheme == "fp8_block" else expert_form(op.scheme)
            layer = times.setdefault(f"experts/{form}/{op.hidden}x{op.num_experts}x{op.top_k}", {})
            layer[op.intermediate, op.tokens] = min(microseconds, layer.get((op.intermediate, op.tokens), math.inf))
        elif isinstance(op, GatedDeltaRule):
            (states if op.tokens == 1 else prompts)[op.heads, op.batch * op.tokens] = microseconds
    what = "this server's"
    layers = {
        name: grid(cells, what, inter=sorted({i for i, _ in cells}), tokens=sorted({t for _, t in cells}))
        for name, cells in times.items()
    }
    return layers | {
        "gated_delta_rule/decode": grid(states, what, heads=(32,), batch=(1, 16, 64, 256)),
        "gated_delta_rule/prompt": grid(prompts, what, heads=(32,), tokens=(8192,)),
    }


def all_reduce() -> Tables:
    """On two GPUs over NVLink, by bytes."""
    nccl: Cells = {}
    least: Cells = {}
    for kib, *ours, of_nccl in rows_of("all_reduce"):
        nccl[2, kib * 1024] = of_nccl
        least[2, kib * 1024] = min(time for time in (*ours, of_nccl) if time is not None)
    sizes = sorted({size for _, size in nccl})
    return {
        "all_reduce/nccl": grid(nccl, "NCCL, NVLink", cards=(2,), bytes=sizes),
        "all_reduce/best": grid(least, "least of this server's kernels and NCCL, NVLink", cards=(2,), bytes=sizes),
    }


if __name__ == "__main__":
    raise SystemExit(main())
