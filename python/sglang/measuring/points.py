"""A point: a question with the ops that are timed for it, and its candidates. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.kernels.measured.records import Question, Record
from sglang.srt.kernels.spec import Tile
from sglang.srt.kernels.tile_configs import TileConfig
from sglang.tuning.ops import Op


@dataclass(frozen=True, slots=True)
class Candidate:
    """A kernel or tiles that may be chosen. `config`, `tile`, `kernel`: as in `bench.device_calls.Launch`; `predicted`:
    seconds of all ops of the point, None if nothing predicts them."""

    name: str
    config: TileConfig | None = None
    tile: Tile | None = None
    kernel: str = ""
    predicted: float | None = None


@dataclass(frozen=True, slots=True)
class Point:
    """`ops`: what is timed, one after the other; `candidates`: the tables' choice first; `value`: what the choice may
    be worth, the op's share of a step times the spread of the predictions."""

    question: Question
    ops: tuple[Op, ...]
    candidates: tuple[Candidate, ...]
    value: float = 0.0

    def record(self, candidate: Candidate, rounds: tuple[float, ...], problem: str = "") -> Record:
        """Returns the record of a candidate."""
        return Record(self.question, candidate.name, () if problem else rounds, candidate.predicted, problem)
