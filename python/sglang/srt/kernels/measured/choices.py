"""What a plan takes from measured times: a decision for each question that was measured here."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from sglang.srt.kernels.measured.decision import Decision, decide
from sglang.srt.kernels.measured.records import Question, Record, Records


@dataclass(frozen=True)
class MeasuredChoices:
    """The records of one setting, by question and candidate."""

    by_question: Mapping[Question, Mapping[str, Record]] = field(default_factory=dict)

    @staticmethod
    def of(records: Records) -> MeasuredChoices:
        """Returns the choices of some records."""
        by_question: dict[Question, dict[str, Record]] = {}
        for (question, candidate), record in records.items():
            by_question.setdefault(question, {})[candidate] = record
        return MeasuredChoices(by_question)

    def decision(self, question: Question, table: str, possible: Collection[str]) -> Decision | None:
        """Returns the decision for a question; None if it was not measured. table: the candidate of the tables;
        possible: all that may be chosen, by which a record of anything else does not count."""
        records = self.by_question.get(question, {})
        names = {table, *possible}
        return decide(table, {name: record for name, record in records.items() if name in names})


NOT_MEASURED = MeasuredChoices()
"""The choices of a GPU on which nothing was measured."""
