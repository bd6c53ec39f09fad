"""Writes the tables of times measured on an H200, from this project's pages of results.

    python lab/kernels/card/derive_h200.py

The least of this server's kernels and of those that the pages compare with. Sizes that no page has are left out: these
tables hold for the sizes that they name, and between their tokens, contexts and bytes.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from cells import Cells, Tables, grid, write

from sglang.tuning.measured import table_path
from sglang.tuning.ops import Experts, GatedDeltaRule, parse_shape
from sglang.tuning.sglang_times import expert_form

RESULTS = Path(__file__).parents[3] / "benchmark" / "results"
ATTENTION, EXPERTS, ALL_REDUCE, CARD_RUN = (
    RESULTS / f"{name}.md"
    for name in (
        "2026-11-21-attention-h200",
        "2026-11-21-h200-moe",
        "2026-11-22-all-reduce-h200",
        "2026-11-22-card-h200",
    )
)
FORMS = {"bf16": "bf16", "fp8 128x128": "fp8_block", "fp8 per channel": "fp8", "int4, groups of 32": "int4"}
SOURCE = "this project's benchmarks on one NVIDIA H200 (two for all-reduce), benchmark/results/: " + ", ".join(
    page.name for page in (ATTENTION, EXPERTS, ALL_REDUCE, CARD_RUN)
)


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


def rows_of(page: Path) -> Iterator[list[str]]:
    """Cells of every row of every table."""
    for line in page.read_text().splitlines():
        if line.startswith("| "):
            yield [cell.strip() for cell in line.strip().strip("|").split("|")]


def attention() -> Tables:
    """GQA is 32 heads on 8 of dim 128, the latent's 128 heads; decoding `requests x context`."""
    shared: Cells = {}
    latent: Cells = {}
    prompts: Cells = {}
    for cells in rows_of(ATTENTION):
        shape = re.fullmatch(r"(extend|decode gqa|decode mla) (\d+)x(\d+)", cells[0])
        if shape is None:
            continue
        batch, length, least = int(shape[2]), int(shape[3]), min(float(cells[1]), float(cells[4]))
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
    for cells in rows_of(EXPERTS):
        layer = pattern.fullmatch(cells[0])
        if layer is None or len(cells) != 9 or layer[4] not in FORMS:
            continue
        least = min(float(cells[2]), float(cells[5]))
        name = f"experts/{FORMS[layer[4]]}/{layer[3]}x{layer[1]}x8"
        times.setdefault(name, {})[int(layer[2]), int(cells[1])] = least
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
    """Layers of experts and recurrences of the owners' kit; what the other pages have besides is taken from those."""
    times: dict[str, Cells] = {}
    states: Cells = {}
    prompts: Cells = {}
    for cells in rows_of(CARD_RUN):
        shape = cells[0].strip("`")
        if not re.match(r"(fused_moe|gated_delta_rule) ", shape):
            continue
        op, microseconds = parse_shape(shape), float(cells[2])
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
    """On two GPUs over NVLink; `KiB | copy | packed | one shot | two shot | NCCL | ratio`."""
    nccl: Cells = {}
    least: Cells = {}
    for cells in rows_of(ALL_REDUCE):
        size = cells[0].replace(",", "")
        if len(cells) == 7 and size.isdecimal():
            nccl[2, int(size) * 1024] = float(cells[5])
            least[2, int(size) * 1024] = min(float(cell) for cell in cells[2:6] if cell != "-")
    sizes = sorted({size for _, size in nccl})
    return {
        "all_reduce/nccl": grid(nccl, "NCCL, NVLink", cards=(2,), bytes=sizes),
        "all_reduce/best": grid(least, "least of this server's kernels and NCCL, NVLink", cards=(2,), bytes=sizes),
    }


if __name__ == "__main__":
    raise SystemExit(main())
