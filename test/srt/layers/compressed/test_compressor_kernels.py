"""Compressors: the kernels against entries that are computed of whole texts in fp64, and against plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import interpreter
import pytest
import torch
from pairs import some_of

from sglang.srt.blocks.compressed import reference as native
from sglang.srt.blocks.compressed.compressor_kernels import CompressorKernels
from sglang.srt.blocks.compressed.kernels.compressor import KV_COMPRESSOR

DEVICE = interpreter.DEVICE
EPS = 1e-6
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
SLOTS, LENGTH = 6, 64
OVERLAPPING, ALONE, PLAIN, MEANS = (4, 2), (8, 1), (2, 1), (4, 1)
"""(rate, runs that an entry is made of); entries of PLAIN are neither normed nor rotated, and those of MEANS are means,
whose tokens have angles of their own in place of gates."""


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@dataclass
class Texts:
    """A text for each of the request slots 1 .. SLOTS - 1, whose tokens have made values and gates, and a compressor
    with its caches. The cache slot of position p of request r is r * length + p, in pages of whole entries."""

    rate: int
    runs: int
    dim: int = 16
    rot: int = 8
    length: int = LENGTH
    kernels: CompressorKernels = KV_COMPRESSOR
    rows: torch.Tensor = field(init=False)  # [SLOTS, length, 2, W]
    state: torch.Tensor = field(init=False)
    cache: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        width = self.runs * self.dim
        self.rows = torch.randn(SLOTS, self.length, 2, width).to(DEVICE)
        self.bias, self.weight = torch.randn(self.rate, width).to(DEVICE), torch.rand(self.dim).to(DEVICE) + 0.5
        angles = torch.rand(self.length, self.rot // 2) * 6.28
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1).to(DEVICE)
        if self.means:
            angles = torch.rand(SLOTS, self.length, self.rot // 2) * 6.28
            self.rows[:, :, 1, : self.rot] = torch.cat((angles.cos(), angles.sin()), dim=-1).to(DEVICE)
        self.state = torch.zeros(SLOTS, self.runs * self.rate, 2, width, device=DEVICE)
        self.cache = torch.full((SLOTS * self.length // self.rate, 1, self.dim), 9.0, device=DEVICE)

    @property
    def plain(self) -> bool:
        return (self.rate, self.runs) == PLAIN

    @property
    def means(self) -> bool:
        return (self.rate, self.runs) == MEANS

    def step(self, spans: Sequence[tuple[int, int, int]], keep: bool = True, padding: Sequence[int] = ()) -> None:
        """New tokens [first, stop) of requests; `padding`: positions of rows of slot 0 behind them."""
        slots = [slot for slot, first, stop in spans for _ in range(first, stop)] + [0] * len(padding)
        positions = [p for _, first, stop in spans for p in range(first, stop)] + list(padding)
        firsts = [first for _, first, stop in spans for _ in range(first, stop)] + list(padding)
        stops = [stop for _, first, stop in spans for _ in range(first, stop)] + [p + 1 for p in padding]
        of = {"slots": slots, "positions": positions, "firsts": firsts, "stops": stops}
        self.token = {name: torch.tensor(values, dtype=torch.int64, device=DEVICE) for name, values in of.items()}
        slot, position = self.token["slots"], self.token["positions"]
        self.new = self.rows[slot, position].contiguous()
        loc = torch.where(slot > 0, slot * self.length + position, 0)
        bias, cos_sin = (None, None) if self.means else (self.bias, self.cos_sin)
        norm = (None, 0.0, None) if self.plain else (self.weight, EPS, cos_sin)
        firsts, angles = self.token["firsts"], self.rot if self.means else 0
        self.kernels.compress(self.new, bias, self.state, slot, position, firsts, *norm, self.cache, loc, angles=angles)
        if keep:
            self.kernels.keep(self.new, self.state, slot, position, self.token["stops"])

    def entry(self, slot: int, number: int) -> torch.Tensor:
        """[dim] in fp64, of the whole text."""
        last = (number + 1) * self.rate
        values, gates = [], []
        for run in range(self.runs):
            first = last - (self.runs - run) * self.rate
            if first >= 0:
                columns = slice(run * self.dim, (run + 1) * self.dim)
                part = self.rows[slot, first : first + self.rate, :, columns].double()
                values.append(part[:, 0])
                gates.append(part[:, 1] + self.bias[:, columns].double())
        shares = torch.cat(gates).softmax(0)
        mixed = torch.cat(values).mean(0) if self.means else (shares * torch.cat(values)).sum(0)
        if self.plain:
            return mixed
        mixed = mixed / (mixed.square().mean() + EPS).sqrt() * self.weight.double()
        row = self.rows[slot, last - self.rate, 1, : self.rot] if self.means else self.cos_sin[last - self.rate]
        cos, sin = row.double().chunk(2)
        first, second = mixed[-self.rot :: 2].clone(), mixed[-self.rot + 1 :: 2].clone()
        mixed[-self.rot :: 2], mixed[-self.rot + 1 :: 2] = first * cos - second * sin, second * cos + first * sin
        return mixed

    def check(self, lengths: dict[int, int]) -> None:
        """Complete runs have entries, and nothing else has been written but the padding."""
        for slot in range(1, SLOTS):
            entries = self.cache[slot * self.length // self.rate :][: self.length // self.rate, 0].double()
            complete = lengths.get(slot, 0) // self.rate
            for number in range(complete):
                torch.testing.assert_close(entries[number], self.entry(slot, number), **CLOSE)
            assert (entries[complete:] == 9).all()
        assert not self.state[0].any(), "padding leaves nothing"
        unused = [slot for slot in range(SLOTS) if slot not in lengths]
        assert not self.state[unused].any()


def texts(form: tuple[int, int], **sizes: int) -> Texts:
    return Texts(*form, **sizes)


FORMS = pytest.mark.parametrize("form", [OVERLAPPING, ALONE, PLAIN, MEANS])


@interpreter.kernel_test
@FORMS
def test_every_cut_and_then_token_by_token(form: tuple[int, int]) -> None:
    """A prompt in two parts, cut at every offset of a run and beyond two runs, behind which tokens are decoded."""
    for cut in (*range(1, 9), 11, 16, 17):
        given = texts(form)
        given.step([(1, 0, cut)])
        given.step([(1, cut, 21)])
        for position in range(21, 26):
            given.step([(1, position, position + 1)])
        given.check({1: 26})


@interpreter.kernel_test
@FORMS
def test_requests_of_all_kinds_in_one_step(form: tuple[int, int]) -> None:
    """Decoding ones, prompts with and without a prefix, and padding at each place of a run."""
    given = texts(form)
    given.step([(1, 0, 15), (2, 0, 30)], padding=(0,))
    given.step([(1, 15, 16), (2, 30, 31), (4, 0, 33), (3, 0, 1)], padding=range(16))
    given.step([(2, 31, 32), (3, 1, 2), (1, 16, 40), (4, 33, 35)])
    given.check({1: 40, 2: 32, 3: 2, 4: 35})


@interpreter.kernel_test
@FORMS
def test_draft_tokens_are_taken_back(form: tuple[int, int]) -> None:
    """Of five verified tokens of each of three requests some stand: what is kept, and made of it, is as if the others
    had never come. Entries that they completed are written again before anybody sees them."""
    width = 5
    for begin in range(3, 3 + form[0]):
        given = texts(form)
        lengths = {1: begin, 2: begin + 1, 3: begin + 2}
        given.step([(slot, 0, length) for slot, length in lengths.items()])
        for counts in ((1, 5, 0), (4, 2, 3)):
            given.step([(slot, length, length + width) for slot, length in lengths.items()], keep=False)
            stands = torch.tensor(counts, device=DEVICE).repeat_interleave(width)
            token, firsts = given.token, given.token["firsts"]
            given.kernels.keep(given.new, given.state, token["slots"], token["positions"], firsts + stands)
            lengths = {slot: length + count for (slot, length), count in zip(lengths.items(), counts, strict=True)}
        for slot, length in lengths.items():
            given.step([(slot, length, length + 9)])
            made = given.cache[slot * LENGTH // given.rate :][: (length + 9) // given.rate, 0].double()
            for number, entry in enumerate(made):
                torch.testing.assert_close(entry, given.entry(slot, number), **CLOSE)


@interpreter.kernel_test
@pytest.mark.parametrize(
    ("dtype", "form", "dim"),
    some_of(
        [
            (dtype, *size)
            for dtype in (torch.bfloat16, torch.float32)
            for size in (((4, 2), 512), ((4, 2), 128), ((128, 1), 512))
        ],
        {(torch.bfloat16, (4, 2), 512), (torch.float32, (128, 1), 512)},
    ),
)
def test_published_sizes(form: tuple[int, int], dim: int, dtype: torch.dtype) -> None:
    """The window of 128 tokens that begins in one step and ends in a later one; and what plain torch makes of it."""
    results = []
    for kernels in (KV_COMPRESSOR, native.KV_COMPRESSOR):
        torch.manual_seed(1)
        given = Texts(*form, dim=dim, rot=64, length=256, kernels=kernels)
        given.cache = given.cache.to(dtype)
        given.step([(1, 0, 125), (2, 0, 3)])
        given.step([(1, 125, 128), (2, 3, 9)])
        given.step([(1, 128, 129), (2, 9, 10)])
        given.state[0] = 0.0
        results.append((given.cache.float(), given.state))
    close = CLOSE if dtype is torch.float32 else {"rtol": 2**-7, "atol": 2**-9}
    torch.testing.assert_close(results[0][0], results[1][0], **close)
    assert torch.equal(results[0][1], results[1][1])


@interpreter.kernel_test
def test_gates_of_any_size() -> None:
    """A softmax of numbers whose exponentials are not finite."""
    given = texts(OVERLAPPING)
    given.rows[:, :, 1] *= 500.0
    given.step([(1, 0, 30)])
    given.check({1: 30})


@interpreter.kernel_test
def test_no_tokens() -> None:
    texts(OVERLAPPING).step([])


@pytest.mark.gpu
@pytest.mark.parametrize(("form", "dim"), [((4, 2), 512), ((4, 2), 128), ((128, 1), 512)])
def test_long_prompts(form: tuple[int, int], dim: int) -> None:
    given = Texts(*form, dim=dim, rot=64, length=16384)
    given.step([(1, 0, 8192), (2, 0, 5)])
    given.step([(1, 8192, 12001), (2, 5, 4000)])
    given.check({1: 12001, 2: 4000})


@interpreter.in_two_parts
def test_in_interpreter(part: str) -> None:
    interpreter.run_file(__file__, part)
