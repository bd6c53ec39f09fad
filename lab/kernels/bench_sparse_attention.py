"""Sparse attention and its indexer, as one rank of DeepSeek-V3.2, GLM-5 and DeepSeek-V4 has them.

    python bench_sparse_attention.py                              # times beside what the GPU can do
    python bench_sparse_attention.py --check                      # results against torch first; exits 1 if one is wrong
    SGLANG_FORCE_ARCH=sm_120 python bench_sparse_attention.py     # with the tiles that sm_120 gets

Checks: queries; logits of contexts of 1 to 131,072 entries, for decoding and for prompts; the choice, to the entry;
attention over bfloat16 and packed latents and over two caches with sinks against fp64, within 2e-3 of its norm; and a
CUDA graph of all of it that is replayed with other lengths. Times are those of each kernel with its bytes a second
beside what a reduction reads, and for the logits of prompts operations beside those of a large product.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmark" / "kernels"))
from timing import copies_for, matmul_ceiling, read_ceiling, time_calls

from sglang.srt.hardware.arch import current_arch
from sglang.srt.kernels.tiles import attention_tiles
from sglang.srt.layers import native_sparse_ops as native
from sglang.srt.layers.attention.selection import EntryRows, Selection
from sglang.srt.layers.attention.triton_ops.index_logits import index_logits
from sglang.srt.layers.attention.triton_ops.select_entries import select_entries
from sglang.srt.layers.attention.triton_ops.sparse_attention import sparse_attention_fwd
from sglang.srt.layers.triton_ops.index_store import index_key_store, index_queries

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
MLA, V4 = (576, 512), (512, 512)
TOP_K, V4_TOP_K, V4_WINDOW, V4_RATE = 2048, 512, 128, 4
BOUND = 2e-3
LOGIT_BOUNDS = {"fp8_e4m3": 1e-3, "bfloat16": 1e-4}
"""Of the largest logit. Matrix units add products of e4m3 with fewer bits than fp32 has."""
CONTEXTS = (1024, 16_384, 131_072)
PROMPT_TOKENS = 2048
"""New tokens of the prompts that are timed, at the end of their context."""


def num_sms() -> int:
    return int(torch.cuda.get_device_properties(0).multi_processor_count) if DEVICE == "cuda" else 4


def tile(op: str, dims: tuple[int, int], cache: str, heads: int = 0) -> dict[str, int]:
    return dict(attention_tiles(op, *dims, cache, current_arch().features, heads)[0])


@dataclass
class Indexed:
    """Requests of `context` entries each with their index keys, and the last `new` tokens of each of them."""

    batch: int
    context: int
    new: int
    heads: int
    top_k: int
    cache: str = "fp8_e4m3"

    def __post_init__(self) -> None:
        slots = self.batch * self.context
        table = torch.randperm(slots, device=DEVICE).view(self.batch, self.context).int()
        requests = torch.arange(self.batch, device=DEVICE).repeat_interleave(self.new)
        last = torch.arange(self.context - self.new, self.context, device=DEVICE)
        self.rows = EntryRows(table, requests, (last + 1).int().repeat(self.batch), self.context, 1, self.new)
        dtype = E4M3 if self.cache == "fp8_e4m3" else BF16
        self.keys = torch.empty((slots, 1, native.INDEX_DIM), dtype=dtype, device=DEVICE)
        self.scales = torch.empty((slots, 1), device=DEVICE) if dtype == E4M3 else None
        for first in range(0, slots, 1 << 20):
            places = torch.arange(first, min(slots, first + (1 << 20)), device=DEVICE)
            keys = torch.randn((len(places), native.INDEX_DIM), device=DEVICE).to(BF16)
            index_key_store(keys, self.keys, self.scales, places)
        tokens = self.batch * self.new
        self.raw = torch.randn((tokens, self.heads, native.INDEX_DIM), device=DEVICE).to(BF16)
        self.raw_weights = torch.randn((tokens, self.heads), device=DEVICE)
        self.q, self.weights = index_queries(self.raw, self.raw_weights, (128 * self.heads) ** -0.5, dtype)
        self.logits = torch.empty((tokens, -(-self.context // 16) * 16), device=DEVICE)
        self.slots = torch.empty((tokens, self.top_k), dtype=torch.int32, device=DEVICE)
        self.chosen = torch.empty(tokens, dtype=torch.int32, device=DEVICE)
        self.tile = tile("sparse_indexer", (128, 128), self.cache)

    def score(self) -> None:
        index_logits(
            self.q, self.weights, self.keys, self.scales, self.rows, self.top_k, self.logits, tile=self.tile,
            num_sms=num_sms(),
        )  # fmt: skip

    def choose(self) -> None:
        select_entries(self.logits, self.rows, self.top_k, self.slots, self.chosen)

    @property
    def key_bytes(self) -> int:
        return self.batch * self.context * (128 * self.keys.element_size() + (4 if self.scales is not None else 0))

    @property
    def pairs(self) -> int:
        """Of a token and an entry that it sees."""
        return int(self.rows.counts.sum())


@dataclass
class Attended:
    """Tokens with a choice of `widths` entries of one cache or two."""

    tokens: int
    heads: int
    widths: Sequence[int]
    dims: tuple[int, int] = MLA
    packed: bool = False
    sinks: bool = False
    entries: int = 1 << 17

    def __post_init__(self) -> None:
        values = torch.randn((self.entries, self.dims[0]), device=DEVICE)
        if self.packed:
            stored = torch.cat([native.pack_latents(part) for part in values.split(1 << 16)])
        else:
            stored = values.to(BF16)
        self.sources = [(stored[:, None].clone(), self._selection(width)) for width in self.widths]
        self.q = torch.randn((self.tokens, self.heads, self.dims[0]), device=DEVICE).to(BF16)
        self.out = torch.empty((self.tokens, self.heads, self.dims[1]), dtype=BF16, device=DEVICE)
        self.sink = torch.randn(self.heads, device=DEVICE) if self.sinks else None
        cache = "fp8_e4m3" if self.packed else "bfloat16"
        self.tile = tile("sparse_attention", self.dims, cache, self.heads)

    def _selection(self, width: int) -> Selection:
        slots = torch.randint(0, self.entries, (self.tokens, width), dtype=torch.int32, device=DEVICE)
        return Selection(slots, torch.full((self.tokens,), width, dtype=torch.int32, device=DEVICE))

    def attend(self, out: torch.Tensor | None = None) -> None:
        sparse_attention_fwd(
            self.q, self.sources, self.out if out is None else out, scale=0.05, tile=self.tile, num_sms=num_sms(),
            sinks=self.sink,
        )  # fmt: skip

    @property
    def bytes(self) -> int:
        size = 656 if self.packed else 2 * self.dims[0]
        return self.tokens * (sum(self.widths) * size + self.heads * 2 * sum(self.dims))


# --- checks -----------------------------------------------------------------------------------------------------------

Result = tuple[str, bool, str]


def check_queries() -> Iterator[Result]:
    for heads in (32, 64):
        q, weights = torch.randn((513, heads, 128), device=DEVICE).to(BF16), torch.randn((513, heads), device=DEVICE)
        numbers, scaled = index_queries(q, weights, 0.1, E4M3)
        expected, expected_scaled = native.index_queries(q, weights, 0.1, E4M3)
        alike = (numbers.float() == expected.float()).float().mean().item()
        worst = ((scaled - expected_scaled).abs() / expected_scaled.abs().clamp(min=1e-6)).max().item()
        yield f"queries of {heads} heads", alike > 0.99 and worst < 1e-4, f"{alike:.4f} alike, weights off {worst:.1e}"


def check_choice(problem: Indexed) -> Iterator[Result]:
    """Logits against a product in fp32, of some rows; the choice against a stable sort of the same logits."""
    problem.logits.fill_(float("nan"))
    problem.score()
    problem.choose()
    name = f"{problem.batch} x {problem.context} entries, {problem.new} new, {problem.heads} heads, {problem.cache}"
    if problem.context > problem.top_k:
        tokens = len(problem.rows)
        worst = 0.0
        for row in {0, tokens // 2, tokens - 1}:
            some = problem.rows.part(slice(row, row + 1))
            q, weights = problem.q[row : row + 1], problem.weights[row : row + 1]
            if int(some.counts[0]) <= problem.top_k:
                continue
            expected = native.index_logits(q, weights, problem.keys, problem.scales, some)[0, : int(some.counts[0])]
            off = (problem.logits[row, : len(expected)] - expected).abs().max() / expected.abs().max()
            worst = max(worst, off.item())
        yield f"logits of {name}", worst < LOGIT_BOUNDS[problem.cache], f"off by {worst:.1e} of the largest"
    right = True
    for first in range(0, len(problem.rows), 64):
        part = slice(first, first + 64)
        some = problem.rows.part(part)
        expected = some.slots_of(
            native.top_entries(problem.logits[part, : problem.context], some.counts, problem.top_k)
        )
        right &= torch.equal(problem.slots[part], expected)
    counted = torch.equal(problem.chosen, problem.rows.counts.clamp(max=problem.top_k))
    yield f"choice of {name}", right and counted, "to the entry" if right else "other entries"


def check_attention(problem: Attended, lengths: Sequence[int]) -> Iterator[Result]:
    """Against fp64, with as many entries a token as `lengths` says, in turn."""
    exact = []
    for (cache, selection), width in zip(problem.sources, problem.widths, strict=True):
        counts = torch.tensor([lengths[i % len(lengths)] for i in range(problem.tokens)], device=DEVICE)
        selection.counts.copy_(counts.clamp(max=width))
        selection.slots[torch.rand(selection.slots.shape, device=DEVICE) < 0.05] = -1
        values = native.unpack_latents(cache[:, 0])[:, None] if problem.packed else cache
        exact.append((values, selection))
    out = torch.full(problem.out.shape, float("nan"), device=DEVICE)
    expected = torch.full(problem.out.shape, float("nan"), dtype=torch.float64, device=DEVICE)
    native.attend_selected(problem.q.double(), exact, expected, scale=0.05, sinks=problem.sink)
    problem.attend(out)
    off = ((out - expected).norm() / expected.norm()).item()
    name = (
        f"{problem.dims} {'packed' if problem.packed else 'bfloat16'}, {problem.heads} heads, {problem.tokens} tokens"
    )
    widths = " + ".join(map(str, problem.widths))
    yield f"attention {name}, {widths} entries", off < BOUND, f"off by {off:.1e}"


def check_graph() -> Iterator[Result]:
    """Lengths that were not those of the capture: what is replayed gives what is launched."""
    indexed = Indexed(4, 16_384, 1, 64, TOP_K)
    attended = Attended(4, 16, [TOP_K], entries=4 * 16_384)
    attended.sources[0] = (attended.sources[0][0], Selection(indexed.slots, indexed.chosen))

    def step() -> None:
        indexed.score()
        indexed.choose()
        attended.attend()

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for lens in ([5, 0, 2048, 2049], [16_384, 3000, 1, 9999]):
        indexed.rows.counts.copy_(torch.tensor(lens))
        graph.replay()
        replayed = (indexed.slots.clone(), attended.out.clone())
        indexed.slots.fill_(-7)
        attended.out.fill_(float("nan"))
        step()
        same = torch.equal(replayed[0], indexed.slots) and torch.equal(replayed[1], attended.out)
        yield f"a graph replayed with lengths {lens}", same, "the same bits" if same else "other bits"


def checks() -> Iterator[Result]:
    yield from check_queries()
    for context in (1, 1024, 2048, 2049, 16_384, 131_072):
        yield from check_choice(Indexed(3, context, 1, 64, TOP_K))
    yield from check_choice(Indexed(1, 1_000_000, 1, 32, TOP_K))
    yield from check_choice(Indexed(2, 16_384, 4, 32, TOP_K))
    yield from check_choice(Indexed(2, 8000, 1024, 64, TOP_K))
    yield from check_choice(Indexed(2, 5000, 300, 64, V4_TOP_K, "bfloat16"))
    lengths = (2048, 1, 0, 77, 1500)
    for heads in (8, 16, 32, 64, 128):
        for packed in (False, True):
            for tokens in (1, 16, 300):
                yield from check_attention(Attended(tokens, heads, [TOP_K], packed=packed), lengths[-tokens:])
        yield from check_attention(Attended(16, heads, [V4_WINDOW, V4_TOP_K], V4, sinks=True), (512, 128, 0, 9))
        yield from check_attention(Attended(300, heads, [V4_WINDOW, V4_TOP_K], V4, sinks=True), (512, 128, 0, 9))
    if DEVICE == "cuda":
        yield from check_graph()


def run_checks() -> bool:
    wrong = 0
    for name, right, what in checks():
        wrong += not right
        print(f"{'ok   ' if right else 'WRONG'} {name}: {what}", flush=True)
    print(f"{wrong} wrong\n")
    return wrong == 0


# --- times ------------------------------------------------------------------------------------------------------------


def microseconds(calls: Sequence[Callable[[], object]]) -> float:
    return time_calls(calls, minimum=4) * 1e6


def decode_table(read: float) -> None:
    print("decoding | logits us (of read) | choice us (of read) | attention us (of read) bf16 | packed")
    for batch in (1, 16, 64):
        for context in CONTEXTS:
            problem = Indexed(batch, context, 1, 64, TOP_K)
            problem.score()
            copies = [problem] if problem.key_bytes > 256 << 20 else [problem, Indexed(batch, context, 1, 64, TOP_K)]
            scores = microseconds([one.score for one in copies])
            choice = microseconds([problem.choose])
            cells = [cell(scores, problem.key_bytes, read), cell(choice, problem.pairs * 4, read)]
            for packed in (False, True):
                shape = Attended(batch, 16, [min(TOP_K, context)], packed=packed)
                attends = [shape.attend]
                attends += [
                    Attended(batch, 16, shape.widths, packed=packed).attend
                    for _ in range(copies_for(shape.bytes, maximum=4) - 1)
                ]
                cells.append(cell(microseconds(attends), shape.bytes, read))
            print(f"{batch:2} x {context:6} | {' | '.join(cells)}", flush=True)
            del problem, copies


def cell(time_us: float, size: int, ceiling: float) -> str:
    return f"{time_us:8.1f} ({size / time_us * 1e6 / ceiling:4.0%})"


def prompt_table(matmul: float, read: float) -> None:
    print(f"\nprompts: the last {PROMPT_TOKENS} tokens", end="")
    print(" | logits us (of e4m3 products) | choice us (of read) | attention us (of read)")
    for context in (2048, 16_384, 65_536):
        problem = Indexed(1, context, PROMPT_TOKENS, 64, TOP_K)
        problem.score()
        scores, choice = microseconds([problem.score]), microseconds([problem.choose])
        seen = int(problem.rows.counts[problem.rows.counts > TOP_K].sum())
        share = 2 * seen * 64 * 128 / scores * 1e6 / matmul
        cells = [f"{scores:9.1f} ({share:4.0%})", cell(choice, seen * 4, read)]
        for packed in (False, True):
            for heads in (16, 64):
                attended = Attended(PROMPT_TOKENS, heads, [TOP_K], packed=packed)
                name = f"{'packed' if packed else 'bf16'} {heads}"
                cells.append(f"{name}: {cell(microseconds([attended.attend]), attended.bytes, read)}")
        print(f"over {context:6} | {' | '.join(cells)}", flush=True)
        del problem


def v4_table(read: float) -> None:
    print(f"\nwindow of {V4_WINDOW} and {V4_TOP_K} compressed entries, with sinks | us (of read)")
    for heads in (16, 32, 64):
        for tokens in (1, 16, 64, PROMPT_TOKENS):
            shapes = [Attended(tokens, heads, [V4_WINDOW, V4_TOP_K], V4, sinks=True) for _ in range(2)]
            time_us = microseconds([shape.attend for shape in shapes])
            print(f"{heads:2} heads, {tokens:4} tokens | {cell(time_us, shapes[0].bytes, read)}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare results with torch before anything is timed")
    parser.add_argument("--no-times", action="store_true", help="nothing is timed")
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.check and not run_checks():
        return 1
    if not args.no_times:
        read, matmul = read_ceiling(), matmul_ceiling(E4M3)
        print(f"tiles of {current_arch().name}; read {read / 1e12:.2f} TB/s, e4m3 products {matmul / 1e12:.0f} TFLOP/s")
        decode_table(read)
        prompt_table(matmul, read)
        v4_table(read)
    return 0


if __name__ == "__main__":
    sys.exit(main())
