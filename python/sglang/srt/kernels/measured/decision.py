"""Which candidate measured times are for: another one than the tables' only beyond the noise of the measurement.

    decide(table, records_of_question) -> the Decision, or None where the tables' candidate was not timed

Candidates take turns in each round, so that a GPU that gets warmer is slower for all of them. A candidate wins if its
median lies further below that of the tables' than the rounds of either lie apart, and if it was faster in every round.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sglang.srt.kernels.measured.records import Record

MEASURED = "measured here"
"""How the reason of a choice by measured times begins."""
LEAST_ROUNDS = 3
MIN_GAIN = 0.01
"""What a choice must gain even where the rounds are alike: clocks of one GPU differ by as much from day to day."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The record of the chosen candidate, and of the tables'."""

    chosen: Record
    table: Record

    @property
    def changes(self) -> bool:
        """Returns whether another candidate than the tables' is chosen."""
        return self.chosen.candidate != self.table.candidate

    def __str__(self) -> str:
        text = f"{MEASURED}: {self.chosen}"
        return f"{text}; the table's took {self.table}" if self.changes else text


def decide(table: str, records: Mapping[str, Record]) -> Decision | None:
    """Returns the decision for one question. table: the candidate of the tables; records: by candidate, those that are
    possible. None where the tables' candidate was not timed: nothing else is then known to be faster."""
    table_record = records.get(table)
    if table_record is None or len(table_record.rounds) < LEAST_ROUNDS:
        return None
    faster = [record for record in records.values() if is_faster(record, table_record)]
    return Decision(
        min(faster, key=lambda record: (record.seconds, record.candidate), default=table_record), table_record
    )


def is_faster(record: Record, table: Record) -> bool:
    """Returns whether a candidate was faster than the tables' beyond noise."""
    if len(record.rounds) < LEAST_ROUNDS:
        return False
    needed = max(MIN_GAIN, record.noise, table.noise)
    in_turn = all(mine < other for mine, other in zip(record.rounds, table.rounds, strict=False))
    return in_turn and record.seconds * (1.0 + needed) < table.seconds
