"""Block-sparse attention and its indexer, as one rank of MiniMax-M3 has them.

    python bench_block_attention.py                              # times beside what the GPU can do
    python bench_block_attention.py --check                      # results against torch first; exits 1 if one is wrong
    SGLANG_FORCE_ARCH=sm_120 python bench_block_attention.py     # with the tiles that sm_120 gets

Checks: scores of blocks of some tokens against products in fp32, the choice to the block, attention against fp64 within
3e-3 of its norm. Times are those of each kernel with its bytes a second beside what a reduction reads.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmark" / "kernels"))
from timing import read_ceiling, time_calls

from sglang.srt.blocks.block_selection import reference as native
from sglang.srt.blocks.block_selection.kernels.block_scores import block_scores
from sglang.srt.hardware.arch import current_arch
from sglang.srt.kernels.tiles import attention_tiles
from sglang.srt.layers import native_sparse_ops
from sglang.srt.layers.attention.selection import EntryRows, Selection
from sglang.srt.layers.attention.triton_ops.block_attention import block_attention_fwd
from sglang.srt.layers.attention.triton_ops.select_entries import select_entries

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16 = torch.bfloat16
DIM, BLOCK, TOP_BLOCKS, GROUP = 128, 128, 16, 16
BOUND, SCORE_BOUND = 3e-3, 1e-4
CONTEXTS = (4096, 16_384, 131_072)
PROMPT_TOKENS = 2048
"""New tokens of the prompts that are timed, at the end of their context."""
CACHES = {"bfloat16": BF16, "fp8_e4m3": torch.float8_e4m3fn}


def num_sms() -> int:
    return int(torch.cuda.get_device_properties(0).multi_processor_count) if DEVICE == "cuda" else 4


def tile(op: str, cache: str) -> dict[str, int]:
    return dict(attention_tiles(op, DIM, DIM, cache, current_arch().features, GROUP)[0])


@dataclass
class Problem:
    """Requests of `context` tokens each, a multiple of a block, and the last `new` tokens of each of them, on a rank
    with `kv_heads` KV heads."""

    batch: int
    context: int
    new: int
    kv_heads: int
    cache: str = "bfloat16"

    def __post_init__(self) -> None:
        per_request, slots = self.context // BLOCK, self.batch * self.context
        places = torch.randperm(self.batch * per_request, device=DEVICE).view(self.batch, per_request, 1)
        table = (places * BLOCK + torch.arange(BLOCK, device=DEVICE)).flatten(1).int()
        requests = torch.arange(self.batch, device=DEVICE).repeat_interleave(self.new)
        lens = torch.arange(self.context - self.new, self.context, device=DEVICE).int() + 1
        self.rows = EntryRows(table, requests, lens.repeat(self.batch), self.context, run=self.new)
        self.blocks = self.rows.blocks(BLOCK, self.kv_heads)
        tokens = self.batch * self.new
        self.index_q = torch.randn((tokens, self.kv_heads, DIM), device=DEVICE).to(BF16)
        self.index_keys = torch.randn((slots, 1, DIM), device=DEVICE).to(BF16)
        self.q = torch.randn((tokens, self.kv_heads * GROUP, DIM), device=DEVICE).to(BF16)
        shape = (slots, self.kv_heads, DIM)
        self.k, self.v = (torch.randn(shape, device=DEVICE).to(CACHES[self.cache]) for _ in "kv")
        columns = -(-per_request // 16) * 16
        self.scores = torch.empty((tokens, self.kv_heads, columns), device=DEVICE)
        rows = tokens * self.kv_heads
        slots_of_rows = torch.empty((rows, TOP_BLOCKS), dtype=torch.int32, device=DEVICE)
        self.selection = Selection(slots_of_rows, torch.empty(rows, dtype=torch.int32, device=DEVICE))
        self.out = torch.empty_like(self.q)

    def score(self) -> None:
        block_scores(
            self.index_q, self.index_keys, self.rows, BLOCK, TOP_BLOCKS, 1, self.scores,
            tile=tile("block_indexer", "bfloat16"), num_sms=num_sms(),
        )  # fmt: skip

    def choose(self) -> None:
        selection = self.selection
        select_entries(self.scores.flatten(0, 1), self.blocks, TOP_BLOCKS, selection.slots, selection.counts)

    def attend(self) -> None:
        block_attention_fwd(
            self.q, self.k, self.v, self.selection, self.rows.counts, BLOCK, self.out, scale=DIM**-0.5,
            tile=tile("block_attention", self.cache), num_sms=num_sms(),
        )  # fmt: skip

    @property
    def key_bytes(self) -> int:
        return self.batch * self.context * DIM * 2

    @property
    def attended_bytes(self) -> int:
        """Of what each token reads, whether or not others read it too."""
        tokens = self.batch * self.new * self.kv_heads
        return tokens * (min(self.context, TOP_BLOCKS * BLOCK) * 2 * DIM * self.k.element_size() + GROUP * DIM * 4)


Result = tuple[str, bool, str]


def check(problem: Problem) -> Iterator[Result]:
    name = f"{problem.batch} x {problem.context}, {problem.new} new, {problem.kv_heads} KV heads, {problem.cache}"
    problem.score()
    problem.choose()
    problem.attend()
    tokens, worst, right = len(problem.rows), 0.0, True
    for first in sorted({0, tokens // 2, tokens - 1}):
        part = slice(first, first + 1)
        some, lines = problem.rows.part(part), slice(first * problem.kv_heads, (first + 1) * problem.kv_heads)
        blocks = problem.blocks.part(lines)
        seen = int(blocks.counts[0])
        want = native.block_scores(problem.index_q[part], problem.index_keys, some, BLOCK, 1)[..., : seen - 1]
        if seen > TOP_BLOCKS:
            got = problem.scores[part, :, : seen - 1]
            worst = max(worst, ((got - want).abs().max() / want.abs().max()).item())
        chosen = native_sparse_ops.top_entries(problem.scores[part].flatten(0, 1), blocks.counts, TOP_BLOCKS)
        right &= torch.equal(problem.selection.slots[lines], blocks.slots_of(chosen))
    yield f"scores of {name}", worst < SCORE_BOUND, f"off by {worst:.1e} of the largest"
    yield f"choice of {name}", right, "to the block" if right else "other blocks"
    want = torch.empty(problem.out.shape, dtype=torch.float64, device=DEVICE)
    native_sparse_ops.attend_blocks(
        problem.q.double(), problem.k, problem.v, problem.selection, problem.rows.counts, BLOCK, want, scale=DIM**-0.5
    )
    off = ((problem.out - want).norm() / want.norm()).item()
    yield f"attention of {name}", off < BOUND, f"off by {off:.1e}"


def run_checks() -> bool:
    wrong = 0
    for cache in CACHES:
        for sizes in ((3, 1024, 1, 4), (3, 4096, 1, 1), (2, 16_384, 3, 2), (2, 8192, 200, 4), (1, 131_072, 1, 1)):
            for name, right, what in check(Problem(*sizes, cache)):
                wrong += not right
                print(f"{'ok   ' if right else 'WRONG'} {name}: {what}", flush=True)
    print(f"{wrong} wrong\n")
    return wrong == 0


def cell(calls: Sequence[Callable[[], object]], size: int, ceiling: float) -> str:
    time_us = time_calls(calls, minimum=4) * 1e6
    return f"{time_us:8.1f} ({size / time_us * 1e6 / ceiling:4.0%})"


def table(read: float) -> None:
    print("requests x context, new | cache | scores us (of read) | choice us | attention us (of read)")
    shapes = [(batch, context, 1) for batch in (1, 16, 64) for context in CONTEXTS]
    shapes += [(1, context, PROMPT_TOKENS) for context in CONTEXTS]
    for batch, context, new in shapes:
        for cache in CACHES:
            problem = Problem(batch, context, new, 1, cache)
            problem.score()
            problem.choose()
            cells = (
                cell([problem.score], problem.key_bytes, read),
                cell([problem.choose], problem.scores.numel() * 4, read),
                cell([problem.attend], problem.attended_bytes, read),
            )
            print(f"{batch:2} x {context:6}, {new:4} | {cache:8} | {' | '.join(cells)}", flush=True)
            del problem


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare results with torch before anything is timed")
    parser.add_argument("--no-times", action="store_true", help="nothing is timed")
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.check and not run_checks():
        return 1
    if not args.no_times:
        read = read_ceiling()
        print(f"tiles of {current_arch().name}; read {read / 1e12:.2f} TB/s")
        table(read)
    return 0


if __name__ == "__main__":
    sys.exit(main())
