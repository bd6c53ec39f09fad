"""Times of kernels and tiles that were measured on an owner's GPU, as they are kept in a file. No torch, no Triton.

A question is one op of one size in steps of up to so many tokens; a record is what one candidate took for it, round by
round. A file holds the records of one `Setting`. It is read strictly: what does not parse is no record.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Annotated

import msgspec

FORM = 1
"""The form of a file; one of another form is not read."""
MAX_TEXT = 4096

_Text = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_TEXT)]
_Seconds = Annotated[float, msgspec.Meta(gt=0, lt=60)]


class Setting(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where and with what was measured: records count only where all of it is the same. `kernels`: hash of the ledger,
    which changes with every kernel; clocks and power limit as in `GpuSettings`."""

    gpu: _Text
    driver: _Text
    triton: _Text
    torch: _Text
    version: _Text
    kernels: _Text
    power_limit: _Text
    clocks: _Text


class Question(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a choice is made for. `op` as in Need, `scheme` that of the weights or the dtypes, `sizes` those of a rank;
    `tokens`: the largest step that the choice is for, and the one that was timed; 0: steps of any size."""

    op: _Text
    scheme: _Text
    sizes: _Text
    tokens: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)] = 0


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one candidate (`candidates.candidate_name`) took for a question: seconds of each round, in the order of the
    rounds, and the predicted ones. `problem`: why it cannot be chosen, which has no rounds."""

    question: Question
    candidate: _Text
    rounds: Annotated[tuple[_Seconds, ...], msgspec.Meta(max_length=64)] = ()
    predicted: _Seconds | None = None
    problem: Annotated[str, msgspec.Meta(max_length=MAX_TEXT)] = ""

    @property
    def seconds(self) -> float:
        """Returns the median of the rounds; inf without any."""
        return statistics.median(self.rounds) if self.rounds else math.inf

    @property
    def noise(self) -> float:
        """Returns how far the slowest round lies above the fastest one, as a share of it."""
        return max(self.rounds) / min(self.rounds) - 1.0 if self.rounds else 0.0

    def __str__(self) -> str:
        if self.problem or not self.rounds:
            return self.problem or "not timed"
        predicted = "" if self.predicted is None else f", predicted {_us(self.predicted)}"
        return f"{_us(self.seconds)} us{predicted}"


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:,.0f}" if seconds >= 1e-5 else f"{seconds * 1e6:.1f}"


Records = Mapping[tuple[Question, str], Record]
"""Records by question and candidate."""


class RecordFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a file. `provenance`: who measured it and when, of a table of the repository."""

    form: int
    setting: Setting
    records: tuple[Record, ...] = ()
    provenance: Annotated[str, msgspec.Meta(max_length=MAX_TEXT)] = ""


def by_key(file: RecordFile) -> Records:
    """Returns the records by question and candidate; of two equal ones the later."""
    return {(record.question, record.candidate): record for record in file.records}


def to_bytes(setting: Setting, records: Records, provenance: str = "") -> bytes:
    """Returns the content of a file, for people, too."""
    ordered = [records[key] for key in sorted(records, key=lambda key: (msgspec.structs.astuple(key[0]), key[1]))]
    file = RecordFile(FORM, setting, tuple(ordered), provenance)
    return msgspec.json.format(msgspec.json.encode(file), indent=1) + b"\n"


def from_bytes(content: bytes) -> RecordFile:
    """Returns the content of a file. Raises ValueError where it is not one of this form."""
    file = msgspec.json.decode(content, type=RecordFile)  # its errors are ValueErrors
    if file.form != FORM:
        raise ValueError(f"a file of form {file.form}, where {FORM} is read")
    for record in file.records:
        if bool(record.rounds) == bool(record.problem):
            raise ValueError(f"{record.question.op}, {record.candidate}: neither times nor a problem, or both")
    return file
